//! What tests of sessions read from a [`Runner`]: the outcome of each op, and its tensors.

#[cfg(feature = "testing")]
use burn_ir::{OperationIr, TensorId, TensorIr};
#[cfg(feature = "testing")]
use tensord_proto::v1::FaultKind;

#[cfg(feature = "testing")]
use super::Runner;
use crate::session::dataflow::Refusal;

/// The outcome of an op.
#[cfg(feature = "testing")]
#[derive(Debug, Clone)]
pub(crate) enum RecordedOutcome {
    /// The backend executed it.
    Ran,
    /// It has a fault of its own.
    Refused(FaultKind, String),
    /// An earlier fault left an input without a value.
    Inherited,
}

/// The outcome of the current op, or of the last one. Without the feature `testing`
/// nothing is recorded.
#[derive(Default)]
pub(super) struct OutcomeRecorder {
    #[cfg(feature = "testing")]
    last: Option<RecordedOutcome>,
}

#[cfg(feature = "testing")]
impl OutcomeRecorder {
    pub(super) fn record_executed(&mut self) {
        self.last.get_or_insert(RecordedOutcome::Ran);
    }

    pub(super) fn record_refused(&mut self, refusal: &Refusal) {
        // Of several reasons the first counts, which is the one that a program receives.
        self.last.get_or_insert_with(|| match refusal {
            Refusal::New(kind, reason) => RecordedOutcome::Refused(*kind, reason.clone()),
            Refusal::Inherited(_) => RecordedOutcome::Inherited,
        });
    }

    /// Returns the outcome of the last op, if an op had its turn since the last call.
    pub(super) fn take(&mut self) -> Option<RecordedOutcome> {
        self.last.take()
    }
}

#[cfg(not(feature = "testing"))]
impl OutcomeRecorder {
    pub(super) fn record_executed(&mut self) {}

    pub(super) fn record_refused(&mut self, _refusal: &Refusal) {}
}

/// For tests of sessions without a network.
#[cfg(feature = "testing")]
impl Runner {
    /// Returns the outcome of the last op, if an op had its turn since the last call.
    pub(crate) fn take_outcome(&mut self) -> Option<RecordedOutcome> {
        self.interpreter.outcome.take()
    }

    /// Returns the next planned op, or `None` if other work is planned before it.
    pub(crate) fn next_planned(&self) -> Option<&OperationIr> {
        self.plans.next_op()
    }

    /// Returns the shape and dtype that the backend has for `tensor`, if the tensor is
    /// live and the backend can report them.
    pub(crate) fn actual_type(
        &mut self,
        tensor: &TensorIr,
    ) -> Option<(burn_backend::Shape, burn_backend::DType)> {
        self.interpreter.tensors.actual_type(tensor)
    }

    /// Returns whether a tensor has a value.
    pub(crate) fn is_live(&self, id: TensorId) -> bool {
        self.interpreter.tensors.is_live(id)
    }

    /// Returns the number of tensors in the table.
    pub(crate) fn tensors(&self) -> usize {
        self.interpreter.tensors.len()
    }
}
