//! Ops that read or write elements at positions given by other tensors.
//!
//! The values of indices are data: Flex checks each, and for CubeCL's kernels they are
//! clamped on the device (`tensord-backend`). Neither works where no index is valid, so
//! ops that take elements of an empty axis are refused.

use burn_ir::TensorIr;
use burn_ir::{GatherNdOpIr, GatherOpIr, ScatterNdOpIr, ScatterOpIr, SelectAssignOpIr, SelectOpIr};

use super::{
    OpCheckResult, RuleViolation,
    rules::{
        Kind, axis, check_dims, check_dims_except, check_same_as_input, dims, dims_of_rank,
        format_dims, has_dims, has_dtype, must, same_dtype, unsupported,
    },
    scratch::{bytes, exact_scatter_bytes, indices, saturating_sum},
};

pub(super) fn gather(op: &GatherOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    has_dtype(&op.out, op.tensor.dtype)?;
    check_indices_dims(&op.tensor, &op.indices, op.dim)?;
    has_dims(&op.out, dims(&op.indices).iter().copied())?;
    check_indexable(&dims(&op.tensor)[op.dim..=op.dim], &op.out)?;
    Ok(saturating_sum(&[bytes(&op.tensor), indices(&op.indices)]))
}

pub(super) fn scatter(op: &ScatterOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    same_dtype(&op.tensor, &op.value)?;
    check_indices_dims(&op.tensor, &op.indices, op.dim)?;
    check_dims("the value", &op.value, dims(&op.indices))?;
    check_indexable(&dims(&op.tensor)[op.dim..=op.dim], &op.value)?;
    check_same_as_input(&op.out, &op.tensor)?;
    Ok(saturating_sum(&[
        bytes(&op.value),
        indices(&op.indices),
        exact_scatter_bytes(op),
    ]))
}

/// Checks that the indices have the dims of the tensor, except along one axis.
fn check_indices_dims(tensor: &TensorIr, at: &TensorIr, along: usize) -> Result<(), RuleViolation> {
    Kind::Int.of(at)?;
    axis(tensor, along)?;
    let (of, at) = (dims(tensor), dims(at));
    let mut pairs = of.iter().zip(at).enumerate();
    let fits = of.len() == at.len() && pairs.all(|(i, (of, at))| i == along || of == at);
    must!(
        fits,
        "indices {} do not fit axis {along} of {}",
        format_dims(at),
        format_dims(of)
    );
    Ok(())
}

pub(super) fn select(op: &SelectOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    has_dtype(&op.out, op.tensor.dtype)?;
    let count = index_count(&op.indices)?;
    check_dims_except(&op.out, &op.tensor, op.dim, count)?;
    check_indexable(&dims(&op.tensor)[op.dim..=op.dim], &op.out)?;
    Ok(saturating_sum(&[bytes(&op.tensor), indices(&op.indices)]))
}

pub(super) fn select_assign(op: &SelectAssignOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.tensor)?;
    same_dtype(&op.tensor, &op.value)?;
    let count = index_count(&op.indices)?;
    check_dims_except(&op.value, &op.tensor, op.dim, count)?;
    check_indexable(&dims(&op.tensor)[op.dim..=op.dim], &op.value)?;
    check_same_as_input(&op.out, &op.tensor)?;
    Ok(saturating_sum(&[bytes(&op.value), indices(&op.indices)]))
}

/// Checks that `visited`, the elements that are read or written at the indices, is empty if one
/// of the indexed dims `of` is 0: no index is valid then.
pub(super) fn check_indexable(of: &[usize], visited: &TensorIr) -> Result<(), RuleViolation> {
    let nowhere = of.contains(&0) && !dims(visited).contains(&0);
    must!(
        !nowhere,
        "indices for {} point into an axis of 0",
        format_dims(dims(visited))
    );
    Ok(())
}

/// Returns the number of indices in a one-dimensional tensor of indices.
fn index_count(indices: &TensorIr) -> Result<usize, RuleViolation> {
    Kind::Int.of(indices)?;
    Ok(dims_of_rank("the list of indices", indices, 1)?[0])
}

pub(super) fn gather_nd(op: &GatherNdOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.data)?;
    has_dtype(&op.out, op.data.dtype)?;
    let (at, slice) = tuples(&op.data, &op.indices, kind)?;
    has_dims(&op.out, at.iter().chain(slice).copied())?;
    check_indexable(
        &dims(&op.data)[..dims(&op.data).len() - slice.len()],
        &op.out,
    )?;
    Ok(saturating_sum(&[bytes(&op.data), indices(&op.indices)]))
}

pub(super) fn scatter_nd(op: &ScatterNdOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.data)?;
    same_dtype(&op.data, &op.values)?;
    let (at, slice) = tuples(&op.data, &op.indices, kind)?;
    let fits = dims(&op.values).iter().eq(at.iter().chain(slice));
    must!(
        fits,
        "values {} do not fit indices {} into {}",
        format_dims(dims(&op.values)),
        format_dims(dims(&op.indices)),
        format_dims(dims(&op.data))
    );
    check_indexable(
        &dims(&op.data)[..dims(&op.data).len() - slice.len()],
        &op.values,
    )?;
    check_same_as_input(&op.out, &op.data)?;
    Ok(saturating_sum(&[
        bytes(&op.data),
        bytes(&op.values),
        indices(&op.indices),
    ]))
}

/// Returns the dims of `indices` without its last axis, which has the components of a tuple,
/// and the dims of the slice of `data` that a tuple addresses.
fn tuples<'a>(
    data: &'a TensorIr,
    indices: &'a TensorIr,
    kind: Kind,
) -> Result<(&'a [usize], &'a [usize]), RuleViolation> {
    if kind == Kind::Bool {
        return unsupported("tuples of indices into booleans");
    }
    Kind::Int.of(indices)?;
    let (of, at) = (dims(data), dims(indices));
    let pointed = at
        .split_last()
        .and_then(|(&k, at)| of.get(k..).map(|slice| (at, slice)));
    let Some(pointed) = pointed else {
        let reason = format!(
            "indices {} into {} do not fit",
            format_dims(at),
            format_dims(of)
        );
        return Err(super::rules::mismatch(reason));
    };
    Ok(pointed)
}
