//! A pool's status as JSON. Programs depend on the field names here.

use serde::Serialize;
use tensord_proto::v1::{self, DeviceStatus, StatusReply, WorkerStatus};

use crate::{human, stdout};

#[derive(Serialize)]
struct Pool<'a> {
    software: &'a str,
    uptime_ms: u64,
    leases: u32,
    waiting_requests: u32,
    workers: Vec<Worker<'a>>,
}

#[derive(Serialize)]
struct Worker<'a> {
    name: &'a str,
    address: &'a str,
    /// Milliseconds since the worker's last heartbeat.
    last_beat_ms: u64,
    /// Whether the worker is about to stop and gets no new leases.
    draining: bool,
    devices: Vec<Device<'a>>,
}

#[derive(Serialize)]
struct Device<'a> {
    index: usize,
    kind: &'a str,
    name: &'a str,
    memory_bytes: u64,
    /// What the bits of its results depend on; null if the worker does not report it.
    fingerprint: Option<Fingerprint>,
    leased: bool,
    /// What leases have shares of; null if none has a share.
    shared: Option<Shared>,
    /// Whether the worker has not released the device, or a share of it, from a lease that has ended.
    ending: bool,
    /// Why the worker cannot offer the device; null if it can.
    out_of_service: Option<&'a str>,
    sessions: u32,
    live_bytes: u64,
    /// Null if the backend does not count reserved memory.
    reserved_bytes: Option<u64>,
    ops_executed: u64,
}

/// The shares of a device.
#[derive(Serialize)]
struct Shared {
    /// The sum of the shares that a program's tenant has, or of all for an administrator, in thousandths of the
    /// device.
    permille: u32,
    /// The number of leases that have them.
    leases: u32,
}

#[derive(Serialize)]
struct Fingerprint {
    /// In hexadecimal.
    hash: String,
    exact: bool,
}

/// Formats `reply` as JSON, with a newline at the end.
pub(crate) fn json(reply: &StatusReply) -> String {
    let pool = Pool {
        software: &reply.software,
        uptime_ms: reply.uptime_ms,
        leases: reply.leases,
        waiting_requests: reply.waiting_requests,
        workers: reply.workers.iter().map(worker).collect(),
    };
    stdout::json(&pool)
}

fn worker(worker: &WorkerStatus) -> Worker<'_> {
    Worker {
        name: &worker.name,
        address: &worker.address,
        last_beat_ms: worker.last_beat_ms,
        draining: worker.draining,
        devices: worker.devices.iter().enumerate().map(device).collect(),
    }
}

fn device((index, status): (usize, &DeviceStatus)) -> Device<'_> {
    let device = status.device.as_ref();
    Device {
        index,
        kind: device.map_or("", |device| &device.kind),
        name: device.map_or("", |device| &device.name),
        memory_bytes: device.map_or(0, |device| device.memory_bytes),
        fingerprint: device.and_then(fingerprint),
        leased: status.leased,
        shared: (status.shared_permille > 0).then(|| shared(status)),
        ending: status.ending,
        out_of_service: Some(&*status.out_of_service).filter(|reason| !reason.is_empty()),
        sessions: status.sessions,
        live_bytes: status.live_bytes,
        reserved_bytes: status.reserved_bytes,
        ops_executed: status.ops_executed,
    }
}

fn shared(status: &DeviceStatus) -> Shared {
    Shared {
        permille: status.shared_permille,
        leases: status.shares,
    }
}

fn fingerprint(device: &v1::Device) -> Option<Fingerprint> {
    let fingerprint = device.fingerprint.as_ref()?;
    Some(Fingerprint {
        hash: human::hex(&fingerprint.hash),
        exact: fingerprint.is_exact,
    })
}
