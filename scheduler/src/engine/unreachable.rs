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
use crate::lease::{Lease, Standing, Unreachable};
use crate::reason::EndReason;

/// How long a lease does not come back to a worker that its client, or another of its workers, could not reach. It
/// would be interrupted again if the network between the two is still broken then.
const EXCLUSION: Duration = Duration::from_secs(600);

impl Engine {
    /// Moves a lease whose client cannot reach this worker of it; a client that names none means the only one.
    pub(super) fn on_unreachable(
        &mut self,
        client: ClientId,
        id: LeaseId,
        worker: Option<WorkerId>,
    ) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let worker = worker.or_else(|| lease.only_worker());
        let worker =
            worker.filter(|it| lease.owner == Some(client) && lease.workers().contains(it));
        let Some(worker) = worker else {
            return;
        };
        let is_only = lease.only_worker().is_some();
        let is_long = self.is_missed_for_long(id, None, worker);
        match is_only {
            true => self.leave_only_worker(id, worker, is_long),
            false => self.leave_one_worker(id, None, worker, is_long),
        }
    }

    /// Moves leases of which this worker cannot reach another one.
    pub(super) fn on_peers_missing(&mut self, worker: WorkerId, missing: Vec<(LeaseId, WorkerId)>) {
        for (id, peer) in missing {
            let lease = self.leases.get(id);
            let workers = lease.map(Lease::workers).unwrap_or_default();
            if peer != worker && workers.contains(&worker) && workers.contains(&peer) {
                let is_long = self.is_missed_for_long(id, Some(worker), peer);
                self.leave_one_worker(id, Some(worker), peer, is_long);
            }
        }
    }

    /// Records a report that a worker of a lease cannot be reached, by its client or by another worker of it. Returns
    /// whether there have been such reports for long.
    fn is_missed_for_long(&mut self, id: LeaseId, by: Option<WorkerId>, worker: WorkerId) -> bool {
        let now = self.now;
        let Some(mut lease) = self.leases.get_mut(id) else {
            return false;
        };
        let earlier = lease.unreachable.get(&(by, worker)).copied();
        let report = Unreachable::extend(earlier, now);
        lease.unreachable.insert((by, worker), report);
        now.saturating_since(report.since) >= self.options.unreachable_timeout
    }

    fn leave_only_worker(&mut self, id: LeaseId, worker: WorkerId, is_long: bool) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        // Its worker may be loading snapshots, and would be reached after that.
        let is_long = is_long && lease.load_stored.is_empty();
        let is_down = !self.pool.is_connected(worker);
        // Without the snapshots, the lease could only go on where it is, if the worker comes back.
        if lease.is_movable() && (is_down || is_long) {
            self.try_move(id);
        }
    }

    /// Has a lease of several workers go on without one that the client misses, or another worker.
    fn leave_one_worker(
        &mut self,
        id: LeaseId,
        by: Option<WorkerId>,
        worker: WorkerId,
        is_long: bool,
    ) {
        if !self.pool.is_connected(worker) {
            return self.leave_worker_without_stream(id, worker);
        }
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        if !is_long || !lease.load_stored.is_empty() {
            return;
        }
        // Of two that cannot reach each other, the one that more others miss.
        let mut both: Vec<_> = [Some(worker), by].into_iter().flatten().collect();
        both.sort_by_key(|it| Reverse(lease.missed_pairs(*it, self.now)));
        let left = both
            .into_iter()
            .find(|it| self.can_go_on_without(id, lease, *it));
        let Some(left) = left else {
            return;
        };
        let cause = EndReason::WorkerMissed {
            worker,
            name: self.worker_name(worker),
            by: match by {
                Some(other) => format!("worker {} ({other})", self.worker_name(other)),
                None => "the program".into(),
            },
            other: by,
        };
        let (now, until) = (self.now, self.now + EXCLUSION);
        if let Some(mut lease) = self.leases.get_mut(id) {
            lease.excluded.retain(|_, until| now < *until);
            lease.excluded.insert(left, until);
        }
        if self.suspend_for(id, cause).is_ok() {
            // The next lease must not count on its devices, if these are held back for it.
            self.go_on_or_wait(id);
        }
    }

    /// Has a lease of several workers go on elsewhere that misses a worker from which the scheduler has no stream
    /// either, if there are devices for it.
    fn leave_worker_without_stream(&mut self, id: LeaseId, worker: WorkerId) {
        let lease = self.leases.get(id);
        if lease.is_some_and(|lease| self.can_go_on_now(id, lease)) {
            let cause = match self.pool.get(worker) {
                Some(known) => EndReason::WorkerUnreachable {
                    worker,
                    name: known.name().to_owned(),
                },
                // It has not joined since the scheduler restarted.
                None => EndReason::WorkerMissing { worker },
            };
            let _ = self.suspend_for(id, cause);
        }
    }

    /// Returns whether a lease on several workers that runs could go on without one of them: its part there at a
    /// worker with free devices that has the snapshots or can get them, and all others where they are.
    fn can_go_on_without(&self, id: LeaseId, lease: &Lease, left: WorkerId) -> bool {
        let is_running = lease.standing == Standing::Running && lease.is_restorable;
        if !is_running || self.attached_owner(id).is_none() {
            return false;
        }
        let Ok(parts) = self.suspended_parts(lease, true) else {
            return false;
        };
        let candidates = parts.iter().map(|part| {
            if part.source != left {
                let stays = part.holders.contains(&part.source);
                return Vec::from_iter(stays.then_some(part.source));
            }
            let with_snapshots = self.holders_and_loaders(part);
            let mut holders = part.holders.iter();
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
        let until = lease.excluded.get(&worker);
        until.is_some_and(|until| self.now < *until)
    }

    fn worker_name(&self, worker: WorkerId) -> String {
        let known = self.pool.get(worker);
        known.map_or_else(String::new, |it| it.name().to_owned())
    }
}
