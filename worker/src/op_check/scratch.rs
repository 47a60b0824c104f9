//! Estimates the memory that an op's kernel needs in addition to its inputs and outputs.
//!
//! The estimates are upper bounds for Flex's kernels, which allocate memory that does not
//! follow from the shapes of inputs and outputs alone: columns of convolutions, indices of
//! another width, wider copies of half types. All arithmetic saturates: an amount that
//! overflows fits no device.

use std::{sync::OnceLock, thread::available_parallelism};

use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_ir::{ScatterOpIr, TensorIr};
use tensord_backend::ARE_GPUS_EXACT;

/// Size of an index in Flex's kernels.
const INDEX_BYTES: u64 = 8;

/// Returns the number of threads that kernels run on, each with its own scratch memory.
pub(super) fn threads() -> u64 {
    static THREADS: OnceLock<u64> = OnceLock::new();
    *THREADS.get_or_init(|| available_parallelism().map_or(1, |count| count.get() as u64))
}

/// Multiplies `factors`. Returns `u64::MAX` on overflow.
pub(super) fn saturating_product(factors: &[usize]) -> u64 {
    factors.iter().fold(1u64, |product, &factor| {
        product.saturating_mul(factor as u64)
    })
}

/// Adds up `parts`. Returns `u64::MAX` on overflow.
pub(super) fn saturating_sum(parts: &[u64]) -> u64 {
    parts
        .iter()
        .fold(0u64, |sum, &part| sum.saturating_add(part))
}

/// Returns the number of elements of a tensor.
pub(super) fn elements(tensor: &TensorIr) -> u64 {
    saturating_product(tensor.shape.as_slice())
}

/// Returns the bytes of a tensor.
pub(super) fn bytes(tensor: &TensorIr) -> u64 {
    elements(tensor).saturating_mul(tensor.dtype.size() as u64)
}

/// Returns the bytes of the copy that Flex makes of a view, with its elements in order, before it converts them to
/// another type. Other ops, too, make such a copy, and turn that into their output.
pub(super) fn ordered_bytes(tensor: &TensorIr) -> u64 {
    bytes(tensor)
}

/// Returns the bytes of the `f32` copy that kernels make of a tensor of a half type; 0 for
/// other types.
pub(super) fn f32_copy_bytes(tensor: &TensorIr) -> u64 {
    match tensor.dtype {
        DType::F16 | DType::BF16 => elements(tensor).saturating_mul(4),
        _ => 0,
    }
}

/// Returns the bytes of a tensor's elements converted to indices.
pub(super) fn indices(tensor: &TensorIr) -> u64 {
    elements(tensor).saturating_mul(INDEX_BYTES)
}

/// Returns the bytes that a scatter-add of floats needs in addition where GPUs are exact: two tensors like the output, for
/// the values at one position of the axis at a time (`backend/src/cube/exact.rs`).
pub(super) fn exact_scatter_bytes(op: &ScatterOpIr) -> u64 {
    let adds_floats = op.update == IndexingUpdateOp::Add && op.tensor.dtype.is_float();
    match ARE_GPUS_EXACT && adds_floats {
        true => bytes(&op.tensor).saturating_mul(2),
        false => 0,
    }
}

/// Returns the bytes that a reduction of all elements of `tensor` needs at most where GPUs are exact. Sums and means make
/// a contiguous copy, in `f32` if the type is a half one, and a copy of its whole rows.
pub(super) fn exact_sum_bytes(tensor: &TensorIr) -> u64 {
    let each = tensor.dtype.size().max(4) as u64;
    match ARE_GPUS_EXACT && tensor.dtype.is_float() {
        true => elements(tensor).saturating_mul(2 * each),
        false => 0,
    }
}
