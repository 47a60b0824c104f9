//! Workers of a lease that its client, or another of its workers, cannot reach.
//!
//! Neither such a report alone nor a broken stream alone is enough to move a lease at once: the client may have lost
//! its network, and the worker its connection to the scheduler. With both, the lease need not wait until the worker is
//! considered lost. If somebody misses a worker for long that the scheduler can reach, it is the network between the
//! two. Then the lease goes on without that worker, if there are devices for it elsewhere, and does not come back to it
//! for a while.

use std::cmp::Reverse;
use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use super::Engine;
use super::assignment::assign;
use crate::lease::{Exclusion, Lease, Unreachable};
use crate::reason::EndReason;

/// How long a lease does not come back to a worker that its client, or another of its workers, could not reach. It
/// would be interrupted again if the network between the two is still broken then.
const EXCLUSION: Duration = Duration::from_secs(600);

impl Engine {
    /// Has a lease leave this worker of it, which its client cannot reach. A client that names none means the only one,
    /// or, of an earlier version, any that has no stream.
    pub(super) fn on_unreachable(
        &mut self,
        client: ClientId,
        id: LeaseId,
        worker: Option<WorkerId>,
    ) {
        let Some(lease) = self.leases.get(id).filter(|it| it.owner == Some(client)) else {
            return;
        };
        let workers = lease.workers();
        let without_stream = || {
            let mut workers = workers.iter();
            workers.find(|it| !self.pool.is_connected(**it)).copied()
        };
        let only = lease.only_worker();
        let missed = worker.or(only).or_else(without_stream);
        let Some(missed) = missed.filter(|it| workers.contains(it)) else {
            return;
        };
        let is_long = self.is_missed_for_long(id, None, missed);
        match only {
            Some(_) => self.leave_only_worker(id, is_long),
            None => self.leave_missed_worker(id, None, missed, is_long),
        }
    }

    /// Has leases leave one of two workers, as this worker cannot reach the other one.
    pub(super) fn on_peers_missing(&mut self, worker: WorkerId, missing: Vec<(LeaseId, WorkerId)>) {
        for (id, missed) in missing {
            let lease = self.leases.get(id);
            let workers = lease.map(Lease::workers).unwrap_or_default();
            if missed != worker && workers.contains(&worker) && workers.contains(&missed) {
                let is_long = self.is_missed_for_long(id, Some(worker), missed);
                self.leave_missed_worker(id, Some(worker), missed, is_long);
            }
        }
    }

    /// Records a report of the client (`None`), or of a worker of a lease, that it cannot reach a worker of it. Returns
    /// whether it has reported that for long.
    fn is_missed_for_long(
        &mut self,
        id: LeaseId,
        missed_by: Option<WorkerId>,
        missed: WorkerId,
    ) -> bool {
        let now = self.now;
        let Some(mut lease) = self.leases.get_mut(id) else {
            return false;
        };
        let earlier = lease.unreachable.get(&(missed_by, missed)).copied();
        let report = Unreachable::extend(earlier, now);
        lease.unreachable.insert((missed_by, missed), report);
        now.saturating_since(report.since) >= self.options.unreachable_timeout
    }

