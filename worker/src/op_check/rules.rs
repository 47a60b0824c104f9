//! The rules that many ops share.

use std::fmt::Write as _;

use burn_backend::{DType, Slice};
use burn_ir::TensorIr;
use tensord_proto::v1::FaultKind;

use super::{Broken, Checked};

/// Dims of a tensor, at most. Burn has the rank in a tensor's type, and programs have one
/// digit there; a rule may look at each pair of dims, or have a bit for each.
const MAX_RANK: usize = 32;

/// The product of a tensor's dims that are not 0, at most, if one is 0. Such a tensor has
/// no bytes, and kernels loop over its other dims all the same: within seconds.
const MAX_EMPTY_VOLUME: usize = 1 << 30;

/// Dims that an error shows.
const SHOWN_DIMS: usize = 8;

/// Returns with an error if the rule does not hold.
macro_rules! must {
    ($holds:expr, $($reason:tt)+) => {
        if !$holds {
            return Err($crate::op_check::rules::mismatch(format!($($reason)+)));
        }
    };
}
pub(super) use must;

/// An op breaks the rule that `reason` names.
#[cold]
pub(super) fn mismatch(reason: String) -> Broken {
    Broken {
        kind: FaultKind::Mismatch,
        reason,
    }
}

/// An op that no honest client sends.
#[cold]
pub(super) fn unsupported<T>(what: &str) -> Result<T, Broken> {
    Err(Broken {
        kind: FaultKind::Unsupported,
        reason: what.into(),
    })
}

/// An op that would take more than can be addressed, or for ever.
#[cold]
pub(super) fn too_large(reason: String) -> Broken {
    Broken {
        kind: FaultKind::OutOfMemory,
        reason,
    }
}

/// Dims for people: `[2, 3]`.
pub(super) fn show(dims: &[usize]) -> String {
    let mut text = String::from("[");
    for (i, dim) in dims.iter().take(SHOWN_DIMS).enumerate() {
        let comma = if i == 0 { "" } else { ", " };
        let _ = write!(text, "{comma}{dim}");
    }
    let more = if dims.len() > SHOWN_DIMS { ", ..." } else { "" };
    text + more + "]"
}

/// The kinds of tensor that Burn keeps apart by type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Float,
    Int,
    Bool,
}

impl Kind {
    pub(super) fn holds(self, dtype: DType) -> bool {
        match self {
            Self::Float => dtype.is_float(),
            Self::Int => dtype.is_int() || dtype.is_uint(),
            Self::Bool => dtype.is_bool(),
        }
    }

    /// The tensor must be of this kind.
    pub(super) fn of(self, tensor: &TensorIr) -> Result<(), Broken> {
        must!(
            self.holds(tensor.dtype),
            "tensor {} is {}, and must be {self:?}",
            tensor.id.value(),
            tensor.dtype.name()
        );
        Ok(())
    }
}

/// The dims of a tensor.
pub(super) fn dims(tensor: &TensorIr) -> &[usize] {
    tensor.shape.as_slice()
}

/// The tensor has `rank` dims.
pub(super) fn ranked<'a>(
    what: &str,
    tensor: &'a TensorIr,
    rank: usize,
) -> Result<&'a [usize], Broken> {
    let dims = dims(tensor);
    must!(
        dims.len() == rank,
        "{what} {} must have {rank} dims",
        show(dims)
    );
    Ok(dims)
}

/// The tensor has exactly these dims.
pub(super) fn shaped(what: &str, tensor: &TensorIr, expected: &[usize]) -> Result<(), Broken> {
    must!(
        dims(tensor) == expected,
        "{what} {} must be {}",
        show(dims(tensor)),
        show(expected)
    );
    Ok(())
}

/// `axis` is one of the tensor's.
pub(super) fn axis(tensor: &TensorIr, axis: usize) -> Result<(), Broken> {
    let rank = dims(tensor).len();
    must!(axis < rank, "axis {axis} of a tensor of {rank} dims");
    Ok(())
}

/// Each axis is one of the tensor's, and none comes twice.
pub(super) fn axes(tensor: &TensorIr, axes: &[usize]) -> Result<(), Broken> {
    let rank = dims(tensor).len();
    must!(
        rank <= MAX_RANK,
        "a tensor of {rank} dims; {MAX_RANK} are the limit"
    );
    let mut seen = 0u64;
    for &axis in axes {
        must!(axis < rank, "axis {axis} of a tensor of {rank} dims");
        must!(seen & (1 << axis) == 0, "axis {axis} comes twice");
        seen |= 1 << axis;
    }
    Ok(())
}

/// Two tensors have one dtype: kernels read both as the first's.
pub(super) fn same_dtype(a: &TensorIr, b: &TensorIr) -> Result<(), Broken> {
    must!(
        a.dtype == b.dtype,
        "dtypes {} and {} must be the same",
        a.dtype.name(),
        b.dtype.name()
    );
    Ok(())
}

