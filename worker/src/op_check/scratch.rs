//! How much memory an op's kernel takes beside its inputs and outputs.
//!
//! Estimates from above, after Flex's kernels, which allocate what the shapes of inputs and
//! outputs do not show: columns of convolutions, indices of another width, wider copies of
//! half types. All arithmetic saturates: what is beyond counting fits no device.

use std::{sync::OnceLock, thread::available_parallelism};

use burn_backend::DType;
use burn_ir::TensorIr;

/// Bytes of an index as Flex's kernels have it.
const INDEX_BYTES: u64 = 8;

/// Threads that kernels run on, each with a scratch of its own.
pub(super) fn threads() -> u64 {
    static THREADS: OnceLock<u64> = OnceLock::new();
    *THREADS.get_or_init(|| available_parallelism().map_or(1, |count| count.get() as u64))
}

/// The product, saturating.
pub(super) fn times(factors: &[usize]) -> u64 {
    factors.iter().fold(1u64, |product, &factor| {
        product.saturating_mul(factor as u64)
    })
}

/// The sum, saturating.
pub(super) fn total(parts: &[u64]) -> u64 {
    parts
        .iter()
        .fold(0u64, |sum, &part| sum.saturating_add(part))
}

/// Elements of a tensor.
pub(super) fn elements(tensor: &TensorIr) -> u64 {
    times(tensor.shape.as_slice())
}

/// Bytes of a tensor.
pub(super) fn bytes(tensor: &TensorIr) -> u64 {
    elements(tensor).saturating_mul(tensor.dtype.size() as u64)
}

/// Bytes of a tensor as kernels compute with it: half types as `f32`, in a copy.
pub(super) fn widened(tensor: &TensorIr) -> u64 {
    match tensor.dtype {
        DType::F16 | DType::BF16 => elements(tensor).saturating_mul(4),
        _ => 0,
    }
}

/// Bytes of a tensor's elements as indices.
pub(super) fn indices(tensor: &TensorIr) -> u64 {
    elements(tensor).saturating_mul(INDEX_BYTES)
}
