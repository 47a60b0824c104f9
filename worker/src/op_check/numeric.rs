//! Ops on numbers, both floats and integers.

use burn_ir::{
    BinaryOpIr, NumericOperationIr, PadModeIr, PadOpIr, ReduceDimOpIr, ReduceOpIr, ScalarOpIr,
    TensorIr, UnaryOpIr,
};

use super::{
    Broken, Checked,
    float::random,
    rules::{
        Kind, alike, axes, axis, broadcast, but_axis, dims, has_dims, has_dtype, makes, must,
        same_dtype, show, sum, unsupported, volume,
    },
    scratch::{bytes, indices, total, widened},
};

pub(super) fn check(op: &NumericOperationIr, kind: Kind) -> Checked {
    use NumericOperationIr as Op;
    match op {
        Op::Add(op) | Op::Sub(op) | Op::Div(op) | Op::Rem(op) | Op::Mul(op) => binary(op, kind),
        Op::AddScalar(op)
        | Op::SubScalar(op)
        | Op::DivScalar(op)
        | Op::RemScalar(op)
        | Op::MulScalar(op)
        | Op::PowiScalar(op)
        | Op::ClampMin(op)
        | Op::ClampMax(op) => scalar(op, kind),
        Op::Abs(op) | Op::Neg(op) | Op::Sign(op) => unary(op, kind),
        Op::Powi(op) => powi(op, kind),
        Op::Clamp(op) => {
            kind.of(&op.tensor)?;
            alike(&op.out, &op.tensor)
        }
        Op::Full(op) => {
            kind.of(&op.out)?;
            volume(&op.out)?;
            Ok(0)
        }
        Op::IntRandom(op) => match kind {
            Kind::Int => random(op, kind),
            Kind::Float | Kind::Bool => unsupported("random integers as floats"),
        },
        Op::Greater(op) | Op::GreaterEqual(op) | Op::Lower(op) | Op::LowerEqual(op) => {
            compare(op, kind)
        }
        Op::GreaterElem(op)
        | Op::GreaterEqualElem(op)
        | Op::LowerElem(op)
        | Op::LowerEqualElem(op) => compare_scalar(op, kind),
        Op::Mean(op) | Op::Sum(op) | Op::Prod(op) | Op::Max(op) | Op::Min(op) | Op::MaxAbs(op) => {
            reduce(op, kind)
        }
        Op::MeanDim(op)
        | Op::SumDim(op)
        | Op::ProdDim(op)
        | Op::MaxDim(op)
        | Op::MinDim(op)
        | Op::MaxAbsDim(op) => reduce_dim(op, kind, 1),
        Op::TopK(op) => {
            let k = top(&op.input, op.axis, op.accumulator_len)?;
            reduce_dim(op, kind, k)?;
            Ok(sorting(&op.input))
        }
        Op::ArgMax(op) | Op::ArgMin(op) => arg_reduce(op, kind, 1),
        Op::ArgTopK(op) => {
            let k = top(&op.input, op.axis, op.accumulator_len)?;
            arg_reduce(op, kind, k)?;
            Ok(sorting(&op.input))
        }
        Op::SumDims(op) => {
            kind.of(&op.input)?;
            axes(&op.input, &op.axes)?;
            has_dtype(&op.out, op.input.dtype)?;
            let kept = |(i, &dim)| if op.axes.contains(&i) { 1 } else { dim };
            has_dims(&op.out, dims(&op.input).iter().enumerate().map(kept))?;
            Ok(bytes(&op.input))
        }
        Op::MaxDimWithIndices(op) | Op::MinDimWithIndices(op) => {
            picked(&op.tensor, op.dim, 1, [&op.out, &op.out_indices], kind)
        }
        Op::TopKWithIndices(op) => {
            let k = top(&op.tensor, op.dim, op.k)?;
            picked(&op.tensor, op.dim, k, [&op.out, &op.out_indices], kind)
        }
        Op::CumSum(op) | Op::CumProd(op) | Op::CumMin(op) | Op::CumMax(op) => {
            kind.of(&op.input)?;
            axis(&op.input, op.axis)?;
            alike(&op.out, &op.input)?;
            Ok(widened(&op.input))
        }
        Op::Sort(op) => {
            sorts(&op.input, op.dim, kind)?;
            alike(&op.out, &op.input)?;
            Ok(sorting(&op.input))
        }
        Op::SortWithIndices(op) => {
            sorts(&op.input, op.dim, kind)?;
            alike(&op.out, &op.input)?;
            Kind::Int.of(&op.out_indices)?;
            has_dims(&op.out_indices, dims(&op.input).iter().copied())?;
            Ok(sorting(&op.input))
        }
        Op::ArgSort(op) => {
            sorts(&op.input, op.dim, kind)?;
            Kind::Int.of(&op.out)?;
            has_dims(&op.out, dims(&op.input).iter().copied())?;
            Ok(sorting(&op.input))
        }
        Op::Pad(op) => pad(op, kind),
    }
}

/// Checks an op that makes one output element for each element of the input.
pub(super) fn unary(op: &UnaryOpIr, kind: Kind) -> Checked {
    kind.of(&op.input)?;
    alike(&op.out, &op.input)
}

/// Checks an op that makes one output element for each element of the input and one number.
pub(super) fn scalar(op: &ScalarOpIr, kind: Kind) -> Checked {
    kind.of(&op.lhs)?;
    alike(&op.out, &op.lhs)
}

