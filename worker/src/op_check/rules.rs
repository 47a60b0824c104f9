//! The rules that many ops share.

use std::fmt::Write as _;

use burn_backend::{DType, Slice};
use burn_ir::TensorIr;
use tensord_proto::{codec::MAX_RANK, v1::FaultKind};

use super::{OpCheckResult, RuleViolation};

/// Largest product of the nonzero dims of a tensor that also has a dim of 0. Such a tensor
/// has no bytes, but kernels still loop over its other dims; the limit keeps that within
/// seconds.
const MAX_EMPTY_VOLUME: usize = 1 << 30;

/// Maximum number of dims shown in an error.
const MAX_SHOWN_DIMS: usize = 8;

/// Returns with an error if the rule does not hold.
macro_rules! must {
    ($holds:expr, $($reason:tt)+) => {
        if !$holds {
            return Err($crate::op_check::rules::mismatch(format!($($reason)+)));
        }
    };
}
pub(super) use must;

/// Returns the error of an op that breaks the rule in `reason`.
#[cold]
pub(super) fn mismatch(reason: String) -> RuleViolation {
    RuleViolation {
        kind: FaultKind::Mismatch,
        reason,
    }
}

/// Returns the error of an op that no honest client sends.
#[cold]
pub(super) fn unsupported<T>(what: &str) -> Result<T, RuleViolation> {
    Err(RuleViolation {
        kind: FaultKind::Unsupported,
        reason: what.into(),
    })
}

/// Returns the error of an op that would need more memory than can be addressed, or would
/// run practically forever.
#[cold]
pub(super) fn too_large(reason: String) -> RuleViolation {
    RuleViolation {
        kind: FaultKind::OutOfMemory,
        reason,
    }
}

/// Formats dims for people: `[2, 3]`.
pub(super) fn format_dims(dims: &[usize]) -> String {
    let mut text = String::from("[");
    for (i, dim) in dims.iter().take(MAX_SHOWN_DIMS).enumerate() {
        let comma = if i == 0 { "" } else { ", " };
        let _ = write!(text, "{comma}{dim}");
    }
    let more = if dims.len() > MAX_SHOWN_DIMS {
        ", ..."
    } else {
        ""
    };
    text + more + "]"
}

/// The kinds of tensors, which Burn distinguishes by type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Float,
    Int,
    Bool,
}

impl Kind {
    pub(super) fn includes(self, dtype: DType) -> bool {
        match self {
            Self::Float => dtype.is_float(),
            Self::Int => dtype.is_int() || dtype.is_uint(),
            Self::Bool => dtype.is_bool(),
        }
    }

    /// Checks that the tensor is of this kind.
    pub(super) fn of(self, tensor: &TensorIr) -> Result<(), RuleViolation> {
        must!(
            self.includes(tensor.dtype),
            "tensor {} is {}, but must be {self:?}",
            tensor.id.value(),
            tensor.dtype.name()
        );
        Ok(())
    }
}

/// Returns the dims of a tensor.
pub(super) fn dims(tensor: &TensorIr) -> &[usize] {
    tensor.shape.as_slice()
}

/// Checks that the tensor has `rank` dims, and returns them.
pub(super) fn dims_of_rank<'a>(
    what: &str,
    tensor: &'a TensorIr,
    rank: usize,
) -> Result<&'a [usize], RuleViolation> {
    let dims = dims(tensor);
    must!(
        dims.len() == rank,
        "{what} {} must have {rank} dims",
        format_dims(dims)
    );
    Ok(dims)
}

/// Checks that the tensor has exactly these dims.
pub(super) fn check_dims(
    what: &str,
    tensor: &TensorIr,
    expected: &[usize],
) -> Result<(), RuleViolation> {
    must!(
        dims(tensor) == expected,
        "{what} {} must be {}",
        format_dims(dims(tensor)),
        format_dims(expected)
    );
    Ok(())
}

/// Checks that the tensor has this `axis`.
pub(super) fn axis(tensor: &TensorIr, axis: usize) -> Result<(), RuleViolation> {
    let rank = dims(tensor).len();
    must!(
        axis < rank,
        "axis {axis} of a tensor of {rank} dims does not exist"
    );
    Ok(())
}

