//! The moves of durable leases to their keepers.
//!
//! While the worker of a durable lease is lost, the lease waits for free devices of its keeper or of a
//! worker with its snapshot store, or for its worker to come back, until a deadline. A lease also moves
//! if its worker is about to stop, or if its client cannot reach the worker, once the keeper has its
//! snapshots. It moves only while its client is attached, as nobody else could open its sessions again.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use tensord_proto::ids::{ClientId, LeaseId, StoreId, WorkerId};

use super::Engine;
use super::assignment::assign;
use crate::command::Command;
use crate::device::Requirement;
use crate::event::{AssignedKeeper, DeviceRef, GrantedDevice};
use crate::lease::{Keeper, KeptHere, Lease, Origin, Standing, StoredSessions, SuspendedPart};
use crate::pool::Worker;
use crate::reason::{CannotMove, EndReason, SnapshotPlaces};

/// A part of a lease that is to go on elsewhere.
struct Place {
    /// The number of devices that it needs of one worker.
    devices: usize,
    /// What they must be like.
    requirement: Requirement,
    /// The workers that have the snapshots of its sessions, and could start the lease now, the best
    /// first.
    workers: Vec<Candidate>,
    /// The snapshot store that has the snapshots, too.
    store: Option<StoreId>,
}

/// A worker at which a part of a lease could go on.
#[derive(Clone, Copy)]
struct Candidate {
    worker: WorkerId,
    /// Whether the worker would have to load the snapshots from its store.
    loads: bool,
}

/// Where a lease could go on now.
struct Elsewhere {
    devices: Vec<DeviceRef>,
    /// The workers that would have to load snapshots from their store.
    load_stored: BTreeSet<WorkerId>,
    /// The workers whose store has the snapshots.
    stored: BTreeMap<WorkerId, StoredSessions>,
}

impl Engine {
    /// Returns whether a lease goes on although a worker of it is gone, for `reason`. It then has
    /// until the recovery timeout to go on where its snapshots are.
    pub(super) fn outlives_worker(&mut self, id: LeaseId, reason: &EndReason) -> bool {
        let Some(lease) = self.leases.get(id) else {
            return false;
        };
        if lease.only_worker().is_none() {
            return self.suspend_for(id, reason.clone()).is_ok();
        }
        let Some(places) = self.snapshot_places(lease) else {
            return false;
        };
        let lost = EndReason::NotReplaced {
            gone: Box::new(reason.clone()),
            places,
        };
        let mut unused = None;
        if let Some(mut lease) = self.leases.get_mut(id) {
            lease.set_standing(Standing::Lost(lost));
            let timeout = lease.recovery_timeout(&self.options);
            lease.rejoin_by = Some(self.now + timeout);
            for keeper in lease.keepers.values_mut() {
                keeper.is_announced = false;
                if let Some(previous) = keeper.previous.take() {
                    unused = Some((keeper.worker, keeper.part));
                    (keeper.worker, keeper.is_kept) = (previous, true);
                }
            }
        }
        if let Some((worker, part)) = unused {
            self.drop_kept(worker, id, part);
        }
        true
    }

    /// Records whether `client` could go on with a lease from snapshots.
    pub(super) fn set_restorable(&mut self, client: ClientId, id: LeaseId, is_restorable: bool) {
        let lease = self.leases.get_mut(id);
        if let Some(mut lease) = lease.filter(|lease| lease.owner == Some(client)) {
            lease.is_restorable = is_restorable;
        }
    }

    /// Records where the snapshots are of the leases of `worker`: those that the keepers have, and
    /// those that it has itself, and whether it has room to hold them.
    pub(super) fn set_kept(
        &mut self,
        worker: WorkerId,
        at_keepers: &[AssignedKeeper],
        here: &BTreeMap<LeaseId, bool>,
    ) {
        let mut unused = Vec::new();
        let leases = self.pool.get(worker).map(|worker| worker.leases());
        for id in leases.into_iter().flatten() {
            let kept = match here.get(&id) {
                None => KeptHere::Lacking,
                Some(false) => KeptHere::WithoutRoom,
                Some(true) => KeptHere::WithRoom,
            };
            let is_kept = |keeper: &Keeper| at_keepers.contains(&keeper.assigned(id));
            let is_same = |lease: &Lease| {
                let keeper = lease.keepers.get(&worker);
                let is_keeper_same = keeper.is_none_or(|keeper| {
                    let is_kept = is_kept(keeper);
                    keeper.is_kept == is_kept && (keeper.previous.is_none() || !is_kept)
                });
                is_keeper_same && lease.kept_at.get(&worker) == Some(&kept)
            };
            // Workers report this with each heartbeat.
            if self.leases.get(id).is_some_and(is_same) {
                continue;
            }
            if let Some(mut lease) = self.leases.get_mut(id) {
                let lease = &mut *lease;
                if let Some(keeper) = lease.keepers.get_mut(&worker) {
                    keeper.is_kept = is_kept(keeper);
                    if keeper.is_kept {
                        lease.keeper_gone = None;
                        let previous = keeper.previous.take();
                        unused.extend(previous.map(|previous| (previous, id, keeper.part)));
                    }
                }
                lease.kept_at.insert(worker, kept);
            }
        }
        for (keeper, id, part) in unused {
            self.drop_kept(keeper, id, part);
        }
    }

