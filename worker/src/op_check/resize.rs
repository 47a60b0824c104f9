//! Adaptive pools, interpolation, and windows laid out as columns.

use burn_ir::{InterpolateBackwardOpIr, InterpolateOpIr, TensorIr, Unfold4dOpIr};

use super::{
    Broken, Checked,
    conv::{COLUMN_BYTES, Sliding, graded},
    rules::{Kind, alike, has_dtype, makes, must, product, ranked, same_dtype, show, sum},
    scratch::{bytes, threads, times, total, widened},
};

/// Bytes that Flex stores for each row and column of the output: at most six input
/// positions and weights.
const TAPS_BYTES: u64 = 128;

pub(super) fn adaptive<const N: usize>(x: &TensorIr, out: &TensorIr, size: [usize; N]) -> Checked {
    Kind::Float.of(x)?;
    let x_dims = ranked("the input", x, N + 2)?;
    scaled(&x_dims[2..], &size)?;
    has_dtype(out, x.dtype)?;
    super::rules::has_dims(out, x_dims[..2].iter().chain(&size).copied())?;
    Ok(total(&[bytes(x), widened(x), widened(out)]))
}

pub(super) fn adaptive_backward<const N: usize>(
    x: &TensorIr,
    grad: &TensorIr,
    out: &TensorIr,
) -> Checked {
    Kind::Float.of(x)?;
    same_dtype(x, grad)?;
    let (of, to) = (
        ranked("the input", x, N + 2)?,
        ranked("the gradient", grad, N + 2)?,
    );
    must!(
        of[..2] == to[..2],
        "a gradient {} does not fit an input {}",
        show(to),
        show(of)
    );
    scaled(&of[2..], &to[2..])?;
    alike(out, x)?;
    Ok(total(&[
        bytes(grad),
        widened(x),
        widened(grad),
        widened(out),
    ]))
}

/// Checks for overflow, as kernels multiply the position in one with the size of the other.
fn scaled(of: &[usize], to: &[usize]) -> Result<(), Broken> {
    for (&of, &to) in of.iter().zip(to) {
        product(&[sum(&[of, 1])?, sum(&[to, 1])?])?;
    }
    Ok(())
}

pub(super) fn interpolate(op: &InterpolateOpIr) -> Checked {
    let derived = interpolated(&op.x, op.output_size)?;
    makes(&op.out, &derived, op.x.dtype)?;
    Ok(total(&[
        taps(op.output_size),
        bytes(&op.x),
        widened(&op.x),
        widened(&op.out),
    ]))
}

pub(super) fn interpolate_backward(op: &InterpolateBackwardOpIr) -> Checked {
    let derived = interpolated(&op.x, op.output_size)?;
    graded(&op.x, &op.grad, &derived)?;
    alike(&op.out, &op.x)?;
    Ok(total(&[
        taps(op.output_size),
        bytes(&op.grad),
        widened(&op.x),
        widened(&op.grad),
        widened(&op.out),
    ]))
}

fn interpolated(x: &TensorIr, size: [usize; 2]) -> Result<[usize; 4], Broken> {
    Kind::Float.of(x)?;
    let x = ranked("the input", x, 4)?;
    must!(
        x[2] >= 1 && x[3] >= 1,
        "an empty input {} cannot be interpolated",
        show(x)
    );
    scaled(&x[2..], &size)?;
    Ok([x[0], x[1], size[0], size[1]])
}

fn taps(size: [usize; 2]) -> u64 {
    total(&size.map(|of| of as u64)).saturating_mul(TAPS_BYTES)
}

/// Checks an unfold, which backends compute by a convolution with a weight of ones and
/// zeros.
pub(super) fn unfold4d(op: &Unfold4dOpIr) -> Checked {
    Kind::Float.of(&op.x)?;
    let x = ranked("the input", &op.x, 4)?;
    let [height, width] = op.kernel_size;
    let column = product(&[x[1], height, width])?;
    let weight = TensorIr {
        shape: [column, x[1], height, width].into(),
        ..op.x.clone()
    };
    super::rules::volume(&weight)?;
    let sliding = Sliding {
        stride: op.options.stride,
        padding: op.options.padding.map(|padding| (padding, padding)),
        dilation: op.options.dilation,
        groups: 1,
    };
    let windows = sliding.dims(&op.x, &weight)?;
    let places = product(&windows[2..])?;
    makes(&op.out, &[x[0], column, places], op.x.dtype)?;
    let tile = (column as u64).saturating_mul(2 * 512);
    Ok(total(&[
        times(&[column, column]).saturating_mul(2 * COLUMN_BYTES),
        tile.saturating_mul(COLUMN_BYTES).saturating_mul(threads()),
        bytes(&op.x).saturating_mul(2),
        widened(&op.x),
        widened(&op.out),
    ]))
}
