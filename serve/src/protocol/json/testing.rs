//! Requests by chance, for the tests of all forms, and an encoder of requests, which the server itself does not need.

use burn::tensor::{bf16, f16};
use bytes::Bytes;
use proptest::{collection::vec, prelude::*};
use serde_json::{Value, json, value::RawValue};

use super::answer::Elements;
use crate::protocol::{DataType, InferRequest, InputTensor, RequestedOutput};

/// How an input is sent in HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Flat,
    Nested,
    Binary,
}

pub(crate) fn any_form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Flat), Just(Form::Nested), Just(Form::Binary)]
}

/// Returns requests whose floats are finite, as those in JSON are.
pub(crate) fn any_request() -> impl Strategy<Value = InferRequest> {
    let outputs = vec(("\\PC{0,8}", any::<Option<bool>>()), 0..3);
    let timeout = prop_oneof![Just(None), (1..=u64::MAX).prop_map(Some)];
    (
        "\\PC{0,20}",
        timeout,
        vec(any_input(), 0..4),
        outputs,
        any::<bool>(),
    )
        .prop_map(|(id, timeout, mut inputs, outputs, is_binary_default)| {
            for (index, input) in inputs.iter_mut().enumerate() {
                input.name.push_str(&index.to_string());
            }
            let outputs = outputs.into_iter().enumerate();
            InferRequest {
                id,
                timeout: timeout.map(std::time::Duration::from_micros),
                inputs,
                outputs: outputs
                    .map(|(index, (name, is_binary))| RequestedOutput {
                        name: format!("{name}{index}"),
                        is_binary,
                    })
                    .collect(),
                is_binary_default,
            }
        })
}

fn any_input() -> impl Strategy<Value = InputTensor> {
    let datatype = proptest::sample::select(DataType::ALL.to_vec());
    ("\\PC{0,8}", datatype, vec(0..4_usize, 0..4)).prop_flat_map(|(name, datatype, shape)| {
        let len = shape.iter().product::<usize>() * datatype.size();
        vec(any::<u8>(), len).prop_map(move |mut bytes| {
            bytes
                .chunks_exact_mut(datatype.size())
                .for_each(|element| make_valid(datatype, element));
            InputTensor {
                name: name.clone(),
                datatype,
                shape: shape.clone(),
                bytes: bytes.into(),
            }
        })
    })
}

fn make_valid(datatype: DataType, element: &mut [u8]) {
    let is_valid = match datatype {
        DataType::Bool => element[0] <= 1,
        DataType::Fp16 => f16::from_le_bytes(element.try_into().unwrap()).is_finite(),
        DataType::Bf16 => bf16::from_le_bytes(element.try_into().unwrap()).is_finite(),
        DataType::Fp32 => f32::from_le_bytes(element.try_into().unwrap()).is_finite(),
        DataType::Fp64 => f64::from_le_bytes(element.try_into().unwrap()).is_finite(),
        _ => true,
    };
    if !is_valid {
        element.fill(1);
    }
}

/// Returns the body of a request, and the length of its JSON if binary parts follow. The forms are those of the inputs.
pub(crate) fn encode_request(request: &InferRequest, forms: &[Form]) -> (Bytes, Option<usize>) {
    let mut binary = Vec::new();
    let forms = forms.iter().cycle();
    let inputs: Vec<String> = request
        .inputs
        .iter()
        .zip(forms)
        .map(|(input, form)| encode_input(input, *form, &mut binary))
        .collect();
    let outputs: Vec<Value> = request
        .outputs
        .iter()
        .map(|it| json!({"name": it.name, "parameters": {"binary_data": it.is_binary}}))
        .collect();
    let timeout = request.timeout.map_or(0, |it| it.as_micros() as u64);
    let parameters =
        json!({"timeout": timeout, "binary_data_output": request.is_binary_default, "priority": 3});
    let mut body = format!(
        r#"{{"id": {}, "parameters": {parameters}, "more": [{{}}], "outputs": {}, "inputs": [{}]}}"#,
        Value::from(&*request.id),
        Value::from(outputs),
        inputs.join(", ")
    )
    .into_bytes();
    let header_len = body.len();
    body.extend(&binary);
    let has_header = inputs
        .iter()
        .any(|it| it.contains("\"binary_data_size\": "));
    (body.into(), has_header.then_some(header_len))
}

fn encode_input(input: &InputTensor, form: Form, binary: &mut Vec<u8>) -> String {
    let elements = Elements {
        datatype: input.datatype,
        bytes: &input.bytes,
    };
    let data = match form {
        Form::Flat => format!(r#""data": {}"#, serde_json::to_string(&elements).unwrap()),
        Form::Nested => {
            let flat: Vec<Box<RawValue>> =
                serde_json::from_str(&serde_json::to_string(&elements).unwrap()).unwrap();
            let texts: Vec<&str> = flat.iter().map(|it| it.get()).collect();
            format!(r#""data": {}"#, nested(&texts, &input.shape))
        }
        Form::Binary => {
            binary.extend(&input.bytes);
            format!(
                r#""parameters": {{"binary_data_size": {}}}"#,
                input.bytes.len()
            )
        }
    };
    let (name, datatype, shape) = (Value::from(&*input.name), input.datatype, &input.shape);
    format!(r#"{{"name": {name}, "datatype": "{datatype}", "shape": {shape:?}, {data}}}"#)
}

fn nested(elements: &[&str], shape: &[usize]) -> String {
    let items: Vec<String> = match shape {
        // A tensor without dimensions is a list of its one element.
        [] | [_] => elements.iter().map(|it| it.to_string()).collect(),
        [size, inner @ ..] => {
            let len = elements.len() / (*size).max(1);
            (0..*size)
                .map(|index| nested(&elements[index * len..][..len], inner))
                .collect()
        }
    };
    format!("[ {} ]", items.join(" ,\n"))
}
