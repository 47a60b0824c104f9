//! Results of all-reduces and transfers that are in flight, by ticket.

use std::collections::HashMap;

use burn_ir::TensorId;

use super::fault::FaultContext;
use crate::collective::Outcome;

/// Maximum number of results of a session in flight. Beyond this limit an all-reduce
/// waits.
const MAX_RESULTS_IN_FLIGHT: usize = 1 << 15;

/// A result in flight.
#[derive(Debug)]
struct InFlightResult {
    /// The tensor that the result is for, and the number of the op that makes it. `None`
    /// until that op's turn.
    out: Option<(TensorId, u64)>,
    /// The outcome, if it arrived before the op's turn.
    early_outcome: Option<Outcome>,
    context: FaultContext,
}

/// An outcome that arrived after the turn of its op.
pub(super) struct Arrival {
    /// The tensor that the outcome is for.
    pub(super) out: TensorId,
    pub(super) context: FaultContext,
    pub(super) outcome: Outcome,
}

/// The results of a session that are in flight.
#[derive(Default)]
pub(super) struct InFlightResults {
    results: HashMap<u64, InFlightResult>,
    last_ticket: u64,
}

impl InFlightResults {
    pub(super) fn is_empty(&self) -> bool {
        self.results.is_empty()
    }

    /// Returns whether one more result may be added after `others` further results are added.
    pub(super) fn has_room(&self, others: usize) -> bool {
        self.results.len() + others < MAX_RESULTS_IN_FLIGHT
    }

    /// Returns whether results are in flight for ops up to `number` whose turn has come.
    pub(super) fn has_any_up_to(&self, number: u64) -> bool {
        let before = |result: &InFlightResult| result.out.is_some_and(|(_, turn)| turn <= number);
        self.results.values().any(before)
    }

    /// Adds a result, and returns its ticket. `out` has the tensor and the number of its
    /// op, if the op's turn has come.
    pub(super) fn add(&mut self, out: Option<(TensorId, u64)>, context: FaultContext) -> u64 {
        self.last_ticket += 1;
        self.results.insert(
            self.last_ticket,
            InFlightResult {
                out,
                early_outcome: None,
                context,
            },
        );
        self.last_ticket
    }

    /// Records that it is the turn of the op that the result under `ticket` is for. `out` has
    /// the op's output and number. Returns the outcome if it has arrived, and the result is
    /// then no longer in flight.
    pub(super) fn on_turn(
        &mut self,
        ticket: u64,
        out: (TensorId, u64),
        context: FaultContext,
    ) -> Option<Arrival> {
        let result = self.results.get_mut(&ticket)?;
        (result.out, result.context) = (Some(out), context);
        let outcome = result.early_outcome.take()?;
        self.on_outcome(ticket, outcome)
    }

    /// Records the outcome under `ticket`. Returns it if the turn of its op has come, and
    /// the result is then no longer in flight.
    pub(super) fn on_outcome(&mut self, ticket: u64, outcome: Outcome) -> Option<Arrival> {
        let result = self.results.get_mut(&ticket)?;
        let Some((out, _)) = result.out else {
            result.early_outcome = Some(outcome);
            return None;
        };
        let context = self.results.remove(&ticket)?.context;
        Some(Arrival {
            out,
            context,
            outcome,
        })
    }
}
