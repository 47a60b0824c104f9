//! Converts ops and tensor types to bytes and back.
//!
//! One [`OpEncoder`] and one [`OpDecoder`] belong to each session. They process the same
//! ops in the same order, so the encoding may refer to earlier ops. Frames are the unit:
//! a frame is encoded once and decoded once, and a retransmission sends the very same
//! bytes.
//!
//! A program that trains a model repeats the same ops again and again, so a step that is
//! like the last one costs some tens of bytes:
//!
//! - `flatten` splits an op into its *template* (kind, shapes, dtypes, attributes) and
//!   the *values* in its holes (tensor ids, scalars, indices);
//! - `template` numbers the templates, so that each crosses the wire once;
//! - `value` converts ids to a form that is the same in each iteration of a loop;
//! - `history` keeps the last ops, and `model`, of which both ends have one, predicts
//!   from them the next op;
//! - `encoder` writes what the model did not predict. It uses `finder`, which finds the
//!   op in the history from which to continue;
//! - `wire` has the grammar of the encoding, and `decoder` decodes it;
//! - `name` returns the names of ops.
//!
//! Tensor types and device profiles are postcard over Burn's own types. Received bytes
//! are not trusted: every length is checked against the bytes that are there, and the
//! breach of a rule is a [`CodecError`] that names the position.

mod decoder;
mod encoder;
mod finder;
mod flatten;
mod history;
mod model;
mod name;
mod template;
mod value;
mod wire;

#[cfg(test)]
mod tests;

use burn_backend::{DType, Shape};
use burn_ir::TensorIr;
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub use self::{
    decoder::{DecodedOp, DecodedOps, OpDecoder},
    encoder::OpEncoder,
    name::OpName,
};
use crate::v1;

/// Maximum number of ops in one frame.
pub const MAX_OPS_PER_FRAME: u32 = 1 << 16;

/// Maximum size in bytes of a frame's ops once they are written out in full. A frame of a
/// few bytes can stand for very many ops.
pub const MAX_PLAIN_BYTES_PER_FRAME: usize = 8 << 20;

/// Maximum number of dimensions of a tensor. In Burn the rank is part of a tensor's type, and
/// programs use single-digit ranks; a rule of an op may compare each pair of dimensions, or use a
/// bit for each.
pub const MAX_RANK: usize = 32;

/// Why bytes could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {what} at byte {offset}: {rule}")]
pub struct CodecError {
    /// What was being decoded.
    pub what: &'static str,
    /// Byte offset in the input at which decoding failed.
    pub offset: usize,
    /// The rule that was broken.
    pub rule: String,
}

impl CodecError {
    pub(crate) fn new(what: &'static str, offset: usize, rule: impl Into<String>) -> Self {
        let rule = rule.into();
        Self { what, offset, rule }
    }
}

/// Encodes the type of a tensor.
pub fn encode_type(shape: &Shape, dtype: DType) -> v1::TensorType {
    v1::TensorType {
        shape: shape.iter().map(|&dim| dim as u64).collect(),
        dtype: encode(&dtype),
    }
}

/// Decodes the type of a tensor; also returns the size of the tensor's data in bytes.
///
/// # Errors
///
/// When the type is missing, its dtype does not exist, or its shape has more than
/// [`MAX_RANK`] dimensions or more bytes than can be addressed.
pub fn decode_type(kind: Option<&v1::TensorType>) -> Result<(Shape, DType, usize), CodecError> {
    let error = |rule: String| CodecError::new("tensor type", 0, rule);
    let kind = kind.ok_or_else(|| error("the type is missing".into()))?;
    let dtype: DType = decode("dtype", &kind.dtype)?;
    if kind.shape.len() > MAX_RANK {
        return Err(error(rank_error(kind.shape.len())));
    }
    let shape: Option<Vec<usize>> = kind
        .shape
        .iter()
        .map(|&d| usize::try_from(d).ok())
        .collect();
    let shape =
        Shape::from(shape.ok_or_else(|| error("a dimension exceeds the address space".into()))?);
    let bytes = tensor_bytes(&shape, dtype).ok_or_else(|| {
        error(format!(
            "{shape} of {} has more bytes than can be addressed",
            dtype.name()
        ))
    })?;
    Ok((shape, dtype, bytes))
}

fn rank_error(rank: usize) -> String {
    format!("a shape has {rank} dimensions; the limit is {MAX_RANK}")
}

/// Returns the size of a tensor's data in bytes, or `None` if it overflows.
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
/// When the bytes are not a tensor reference, or its shape has more than [`MAX_RANK`] dimensions.
pub fn decode_tensor(bytes: &[u8]) -> Result<TensorIr, CodecError> {
    let tensor: TensorIr = decode("tensor", bytes)?;
    match tensor.shape.len() {
        0..=MAX_RANK => Ok(tensor),
        rank => Err(CodecError::new("tensor", 0, rank_error(rank))),
    }
}

/// Maximum number of dtypes in a profile: somewhat more than exist.
const MAX_DTYPES: usize = 64;

/// What a client must know of a device to build ops for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// The dtypes that the device prefers.
    pub settings: burn_backend::DeviceSettings,
    /// The operations that the device supports for each dtype, as the bits of a
    /// `DTypeUsageSet`.
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
    /// When the bytes are not a profile.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        let profile: Self = decode("device profile", bytes)?;
        match profile.dtypes.len() {
            0..=MAX_DTYPES => Ok(profile),
            count => {
                let rule = format!("the profile has {count} dtypes; the limit is {MAX_DTYPES}");
                Err(CodecError::new("device profile", 0, rule))
            }
        }
    }
}

fn encode<T: Serialize>(value: &T) -> Bytes {
    postcard::to_stdvec(value)
        .expect("these types serialize without failing")
        .into()
}

fn decode<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, CodecError> {
    match take(bytes) {
        Ok((value, len)) if len == bytes.len() => Ok(value),
        Ok((_, len)) => Err(CodecError::new(
            what,
            len,
            "bytes follow the end of the value",
        )),
        Err((at, e)) => Err(CodecError::new(what, at, e.to_string())),
    }
}

/// Decodes a value from the front of `bytes`, and returns it with the number of bytes it
/// took. The error has the offset at which decoding failed.
fn take<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, usize), (usize, postcard::Error)> {
    let mut reader = postcard::Deserializer::from_bytes(bytes);
    let value = T::deserialize(&mut reader);
    let at = bytes.len() - reader.finalize().map_or(0, <[u8]>::len);
    match value {
        Ok(value) => Ok((value, at)),
        Err(e) => Err((at, e)),
    }
}
