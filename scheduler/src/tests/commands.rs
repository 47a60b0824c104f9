//! The commands that the tables expect.

use super::*;

pub(super) fn queued(client: u64, request: u64, position: u32) -> Command {
    queued_for(client, request, position, WaitReason::TooFewFree)
}

pub(super) fn queued_for(client: u64, request: u64, position: u32, reason: WaitReason) -> Command {
    Command::Queued {
        client: ClientId(client),
        request: RequestId(request),
        position,
        reason,
    }
}

/// A grant; `devices` are worker, index and description.
pub(super) fn granted(client: u64, request: u64, devices: &[(u64, u32, DeviceSpec)]) -> Command {
    let devices = devices.iter().map(|(worker, index, device)| LeasedDevice {
        device_ref: device_ref(*worker, *index),
        grant: GrantNumber::ZERO,
        device: device.clone(),
        worker: endpoint(*worker),
        share: None,
    });
    Command::Granted {
        client: ClientId(client),
        request: RequestId(request),
        lease: LeaseId(request * 10),
        devices: devices.collect(),
    }
}

pub(super) fn refused(client: u64, request: u64, reason: RefuseReason) -> Command {
    Command::Refused {
        client: ClientId(client),
        request: RequestId(request),
        reason,
    }
}

/// A refusal because the pool has too few devices of any kind. `workers` lists the devices
/// that each worker offers; none for a worker that is leaving.
pub(super) fn unsatisfiable(
    client: u64,
    request: u64,
    devices: u32,
    workers: &[&[DeviceSpec]],
) -> Command {
    let demand = demand_of(devices, None);
    let devices = workers.iter().copied().flatten();
    let pool = crate::Inventory::new(workers.len(), devices.map(|device| (device, 1)));
    refused(
        client,
        request,
        RefuseReason::Unsatisfiable { demand, pool },
    )
}

pub(super) fn ended(client: u64, lease: u64, reason: EndReason) -> Command {
    Command::LeaseEnded {
        client: ClientId(client),
        lease: LeaseId(lease),
        reason,
    }
}

pub(super) fn end_lease(worker: u64, lease: u64) -> Command {
    Command::EndLease {
        worker: WorkerId(worker),
        lease: LeaseId(lease),
        grants: Vec::new(),
        hold_snapshots: false,
    }
}

pub(super) fn lost(worker: u64) -> EndReason {
    EndReason::WorkerLost {
        worker: WorkerId(worker),
        name: format!("w{worker}"),
    }
}

pub(super) fn left(worker: u64) -> EndReason {
    EndReason::WorkerLeft {
        worker: WorkerId(worker),
        name: format!("w{worker}"),
    }
}
