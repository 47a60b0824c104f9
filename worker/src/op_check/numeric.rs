//! Ops on numbers, both floats and integers.

use burn_ir::{
    BinaryOpIr, ClampOpIr, DimOpIr, FullOpIr, NumericOperationIr, PadModeIr, PadOpIr,
    ReduceDimOpIr, ReduceDimsOpIr, ReduceOpIr, ScalarOpIr, SortOpIr, SortWithIndicesOpIr, TensorIr,
    TopKWithIndicesOpIr, UnaryOpIr,
};

use super::{
    OpCheckResult, RuleViolation, random,
    rules::{
        Kind, axes, axis, broadcast, check_dims_except, check_output, check_same_as_input,
        check_volume, dims, format_dims, has_dims, has_dtype, must, same_dtype, sum, unsupported,
    },
    scratch::{
        bytes, exact_sum_bytes, f32_copy_bytes, indices, saturating_product, saturating_sum,
    },
};

pub(super) fn check(op: &NumericOperationIr, kind: Kind) -> OpCheckResult {
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
        Op::Clamp(op) => clamp(op, kind),
        Op::Full(op) => full(op, kind),
        Op::IntRandom(op) => match kind {
            Kind::Int => random::check(op, kind),
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
        Op::TopK(op) => top_k(op, kind),
        Op::ArgMax(op) | Op::ArgMin(op) => arg_reduce(op, kind, 1),
        Op::ArgTopK(op) => arg_top_k(op, kind),
        Op::SumDims(op) => sum_dims(op, kind),
        Op::MaxDimWithIndices(op) | Op::MinDimWithIndices(op) => {
            check_with_indices(&op.tensor, op.dim, 1, [&op.out, &op.out_indices], kind)
        }
        Op::TopKWithIndices(op) => top_k_with_indices(op, kind),
        Op::CumSum(op) | Op::CumProd(op) | Op::CumMin(op) | Op::CumMax(op) => cumulative(op, kind),
        Op::Sort(op) => sort(op, kind),
        Op::SortWithIndices(op) => sort_with_indices(op, kind),
        Op::ArgSort(op) => arg_sort(op, kind),
        Op::Pad(op) => pad(op, kind),
    }
}

/// Checks a clamp to two bounds.
fn clamp(op: &ClampOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    check_same_as_input(&op.out, &op.tensor)
}

/// Checks a tensor that is filled with a value.
fn full(op: &FullOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.out)?;
    check_volume(&op.out)?;
    Ok(0)
}

/// Checks an op that returns the largest elements along a dim.
fn top_k(op: &ReduceDimOpIr, kind: Kind) -> OpCheckResult {
    let k = check_top_k(&op.input, op.axis, op.accumulator_len)?;
    reduce_dim(op, kind, k)?;
    Ok(sort_bytes(&op.input))
}

/// Checks an op that returns the indices of the largest elements along a dim.
fn arg_top_k(op: &ReduceDimOpIr, kind: Kind) -> OpCheckResult {
    let k = check_top_k(&op.input, op.axis, op.accumulator_len)?;
    arg_reduce(op, kind, k)?;
    Ok(sort_bytes(&op.input))
}

/// Checks a sum over several dims.
fn sum_dims(op: &ReduceDimsOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.input)?;
    axes(&op.input, &op.axes)?;
    has_dtype(&op.out, op.input.dtype)?;
    let kept = |(i, &dim)| if op.axes.contains(&i) { 1 } else { dim };
    has_dims(&op.out, dims(&op.input).iter().enumerate().map(kept))?;
    Ok(bytes(&op.input))
}

/// Checks an op that returns the largest elements along a dim, with their indices.
fn top_k_with_indices(op: &TopKWithIndicesOpIr, kind: Kind) -> OpCheckResult {
    let k = check_top_k(&op.tensor, op.dim, op.k)?;
    check_with_indices(&op.tensor, op.dim, k, [&op.out, &op.out_indices], kind)
}

/// Checks a sort along a dim.
fn sort(op: &SortOpIr, kind: Kind) -> OpCheckResult {
    check_sort(&op.input, op.dim, kind)?;
    check_same_as_input(&op.out, &op.input)?;
    Ok(sort_bytes(&op.input))
}

/// Checks a sort along a dim that also returns the original indices of the elements.
fn sort_with_indices(op: &SortWithIndicesOpIr, kind: Kind) -> OpCheckResult {
    check_sort(&op.input, op.dim, kind)?;
    check_same_as_input(&op.out, &op.input)?;
    Kind::Int.of(&op.out_indices)?;
    has_dims(&op.out_indices, dims(&op.input).iter().copied())?;
    Ok(sort_bytes(&op.input))
}

/// Checks an op that returns the indices that would sort the elements along a dim.
fn arg_sort(op: &SortOpIr, kind: Kind) -> OpCheckResult {
    check_sort(&op.input, op.dim, kind)?;
    Kind::Int.of(&op.out)?;
    has_dims(&op.out, dims(&op.input).iter().copied())?;
    Ok(sort_bytes(&op.input))
}

/// Checks a cumulative op along a dim.
fn cumulative(op: &DimOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.input)?;
    axis(&op.input, op.axis)?;
    check_same_as_input(&op.out, &op.input)?;
    // Flex copies a view, and keeps a number for each row along the axis, in `f32` for half types: even if the axis
    // is empty.
    let rows = saturating_product(&dims(&op.input)[op.axis + 1..]);
    let rows = rows.saturating_mul(op.input.dtype.size().max(4) as u64);
    Ok(rows.saturating_add(bytes(&op.input)))
}

