//! Checks that the ranks of a call bring tensors of the same type.

use tensord_proto::{codec::tensor_bytes, v1::FaultKind};

use super::super::{
    algorithm::{Arrival, Failure, Rank},
    reduce::Element,
};

/// What the arrivals of all ranks have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Agreed {
    pub(super) element: Element,
    /// Bytes of the tensor.
    pub(super) size: usize,
    pub(super) mean: bool,
    /// The smallest slice, in bytes, that every worker would send round a ring; `None`
    /// if some worker would not use one.
    pub(super) ring_bytes: Option<u64>,
}

/// Returns what the arrivals have in common, or the failure of the call if they differ
/// or have a fault. The result is the same on every worker.
pub(super) fn agree(arrivals: &[&Arrival], ranks: &[Rank]) -> Result<Agreed, Failure> {
    if let Some(fault) = arrivals.iter().find_map(|arrival| arrival.fault.clone()) {
        return Err(Failure::Inherited(fault));
    }
    let mismatch = |reason: String| Err(Failure::New(FaultKind::Mismatch, reason));
    let kind = |arrival: &Arrival| {
        let what = if arrival.mean { "mean" } else { "sum" };
        format!(
            "{} of {} for the {what}",
            arrival.shape,
            arrival.dtype.name()
        )
    };
    let (first, rest) = arrivals.split_first().expect("a group has ranks");
    let is_other = |arrival: &&Arrival| {
        (&arrival.shape, arrival.dtype, arrival.mean) != (&first.shape, first.dtype, first.mean)
    };
    if let Some(at) = rest.iter().position(is_other) {
        let other = at + 1;
        let (one, two) = (&ranks[0].description, &ranks[other].description);
        return mismatch(format!(
            "rank 0 ({one}) contributes {}, but rank {other} ({two}) contributes {}",
            kind(first),
            kind(rest[at])
        ));
    }
    let Some(element) = Element::of(first.dtype) else {
        let count = ranks.len();
        return mismatch(format!(
            "an all-reduce supports f64, f32, f16 and bf16, but ranks 0 to {} contribute {}",
            count - 1,
            kind(first)
        ));
    };
    match tensor_bytes(&first.shape, first.dtype) {
        Some(size) => Ok(Agreed {
            element,
            size,
            mean: first.mean,
            ring_bytes: ring_bytes(arrivals),
        }),
        None => mismatch(format!("{} is too large to address", kind(first))),
    }
}

/// Returns the largest `ring_bytes` of the arrivals, or `None` if an arrival has none.
fn ring_bytes(arrivals: &[&Arrival]) -> Option<u64> {
    let mut sizes = arrivals.iter().map(|arrival| arrival.ring_bytes);
    sizes.try_fold(0, |most, bytes| bytes.map(|bytes| most.max(bytes)))
}
