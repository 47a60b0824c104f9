//! Decodes bytes as a request for an inference, by HTTP or by gRPC. The decoders must not panic, and must keep memory
//! within a bound.
//!
//! The inputs of a decoded request have as many bytes as their shapes need, and are the same after they were sent back
//! as the outputs of an answer.
//!
//! An input begins with a control byte. A third of all control bytes is for gRPC, whose message follows. A third is for
//! a body of JSON, and a third for one with bytes after the JSON: its length follows in two bytes.

use bytes::Bytes;
use prost::Message as _;
use serde::Deserialize;
use serde_json::{json, value::RawValue};
use tensord_serve::testing::{
    Request, decode_grpc, decode_http,
    messages::{
        InferParameter, InferTensorContents, ModelInferRequest,
        infer_parameter::ParameterChoice,
        model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
    },
};

use crate::{input::Input, memory::peak_of};

/// The forms of requests, by the rest of the control byte divided by their number.
const FORMS: u8 = 3;
const GRPC: u8 = 0;
const JSON: u8 = 1;
const BINARY: u8 = 2;

/// Most bytes that decoding may allocate for each byte of a request, and beside that. A number of one byte has eight in
/// memory, twice while a list of them grows, and the tensor has them once more.
const BYTES_PER_BYTE: usize = 32;
const MORE_BYTES: usize = 256 << 10;

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let form = input.byte() % FORMS;
    let json_length = (form == BINARY).then(|| input.short().into());
    let sent = Bytes::copy_from_slice(input.bytes(data.len()));
    let length = sent.len();
    let (decoded, bytes) = peak_of(|| match form {
        GRPC => decode_grpc(sent),
        _ => decode_http(sent, json_length),
    });
    assert!(
        bytes <= MORE_BYTES + BYTES_PER_BYTE * length,
        "{bytes} bytes for a request of {length}"
    );
    match decoded {
        Ok(request) => check(&request),
        Err(error) => assert!(error.len() < 4096, "an error of {} bytes", error.len()),
    }
}

fn check(request: &Request) {
    for (datatype, shape, element_bytes, bytes) in request.inputs() {
        let elements: usize = shape.iter().product();
        assert_eq!(
            bytes.len(),
            elements * element_bytes,
            "{datatype} {shape:?}"
        );
    }
    let tensors = || {
        request
            .inputs()
            .map(|(_, shape, _, bytes)| (shape.to_vec(), bytes.clone()))
    };
    let answer = request.answer_grpc();
    assert!(
        answer
            .raw_output_contents
            .iter()
            .eq(tensors().map(|it| it.1).collect::<Vec<_>>().iter())
    );
    // The outputs of an answer have the form of a request's inputs.
    let (body, json_length) = request.answer_http(true);
    let head = json_length.unwrap_or(body.len());
    let again = as_request(&body[..head]);
    let json_length = json_length.map(|_| again.len());
    let again = Bytes::from([&again[..], &body[head..]].concat());
    let again = decode_http(again, json_length).expect("an answer has valid tensors");
    let sent_again = again
        .inputs()
        .map(|(_, shape, _, bytes)| (shape.to_vec(), bytes.clone()));
    assert!(tensors().eq(sent_again), "{request:?} became {again:?}");
    let (body, json_length) = request.answer_http(false);
    assert_eq!(json_length, None);
    let again = as_request(&body);
    // Not a number is `null` there, which is no element of a request.
    let has_null = again.windows(4).any(|it| it == b"null");
    let again = decode_http(again.into(), None);
    assert!(again.is_ok() || has_null, "{request:?} became {again:?}");
    if let Ok(again) = again {
        for (one, other) in request.inputs().zip(again.inputs()) {
            assert_eq!((one.0, one.1), (other.0, other.1));
            assert!(one.3 == other.3, "{one:?} became {other:?}");
        }
    }
}

/// The parts of an answer in JSON that a request has, too. Numbers stay the texts that they are.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    outputs: &'a RawValue,
    #[serde(default)]
    id: String,
}

/// Returns the JSON of a request whose inputs are the outputs of an answer.
fn as_request(answer: &[u8]) -> Vec<u8> {
    let answer: Answer<'_> = serde_json::from_slice(answer).expect("an answer is JSON");
    let id = json!(answer.id);
    format!(r#"{{"id":{id},"inputs":{}}}"#, answer.outputs).into_bytes()
}

/// Returns the first inputs of the target.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let floats =
        json!({"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, -2.5], [3e-3, 4]]});
    let integers = json!({"name": "n", "datatype": "INT64", "shape": [3], "data": [1, -2, 9_007_199_254_740_993_i64]});
    let truths = json!({"name": "b", "datatype": "BOOL", "shape": [1, 2], "data": [true, false]});
    let parameters = json!({"timeout": 5000, "binary_data_output": true});
    let outputs = json!([{"name": "y", "parameters": {"binary_data": false}}]);
    let text = json!({"id": "7", "parameters": parameters, "inputs": [floats, integers, truths], "outputs": outputs});
    let halves = json!({"name": "h", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}});
    let bytes = json!({"name": "u", "datatype": "UINT8", "shape": [1, 3], "parameters": {"binary_data_size": 3}});
    let binary = json!({"inputs": [halves, floats, bytes]}).to_string();
    let length = (binary.len() as u16).to_le_bytes();
    let parts = [0x00, 0x3c, 0x00, 0xc0, 1, 2, 3];
    vec![
        [&[JSON], text.to_string().as_bytes()].concat(),
        [&[JSON], json!({"inputs": []}).to_string().as_bytes()].concat(),
        [&[BINARY], &length[..], binary.as_bytes(), &parts].concat(),
        message(
            vec![
                tensor(
                    "x",
                    "FP32",
                    &[1, 2],
                    InferTensorContents {
                        fp32_contents: vec![1.0, -2.0],
                        ..Default::default()
                    },
                ),
                tensor(
                    "n",
                    "INT8",
                    &[3],
                    InferTensorContents {
                        int_contents: vec![-128, 0, 127],
                        ..Default::default()
                    },
                ),
            ],
            &[],
        ),
        message(
            vec![
                tensor("x", "FP64", &[2], InferTensorContents::default()),
                tensor("b", "BOOL", &[2, 1], InferTensorContents::default()),
            ],
            &[&[0; 16], &[0, 1]],
        ),
    ]
}

fn tensor(
    name: &str,
    datatype: &str,
    shape: &[i64],
    contents: InferTensorContents,
) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.into(),
        parameters: Default::default(),
        contents: Some(contents),
    }
}

fn message(inputs: Vec<InferInputTensor>, raw: &[&'static [u8]]) -> Vec<u8> {
    let timeout = InferParameter {
        parameter_choice: Some(ParameterChoice::Int64Param(5000)),
    };
    let output = InferRequestedOutputTensor {
        name: "y".into(),
        parameters: Default::default(),
    };
    let request = ModelInferRequest {
        model_name: "model".into(),
        model_version: "1".into(),
        id: "7".into(),
        parameters: [("timeout".to_owned(), timeout)].into(),
        inputs,
        outputs: vec![output],
        raw_input_contents: raw.iter().map(|it| Bytes::from_static(it)).collect(),
    };
    [&[GRPC], &request.encode_to_vec()[..]].concat()
}
