//! Leases from before a restart of the scheduler take the devices that they have.

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::event::GrantedDevice;
use crate::lease::Standing;
use crate::reason::EndReason;

impl Engine {
    /// Takes every device of an adopted lease whose worker has joined. Ends the lease if
    /// one of these devices is unavailable, and gives it a deadline if a worker has yet to
    /// join.
    pub(super) fn reserve(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let mut complete = true;
        for (device_ref, granted) in lease.lease_devices.clone() {
            let unavailable = EndReason::DeviceUnavailable {
                worker: device_ref.worker,
                index: device_ref.index,
            };
            if !self.pool.contains(device_ref.worker) {
                complete = false;
                continue;
            }
            for earlier in self.superseded_leases(id, granted) {
                self.end_lease(earlier, Some(unavailable.clone()));
            }
            let lease = self.leases.get(id);
            let device = self.pool.device(device_ref);
            let is_equal = lease.is_none_or(|lease| lease.may_resume_at(device));
            if !is_equal || self.pool.take(id, granted).is_err() {
                if granted.share.is_some() {
                    // The worker may run it, although there is not enough of the device.
                    self.pool.record_ending(id, granted);
                }
                return self.end_lease(id, Some(unavailable));
            }
        }
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        let rejoin_by = lease
            .rejoin_by
            .unwrap_or(self.now + self.options.lease_expiry);
        lease.rejoin_by = (!complete).then_some(rejoin_by);
        if !complete {
            return;
        }
        let was_lost = lease.lost().is_some();
        if was_lost {
            lease.standing = Standing::Running;
        }
        // The client waits for this, or has not received where the lease was last.
        let is_unreported = was_lost || lease.is_move_unreported;
        drop(lease);
        self.set_charge(id);
        if is_unreported {
            self.report_moved(id);
        }
    }

    /// Returns the other leases that have the device or the lane which a lease was granted, by earlier grants. Two
    /// leases can claim the same only if both date from before a restart; the one with the earlier grant has
    /// ended.
    fn superseded_leases(&self, lease: LeaseId, granted: GrantedDevice) -> Vec<LeaseId> {
        if !self.pool.may_be_valid(granted) {
            return Vec::new();
        }
        let device_ref = granted.device_ref;
        let conflicting = self.pool.conflicting(lease, granted);
        let is_earlier = |other: &LeaseId| {
            let other = self.leases.get(*other);
            let held_by = other.and_then(|other| other.lease_devices.get(&device_ref));
            held_by.is_some_and(|held_by| held_by.grant < granted.grant)
        };
        conflicting.filter(is_earlier).collect()
    }
}