    /// Moves a lease whose client cannot reach its only worker: at once if the scheduler has no stream from the worker
    /// either, and otherwise when the client has not reached it for long.
    fn leave_only_worker(&mut self, id: LeaseId, is_long: bool) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        // Its worker may be loading snapshots, and would be reached after that.
        let is_long = is_long && lease.load_stored.is_empty();
        let is_down = lease
            .only_worker()
            .is_some_and(|it| !self.pool.is_connected(it));
        // Without the snapshots, the lease could only go on where it is, if the worker comes back.
        if lease.is_movable() && (is_down || is_long) {
            self.try_move(id);
        }
    }

    /// Has a lease of several workers leave one of two, one of which misses the other; or the one that its client misses.
    fn leave_missed_worker(
        &mut self,
        id: LeaseId,
        missed_by: Option<WorkerId>,
        missed: WorkerId,
        is_long: bool,
    ) {
        if !self.pool.is_connected(missed) {
            return self.leave_worker_without_stream(id, missed);
        }
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        if !is_long || !lease.load_stored.is_empty() {
            return;
        }
        // The one that cannot reach, or be reached by, more others. It may have been the other one's fault before.
        let mut both: Vec<_> = [Some(missed), missed_by].into_iter().flatten().collect();
        both.sort_by_key(|it| Reverse(lease.missed_with(*it, self.now)));
        let left = both
            .into_iter()
            .find(|it| self.can_go_on_without(id, lease, *it));
        let Some(left) = left else {
            return;
        };
        let cause = EndReason::WorkerMissed {
            worker: missed,
            name: self.worker_name(missed),
            by: match missed_by {
                Some(other) => format!("worker {} ({other})", self.worker_name(other)),
                None => "the program".into(),
            },
            other: missed_by,
        };
        let now = self.now;
        if let Some(mut lease) = self.leases.get_mut(id) {
            let exclusion = Exclusion {
                until: now + EXCLUSION,
                with: match left == missed {
                    true => missed_by,
                    false => Some(missed),
                },
            };
            lease.excluded.insert(left, exclusion);
        }
        if self.suspend_for(id, cause).is_ok() {
            // The next lease must not count on its devices, if these are held back for it.
            self.go_on_or_wait(id);
        }
    }

    /// Has a lease of several workers go on elsewhere that misses a worker from which the scheduler has no stream
    /// either, if there are devices for it.
    fn leave_worker_without_stream(&mut self, id: LeaseId, missed: WorkerId) {
        let lease = self.leases.get(id);
        if lease.is_some_and(|lease| self.can_go_on_now(id, lease)) {
            let cause = match self.pool.get(missed) {
                Some(known) => EndReason::WorkerUnreachable {
                    worker: missed,
                    name: known.name().to_owned(),
                },
                // It has not joined since the scheduler restarted.
                None => EndReason::WorkerMissing { worker: missed },
            };
            let _ = self.suspend_for(id, cause);
        }
    }

    /// Returns whether a lease on several workers that runs could go on without one of them: its part there at a
    /// worker with free devices that has the snapshots or can get them from another one, and all others where they are.
    fn can_go_on_without(&self, id: LeaseId, lease: &Lease, left: WorkerId) -> bool {
        let Some(parts) = self.restorable_parts(id, lease) else {
            return false;
        };
        let candidates = parts.iter().map(|part| {
            if part.source != left {
                let stays = part.holders.contains(&part.source);
                return Vec::from_iter(stays.then_some(part.source));
            }
            let with_snapshots = self.holders_and_loaders(part);
            // The network of the worker that is left may be broken altogether.
            let mut holders = part.holders.iter().filter(|holder| **holder != left);
            let can_be_sent = holders.any(|it| self.pool.is_connected(*it));
            let with_free = self.pool.with_free(id, &part.requirement, part.devices);
            let fits = |worker: &WorkerId| {
                let can_get =
                    || can_be_sent && !self.is_avoided(lease, *worker) && self.has_room(*worker);
                *worker != left
                    && !self.is_excluded(lease, *worker)
                    && (with_snapshots.contains(worker) || can_get())
            };
            with_free.into_iter().filter(fits).collect()
        });
        assign(&candidates.collect::<Vec<_>>()).is_some()
    }

    /// Returns whether a lease is not to go on at a worker for now, as its client, or another of its workers, could not
    /// reach it.
    pub(crate) fn is_excluded(&self, lease: &Lease, worker: WorkerId) -> bool {
        let exclusion = lease.excluded.get(&worker);
        exclusion.is_some_and(|it| self.now < it.until)
    }

    fn worker_name(&self, worker: WorkerId) -> String {
        let known = self.pool.get(worker);
        known.map_or_else(String::new, |it| it.name().to_owned())
    }
}
