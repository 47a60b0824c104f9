//! Pools of one and two dims.

use burn_ir::TensorIr;

use super::{
    OpCheckResult, RuleViolation,
    conv::{check_gradient, extent},
    rules::{
        Kind, check_dims, check_fits_kernels, check_output, check_same_as_input, dims,
        dims_of_rank, has_dims, must, product, sum, too_large,
    },
    scratch::{bytes, elements, f32_copy_bytes, indices, saturating_product, saturating_sum},
};

/// Most positions that the backward pass of an average pool may visit. Flex visits each
/// position of a window, even outside the input: this number takes minutes.
const MAX_VISITS: u64 = 1 << 38;

/// The windows of a pool over `N` dims.
pub(super) struct Pool<const N: usize> {
    pub(super) kernel: [usize; N],
    pub(super) stride: [usize; N],
    pub(super) padding: [usize; N],
    pub(super) dilation: [usize; N],
    pub(super) ceil_mode: bool,
}

impl<const N: usize> Pool<N> {
    /// Derives the dims of the output.
    fn dims(&self, x: &TensorIr) -> Result<Vec<usize>, RuleViolation> {
        Kind::Float.of(x)?;
        let x = dims_of_rank("the input", x, N + 2)?;
        let mut out = x[..2].to_vec();
        for i in 0..N {
            let (size, stride, padding) = (x[i + 2], self.stride[i], self.padding[i]);
            must!(stride >= 1, "a stride of {stride} must be at least 1");
            // Kernels add any two of these numbers, so the sum must not overflow.
            let padded = sum(&[size, padding, padding, stride])? - stride;
            let kernel = extent(self.kernel[i], self.dilation[i])?;
            let begin = if self.ceil_mode { stride - 1 } else { 0 };
            let room = (padded + begin).checked_sub(kernel);
            let Some(room) = room else {
                let reason = format!(
                    "a window of {kernel} does not fit an axis of {padded} (padding included)"
                );
                return Err(super::rules::mismatch(reason));
            };
            let windows = room / stride + 1;
            // A last window that would start beyond the input is left out.
            let beyond = self.ceil_mode && (windows - 1) * stride >= size + padding;
            check_fits_kernels("padded axis", &[padded])?;
            out.push(windows - usize::from(beyond));
        }
        check_fits_kernels("stride", &self.stride)?;
        check_fits_kernels("dilation", &self.dilation)?;
        check_fits_kernels("window", &self.kernel)?;
        Ok(out)
    }
}

pub(super) fn pool<const N: usize>(pool: &Pool<N>, x: &TensorIr, out: &TensorIr) -> OpCheckResult {
    check_output(out, &pool.dims(x)?, x.dtype)?;
    // Flex computes the index of each maximum too.
    Ok(saturating_sum(&[
        bytes(x),
        f32_copy_bytes(x),
        f32_copy_bytes(out),
        indices(out),
    ]))
}

pub(super) fn max_with_indices<const N: usize>(
    max_pool: &Pool<N>,
    x: &TensorIr,
    out: &TensorIr,
    out_indices: &TensorIr,
) -> OpCheckResult {
    let scratch = pool(max_pool, x, out)?;
    Kind::Int.of(out_indices)?;
    has_dims(out_indices, dims(out).iter().copied())?;
    Ok(scratch)
}

pub(super) fn avg_backward<const N: usize>(
    pool: &Pool<N>,
    x: &TensorIr,
    grad: &TensorIr,
    out: &TensorIr,
) -> OpCheckResult {
    check_gradient(x, grad, &pool.dims(x)?)?;
    product(&pool.kernel)?;
    let visits = elements(grad).saturating_mul(saturating_product(&pool.kernel));
    if visits > MAX_VISITS {
        let reason = format!(
            "windows of {:?} for each of {} elements take too long",
            pool.kernel,
            elements(grad)
        );
        return Err(too_large(reason));
    }
    check_same_as_input(out, x)?;
    Ok(saturating_sum(&[
        bytes(grad),
        bytes(x),
        f32_copy_bytes(x),
        f32_copy_bytes(grad),
        f32_copy_bytes(out),
    ]))
}

pub(super) fn max_backward<const N: usize>(
    pool: &Pool<N>,
    x: &TensorIr,
    grad: &TensorIr,
    at: &TensorIr,
    out: &TensorIr,
) -> OpCheckResult {
    check_gradient(x, grad, &pool.dims(x)?)?;
    Kind::Int.of(at)?;
    check_dims("the indices", at, dims(grad))?;
    check_same_as_input(out, x)?;
    Ok(saturating_sum(&[
        bytes(grad),
        bytes(x),
        indices(at),
        f32_copy_bytes(x),
        f32_copy_bytes(grad),
        f32_copy_bytes(out),
    ]))
}
