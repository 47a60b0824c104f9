//! When explanations are requested of why requests and leases wait. A state machine: the time is an argument.

use std::{collections::HashMap, time::Duration};

use tensord_proto::{
    ids::{LeaseId, RequestId},
    v1::{ExplainWait, WaitExplained, explain_wait, wait_explained},
};
use tokio::time::Instant;

/// The shortest time between two questions about one request or lease. The pool leaves out replies to
/// further ones.
const PAUSE: Duration = Duration::from_secs(5);

/// The time until the next question while nothing is known to have changed: devices may have been leased or
/// released meanwhile. Also while the pool does not reply, as a lease that was interrupted may run again.
const REFRESH: Duration = Duration::from_secs(60);

const SECOND: Duration = Duration::from_secs(1);

/// The most questions in a second. The pool answers no more of one program.
const MAX_PER_SECOND: usize = 4;

/// The number of questions without a reply after which there are fewer questions.
const MAX_UNANSWERED: u32 = 3;

/// What waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Waiter {
    Request(RequestId),
    Lease(LeaseId),
}

impl Waiter {
    /// Returns which request or lease a reply explains, if it names one.
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
    /// When the last question was sent.
    requested_at: Option<Instant>,
    /// Whether it waits for another reason since.
    is_changed: bool,
    /// The number of questions since the last reply.
    unanswered: u32,
    /// The last reply.
    explanation: String,
}

impl Wait {
    /// Returns when the next question is due; `None` for at once.
    fn due_at(&self) -> Option<Instant> {
        let is_soon = match self.unanswered {
            0 => self.is_changed,
            unanswered => unanswered < MAX_UNANSWERED,
        };
        let pause = if is_soon { PAUSE } else { REFRESH };
        self.requested_at.map(|at| at + pause)
    }
}

/// The requests and leases that wait, and are to be explained.
#[derive(Debug, Default)]
pub(super) struct Explanations {
    waits: HashMap<Waiter, Wait>,
    /// When the present second has begun, and the number of questions since.
    second: Option<(Instant, usize)>,
}

impl Explanations {
    /// Records that something waits, or waits for another reason than before.
    pub(super) fn changed(&mut self, waiter: Waiter) {
        self.waits.entry(waiter).or_default().is_changed = true;
    }

    /// Records that something does not wait any more.
    pub(super) fn remove(&mut self, waiter: Waiter) {
        self.waits.remove(&waiter);
    }

    /// Forgets all, as another scheduler may have other reasons: the pool reports anew what waits.
    pub(super) fn clear(&mut self) {
        self.waits.clear();
    }

    /// Records a reply of the pool, and returns true if it is another one than before.
    pub(super) fn explained(&mut self, waiter: Waiter, explanation: &str) -> bool {
        let Some(wait) = self.waits.get_mut(&waiter) else {
            return false;
        };
        wait.unanswered = 0;
        let is_new = wait.explanation != explanation;
        if is_new {
            explanation.clone_into(&mut wait.explanation);
        }
        is_new
    }

    /// Returns the requests and leases about which questions are due at `now`, and records the questions. Those come
    /// first whose last question was sent longest ago.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Waiter> {
        let (begun, sent) = match self.second {
            Some((begun, sent)) if now < begun + SECOND => (begun, sent),
            _ => (now, 0),
        };
        let due = self.waits.iter();
        let due = due.filter(|(_, wait)| wait.due_at().is_none_or(|at| at <= now));
        let mut due: Vec<_> = due
            .map(|(waiter, wait)| (wait.requested_at, *waiter))
            .collect();
        due.sort_unstable();
        due.truncate(MAX_PER_SECOND - sent);
        self.second = Some((begun, sent + due.len()));
        let due = due.into_iter().map(|(_, waiter)| waiter);
        due.inspect(|waiter| {
            if let Some(wait) = self.waits.get_mut(waiter) {
                (wait.requested_at, wait.is_changed) = (Some(now), false);
                wait.unanswered += 1;
            }
        })
        .collect()
    }

    /// Returns when [`take_due`](Self::take_due) returns something next, if nothing changes.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let full_until = self.second.filter(|(_, sent)| *sent >= MAX_PER_SECOND);
        let full_until = full_until.map(|(begun, _)| begun + SECOND);
        let waits = self.waits.values();
        // Those without a question so far are due at once, or when there is room.
        let due = waits.filter_map(|wait| wait.due_at().or(full_until)).min();
        due.map(|due| due.max(full_until.unwrap_or(due)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Waiter = Waiter::Request(RequestId(1));

    #[test]
    fn questions_are_sent_at_once_and_then_at_intervals() {
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
    fn pool_that_does_not_reply_gets_fewer_questions() {
        let (mut explanations, start) = (Explanations::default(), Instant::now());
        explanations.changed(REQUEST);
        let mut requested_at = start;
        for _ in 1..MAX_UNANSWERED {
            assert_eq!(explanations.take_due(requested_at), [REQUEST]);
            requested_at += PAUSE;
            assert_eq!(explanations.next_due(), Some(requested_at));
        }
        assert_eq!(explanations.take_due(requested_at), [REQUEST]);
        assert_eq!(explanations.next_due(), Some(requested_at + REFRESH));
    }

    #[test]
    fn change_between_question_and_reply_causes_another_question() {
        let (mut explanations, start) = (Explanations::default(), Instant::now());
        let lease = Waiter::Lease(LeaseId(2));
        explanations.changed(lease);
        assert_eq!(explanations.take_due(start), [lease]);
        explanations.changed(lease);
        assert!(explanations.explained(lease, "before the change"));
        assert_eq!(explanations.next_due(), Some(start + PAUSE));
    }

    #[test]
    fn all_are_explained_in_turn_by_a_pool_that_answers_few() {
        let (mut explanations, mut now) = (Explanations::default(), Instant::now());
        let all: Vec<_> = (0..100).map(|id| Waiter::Request(RequestId(id))).collect();
        all.iter().for_each(|waiter| explanations.changed(*waiter));
        let mut explained = Vec::new();
        for _ in 0..25 {
            let due = explanations.take_due(now);
            assert_eq!(due.len(), MAX_PER_SECOND);
            for waiter in due {
                assert!(explanations.explained(waiter, "text"));
                explained.push(waiter);
            }
            assert!(explanations.take_due(now).is_empty());
            let next = explanations.next_due().unwrap();
            if explained.len() < all.len() {
                assert_eq!(next, now + SECOND);
            }
            now = next;
        }
        explained.sort_unstable();
        assert_eq!(explained, all);
    }
}
