//! The exact bytes of answers.

use bytes::Bytes;
use serde_json::Value;

use crate::protocol::{
    DataType, InferResponse, OutputTensor,
    json::{answer::Encoded, encode},
};

pub(super) fn output(
    datatype: DataType,
    shape: &[usize],
    bytes: &[u8],
    is_binary: bool,
) -> OutputTensor {
    OutputTensor {
        name: "y".into(),
        datatype,
        shape: shape.into(),
        bytes: Bytes::copy_from_slice(bytes),
        is_binary,
    }
}

/// Checks the answer with one output, which is up to the outputs the same for all.
fn check_answer(output: OutputTensor, expected: &str) {
    let response = InferResponse {
        model: "m".into(),
        version: "1".into(),
        id: String::new(),
        outputs: vec![output],
    };
    let encoded = encode(&response);
    assert_eq!(encoded.header_len, None);
    let expected = format!(
        r#"{{"model_name":"m","model_version":"1","outputs":[{{"name":"y",{expected}}}]}}"#
    );
    assert_eq!(std::str::from_utf8(&encoded.body).unwrap(), expected);
    serde_json::from_slice::<Value>(&encoded.body).unwrap();
}

#[test]
fn answers_in_json_are_exact() {
    let floats = [
        0.1_f32,
        -0.0,
        1e-7,
        16777216.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
    ];
    let floats: Vec<u8> = floats.iter().flat_map(|it| it.to_le_bytes()).collect();
    let f32s = r#""datatype":"FP32","shape":[2,4],"data":[0.1,-0.0,1e-7,16777216.0,null,null,null,3.4028235e+38]"#;
    check_answer(output(DataType::Fp32, &[2, 4], &floats, false), f32s);
    let cases: &[(DataType, &[u8], &str)] = &[
        (
            DataType::Bool,
            &[1, 0],
            r#""datatype":"BOOL","shape":[2],"data":[true,false]"#,
        ),
        (
            DataType::UInt8,
            &[0, 255],
            r#""datatype":"UINT8","shape":[2],"data":[0,255]"#,
        ),
        (
            DataType::Int16,
            &[0xfe, 0xff],
            r#""datatype":"INT16","shape":[1],"data":[-2]"#,
        ),
        (
            DataType::UInt64,
            &[0xff; 8],
            r#""datatype":"UINT64","shape":[1],"data":[18446744073709551615]"#,
        ),
        (
            DataType::Fp16,
            &[0, 0x3c, 0, 0x7c],
            r#""datatype":"FP16","shape":[2],"data":[1.0,null]"#,
        ),
        (
            DataType::Bf16,
            &[0x80, 0xbf],
            r#""datatype":"BF16","shape":[1],"data":[-1.0]"#,
        ),
        (
            DataType::Int8,
            &[],
            r#""datatype":"INT8","shape":[0],"data":[]"#,
        ),
    ];
    for (datatype, bytes, expected) in cases {
        check_answer(
            output(*datatype, &[bytes.len() / datatype.size()], bytes, false),
            expected,
        );
    }
}

#[test]
fn binary_outputs_follow_the_json_in_order() {
    let response = InferResponse {
        model: "m".into(),
        version: "2".into(),
        id: "é\"".into(),
        outputs: vec![
            output(DataType::Int8, &[3], b"abc", true),
            output(DataType::Int8, &[1], &[5], false),
            output(DataType::Fp16, &[1], b"de", true),
        ],
    };
    let json = concat!(
        r#"{"model_name":"m","model_version":"2","id":"é\"","outputs":["#,
        r#"{"name":"y","datatype":"INT8","shape":[3],"parameters":{"binary_data_size":3}},"#,
        r#"{"name":"y","datatype":"INT8","shape":[1],"data":[5]},"#,
        r#"{"name":"y","datatype":"FP16","shape":[1],"parameters":{"binary_data_size":2}}]}"#
    );
    let expected = Encoded {
        body: format!("{json}abcde").into(),
        header_len: Some(json.len()),
    };
    assert_eq!(encode(&response), expected);
}
