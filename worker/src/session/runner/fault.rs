//! Faults: the op that a fault names, and the faults that no reply has reported.

use std::{collections::VecDeque, sync::Arc};

use tensord_proto::{
    codec::OpName,
    v1::{Fault, FaultKind},
};

use super::super::dataflow::Refusal;
use crate::op_progress::OpProgress;

/// Maximum number of faults kept for syncs to report. Without a limit, a program that
/// never reads or syncs would accumulate them.
const MAX_UNREPORTED: usize = 64;

/// Maximum bytes of the reason of a fault that is created here: a backend's error may
/// have the source of a whole kernel.
pub(super) const REASON_BYTES: usize = 16 << 10;

/// The op and worker that a fault names.
#[derive(Debug, Clone)]
pub(crate) struct FaultContext {
    op_number: u64,
    op_name: OpName,
    op_progress: Arc<OpProgress>,
}

impl FaultContext {
    pub(crate) fn fault(&self, kind: FaultKind, reason: impl Into<String>) -> Arc<Fault> {
        if matches!(kind, FaultKind::Backend | FaultKind::Panic) {
            self.op_progress.signals.record_failure();
        }
        let mut reason = reason.into();
        reason.truncate(reason.floor_char_boundary(REASON_BYTES));
        reason.shrink_to_fit();
        Arc::new(Fault {
            kind: kind.into(),
            op_number: self.op_number,
            op_name: self.op_name.to_string(),
            worker: self.op_progress.signals.worker.to_string(),
            reason,
        })
    }

    /// Returns the fault of a refusal: the inherited one, or a new one with this context.
    pub(super) fn fault_for(&self, refusal: Refusal) -> Arc<Fault> {
        match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => self.fault(kind, reason),
        }
    }
}

/// The op whose turn it is, or the last one.
pub(super) struct CurrentOp {
    number: u64,
    op_progress: Arc<OpProgress>,
}

impl CurrentOp {
    pub(super) fn new(op_progress: Arc<OpProgress>) -> Self {
        Self {
            number: 0,
            op_progress,
        }
    }

    /// Sets the number of the op whose turn it is.
    pub(super) fn set(&mut self, number: u64) {
        self.number = number;
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Records that the backend begins to execute the op, under the name `name`. The op
    /// timeout applies from then on.
    pub(super) fn begin(&self, name: impl Into<OpName>) {
        self.op_progress.begin_op(self.number, name.into());
    }

    /// Returns the context of faults of the op.
    pub(super) fn context(&self, name: impl Into<OpName>) -> FaultContext {
        FaultContext {
            op_number: self.number,
            op_name: name.into(),
            op_progress: self.op_progress.clone(),
        }
    }
}

/// Faults that no reply has reported, oldest first.
#[derive(Default)]
pub(super) struct UnreportedFaults(VecDeque<Arc<Fault>>);

impl UnreportedFaults {
    /// Returns the fault of a refusal, and keeps it for a sync to report if it is new.
    pub(super) fn record(&mut self, context: &FaultContext, refusal: Refusal) -> Arc<Fault> {
        let is_new = matches!(refusal, Refusal::New(..));
        let fault = context.fault_for(refusal);
        if is_new && self.0.len() < MAX_UNREPORTED {
            self.0.push_back(fault.clone());
        }
        fault
    }

    /// Restores the unreported faults of a snapshot.
    pub(super) fn restored(mut faults: Vec<Arc<Fault>>) -> Self {
        faults.truncate(MAX_UNREPORTED);
        Self(faults.into())
    }

    /// Returns the faults, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Fault>> {
        self.0.iter()
    }

    /// Removes the oldest fault, for a sync that reports it.
    pub(super) fn pop(&mut self) -> Option<Arc<Fault>> {
        self.0.pop_front()
    }

    /// Records that a reply reports `fault`, so that no sync reports it again.
    pub(super) fn mark_reported(&mut self, fault: &Arc<Fault>) {
        self.0.retain(|unreported| !Arc::ptr_eq(unreported, fault));
    }
}
