//! What the worker's registration needs of the part that runs the leases.

use std::pin::Pin;

use tensord_proto::{
    ids::{LeaseId, PartId, StoreId},
    v1::{
        DeviceGrant, DeviceUsage, Error, GrantUsage, HeldDevice, IdleLease, InterruptedLease,
        KeepSnapshots, KeptLease, LeaseGranted, MissingPeer, OutOfService, SendSnapshots,
        SnapshotMemory,
    },
};

/// Runs the leases of a worker: in this process ([`Registry`](crate::registry::Registry)), or
/// each in a process of its own (`Supervisor`, on Linux).
///
/// No method blocks, whatever a session does.
pub(crate) trait LeaseHost: Send + Sync + 'static {
    /// Sets the public key that verifies lease tokens.
    fn set_lease_key(&self, key: Vec<u8>);

    /// Returns whether several leases can share a device. A host that has no process for each lease
    /// could not bound what each uses.
    fn takes_shares(&self) -> bool {
        false
    }

    /// Records the scheduler's current time, in milliseconds since 1970.
    fn set_time(&self, time_ms: u64);

    /// Records that the scheduler is unreachable.
    fn mark_unreachable(&self);

    /// Records that devices were granted to a lease. The leases that had them before, or the same
    /// lanes of them, end.
    fn granted(&self, granted: &LeaseGranted);

    /// Has the snapshots of a lease sent to another worker. A host that takes no snapshots ignores
    /// the command.
    fn send_snapshots(&self, _command: &SendSnapshots) {}

    /// Allows another worker to send the snapshots of a lease. A host that keeps none ignores the
    /// command.
    fn keep_snapshots(&self, _command: &KeepSnapshots) {}

    /// Sets how much of the memory for the snapshots of other workers' leases one tenant may use, in thousandths; 0 means all
    /// of it. A host that keeps no snapshots ignores this.
    fn set_tenant_snapshots(&self, _permille: u32) {}

    /// Returns the memory that the snapshots of leases take here.
    fn snapshot_memory(&self) -> Vec<SnapshotMemory> {
        Vec::new()
    }

    /// Drops the snapshots that are kept of another worker's lease.
    fn drop_snapshots(&self, _lease: LeaseId) {}

    /// Drops the snapshots that are kept of a part of another worker's lease.
    fn drop_part(&self, _part: PartId) {}

    /// Holds the snapshots of a suspended lease, which may be running here still, until they are
    /// dropped or the lease is granted again.
    fn hold_snapshots(&self, _lease: LeaseId) {}

    /// Holds the snapshots of a part of a suspended lease that is not running here.
    fn hold_part(&self, _part: PartId) {}

    /// Returns the suspended leases whose snapshots are held here.
    fn suspended_leases(&self) -> Vec<LeaseId> {
        Vec::new()
    }

    /// Returns the leases that could go on at their keepers now, or here.
    fn kept_leases(&self) -> Vec<KeptLease> {
        Vec::new()
    }

    /// Returns whether this worker has snapshots of leases that are suspended, or whose worker may be lost.
    fn has_waiting_leases(&self) -> bool {
        false
    }

    /// Returns whether snapshots of suspended leases are being handed over to other workers, which the
    /// scheduler has requested.
    fn is_handing_over(&self) -> bool {
        false
    }

    /// Returns the leases that could go on now from this worker's snapshot store.
    fn leases_in_store(&self) -> Vec<LeaseId> {
        Vec::new()
    }

    /// Returns the id of this worker's snapshot store, if it has one.
    fn store_id(&self) -> Option<StoreId> {
        None
    }

    /// Removes and returns leases that the snapshot store was found to have snapshots of, and that do not
    /// run here.
    fn take_stored_leases(&self) -> Vec<LeaseId> {
        Vec::new()
    }

    /// Deletes what the snapshot store has of leases that are over.
    fn drop_stored(&self, _leases: Vec<LeaseId>) {}

    /// Returns the leases with devices of other workers whose process here has died, and that could
    /// go on from snapshots.
    fn interrupted_leases(&self) -> Vec<InterruptedLease> {
        Vec::new()
    }

    /// Returns the leases that have been idle for a while, and for how long. A host that takes no
    /// snapshots need not know, as its leases are not suspended.
    fn idle_leases(&self) -> Vec<IdleLease> {
        Vec::new()
    }

    /// Returns the workers that leases here have dialled in vain for a while. A host that takes no snapshots need not
    /// know, as its leases do not go on elsewhere.
    fn missing_peers(&self) -> Vec<MissingPeer> {
        Vec::new()
    }

    /// Ends a lease, and invalidates all tokens with these or earlier grants of the devices.
    /// [`unreleased_devices`](Self::unreleased_devices) returns the devices that are not
    /// released from the lease yet.
    fn end_lease(&self, lease: LeaseId, grants: &[DeviceGrant]);

    /// Ends every session, with `error` for its client.
    fn end_all(&self, error: &Error);

    /// Ends what runs without a lease, when the worker stops, and waits for a bounded time until what
    /// ran leases has ended, too.
    fn stop(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {})
    }

    /// Returns the number of sessions that have not ended.
    fn live_session_count(&self) -> usize;

    /// Queries the memory of all devices in the background, for later
    /// [`usage`](Self::usage).
    fn query_memory(&self);

    /// Returns the usage of each device, in order, and what leases have used of the devices, both up to
    /// the same moment.
    fn usage(&self) -> (Vec<DeviceUsage>, Vec<GrantUsage>);

    /// Forgets what was used by these grants, which are released.
    fn usage_recorded(&self, grants: &[DeviceGrant]);

    /// Returns the devices that are out of service, with the reasons.
    fn out_of_service(&self) -> Vec<OutOfService>;

    /// Returns which devices leases hold here, including devices that are not released from
    /// a lease that has ended.
    fn held_devices(&self) -> Vec<HeldDevice>;

    /// Returns, for each lane of a device, the number up to which all its grants have ended.
    fn ended_grants(&self) -> Vec<DeviceGrant>;

    /// Returns the devices that are not released from a lease that was ended.
    fn unreleased_devices(&self, lease: LeaseId) -> Vec<u32>;

    /// Waits until there is something to report to the scheduler. Returns the leases from
    /// which devices were released since the last call.
    fn wait_for_reports(&self) -> Pin<Box<dyn Future<Output = Vec<LeaseId>> + Send + '_>>;
}
