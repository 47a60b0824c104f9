//! Records the outcome of each op, for tests of sessions.

#[cfg(feature = "testing")]
use tensord_proto::v1::FaultKind;

use super::super::dataflow::Refusal;

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
