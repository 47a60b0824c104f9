//! Leases that are suspended: they have no devices, and go on from their snapshots when they are
//! resumed. An administrator or the lease's client does both; a client cannot resume what an
//! administrator has suspended. The scheduler suspends idle leases (`idle.rs`), which their clients
//! resume.
//!
//! The snapshots of a suspended lease are at its *holders*: the worker that ran it, and its keeper, as
//! far as these have them and stay; and in the snapshot store of its worker, if it has one. Once the lease
//! is resumed, it goes on at a holder as soon as that has free devices, or, if other workers have free
//! devices first, at one of these (`destinations.rs`): before the requests of the queue, other than those
//! within guarantees if the lease is beyond that of its tenant. It ends if its last holder is lost, or if its
//! client is away for longer than other leases outlive their client.
//!
//! A lease that ran on several workers is suspended in parts, one for each worker. All go on at the
//! same time, each on the devices of a worker of its own.

use std::collections::BTreeSet;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use super::Engine;
use crate::command::Command;
use crate::device::Requirement;
use crate::event::{DeviceRef, Suspender};
use crate::lease::{Keeper, KeptHere, Lease, MAX_HELD, Standing, SuspendedPart};
use crate::reason::{CannotMove, CannotResume, EndReason};
use crate::snapshot::SuspensionSnapshot;

/// Maximum number of leases that a client has suspended at once. They take memory of workers that other
/// programs may need.
const MAX_SUSPENDED_BY_CLIENT: usize = 8;

