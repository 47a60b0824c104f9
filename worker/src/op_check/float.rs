//! Ops on floats only.

use burn_ir::{CrossOpIr, FloatOperationIr, GridSample2dOpIr, MatmulOpIr};

use super::{
    OpCheckResult,
    numeric::{binary, scalar, unary},
    random,
    rules::{
        Kind, broadcast, check_output, dims, dims_of_rank, format_dims, has_dims, has_dtype, must,
        same_dtype, unsupported,
    },
    scratch::{bytes, f32_copy_bytes, ordered_bytes, saturating_sum},
};

pub(super) fn check(op: &FloatOperationIr) -> OpCheckResult {
    use FloatOperationIr as Op;
    match op {
        Op::Exp(op)
        | Op::Log(op)
        | Op::Log1p(op)
        | Op::Erf(op)
        | Op::Sqrt(op)
        | Op::Cos(op)
        | Op::Cosh(op)
        | Op::Sin(op)
        | Op::Sinh(op)
        | Op::Tan(op)
        | Op::Tanh(op)
        | Op::ArcCos(op)
        | Op::ArcCosh(op)
        | Op::ArcSin(op)
        | Op::ArcSinh(op)
        | Op::ArcTan(op)
        | Op::ArcTanh(op)
        | Op::Round(op)
        | Op::Floor(op)
        | Op::Ceil(op)
        | Op::Trunc(op)
        | Op::Recip(op) => unary(op, Kind::Float),
        Op::PowfScalar(op) => scalar(op, Kind::Float),
        Op::ArcTan2(op) | Op::Powf(op) | Op::Hypot(op) => binary(op, Kind::Float),
        Op::IntoInt(op) => {
            Kind::Float.of(&op.input)?;
            Kind::Int.of(&op.out)?;
            has_dims(&op.out, dims(&op.input).iter().copied())?;
            Ok(ordered_bytes(&op.input))
        }
        Op::IsNan(op) | Op::IsInf(op) => {
            Kind::Float.of(&op.input)?;
            Kind::Bool.of(&op.out)?;
            has_dims(&op.out, dims(&op.input).iter().copied())?;
            Ok(ordered_bytes(&op.input))
        }
        Op::Matmul(op) => matmul(op, Kind::Float),
        Op::Cross(op) => cross(op),
        Op::Random(op) => random::check(op, Kind::Float),
        Op::Quantize(_) | Op::Dequantize(_) => {
            unsupported("quantized tensors are not supported by Burn's router")
        }
        Op::GridSample2d(op) => grid_sample(op),
    }
}

/// Checks a matrix product, which Flex computes through unchecked pointers according to the
/// dims. Floats may have two different dtypes, which some backends can multiply.
pub(super) fn matmul(op: &MatmulOpIr, kind: Kind) -> OpCheckResult {
    let (lhs, rhs) = (dims(&op.lhs), dims(&op.rhs));
    kind.of(&op.lhs)?;
    kind.of(&op.rhs)?;
    if kind != Kind::Float {
        same_dtype(&op.lhs, &op.rhs)?;
    }
    has_dtype(&op.out, op.lhs.dtype)?;
    let rank = lhs.len();
    let fits = rank >= 2 && rhs.len() == rank && lhs[rank - 1] == rhs[rank - 2];
    must!(
        fits,
        "{} cannot be multiplied with {}",
        format_dims(lhs),
        format_dims(rhs)
    );
    for i in 0..rank - 2 {
        must!(
            lhs[i] == rhs[i] || lhs[i] == 1 || rhs[i] == 1,
            "batches of {} and {} along axis {i} do not broadcast",
            lhs[i],
            rhs[i]
        );
        // Flex uses the larger of the two for the output, and would read memory that an
        // empty batch does not have.
        must!(
            lhs[i].min(rhs[i]) > 0 || lhs[i] == rhs[i],
            "batches of {} and {} along axis {i} cannot be multiplied",
            lhs[i],
            rhs[i]
        );
    }
    let batch = |i: usize| if lhs[i] == 1 { rhs[i] } else { lhs[i] };
    let derived = (0..rank).map(|i| match rank - i {
        2 => lhs[i],
        1 => rhs[i],
        _ => batch(i),
    });
    has_dims(&op.out, derived)?;
    // Copies of half types as f32; integers are copied into contiguous rows.
    let wider = saturating_sum(&[
        f32_copy_bytes(&op.lhs),
        f32_copy_bytes(&op.rhs),
        f32_copy_bytes(&op.out),
    ]);
    match kind {
        Kind::Float => Ok(wider),
        Kind::Int | Kind::Bool => Ok(saturating_sum(&[bytes(&op.lhs), bytes(&op.rhs)])),
    }
}

fn cross(op: &CrossOpIr) -> OpCheckResult {
    Kind::Float.of(&op.lhs)?;
    same_dtype(&op.lhs, &op.rhs)?;
    has_dtype(&op.out, op.lhs.dtype)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    for side in [&op.lhs, &op.rhs] {
        let along = dims(side).get(op.dim);
        must!(
            along == Some(&3),
            "a cross product along axis {} of {} needs 3 elements there",
            op.dim,
            format_dims(dims(side))
        );
    }
    // Each component of each side, and each product, is a separate tensor.
    Ok(bytes(&op.out).saturating_mul(4))
}

fn grid_sample(op: &GridSample2dOpIr) -> OpCheckResult {
    Kind::Float.of(&op.tensor)?;
    same_dtype(&op.tensor, &op.grid)?;
    let (x, grid) = (
        dims_of_rank("the input", &op.tensor, 4)?,
        dims_of_rank("the grid", &op.grid, 4)?,
    );
    let fits = grid[0] == x[0] && grid[3] == 2;
    must!(
        fits,
        "a grid {} does not fit an input {}",
        format_dims(grid),
        format_dims(x)
    );
    // CubeCL's kernel clamps each position to the input, and assumes that the input is not
    // empty.
    let nothing = x[2..].contains(&0) && !dims(&op.out).contains(&0);
    must!(
        !nothing,
        "a grid {} cannot sample an empty input {}",
        format_dims(grid),
        format_dims(x)
    );
    check_output(&op.out, &[x[0], x[1], grid[1], grid[2]], op.tensor.dtype)?;
    // Backends without their own kernel gather each of the four neighbours.
    let around = bytes(&op.out).saturating_mul(8);
    Ok(saturating_sum(&[around, bytes(&op.grid).saturating_mul(8)]))
}
