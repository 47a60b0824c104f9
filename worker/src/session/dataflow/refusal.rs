//! Why the table refuses an op.

use std::sync::Arc;

use tensord_proto::v1::{Fault, FaultKind};

use crate::{
    memory::{OutOfMemory, format_bytes},
    op_check::RuleViolation,
};

/// Why an op must not run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refusal {
    /// The op itself is at fault.
    New(FaultKind, String),
    /// An input has no value because of this earlier fault.
    Inherited(Arc<Fault>),
}

impl From<RuleViolation> for Refusal {
    fn from(broken: RuleViolation) -> Self {
        Self::New(broken.kind, broken.reason)
    }
}

pub(crate) fn out_of_memory(e: OutOfMemory) -> Refusal {
    let (requested, free) = (format_bytes(e.requested_bytes), format_bytes(e.free_bytes));
    Refusal::New(
        FaultKind::OutOfMemory,
        format!("{requested} requested, {free} free"),
    )
}
