//! Workers by what they offer and have free, so that no event has to go through all workers.
//!
//! A pool has many workers and few kinds of hosts. Two workers that offer the same devices, of which the same
//! are free, differ by their ids only, as far as a request is concerned: they are in one *group*.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use tensord_proto::ids::{StoreId, WorkerId};

use super::room::Room;
use crate::by_key;
use crate::device::{DeviceSpec, Share};
use crate::event::DeviceRef;

/// What devices have in common that differ in their names only. Ordered by memory first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceClass(Arc<DeviceSpec>);

impl DeviceClass {
    /// Returns whether a device is of the class.
    pub(crate) fn is_of(&self, device: &DeviceSpec) -> bool {
        self.memory_bytes == device.memory_bytes
            && self.kind == device.kind
            && self.fingerprint == device.fingerprint
            && self.takes_shares == device.takes_shares
    }

    pub(super) fn of(device: &DeviceSpec) -> Self {
        let name = String::new();
        let DeviceSpec {
            kind,
            memory_bytes,
            fingerprint,
            takes_shares,
            ..
        } = device.clone();
        Self(Arc::new(DeviceSpec {
            kind,
            name,
            memory_bytes,
            fingerprint,
            takes_shares,
        }))
    }
}

/// A device of the class, without a name.
impl Deref for DeviceClass {
    type Target = DeviceSpec;

    fn deref(&self) -> &DeviceSpec {
        &self.0
    }
}

impl Ord for DeviceClass {
    fn cmp(&self, other: &Self) -> Ordering {
        if Arc::ptr_eq(&self.0, &other.0) {
            return Ordering::Equal;
        }
        let fingerprint = |it: &Self| it.fingerprint.map(|it| (it.hash, it.is_exact));
        let by_memory = self.memory_bytes.cmp(&other.memory_bytes);
        let by_kind = by_memory.then_with(|| self.kind.cmp(&other.kind));
        let by_fingerprint = by_kind.then_with(|| fingerprint(self).cmp(&fingerprint(other)));
        by_fingerprint.then_with(|| self.takes_shares.cmp(&other.takes_shares))
    }
}

impl PartialOrd for DeviceClass {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Numbers of devices of each class.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClassCounts(BTreeMap<DeviceClass, usize>);

impl ClassCounts {
    /// Returns the number of accepted devices.
    pub(crate) fn count(&self, accepts: impl Fn(&DeviceSpec) -> bool) -> usize {
        let accepted = self.0.iter().filter(|(class, _)| accepts(class));
        accepted.map(|(_, count)| count).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&DeviceClass, usize)> {
        self.0.iter().map(|(class, count)| (class, *count))
    }

    pub(super) fn add(&mut self, class: &DeviceClass, count: usize) {
        match self.0.get_mut(class) {
            Some(known) => *known += count,
            None => drop(self.0.insert(class.clone(), count)),
        }
    }

    fn add_all(&mut self, other: &Self) {
        for (class, count) in &other.0 {
            self.add(class, *count);
        }
    }

    fn subtract_all(&mut self, other: &Self) {
        for (class, count) in &other.0 {
            if let Some(known) = self.0.get_mut(class) {
                *known -= count;
                if *known == 0 {
                    self.0.remove(class);
                }
            }
        }
    }
}

/// What workers of a group have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupKey {
    /// The devices that leases may get now or later.
    pub(crate) offered: ClassCounts,
    /// Those that any lease may get now.
    pub(crate) free: ClassCounts,
    pub(crate) is_connected: bool,
    pub(crate) is_draining: bool,
}

/// The keys of one worker in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerKeys {
    pub(super) group: GroupKey,
    /// What other leases could get now of its devices that leases share, by device index.
    pub(super) rooms: Vec<(DeviceClass, Room, u32)>,
    /// Whether it has devices that no lease has.
    pub(super) has_unused: bool,
    /// Whether leases have shares of its devices, or shares of them are held back.
    pub(super) has_shared: bool,
    /// The number of parts of leases whose snapshots it keeps.
    pub(super) kept: usize,
    /// The snapshot store that it has open.
    pub(super) store: Option<StoreId>,
}

/// Workers that are alike.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    by_id: BTreeSet<WorkerId>,
    by_kept: BTreeSet<(usize, WorkerId)>,
}

impl Group {
    /// Returns the workers in the order of their ids.
    pub(crate) fn by_id(&self) -> impl Iterator<Item = WorkerId> {
        self.by_id.iter().copied()
    }

    /// Returns the workers, those first that keep the snapshots of the fewest parts of leases.
    pub(crate) fn by_kept(&self) -> impl Iterator<Item = (usize, WorkerId)> {
        self.by_kept.iter().copied()
    }
}

/// The workers by what they offer and have free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkerIndex {
    groups: BTreeMap<GroupKey, Group>,
    offered: ClassCounts,
    free: ClassCounts,
    /// What is left of the devices that leases share, of each class the least first.
    rooms: BTreeMap<DeviceClass, BTreeSet<(Room, DeviceRef)>>,
    by_store: BTreeMap<StoreId, BTreeSet<WorkerId>>,
    /// The workers with devices that no lease has.
    with_unused: BTreeSet<WorkerId>,
    /// The workers with devices that leases share, or of which shares are held back.
    with_shared: BTreeSet<WorkerId>,
    draining: BTreeSet<WorkerId>,
    disconnected: BTreeSet<WorkerId>,
    /// The workers that were new, gone, or had another stream or offer, since these were taken last.
    changed: BTreeSet<WorkerId>,
    /// Rises with each change other than in what workers keep.
    version: u64,
    /// Rises whenever `offered` changes.
    offered_version: u64,
}

