//! Records the outcome of each op, for tests of sessions.

use burn_backend::{DType, Shape};
use burn_ir::{OperationIr, TensorId, TensorIr};
use tensord_proto::v1::FaultKind;

use super::{super::dataflow::Refusal, Runner, schedule::Plan};

/// The outcome of an op.
#[derive(Debug, Clone)]
pub(crate) enum RecordedOutcome {
    /// The backend executed it.
    Ran,
    /// It has a fault of its own.
    Refused(FaultKind, String),
    /// An earlier fault left an input without a value.
    Inherited,
}

impl Runner {
    pub(super) fn record_executed(&mut self) {
        self.last_outcome.get_or_insert(RecordedOutcome::Ran);
    }

    pub(super) fn record_refused(&mut self, refusal: &Refusal) {
        // Of several reasons the first counts, which is the one that a program receives.
        self.last_outcome.get_or_insert_with(|| match refusal {
            Refusal::New(kind, reason) => RecordedOutcome::Refused(*kind, reason.clone()),
            Refusal::Inherited(_) => RecordedOutcome::Inherited,
        });
    }

    /// Returns the outcome of the last op, if an op had its turn since the last call.
    pub(crate) fn take_outcome(&mut self) -> Option<RecordedOutcome> {
        self.last_outcome.take()
    }

    /// Returns the next planned op, or `None` if other work is planned before it.
    pub(crate) fn next_planned(&self) -> Option<&OperationIr> {
        match self.plans.front() {
            Some((Plan::Ops(ops, _), _)) => ops.front().map(|op| &**op),
            _ => None,
        }
    }

    /// Returns the shape and dtype that the backend has for `tensor`, if the tensor is
    /// live and the backend can report them.
    pub(crate) fn actual_type(&mut self, tensor: &TensorIr) -> Option<(Shape, DType)> {
        match self.flow.is_live(tensor.id) {
            true => self.backend.actual_type(tensor),
            false => None,
        }
    }

    /// Returns whether a tensor has a value.
    pub(crate) fn is_live(&self, id: TensorId) -> bool {
        self.flow.is_live(id)
    }

    /// Returns the number of tensors in the table.
    pub(crate) fn tensors(&self) -> usize {
        self.flow.len()
    }
}
