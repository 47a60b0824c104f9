//! Leases on several workers that are interrupted: a process of one has died, or a worker is lost, drains, or cannot be
//! reached (`unreachable.rs`).
//!
//! All sessions of such a lease must go back to the same cut. So the whole lease is suspended and resumed:
//! it goes on when its workers have released it, the part of a worker that is gone at the keeper.
//! Until then it waits ahead of all others, as it had devices before.

use std::collections::BTreeSet;
use std::time::Duration;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::assignment::assign;
use crate::lease::{KeptHere, Lease, Standing, SuspendedPart};
use crate::reason::{CannotMove, EndReason};

/// How long the workers of a lease have to report its snapshots after one of its processes has died:
/// several heartbeats, as a report may be older than the death.
const INTERRUPTION_TIMEOUT: Duration = Duration::from_secs(3);

impl Engine {
    /// Has leases go on from their snapshots whose processes on `worker` have died. If a process on
    /// one worker has died, those on the other workers of the lease must go on from the same cut, so
    /// the whole lease is suspended and resumed. It ends if it cannot go on.
    pub(super) fn on_interrupted(&mut self, worker: WorkerId, leases: Vec<(LeaseId, String)>) {
        let now = self.now;
        for (id, how) in leases {
            let lease = self.leases.get_mut(id);
            let is_its = |lease: &Lease| {
                lease.standing == Standing::Running && lease.workers().contains(&worker)
            };
            let Some(mut lease) = lease.filter(|lease| is_its(lease)) else {
                continue;
            };
            lease.kept_at.insert(worker, KeptHere::WithoutRoom);
            let since = *lease.interrupted_at.get_or_insert(now);
            drop(lease);
            let is_over = now.saturating_since(since) >= INTERRUPTION_TIMEOUT;
            let checked = self.check_reported(id);
            let died = EndReason::ProcessDied { how: how.clone() };
            match checked.and_then(|()| self.suspend_for(id, died)) {
                Ok(()) => {}
                // The worker will report the lease again.
                Err(CannotMove::ClientAway | CannotMove::WorkerAway) => {}
                Err(_) if !is_over => {}
                Err(why) => self.end_lease(id, Some(EndReason::NotRestored { how, why })),
            }
        }
    }

    /// Takes its devices from a lease that runs, for `cause`, so that it goes on from its snapshots when
    /// its workers have released it.
    ///
    /// # Errors
    ///
    /// Why it could not go on.
    pub(super) fn suspend_for(&mut self, id: LeaseId, cause: EndReason) -> Result<(), CannotMove> {
        let lease = self.leases.get(id).ok_or(CannotMove::Unknown)?;
        if !lease.durability.is_durable() || lease.standing != Standing::Running {
            return Err(CannotMove::NotDurable);
        }
        let parts = self.suspended_parts(lease, true)?;
        let (since, cause) = (self.now, Some(cause));
        self.suspend_running(id, parts, Standing::Resuming { since, cause });
        if let Some(mut lease) = self.leases.get_mut(id) {
            lease.rejoin_by = Some(since + lease.recovery_timeout(&self.options));
        }
        self.report_standing(id);
        Ok(())
    }

    /// Checks whether a lease, a process of which has died, could go on from snapshots, as far as its
    /// workers and its client have reported.
    ///
    /// # Errors
    ///
    /// What is not known, or why the lease could not go on.
    fn check_reported(&self, id: LeaseId) -> Result<(), CannotMove> {
        let lease = self.leases.get(id).ok_or(CannotMove::Unknown)?;
        lease.owner.ok_or(CannotMove::ClientAway)?;
        if !lease.durability.is_durable() {
            return Err(CannotMove::NotDurable);
        }
        let workers = lease.workers();
        let has_reported = |worker: &WorkerId| {
            self.pool.is_connected(*worker) && lease.kept_at.contains_key(worker)
        };
        match workers.iter().all(has_reported) {
            true => Ok(()),
            false => Err(CannotMove::WorkerAway),
        }
    }

