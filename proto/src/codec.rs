//! Ops and tensor types to bytes and back.
//!
//! One [`OpEncoder`] and one [`OpDecoder`] belong to each session and see the
//! same ops in the same order, so that the encoding may refer to what came
//! before. Frames are the unit: a frame is encoded once, decoded once, and a
//! replay sends the very bytes again.
//!
//! The encoding is postcard over Burn's own IR types. What arrives is not
//! trusted: every length is checked against the bytes that are there, and what
//! breaks a rule is a [`CodecError`] that names the place.

use std::fmt::{self, Write};

use burn_backend::{DType, Shape};
use burn_ir::{OperationIr, TensorIr};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::v1;

/// Most ops a single frame may carry.
pub const MAX_OPS_PER_FRAME: u32 = 1 << 16;

/// Most dimensions a tensor may have.
pub const MAX_RANK: usize = 32;

/// Why bytes could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {what} at byte {offset}: {rule}")]
pub struct CodecError {
    /// What was being decoded.
    pub what: &'static str,
    /// Where in it the decoder stood.
    pub offset: usize,
    /// The rule that was broken.
    pub rule: String,
}

impl CodecError {
    fn new(what: &'static str, offset: usize, rule: impl Into<String>) -> Self {
        let rule = rule.into();
        Self { what, offset, rule }
    }
}

/// Encodes a session's ops, in order.
#[derive(Debug, Default)]
pub struct OpEncoder {}

impl OpEncoder {
    /// Appends `op` to `out`.
    ///
    /// # Panics
    ///
    /// Never for ops that Burn builds: all of the IR's types serialize.
    pub fn encode(&mut self, op: &OperationIr, out: &mut Vec<u8>) {
        let buffer = std::mem::take(out);
        *out = postcard::to_extend(op, buffer).expect("IR types serialize without failing");
    }
}

/// Decodes a session's ops, in order.
#[derive(Debug, Default)]
pub struct OpDecoder {}

impl OpDecoder {
    /// The ops of one frame that says it holds `count` of them.
    ///
    /// # Errors
    ///
    /// When the bytes are no such ops. The session cannot go on after that: the
    /// two ends no longer agree on what was said.
    pub fn decode(&mut self, frame: &[u8], count: u32) -> Result<Vec<OperationIr>, CodecError> {
        if count > MAX_OPS_PER_FRAME {
            let rule = format!("{count} ops in one frame, more than {MAX_OPS_PER_FRAME}");
            return Err(CodecError::new("ops", 0, rule));
        }
        // An op takes at least two bytes, so this cannot be made to over-allocate.
        let mut ops = Vec::with_capacity((count as usize).min(frame.len() / 2 + 1));
        let mut rest = frame;
        for _ in 0..count {
            let offset = frame.len() - rest.len();
            let (op, after) = postcard::take_from_bytes::<OperationIr>(rest)
                .map_err(|e| CodecError::new("op", offset, e.to_string()))?;
            ops.push(op);
            rest = after;
        }
        if !rest.is_empty() {
            let offset = frame.len() - rest.len();
            let rule = format!("{} bytes after the last of {count} ops", rest.len());
            return Err(CodecError::new("ops", offset, rule));
        }
        Ok(ops)
    }
}

/// The name of an op for people, such as `NumericFloat.Add`.
pub fn op_name(op: &OperationIr) -> String {
    /// Keeps the variant names at the head of a `Debug` print, and stops it
    /// there: an op prints its shapes and values after them.
    struct Head(String);
    impl Write for Head {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            if text.starts_with(['{', ' ']) || self.0.len() > 64 {
                return Err(fmt::Error);
            }
            self.0.push_str(text);
            Ok(())
        }
    }
    let mut head = Head(String::new());
    // The error is how the print is cut short.
    let _ = write!(head, "{op:?}");
    let is_name = |part: &&str| part.starts_with(char::is_uppercase) && !part.ends_with("Ir");
    let names: Vec<&str> = head
        .0
        .split(|c: char| !c.is_alphanumeric())
        .filter(is_name)
        .collect();
    match names.as_slice() {
        // The dtype between the family and the op adds nothing to a message.
        [family, .., op] => format!("{family}.{op}"),
        [op] => (*op).into(),
        [] => "op".into(),
    }
}

/// Encodes the type of a tensor.
pub fn encode_type(shape: &Shape, dtype: DType) -> v1::TensorType {
    v1::TensorType {
        shape: shape.iter().map(|&dim| dim as u64).collect(),
        dtype: encode(&dtype),
    }
}

