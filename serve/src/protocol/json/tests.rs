//! Requests that are decoded to what they say, and requests that are refused with a clear text.

mod answers;
mod properties;

use super::*;
use crate::protocol::DataType;

/// A body with one input `x`, of which `fields` are the type, shape and data.
fn one(fields: &str) -> String {
    format!(r#"{{"inputs":[{{"name":"x",{fields}}}]}}"#)
}

fn decode_text(body: &str) -> Result<InferRequest, InferError> {
    decode(Bytes::copy_from_slice(body.as_bytes()), None)
}

fn check_refused(body: &str, header_len: Option<usize>, expected: &str) {
    let error = decode(Bytes::copy_from_slice(body.as_bytes()), header_len).unwrap_err();
    assert_eq!(error, InferError::Invalid(expected.into()), "for {body}");
}

/// Checks that elements are parsed to these bytes.
fn check_elements(fields: &str, expected: &[u8]) {
    let request = decode_text(&one(fields)).unwrap_or_else(|error| panic!("{fields}: {error}"));
    assert_eq!(request.inputs[0].bytes, expected, "for {fields}");
}

#[test]
fn a_request_of_tritonclient_is_decoded_without_a_copy() {
    let json = concat!(
        r#"{"id":"7","inputs":[{"name":"a","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}},"#,
        r#"{"name":"b","shape":[3],"datatype":"BOOL","parameters":{"binary_data_size":3}}],"#,
        r#""outputs":[{"name":"y","parameters":{"binary_data":true}},{"name":"z"}],"#,
        r#""parameters":{"sequence_id":0,"priority":1,"timeout":1500,"binary_data_output":true}}"#
    );
    let body = Bytes::from([json.as_bytes(), b"\0\0\x80\x3f\0\0\0\x40\x01\x00\x01"].concat());
    let request = decode(body.clone(), Some(json.len())).unwrap();
    let input = |name: &str, datatype, shape: &[usize], bytes| InputTensor {
        name: name.into(),
        datatype,
        shape: shape.into(),
        bytes,
    };
    let output = |name: &str, is_binary| RequestedOutput {
        name: name.into(),
        is_binary,
    };
    let start = json.len();
    let expected = InferRequest {
        id: "7".into(),
        timeout: Some(std::time::Duration::from_micros(1500)),
        inputs: vec![
            input("a", DataType::Fp32, &[1, 2], body.slice(start..start + 8)),
            input("b", DataType::Bool, &[3], body.slice(start + 8..)),
        ],
        outputs: vec![output("y", Some(true)), output("z", None)],
        is_binary_default: true,
    };
    assert_eq!(request, expected);
    assert_eq!(request.inputs[0].bytes.as_ptr(), body[start..].as_ptr());
}

#[test]
fn elements_are_parsed_by_their_type() {
    let cases: &[(&str, &[u8])] = &[
        (
            r#""datatype":"BOOL","shape":[4],"data":[true,false,1,0]"#,
            &[1, 0, 1, 0],
        ),
        (
            r#""datatype":"UINT8","shape":[2],"data":[0,255]"#,
            &[0, 255],
        ),
        (
            r#""datatype":"INT8","shape":[3],"data":[-128,127,-0]"#,
            &[0x80, 0x7f, 0],
        ),
        (
            r#""datatype":"INT16","shape":[1],"data":[-2]"#,
            &[0xfe, 0xff],
        ),
        (
            r#""datatype":"UINT64","shape":[1],"data":[18446744073709551615]"#,
            &[0xff; 8],
        ),
        (
            r#""datatype":"INT64","shape":[1],"data":[-9223372036854775808]"#,
            &[0, 0, 0, 0, 0, 0, 0, 0x80],
        ),
        (
            r#""datatype":"INT64","shape":[1],"data":[9007199254740993]"#,
            &[1, 0, 0, 0, 0, 0, 0x20, 0],
        ),
        (
            r#""datatype":"FP32","shape":[2],"data":[1, -2.5e0]"#,
            &[0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0],
        ),
        (
            r#""datatype":"FP64","shape":[1],"data":[1]"#,
            &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
        ),
        (
            r#""datatype":"FP16","shape":[2],"data":[1,65504]"#,
            &[0, 0x3c, 0xff, 0x7b],
        ),
        (
            r#""datatype":"BF16","shape":[1],"data":[-1]"#,
            &[0x80, 0xbf],
        ),
        (r#""datatype":"UINT8","shape":[],"data":[7]"#, &[7]),
        (r#""datatype":"UINT8","shape":[0,5],"data":[]"#, &[]),
        (r#""datatype":"UINT8","shape":[2,0],"data":[[],[]]"#, &[]),
        (
            r#""datatype":"UINT8","shape":[2,2],"data":[1,2,3,4]"#,
            &[1, 2, 3, 4],
        ),
        (
            r#""datatype":"UINT8","shape":[2,2],"data":[ [1 ,2] ,[3,4 ] ]"#,
            &[1, 2, 3, 4],
        ),
        (
            r#""datatype":"UINT8","shape":[1,2,1],"data":[[[1],[2]]],"parameters":null"#,
            &[1, 2],
        ),
    ];
    for (fields, expected) in cases {
        check_elements(fields, expected);
    }
}

#[test]
fn elements_that_the_type_does_not_have_are_refused() {
    let cases = [
        (
            r#""datatype":"UINT8","shape":[2],"data":[0,256]"#,
            "element 1 is 256, and UINT8 has integers from 0 to 255",
        ),
        (
            r#""datatype":"UINT8","shape":[1],"data":[-1]"#,
            "element 0 is -1, and UINT8 has integers from 0 to 255",
        ),
        (
            r#""datatype":"INT8","shape":[1],"data":[128]"#,
            "element 0 is 128, and INT8 has integers from -128 to 127",
        ),
        (
            r#""datatype":"INT32","shape":[1],"data":[1.0]"#,
            "element 0 is 1.0, and INT32 has integers from -2147483648 to 2147483647",
        ),
        (
            r#""datatype":"UINT64","shape":[1],"data":[18446744073709551616]"#,
            "element 0 is 18446744073709551616, and UINT64 has integers from 0 to 18446744073709551615",
        ),
        (
            r#""datatype":"BOOL","shape":[1],"data":[2]"#,
            "element 0 is 2, and BOOL has true and false",
        ),
        (
            r#""datatype":"FP32","shape":[1],"data":[1e39]"#,
            "element 0 is 1e39, and FP32 has numbers from -3.4028235e38 to 3.4028235e38",
        ),
        (
            r#""datatype":"FP16","shape":[1],"data":[65520]"#,
            "element 0 is 65520, and FP16 has numbers from -65504 to 65504",
        ),
        (
            r#""datatype":"FP16","shape":[1],"data":[null]"#,
            "element 0 is null, and FP16 has numbers from -65504 to 65504",
        ),
        (
            r#""datatype":"FP16","shape":[1],"data":["N]\"N"]"#,
            r#"element 0 is "N]\"N", and FP16 has numbers from -65504 to 65504"#,
        ),
        (
            r#""datatype":"BOOL","shape":[1],"data":[{"a":1}]"#,
            r#"element 0 is {"a":1}], and BOOL has true and false"#,
        ),
    ];
    for (fields, expected) in cases {
        check_refused(&one(fields), None, &format!("input `x`: {expected}"));
    }
}

#[test]
fn data_that_does_not_fit_the_shape_is_refused() {
    let cases = [
        (
            r#""datatype":"BOOL","shape":[1],"data":5"#,
            "`data` is 5, and must be a list",
        ),
        (
            r#""datatype":"UINT8","shape":[2,2],"data":[1,2,3]"#,
            "`data` has 3 items, and by the shape [2, 2] it must have 4",
        ),
        (
            r#""datatype":"UINT8","shape":[2,2],"data":[1,2,3,4,5]"#,
            "`data` has 5 items, and by the shape [2, 2] it must have 4",
        ),
        (
            r#""datatype":"UINT8","shape":[2,2],"data":[[1,2],[3]]"#,
            "`data[1]` has 1 items, and by the shape [2, 2] it must have 2",
        ),
        (
            r#""datatype":"UINT8","shape":[2,1],"data":[[1]]"#,
            "`data` has 1 items, and by the shape [2, 1] it must have 2",
        ),
        (
            r#""datatype":"UINT8","shape":[1,2],"data":[[1,2],[3,4]]"#,
            "`data` has 2 items, and by the shape [1, 2] it must have 1",
        ),
        (
            r#""datatype":"UINT8","shape":[1,2,1],"data":[[[1],[2,3]]]"#,
            "`data[0][1]` has 2 items, and by the shape [1, 2, 1] it must have 1",
        ),
        (
            r#""datatype":"UINT8","shape":[1,2,1],"data":[[[1],2]]"#,
            "`data[0]` has the element 2, and by the shape [1, 2, 1] it must have lists",
        ),
        (
            r#""datatype":"UINT8","shape":[2],"data":[[1,2]]"#,
            "`data` is nested more deeply than the shape [2] has dimensions",
        ),
        (
            r#""datatype":"UINT8","shape":[2],"data":[1,[2]]"#,
            "`data` is nested more deeply than the shape [2] has dimensions",
        ),
    ];
    for (fields, expected) in cases {
        check_refused(&one(fields), None, &format!("input `x`: {expected}"));
    }
}

#[test]
fn inputs_that_are_declared_wrongly_are_refused() {
    let known = "there are BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, BF16, FP32, FP64";
    let cases = [
        (r#""datatype":"FP31","shape":[1],"data":[1]"#, format!("the data type `FP31` is unknown; {known}")),
        (r#""datatype":"BYTES","shape":[1],"data":["a"]"#, format!("the data type BYTES is not supported, as no model takes strings; {known}")),
        (r#""datatype":"FP32","shape":[1,-1],"data":[1]"#, "the shape [1, -1] has a negative size".into()),
        (
            r#""datatype":"FP32","shape":[4611686018427387904,4],"data":[1]"#,
            "a tensor of type FP32 and shape [4611686018427387904, 4] has too many bytes to count".into(),
        ),
        (
            r#""datatype":"FP32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data":[1]"#,
            "the shape has 17 dimensions, and at most 16 are possible".into(),
        ),
        (r#""datatype":"FP32","shape":[1]"#, "there is no `data`, and no parameter `binary_data_size`".into()),
        (
            r#""datatype":"FP32","shape":[1],"data":[1],"parameters":{"binary_data_size":4}"#,
            "there are both `data` and `binary_data_size`; one is possible".into(),
        ),
        (
            r#""datatype":"FP32","shape":[1],"parameters":{"binary_data_size":-4}"#,
            "the parameter `binary_data_size` is -4, and must be a number of bytes".into(),
        ),
        (
            r#""datatype":"FP32","shape":[1],"parameters":{"shared_memory_region":"r"}"#,
            "the parameter `shared_memory_region` is not supported; send tensors in the request, and get them in the answer".into(),
        ),
    ];
    for (fields, expected) in cases {
        check_refused(&one(fields), None, &format!("input `x`: {expected}"));
    }
}

#[test]
fn binary_parts_that_do_not_fit_are_refused() {
    let json = one(r#""datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}"#);
    let short = one(r#""datatype":"FP32","shape":[1,64],"parameters":{"binary_data_size":100}"#);
    let bools = one(r#""datatype":"BOOL","shape":[2],"parameters":{"binary_data_size":2}"#);
    let len = Some(json.len());
    let cases = [
        (
            format!("{short}{}", "a".repeat(100)),
            Some(short.len()),
            "input `x`: the binary part has 100 bytes, and a tensor of type FP32 and shape [1, 64] has 256",
        ),
        (
            format!("{json}abc"),
            len,
            "input `x`: the binary part has 8 bytes, and the body has only 3 more",
        ),
        (
            format!("{json}abcdefghij"),
            len,
            "after the binary parts of the inputs, the body has 2 more bytes",
        ),
        (
            format!("{json}abcdefgh"),
            None,
            "input `x`: there is a binary part, and no header `Inference-Header-Content-Length` with the length of the JSON",
        ),
        (
            "{}".into(),
            Some(3),
            "the header `Inference-Header-Content-Length` is 3, and the body has only 2 bytes",
        ),
        (
            format!("{bools}\x01\x02"),
            Some(bools.len()),
            "input `x`: element 1 is the byte 2, and BOOL has the bytes 0 and 1",
        ),
    ];
    for (body, header_len, expected) in cases {
        check_refused(&body, header_len, expected);
    }
}

#[test]
fn requests_that_break_a_rule_are_refused() {
    let x = r#"{"name":"x","datatype":"FP32","shape":[1],"data":[1]}"#;
    let many = vec!["{\"name\":\"y\",\"datatype\":\"\",\"shape\":[]}"; 64].join(",");
    let distinct: Vec<String> = (0..65)
        .map(|it| x.replace("\"x\"", &format!("\"x{it}\"")))
        .collect();
    let cases = [
        (
            r#"{"inputs":1}"#.into(),
            "the request is not the JSON of an inference: invalid type: integer `1`, expected a list at line 1 column 11",
        ),
        (
            "{}".into(),
            "the request is not the JSON of an inference: missing field `inputs` at line 1 column 2",
        ),
        (
            "".into(),
            "the request is not the JSON of an inference: EOF while parsing a value at line 1 column 0",
        ),
        (
            r#"{"inputs":[]}x"#.into(),
            "the request is not the JSON of an inference: trailing characters at line 1 column 14",
        ),
        (
            format!(r#"{{"inputs":[{x},{x}]}}"#),
            "the request has the input `x` twice",
        ),
        (
            format!(r#"{{"inputs":[{many}]}}"#),
            "the request has the input `y` twice",
        ),
        (
            format!(r#"{{"inputs":[{}]}}"#, distinct.join(",")),
            "the request has 65 inputs, and at most 64 are possible",
        ),
        (
            format!(r#"{{"id":"{}","inputs":[]}}"#, "i".repeat(257)),
            "the id has 257 bytes, and at most 256 are possible",
        ),
        (
            r#"{"parameters":{"timeout":1.5},"inputs":[]}"#.into(),
            "the parameter `timeout` is 1.5, and must be a number of microseconds",
        ),
        (
            r#"{"parameters":{"binary_data_output":"yes"},"inputs":[]}"#.into(),
            "the parameter `binary_data_output` is \"yes\", and must be true or false",
        ),
        (
            r#"{"inputs":[],"outputs":[{"name":"y"},{"name":"y"}]}"#.into(),
            "the request has the output `y` twice",
        ),
        (
            r#"{"inputs":[],"outputs":[{"name":"y","parameters":{"classification":3}}]}"#.into(),
            "output `y`: the parameter `classification` is not supported; request the scores, and sort them",
        ),
        (
            r#"{"inputs":[],"outputs":[{"name":"y","parameters":{"shared_memory_region":"r"}}]}"#
                .into(),
            "output `y`: the parameter `shared_memory_region` is not supported; send tensors in the request, and get them in the answer",
        ),
        (
            r#"{"inputs":[],"outputs":[{"name":"y","parameters":{"binary_data":1}}]}"#.into(),
            "output `y`: the parameter `binary_data` is 1, and must be true or false",
        ),
    ];
    for (body, expected) in cases {
        let body: String = body;
        check_refused(&body, None, expected);
    }
}

#[test]
fn a_clients_text_is_cut_and_escaped_in_errors() {
    let name = format!("a\\n{}", "b".repeat(1000));
    let body = one(r#""datatype":"FP32","shape":[-1]"#).replace("\"x\"", &format!("\"{name}\""));
    let expected = format!(
        "input `a\\n{}…`: the shape [-1] has a negative size",
        "b".repeat(62)
    );
    check_refused(&body, None, &expected);
}

#[test]
fn a_large_shape_takes_no_memory() {
    let body = one(r#""datatype":"FP32","shape":[1000000000000],"data":[1]"#);
    check_refused(
        &body,
        None,
        "input `x`: `data` has 1 items, and by the shape [1000000000000] it must have 1000000000000",
    );
}

#[test]
fn deep_lists_do_not_overflow_the_stack() {
    let deep =
        |open: &str, close: &str| format!("{}{}", open.repeat(1_000_000), close.repeat(1_000_000));
    let lists = one(&format!(
        r#""datatype":"FP32","shape":[1,1],"data":{}"#,
        deep("[", "]")
    ));
    check_refused(
        &lists,
        None,
        "input `x`: `data` is nested more deeply than the shape [1, 1] has dimensions",
    );
    let open = one(&format!(
        r#""datatype":"FP32","shape":[1,1],"data":{}"#,
        deep("[", "")
    ));
    assert!(decode_text(&open).is_err());
    for deep in [deep("[", "]"), deep(r#"{"a":"#, "}")] {
        assert!(decode_text(&deep).is_err());
    }
    let unknown = format!(
        r#"{{"more":{},"parameters":{{"more":{}}},"inputs":[]}}"#,
        deep("[", "]"),
        deep("[", "]")
    );
    assert!(decode_text(&unknown).unwrap().inputs.is_empty());
    let parameter = format!(
        r#"{{"parameters":{{"timeout":{}}},"inputs":[]}}"#,
        deep("[", "]")
    );
    let expected = format!(
        "the parameter `timeout` is {}…, and must be a number of microseconds",
        "[".repeat(64)
    );
    check_refused(&parameter, None, &expected);
    let inputs = format!(r#"{{"inputs":{}}}"#, deep("[", "]"));
    assert!(decode_text(&inputs).is_err());
}