impl Engine {
    /// Returns whether a lease could be suspended now.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub fn check_suspend(&self, id: LeaseId, by: Suspender) -> Result<(), CannotMove> {
        self.suspension_of(id, by).map(drop)
    }

    /// Returns the parts that a lease would become if it were suspended now, or `None` if it has no
    /// devices and only its standing would change.
    ///
    /// # Errors
    ///
    /// Why the lease could not be suspended.
    fn suspension_of(
        &self,
        id: LeaseId,
        by: Suspender,
    ) -> Result<Option<Vec<SuspendedPart>>, CannotMove> {
        let known = self.leases.get(id);
        match known.map(|lease| &lease.standing) {
            // Its workers may lack room to hold its snapshots for long.
            Some(Standing::Resuming { cause: Some(_), .. }) => return Err(CannotMove::Interrupted),
            Some(Standing::Resuming { cause: None, .. }) => return Ok(None),
            // An administrator's suspension then replaces any other, and the client's that for idleness.
            Some(Standing::Suspended { by: before }) if by.takes_over_from(*before) => {
                return Ok(None);
            }
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
        let own = lease.owner.filter(|_| by == Suspender::Client);
        let own = own.map(|owner| self.leases.owned_by(owner));
        let own = own.into_iter().flatten();
        let own = own.filter_map(|id| self.leases.get(id));
        let suspended = own.filter(|other| other.is_suspended()).count();
        if suspended >= MAX_SUSPENDED_BY_CLIENT {
            let max = MAX_SUSPENDED_BY_CLIENT;
            return Err(CannotMove::ClientLimit { max });
        }
        self.suspended_parts(lease, false).map(Some)
    }

    /// Returns the parts of a lease that runs, with the workers that have their snapshots and will
    /// stay. If it is to go on `soon`, its own workers need no room to hold them, and one whose stream
    /// is down may have them.
    ///
    /// # Errors
    ///
    /// Why the lease could not go on from these parts.
    pub(super) fn suspended_parts(
        &self,
        lease: &Lease,
        soon: bool,
    ) -> Result<Vec<SuspendedPart>, CannotMove> {
        let holding = |worker: WorkerId| self.leases.index().holding(worker);
        let has_room = |worker: WorkerId| soon || holding(worker) < MAX_HELD;
        let stays = |worker: WorkerId| {
            let is_known = self.pool.contains(worker);
            is_known && !self.pool.is_draining(worker) && has_room(worker)
        };
        let part = |(source, here): (WorkerId, Vec<DeviceRef>)| {
            let keeper = lease.keepers.get(&source);
            let devices = here.iter().filter_map(|it| self.pool.device(*it));
            // The devices of a worker that is lost are not known any more.
            let stored = lease.stored.get(&source).map(|stored| &stored.requirement);
            let requirement = keeper.map(|keeper| &keeper.requirement).or(stored).cloned();
            let requirement =
                requirement.or_else(|| Requirement::of(devices, lease.durability, lease.share()));
            let requirement = requirement.ok_or(CannotMove::NotReplaceable)?;
            let is_kept = match (lease.kept_at.get(&source), soon) {
                (Some(KeptHere::WithRoom), _) | (Some(KeptHere::WithoutRoom) | None, true) => true,
                (Some(KeptHere::Lacking), _) | (Some(KeptHere::WithoutRoom) | None, false) => false,
            };
            let own = Some(source).filter(|source| is_kept && stays(*source));
            // A worker that is there reports when the present keeper has the snapshots. The client may already go on
            // from later ones than the keeper before has, if that report is on its way. So the keeper before counts only
            // if the worker is lost, or as a second holder in case it is.
            let is_lost = !self.pool.is_connected(source);
            let is_current = |keeper: &&Keeper| keeper.is_kept || is_lost || soon && own.is_some();
            let keeper = keeper.filter(is_current).and_then(Keeper::with_snapshots);
            let keeper = keeper.filter(|worker| self.pool.is_connected(*worker) && stays(*worker));
            Ok(SuspendedPart {
                source,
                devices: here.len(),
                requirement,
                holders: own.into_iter().chain(keeper).collect(),
                store: lease.stored.get(&source).map(|stored| stored.store),
            })
        };
        let parts = lease.devices_by_worker().into_iter().map(part);
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        match have_snapshots(&parts) {
            true => Ok(parts),
            false => Err(CannotMove::NoHolder),
        }
    }

    /// Suspends a lease, if it can be suspended. One that was resumed and has no devices yet waits no
    /// more.
    pub(super) fn suspend(&mut self, id: LeaseId, by: Suspender) {
        let standing = Standing::Suspended { by };
        match self.suspension_of(id, by) {
            Ok(Some(parts)) => self.suspend_running(id, parts, standing),
            Ok(None) => {
                if let Some(mut lease) = self.leases.get_mut(id) {
                    lease.set_standing(standing);
                }
            }
            Err(_) => {}
        }
    }

    /// Takes its devices from a lease, which becomes these `parts` and has this `standing` from then on.
    /// The parts come from [`Engine::suspended_parts`].
    pub(super) fn suspend_running(
        &mut self,
        id: LeaseId,
        parts: Vec<SuspendedPart>,
        standing: Standing,
    ) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let (old_grants, workers) = (lease.grants(), lease.workers());
        let keepers = lease.keepers.values();
        let keepers: BTreeSet<_> = keepers.flat_map(Keeper::workers).collect();
        let now = self.now;
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        lease.count_time(now);
        lease.lease_devices.clear();
        lease.avoided.clear();
        lease.kept_at.clear();
        lease.keepers.clear();
        lease.stored.clear();
        lease.rejoin_by = None;
        lease.unreachable.clear();
        lease.keeper_gone = None;
        lease.parts = parts;
        lease.set_standing(standing);
        let holders = lease.holders();
        drop(lease);
        self.end_grants(id, old_grants);
        for holder in holders.difference(&workers) {
            self.hold_snapshots(*holder, id, None);
        }
        let dropped: BTreeSet<_> = keepers.iter().map(|(worker, _)| *worker).collect();
        for keeper in dropped.difference(&holders) {
            self.drop_snapshots(*keeper, id);
        }
        // What the others have of further parts is not complete.
        for (keeper, index) in keepers {
            let lease = self.leases.get(id);
            let part = lease.and_then(|lease| lease.parts.get(index as usize));
            let is_holder = part.is_some_and(|part| part.holders.contains(&keeper));
            if holders.contains(&keeper) && !is_holder {
                self.drop_part(keeper, id, index);
            }
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
            Standing::Suspended { by: suspended_by } => match (by, suspended_by) {
                (Suspender::Client | Suspender::Idleness, Suspender::Administrator) => {
                    Err(CannotResume::ByAdministrator)
                }
                (Suspender::Idleness, Suspender::Client) => Err(CannotResume::ByClient),
                _ => Ok(()),
            },
            Standing::Resuming { .. } => Err(CannotResume::Resumed),
            Standing::Running | Standing::Lost(_) => Err(CannotResume::NotSuspended),
        }
    }

    /// Resumes a lease that is suspended: it waits for free devices of a worker that has its
    /// snapshots.
    pub(super) fn resume_suspended(&mut self, id: LeaseId, by: Suspender) {
        let (since, cause) = (self.now, None);
        if self.check_resume(id, by).is_ok()
            && let Some(mut lease) = self.leases.get_mut(id)
        {
            lease.set_standing(Standing::Resuming { since, cause });
            lease.is_reclaimed = false;
        }
    }

    /// Returns how a lease is suspended, if it is.
    pub(super) fn suspension(&self, lease: &Lease) -> Option<SuspensionSnapshot> {
        let (is_resumed, by) = match lease.standing {
            Standing::Suspended { by } => (false, Some(by)),
            Standing::Resuming { .. } => (true, None),
            Standing::Running | Standing::Lost(_) => return None,
        };
        let holders = self.holder_names(lease);
        Some(SuspensionSnapshot {
            holders,
            needs_all: lease.parts.len() > 1,
            is_resumed,
            by,
        })
    }

    /// Returns the workers at which a part of a suspended lease can go on: those that have its snapshots
    /// in memory, and then those that have its store open.
    pub(super) fn holders_and_loaders(&self, part: &SuspendedPart) -> Vec<WorkerId> {
        let loading = self.workers_with_store(part.store);
        let loading = loading.filter(|worker| !part.holders.contains(worker));
        part.holders.iter().copied().chain(loading).collect()
    }

    /// Returns the names of the workers that have the snapshots of a suspended lease, in memory or in
    /// their store; of a lease of several parts, the one where each part is likely to go on. A part that
    /// only a store has, which no worker has open now, is named by the store.
    pub(super) fn holder_names(&self, lease: &Lease) -> Vec<String> {
        let mut holders = Vec::new();
        if let [part] = &lease.parts[..] {
            holders = self.holders_and_loaders(part);
        } else {
            for part in &lease.parts {
                let is_free = |holder: &WorkerId| !holders.contains(holder);
                let free = self.holders_and_loaders(part).into_iter();
                let mut free: Vec<_> = free.filter(is_free).collect();
                // Stable, so that the part's own worker stays first.
                free.sort_by_key(|holder| {
                    self.is_excluded(lease, *holder) || !self.pool.is_connected(*holder)
                });
                holders.extend(free.first());
            }
        }
        let known = holders
            .into_iter()
            .filter_map(|worker| self.pool.get(worker));
        let mut names: Vec<_> = known.map(|worker| worker.name().to_owned()).collect();
        let stores = lease.parts.iter().filter(|part| part.holders.is_empty());
        let stores = stores.filter_map(|part| part.store);
        for store in stores.collect::<BTreeSet<_>>() {
            if self.workers_with_store(Some(store)).next().is_none() {
                names.push(format!("a worker with snapshot store {store}"));
            }
        }
        names
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
            Standing::Resuming { .. } if lease.is_reclaimed => Some(EndReason::Reclaimed),
            Standing::Resuming { cause, .. } => cause.clone(),
            Standing::Suspended {
                by: Suspender::Idleness,
            } => Some(EndReason::Idle),
            Standing::Running | Standing::Lost(_) | Standing::Suspended { .. } => None,
        };
        let needs_all = lease.parts.len() > 1 && !waits_for.is_empty();
        self.commands.push(Command::Suspended {
            client,
            lease: id,
            waits_for,
            needs_all,
            cause,
        });
    }

    /// Settles with a worker that has joined which snapshots of suspended leases it holds: the command
    /// to hold them may have been lost with its stream, and so may that to drop them. A lease that has
    /// devices of the worker, and is not among those `running` there, needs the snapshots: the worker has not
    /// received the announcement.
    pub(super) fn settle_holder(
        &mut self,
        worker: WorkerId,
        held: &[LeaseId],
        running: &BTreeSet<LeaseId>,
    ) {
        let is_holder = |id: &LeaseId| {
            let lease = self.leases.get(*id);
            lease.is_some_and(|lease| lease.holders().contains(&worker))
        };
        let named = self.leases.index().of_worker(worker);
        let known: Vec<_> = named.filter(is_holder).collect();
        let starts_here = |id: &LeaseId| {
            let lease = self.leases.get(*id);
            !running.contains(id) && lease.is_some_and(|lease| lease.workers().contains(&worker))
        };
        let is_needed = |id: &&LeaseId| known.contains(id) || starts_here(id);
        let dropped: Vec<_> = held.iter().filter(|id| !is_needed(id)).copied().collect();
        for id in dropped {
            self.drop_snapshots(worker, id);
        }
        for id in known {
            self.hold_snapshots(worker, id, None);
        }
    }

    /// Has a worker hold the snapshots that it has of a part of a suspended lease, or of all parts.
    pub(super) fn hold_snapshots(&mut self, holder: WorkerId, lease: LeaseId, part: Option<u32>) {
        if self.pool.is_connected(holder) {
            self.commands.push(Command::HoldSnapshots {
                holder,
                lease,
                part,
            });
        }
    }

    /// Removes a worker that is lost from the holders of leases without devices. Ends those of which a part has no other
    /// one, because of `gone`.
    pub(super) fn on_holder_lost(&mut self, worker: WorkerId, gone: &EndReason) {
        let mut over = Vec::new();
        for id in self.leases.index().of_worker(worker).collect::<Vec<_>>() {
            let Some(mut lease) = self.leases.get_mut(id) else {
                continue;
            };
            for part in &mut lease.parts {
                part.holders.retain(|holder| *holder != worker);
            }
            if lease.is_suspended() && !have_snapshots(&lease.parts) {
                let reason = match lease.interruption().cloned() {
                    Some(cause) => EndReason::nothing_left(cause, gone.clone()),
                    None => gone.clone(),
                };
                over.push((id, reason));
            }
        }
        for (id, reason) in over {
            self.end_lease(id, Some(reason));
        }
    }
}

/// Returns whether each part of a lease has a holder, or is in a store. One worker may hold several parts,
/// although these cannot go on there at the same time.
pub(super) fn have_snapshots(parts: &[SuspendedPart]) -> bool {
    let has_them = |part: &SuspendedPart| part.store.is_some() || !part.holders.is_empty();
    parts.iter().all(has_them)
}
