//! The engine's commands as messages for workers, and workers' messages as events of the engine.
//!
//! As in the driver of the scheduler, as far as the simulation has what they are about: leases of whole
//! devices, and no snapshot store.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::{
    grant::number,
    ids::{LeaseId, PartId, WorkerId},
    v1::{self, WorkerCommand, worker_command::Body, worker_message},
};
use tensord_scheduler::{
    AssignedKeeper, DeviceGrant, HandedOver, HandoverOutcome, HeldDevice, LeasedDevice, Peer,
    WorkerEvent,
};

fn command(body: Body) -> WorkerCommand {
    WorkerCommand { body: Some(body) }
}

/// Returns the messages that announce a lease to its workers, with the workers.
pub(crate) fn lease_granted(
    lease: LeaseId,
    epoch: u64,
    devices: &[LeasedDevice],
) -> Vec<(WorkerId, WorkerCommand)> {
    let parts = devices.chunk_by(|a, b| a.device_ref.worker == b.device_ref.worker);
    let message = |(part, here): (u32, &[LeasedDevice])| {
        let grant = |device: &LeasedDevice| v1::DeviceGrant {
            device_index: device.device_ref.index,
            grant: Some(device.grant.into()),
            share: None,
        };
        let granted = v1::LeaseGranted {
            lease_id: lease.0,
            grants: here.iter().map(grant).collect(),
            tenant: "simulated".into(),
            epoch,
            has_other_workers: here.len() < devices.len(),
            part,
            load_stored: false,
        };
        (here[0].device_ref.worker, command(Body::Granted(granted)))
    };
    (0..).zip(parts).map(message).collect()
}

pub(crate) fn end_lease(
    lease: LeaseId,
    grants: &[DeviceGrant],
    hold_snapshots: bool,
) -> WorkerCommand {
    let grant = |grant: &DeviceGrant| v1::DeviceGrant {
        device_index: grant.index,
        grant: Some(grant.grant.into()),
        share: None,
    };
    command(Body::EndLease(v1::EndLease {
        lease_id: lease.0,
        grants: grants.iter().map(grant).collect(),
        hold_snapshots,
    }))
}

/// Returns the message for the keeper of a part, and that for the worker that sends the snapshots.
pub(crate) fn keep_snapshots(
    part: PartId,
    source: &Peer,
    keeper: &Peer,
    assignment: u64,
) -> [(WorkerId, WorkerCommand); 2] {
    let keep = v1::KeepSnapshots {
        lease_id: part.lease.0,
        source: source.endpoint.name.clone(),
        source_certificate_sha256: source.endpoint.certificate_sha256.to_vec().into(),
        part: part.index,
        assignment,
        tenant: "default".into(),
        handover: false,
    };
    let send = v1::SendSnapshots {
        lease_id: part.lease.0,
        keeper: keeper.endpoint.name.clone(),
        address: keeper.endpoint.address.clone(),
        certificate_sha256: keeper.endpoint.certificate_sha256.to_vec().into(),
        keeper_id: keeper.worker.0,
        part: part.index,
        assignment,
    };
    [
        (keeper.worker, command(Body::KeepSnapshots(keep))),
        (source.worker, command(Body::SendSnapshots(send))),
    ]
}

pub(crate) fn hold_snapshots(lease: LeaseId, part: Option<u32>) -> WorkerCommand {
    let lease_id = lease.0;
    command(Body::HoldSnapshots(v1::HoldSnapshots { lease_id, part }))
}

pub(crate) fn drop_snapshots(lease: LeaseId, part: Option<u32>) -> WorkerCommand {
    let lease_id = lease.0;
    command(Body::DropSnapshots(v1::DropSnapshots { lease_id, part }))
}

/// Returns the claims of a device in a token.
pub(crate) fn lease_share(device: &LeasedDevice) -> v1::LeaseShare {
    v1::LeaseShare {
        worker_id: device.device_ref.worker.0,
        device_index: device.device_ref.index,
        worker: device.worker.name.clone(),
        address: device.worker.address.clone(),
        certificate_sha256: device.worker.certificate_sha256.to_vec().into(),
        grant: Some(device.grant.into()),
        share: None,
    }
}

pub(crate) fn held_device(held: &v1::HeldDevice) -> HeldDevice {
    HeldDevice {
        lease: LeaseId(held.lease_id),
        index: held.device_index,
        grant: number(held.grant),
        ended: held.ended,
        share: None,
    }
}

pub(crate) fn ended_grant(ended: &v1::DeviceGrant) -> DeviceGrant {
    DeviceGrant {
        index: ended.device_index,
        lane: 0,
        grant: number(ended.grant),
    }
}

/// Returns what a message of a worker is for the engine.
pub(crate) fn worker_events(worker: WorkerId, body: worker_message::Body) -> Vec<WorkerEvent> {
    match body {
        worker_message::Body::Heartbeat(heartbeat) => {
            let kept = kept(worker, &heartbeat.kept);
            let interrupted = heartbeat.interrupted.into_iter();
            let leases: Vec<_> = interrupted
                .map(|it| (LeaseId(it.lease_id), it.reason))
                .collect();
            let interrupted = (!leases.is_empty()).then_some(WorkerEvent::Interrupted { leases });
            let events = [WorkerEvent::Heartbeat, kept];
            events.into_iter().chain(interrupted).collect()
        }
        worker_message::Body::Released(released) => vec![WorkerEvent::Released {
            lease: LeaseId(released.lease_id),
            busy: released.busy_devices.into_iter().collect(),
        }],
        _ => Vec::new(),
    }
}

fn kept(worker: WorkerId, leases: &[v1::KeptLease]) -> WorkerEvent {
    let (mut at_keepers, mut refused, mut handed_over) = (Vec::new(), Vec::new(), Vec::new());
    let mut here = BTreeMap::new();
    for kept in leases {
        let lease = LeaseId(kept.lease_id);
        let index = kept.part;
        let keeper = |assignment| AssignedKeeper {
            part: PartId { lease, index },
            worker: WorkerId(kept.keeper_id),
            assignment,
        };
        match kept.handover {
            0 if kept.keeper_id == worker.0 => drop(here.insert(lease, !kept.without_room)),
            0 if kept.failed => refused.push(keeper(kept.assignment)),
            0 => at_keepers.push(keeper(kept.assignment)),
            number => handed_over.push(HandedOver {
                to: keeper(number),
                outcome: match (kept.missing, kept.failed) {
                    (true, _) => HandoverOutcome::Missing,
                    (false, true) => HandoverOutcome::Failed,
                    (false, false) => HandoverOutcome::Done,
                },
            }),
        }
    }
    WorkerEvent::SnapshotsKept {
        at_keepers,
        refused,
        handed_over,
        here,
        in_store: BTreeSet::new(),
    }
}
