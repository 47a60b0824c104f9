//! Leases from before a restart of the scheduler take the devices that they have.

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::event::GrantedDevice;
use crate::lease::{Lease, Origin, Standing};
use crate::leases::Reporter;
use crate::reason::EndReason;

impl Engine {
    /// Returns whether a lease with these devices, which the engine does not know, may be adopted because of
    /// `reporter`. It may not if it has ended, or if a request waits that would become a lease of this id.
    pub(super) fn may_adopt(
        &self,
        id: LeaseId,
        lease_devices: &[GrantedDevice],
        reporter: &Reporter,
    ) -> bool {
        let may_adopt = self.leases.adoption_window().may_adopt(reporter, self.now);
        may_adopt && self.queue.get(id).is_none() && !self.has_ended(id, lease_devices)
    }

    /// Returns whether a lease that is reported with these devices has ended, if the engine does not know it, or
    /// nobody has claimed it. A lease that nobody has claimed yet has got no grant from this engine.
    pub(super) fn has_ended(&self, id: LeaseId, lease_devices: &[GrantedDevice]) -> bool {
        let mut grants = lease_devices.iter();
        let is_recognised = grants.any(|granted| self.is_own_number(granted.grant));
        self.leases.adoption_window().has_ended(id, is_recognised)
    }

    /// Adopts an unknown lease because of `reporter`. Ends it at once if one of its devices is unavailable; such a
    /// lease does not count as adopted, so that its end need not be recorded.
    pub(super) fn adopt(&mut self, id: LeaseId, lease: Lease, reporter: Reporter) {
        self.leases.insert(id, lease);
        self.reserve(id);
        self.leases.record_adoption(id, reporter);
    }

    /// Returns what the origin of a lease is that was given these devices: [`Origin::Granted`] if the engine will
    /// recognise each of the grants. It will not if the device's worker had reported a number above those of the
    /// engine, so that the grant has one above that.
    pub(super) fn origin_by(&self, lease_devices: &[GrantedDevice]) -> Origin {
        let mut grants = lease_devices.iter();
        match grants.all(|granted| self.is_own_number(granted.grant)) {
            true => Origin::Granted,
            false => Origin::Adopted,
        }
    }

    /// Returns whether this engine, and none before it, has made a grant of this number.
    fn is_own_number(&self, grant: GrantNumber) -> bool {
        grant.term == self.granted.term && grant.count > 0 && grant <= self.granted
    }

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
                    self.pool.record_ending(device_ref.worker, [(id, granted)]);
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
