//! What leases use, from grants and the reports of workers to the account of it.

use tensord_proto::{
    MAX_LEASES_WITH_SNAPSHOTS,
    grant::number,
    ids::{ClientId, LeaseId, WorkerId},
    v1::{DeviceGrant, Heartbeat, SnapshotMemory},
};
use tensord_scheduler::{DeviceRef, LeasedDevice};

use super::Driver;
use crate::scheduler::{
    access::UnixMillis,
    usage::{Owner, WorkerReport},
};

impl Driver {
    /// Records that a lease of a client has got devices.
    pub(super) fn count_granted(&self, client: ClientId, lease: LeaseId, devices: &[LeasedDevice]) {
        if let (Some(usage), Some(owner)) = (&self.usage, self.lease_owner(client)) {
            usage.granted(UnixMillis::now(), lease, &owner, devices);
        }
    }

    /// Counts what a worker reports in a heartbeat. Returns the grants that the worker may forget.
    pub(super) fn count_reported(
        &self,
        worker: WorkerId,
        kinds: &[String],
        heartbeat: &Heartbeat,
    ) -> Vec<DeviceGrant> {
        let Some(usage) = &self.usage else {
            // Nobody keeps it, so the worker need not either.
            let released = heartbeat.leases.iter().filter(|it| it.released);
            return released.filter_map(|it| it.grant).collect();
        };
        let report = WorkerReport {
            worker,
            kinds,
            devices_busy_us: heartbeat.usage.iter().map(|it| it.busy_us).collect(),
            grants: &heartbeat.leases,
        };
        let may_be_granted = |grant: &DeviceGrant| {
            let device_ref = DeviceRef {
                worker,
                index: grant.device_index,
            };
            self.engine.may_be_granted(device_ref, number(grant.grant))
        };
        usage.reported(
            UnixMillis::now(),
            &report,
            may_be_granted,
            |lease, grant| self.claimed_by(lease, worker, grant),
        )
    }

    /// Counts the memory that the snapshots of leases have taken at a worker since its heartbeat before, if there was one
    /// on this stream.
    pub(super) fn count_snapshots(
        &self,
        worker: WorkerId,
        since: Option<UnixMillis>,
        now: UnixMillis,
        snapshots: &[SnapshotMemory],
    ) {
        let (Some(usage), Some(since)) = (&self.usage, since) else {
            return;
        };
        let snapshots = snapshots.iter().take(MAX_LEASES_WITH_SNAPSHOTS);
        let owned = snapshots.filter_map(|it| {
            let lease = LeaseId(it.lease_id);
            let client = self.engine.owner_of_snapshots(lease, worker)?;
            Some((lease, (self.lease_owner(client)?, it.bytes)))
        });
        usage.snapshots_kept(since, now, owned.collect());
    }

    /// Returns who has a lease with this grant of a worker's device, if a client has claimed it.
    fn claimed_by(&self, lease: LeaseId, worker: WorkerId, grant: &DeviceGrant) -> Option<Owner> {
        let lease = self.engine.lease(lease)?;
        let has_it = |device: &LeasedDevice| {
            device.device_ref.worker == worker
                && device.device_ref.index == grant.device_index
                && device.grant == number(grant.grant)
        };
        let owner = self.lease_owner(lease.owner?);
        owner.filter(|_| {
            lease
                .devices
                .is_some_and(|devices| devices.iter().any(has_it))
        })
    }

    fn lease_owner(&self, client: ClientId) -> Option<Owner> {
        let auth = self.holders.auth(client)?;
        Some(Owner {
            tenant: auth.tenant.clone(),
            user: auth.user.clone(),
        })
    }
}
