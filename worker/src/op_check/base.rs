//! Ops on tensors of any kind: views, parts, copies, comparisons.

use burn_ir::{
    BaseOperationIr, CastOpIr, CatOpIr, FlipOpIr, PermuteOpIr, RepeatDimOpIr, ShapeOpIr,
    SliceAssignOpIr, SliceOpIr, SwapDimsOpIr, TensorIr, UnfoldOpIr,
};

use super::{
    OpCheckResult, RuleViolation, index,
    numeric::{check_bool_output, check_reduced_axis, compare, compare_scalar},
    rules::{
        Kind, axes, axis, broadcast, check_dims_except, check_same_as_input, check_volume, dims,
        format_dims, has_dims, has_dtype, must, product, same_dtype, slice_len, sum, unsupported,
    },
    scratch::{bytes, ordered_bytes},
};

pub(super) fn check(op: &BaseOperationIr, kind: Kind) -> OpCheckResult {
    use BaseOperationIr as Op;
    match op {
        Op::Reshape(op) => reshape(op, kind),
        Op::SwapDims(op) => swap_dims(op, kind),
        Op::Permute(op) => permute(op, kind),
        Op::Flip(op) => flip(op, kind),
        Op::Expand(op) => expand(op, kind),
        Op::Unfold(op) => unfold(op, kind),
        Op::Slice(op) => slice(op, kind),
        Op::SliceAssign(op) => slice_assign(op, kind),
        Op::Select(op) => index::select(op, kind),
        Op::SelectAssign(op) => index::select_assign(op, kind),
        Op::Gather(op) => index::gather(op, kind),
        Op::Scatter(op) => index::scatter(op, kind),
        Op::GatherNd(op) => index::gather_nd(op, kind),
        Op::ScatterNd(op) => index::scatter_nd(op, kind),
        Op::MaskWhere(op) => {
            kind.of(&op.tensor)?;
            Kind::Bool.of(&op.mask)?;
            same_dtype(&op.tensor, &op.value)?;
            has_dtype(&op.out, op.tensor.dtype)?;
            broadcast(&op.out, &[&op.tensor, &op.mask, &op.value])?;
            Ok(0)
        }
        Op::MaskFill(op) => {
            kind.of(&op.tensor)?;
            Kind::Bool.of(&op.mask)?;
            has_dtype(&op.out, op.tensor.dtype)?;
            broadcast(&op.out, &[&op.tensor, &op.mask])?;
            Ok(0)
        }
        Op::Equal(op) | Op::NotEqual(op) => compare(op, kind),
        Op::EqualElem(op) | Op::NotEqualElem(op) => compare_scalar(op, kind),
        Op::RepeatDim(op) => repeat_dim(op, kind),
        Op::Cat(op) => cat(op, kind),
        Op::Cast(op) => cast(op, kind),
        Op::Empty(op) | Op::Ones(op) | Op::Zeros(op) => {
            kind.of(&op.out)?;
            check_volume(&op.out)?;
            Ok(0)
        }
        Op::All(op) | Op::Any(op) => {
            kind.of(&op.input)?;
            check_bool_output(&op.out, &op.input, kind)?;
            has_dims(&op.out, std::iter::once(1))?;
            Ok(bytes(&op.input))
        }
        Op::AllDim(op) | Op::AnyDim(op) => {
            kind.of(&op.input)?;
            check_bool_output(&op.out, &op.input, kind)?;
            check_reduced_axis(op, 1)?;
            Ok(bytes(&op.input))
        }
    }
}

fn cast(op: &CastOpIr, kind: Kind) -> OpCheckResult {
    if kind == Kind::Bool {
        return unsupported("a cast between booleans");
    }
    kind.of(&op.input)?;
    kind.of(&op.out)?;
    has_dims(&op.out, dims(&op.input).iter().copied())?;
    Ok(ordered_bytes(&op.input))
}

/// Checks the dtype of an output that may be a view: it must be that of the input.
fn check_view(out: &TensorIr, input: &TensorIr, kind: Kind) -> Result<(), RuleViolation> {
    kind.of(input)?;
    has_dtype(out, input.dtype)
}

fn reshape(op: &ShapeOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.input, kind)?;
    check_volume(&op.out)?;
    let (from, to) = (dims(&op.input), dims(&op.out));
    must!(
        product(from)? == product(to)?,
        "{} and {} have different numbers of elements",
        format_dims(from),
        format_dims(to)
    );
    Ok(bytes(&op.input))
}

fn swap_dims(op: &SwapDimsOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.input, kind)?;
    axis(&op.input, op.dim1)?;
    axis(&op.input, op.dim2)?;
    let input = dims(&op.input);
    let from = |i| match i {
        i if i == op.dim1 => op.dim2,
        i if i == op.dim2 => op.dim1,
        i => i,
    };
    has_dims(&op.out, (0..input.len()).map(|i| input[from(i)]))?;
    Ok(0)
}

