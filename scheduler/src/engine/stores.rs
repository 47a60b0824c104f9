//! Snapshot stores: directories in which workers keep the snapshots of leases, beside the memory of their
//! hosts and of keepers.
//!
//! A store outlives its workers, so a lease whose snapshots it has can wait until a worker joins that
//! has the same store open. What a store has of a lease is deleted when the lease ends.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{LeaseId, StoreId, WorkerId};

use super::Engine;
use crate::command::Command;
use crate::device::Requirement;
use crate::lease::{Lease, StoredSessions};
use crate::pool::Worker;
use crate::reason::SnapshotPlaces;

impl Engine {
    /// Records of which leases on `worker` its snapshot store has the snapshots; `here` has those whose
    /// snapshots it has in memory. While it loads the snapshots of a lease, it reports neither, and the
    /// store has them.
    pub(super) fn set_stored(
        &mut self,
        worker: WorkerId,
        here: &BTreeMap<LeaseId, bool>,
        in_store: &BTreeSet<LeaseId>,
    ) {
        let Some(known) = self.pool.get(worker) else {
            return;
        };
        for id in known.leases() {
            let Some(lease) = self.leases.get(id) else {
                continue;
            };
            let has_loaded = here.contains_key(&id) || in_store.contains(&id);
            let is_loading = lease.load_stored.contains(&worker);
            if is_loading && !has_loaded {
                continue;
            }
            let store = known.store().filter(|_| in_store.contains(&id));
            let stored = store.zip(self.requirement_at(lease, worker));
            let stored = stored.map(|(store, requirement)| StoredSessions { store, requirement });
            if lease.stored.get(&worker) == stored.as_ref() && !is_loading {
                continue;
            }
            if let Some(mut lease) = self.leases.get_mut(id) {
                lease.load_stored.remove(&worker);
                lease.stored.remove(&worker);
                lease.stored.extend(stored.map(|stored| (worker, stored)));
            }
        }
    }

    /// Updates what devices must be like for the leases on `worker` to go on from a store: the worker may
    /// have come back with other devices.
    pub(super) fn renew_stored(&mut self, worker: WorkerId) {
        let known = self.pool.get(worker);
        for id in known.map(Worker::leases).into_iter().flatten() {
            let lease = self.leases.get(id);
            let requirement = lease.and_then(|lease| self.requirement_at(lease, worker));
            let Some(mut lease) = self.leases.get_mut(id) else {
                continue;
            };
            let stored = lease.stored.get_mut(&worker);
            if let (Some(stored), Some(requirement)) = (stored, requirement) {
                stored.requirement = requirement;
            }
        }
    }

    /// Returns what devices must be like for the sessions of a durable lease on `worker` to go on
    /// elsewhere, if they could.
    fn requirement_at(&self, lease: &Lease, worker: WorkerId) -> Option<Requirement> {
        let devices = lease.lease_devices.keys();
        let here = devices.filter(|device_ref| device_ref.worker == worker);
        let here = here.filter_map(|device_ref| self.pool.device(*device_ref));
        Requirement::of(here, lease.durability, lease.share())
    }

    /// Returns the workers with a stream that have a snapshot store open, and stay.
    pub(super) fn workers_with_store(
        &self,
        store: Option<StoreId>,
    ) -> impl Iterator<Item = WorkerId> {
        let connected = store.map(|store| self.connected_with_store(store));
        let connected = connected.into_iter().flatten();
        connected.filter(|worker| !self.pool.is_draining(*worker))
    }

    /// Returns the workers with a stream that have a snapshot store open.
    fn connected_with_store(&self, store: StoreId) -> impl Iterator<Item = WorkerId> {
        let with_store = self.pool.index().with_store(store);
        with_store.filter(|worker| self.pool.is_connected(*worker))
    }

    /// Returns where the snapshots are of a lease that has all its devices on one worker, if they are
    /// anywhere else than there.
    pub(super) fn snapshot_places(&self, lease: &Lease) -> Option<SnapshotPlaces> {
        let store = lease.only_stored().map(|stored| stored.store);
        let keeper = lease.only_keeper();
        let keeper = keeper.filter(|keeper| keeper.is_kept || store.is_none());
        let keeper = keeper.and_then(|keeper| {
            let worker = keeper.worker;
            match self.pool.get(worker) {
                Some(known) => Some(known.name().to_owned()),
                None if self.may_yet_join(worker) => {
                    Some(format!("{worker}, which has yet to join"))
                }
                None => None,
            }
        });
        match (keeper, store) {
            (Some(keeper), Some(store)) => Some(SnapshotPlaces::Both(keeper, store)),
            (Some(keeper), None) => Some(SnapshotPlaces::Keeper(keeper)),
            (None, Some(store)) => Some(SnapshotPlaces::Store(store)),
            (None, None) => None,
        }
    }

    /// Has what the snapshot stores have of a lease deleted that has ended. If no worker with a store has
    /// a stream, the first one that joins reports the lease, and gets the command then.
    pub(super) fn drop_stored(&mut self, id: LeaseId, lease: &Lease) {
        if !lease.durability.is_durable() {
            return;
        }
        let workers = lease.workers();
        let own = workers.iter().filter_map(|it| self.pool.get(*it)?.store());
        let stored = lease.stored.values().map(|stored| stored.store);
        let in_parts = lease.parts.iter().filter_map(|part| part.store);
        let stores: BTreeSet<_> = own.chain(stored).chain(in_parts).collect();
        for store in stores {
            // A worker of the lease may still be writing.
            let recipient = self
                .connected_with_store(store)
                .min_by_key(|worker| !workers.contains(worker));
            if let Some(worker) = recipient {
                let leases = vec![id];
                self.commands.push(Command::DropStored { worker, leases });
            }
        }
    }

    /// Has a worker delete what its snapshot store has of those of `leases` that are over. After a
    /// restart of the scheduler, leases may come back until the adoption window has ended.
    pub(super) fn drop_unknown_stored(&mut self, worker: WorkerId, mut leases: Vec<LeaseId>) {
        if self.now < self.leases.adopt_until() {
            return;
        }
        leases.retain(|id| self.leases.get(*id).is_none());
        if !leases.is_empty() {
            self.commands.push(Command::DropStored { worker, leases });
        }
    }
}
