//! The time at which each lease's token is due for renewal.
//!
//! Pure: time is an argument. A token is renewed after half of its lifetime, so that a
//! program has a valid one while the scheduler restarts, too.

use std::{collections::BTreeMap, time::Duration};

use tensord_proto::ids::LeaseId;
use tensord_scheduler::Timestamp;

/// The delay before the next attempt for a lease whose worker has yet to join.
const RETRY: Duration = Duration::from_secs(1);

/// The leases with a token, and when each is due for renewal. If a lease's client is detached
/// when its token is due, the lease has no entry until the client attaches again.
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
    pub(super) fn schedule(&mut self, lease: LeaseId, now: Timestamp) {
        self.due.insert(lease, now + self.life / 2);
    }

    /// Schedules another attempt for a lease that could not get a token at `now`.
    pub(super) fn retry_later(&mut self, lease: LeaseId, now: Timestamp) {
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
    fn token_is_due_once_at_half_its_lifetime() {
        let mut renewals = Renewals::new(Duration::from_secs(600));
        renewals.schedule(LeaseId(1), at(0));
        renewals.schedule(LeaseId(2), at(100));
        assert_eq!(renewals.take_due(at(299)), []);
        assert_eq!(renewals.take_due(at(300)), [LeaseId(1)]);
        assert_eq!(renewals.take_due(at(300)), []);
        renewals.schedule(LeaseId(1), at(300));
        assert_eq!(renewals.take_due(at(3600)), [LeaseId(1), LeaseId(2)]);
    }

    #[test]
    fn failed_renewal_is_retried_soon() {
        let mut renewals = Renewals::new(Duration::from_secs(600));
        renewals.retry_later(LeaseId(1), at(0));
        assert_eq!(renewals.take_due(at(0)), []);
        assert_eq!(renewals.take_due(at(1)), [LeaseId(1)]);
    }
}