/// Checks an op with two operands of the same dtype; kernels use the dtype of the first.
pub(super) fn binary(op: &BinaryOpIr, kind: Kind) -> Checked {
    kind.of(&op.lhs)?;
    same_dtype(&op.lhs, &op.rhs)?;
    has_dtype(&op.out, op.lhs.dtype)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    Ok(0)
}

/// Checks a comparison. The result for booleans has their dtype; the result for other kinds
/// has any boolean dtype.
pub(super) fn compare(op: &BinaryOpIr, kind: Kind) -> Checked {
    kind.of(&op.lhs)?;
    same_dtype(&op.lhs, &op.rhs)?;
    answers(&op.out, &op.lhs, kind)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    Ok(0)
}

/// Checks a comparison with one value, as [`compare`].
pub(super) fn compare_scalar(op: &ScalarOpIr, kind: Kind) -> Checked {
    kind.of(&op.lhs)?;
    answers(&op.out, &op.lhs, kind)?;
    has_dims(&op.out, dims(&op.lhs).iter().copied())?;
    Ok(0)
}

/// Checks the dtype of the result of a comparison of `about`.
pub(super) fn answers(out: &TensorIr, about: &TensorIr, kind: Kind) -> Result<(), Broken> {
    match kind {
        Kind::Float | Kind::Int => Kind::Bool.of(out),
        Kind::Bool => has_dtype(out, about.dtype),
    }
}

/// Checks an integer power of floats or integers.
fn powi(op: &BinaryOpIr, kind: Kind) -> Checked {
    kind.of(&op.lhs)?;
    Kind::Int.of(&op.rhs)?;
    if kind == Kind::Int {
        same_dtype(&op.lhs, &op.rhs)?;
    }
    has_dtype(&op.out, op.lhs.dtype)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    // The integer exponents as floats.
    Ok(bytes(&op.out))
}

fn reduce(op: &ReduceOpIr, kind: Kind) -> Checked {
    kind.of(&op.input)?;
    makes(&op.out, &[1], op.input.dtype)?;
    Ok(bytes(&op.input))
}

fn reduce_dim(op: &ReduceDimOpIr, kind: Kind, len: usize) -> Checked {
    kind.of(&op.input)?;
    has_dtype(&op.out, op.input.dtype)?;
    keeps(op, len)?;
    Ok(bytes(&op.input))
}

fn arg_reduce(op: &ReduceDimOpIr, kind: Kind, len: usize) -> Checked {
    kind.of(&op.input)?;
    Kind::Int.of(&op.out)?;
    keeps(op, len)?;
    Ok(indices(&op.out).saturating_add(bytes(&op.input)))
}

/// Checks a reduction that keeps `len` elements of an axis.
pub(super) fn keeps(op: &ReduceDimOpIr, len: usize) -> Result<(), Broken> {
    let declared = op.accumulator_len;
    must!(
        declared == len,
        "a reduction to {declared} elements is declared for an axis that keeps {len}"
    );
    but_axis(&op.out, &op.input, op.axis, len)
}

/// Checks that an axis has `k` elements, and returns `k`.
fn top(input: &TensorIr, along: usize, k: usize) -> Result<usize, Broken> {
    axis(input, along)?;
    let of = dims(input)[along];
    must!(
        k <= of,
        "the first {k} elements were requested of an axis of {of}"
    );
    Ok(k)
}

fn picked(
    tensor: &TensorIr,
    along: usize,
    len: usize,
    [out, out_indices]: [&TensorIr; 2],
    kind: Kind,
) -> Checked {
    kind.of(tensor)?;
    has_dtype(out, tensor.dtype)?;
    but_axis(out, tensor, along, len)?;
    Kind::Int.of(out_indices)?;
    but_axis(out_indices, tensor, along, len)?;
    Ok(sorting(tensor))
}

fn sorts(input: &TensorIr, along: usize, kind: Kind) -> Result<(), Broken> {
    kind.of(input)?;
    axis(input, along)
}

/// Returns the bytes for sorting: twice a copy of the tensor and of the index of each
/// element, before and after.
fn sorting(input: &TensorIr) -> u64 {
    let once = total(&[bytes(input), widened(input), indices(input)]);
    once.saturating_mul(2)
}

fn pad(op: &PadOpIr, kind: Kind) -> Checked {
    kind.of(&op.input)?;
    let input = dims(&op.input);
    let pairs = op.padding.len();
    must!(
        pairs == input.len(),
        "{pairs} pairs of padding do not fit {}",
        show(input)
    );
    has_dtype(&op.out, op.input.dtype)?;
    for (i, (&dim, &(before, after))) in input.iter().zip(&op.padding).enumerate() {
        sum(&[dim, before, after])?;
        let holds = match op.mode {
            PadModeIr::Constant(_) => true,
            PadModeIr::Reflect => before < dim && after < dim,
            PadModeIr::Edge => dim != 0 || (before == 0 && after == 0),
        };
        must!(
            holds,
            "a padding of {before} and {after} is not possible along axis {i} of {dim} ({:?})",
            op.mode
        );
    }
    let padded = input.iter().zip(&op.padding);
    has_dims(
        &op.out,
        padded.map(|(dim, (before, after))| dim + before + after),
    )?;
    // Each side is computed separately and then copied to its position.
    Ok(bytes(&op.out).saturating_mul(2))
}
