//! The test's own model of spot leases, which give their devices to all other requests.

use super::world::{SimLease, SimRequest, World, meets_demand};
use super::*;

impl World {
    /// The engine has ended a spot lease that could not be suspended: it has run for long enough, and a request
    /// waits that could get a device of it.
    pub(super) fn end_spot(&mut self, id: LeaseId) {
        let leases = self.leases.as_mut();
        let Some(lease) = leases.and_then(|leases| leases.remove(&id)) else {
            return;
        };
        assert!(lease.is_spot, "{id} is no spot lease");
        let least = match lease.durability.is_durable() {
            true => 70_000,
            false => 10_000,
        };
        assert!(
            self.now >= lease.running_since + least,
            "{id} has just begun"
        );
        let mut waiting = self.waiting.iter();
        assert!(waiting.any(|it| !it.demand.is_spot && self.has_device_for(&lease, it)));
    }

    fn has_device_for(&self, lease: &SimLease, waiting: &SimRequest) -> bool {
        let mut devices = lease.lease_devices.iter().map(|it| self.device(*it));
        devices.any(|device| {
            // The engine may have granted it others since, which its tenant had no room for before.
            meets_demand(device, &waiting.demand) && self.is_allowed(waiting, device, false)
        })
    }

    /// If no request is entitled to devices otherwise, none waits that is not for a spot lease and would have
    /// enough with those of spot leases that have run for long enough.
    pub(super) fn check_spot(&self) {
        if self.leases.is_none() {
            return;
        }
        let order = self.expected_order();
        let is_other = !self.engine.reserved_now().is_empty();
        let Some((first, is_guaranteed)) = order.first() else {
            return;
        };
        let first = &self.waiting[*first];
        if is_other || *is_guaranteed || first.demand.is_spot {
            return;
        }
        let fits = |device_ref: &DeviceRef| {
            let device = self.device(*device_ref);
            meets_demand(device, &first.demand) && self.is_allowed(first, device, true)
        };
        self.check_too_few(first, fits, |_, lease| {
            // What cannot be suspended by then is ended.
            let is_due = self.now >= lease.running_since + 70_000;
            let is_attached = self.clients[lease.client].attached;
            lease.is_spot && is_due && is_attached && lease.lost_until.is_none()
        });
    }
}
