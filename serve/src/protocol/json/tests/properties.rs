//! What holds for all requests, and for all bodies that are none.

use proptest::{collection::vec, prelude::*};

use super::{answers::output, decode_text, one};
use crate::protocol::{
    InferResponse,
    json::{
        decode, encode,
        testing::{Form, any_form, any_request, encode_request},
    },
};

/// Returns a body after random edits of its bytes.
fn mutated(body: &[u8], edits: &[(usize, u8, u8)]) -> Vec<u8> {
    let mut body = body.to_vec();
    for (place, kind, byte) in edits {
        let index = place % (body.len() + 1);
        match kind % 4 {
            0 => body.insert(index, *byte),
            1 => body.insert(index, b"[]{},:\"-0e"[usize::from(*byte) % 10]),
            2 if index < body.len() => body[index] ^= byte,
            3 if *byte == 0 => body.truncate(index),
            _ if index < body.len() => drop(body.remove(index)),
            _ => {}
        }
    }
    body
}

/// Checks what decoded requests have in common, whatever the body was.
fn check_valid_if_decoded(body: Vec<u8>, header_len: Option<usize>) {
    if let Ok(request) = decode(body.into(), header_len) {
        for input in request.inputs {
            assert_eq!(
                input.bytes.len(),
                input.shape.iter().product::<usize>() * input.datatype.size()
            );
        }
    }
}

proptest! {
    #[test]
    fn requests_are_decoded_to_what_they_were(request in any_request(), forms in vec(any_form(), 4)) {
        let (body, header_len) = encode_request(&request, &forms);
        prop_assert_eq!(decode(body, header_len), Ok(request));
    }

    #[test]
    fn random_bodies_do_not_panic(body in vec(any::<u8>(), 0..200), header_len in any::<Option<u8>>()) {
        check_valid_if_decoded(body, header_len.map(usize::from));
    }

    #[test]
    fn mutated_bodies_do_not_panic(
        request in any_request(),
        forms in vec(any_form(), 4),
        edits in vec(any::<(usize, u8, u8)>(), 1..6),
    ) {
        let (body, header_len) = encode_request(&request, &forms);
        check_valid_if_decoded(mutated(&body, &edits), header_len);
    }

    #[test]
    fn elements_in_answers_are_those_of_requests(request in any_request()) {
        for input in request.inputs {
            let outputs = vec![output(input.datatype, &input.shape, &input.bytes, false)];
            let response = InferResponse { model: String::new(), version: String::new(), id: String::new(), outputs };
            let body = encode(&response).body;
            // An answer's outputs have the fields of a request's inputs.
            let text = String::from_utf8(body.to_vec()).unwrap().replacen("\"outputs\"", "\"inputs\"", 1);
            prop_assert_eq!(&decode_text(&text).unwrap().inputs[0].bytes, &input.bytes);
        }
    }
}

#[test]
fn forms_differ() {
    let request = decode_text(&one(r#""datatype":"INT8","shape":[2,1],"data":[1,2]"#)).unwrap();
    let text = |form| String::from_utf8(encode_request(&request, &[form]).0.to_vec()).unwrap();
    assert!(text(Form::Flat).contains(r#""data": [1,2]"#));
    assert!(text(Form::Nested).contains("\"data\": [ [ 1 ] ,\n[ 2 ] ]"));
    assert!(text(Form::Binary).ends_with("\x01\x02"));
}