/// A sum of what an op says, or none if it cannot be addressed.
pub(super) fn sum(parts: &[usize]) -> Result<usize, Broken> {
    let sum = parts
        .iter()
        .try_fold(0usize, |sum, &part| sum.checked_add(part));
    let fits = sum.filter(|&sum| sum <= isize::MAX as usize);
    fits.ok_or_else(|| too_large(format!("{} added cannot be addressed", show(parts))))
}

/// A product of what an op says, or none if it cannot be addressed.
pub(super) fn product(parts: &[usize]) -> Result<usize, Broken> {
    // As a kernel may multiply in any order, a 0 does not make up for the rest.
    let product = parts
        .iter()
        .filter(|&&part| part != 0)
        .try_fold(1usize, |product, &part| product.checked_mul(part));
    let fits = product.filter(|&product| product <= isize::MAX as usize);
    let zero = parts.contains(&0);
    fits.map(|product| if zero { 0 } else { product })
        .ok_or_else(|| too_large(format!("{} multiplied cannot be addressed", show(parts))))
}

/// The tensor can be addressed, and looped over.
pub(super) fn volume(tensor: &TensorIr) -> Result<(), Broken> {
    let dims = dims(tensor);
    must!(
        dims.len() <= MAX_RANK,
        "a tensor of {} dims; {MAX_RANK} are the limit",
        dims.len()
    );
    let (mut elements, mut empty) = (1usize, false);
    for &dim in dims {
        empty |= dim == 0;
        let with = elements.checked_mul(dim.max(1));
        elements = with.ok_or_else(|| beyond(dims))?;
    }
    let bytes = elements.checked_mul(tensor.dtype.size());
    let addressed = bytes.is_some_and(|bytes| bytes <= isize::MAX as usize);
    if !addressed || (empty && elements > MAX_EMPTY_VOLUME) {
        return Err(beyond(dims));
    }
    Ok(())
}

#[cold]
fn beyond(dims: &[usize]) -> Broken {
    too_large(format!("a tensor of {} is beyond any device", show(dims)))
}

/// An output has these dims.
pub(super) fn has_dims(
    out: &TensorIr,
    derived: impl Iterator<Item = usize> + Clone,
) -> Result<(), Broken> {
    if !dims(out).iter().copied().eq(derived.clone()) {
        let derived: Vec<usize> = derived.take(MAX_RANK).collect();
        return Err(mismatch(format!(
            "it makes {}, declared is {}",
            show(&derived),
            show(dims(out))
        )));
    }
    volume(out)
}

/// An output has this dtype.
pub(super) fn has_dtype(out: &TensorIr, dtype: DType) -> Result<(), Broken> {
    must!(
        out.dtype == dtype,
        "it makes {}, declared is {}",
        dtype.name(),
        out.dtype.name()
    );
    Ok(())
}

/// An output has these dims and this dtype.
pub(super) fn makes(out: &TensorIr, derived: &[usize], dtype: DType) -> Result<(), Broken> {
    has_dtype(out, dtype)?;
    has_dims(out, derived.iter().copied())
}

/// An output is as the input.
pub(super) fn alike(out: &TensorIr, input: &TensorIr) -> Checked {
    makes(out, dims(input), input.dtype)?;
    Ok(0)
}

/// An output has the dims of the input, but `dim` along `axis`.
pub(super) fn but_axis(
    out: &TensorIr,
    input: &TensorIr,
    along: usize,
    dim: usize,
) -> Result<(), Broken> {
    axis(input, along)?;
    let derived = dims(input).iter().enumerate();
    has_dims(
        out,
        derived.map(move |(i, &of)| if i == along { dim } else { of }),
    )
}

/// An output has the dims that the inputs broadcast to.
pub(super) fn broadcast(out: &TensorIr, inputs: &[&TensorIr]) -> Result<(), Broken> {
    if inputs.iter().all(|input| input.shape == out.shape) {
        return volume(out);
    }
    let rank = dims(out).len();
    for input in inputs {
        must!(
            dims(input).len() == rank,
            "{} and {} must have as many dims",
            show(dims(input)),
            show(dims(out))
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
            "it makes {derived} along axis {i}, declared is {declared}"
        );
    }
    volume(out)
}

/// Elements that a slice takes of a dim. A step that kernels could not multiply with a
/// stride is refused.
pub(super) fn sliced(slice: &Slice, dim: usize, elements: usize) -> Result<usize, Broken> {
    let step = slice.step.unsigned_abs();
    must!(step != 0, "a slice with a step of 0");
    let run = step.checked_mul(elements.max(1));
    must!(
        run.is_some_and(|run| run <= isize::MAX as usize),
        "a slice with a step of {}",
        slice.step
    );
    let end = slice.end.map_or(dim, |end| bound(end, dim));
    let len = end.saturating_sub(bound(slice.start, dim));
    Ok(len.div_ceil(step))
}

/// Where a bound of a slice is: one below 0 counts from the end, one outside is at the end
/// that it is beyond.
fn bound(at: isize, dim: usize) -> usize {
    match usize::try_from(at) {
        Ok(at) => at.min(dim),
        Err(_) => dim.saturating_sub(at.unsigned_abs()),
    }
}