fn permute(op: &PermuteOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.input, kind)?;
    let input = dims(&op.input);
    must!(
        op.axes.len() == input.len(),
        "{} axes are given to permute the dims {}",
        op.axes.len(),
        format_dims(input)
    );
    axes(&op.input, &op.axes)?;
    has_dims(&op.out, op.axes.iter().map(|&from| input[from]))?;
    Ok(0)
}

/// Checks a flip. Axes must not repeat, as Flex moves a view's start for each mention of an
/// axis.
fn flip(op: &FlipOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.input, kind)?;
    axes(&op.input, &op.axes)?;
    check_same_as_input(&op.out, &op.input)
}

fn expand(op: &ShapeOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.input, kind)?;
    check_volume(&op.out)?;
    let (from, to) = (dims(&op.input), dims(&op.out));
    let from_the_last = from.iter().rev().zip(to.iter().rev());
    let fits = |(from, to): (&usize, &usize)| from == to || *from == 1;
    must!(
        from.len() <= to.len() && from_the_last.into_iter().all(fits),
        "{} does not expand to {}",
        format_dims(from),
        format_dims(to)
    );
    Ok(0)
}

fn unfold(op: &UnfoldOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.input, kind)?;
    axis(&op.input, op.dim)?;
    must!(
        op.size >= 1 && op.step >= 1,
        "a window size of {} and a step of {} must both be at least 1",
        op.size,
        op.step
    );
    let input = dims(&op.input);
    // A kernel multiplies the step by a stride, which must not overflow.
    product(&[op.step, product(input)?.max(1)])?;
    let windows = input[op.dim]
        .checked_sub(op.size)
        .map_or(0, |rest| rest / op.step + 1);
    let kept = |(i, &dim)| if i == op.dim { windows } else { dim };
    let size = std::iter::once(op.size);
    has_dims(&op.out, input.iter().enumerate().map(kept).chain(size))?;
    Ok(0)
}

fn slice(op: &SliceOpIr, kind: Kind) -> OpCheckResult {
    check_view(&op.out, &op.tensor, kind)?;
    part(&op.tensor, &op.ranges, &op.out)?;
    check_volume(&op.out)?;
    Ok(0)
}

fn slice_assign(op: &SliceAssignOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    same_dtype(&op.tensor, &op.value)?;
    part(&op.tensor, &op.ranges, &op.value)?;
    check_same_as_input(&op.out, &op.tensor)?;
    Ok(bytes(&op.value))
}

/// Checks that `part` has the dims of the part of `tensor` that `ranges` select.
fn part(
    tensor: &TensorIr,
    ranges: &[burn_backend::Slice],
    part: &TensorIr,
) -> Result<(), RuleViolation> {
    let (of, part) = (dims(tensor), dims(part));
    must!(
        ranges.len() <= of.len() && part.len() == of.len(),
        "{} slices of {} do not fit a part of {}",
        ranges.len(),
        format_dims(of),
        format_dims(part)
    );
    let elements = product(of)?;
    for (i, (&dim, &declared)) in of.iter().zip(part).enumerate() {
        let derived = match ranges.get(i) {
            Some(range) => slice_len(range, dim, elements)?,
            None => dim,
        };
        must!(
            derived == declared,
            "a slice takes {derived} elements along axis {i} of {}, but the op declares {declared}",
            format_dims(of)
        );
    }
    Ok(())
}

fn repeat_dim(op: &RepeatDimOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    axis(&op.tensor, op.dim)?;
    has_dtype(&op.out, op.tensor.dtype)?;
    let input = dims(&op.tensor);
    let repeated = product(&[input[op.dim], op.times])?;
    check_dims_except(&op.out, &op.tensor, op.dim, repeated)?;
    // Flex loops over the repetitions even if there is nothing to repeat, so their number has
    // the limit that applies to the dims of an empty tensor.
    if repeated == 0 {
        let rounds = TensorIr {
            shape: [op.times, 0].into(),
            ..op.out.clone()
        };
        check_volume(&rounds)?;
    }
    Ok(bytes(&op.tensor))
}

fn cat(op: &CatOpIr, kind: Kind) -> OpCheckResult {
    let Some(first) = op.tensors.first() else {
        return unsupported("a concatenation of no tensors");
    };
    kind.of(first)?;
    axis(first, op.dim)?;
    has_dtype(&op.out, first.dtype)?;
    let (mut along, mut copied) = (0, 0u64);
    for tensor in &op.tensors {
        same_dtype(first, tensor)?;
        let (dims, first) = (dims(tensor), dims(first));
        let fits = dims.len() == first.len()
            && dims[..op.dim] == first[..op.dim]
            && dims[op.dim + 1..] == first[op.dim + 1..];
        must!(
            fits,
            "{} and {} differ in an axis other than {}",
            format_dims(first),
            format_dims(dims),
            op.dim
        );
        along = sum(&[along, dims[op.dim]])?;
        copied = copied.saturating_add(bytes(tensor));
    }
    check_dims_except(&op.out, first, op.dim, along)?;
    Ok(copied)
}