/// Decodes the type of a tensor and the bytes its data takes.
///
/// # Errors
///
/// When the type is missing, no such dtype exists, the shape has more than
/// [`MAX_RANK`] dimensions or more bytes than can be addressed.
pub fn decode_type(kind: Option<&v1::TensorType>) -> Result<(Shape, DType, usize), CodecError> {
    let error = |rule: String| CodecError::new("tensor type", 0, rule);
    let kind = kind.ok_or_else(|| error("it is missing".into()))?;
    let dtype: DType = decode("dtype", &kind.dtype)?;
    if kind.shape.len() > MAX_RANK {
        return Err(error(format!(
            "{} dimensions, more than {MAX_RANK}",
            kind.shape.len()
        )));
    }
    let shape: Option<Vec<usize>> = kind
        .shape
        .iter()
        .map(|&d| usize::try_from(d).ok())
        .collect();
    let shape =
        Shape::from(shape.ok_or_else(|| error("a dimension beyond the address space".into()))?);
    let bytes = tensor_bytes(&shape, dtype).ok_or_else(|| {
        error(format!(
            "{shape} of {} has more bytes than can be addressed",
            dtype.name()
        ))
    })?;
    Ok((shape, dtype, bytes))
}

/// Bytes that a tensor's data takes, or `None` where that overflows.
pub fn tensor_bytes(shape: &Shape, dtype: DType) -> Option<usize> {
    shape
        .iter()
        .try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim))
        .filter(|&bytes| bytes <= isize::MAX as usize)
}

/// Encodes a tensor reference.
pub fn encode_tensor(tensor: &TensorIr) -> Bytes {
    encode(tensor)
}

/// Decodes a tensor reference.
///
/// # Errors
///
/// When the bytes are no such thing.
pub fn decode_tensor(bytes: &[u8]) -> Result<TensorIr, CodecError> {
    decode("tensor", bytes)
}

/// What a client must know of a device before it can build ops for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// The dtypes it prefers.
    pub settings: burn_backend::DeviceSettings,
    /// What it can do with each dtype, as the bits of a `DTypeUsageSet`.
    pub dtypes: Vec<(DType, u8)>,
}

impl DeviceProfile {
    /// Encodes the profile.
    pub fn encode(&self) -> Bytes {
        encode(self)
    }

    /// Decodes a profile.
    ///
    /// # Errors
    ///
    /// When the bytes are no such thing.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        decode("device profile", bytes)
    }
}

fn encode<T: Serialize>(value: &T) -> Bytes {
    postcard::to_stdvec(value)
        .expect("these types serialize without failing")
        .into()
}

fn decode<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, CodecError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(CodecError::new(
            what,
            bytes.len() - rest.len(),
            "bytes after its end",
        )),
        Err(e) => Err(CodecError::new(what, 0, e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::Distribution;
    use burn_ir::{BinaryOpIr, FloatOperationIr, NumericOperationIr, RandomOpIr, TensorId};
    use proptest::prelude::*;

    use super::*;

    fn tensor(id: u64) -> TensorIr {
        TensorIr::uninit(TensorId::new(id), Shape::new([2, 3]), DType::F32)
    }

    fn ops() -> Vec<OperationIr> {
        let add = BinaryOpIr {
            lhs: tensor(1),
            rhs: tensor(2),
            out: tensor(3),
        };
        let random = RandomOpIr {
            out: tensor(4),
            distribution: Distribution::Uniform(0.0, 1.0),
        };
        vec![
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(add)),
            OperationIr::Float(DType::F32, FloatOperationIr::Random(random)),
            OperationIr::Drop(tensor(3)),
        ]
    }

    fn encoded() -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = OpEncoder::default();
        ops().iter().for_each(|op| encoder.encode(op, &mut bytes));
        bytes
    }

    #[test]
    fn ops_survive_the_round_trip() {
        assert_eq!(OpDecoder::default().decode(&encoded(), 3).unwrap(), ops());
    }

    #[test]
    fn names_are_short() {
        let names: Vec<String> = ops().iter().map(op_name).collect();
        assert_eq!(names, ["NumericFloat.Add", "Float.Random", "Drop"]);
    }

    #[test]
    fn a_wrong_count_is_an_error_with_its_place() {
        let bytes = encoded();
        let short = OpDecoder::default().decode(&bytes, 2).unwrap_err();
        assert!(short.rule.contains("after the last of 2 ops"), "{short}");
        let long = OpDecoder::default().decode(&bytes, 4).unwrap_err();
        assert_eq!(long.offset, bytes.len());
        let limit = OpDecoder::default().decode(&bytes, u32::MAX).unwrap_err();
        assert!(limit.rule.contains("more than"), "{limit}");
    }

    #[test]
    fn a_type_that_cannot_be_addressed_is_refused() {
        let huge = encode_type(&Shape::new([1 << 40, 1 << 40]), DType::F32);
        assert!(
            decode_type(Some(&huge))
                .unwrap_err()
                .rule
                .contains("more bytes")
        );
        let deep = v1::TensorType {
            shape: vec![1; MAX_RANK + 1],
            ..huge
        };
        assert!(
            decode_type(Some(&deep))
                .unwrap_err()
                .rule
                .contains("dimensions")
        );
        assert!(decode_type(None).is_err());
    }

    proptest! {
        #[test]
        fn mutated_streams_never_panic(
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
            count in 0u32..6,
        ) {
            let mut bytes = encoded();
            for (at, value) in flips {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(cut.index(bytes.len() + 1));
            if let Ok(ops) = OpDecoder::default().decode(&bytes, count) {
                prop_assert_eq!(ops.len(), count as usize);
                ops.iter().for_each(|op| assert!(!op_name(op).is_empty()));
            }
        }
    }
}
