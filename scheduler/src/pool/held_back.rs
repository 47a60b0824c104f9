//! The free devices that are held back for leases and requests which need more than these.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use tensord_proto::ids::LeaseId;

use super::Pool;
use crate::event::DeviceRef;

impl Pool {
    /// Removes and returns the devices that are held back. [`hold_back`](Self::hold_back) and then
    /// [`compare_held_back`](Self::compare_held_back) must follow.
    pub(crate) fn take_held_back(&mut self) -> BTreeMap<DeviceRef, LeaseId> {
        mem::take(&mut self.held_back)
    }

    /// Holds back free devices for a lease that needs more than these.
    pub(crate) fn hold_back(&mut self, lease: LeaseId, free: Vec<DeviceRef>) {
        let held_back = free.into_iter().map(|device_ref| (device_ref, lease));
        self.held_back.extend(held_back);
    }

    /// Holds no devices back for these leases any more. Returns whether some were.
    pub(crate) fn drop_held_back(&mut self, leases: &BTreeSet<LeaseId>) -> bool {
        let before = self.held_back.len();
        self.held_back.retain(|_, holder| !leases.contains(holder));
        self.held_back.len() < before
    }

    /// Returns the devices that are held back for a lease.
    pub(crate) fn held_back_for(&self, lease: LeaseId) -> Vec<DeviceRef> {
        let held_back = self.held_back.iter();
        let held_back = held_back.filter(|(_, holder)| **holder == lease);
        held_back.map(|(device_ref, _)| *device_ref).collect()
    }

    /// Records whether other devices are held back than `before`: demands may then fit that did not.
    pub(crate) fn compare_held_back(&mut self, before: &BTreeMap<DeviceRef, LeaseId>) {
        self.changed |= self.held_back != *before;
    }
}
