//! The devices that are held back for leases and requests: free devices for those that need more than these, and
//! devices of which others have shares for those that need a share, or for which these are to make room.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Pool;
use crate::by_key;
use crate::device::{DeviceSpec, Share};
use crate::event::DeviceRef;

/// Devices of which only one lease may get some, or the request that is to become it.
#[derive(Debug, Default)]
pub(super) struct HeldBack {
    by_device: BTreeMap<DeviceRef, LeaseId>,
    by_lease: BTreeMap<LeaseId, BTreeSet<DeviceRef>>,
}

impl HeldBack {
    /// Returns the lease for which a device is held back, if it is.
    pub(super) fn holder(&self, device_ref: DeviceRef) -> Option<LeaseId> {
        self.by_device.get(&device_ref).copied()
    }

    /// Holds a device back no more. Returns whether it was.
    pub(super) fn remove(&mut self, device_ref: DeviceRef) -> bool {
        let lease = self.by_device.remove(&device_ref);
        if let Some(lease) = &lease {
            by_key::remove(&mut self.by_lease, lease, &device_ref);
        }
        lease.is_some()
    }

    fn insert(&mut self, device_ref: DeviceRef, lease: LeaseId) {
        self.remove(device_ref);
        self.by_device.insert(device_ref, lease);
        by_key::insert(&mut self.by_lease, lease, device_ref);
    }
}

impl Pool {
    /// Removes and returns the devices that are held back. [`hold_back`](Self::hold_back) and then
    /// [`compare_held_back`](Self::compare_held_back) must follow.
    pub(crate) fn take_held_back(&mut self) -> BTreeMap<DeviceRef, LeaseId> {
        let taken = mem::take(&mut self.held_back).by_device;
        self.refresh(taken.keys().map(|device_ref| device_ref.worker).collect());
        taken
    }

    /// Holds back devices for a lease that needs more than these, or for which leases of them are to make room.
    pub(crate) fn hold_back(&mut self, lease: LeaseId, free: Vec<DeviceRef>) {
        for device_ref in &free {
            self.held_back.insert(*device_ref, lease);
        }
        self.refresh(free.iter().map(|device_ref| device_ref.worker).collect());
    }

    /// Holds no devices back for these leases any more. Returns whether some were.
    pub(crate) fn drop_held_back(&mut self, leases: &BTreeSet<LeaseId>) -> bool {
        let mut dropped = BTreeSet::new();
        for lease in leases {
            dropped.extend(self.held_back_for(*lease));
        }
        for device_ref in &dropped {
            self.held_back.remove(*device_ref);
        }
        self.refresh(dropped.iter().map(|device_ref| device_ref.worker).collect());
        !dropped.is_empty()
    }

    /// Holds no devices back any more for leases that need none. Demands may then fit that did not. Returns
    /// whether some were.
    pub(crate) fn give_up_held_back(&mut self, leases: &BTreeSet<LeaseId>) -> bool {
        let were_some = self.drop_held_back(leases);
        self.changed |= were_some;
        were_some
    }

    /// Returns whether a device is held back for a lease.
    pub(crate) fn is_held_back(&self, device_ref: DeviceRef) -> bool {
        self.held_back.holder(device_ref).is_some()
    }

    /// Returns the leases for which devices are held back.
    pub(crate) fn holders(&self) -> impl Iterator<Item = LeaseId> {
        self.held_back.by_lease.keys().copied()
    }

    /// Returns the devices that are held back for a lease.
    pub(crate) fn held_back_for(&self, lease: LeaseId) -> Vec<DeviceRef> {
        let held_back = self.held_back.by_lease.get(&lease);
        held_back.into_iter().flatten().copied().collect()
    }

    /// Returns the lease for which a device is held back, if it is.
    pub(crate) fn holder_of(&self, device_ref: DeviceRef) -> Option<LeaseId> {
        self.held_back.holder(device_ref)
    }

    /// Returns the devices that are held back for a lease and that it can have once ended leases have left them,
    /// if it needs the shares of them that `share_of` returns: not those whose leases have yet to make room.
    pub(crate) fn held_and_coming(
        &self,
        lease: LeaseId,
        share_of: impl Fn(&DeviceSpec) -> Option<Share>,
    ) -> Vec<DeviceRef> {
        let mut held = self.held_back_for(lease);
        held.retain(|device_ref| {
            let is_unused = self.holders_of(*device_ref).next().is_none();
            let share = self.device(*device_ref).and_then(&share_of);
            let room = self.coming_room(*device_ref).zip(share);
            is_unused || room.is_some_and(|(room, share)| room.has_room(share))
        });
        held
    }

    /// Records whether other devices are held back than `before`: demands may then fit that did not.
    pub(crate) fn compare_held_back(&mut self, before: &BTreeMap<DeviceRef, LeaseId>) {
        self.changed |= self.held_back.by_device != *before;
    }

    /// Updates the index for workers whose devices are held back, or are not any more.
    fn refresh(&mut self, workers: BTreeSet<WorkerId>) {
        for worker in workers {
            drop(self.worker_mut(worker));
        }
    }
}

#[cfg(test)]
impl Pool {
    pub(crate) fn held_back(&self) -> &BTreeMap<DeviceRef, LeaseId> {
        &self.held_back.by_device
    }
}
