//! Leases that are suspended: they have no devices, and go on from their snapshots when they are
//! resumed. An administrator or the lease's client does both; a client cannot resume what an
//! administrator has suspended.
//!
//! The snapshots of a suspended lease are at its *holders*: the worker that ran it, and its keeper, as
//! far as these have them and stay. Once the lease is resumed, it goes on at a holder as soon as that
//! has free devices, before any request of the queue. It ends if its last holder is lost, or if its
//! client is away for longer than other leases outlive their client.
//!
//! A lease that ran on several workers is suspended in parts, one for each worker. All go on at the
//! same time, each on the devices of one holder of the part's snapshots.

use std::collections::BTreeSet;
use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use super::Engine;
use crate::command::Command;
use crate::device::Requirement;
use crate::event::{DeviceRef, Suspender};
use crate::lease::{KeptHere, Lease, Standing, SuspendedPart};
use crate::reason::{CannotMove, CannotResume, EndReason};
use crate::snapshot::SuspensionSnapshot;

/// How long the workers of a lease have to report its snapshots after one of its processes has died:
/// several heartbeats, as a report may be older than the death.
const INTERRUPTION_TIMEOUT: Duration = Duration::from_secs(3);

impl Engine {
    /// Returns whether a lease could be suspended now.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub fn check_suspend(&self, id: LeaseId) -> Result<(), CannotMove> {
        let known = self.leases.get(id);
        match known.map(|lease| &lease.standing) {
            // Its workers may lack room to hold its snapshots for long.
            Some(Standing::Resuming { cause: Some(_), .. }) => return Err(CannotMove::Interrupted),
            Some(Standing::Resuming { cause: None, .. }) => return Ok(()),
            _ => {}
        }
        let lease = self.check_movable(id)?;
        if lease.lost().is_some() {
            return Err(CannotMove::Lost);
        }
        // Such a worker gets no command to end the lease, so the lease would keep running there.
        let workers = lease.workers();
        if !workers.iter().all(|worker| self.pool.is_connected(*worker)) {
            return Err(CannotMove::WorkerAway);
        }
        if !lease.is_restorable {
            return Err(CannotMove::NotRestorable);
        }
        self.suspended_parts(lease, KeptHere::WithRoom).map(drop)
    }

    /// Returns the parts of a lease that runs, with the workers that have their snapshots and will
    /// stay. Its own workers must have `least`.
    ///
    /// # Errors
    ///
    /// Why the lease could not go on from these parts.
    fn suspended_parts(
        &self,
        lease: &Lease,
        least: KeptHere,
    ) -> Result<Vec<SuspendedPart>, CannotMove> {
        let stays = |worker: &WorkerId| {
            let known = self.pool.get(*worker);
            self.pool.is_connected(*worker) && known.is_some_and(|known| !known.is_draining())
        };
        let part = |(worker, here): (WorkerId, Vec<DeviceRef>)| {
            let devices = here.iter().filter_map(|it| self.pool.device(*it));
            let requirement = Requirement::of(devices).ok_or(CannotMove::NotExact)?;
            let own = Some(worker).filter(|_| lease.is_kept_at(worker, least));
            let keeper = lease.keepers.get(&worker).filter(|keeper| keeper.is_kept);
            let keeper = keeper.map(|keeper| keeper.worker);
            let holders: BTreeSet<_> = own.into_iter().chain(keeper).filter(stays).collect();
            match holders.is_empty() {
                true => Err(CannotMove::NoHolder),
                false => Ok(SuspendedPart {
                    devices: here.len(),
                    requirement,
                    holders,
                }),
            }
        };
        lease.devices_by_worker().into_iter().map(part).collect()
    }

    /// Suspends a lease, if it can be suspended. One that was resumed and has no devices yet waits no
    /// more.
    pub(super) fn suspend(&mut self, id: LeaseId, by: Suspender) {
        if self.check_suspend(id).is_err() {
            return;
        }
        let Some(lease) = self.leases.get_mut(id) else {
            return;
        };
        match lease.is_suspended() {
            true => lease.set_standing(Standing::Suspended { by }),
            false => self.suspend_running(id, KeptHere::WithRoom, Standing::Suspended { by }),
        }
    }

    /// Takes its devices from a lease whose workers have `least`. `standing` is how it is then.
    fn suspend_running(&mut self, id: LeaseId, least: KeptHere, standing: Standing) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let Ok(parts) = self.suspended_parts(lease, least) else {
            return;
        };
        let (old_grants, workers) = (lease.grants(), lease.workers());
        let keepers = lease.keepers.values().map(|keeper| keeper.worker);
        let keepers: BTreeSet<_> = keepers.collect();
        let Some(lease) = self.leases.get_mut(id) else {
            return;
        };
        lease.lease_devices.clear();
        lease.kept_at.clear();
        lease.keepers.clear();
        (lease.rejoin_by, lease.unreachable) = (None, None);
        lease.parts = parts;
        lease.set_standing(standing);
        let holders = lease.holders();
        self.end_grants(id, old_grants);
        for holder in holders.difference(&workers) {
            self.hold_snapshots(*holder, id);
        }
        for keeper in keepers.difference(&holders) {
            self.drop_snapshots(*keeper, id);
        }
    }

    /// Returns whether a lease could be resumed.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub fn check_resume(&self, id: LeaseId, by: Suspender) -> Result<(), CannotResume> {
        let lease = self.leases.get(id).ok_or(CannotResume::Unknown)?;
        match lease.standing {
            Standing::Suspended {
                by: Suspender::Administrator,
            } if by == Suspender::Client => Err(CannotResume::ByAdministrator),
            Standing::Suspended { .. } => Ok(()),
            Standing::Resuming { .. } => Err(CannotResume::Resumed),
            Standing::Running | Standing::Lost(_) => Err(CannotResume::NotSuspended),
        }
    }

    /// Resumes a lease that is suspended: it waits for free devices of a worker that has its
    /// snapshots.
    pub(super) fn resume_suspended(&mut self, id: LeaseId, by: Suspender) {
        let (since, cause) = (self.now, None);
        if self.check_resume(id, by).is_ok()
            && let Some(lease) = self.leases.get_mut(id)
        {
            lease.set_standing(Standing::Resuming { since, cause });
        }
    }

    /// Has leases go on from their snapshots whose processes on `worker` have died. If a process on
    /// one worker has died, those on the other workers of the lease must go on from the same cut, so
    /// the whole lease is suspended and resumed. It ends if it cannot go on.
    pub(super) fn on_interrupted(&mut self, worker: WorkerId, leases: Vec<(LeaseId, String)>) {
        let now = self.now;
        for (id, how) in leases {
            let lease = self.leases.get_mut(id);
            let is_its = |lease: &&mut Lease| {
                lease.standing == Standing::Running && lease.workers().contains(&worker)
            };
            let Some(lease) = lease.filter(is_its) else {
                continue;
            };
            lease.kept_at.insert(worker, KeptHere::WithoutRoom);
            let since = *lease.interrupted_at.get_or_insert(now);
            let is_over = now.saturating_since(since) >= INTERRUPTION_TIMEOUT;
            match self.check_restorable_here(id) {
                Ok(()) => {
                    let cause = Some(EndReason::ProcessDied { how });
                    let resuming = Standing::Resuming { since: now, cause };
                    self.suspend_running(id, KeptHere::WithoutRoom, resuming);
                }
                // The worker will report the lease again.
                Err(CannotMove::ClientAway | CannotMove::WorkerAway) => {}
                Err(_) if !is_over => {}
                Err(why) => self.end_lease(id, Some(EndReason::NotRestored { how, why })),
            }
        }
    }

    /// Returns whether a lease could go on from snapshots where it runs. If its client is away, or
    /// could not go on, its sessions find that out.
    ///
    /// # Errors
    ///
    /// Why it could not.
    fn check_restorable_here(&self, id: LeaseId) -> Result<(), CannotMove> {
        let lease = self.leases.get(id).ok_or(CannotMove::Unknown)?;
        lease.owner.ok_or(CannotMove::ClientAway)?;
        if !lease.is_durable {
            return Err(CannotMove::NotDurable);
        }
        let workers = lease.workers();
        let has_reported = |worker: &WorkerId| {
            self.pool.is_connected(*worker) && lease.kept_at.contains_key(worker)
        };
        if !workers.iter().all(has_reported) {
            return Err(CannotMove::WorkerAway);
        }
        self.suspended_parts(lease, KeptHere::WithoutRoom).map(drop)
    }

    /// Returns how a lease is suspended, if it is.
    pub(super) fn suspension(&self, lease: &Lease) -> Option<SuspensionSnapshot> {
        let is_resumed = match lease.standing {
            Standing::Suspended { .. } => false,
            Standing::Resuming { .. } => true,
            Standing::Running | Standing::Lost(_) => return None,
        };
        let holders = self.holder_names(lease);
        Some(SuspensionSnapshot {
            holders,
            needs_all: lease.parts.len() > 1,
            is_resumed,
        })
    }

    /// Returns the names of the workers that have the snapshots of a suspended lease.
    fn holder_names(&self, lease: &Lease) -> Vec<String> {
        let holders = lease.holders().into_iter();
        let known = holders.filter_map(|worker| self.pool.get(worker));
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
        let cause = match &lease.standing {
            Standing::Resuming { cause, .. } => cause.clone(),
            Standing::Running | Standing::Lost(_) | Standing::Suspended { .. } => None,
        };
        self.commands.push(Command::Suspended {
            client,
            lease: id,
            waits_for,
            cause,
        });
    }

    /// Settles with a worker that has joined which snapshots of suspended leases it holds: the command
    /// to hold them may have been lost with its stream, and so may that to drop them. A scheduler that
    /// has restarted knows of no suspended leases.
    pub(super) fn settle_holder(&mut self, worker: WorkerId, held: &[LeaseId]) {
        let leases = self.leases.iter();
        let known = leases.filter(|(_, lease)| lease.holders().contains(&worker));
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

    /// Removes a worker that is lost from the holders of suspended leases. Ends the leases of which a
    /// part has no other one.
    pub(super) fn on_holder_lost(&mut self, worker: WorkerId, name: &str) {
        let mut over = Vec::new();
        for (id, lease) in self.leases.iter_mut() {
            for part in &mut lease.parts {
                if part.holders.remove(&worker) && part.holders.is_empty() {
                    over.push(id);
                }
            }
        }
        for id in over {
            let name = name.to_owned();
            self.end_lease(id, Some(EndReason::SnapshotsLost { worker, name }));
        }
    }
}
