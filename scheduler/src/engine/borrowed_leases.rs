//! The borrowed leases that could give their devices to others, by what something which waits looks for.
//!
//! There may be thousands of them, and many requests that wait. So they are kept in order from one event to the next:
//! those with whole devices by the class of these and by when they may be suspended, so that the first few that are
//! enough are found without a look at the others. While it is found out who can count on what, leases are
//! [taken](BorrowedLeases::take) out, and put back when the engine takes these leases the next time (`borrowed.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use itertools::Itertools as _;
use tensord_proto::ids::LeaseId;

use crate::by_key;
use crate::device::Share;
use crate::event::DeviceRef;
use crate::pool::{DeviceClass, Pool};
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// A borrowed lease that could be suspended for others, or end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Borrowed {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantName,
    pub(super) devices: BTreeSet<DeviceRef>,
    /// What it counts as in what its tenant has.
    pub(super) charge: Amounts,
    /// The part that it has of its device; `None` if it has whole devices.
    pub(super) device_share: Option<Share>,
    /// The requests whose reservations it has passed.
    pub(super) passed: BTreeSet<LeaseId>,
    pub(super) is_spot: bool,
    /// Whether it ends, as it cannot be suspended.
    pub(super) ends: bool,
    /// The time from which it may be suspended.
    pub(super) suspendable_at: Timestamp,
    pub(super) granted_at: Timestamp,
}

impl Borrowed {
    /// Returns the device that it has a share of.
    pub(super) fn shared(&self) -> Option<DeviceRef> {
        let device = self.devices.first().copied();
        device.filter(|_| self.device_share.is_some())
    }

    /// Returns whether it ends if others make no room, and is no spot lease.
    pub(super) fn is_last_resort(&self) -> bool {
        self.ends && !self.is_spot
    }
}

/// A lease, or a device that leases share, in the order in which they could make room: by time, by the number of
/// leases, and by the first of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    at: Timestamp,
    leases: usize,
    pub(super) first: LeaseId,
    /// The device, if leases share it.
    pub(super) shared: Option<DeviceRef>,
}

/// What has devices of a class.
#[derive(Debug, Default, PartialEq, Eq)]
struct InOrder {
    positions: BTreeSet<Position>,
    /// The number of devices of the class that they have.
    devices: usize,
}

/// What has devices of one class.
#[derive(Debug, Default, PartialEq, Eq)]
struct OfClass {
    /// Those that would be suspended.
    suspended: InOrder,
    /// Those of which some would end that are no spot leases.
    ending: InOrder,
}

impl OfClass {
    fn in_order(&mut self, is_ending: bool) -> &mut InOrder {
        match is_ending {
            true => &mut self.ending,
            false => &mut self.suspended,
        }
    }
}

/// A position, with the number of devices of each class that its leases have, and whether some of these would end.
type Filed = (Position, BTreeMap<DeviceClass, usize>, bool);

/// The borrowed leases that could give their devices to others.
#[derive(Debug, Default)]
pub(super) struct BorrowedLeases {
    leases: BTreeMap<LeaseId, Arc<Borrowed>>,
    /// The spot leases among them.
    spot: BTreeSet<LeaseId>,
    /// Those that have a share of each device.
    sharing: BTreeMap<DeviceRef, BTreeSet<LeaseId>>,
    by_class: BTreeMap<DeviceClass, OfClass>,
    /// Where each lease with whole devices is in `by_class`.
    filed: BTreeMap<LeaseId, Filed>,
    /// Where each device that leases share is in `by_class`.
    filed_shared: BTreeMap<DeviceRef, Filed>,
    /// The leases that were taken out and may have to be put back.
    taken: BTreeSet<LeaseId>,
}

impl BorrowedLeases {
    /// Returns these leases.
    pub(super) fn of(pool: &Pool, leases: impl IntoIterator<Item = Arc<Borrowed>>) -> Self {
        let mut all = Self::default();
        for lease in leases {
            all.insert(pool, lease);
        }
        all
    }

    pub(super) fn get(&self, id: LeaseId) -> Option<&Arc<Borrowed>> {
        self.leases.get(&id)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.keys().copied()
    }

    /// Returns the spot leases.
    pub(super) fn spot(&self) -> impl Iterator<Item = &Arc<Borrowed>> {
        self.spot.iter().filter_map(|id| self.leases.get(id))
    }

    /// Returns the devices that leases share.
    pub(super) fn shared_devices(&self) -> impl Iterator<Item = DeviceRef> {
        self.sharing.keys().copied()
    }

    /// Returns the leases that have a share of a device.
    pub(super) fn sharing(&self, device_ref: DeviceRef) -> impl Iterator<Item = &Arc<Borrowed>> {
        let sharing = self.sharing.get(&device_ref).into_iter().flatten();
        sharing.filter_map(|id| self.leases.get(id))
    }

