//! The pool's status for display: the engine's state, and the device usage that workers
//! last reported.

use tensord_proto::{
    ids::{ClientId, LeaseId, WorkerId},
    v1::{DeviceStatus, DeviceUsage, StatusReply, WorkerStatus},
    version,
};
use tensord_scheduler::{DeviceSnapshot, Snapshot, Timestamp, WorkerSnapshot};

use super::convert;

/// What those see as the reason of an outage who may not see the leases of all tenants: the real one may name an op of
/// another tenant, or have text that another tenant's process wrote.
const HIDDEN_REASON: &str = "out of service";

/// Returns the reply to a status call at `now`. Only leases and requests of clients for
/// which `is_shown` returns true are counted. Of a device leased by another client, wholly or
/// in part, the reply shows only that it is leased; for a free device, it omits the number of
/// ops run before. Why devices are out of service is shown only if `shows_reasons`.
pub(super) fn status<'a>(
    snapshot: &Snapshot,
    now: Timestamp,
    usage: impl Fn(WorkerId) -> Option<&'a [DeviceUsage]>,
    shows_reasons: bool,
    is_shown: impl Fn(Option<ClientId>) -> bool,
) -> StatusReply {
    let waiting = snapshot.waiting.iter();
    let waiting = waiting.filter(|client| is_shown(Some(**client))).count();
    let owners = &snapshot.owners;
    let leases = owners.values().filter(|owner| is_shown(**owner)).count();
    let shows_all = is_shown(None);
    let is_shown = |lease: LeaseId| is_shown(owners.get(&lease).copied().flatten());
    let workers = snapshot.workers.iter().map(|worker| {
        let usage = usage(worker.worker).unwrap_or_default();
        let mut status = worker_status(worker, now, usage, shows_all, is_shown);
        if !shows_reasons {
            hide_reasons(&mut status);
        }
        status
    });
    StatusReply {
        software: version::hello().software,
        uptime_ms: now.as_millis(),
        workers: workers.collect(),
        waiting_requests: count(waiting),
        leases: count(leases),
    }
}

fn worker_status(
    worker: &WorkerSnapshot,
    now: Timestamp,
    usage: &[DeviceUsage],
    shows_all: bool,
    is_shown: impl Fn(LeaseId) -> bool,
) -> WorkerStatus {
    let devices = worker.devices.iter().enumerate();
    let devices = devices.map(|(index, device)| {
        let usage = usage.get(index).copied().unwrap_or_default();
        device_status(device, usage, shows_all, &is_shown)
    });
    WorkerStatus {
        devices: devices.collect(),
        name: worker.name.clone(),
        address: worker.address.clone(),
        draining: worker.draining,
        last_beat_ms: now.as_millis().saturating_sub(worker.last_beat.as_millis()),
    }
}

fn hide_reasons(status: &mut WorkerStatus) {
    for device in &mut status.devices {
        // An empty text means that the device is in service.
        if !device.out_of_service.is_empty() {
            device.out_of_service = HIDDEN_REASON.into();
        }
    }
}

fn device_status(
    device: &DeviceSnapshot,
    usage: DeviceUsage,
    shows_all: bool,
    is_shown: impl Fn(LeaseId) -> bool,
) -> DeviceStatus {
    let leases = &device.leases;
    // The worker reports what all leases of a device use together. The memory that an ended lease still uses
    // belongs to its tenant, which is no longer known.
    let usage = match leases.iter().all(|(lease, _)| is_shown(*lease)) {
        _ if shows_all => usage,
        _ if device.ending => DeviceUsage::default(),
        true if leases.is_empty() => DeviceUsage {
            ops_executed: 0,
            ..usage
        },
        true => usage,
        false => DeviceUsage::default(),
    };
    let shares = leases
        .iter()
        .filter(|(lease, _)| is_shown(*lease))
        .filter_map(|(_, share)| Some(share.as_ref()?.permille));
    DeviceStatus {
        leased: !leases.is_empty(),
        shares: count(shares.clone().count()),
        shared_permille: shares.sum(),
        device: Some(convert::device(device.device.clone())),
        sessions: usage.sessions,
        live_bytes: usage.live_bytes,
        ops_executed: usage.ops_executed,
        reserved_bytes: usage.reserved_bytes,
        ending: device.ending,
        out_of_service: device.out_of_service.clone().unwrap_or_default(),
    }
}

/// Returns a number of things for a message.
pub(super) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