/// Checks an op that makes one output element for each element of the input.
pub(super) fn unary(op: &UnaryOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.input)?;
    check_same_as_input(&op.out, &op.input)
}

/// Checks an op that combines each element of the input with the same number.
pub(super) fn scalar(op: &ScalarOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.lhs)?;
    check_same_as_input(&op.out, &op.lhs)
}

/// Checks an op with two operands of the same dtype; kernels use the dtype of the first.
pub(super) fn binary(op: &BinaryOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.lhs)?;
    same_dtype(&op.lhs, &op.rhs)?;
    has_dtype(&op.out, op.lhs.dtype)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    Ok(0)
}

/// Checks a comparison. The result for booleans has their dtype; the result for other kinds
/// has any boolean dtype.
pub(super) fn compare(op: &BinaryOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.lhs)?;
    same_dtype(&op.lhs, &op.rhs)?;
    check_bool_output(&op.out, &op.lhs, kind)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    Ok(0)
}

/// Checks a comparison with one value, as [`compare`].
pub(super) fn compare_scalar(op: &ScalarOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.lhs)?;
    check_bool_output(&op.out, &op.lhs, kind)?;
    has_dims(&op.out, dims(&op.lhs).iter().copied())?;
    Ok(0)
}

/// Checks the dtype of a boolean output: that of the input `about` if `about` is boolean too,
/// otherwise any boolean dtype.
pub(super) fn check_bool_output(
    out: &TensorIr,
    about: &TensorIr,
    kind: Kind,
) -> Result<(), RuleViolation> {
    match kind {
        Kind::Float | Kind::Int => Kind::Bool.of(out),
        Kind::Bool => has_dtype(out, about.dtype),
    }
}

/// Checks an integer power of floats or integers.
fn powi(op: &BinaryOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.lhs)?;
    Kind::Int.of(&op.rhs)?;
    if kind == Kind::Int {
        same_dtype(&op.lhs, &op.rhs)?;
    }
    has_dtype(&op.out, op.lhs.dtype)?;
    broadcast(&op.out, &[&op.lhs, &op.rhs])?;
    // The integer exponents are converted to floats.
    Ok(bytes(&op.out))
}

fn reduce(op: &ReduceOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.input)?;
    check_output(&op.out, &[1], op.input.dtype)?;
    // A mean of a half type is that of a copy in `f32`, and of a copy in order if it is a view.
    let copies = saturating_sum(&[bytes(&op.input), f32_copy_bytes(&op.input)]);
    Ok(copies.max(exact_sum_bytes(&op.input)))
}

fn reduce_dim(op: &ReduceDimOpIr, kind: Kind, len: usize) -> OpCheckResult {
    kind.of(&op.input)?;
    has_dtype(&op.out, op.input.dtype)?;
    check_reduced_axis(op, len)?;
    Ok(bytes(&op.input))
}

fn arg_reduce(op: &ReduceDimOpIr, kind: Kind, len: usize) -> OpCheckResult {
    kind.of(&op.input)?;
    Kind::Int.of(&op.out)?;
    check_reduced_axis(op, len)?;
    Ok(indices(&op.out).saturating_add(bytes(&op.input)))
}

/// Checks a reduction that keeps `len` elements of an axis.
pub(super) fn check_reduced_axis(op: &ReduceDimOpIr, len: usize) -> Result<(), RuleViolation> {
    let declared = op.accumulator_len;
    must!(
        declared == len,
        "a reduction to {declared} elements is declared for an axis that keeps {len}"
    );
    check_dims_except(&op.out, &op.input, op.axis, len)
}

/// Checks that an axis has at least `k` elements, and returns `k`.
fn check_top_k(input: &TensorIr, along: usize, k: usize) -> Result<usize, RuleViolation> {
    axis(input, along)?;
    let of = dims(input)[along];
    must!(
        k <= of,
        "the first {k} elements were requested of an axis of {of}"
    );
    Ok(k)
}

fn check_with_indices(
    tensor: &TensorIr,
    along: usize,
    len: usize,
    [out, out_indices]: [&TensorIr; 2],
    kind: Kind,
) -> OpCheckResult {
    kind.of(tensor)?;
    has_dtype(out, tensor.dtype)?;
    check_dims_except(out, tensor, along, len)?;
    Kind::Int.of(out_indices)?;
    check_dims_except(out_indices, tensor, along, len)?;
    Ok(sort_bytes(tensor))
}

fn check_sort(input: &TensorIr, along: usize, kind: Kind) -> Result<(), RuleViolation> {
    kind.of(input)?;
    axis(input, along)
}

/// Returns the bytes for sorting: two copies of the elements and of their indices, one from
/// before and one from after the sort.
fn sort_bytes(input: &TensorIr) -> u64 {
    let once = saturating_sum(&[bytes(input), f32_copy_bytes(input), indices(input)]);
    once.saturating_mul(2)
}

fn pad(op: &PadOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.input)?;
    let input = dims(&op.input);
    let pairs = op.padding.len();
    must!(
        pairs == input.len(),
        "{pairs} pairs of padding do not fit {}",
        format_dims(input)
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