    /// Moves the leases whose worker was lost or drains to their keepers, and those that were resumed
    /// to one of their holders, as far as these have devices. A lease that has none and needs more
    /// than are free has these held back for it; otherwise new leases would take them one by one.
    pub(super) fn move_leases(&mut self) {
        let held_back = self.pool.take_held_back();
        let mut later = Vec::new();
        for id in self.leases_to_look_at() {
            match self.comes_after_guaranteed(id) {
                true => later.push(id),
                false => drop(self.go_on_or_wait(id)),
            }
        }
        self.go_on_after_entitled(later);
        for id in self.leases_at_draining() {
            if self.leases.get(id).is_some_and(Lease::is_movable) {
                self.try_move(id);
            }
        }
        self.move_from_draining();
        self.pool.compare_held_back(&held_back);
    }

    /// Has a lease without devices go on if there are devices for it, and otherwise wait for some. Returns
    /// whether it goes on.
    pub(super) fn go_on_or_wait(&mut self, id: LeaseId) -> bool {
        if self.waits_behind_others(id) {
            return false;
        }
        if self.is_over_limit(id) {
            self.report_standing(id);
            return false;
        }
        let goes_on = self.try_move(id);
        if !goes_on {
            self.seek_destination(id);
            self.report_standing(id);
            self.hold_back_devices(id);
        }
        goes_on
    }

    /// Returns the leases that have devices of a worker which is to have no leases.
    pub(super) fn leases_at_draining(&self) -> BTreeSet<LeaseId> {
        let draining = self.pool.index().draining().iter();
        let draining = draining.filter_map(|worker| self.pool.get(*worker));
        draining.flat_map(Worker::leases).collect()
    }

    /// Returns the client of a lease, if it is attached.
    pub(super) fn attached_owner(&self, id: LeaseId) -> Option<ClientId> {
        let owner = self.leases.get(id)?.owner;
        owner.filter(|owner| self.clients.contains_key(owner))
    }

    /// Returns the parts of a lease that are to go on elsewhere, each on the devices of one worker.
    fn places(&self, id: LeaseId, lease: &Lease) -> Vec<Place> {
        match lease.standing {
            Standing::Running | Standing::Lost(_) => {
                let Some(requirement) = lease.requirement_elsewhere() else {
                    return Vec::new();
                };
                let keeper = lease.only_keeper();
                let store = lease.only_stored().map(|stored| stored.store);
                let complete = keeper.filter(|keeper| keeper.is_kept || store.is_none());
                let in_memory: Vec<_> = complete.iter().map(|keeper| keeper.worker).collect();
                let mut workers = self.candidates(id, &in_memory, store);
                // The lease is to leave its worker.
                workers.retain(|it| Some(it.worker) != lease.only_worker());
                let devices = lease.lease_devices.len();
                vec![Place {
                    devices,
                    requirement,
                    workers,
                    store,
                }]
            }
            Standing::Resuming { .. } => {
                let place = |part: &SuspendedPart| Place {
                    devices: part.devices,
                    requirement: part.requirement.clone(),
                    workers: self.candidates(id, &part.holders, part.store),
                    store: part.store,
                };
                lease.parts.iter().map(place).collect()
            }
            Standing::Suspended { .. } => Vec::new(),
        }
    }

    /// Returns the workers at which a part of a lease could start: those that have its snapshots in
    /// memory, and then those that have its store open.
    fn candidates(
        &self,
        id: LeaseId,
        in_memory: &[WorkerId],
        store: Option<StoreId>,
    ) -> Vec<Candidate> {
        let loading = self.workers_with_store(store);
        let loading = loading.filter(|worker| !in_memory.contains(worker));
        let in_memory = in_memory.iter().map(|&worker| (worker, false));
        let all = in_memory.chain(loading.map(|worker| (worker, true)));
        let all = all.map(|(worker, loads)| Candidate { worker, loads });
        let lease = self.leases.get(id);
        let is_excluded = |worker| lease.is_some_and(|lease| self.is_excluded(lease, worker));
        // A worker could not start the lease before it has released it.
        all.filter(|it| !self.pool.is_ending(it.worker, id) && !is_excluded(it.worker))
            .collect()
    }