    /// Returns the leases with whole devices of these classes, and the devices of these classes that leases share, in
    /// order; those that would end only if `with_ending`. Of a device that leases share, some may not be borrowed,
    /// which the caller must check.
    pub(super) fn in_order<'a>(
        &'a self,
        classes: &'a BTreeSet<DeviceClass>,
        with_ending: bool,
    ) -> impl Iterator<Item = Position> {
        let positions = self.of_classes(classes, with_ending);
        // A lease may have devices of several classes.
        positions
            .map(|it| it.positions.iter())
            .kmerge()
            .dedup()
            .copied()
    }

    /// Returns the number of devices of these classes that leases have, or share.
    pub(super) fn devices(&self, classes: &BTreeSet<DeviceClass>, with_ending: bool) -> usize {
        let positions = self.of_classes(classes, with_ending);
        positions.map(|it| it.devices).sum()
    }

    fn of_classes<'a>(
        &'a self,
        classes: &'a BTreeSet<DeviceClass>,
        with_ending: bool,
    ) -> impl Iterator<Item = &'a InOrder> {
        let classes = classes.iter().filter_map(|it| self.by_class.get(it));
        classes.flat_map(move |it| {
            let ending = with_ending.then_some(&it.ending);
            [Some(&it.suspended), ending].into_iter().flatten()
        })
    }

    /// Adds a lease, in place of what was known of it.
    pub(super) fn insert(&mut self, pool: &Pool, lease: Arc<Borrowed>) {
        self.remove(pool, lease.lease);
        let id = lease.lease;
        if lease.is_spot {
            self.spot.insert(id);
        }
        self.leases.insert(id, lease.clone());
        match lease.shared() {
            Some(device_ref) => {
                by_key::insert(&mut self.sharing, device_ref, id);
                self.file_shared(pool, device_ref);
            }
            None => {
                let position = Position {
                    at: lease.suspendable_at,
                    leases: 1,
                    first: id,
                    shared: None,
                };
                let filed = (
                    position,
                    classes(pool, &lease.devices),
                    lease.is_last_resort(),
                );
                self.count(&filed, true);
                self.filed.insert(id, filed);
            }
        }
    }

    /// Removes a lease, if it is one of them.
    pub(super) fn remove(&mut self, pool: &Pool, id: LeaseId) -> Option<Arc<Borrowed>> {
        let lease = self.leases.remove(&id)?;
        self.spot.remove(&id);
        if let Some(filed) = self.filed.remove(&id) {
            self.count(&filed, false);
        }
        if let Some(device_ref) = lease.shared() {
            by_key::remove(&mut self.sharing, &device_ref, &id);
            self.file_shared(pool, device_ref);
        }
        Some(lease)
    }

    /// Removes a lease until the engine takes these leases the next time, if it is one of them.
    pub(super) fn take(&mut self, pool: &Pool, id: LeaseId) -> Option<Arc<Borrowed>> {
        let taken = self.remove(pool, id)?;
        self.taken.insert(id);
        Some(taken)
    }

    /// Returns the leases that were taken since the last call.
    pub(super) fn forget_taken(&mut self) -> BTreeSet<LeaseId> {
        mem::take(&mut self.taken)
    }

    /// Files a device that leases share by what these are now.
    fn file_shared(&mut self, pool: &Pool, device_ref: DeviceRef) {
        if let Some(filed) = self.filed_shared.remove(&device_ref) {
            self.count(&filed, false);
        }
        let sharing: Vec<_> = self.sharing(device_ref).collect();
        let Some(at) = sharing.iter().map(|it| it.suspendable_at).max() else {
            return;
        };
        let position = Position {
            at,
            leases: sharing.len(),
            first: sharing[0].lease,
            shared: Some(device_ref),
        };
        let is_ending = sharing.iter().any(|it| it.is_last_resort());
        let filed = (position, classes(pool, &[device_ref].into()), is_ending);
        self.count(&filed, true);
        self.filed_shared.insert(device_ref, filed);
    }

    /// Adds a position to its classes, or removes it from them.
    fn count(&mut self, (position, classes, is_ending): &Filed, is_added: bool) {
        for (class, count) in classes {
            let of_class = self.by_class.entry(class.clone()).or_default();
            let in_order = of_class.in_order(*is_ending);
            match is_added {
                true => {
                    in_order.positions.insert(*position);
                    in_order.devices += count;
                }
                false => {
                    in_order.positions.remove(position);
                    in_order.devices -= count;
                }
            }
            if *of_class == OfClass::default() {
                self.by_class.remove(class);
            }
        }
    }
}

/// Returns the number of devices of each class.
fn classes(pool: &Pool, devices: &BTreeSet<DeviceRef>) -> BTreeMap<DeviceClass, usize> {
    let mut classes = BTreeMap::new();
    for class in devices.iter().filter_map(|it| pool.class(*it)) {
        by_key::increment(&mut classes, class.clone());
    }
    classes
}

#[cfg(test)]
impl BorrowedLeases {
    /// Returns the leases that were taken.
    pub(super) fn taken(&self) -> &BTreeSet<LeaseId> {
        &self.taken
    }

    /// Asserts that the orders are those of the leases, and that these exist, but for the `stale` ones.
    pub(super) fn check(&self, pool: &Pool, stale: &BTreeSet<LeaseId>) {
        if self.leases.keys().any(|id| stale.contains(id)) {
            return;
        }
        let again = Self::of(pool, self.leases.values().cloned());
        assert_eq!(self.spot, again.spot);
        assert_eq!(self.sharing, again.sharing);
        assert_eq!(self.by_class, again.by_class);
        assert_eq!(self.filed, again.filed);
        assert_eq!(self.filed_shared, again.filed_shared);
    }
}
