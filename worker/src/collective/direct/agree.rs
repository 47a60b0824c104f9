//! Whether the ranks of a call bring the same.

use tensord_proto::{codec::tensor_bytes, v1::FaultKind};

use super::super::{
    algorithm::{Arrival, Failure, Rank},
    reduce::Element,
};

/// What all ranks bring, if they bring the same: element type, bytes, and whether
/// the mean is asked for. Every worker comes to the same answer.
pub(super) fn agree(
    arrivals: &[&Arrival],
    ranks: &[Rank],
) -> Result<(Element, usize, bool), Failure> {
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
    if let Some(at) = rest.iter().position(|arrival| arrival != first) {
        let other = at + 1;
        let (one, two) = (&ranks[0].place, &ranks[other].place);
        return mismatch(format!(
            "rank 0 ({one}) brings {}, rank {other} ({two}) {}",
            kind(first),
            kind(rest[at])
        ));
    }
    let Some(element) = Element::of(first.dtype) else {
        let count = ranks.len();
        return mismatch(format!(
            "an all-reduce takes f64, f32, f16 or bf16, and ranks 0 to {} bring {}",
            count - 1,
            kind(first)
        ));
    };
    match tensor_bytes(&first.shape, first.dtype) {
        Some(size) => Ok((element, size, first.mean)),
        None => mismatch(format!("{} is beyond what can be addressed", kind(first))),
    }
}
