//! The pool at one moment, for people to look at.

use tensord_proto::ids::WorkerId;

use crate::device::DeviceSpec;
use crate::time::Timestamp;

/// The pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Every worker that is not lost, by id.
    pub workers: Vec<WorkerSnapshot>,
    /// How many requests wait.
    pub waiting_requests: usize,
    /// How many leases there are.
    pub leases: usize,
}

/// A worker at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSnapshot {
    /// Its id.
    pub worker: WorkerId,
    /// Its name.
    pub name: String,
    /// Where its data plane is.
    pub address: String,
    /// When it was last heard.
    pub last_beat: Timestamp,
    /// Whether its stream is up.
    pub connected: bool,
    /// Whether it is about to stop.
    pub leaving: bool,
    /// Its devices, by index.
    pub devices: Vec<DeviceSnapshot>,
}

/// A device at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// What it is.
    pub device: DeviceSpec,
    /// Whether a lease has it.
    pub leased: bool,
}
