//! The numbers of the grants of devices.

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::WorkerId;
use tensord_proto::share::lane;

use super::Pool;
use super::worker::Grants;
use crate::event::{DeviceGrant, DeviceRef, GrantedDevice};

impl Pool {
    /// Returns whether a grant of a device may still be valid: it is later than every grant
    /// known to have ended that excludes it.
    pub(crate) fn may_be_valid(&self, granted: GrantedDevice) -> bool {
        let grants = self.grants(granted.device_ref);
        grants.is_some_and(|grants| grants.may_be_valid(lane(granted.share), granted.grant))
    }

    /// Returns whether a device can have been granted with this number: it is not above every known grant.
    pub(crate) fn may_be_granted(&self, device_ref: DeviceRef, grant: GrantNumber) -> bool {
        let grants = self.grants(device_ref);
        grants.is_some_and(|grants| grant <= grants.latest())
    }

    /// Returns a number above every known grant of the device.
    pub(crate) fn next_grant(&self, device_ref: DeviceRef) -> GrantNumber {
        let latest = self
            .grants(device_ref)
            .map_or(GrantNumber::ZERO, Grants::latest);
        latest.next().unwrap_or(latest)
    }

    /// Records that these grants of devices of `worker` exist or existed.
    pub(crate) fn record_grants(
        &mut self,
        worker: WorkerId,
        granted: impl IntoIterator<Item = GrantedDevice>,
    ) {
        let Some(mut worker) = self.worker_mut(worker) else {
            return;
        };
        for granted in granted {
            if let Some(grants) = worker.grants.get_mut(granted.device_ref.index as usize) {
                grants.record(granted.grant);
            }
        }
    }

    /// Records that these grants of devices of `worker`, and all earlier ones of their lanes, have ended.
    pub(crate) fn record_ended(&mut self, worker: WorkerId, ended: &[DeviceGrant]) {
        if let Some(mut worker) = self.worker_mut(worker) {
            ended.iter().for_each(|grant| worker.record_ended(*grant));
        }
    }

    fn grants(&self, device_ref: DeviceRef) -> Option<&Grants> {
        self.get(device_ref.worker)?
            .grants
            .get(device_ref.index as usize)
    }
}
