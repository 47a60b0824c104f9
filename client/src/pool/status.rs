//! The state of a pool, as [`Pool::status`](crate::Pool::status) returns it.

use std::time::Duration;

use tensord_proto::v1;

use crate::lease::part_of_device;

/// The state of a pool at one moment.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let status = tensord_client::Pool::connect_env()?.status()?;
/// for worker in &status.workers {
///     let free = worker.devices.iter().filter(|device| device.is_free());
///     println!("{}: {} of {} devices are free", worker.name, free.count(), worker.devices.len());
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStatus {
    /// The scheduler's software and version.
    pub software: String,
    /// How long the scheduler has been running.
    pub uptime: Duration,
    /// The registered workers.
    pub workers: Vec<WorkerStatus>,
    /// Number of requests in the queue.
    pub waiting_requests: u32,
    /// Number of leases.
    pub leases: u32,
}

/// The state of a worker, in a [`PoolStatus`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStatus {
    /// The worker's name, which is unique in the pool.
    pub name: String,
    /// The `host:port` at which programs reach the worker.
    pub address: String,
    /// Time since the worker's last heartbeat.
    pub last_beat: Duration,
    /// The worker's devices, by device index.
    pub devices: Vec<DeviceStatus>,
    /// Whether it is about to stop. It gets no new leases then; leases that it has go on.
    pub draining: bool,
}

/// The state of a device, in a [`WorkerStatus`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStatus {
    /// The device's kind, such as `"cuda"`.
    pub kind: String,
    /// The device's human-readable name.
    pub name: String,
    /// The device's memory, in bytes.
    pub memory_bytes: u64,
    /// Whether the device is leased, or leases have shares of it.
    pub leased: bool,
    /// Number of sessions on the device.
    pub sessions: u32,
    /// Bytes of the tensors on the device.
    pub live_bytes: u64,
    /// Number of ops executed for its current lease.
    pub ops_executed: u64,
    /// Bytes of device memory that the device's runtime holds, or `None` if the runtime
    /// does not count them.
    pub reserved_bytes: Option<u64>,
    /// Whether its last lease has ended and the worker has not released it yet.
    pub ending: bool,
    /// Why it cannot be leased at the moment, or `None` if nothing is wrong with it.
    pub out_of_service: Option<String>,
    /// The part of its time that leases of the program's tenant have shares of, in thousandths.
    shared_permille: u32,
}

impl DeviceStatus {
    /// The part of the device's time that leases of the program's tenant have
    /// [shares](crate::LeaseRequest::share) of; `None` if none has a share. Others may have further ones.
    pub fn shared(&self) -> Option<f64> {
        part_of_device(self.shared_permille)
    }

    /// Returns whether a request could be granted all of this device now. A device of a worker
    /// that is [draining](WorkerStatus::draining) is granted to nobody all the same.
    pub fn is_free(&self) -> bool {
        !self.leased && !self.ending && self.out_of_service.is_none()
    }
}

impl From<v1::StatusReply> for PoolStatus {
    fn from(reply: v1::StatusReply) -> Self {
        Self {
            software: reply.software,
            uptime: Duration::from_millis(reply.uptime_ms),
            workers: reply.workers.into_iter().map(Into::into).collect(),
            waiting_requests: reply.waiting_requests,
            leases: reply.leases,
        }
    }
}

impl From<v1::WorkerStatus> for WorkerStatus {
    fn from(worker: v1::WorkerStatus) -> Self {
        Self {
            name: worker.name,
            address: worker.address,
            last_beat: Duration::from_millis(worker.last_beat_ms),
            devices: worker.devices.into_iter().map(Into::into).collect(),
            draining: worker.draining,
        }
    }
}

impl From<v1::DeviceStatus> for DeviceStatus {
    fn from(status: v1::DeviceStatus) -> Self {
        let device = status.device.unwrap_or_default();
        let reason = status.out_of_service;
        Self {
            kind: device.kind,
            name: device.name,
            memory_bytes: device.memory_bytes,
            leased: status.leased,
            sessions: status.sessions,
            live_bytes: status.live_bytes,
            ops_executed: status.ops_executed,
            reserved_bytes: status.reserved_bytes,
            ending: status.ending,
            out_of_service: (!reason.is_empty()).then_some(reason),
            shared_permille: status.shared_permille,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_in_service_without_a_lease_is_free() {
        let status = |change: fn(&mut v1::DeviceStatus)| {
            let mut device = v1::DeviceStatus::default();
            change(&mut device);
            DeviceStatus::from(device)
        };
        assert!(status(|_| {}).is_free());
        assert!(!status(|device| device.leased = true).is_free());
        assert!(!status(|device| device.ending = true).is_free());
        let shared = status(|device| (device.leased, device.shared_permille) = (true, 250));
        assert_eq!((shared.is_free(), shared.shared()), (false, Some(0.25)));
        assert_eq!(status(|device| device.leased = true).shared(), None);
        let broken = status(|device| device.out_of_service = "the test op failed".into());
        assert!(!broken.is_free());
        assert_eq!(broken.out_of_service.as_deref(), Some("the test op failed"));
    }
}
