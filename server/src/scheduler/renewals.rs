//! The time at which each lease's token is due for renewal.
//!
//! Pure: time is an argument. A token is renewed after half of its lifetime, so that a
//! program has a valid one while the scheduler restarts, too.

use std::{collections::BTreeMap, time::Duration};

use tensord_proto::ids::LeaseId;
use tensord_scheduler::Timestamp;

/// The delay before the next attempt for a lease whose worker has yet to join.
const RETRY: Duration = Duration::from_secs(1);

/// The leases with a token, and when each is due for renewal. A lease whose client is
/// detached when its token is due is dropped until the client attaches again.
pub(super) struct Renewals {
    life: Duration,
    due: BTreeMap<LeaseId, Timestamp>,
}

impl Renewals {
    /// Creates an empty set for tokens with the lifetime `life`.
    pub(super) fn new(life: Duration) -> Self {
        Self {
            life,
            due: BTreeMap::new(),
        }
    }

    /// Schedules the renewal of a token issued at `now`.
    pub(super) fn issued(&mut self, lease: LeaseId, now: Timestamp) {
        self.due.insert(lease, now + self.life / 2);
    }

    /// Schedules another attempt for a lease that could not get a token at `now`.
    pub(super) fn put_off(&mut self, lease: LeaseId, now: Timestamp) {
        self.due.insert(lease, now + RETRY);
    }

    /// Removes and returns the leases that are due at `now`.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Vec<LeaseId> {
        let due = self.due.extract_if(.., |_, due| *due <= now);
        due.map(|(lease, _)| lease).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    #[test]
    fn a_token_is_due_when_half_of_its_life_is_over_and_once() {
        let mut renewals = Renewals::new(Duration::from_secs(600));
        renewals.issued(LeaseId(1), at(0));
        renewals.issued(LeaseId(2), at(100));
        assert_eq!(renewals.take_due(at(299)), []);
        assert_eq!(renewals.take_due(at(300)), [LeaseId(1)]);
        assert_eq!(renewals.take_due(at(300)), []);
        renewals.issued(LeaseId(1), at(300));
        assert_eq!(renewals.take_due(at(3600)), [LeaseId(1), LeaseId(2)]);
    }

    #[test]
    fn what_could_not_be_renewed_is_tried_again_soon() {
        let mut renewals = Renewals::new(Duration::from_secs(600));
        renewals.put_off(LeaseId(1), at(0));
        assert_eq!(renewals.take_due(at(0)), []);
        assert_eq!(renewals.take_due(at(1)), [LeaseId(1)]);
    }
}