    /// Has leases go on elsewhere of which a worker drains, if there are devices for them.
    pub(super) fn move_from_draining(&mut self) {
        let draining = self.leases_at_draining().into_iter();
        let draining = draining.filter_map(|id| {
            let lease = self.leases.get(id)?;
            if lease.only_worker().is_some() {
                return None;
            }
            let workers = lease.workers().into_iter();
            let known = workers.filter_map(|worker| Some((worker, self.pool.get(worker)?)));
            let mut draining = known.filter(|(_, known)| known.is_draining());
            let (worker, known) = draining.next()?;
            let name = known.name().to_owned();
            Some((id, EndReason::WorkerDrains { worker, name }))
        });
        for (id, cause) in draining.collect::<Vec<_>>() {
            let lease = self.leases.get(id);
            if lease.is_some_and(|lease| self.can_go_on_now(id, lease))
                && self.suspend_for(id, cause).is_ok()
            {
                // The next lease must not count on its devices, if these are held back for it.
                self.go_on_or_wait(id);
            }
        }
    }

    /// Returns the parts in which a lease that runs could be suspended and go on from its snapshots, if its client is
    /// attached and could go on, too.
    pub(super) fn restorable_parts(
        &self,
        id: LeaseId,
        lease: &Lease,
    ) -> Option<Vec<SuspendedPart>> {
        let is_running = lease.standing == Standing::Running && lease.is_restorable;
        if !is_running || self.attached_owner(id).is_none() {
            return None;
        }
        self.suspended_parts(lease, true).ok()
    }

    /// Returns whether a lease that runs could go on at once without those of its workers that drain or
    /// have no stream: its client is attached, and their keepers have the snapshots and free devices.
    pub(super) fn can_go_on_now(&self, id: LeaseId, lease: &Lease) -> bool {
        let Some(parts) = self.restorable_parts(id, lease) else {
            return false;
        };
        let candidates = parts.iter().map(|part| {
            let mut holders = self.holders_and_loaders(part);
            holders.retain(|holder| {
                let (requirement, count) = (&part.requirement, part.devices);
                let has_free = || self.pool.has_free(*holder, id, requirement, count);
                let stays = *holder == part.source && self.pool.is_connected(*holder);
                let is_free = || *holder != part.source && has_free();
                !self.is_excluded(lease, *holder) && (stays || is_free())
            });
            holders
        });
        assign(&candidates.collect::<Vec<_>>()).is_some()
    }

    /// Returns whether a worker has not released a lease on several workers yet, and could hold a part
    /// of it. All old processes must be gone before the first new one starts.
    pub(super) fn has_old_process(&self, id: LeaseId, lease: &Lease) -> bool {
        let is_old =
            |worker: &WorkerId| self.pool.is_connected(*worker) && self.pool.is_ending(*worker, id);
        lease.parts.len() > 1 && lease.holders().iter().any(is_old)
    }

    /// Has the workers of a lease drop the snapshots that they have, or have received in part, of parts
    /// which go on elsewhere. `receiving` has the workers that were to get parts, and `places` the worker
    /// of each device, in the order of the parts.
    pub(super) fn drop_other_parts(
        &mut self,
        id: LeaseId,
        parts: &[SuspendedPart],
        receiving: &[(WorkerId, u32)],
        places: &[WorkerId],
    ) {
        let mut unused = BTreeSet::new();
        let mut rest = places;
        for (index, part) in (0..).zip(parts) {
            let (here, others) = rest.split_at(part.devices.min(rest.len()));
            rest = others;
            let receiving = receiving.iter().filter(|(_, part)| *part == index);
            let receiving = receiving.map(|(worker, _)| worker);
            let with_snapshots = part.holders.iter().chain(receiving);
            let others = with_snapshots.filter(|worker| here.first() != Some(*worker));
            let others = others.filter(|worker| places.contains(worker));
            unused.extend(others.map(|worker| (*worker, index)));
        }
        for (worker, index) in unused {
            self.drop_part(worker, id, index);
        }
    }
}
