//! The state of the pool at one moment, for display.

use std::collections::BTreeMap;
use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};
use tensord_proto::share::DeviceShare;

use crate::command::LeasedDevice;
use crate::device::DeviceSpec;
use crate::device::Durability;
use crate::event::Suspender;
use crate::reason::{CannotMove, EndReason};
use crate::time::Timestamp;

/// The state of the pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// All workers that are not lost, in the order of ids.
    pub workers: Vec<WorkerSnapshot>,
    /// The number of pending requests.
    pub waiting_requests: usize,
    /// The client of each pending request, in any order.
    pub waiting: Vec<ClientId>,
    /// The number of leases.
    pub leases: usize,
    /// The client of each lease; `None` until a client claims it.
    pub owners: BTreeMap<LeaseId, Option<ClientId>>,
}

/// The state of a lease at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseSnapshot {
    /// The lease's client; `None` until a client claims it.
    pub owner: Option<ClientId>,
    /// The lease's devices, in the order of worker and index; `None` while a worker of the
    /// lease has yet to join, or the lease is suspended.
    pub devices: Option<Vec<LeasedDevice>>,
    /// Whether the lease goes on from snapshots if a process of it dies, or at another worker if its
    /// worker is lost.
    pub durability: Durability,
    /// How often the lease has moved to another worker.
    pub epoch: u64,
    /// Whether it is a spot lease.
    pub is_spot: bool,
    /// Whether it may end if its devices are reclaimed and it cannot be suspended.
    pub may_end: bool,
    /// For how long it may still have devices; `None` for any time, or if it has none now.
    pub time_left: Option<Duration>,
    /// Why the lease waits for a device, if its worker is gone.
    pub waits: Option<EndReason>,
    /// Set if the lease is suspended.
    pub suspension: Option<SuspensionSnapshot>,
    /// Whether the lease could go on from a snapshot store, at any workers that have it open.
    pub is_stored: bool,
    /// The name of the worker to which the lease could move now, or why it cannot.
    pub move_to: Result<String, CannotMove>,
}

/// How a suspended lease is at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuspensionSnapshot {
    /// The names of the workers that have its snapshots.
    pub holders: Vec<String>,
    /// Whether it needs devices of each of these, as each has a part of its snapshots.
    pub needs_all: bool,
    /// Whether it was resumed, and waits for devices of one of these.
    pub is_resumed: bool,
    /// Who has suspended it; `None` if it was resumed.
    pub by: Option<Suspender>,
}

/// The state of a worker at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSnapshot {
    /// The worker's id.
    pub worker: WorkerId,
    /// The worker's name.
    pub name: String,
    /// The address of the worker's data plane.
    pub address: String,
    /// The time of the worker's last heartbeat.
    pub last_beat: Timestamp,
    /// Whether the worker's stream is up.
    pub connected: bool,
    /// Whether the worker is about to stop, or is drained by an administrator.
    pub draining: bool,
    /// The worker's devices, by index.
    pub devices: Vec<DeviceSnapshot>,
}

/// The state of a device at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// The device's kind, name and memory.
    pub device: DeviceSpec,
    /// The lease that has the device, or those that have shares of it.
    pub leases: Vec<(LeaseId, Option<DeviceShare>)>,
    /// Whether the device is not free of an ended lease: the worker has not reported it
    /// released.
    pub ending: bool,
    /// The reason why the worker cannot offer the device; `None` if it is in service.
    pub out_of_service: Option<String>,
}
