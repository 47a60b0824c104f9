//! The bytes of a call before they are decoded: what a small message could make large.
//!
//! An empty tensor takes two bytes in a message and some hundred in memory, and a call may have any number of them. So the
//! tensors and parameters of a call are counted first.

use prost::encoding::{WireType, decode_key, decode_varint};

use crate::{
    error::InferError,
    protocol::{MAX_DIMS, MAX_TENSORS},
};

/// Most tensors and parameters that a request may have, with those of its tensors.
const MAX_PARTS: usize = 16 * MAX_TENSORS;

/// The fields of `ModelInferRequest` that are messages, each with the fields of that message which are messages, too.
const NESTED: [(u32, &[u32]); 3] = [(4, &[]), (5, &[4, 5]), (6, &[2])];

/// The field of `ModelInferRequest` with the elements of inputs, of which there may be several.
const RAW_CONTENTS: u32 = 7;

/// The field of an input with its shape, and the most bytes that it may take: a number has ten at most, and one of a
/// single byte takes eight in memory.
const SHAPE: u32 = 3;
const MAX_SHAPE_BYTES: usize = 10 * MAX_DIMS;

/// The field of an input with its elements as numbers, and the one in that which has strings.
const CONTENTS: u32 = 5;
const STRINGS: u32 = 8;

/// Checks that a `ModelInferRequest` has not too many parts.
pub(crate) fn check_parts(message: &[u8]) -> Result<(), InferError> {
    let mut parts = 0;
    for field in Fields(message) {
        let (number, bytes) = field?;
        let nested = NESTED.iter().find(|(it, _)| *it == number);
        if nested.is_none() && number != RAW_CONTENTS {
            continue;
        }
        parts += 1;
        let mut shape_bytes = 0;
        for field in Fields(bytes) {
            let (inner, bytes) = match (nested, field) {
                (None, _) => break,
                (Some(_), field) => field?,
            };
            parts += usize::from(nested.is_some_and(|(_, fields)| fields.contains(&inner)));
            if number == 5 && inner == SHAPE {
                // A number that is a field of its own has no bytes here.
                shape_bytes += bytes.len().max(1);
            }
            if number == 5 && inner == CONTENTS {
                for field in Fields(bytes) {
                    parts += usize::from(field?.0 == STRINGS);
                }
            }
        }
        if shape_bytes > MAX_SHAPE_BYTES {
            return Err(InferError::Invalid(format!(
                "the shape of an input takes more than {MAX_SHAPE_BYTES} bytes; at most {MAX_DIMS} dimensions are possible"
            )));
        }
        if parts > MAX_PARTS {
            return Err(InferError::Invalid(format!(
                "the request has more than {MAX_PARTS} tensors and parameters"
            )));
        }
    }
    Ok(())
}

/// The fields of a message, each with its number and, if it has a length, its bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, &'a [u8]), InferError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        let malformed =
            || InferError::Invalid("the request is not a message of the protocol".into());
        Some(field.ok_or_else(malformed))
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u32, &'a [u8])> {
        let (number, wire_type) = decode_key(&mut self.0).ok()?;
        let len_bytes = match wire_type {
            WireType::Varint => {
                decode_varint(&mut self.0).ok()?;
                0
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => usize::try_from(decode_varint(&mut self.0).ok()?).ok()?,
            // The protocol has no groups.
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        let (bytes, rest) = self.0.split_at_checked(len_bytes)?;
        self.0 = rest;
        Some((number, bytes))
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::protocol::messages::{
        InferTensorContents, ModelInferRequest, model_infer_request::InferInputTensor,
    };

    #[test]
    fn usual_requests_pass() {
        let input = InferInputTensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, 300],
            parameters: [("binary".to_owned(), Default::default())].into(),
            contents: Some(InferTensorContents {
                fp32_contents: vec![1.0; 300],
                ..Default::default()
            }),
        };
        let request = ModelInferRequest {
            model_name: "m".into(),
            inputs: vec![input; 64],
            raw_input_contents: vec![vec![0; 5000].into(); 64],
            ..Default::default()
        };
        assert_eq!(check_parts(&request.encode_to_vec()), Ok(()));
        assert_eq!(check_parts(&[]), Ok(()));
    }

    #[test]
    fn many_empty_parts_are_refused() {
        let error = Err(InferError::Invalid(
            "the request has more than 1024 tensors and parameters".into(),
        ));
        for tag in [0x2a, 0x32, 0x22, 0x3a] {
            assert_eq!(check_parts(&[tag, 0].repeat(100_000)), error, "{tag:x}");
        }
        let many_strings = [STRINGS as u8 * 8 + 2, 0].repeat(100_000);
        let nested = |tag: u8, bytes: &[u8]| {
            let mut message = vec![tag];
            prost::encoding::encode_varint(bytes.len() as u64, &mut message);
            [&message, bytes].concat()
        };
        assert_eq!(
            check_parts(&nested(0x2a, &nested(0x2a, &many_strings))),
            error
        );
        assert_eq!(
            check_parts(&nested(0x2a, &[0x22, 0].repeat(100_000))),
            error
        );
        assert_eq!(
            check_parts(&nested(0x32, &[0x12, 0].repeat(100_000))),
            error
        );
    }

    #[test]
    fn long_shapes_are_refused() {
        let checked = |dims: usize, size: i64| {
            let input = InferInputTensor {
                shape: vec![size; dims],
                ..Default::default()
            };
            let request = ModelInferRequest {
                inputs: vec![input],
                ..Default::default()
            };
            check_parts(&request.encode_to_vec()).map_err(|error| error.to_string())
        };
        // A negative number takes ten bytes. The protocol's own checks come later.
        assert_eq!(checked(MAX_DIMS, -1), Ok(()));
        let refused = checked(1 << 20, 1).unwrap_err();
        assert!(refused.contains("at most 16 dimensions"), "{refused}");
        // The same without packing.
        let mut input = vec![0x2a];
        prost::encoding::encode_varint(2 << 10, &mut input);
        input.extend([0x18, 1].repeat(1 << 10));
        assert!(check_parts(&input).is_err());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let error = Err(InferError::Invalid(
            "the request is not a message of the protocol".into(),
        ));
        for bytes in [
            &[0x2a_u8, 5, 1][..],
            &[0x2a],
            &[0xff; 11],
            &[0x2b],
            &[0x2a, 1, 0x0a],
        ] {
            assert_eq!(check_parts(bytes), error, "{bytes:?}");
        }
    }
}