/// Checks that the tensor has each of these axes, and that none is repeated.
pub(super) fn axes(tensor: &TensorIr, axes: &[usize]) -> Result<(), RuleViolation> {
    let rank = dims(tensor).len();
    must!(
        rank <= MAX_RANK,
        "a tensor of {rank} dims exceeds the limit of {MAX_RANK}"
    );
    let mut seen = 0u64;
    for &axis in axes {
        must!(
            axis < rank,
            "axis {axis} of a tensor of {rank} dims does not exist"
        );
        must!(seen & (1 << axis) == 0, "axis {axis} is given twice");
        seen |= 1 << axis;
    }
    Ok(())
}

/// Checks that two tensors have the same dtype, as kernels read both with the dtype of the
/// first.
pub(super) fn same_dtype(a: &TensorIr, b: &TensorIr) -> Result<(), RuleViolation> {
    must!(
        a.dtype == b.dtype,
        "dtypes {} and {} must be the same",
        a.dtype.name(),
        b.dtype.name()
    );
    Ok(())
}

/// Returns the sum of an op's arguments, or an error if it exceeds the address space.
pub(super) fn sum(parts: &[usize]) -> Result<usize, RuleViolation> {
    let sum = parts
        .iter()
        .try_fold(0usize, |sum, &part| sum.checked_add(part));
    let fits = sum.filter(|&sum| sum <= isize::MAX as usize);
    fits.ok_or_else(|| {
        too_large(format!(
            "the sum of {} cannot be addressed",
            format_dims(parts)
        ))
    })
}

/// Returns the product of an op's arguments, or an error if it exceeds the address space.
pub(super) fn product(parts: &[usize]) -> Result<usize, RuleViolation> {
    // A kernel may multiply in any order, so a factor of 0 does not excuse an overflow of
    // the others.
    let product = parts
        .iter()
        .filter(|&&part| part != 0)
        .try_fold(1usize, |product, &part| product.checked_mul(part));
    let fits = product.filter(|&product| product <= isize::MAX as usize);
    let zero = parts.contains(&0);
    fits.map(|product| if zero { 0 } else { product })
        .ok_or_else(|| {
            too_large(format!(
                "the product of {} cannot be addressed",
                format_dims(parts)
            ))
        })
}

/// Checks that the tensor has few enough axes and that its size in bytes fits the address
/// space. An empty tensor is checked as if each dim of 0 were 1, with a lower limit, as kernels
/// loop over its other dims.
pub(super) fn check_volume(tensor: &TensorIr) -> Result<(), RuleViolation> {
    let dims = dims(tensor);
    must!(
        dims.len() <= MAX_RANK,
        "a tensor of {} dims exceeds the limit of {MAX_RANK}",
        dims.len()
    );
    let (mut elements, mut empty) = (1usize, false);
    for &dim in dims {
        empty |= dim == 0;
        let with = elements.checked_mul(dim.max(1));
        elements = with.ok_or_else(|| too_large_tensor(dims))?;
    }
    let bytes = elements.checked_mul(tensor.dtype.size());
    let addressed = bytes.is_some_and(|bytes| bytes <= isize::MAX as usize);
    if !addressed || (empty && elements > MAX_EMPTY_VOLUME) {
        return Err(too_large_tensor(dims));
    }
    Ok(())
}

#[cold]
fn too_large_tensor(dims: &[usize]) -> RuleViolation {
    too_large(format!(
        "a tensor of {} is too large for any device",
        format_dims(dims)
    ))
}

/// Checks that an output has the `derived` dims and a valid volume.
pub(super) fn has_dims(
    out: &TensorIr,
    derived: impl Iterator<Item = usize> + Clone,
) -> Result<(), RuleViolation> {
    if !dims(out).iter().copied().eq(derived.clone()) {
        let derived: Vec<usize> = derived.take(MAX_RANK).collect();
        return Err(mismatch(format!(
            "the op makes {}, but declares {}",
            format_dims(&derived),
            format_dims(dims(out))
        )));
    }
    check_volume(out)
}

/// Checks that an output has this dtype.
pub(super) fn has_dtype(out: &TensorIr, dtype: DType) -> Result<(), RuleViolation> {
    must!(
        out.dtype == dtype,
        "the op makes {}, but declares {}",
        dtype.name(),
        out.dtype.name()
    );
    Ok(())
}