impl WorkerIndex {
    /// Replaces the keys `before` of a worker by `keys`; `None` stands for a worker that is not in the pool.
    pub(super) fn replace(
        &mut self,
        id: WorkerId,
        before: Option<&WorkerKeys>,
        keys: Option<&WorkerKeys>,
    ) {
        let offer_and_stream = |it: &WorkerKeys| {
            let GroupKey {
                offered,
                is_connected,
                is_draining,
                ..
            } = &it.group;
            (offered.clone(), *is_connected, *is_draining)
        };
        if before.map(offer_and_stream) != keys.map(offer_and_stream) {
            self.changed.insert(id);
        }
        let offered = [before, keys].map(|it| it.map(|it| &it.group.offered));
        if offered[0] != offered[1] {
            self.offered_version += 1;
        }
        let groups = [before, keys].map(|it| it.map(|it| (&it.group, &it.rooms)));
        if groups[0] != groups[1] {
            self.version += 1;
        }
        self.count_rooms(id, before, false);
        self.count_rooms(id, keys, true);
        for (set, is_member) in [
            (&mut self.with_unused, keys.is_some_and(|it| it.has_unused)),
            (&mut self.with_shared, keys.is_some_and(|it| it.has_shared)),
        ] {
            match is_member {
                true => set.insert(id),
                false => set.remove(&id),
            };
        }
        if let Some(WorkerKeys {
            group: key,
            kept,
            store,
            ..
        }) = before
        {
            if let Some(store) = store {
                by_key::remove(&mut self.by_store, store, &id);
            }
            self.offered.subtract_all(&key.offered);
            self.free.subtract_all(&key.free);
            self.draining.remove(&id);
            self.disconnected.remove(&id);
            if let Some(group) = self.groups.get_mut(key) {
                group.by_id.remove(&id);
                group.by_kept.remove(&(*kept, id));
                if group.by_id.is_empty() {
                    self.groups.remove(key);
                }
            }
        }
        if let Some(WorkerKeys {
            group: key,
            kept,
            store,
            ..
        }) = keys
        {
            if let Some(store) = store {
                by_key::insert(&mut self.by_store, *store, id);
            }
            self.offered.add_all(&key.offered);
            self.free.add_all(&key.free);
            if key.is_draining {
                self.draining.insert(id);
            }
            if !key.is_connected {
                self.disconnected.insert(id);
            }
            let group = self.groups.entry(key.clone()).or_default();
            group.by_id.insert(id);
            group.by_kept.insert((*kept, id));
        }
    }

    /// Adds the rooms of a worker, or removes them.
    fn count_rooms(&mut self, worker: WorkerId, keys: Option<&WorkerKeys>, is_added: bool) {
        for (class, room, index) in keys.into_iter().flat_map(|keys| &keys.rooms) {
            let index = *index;
            let room = (*room, DeviceRef { worker, index });
            match is_added {
                true => by_key::insert(&mut self.rooms, class.clone(), room),
                false => by_key::remove(&mut self.rooms, class, &room),
            }
        }
    }

    /// Returns the devices with room for the share that `share_of` returns of devices like them; of each class
    /// those first that have the least room.
    pub(crate) fn with_room(
        &self,
        share_of: impl Fn(&DeviceSpec) -> Option<Share>,
    ) -> impl Iterator<Item = DeviceRef> {
        let classes = self.rooms.iter();
        let classes = classes.filter_map(move |(class, rooms)| Some((share_of(class)?, rooms)));
        classes.flat_map(|(share, rooms)| {
            let least = (Room::least_for(share), DeviceRef::FIRST);
            let enough = rooms.range(least..);
            let enough = enough.filter(move |(room, _)| room.has_room(share));
            enough.map(|(_, device_ref)| *device_ref)
        })
    }

    /// Returns the groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (&GroupKey, &Group)> {
        self.groups.iter()
    }

    /// Returns the devices that leases may get now or later.
    pub(crate) fn offered(&self) -> &ClassCounts {
        &self.offered
    }

    /// Returns the devices that any lease may get now.
    pub(crate) fn free(&self) -> &ClassCounts {
        &self.free
    }

    /// Returns the workers that have a snapshot store open.
    pub(crate) fn with_store(&self, store: StoreId) -> impl Iterator<Item = WorkerId> {
        self.by_store.get(&store).into_iter().flatten().copied()
    }

    /// Returns the workers with devices that no lease has: free ones, and some that ended leases have not left.
    pub(super) fn with_unused(&self) -> &BTreeSet<WorkerId> {
        &self.with_unused
    }

    /// Returns the workers with devices that leases share, or of which shares are held back.
    pub(super) fn with_shared(&self) -> &BTreeSet<WorkerId> {
        &self.with_shared
    }

    /// Returns the workers that get no new leases.
    pub(crate) fn draining(&self) -> &BTreeSet<WorkerId> {
        &self.draining
    }

    /// Returns the workers without a stream.
    pub(crate) fn disconnected(&self) -> &BTreeSet<WorkerId> {
        &self.disconnected
    }

    /// Returns a number that rises whenever a worker has changed, other than in what it keeps.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns a number that rises whenever workers offer other devices.
    pub(crate) fn offered_version(&self) -> u64 {
        self.offered_version
    }

    /// Returns the workers that were new, gone, or had another stream or offer, since they were taken last.
    pub(crate) fn changed(&self) -> &BTreeSet<WorkerId> {
        &self.changed
    }

    /// Returns the workers that were new, gone, or had another stream or offer, since the last call.
    pub(super) fn take_changed(&mut self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut self.changed)
    }
}

#[cfg(test)]
impl WorkerIndex {
    /// Returns the index without what depends on its past.
    pub(super) fn without_changes(&self) -> Self {
        Self {
            changed: BTreeSet::new(),
            version: 0,
            offered_version: 0,
            ..self.clone()
        }
    }
}
