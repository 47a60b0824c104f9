//! The test's own model of spot leases, which give their devices to all other requests.

use super::world::{SimLease, SimRequest, World, meets_demand};
use super::*;
use crate::lease::Standing;

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
            meets_demand(device, &waiting.demand) && self.is_allowed(waiting, device, true)
        })
    }

    /// If no request is entitled to devices otherwise, none waits that is not for a spot lease and would have
    /// enough with those of spot leases that have run for long enough.
    pub(super) fn check_spot(&self) {
        let Some(leases) = &self.leases else {
            return;
        };
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
        let coming = self.coming().into_iter().filter(|device_ref| {
            let holder = self.engine.held_back().get(device_ref);
            fits(device_ref) && holder.is_none_or(|holder| *holder == first.lease)
        });
        let coming = coming.count();
        let needed = self.engine.needed_by_leases();
        let is_needed = |it: &DeviceRef| needed.iter().any(|one| one.accepts(self.device(*it)));
        let spot = leases.iter().filter(|(id, lease)| {
            let known = self.engine.leases().get(**id);
            let is_running = known.is_some_and(|it| it.standing == Standing::Running);
            // What cannot be suspended by then is ended.
            let is_due = self.now >= lease.running_since + 70_000;
            let is_attached = self.clients[lease.client].attached;
            lease.is_spot && is_running && is_due && is_attached && lease.lost_until.is_none()
        });
        let devices = spot.flat_map(|(_, lease)| &lease.lease_devices);
        let devices = devices.filter(|it| self.is_usable(**it) && fits(it) && !is_needed(it));
        let (devices, wanted) = (devices.count(), first.demand.devices as usize);
        assert!(
            coming >= wanted || devices + coming < wanted,
            "{} waits, with {coming} devices to come and {devices} of spot leases",
            first.demand
        );
    }
}
