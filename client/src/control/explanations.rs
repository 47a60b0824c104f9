//! When the pool is asked why requests and leases wait. A state machine: the time is an argument.

use std::{collections::HashMap, time::Duration};

use tensord_proto::{
    ids::{LeaseId, RequestId},
    v1::{ExplainWait, WaitExplained, explain_wait, wait_explained},
};
use tokio::time::Instant;

/// The shortest time between two questions about one request or lease. The pool leaves out replies while it
/// is asked too often.
const PAUSE: Duration = Duration::from_secs(5);

/// The time until the next question while nothing is known to have changed: devices may have been leased or
/// released meanwhile. Also while the pool does not reply, as a lease that was interrupted may run again.
const REFRESH: Duration = Duration::from_secs(60);

/// The number of questions without a reply after which the pool is asked less often.
const MAX_UNANSWERED: u32 = 3;

/// What waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Waiter {
    Request(RequestId),
    Lease(LeaseId),
}

impl Waiter {
    /// Returns which request or lease a reply explains, if it says so.
    pub(super) fn of(explained: &WaitExplained) -> Option<Self> {
        Some(match explained.waiter? {
            wait_explained::Waiter::RequestId(id) => Self::Request(RequestId(id)),
            wait_explained::Waiter::LeaseId(id) => Self::Lease(LeaseId(id)),
        })
    }

    /// Returns the question why it waits.
    pub(super) fn question(self) -> ExplainWait {
        let waiter = match self {
            Self::Request(id) => explain_wait::Waiter::RequestId(id.0),
            Self::Lease(id) => explain_wait::Waiter::LeaseId(id.0),
        };
        ExplainWait {
            waiter: Some(waiter),
        }
    }
}

#[derive(Debug, Default)]
struct Wait {
    /// When the pool was asked last.
    asked_at: Option<Instant>,
    /// Whether it waits for another reason since.
    is_changed: bool,
    /// The number of questions since the last reply.
    unanswered: u32,
    /// The last reply.
    explanation: String,
}

impl Wait {
    /// Returns when the pool is to be asked next; `None` for at once.
    fn due_at(&self) -> Option<Instant> {
        let is_soon = match self.unanswered {
            0 => self.is_changed,
            unanswered => unanswered < MAX_UNANSWERED,
        };
        let pause = if is_soon { PAUSE } else { REFRESH };
        self.asked_at.map(|at| at + pause)
    }
}

/// The requests and leases that wait, and are to be explained.
#[derive(Debug, Default)]
pub(super) struct Explanations(HashMap<Waiter, Wait>);

impl Explanations {
    /// Records that something waits, or waits for another reason than before.
    pub(super) fn changed(&mut self, waiter: Waiter) {
        self.0.entry(waiter).or_default().is_changed = true;
    }

    /// Records that something does not wait any more.
    pub(super) fn remove(&mut self, waiter: Waiter) {
        self.0.remove(&waiter);
    }

    /// Forgets all, as another scheduler may have other reasons: the pool reports anew what waits.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Records a reply of the pool, and returns true if it is another one than before.
    pub(super) fn explained(&mut self, waiter: Waiter, explanation: &str) -> bool {
        let Some(wait) = self.0.get_mut(&waiter) else {
            return false;
        };
        wait.unanswered = 0;
        let is_new = wait.explanation != explanation;
        if is_new {
            explanation.clone_into(&mut wait.explanation);
        }
        is_new
    }

    /// Returns about which to ask at `now`, and records the questions.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Waiter> {
        let due = self.0.iter_mut();
        let due = due.filter(|(_, wait)| wait.due_at().is_none_or(|at| at <= now));
        let ask = |(waiter, wait): (&Waiter, &mut Wait)| {
            (wait.asked_at, wait.is_changed) = (Some(now), false);
            wait.unanswered += 1;
            *waiter
        };
        due.map(ask).collect()
    }

    /// Returns when [`take_due`](Self::take_due) returns something next, if nothing changes.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().filter_map(Wait::due_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Waiter = Waiter::Request(RequestId(1));

    #[test]
    fn what_waits_is_asked_about_at_once_and_then_at_intervals() {
        let (mut explanations, start) = (Explanations::default(), Instant::now());
        assert_eq!(explanations.next_due(), None);
        explanations.changed(REQUEST);
        assert_eq!(explanations.take_due(start), [REQUEST]);
        // The pool does not reply.
        assert_eq!(explanations.next_due(), Some(start + PAUSE));
        assert!(explanations.take_due(start + PAUSE / 2).is_empty());
        assert_eq!(explanations.take_due(start + PAUSE), [REQUEST]);
        assert!(explanations.explained(REQUEST, "one"));
        assert_eq!(explanations.next_due(), Some(start + PAUSE + REFRESH));
        // A change makes it due, after the pause.
        explanations.changed(REQUEST);
        assert_eq!(explanations.take_due(start + PAUSE * 2), [REQUEST]);
        assert!(!explanations.explained(REQUEST, "one"));
        assert!(explanations.explained(REQUEST, "two"));
        explanations.remove(REQUEST);
        assert_eq!(explanations.next_due(), None);
        assert!(!explanations.explained(REQUEST, "three"));
    }

    #[test]
    fn pool_that_does_not_reply_is_asked_less_often() {
        let (mut explanations, start) = (Explanations::default(), Instant::now());
        explanations.changed(REQUEST);
        let mut asked_at = start;
        for _ in 1..MAX_UNANSWERED {
            assert_eq!(explanations.take_due(asked_at), [REQUEST]);
            asked_at += PAUSE;
            assert_eq!(explanations.next_due(), Some(asked_at));
        }
        assert_eq!(explanations.take_due(asked_at), [REQUEST]);
        assert_eq!(explanations.next_due(), Some(asked_at + REFRESH));
    }

    #[test]
    fn change_between_question_and_reply_is_asked_about_again() {
        let (mut explanations, start) = (Explanations::default(), Instant::now());
        let lease = Waiter::Lease(LeaseId(2));
        explanations.changed(lease);
        assert_eq!(explanations.take_due(start), [lease]);
        explanations.changed(lease);
        assert!(explanations.explained(lease, "before the change"));
        assert_eq!(explanations.next_due(), Some(start + PAUSE));
    }
}
