//! Leases that are suspended: they have no devices, and go on from their snapshots when they are
//! resumed.
//!
//! The snapshots of a suspended lease are at its *holders*: the worker that ran it, and its keeper, as
//! far as these have them and stay. Once the lease is resumed, it goes on at a holder as soon as that
//! has free devices, before any request of the queue. It ends if its last holder is lost, or if its
//! client is away for longer than other leases outlive their client.

use std::collections::BTreeSet;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use super::Engine;
use crate::command::Command;
use crate::lease::{Lease, Standing};
use crate::reason::{CannotMove, CannotResume, EndReason};
use crate::snapshot::SuspensionSnapshot;

impl Engine {
    /// Returns whether a lease could be suspended now.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub fn check_suspend(&self, id: LeaseId) -> Result<(), CannotMove> {
        let known = self.leases.get(id);
        if known.is_some_and(|lease| matches!(lease.standing, Standing::Resuming { .. })) {
            return Ok(());
        }
        let lease = self.check_movable(id)?;
        if lease.lost().is_some() {
            return Err(CannotMove::Lost);
        }
        // Such a worker gets no command to end the lease, so the lease would keep running there.
        let worker = lease.only_worker();
        if worker.is_some_and(|worker| !self.pool.is_connected(worker)) {
            return Err(CannotMove::WorkerAway);
        }
        if !lease.is_restorable {
            return Err(CannotMove::NotRestorable);
        }
        match self.possible_holders(lease).is_empty() {
            true => Err(CannotMove::NoHolder),
            false => Ok(()),
        }
    }

    /// Returns the workers that have the snapshots of a lease that runs, and will stay.
    fn possible_holders(&self, lease: &Lease) -> BTreeSet<WorkerId> {
        let own = lease.only_worker().filter(|_| lease.is_kept_here);
        let keeper = lease.keeper.filter(|_| lease.is_kept);
        let stays = |worker: &WorkerId| {
            let known = self.pool.get(*worker);
            self.pool.is_connected(*worker) && known.is_some_and(|known| !known.is_draining())
        };
        own.into_iter().chain(keeper).filter(stays).collect()
    }

    /// Suspends a lease, if it can be suspended. One that was resumed and has no devices yet waits no
    /// more.
    pub(super) fn suspend(&mut self, id: LeaseId) {
        if self.check_suspend(id).is_err() {
            return;
        }
        let Some(lease) = self.leases.get_mut(id) else {
            return;
        };
        match lease.is_suspended() {
            true => lease.set_standing(Standing::Suspended),
            false => self.suspend_running(id),
        }
    }

    /// Takes its devices from a lease that can be suspended.
    fn suspend_running(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let holders = self.possible_holders(lease);
        let old_grants = lease.grants();
        let dropped = lease.keeper.filter(|keeper| !holders.contains(keeper));
        if let Some(lease) = self.leases.get_mut(id) {
            lease.lease_devices.clear();
            (lease.keeper, lease.is_kept, lease.is_kept_here) = (None, false, false);
            (lease.rejoin_by, lease.unreachable) = (None, None);
            lease.holders.clone_from(&holders);
            lease.set_standing(Standing::Suspended);
        }
        let own = old_grants.first().map(|(worker, _)| *worker);
        self.end_grants(id, old_grants);
        for holder in holders.into_iter().filter(|holder| Some(*holder) != own) {
            self.hold_snapshots(holder, id);
        }
        if let Some(keeper) = dropped {
            self.drop_snapshots(keeper, id);
        }
    }

    /// Returns whether a lease could be resumed.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub fn check_resume(&self, id: LeaseId) -> Result<(), CannotResume> {
        let lease = self.leases.get(id).ok_or(CannotResume::Unknown)?;
        match lease.standing {
            Standing::Suspended => Ok(()),
            Standing::Resuming { .. } => Err(CannotResume::Resumed),
            Standing::Running | Standing::Lost(_) => Err(CannotResume::NotSuspended),
        }
    }

    /// Resumes a lease that is suspended: it waits for free devices of a worker that has its
    /// snapshots.
    pub(super) fn resume_suspended(&mut self, id: LeaseId) {
        let since = self.now;
        if self.check_resume(id).is_ok()
            && let Some(lease) = self.leases.get_mut(id)
        {
            lease.set_standing(Standing::Resuming { since });
        }
    }

    /// Returns how a lease is suspended, if it is.
    pub(super) fn suspension(&self, lease: &Lease) -> Option<SuspensionSnapshot> {
        let is_resumed = match lease.standing {
            Standing::Suspended => false,
            Standing::Resuming { .. } => true,
            Standing::Running | Standing::Lost(_) => return None,
        };
        let holders = self.holder_names(lease);
        Some(SuspensionSnapshot {
            holders,
            is_resumed,
        })
    }

    /// Returns the names of the workers that have the snapshots of a suspended lease.
    fn holder_names(&self, lease: &Lease) -> Vec<String> {
        let holders = lease.holders.iter();
        let known = holders.filter_map(|worker| self.pool.get(*worker));
        known.map(|worker| worker.name().to_owned()).collect()
    }

    /// Reports to the client of a suspended lease that the lease waits, until it is resumed or, if it
    /// is, for devices.
    pub(super) fn report_suspended(&mut self, client: ClientId, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let suspension = self.suspension(lease);
        let waits_for = suspension.filter(|suspension| suspension.is_resumed);
        let waits_for = waits_for.map_or_else(Vec::new, |suspension| suspension.holders);
        self.commands.push(Command::Suspended {
            client,
            lease: id,
            waits_for,
        });
    }

    /// Settles with a worker that has joined which snapshots of suspended leases it holds: the command
    /// to hold them may have been lost with its stream, and so may that to drop them. A scheduler that
    /// has restarted knows of no suspended leases.
    pub(super) fn settle_holder(&mut self, worker: WorkerId, held: &[LeaseId]) {
        let leases = self.leases.iter();
        let known = leases.filter(|(_, lease)| lease.holders.contains(&worker));
        let known: Vec<_> = known.map(|(id, _)| id).collect();
        for id in held.iter().filter(|id| !known.contains(id)) {
            self.drop_snapshots(worker, *id);
        }
        for id in known {
            self.hold_snapshots(worker, id);
        }
    }

    fn hold_snapshots(&mut self, holder: WorkerId, lease: LeaseId) {
        if self.pool.is_connected(holder) {
            self.commands.push(Command::HoldSnapshots { holder, lease });
        }
    }

    /// Removes a worker that is lost from the holders of suspended leases. Ends the leases that have
    /// no other one.
    pub(super) fn on_holder_lost(&mut self, worker: WorkerId, name: &str) {
        let mut over = Vec::new();
        for (id, lease) in self.leases.iter_mut() {
            if lease.holders.remove(&worker) && lease.holders.is_empty() {
                over.push(id);
            }
        }
        for id in over {
            let name = name.to_owned();
            self.end_lease(id, Some(EndReason::SnapshotsLost { worker, name }));
        }
    }
}
