//! Adaptive pools, interpolation, and unfolding (windows laid out as columns).

use burn_ir::{InterpolateBackwardOpIr, InterpolateOpIr, TensorIr, Unfold4dOpIr};

use super::{
    OpCheckResult, RuleViolation,
    conv::{COLUMN_BYTES, ConvGeometry, check_gradient},
    rules::{
        Kind, check_output, check_same_as_input, dims_of_rank, format_dims, has_dtype, must,
        product, same_dtype, sum,
    },
    scratch::{bytes, f32_copy_bytes, saturating_product, saturating_sum, threads},
};

/// Bytes that Flex stores for each row and column of the output: at most six input
/// positions and weights.
const TAPS_BYTES: u64 = 128;

pub(super) fn adaptive<const N: usize>(
    x: &TensorIr,
    out: &TensorIr,
    size: [usize; N],
) -> OpCheckResult {
    Kind::Float.of(x)?;
    let x_dims = dims_of_rank("the input", x, N + 2)?;
    check_scaling(&x_dims[2..], &size)?;
    has_dtype(out, x.dtype)?;
    super::rules::has_dims(out, x_dims[..2].iter().chain(&size).copied())?;
    Ok(saturating_sum(&[
        bytes(x),
        f32_copy_bytes(x),
        f32_copy_bytes(out),
    ]))
}

pub(super) fn adaptive_backward<const N: usize>(
    x: &TensorIr,
    grad: &TensorIr,
    out: &TensorIr,
) -> OpCheckResult {
    Kind::Float.of(x)?;
    same_dtype(x, grad)?;
    let (of, to) = (
        dims_of_rank("the input", x, N + 2)?,
        dims_of_rank("the gradient", grad, N + 2)?,
    );
    must!(
        of[..2] == to[..2],
        "a gradient {} does not fit an input {}",
        format_dims(to),
        format_dims(of)
    );
    check_scaling(&of[2..], &to[2..])?;
    check_same_as_input(out, x)?;
    Ok(saturating_sum(&[
        bytes(grad),
        f32_copy_bytes(x),
        f32_copy_bytes(grad),
        f32_copy_bytes(out),
    ]))
}

/// Checks that the sizes `of` and `to` can be multiplied axis by axis without overflow, as
/// kernels multiply a position in one tensor with the size of the other.
fn check_scaling(of: &[usize], to: &[usize]) -> Result<(), RuleViolation> {
    for (&of, &to) in of.iter().zip(to) {
        product(&[sum(&[of, 1])?, sum(&[to, 1])?])?;
    }
    Ok(())
}

pub(super) fn interpolate(op: &InterpolateOpIr) -> OpCheckResult {
    let derived = interpolated(&op.x, op.output_size)?;
    check_output(&op.out, &derived, op.x.dtype)?;
    Ok(saturating_sum(&[
        tap_bytes(op.output_size),
        bytes(&op.x),
        f32_copy_bytes(&op.x),
        f32_copy_bytes(&op.out),
    ]))
}

pub(super) fn interpolate_backward(op: &InterpolateBackwardOpIr) -> OpCheckResult {
    let derived = interpolated(&op.x, op.output_size)?;
    check_gradient(&op.x, &op.grad, &derived)?;
    check_same_as_input(&op.out, &op.x)?;
    Ok(saturating_sum(&[
        tap_bytes(op.output_size),
        bytes(&op.grad),
        f32_copy_bytes(&op.x),
        f32_copy_bytes(&op.grad),
        f32_copy_bytes(&op.out),
    ]))
}

fn interpolated(x: &TensorIr, size: [usize; 2]) -> Result<[usize; 4], RuleViolation> {
    Kind::Float.of(x)?;
    let x = dims_of_rank("the input", x, 4)?;
    must!(
        x[2] >= 1 && x[3] >= 1,
        "an empty input {} cannot be interpolated",
        format_dims(x)
    );
    check_scaling(&x[2..], &size)?;
    Ok([x[0], x[1], size[0], size[1]])
}

fn tap_bytes(size: [usize; 2]) -> u64 {
    saturating_sum(&size.map(|of| of as u64)).saturating_mul(TAPS_BYTES)
}

/// Checks an unfold, which backends compute by a convolution with a weight of ones and
/// zeros.
pub(super) fn unfold4d(op: &Unfold4dOpIr) -> OpCheckResult {
    Kind::Float.of(&op.x)?;
    let x = dims_of_rank("the input", &op.x, 4)?;
    let [height, width] = op.kernel_size;
    let column = product(&[x[1], height, width])?;
    let weight = TensorIr {
        shape: [column, x[1], height, width].into(),
        ..op.x.clone()
    };
    super::rules::check_volume(&weight)?;
    let geometry = ConvGeometry {
        stride: op.options.stride,
        padding: op.options.padding.map(|padding| (padding, padding)),
        dilation: op.options.dilation,
        groups: 1,
    };
    let windows = geometry.dims(&op.x, &weight)?;
    let positions = product(&windows[2..])?;
    check_output(&op.out, &[x[0], column, positions], op.x.dtype)?;
    let tile = (column as u64).saturating_mul(2 * 512);
    Ok(saturating_sum(&[
        saturating_product(&[column, column]).saturating_mul(2 * COLUMN_BYTES),
        tile.saturating_mul(COLUMN_BYTES).saturating_mul(threads()),
        bytes(&op.x).saturating_mul(2),
        f32_copy_bytes(&op.x),
        f32_copy_bytes(&op.out),
    ]))
}
