//! The numbers of the grants of devices.

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::WorkerId;

use super::Pool;
use super::worker::Grants;
use crate::event::{DeviceGrant, DeviceRef};

impl Pool {
    /// Returns whether a grant of a device may still be valid: it is later than every grant
    /// known to have ended.
    pub(crate) fn may_be_valid(&self, device_ref: DeviceRef, grant: GrantNumber) -> bool {
        let grants = self.grants(device_ref);
        grants.is_some_and(|grants| grant > grants.ended)
    }

    /// Returns whether a device can have been granted with this number: it is not above every known grant.
    pub(crate) fn may_be_granted(&self, device_ref: DeviceRef, grant: GrantNumber) -> bool {
        let grants = self.grants(device_ref);
        grants.is_some_and(|grants| grant <= grants.latest)
    }

    /// Returns a number above every known grant of the device.
    pub(crate) fn next_grant(&self, device_ref: DeviceRef) -> GrantNumber {
        let latest = self
            .grants(device_ref)
            .map_or(GrantNumber::ZERO, |g| g.latest);
        latest.next().unwrap_or(latest)
    }

    /// Records that this grant of a device exists or existed.
    pub(crate) fn record_grant(&mut self, device_ref: DeviceRef, grant: GrantNumber) {
        let worker = self.worker_mut(device_ref.worker);
        if let Some(mut worker) = worker
            && let Some(grants) = worker.grants.get_mut(device_ref.index as usize)
        {
            grants.latest = grants.latest.max(grant);
        }
    }

    /// Records that these grants of devices of `worker`, and all earlier ones, have ended.
    pub(crate) fn record_ended(&mut self, worker: WorkerId, ended: &[DeviceGrant]) {
        let Some(mut worker) = self.worker_mut(worker) else {
            return;
        };
        for &DeviceGrant { index, grant } in ended {
            if let Some(grants) = worker.grants.get_mut(index as usize) {
                grants.latest = grants.latest.max(grant);
                grants.ended = grants.ended.max(grant);
            }
        }
    }

    fn grants(&self, device_ref: DeviceRef) -> Option<&Grants> {
        self.get(device_ref.worker)?
            .grants
            .get(device_ref.index as usize)
    }
}