/// Checks that an output has these dims and this dtype.
pub(super) fn check_output(
    out: &TensorIr,
    derived: &[usize],
    dtype: DType,
) -> Result<(), RuleViolation> {
    has_dtype(out, dtype)?;
    has_dims(out, derived.iter().copied())
}

/// Checks that an output has the dims and dtype of the input.
pub(super) fn check_same_as_input(out: &TensorIr, input: &TensorIr) -> OpCheckResult {
    check_output(out, dims(input), input.dtype)?;
    Ok(0)
}

/// Checks that an output has the dims of the input, except for `dim` along one axis.
pub(super) fn check_dims_except(
    out: &TensorIr,
    input: &TensorIr,
    along: usize,
    dim: usize,
) -> Result<(), RuleViolation> {
    axis(input, along)?;
    let derived = dims(input).iter().enumerate();
    has_dims(
        out,
        derived.map(move |(i, &of)| if i == along { dim } else { of }),
    )
}

/// Checks that an output has the dims to which the inputs broadcast.
pub(super) fn broadcast(out: &TensorIr, inputs: &[&TensorIr]) -> Result<(), RuleViolation> {
    if inputs.iter().all(|input| input.shape == out.shape) {
        return check_volume(out);
    }
    let rank = dims(out).len();
    for input in inputs {
        must!(
            dims(input).len() == rank,
            "{} and {} must have the same number of dims",
            format_dims(dims(input)),
            format_dims(dims(out))
        );
    }
    for (i, &declared) in dims(out).iter().enumerate() {
        let mut derived = 1;
        for input in inputs {
            let dim = dims(input)[i];
            must!(
                dim == derived || dim == 1 || derived == 1,
                "{derived} and {dim} along axis {i} do not broadcast"
            );
            derived = if derived == 1 { dim } else { derived };
        }
        must!(
            declared == derived,
            "the op makes {derived} elements along axis {i}, but declares {declared}"
        );
    }
    check_volume(out)
}

/// Checks numbers that CubeCL's kernels take as 32 bits with a sign. A larger one makes a kernel address other memory; or
/// CubeCL panics between the arguments of a kernel, and the next kernel gets those that are left.
pub(super) fn check_fits_kernels(what: &str, numbers: &[usize]) -> Result<(), RuleViolation> {
    const MAX: usize = i32::MAX as usize;
    let over = numbers.iter().find(|number| **number > MAX);
    match over {
        None => Ok(()),
        Some(number) => Err(mismatch(format!("a {what} of {number} is more than {MAX}"))),
    }
}

/// Returns whether `channels` can be divided into `groups` of equal size. No channels are one empty group.
pub(super) fn has_groups(channels: usize, groups: usize) -> bool {
    (1..=channels.max(1)).contains(&groups) && channels.is_multiple_of(groups)
}

/// Returns the number of elements that a slice takes of a dim of a tensor of `elements`
/// elements. Refuses a step whose product with a stride would overflow in a kernel, and one that takes several
/// elements and does not fit the 32 bits that CubeCL's kernels have for a step.
pub(super) fn slice_len(
    slice: &Slice,
    dim: usize,
    elements: usize,
) -> Result<usize, RuleViolation> {
    let step = slice.step.unsigned_abs();
    must!(step != 0, "a slice cannot have a step of 0");
    let run = step.checked_mul(elements.max(1));
    must!(
        run.is_some_and(|run| run <= isize::MAX as usize),
        "a slice cannot have a step of {}",
        slice.step
    );
    let end = slice.end.map_or(dim, |end| bound(end, dim));
    let len = end.saturating_sub(bound(slice.start, dim));
    must!(
        step.min(len) <= i32::MAX as usize,
        "a slice of {len} elements cannot have a step of {}",
        slice.step
    );
    Ok(len.div_ceil(step))
}

/// Resolves a bound of a slice to a position: a negative bound counts from the end, and one
/// outside the dim is moved to the nearest end.
fn bound(at: isize, dim: usize) -> usize {
    match usize::try_from(at) {
        Ok(at) => at.min(dim),
        Err(_) => dim.saturating_sub(at.unsigned_abs()),
    }
}
