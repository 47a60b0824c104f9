//! Ops that read or write elements at positions given by other tensors.
//!
//! The values of indices are data: Flex checks each, and for CubeCL's kernels they are
//! clamped on the device (`backend/bounds.rs`). Neither works where no index is valid, so
//! ops that take elements of an empty axis are refused.

use burn_ir::TensorIr;
use burn_ir::{GatherNdOpIr, GatherOpIr, ScatterNdOpIr, ScatterOpIr, SelectAssignOpIr, SelectOpIr};

use super::{
    Broken, Checked,
    rules::{
        Kind, alike, axis, but_axis, dims, has_dims, has_dtype, must, ranked, same_dtype, shaped,
        show, unsupported,
    },
    scratch::{bytes, indices, total},
};

pub(super) fn gather(op: &GatherOpIr, kind: Kind) -> Checked {
    kind.of(&op.tensor)?;
    has_dtype(&op.out, op.tensor.dtype)?;
    beside(&op.tensor, &op.indices, op.dim)?;
    has_dims(&op.out, dims(&op.indices).iter().copied())?;
    points(&dims(&op.tensor)[op.dim..=op.dim], &op.out)?;
    Ok(total(&[bytes(&op.tensor), indices(&op.indices)]))
}

pub(super) fn scatter(op: &ScatterOpIr, kind: Kind) -> Checked {
    kind.of(&op.tensor)?;
    same_dtype(&op.tensor, &op.value)?;
    beside(&op.tensor, &op.indices, op.dim)?;
    shaped("the value", &op.value, dims(&op.indices))?;
    points(&dims(&op.tensor)[op.dim..=op.dim], &op.value)?;
    alike(&op.out, &op.tensor)?;
    Ok(total(&[bytes(&op.value), indices(&op.indices)]))
}

/// Checks that the indices have the dims of the tensor, except along one axis.
fn beside(tensor: &TensorIr, at: &TensorIr, along: usize) -> Result<(), Broken> {
    Kind::Int.of(at)?;
    axis(tensor, along)?;
    let (of, at) = (dims(tensor), dims(at));
    let mut pairs = of.iter().zip(at).enumerate();
    let fits = of.len() == at.len() && pairs.all(|(i, (of, at))| i == along || of == at);
    must!(
        fits,
        "indices {} do not fit axis {along} of {}",
        show(at),
        show(of)
    );
    Ok(())
}

pub(super) fn select(op: &SelectOpIr, kind: Kind) -> Checked {
    kind.of(&op.tensor)?;
    has_dtype(&op.out, op.tensor.dtype)?;
    let count = listed(&op.indices)?;
    but_axis(&op.out, &op.tensor, op.dim, count)?;
    points(&dims(&op.tensor)[op.dim..=op.dim], &op.out)?;
    Ok(total(&[bytes(&op.tensor), indices(&op.indices)]))
}

pub(super) fn select_assign(op: &SelectAssignOpIr, kind: Kind) -> Checked {
    kind.of(&op.tensor)?;
    same_dtype(&op.tensor, &op.value)?;
    let count = listed(&op.indices)?;
    but_axis(&op.value, &op.tensor, op.dim, count)?;
    points(&dims(&op.tensor)[op.dim..=op.dim], &op.value)?;
    alike(&op.out, &op.tensor)?;
    Ok(total(&[bytes(&op.value), indices(&op.indices)]))
}

/// Checks that no element is `visited` if a dim in `of` is 0, as no index is valid then.
pub(super) fn points(of: &[usize], visited: &TensorIr) -> Result<(), Broken> {
    let nowhere = of.contains(&0) && !dims(visited).contains(&0);
    must!(
        !nowhere,
        "indices for {} point into an axis of 0",
        show(dims(visited))
    );
    Ok(())
}

/// Returns the number of indices in a one-dimensional tensor of them.
fn listed(indices: &TensorIr) -> Result<usize, Broken> {
    Kind::Int.of(indices)?;
    Ok(ranked("the list of indices", indices, 1)?[0])
}

pub(super) fn gather_nd(op: &GatherNdOpIr, kind: Kind) -> Checked {
    kind.of(&op.data)?;
    has_dtype(&op.out, op.data.dtype)?;
    let (at, slice) = tuples(&op.data, &op.indices, kind)?;
    has_dims(&op.out, at.iter().chain(slice).copied())?;
    points(
        &dims(&op.data)[..dims(&op.data).len() - slice.len()],
        &op.out,
    )?;
    Ok(total(&[bytes(&op.data), indices(&op.indices)]))
}

pub(super) fn scatter_nd(op: &ScatterNdOpIr, kind: Kind) -> Checked {
    kind.of(&op.data)?;
    same_dtype(&op.data, &op.values)?;
    let (at, slice) = tuples(&op.data, &op.indices, kind)?;
    let fits = dims(&op.values).iter().eq(at.iter().chain(slice));
    must!(
        fits,
        "values {} do not fit indices {} into {}",
        show(dims(&op.values)),
        show(dims(&op.indices)),
        show(dims(&op.data))
    );
    points(
        &dims(&op.data)[..dims(&op.data).len() - slice.len()],
        &op.values,
    )?;
    alike(&op.out, &op.data)?;
    Ok(total(&[
        bytes(&op.data),
        bytes(&op.values),
        indices(&op.indices),
    ]))
}

/// Returns the dims over which the tuples of indices extend, and the dims of the slice to
/// which each points.
fn tuples<'a>(
    data: &'a TensorIr,
    indices: &'a TensorIr,
    kind: Kind,
) -> Result<(&'a [usize], &'a [usize]), Broken> {
    if kind == Kind::Bool {
        return unsupported("tuples of indices into booleans");
    }
    Kind::Int.of(indices)?;
    let (of, at) = (dims(data), dims(indices));
    let pointed = at
        .split_last()
        .and_then(|(&k, at)| of.get(k..).map(|slice| (at, slice)));
    let Some(pointed) = pointed else {
        let reason = format!("indices {} into {} do not fit", show(at), show(of));
        return Err(super::rules::mismatch(reason));
    };
    Ok(pointed)
}