    /// Returns free devices on which a lease could go on elsewhere.
    fn free_elsewhere(&self, id: LeaseId, lease: &Lease) -> Option<Elsewhere> {
        if self.has_old_process(id, lease) {
            return None;
        }
        let mut elsewhere = Elsewhere {
            devices: Vec::new(),
            load_stored: BTreeSet::new(),
            stored: BTreeMap::new(),
        };
        let places = self.places(id, lease);
        let free = |place: &Place, worker: WorkerId| {
            self.pool
                .free_fitting(worker, id, &place.requirement, place.devices)
        };
        let candidates = places.iter().map(|place| {
            let workers = place.workers.iter().map(|candidate| candidate.worker);
            let has_free = |worker: &WorkerId| {
                let (requirement, count) = (&place.requirement, place.devices);
                self.pool.has_free(*worker, id, requirement, count)
            };
            workers.filter(has_free).collect()
        });
        // Devices of two workers must not come together on one.
        let workers = assign(&candidates.collect::<Vec<_>>())?;
        for (place, worker) in places.iter().zip(workers) {
            elsewhere.devices.extend(free(place, worker)?);
            let mut chosen = place.workers.iter().filter(|it| it.worker == worker);
            let loads = chosen.any(|candidate| candidate.loads);
            elsewhere.load_stored.extend(loads.then_some(worker));
            let has_store = self.pool.get(worker).and_then(Worker::store) == place.store;
            if let Some(store) = place.store.filter(|_| has_store) {
                let requirement = place.requirement.clone();
                let stored = StoredSessions { store, requirement };
                elsewhere.stored.insert(worker, stored);
            }
        }
        (!elsewhere.devices.is_empty()).then_some(elsewhere)
    }

    /// Returns the free devices at a worker that has, or can load, the snapshots of a lost lease.
    pub(super) fn free_for_lost(&self, id: LeaseId, lease: &Lease) -> Vec<DeviceRef> {
        let places = self.places(id, lease);
        let free = places.iter().flat_map(|place| {
            let (requirement, count) = (&place.requirement, place.devices);
            let workers = place.workers.iter().map(|candidate| candidate.worker);
            let workers = workers.filter(|worker| self.pool.can_run(*worker, requirement, count));
            let free = workers.map(|worker| self.pool.fitting(worker, id, requirement, count));
            free.max_by_key(Vec::len).unwrap_or_default()
        });
        free.collect()
    }

    /// Reports to the client of a lease without devices that the lease waits, if the client does not
    /// know.
    pub(super) fn report_standing(&mut self, id: LeaseId) {
        let attached = self.attached_owner(id);
        let lease = self.leases.get(id);
        let is_unreported = lease.is_some_and(|lease| !lease.is_standing_reported);
        // It may need another keeper, or have a destination to which its snapshots are handed over.
        self.leases.touch(id);
        let Some(client) = attached.filter(|_| is_unreported) else {
            return;
        };
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        lease.is_standing_reported = true;
        let lost = lease.lost().cloned();
        drop(lease);
        match lost {
            Some(reason) => self.commands.push(Command::Interrupted {
                client,
                lease: id,
                reason,
            }),
            None => self.report_suspended(client, id),
        }
    }

    /// Returns a lease if it is one that could go on from snapshots of its sessions.
    ///
    /// # Errors
    ///
    /// Why it is not.
    pub(super) fn check_movable(&self, id: LeaseId) -> Result<&Lease, CannotMove> {
        let lease = self.leases.get(id).ok_or(CannotMove::Unknown)?;
        if lease.is_suspended() {
            return Err(CannotMove::Suspended);
        }
        if self.attached_owner(id).is_none() {
            return Err(CannotMove::ClientAway);
        }
        if !lease.durability.is_durable() {
            return Err(CannotMove::NotDurable);
        }
        let devices = lease.devices_by_worker();
        let are_replaceable = |here: &Vec<DeviceRef>| {
            let known = here.iter().filter_map(|it| self.pool.device(*it));
            let is_unknown = known.clone().next().is_none();
            is_unknown || Requirement::of(known, lease.durability, lease.share()).is_some()
        };
        match devices.values().all(are_replaceable) {
            true => Ok(lease),
            false => Err(CannotMove::NotReplaceable),
        }
    }

