use proptest::{collection::vec, prelude::*};
use prost::Message;

use super::*;
use crate::protocol::{json::testing::any_request, messages::InferTensorContents as Contents};

/// Returns the message of a request with one input `x`.
fn one(
    datatype: &str,
    shape: &[i64],
    contents: Option<Contents>,
    raw: &[&'static [u8]],
) -> ModelInferRequest {
    let input = request::InferInputTensor {
        name: "x".into(),
        datatype: datatype.into(),
        shape: shape.into(),
        contents,
        ..Default::default()
    };
    ModelInferRequest {
        inputs: vec![input],
        raw_input_contents: raw.iter().map(|part| Bytes::from_static(part)).collect(),
        ..Default::default()
    }
}

fn check_refused(message: ModelInferRequest, expected: &str) {
    assert_eq!(decode(message), Err(InferError::Invalid(expected.into())));
}

fn parameter(name: &str, choice: ParameterChoice) -> HashMap<String, InferParameter> {
    let parameter_choice = Some(choice);
    HashMap::from([(name.into(), InferParameter { parameter_choice })])
}

fn ints(values: &[i32]) -> Option<Contents> {
    Some(Contents {
        int_contents: values.into(),
        ..Default::default()
    })
}

fn uints(values: &[u32]) -> Option<Contents> {
    Some(Contents {
        uint_contents: values.into(),
        ..Default::default()
    })
}

#[test]
fn elements_are_not_copied() {
    let raw = Bytes::from_static(b"12345678");
    let mut message = one("FP32", &[1, 2], None, &[]);
    message.raw_input_contents = vec![raw.clone()];
    let request = decode(message).unwrap();
    assert_eq!(request.inputs[0].bytes.as_ptr(), raw.as_ptr());
    assert_eq!(request.inputs[0].shape, [1, 2]);
}

#[test]
fn elements_that_do_not_fit_are_refused() {
    let raw = Some(Contents {
        fp32_contents: vec![1.0],
        ..Default::default()
    });
    let cases = [
        (
            one("UINT8", &[2], uints(&[1, 256]), &[]),
            "element 1 is 256, and UINT8 has integers from 0 to 255",
        ),
        (
            one("INT8", &[1], ints(&[-129]), &[]),
            "element 0 is -129, and INT8 has integers from -128 to 127",
        ),
        (
            one("INT16", &[1], ints(&[32768]), &[]),
            "element 0 is 32768, and INT16 has integers from -32768 to 32767",
        ),
        (
            one("INT32", &[2, 2], ints(&[1, 2, 3]), &[]),
            "`int_contents` has 3 elements, and by the shape [2, 2] it must have 4",
        ),
        (
            one("FP32", &[1], ints(&[1]), &[]),
            "elements of type FP32 belong in `fp32_contents`, and there are some in `int_contents`",
        ),
        (
            one("BF16", &[1], raw.clone(), &[]),
            "elements of type BF16 belong in `raw_input_contents`, and there are some in `fp32_contents`",
        ),
        (
            one("FP32", &[1], raw, &[b"1234"]),
            "there are both `contents` and `raw_input_contents`; one is possible",
        ),
        (
            one("FP32", &[1], None, &[]),
            "there are no elements, in `contents` or in `raw_input_contents`",
        ),
        (
            one("FP32", &[1, 64], None, &[b"1234"]),
            "the binary part has 4 bytes, and a tensor of type FP32 and shape [1, 64] has 256",
        ),
        (
            one("BOOL", &[1], None, &[b"\x02"]),
            "element 0 is the byte 2, and BOOL has the bytes 0 and 1",
        ),
        (
            one("FP32", &[-1], None, &[b""]),
            "the shape [-1] has a negative size",
        ),
        (
            one("FP32", &[1; 17], None, &[b"1234"]),
            "the shape has 17 dimensions, and at most 16 are possible",
        ),
    ];
    for (message, expected) in cases {
        check_refused(message, &format!("input `x`: {expected}"));
    }
}

#[test]
fn requests_that_break_a_rule_are_refused() {
    let valid = one("INT8", &[1], None, &[b"1"]);
    let with = |change: fn(&mut ModelInferRequest)| {
        let mut message = valid.clone();
        change(&mut message);
        message
    };
    let cases = [
        (
            with(|it| it.id = "i".repeat(257)),
            "the id has 257 bytes, and at most 256 are possible",
        ),
        (
            with(|it| it.raw_input_contents.push(Bytes::new())),
            "the request has 1 inputs, and 2 parts in `raw_input_contents`",
        ),
        (
            with(|it| it.inputs.push(it.inputs[0].clone())),
            "the request has the input `x` twice",
        ),
        (
            with(|it| it.parameters = parameter("timeout", ParameterChoice::Int64Param(-1))),
            "the parameter `timeout` is -1, and must be a number of microseconds",
        ),
        (
            with(|it| {
                it.parameters = parameter("timeout", ParameterChoice::StringParam("5 s".into()))
            }),
            "the parameter `timeout` is `5 s`, and must be a number of microseconds",
        ),
        (
            with(|it| {
                it.inputs[0].parameters = parameter(
                    "shared_memory_region",
                    ParameterChoice::StringParam("r".into()),
                );
            }),
            "input `x`: the parameter `shared_memory_region` is not supported; send tensors in the request, and get them \
             in the answer",
        ),
        (
            with(|it| {
                it.outputs = vec![request::InferRequestedOutputTensor {
                    name: "y".into(),
                    parameters: parameter("classification", ParameterChoice::Int64Param(3)),
                }];
            }),
            "output `y`: the parameter `classification` is not supported; request the scores, and sort them",
        ),
    ];
    for (message, expected) in cases {
        check_refused(message, expected);
    }
    let millisecond = std::time::Duration::from_millis(1);
    let timeouts = [
        (ParameterChoice::Int64Param(1000), Some(millisecond)),
        (ParameterChoice::Uint64Param(1000), Some(millisecond)),
        (ParameterChoice::Int64Param(0), None),
    ];
    for (choice, expected) in timeouts {
        let mut message = valid.clone();
        message.parameters = parameter("timeout", choice);
        assert_eq!(decode(message).unwrap().timeout, expected);
    }
}

#[test]
fn an_answer_has_its_elements_as_bytes() {
    let output = |is_binary| OutputTensor {
        name: "y".into(),
        datatype: DataType::Int8,
        shape: vec![1, 2],
        bytes: Bytes::from_static(b"ab"),
        is_binary,
    };
    let tensor = response::InferOutputTensor {
        name: "y".into(),
        datatype: "INT8".into(),
        shape: vec![1, 2],
        ..Default::default()
    };
    let answer = encode(InferResponse {
        model: "m".into(),
        version: "1".into(),
        id: "7".into(),
        outputs: vec![output(true), output(false)],
    });
    let expected = ModelInferResponse {
        model_name: "m".into(),
        model_version: "1".into(),
        id: "7".into(),
        outputs: vec![tensor.clone(), tensor],
        raw_output_contents: vec![Bytes::from_static(b"ab"); 2],
        ..Default::default()
    };
    assert_eq!(answer, expected);
}

#[test]
fn metadata_is_that_of_http() {
    let tensor = TensorMetadata {
        name: "image".into(),
        datatype: "FP32".into(),
        shape: vec![-1, 64],
    };
    let model = ModelMetadata {
        name: "digits".into(),
        versions: vec!["3".into()],
        platform: "burn".into(),
        inputs: vec![tensor],
        outputs: vec![],
    };
    let expected = ModelMetadataResponse {
        name: "digits".into(),
        versions: vec!["3".into()],
        platform: "burn".into(),
        inputs: vec![model_metadata_response::TensorMetadata {
            name: "image".into(),
            datatype: "FP32".into(),
            shape: vec![-1, 64],
        }],
        outputs: vec![],
    };
    assert_eq!(ModelMetadataResponse::from(model), expected);
    let server = ServerMetadata {
        name: "tensord".into(),
        version: "0.1.0".into(),
        extensions: vec!["binary_tensor_data".into()],
    };
    let expected = ServerMetadataResponse {
        name: "tensord".into(),
        version: "0.1.0".into(),
        extensions: vec!["binary_tensor_data".into()],
    };
    assert_eq!(ServerMetadataResponse::from(server), expected);
}

/// Returns the message of a request, with its elements as bytes or as numbers.
fn message(request: &InferRequest, is_raw: bool) -> ModelInferRequest {
    let input = |input: &InputTensor| request::InferInputTensor {
        name: input.name.clone(),
        datatype: input.datatype.name().into(),
        shape: input.shape.iter().map(|size| *size as i64).collect(),
        contents: (!is_raw).then(|| contents(input)),
        ..Default::default()
    };
    let outputs = request
        .outputs
        .iter()
        .map(|output| request::InferRequestedOutputTensor {
            name: output.name.clone(),
            ..Default::default()
        });
    let micros = request.timeout.map_or(0, |it| it.as_micros() as u64);
    let raw = request.inputs.iter().filter(|_| is_raw);
    ModelInferRequest {
        id: request.id.clone(),
        parameters: parameter("timeout", ParameterChoice::Uint64Param(micros)),
        inputs: request.inputs.iter().map(input).collect(),
        outputs: outputs.collect(),
        raw_input_contents: raw.map(|input| input.bytes.clone()).collect(),
        ..Default::default()
    }
}

fn contents(input: &InputTensor) -> Contents {
    fn read<const N: usize, T>(bytes: &Bytes, element: fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks().0.iter().map(|it| element(*it)).collect()
    }
    let mut contents = Contents::default();
    let bytes = &input.bytes;
    match input.datatype {
        DataType::Bool => contents.bool_contents = read(bytes, |[it]| it != 0),
        DataType::UInt8 => contents.uint_contents = read(bytes, |[it]| it.into()),
        DataType::UInt16 => {
            contents.uint_contents = read(bytes, |it| u16::from_le_bytes(it).into())
        }
        DataType::UInt32 => contents.uint_contents = read(bytes, u32::from_le_bytes),
        DataType::UInt64 => contents.uint64_contents = read(bytes, u64::from_le_bytes),
        DataType::Int8 => contents.int_contents = read(bytes, |it| i8::from_le_bytes(it).into()),
        DataType::Int16 => contents.int_contents = read(bytes, |it| i16::from_le_bytes(it).into()),
        DataType::Int32 => contents.int_contents = read(bytes, i32::from_le_bytes),
        DataType::Int64 => contents.int64_contents = read(bytes, i64::from_le_bytes),
        DataType::Fp32 => contents.fp32_contents = read(bytes, f32::from_le_bytes),
        DataType::Fp64 => contents.fp64_contents = read(bytes, f64::from_le_bytes),
        DataType::Fp16 | DataType::Bf16 => panic!("these are sent as bytes only"),
    }
    contents
}

/// Returns a request as gRPC has it: with no word on the form of outputs.
fn without_forms(mut request: InferRequest) -> InferRequest {
    request.is_binary_default = true;
    request
        .outputs
        .iter_mut()
        .for_each(|output| output.is_binary = None);
    request
}

proptest! {
    #[test]
    fn requests_are_decoded_to_what_they_were(request in any_request(), is_raw in any::<bool>()) {
        let mut request = without_forms(request);
        if !is_raw {
            request.inputs.retain(|it| !matches!(it.datatype, DataType::Fp16 | DataType::Bf16));
        }
        let sent = message(&request, is_raw).encode_to_vec();
        let received = ModelInferRequest::decode(Bytes::from(sent)).unwrap();
        prop_assert_eq!(decode(received), Ok(request));
    }

    #[test]
    fn mutated_messages_do_not_panic(request in any_request(), edits in vec(any::<(usize, u8)>(), 1..6)) {
        let mut sent = message(&request, true).encode_to_vec();
        for (place, byte) in edits {
            let index = place % sent.len();
            sent[index] ^= byte;
        }
        if let Ok(Ok(request)) = ModelInferRequest::decode(Bytes::from(sent)).map(decode) {
            for input in request.inputs {
                assert_eq!(input.bytes.len(), input.shape.iter().product::<usize>() * input.datatype.size());
            }
        }
    }
}
