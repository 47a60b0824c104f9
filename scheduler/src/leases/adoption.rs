//! The adoption window: which leases that the engine does not know it may still adopt.
//!
//! For a while after its start, the engine believes workers and clients that report leases which it does not know.
//! A lease that has ended must not come back by such a report, so the window lists the leases that have ended. The
//! lists are bounded, and a client or worker must not close the window for the others by filling them:
//!
//! - Of leases that the engine has granted, clients can make as many as they like. When too many of these have ended,
//!   they are not listed any more, and the numbers of their grants show that they have ended (`engine/adoption.rs`).
//! - Of leases that the engine has adopted, nothing else shows that they have ended. When too many of these have
//!   ended, the window closes. So the number of leases is bounded that are adopted because one worker, or the clients
//!   of one tenant, reported them.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use crate::tenants::TenantName;
use crate::time::Timestamp;

/// Most ended leases that are listed of those that the engine has adopted: one megabyte. A pool in which this many
/// leases from before a restart have ended has long recovered from the restart, so the window closes.
const MAX_ENDED: usize = 1 << 17;

/// Most ended leases that are listed of those that the engine has granted: half a megabyte. Tests exceed it.
const MAX_ENDED_GRANTED: usize = if cfg!(test) { 8 } else { 1 << 16 };

/// Most leases that are adopted because one worker reports them: the server admits 256 devices of a worker, and each
/// has 16 lanes.
const MAX_ADOPTED_OF_WORKER: usize = 1 << 12;

/// Most leases that are adopted because the clients of one tenant claim them, before their workers have reported
/// them: a quarter of the list, and three times as many leases as a pool is measured with.
const MAX_ADOPTED_OF_TENANT: usize = 1 << 15;

/// Who reports a lease that the engine does not know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reporter {
    /// The worker with this certificate. A worker that starts again has another id, and the same certificate.
    Worker([u8; 32]),
    /// The clients of a tenant, as everybody with a token of the tenant can be any number of clients.
    Tenant(TenantName),
}

impl Reporter {
    fn max_adopted(&self) -> usize {
        match self {
            Self::Worker(_) => MAX_ADOPTED_OF_WORKER,
            Self::Tenant(_) => MAX_ADOPTED_OF_TENANT,
        }
    }
}

/// The time in which unknown leases are adopted, and what is recorded in it.
pub(crate) struct AdoptionWindow {
    until: Timestamp,
    /// The leases that ended within the window, except those in `ended_granted`.
    ended: BTreeSet<LeaseId>,
    /// The leases that ended within the window and that the engine would recognise by their grants as leases that it has
    /// granted; `None` if these are too many to list.
    ended_granted: Option<BTreeSet<LeaseId>>,
    /// The number of leases that were adopted because of each reporter.
    adopted: BTreeMap<Reporter, usize>,
}

impl AdoptionWindow {
    pub(crate) fn new(until: Timestamp) -> Self {
        Self {
            until,
            ended: BTreeSet::new(),
            ended_granted: Some(BTreeSet::new()),
            adopted: BTreeMap::new(),
        }
    }

    /// Returns the end of the window.
    pub(crate) fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns whether an unknown lease that has not [ended](Self::has_ended) may be adopted because of `reporter`: it
    /// may date from before a restart.
    pub(crate) fn may_adopt(&self, reporter: &Reporter, now: Timestamp) -> bool {
        let adopted = self.adopted.get(reporter).copied().unwrap_or_default();
        now < self.until && adopted < reporter.max_adopted()
    }

    /// Returns whether a lease has ended within the window, which the engine does not know, or which nobody has claimed.
    /// `is_recognised` is whether it is reported with a grant that the engine itself has made.
    pub(crate) fn has_ended(&self, id: LeaseId, is_recognised: bool) -> bool {
        let granted = self.ended_granted.as_ref();
        let has_ended = granted.map_or(is_recognised, |granted| granted.contains(&id));
        has_ended || self.ended.contains(&id)
    }