    /// Returns the name of the worker to which a lease could move now while its own is there.
    ///
    /// # Errors
    ///
    /// Why the lease cannot move.
    pub fn check_move(&self, id: LeaseId) -> Result<String, CannotMove> {
        let lease = self.check_movable(id)?;
        lease.only_worker().ok_or(CannotMove::SeveralWorkers)?;
        let places = self.snapshot_places(lease).ok_or(CannotMove::NoKeeper)?;
        if lease.lost().is_none() && !lease.is_restorable {
            return Err(CannotMove::NotRestorable);
        }
        let is_kept = lease.only_keeper().is_some_and(|keeper| keeper.is_kept);
        if let SnapshotPlaces::Keeper(keeper) = &places
            && !is_kept
            && lease.lost().is_none()
        {
            let keeper = keeper.clone();
            return Err(CannotMove::NoSnapshots { keeper });
        }
        let elsewhere = self.free_elsewhere(id, lease);
        let first = elsewhere.and_then(|it| self.pool.get(it.devices.first()?.worker));
        match first {
            Some(worker) => Ok(worker.name().to_owned()),
            None => Err(CannotMove::NoFreeDevice { places }),
        }
    }

    /// Moves a lease to its keeper or to a worker with its store, or to one of its holders if it was
    /// resumed. Returns `false` if these have too few free devices, or the client of the lease is away.
    pub(super) fn try_move(&mut self, id: LeaseId) -> bool {
        let Some(lease) = self.leases.get(id) else {
            return false;
        };
        let is_attached = self.attached_owner(id).is_some();
        let free = self.free_elsewhere(id, lease).filter(|_| is_attached);
        let Some(elsewhere) = free else {
            return false;
        };
        let Elsewhere {
            devices,
            load_stored,
            stored,
        } = elsewhere;
        let (old_grants, share) = (lease.grants(), lease.share());
        let passed = self.comes_after_guaranteed(id);
        let passed = passed.then(|| self.passed_by(None, &devices));
        self.end_grants(id, old_grants);
        let places: Vec<_> = devices.iter().map(|device_ref| device_ref.worker).collect();
        let workers: BTreeSet<_> = places.iter().copied().collect();
        let lease_devices = self.take_devices(id, devices, |_| share);
        let origin = self.origin_by(&lease_devices);
        let now = self.now;
        let Some(mut lease) = self.leases.get_mut(id) else {
            return false;
        };
        lease.count_time(now);
        lease.lease_devices.clear();
        lease.add(&lease_devices);
        lease.epoch += 1;
        if origin == Origin::Adopted {
            lease.origin = origin;
        }
        lease.standing = Standing::Running;
        (lease.running_since, lease.is_reclaimed) = (now, false);
        lease.passed = passed.unwrap_or_else(|| mem::take(&mut lease.passed));
        lease.rejoin_by = None;
        lease.unreachable.clear();
        (lease.interrupted_at, lease.keeper_gone) = (None, None);
        lease.avoided.clear();
        lease.excluded.retain(|_, it| now < it.until);
        let keepers = mem::take(&mut lease.keepers);
        let receiving = keepers.values().flat_map(Keeper::workers);
        let receiving: Vec<_> = receiving.collect();
        let keepers = receiving.iter().map(|(worker, _)| *worker);
        let unused: BTreeSet<_> = keepers.chain(lease.holders()).collect();
        lease.kept_at.clear();
        (lease.load_stored, lease.stored) = (load_stored, stored);
        let parts = mem::take(&mut lease.parts);
        drop(lease);
        for worker in unused.difference(&workers) {
            self.drop_snapshots(*worker, id);
        }
        self.drop_other_parts(id, &parts, &receiving, &places);
        self.idle.forget_lease(id);
        self.set_charge(id);
        self.report_moved(id);
        true
    }

    /// Sends the client of a lease the lease's devices, unless the client is away or the worker is
    /// lost.
    pub(super) fn report_moved(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let (Some(client), epoch) = (self.attached_owner(id), lease.epoch) else {
            return;
        };
        if lease.is_suspended() {
            return;
        }
        let device = |(_, granted): (&DeviceRef, &GrantedDevice)| self.pool.leased_device(*granted);
        let devices = lease.lease_devices.iter().map(device);
        let load_stored = lease.load_stored.clone();
        if let Some(devices) = devices.collect() {
            if let Some(mut lease) = self.leases.get_mut(id) {
                lease.is_move_unreported = false;
            }
            self.commands.push(Command::Moved {
                client,
                lease: id,
                epoch,
                devices,
                load_stored,
            });
        }
    }
}
