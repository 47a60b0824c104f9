//! Builds the scheduler's commands for workers.

use tensord_proto::{
    ids::{LeaseId, PartId},
    v1::{self, WorkerCommand, worker_command},
};
use tensord_scheduler::{DeviceGrant, Endpoint, LeasedDevice, Peer};

use super::{access::UnixMillis, share_messages::ended_grant_message};

/// Builds the command for a worker to end a lease's sessions, and to hold their snapshots if the lease
/// is suspended.
pub(super) fn end_lease(
    lease: LeaseId,
    grants: &[DeviceGrant],
    hold_snapshots: bool,
) -> WorkerCommand {
    worker_command(worker_command::Body::EndLease(v1::EndLease {
        lease_id: lease.0,
        grants: grants.iter().map(ended_grant_message).collect(),
        hold_snapshots,
    }))
}

/// Which part of a lease a worker has, and how it starts.
pub(super) struct LeasePart {
    /// The position of the worker among those of the lease.
    pub(super) index: u32,
    /// Whether there are others.
    pub(super) has_other_workers: bool,
    /// How often the lease has moved.
    pub(super) epoch: u64,
    /// Whether the worker loads the snapshots of the sessions from its store.
    pub(super) load_stored: bool,
}

/// Builds the command that announces a new lease to a worker. `devices` are those of the
/// lease's devices that the worker has.
pub(super) fn lease_granted(
    lease: LeaseId,
    devices: &[LeasedDevice],
    tenant: &str,
    part: LeasePart,
) -> WorkerCommand {
    let grant = |device: &LeasedDevice| v1::DeviceGrant {
        device_index: device.device_ref.index,
        grant: Some(device.grant.into()),
        share: device.share.map(Into::into),
    };
    worker_command(worker_command::Body::Granted(v1::LeaseGranted {
        lease_id: lease.0,
        grants: devices.iter().map(grant).collect(),
        tenant: tenant.into(),
        epoch: part.epoch,
        has_other_workers: part.has_other_workers,
        part: part.index,
        load_stored: part.load_stored,
    }))
}

/// Builds the command to send the snapshots of a part of a lease to `keeper`.
pub(super) fn send_snapshots(part: PartId, keeper: Peer, assignment: u64) -> WorkerCommand {
    let Endpoint {
        name,
        address,
        certificate_sha256,
    } = keeper.endpoint;
    worker_command(worker_command::Body::SendSnapshots(v1::SendSnapshots {
        lease_id: part.lease.0,
        keeper: name,
        address,
        certificate_sha256: certificate_sha256.to_vec().into(),
        keeper_id: keeper.worker.0,
        part: part.index,
        assignment,
    }))
}

/// Builds the command to keep the snapshots of a part of a lease of `tenant` that `source` sends: as a `handover` if the
/// lease does not run.
pub(super) fn keep_snapshots(
    part: PartId,
    source: Peer,
    assignment: u64,
    tenant: String,
    handover: bool,
) -> WorkerCommand {
    let source = source.endpoint;
    worker_command(worker_command::Body::KeepSnapshots(v1::KeepSnapshots {
        lease_id: part.lease.0,
        source: source.name,
        source_certificate_sha256: source.certificate_sha256.to_vec().into(),
        part: part.index,
        assignment,
        tenant,
        handover,
    }))
}

/// Builds the command to hold the snapshots of a suspended lease: those of one part, or all.
pub(super) fn hold_snapshots(lease: LeaseId, part: Option<u32>) -> WorkerCommand {
    worker_command(worker_command::Body::HoldSnapshots(v1::HoldSnapshots {
        lease_id: lease.0,
        part,
    }))
}

/// Builds the command to drop the snapshots that a worker keeps of a lease: those of one part, or all.
pub(super) fn drop_snapshots(lease: LeaseId, part: Option<u32>) -> WorkerCommand {
    worker_command(worker_command::Body::DropSnapshots(v1::DropSnapshots {
        lease_id: lease.0,
        part,
    }))
}

/// Builds the command to delete what the worker's snapshot store has of these leases.
pub(super) fn drop_stored(leases: &[LeaseId]) -> WorkerCommand {
    let lease_ids = leases.iter().map(|lease| lease.0).collect();
    worker_command(worker_command::Body::DropStored(v1::DropStored {
        lease_ids,
    }))
}

/// Builds the command that carries the scheduler's time, the grants whose usage is on disk, and how much of a worker's
/// memory for snapshots those of one tenant may use.
pub(super) fn time(
    now: UnixMillis,
    usage_recorded: Vec<v1::DeviceGrant>,
    tenant_snapshots_permille: u32,
) -> WorkerCommand {
    worker_command(worker_command::Body::Time(v1::Time {
        time_ms: now.0,
        usage_recorded,
        tenant_snapshots_permille,
    }))
}

fn worker_command(body: worker_command::Body) -> WorkerCommand {
    WorkerCommand { body: Some(body) }
}