    /// Counts a lease that was adopted because of `reporter`.
    pub(super) fn record_adoption(&mut self, reporter: Reporter) {
        *self.adopted.entry(reporter).or_default() += 1;
    }

    /// Records that a lease has ended, so that it is not adopted again. `is_recognised` is whether the engine would
    /// recognise it by each of its grants as a lease that it has granted.
    pub(super) fn record_end(&mut self, id: LeaseId, is_recognised: bool, now: Timestamp) {
        if now >= self.until {
            return;
        }
        if !is_recognised {
            self.ended.insert(id);
            if self.ended.len() >= MAX_ENDED {
                self.until = now;
            }
        } else if let Some(granted) = &mut self.ended_granted {
            granted.insert(id);
            if granted.len() > MAX_ENDED_GRANTED {
                self.ended_granted = None;
            }
        }
    }

    /// Extends the window, if it was open, because the scheduler did not run from `since` until `now`.
    pub(super) fn extend(&mut self, since: Timestamp, now: Timestamp) {
        if since < self.until {
            self.until = self.until + now.saturating_since(since);
        }
    }

    /// Clears what is recorded once the window is over.
    pub(crate) fn forget(&mut self, now: Timestamp) {
        if now >= self.until {
            self.ended.clear();
            self.ended_granted = Some(BTreeSet::new());
            self.adopted.clear();
        }
    }

    /// Returns the number of recorded ends of leases, and of reporters.
    #[cfg(test)]
    pub(crate) fn recorded(&self) -> (usize, usize) {
        let granted = self.ended_granted.as_ref().map_or(0, BTreeSet::len);
        (self.ended.len() + granted, self.adopted.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(0);
    const END: Timestamp = Timestamp::from_millis(1);
    const OTHER: Reporter = Reporter::Worker([9; 32]);

    /// Has as many leases adopted and ended as `reporter` can. Returns the number of these, and whether a lease of
    /// someone else may be adopted then.
    fn fill_by(reporter: &Reporter) -> (usize, bool) {
        let mut window = AdoptionWindow::new(END);
        let mut count = 0;
        while count < 2 * MAX_ENDED && window.may_adopt(reporter, NOW) {
            window.record_adoption(reporter.clone());
            window.record_end(LeaseId(count as u64), false, NOW);
            count += 1;
        }
        (count, window.may_adopt(&OTHER, NOW))
    }

    #[test]
    fn no_reporter_alone_closes_the_window() {
        let (worker, tenant) = (Reporter::Worker([1; 32]), Reporter::Tenant("blue".into()));
        assert_eq!(fill_by(&worker), (MAX_ADOPTED_OF_WORKER, true));
        assert_eq!(fill_by(&tenant), (MAX_ADOPTED_OF_TENANT, true));
    }

    #[test]
    fn a_full_list_closes_the_window() {
        let mut window = AdoptionWindow::new(END);
        for n in 0..MAX_ENDED as u64 {
            assert!(window.may_adopt(&OTHER, NOW));
            window.record_end(LeaseId(n), false, NOW);
        }
        assert!(!window.may_adopt(&OTHER, NOW));
        window.forget(NOW);
        assert_eq!(window.recorded(), (0, 0));
    }

    #[test]
    fn granted_leases_do_not_close_the_window() {
        let mut window = AdoptionWindow::new(END);
        let (first, last) = (LeaseId(0), LeaseId(MAX_ENDED as u64));
        window.record_end(first, true, NOW);
        assert!(window.has_ended(first, true) && window.has_ended(first, false));
        assert!(!window.has_ended(last, true));
        for n in 0..=MAX_ENDED as u64 {
            window.record_end(LeaseId(n), true, NOW);
        }
        assert!(window.may_adopt(&OTHER, NOW));
        assert_eq!(window.recorded(), (0, 0));
        assert!(window.has_ended(first, true) && window.has_ended(last, true));
        assert!(!window.has_ended(first, false));
    }
}
