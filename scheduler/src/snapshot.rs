//! The pool at one moment, for people to look at.

use std::collections::BTreeMap;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use crate::command::LeasedDevice;
use crate::device::DeviceSpec;
use crate::time::Timestamp;

/// The pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Every worker that is not lost, by id.
    pub workers: Vec<WorkerSnapshot>,
    /// How many requests wait.
    pub waiting_requests: usize,
    /// The client of each of those, in the order they wait.
    pub waiting: Vec<ClientId>,
    /// How many leases there are.
    pub leases: usize,
    /// The client of each lease; `None` until one claims it.
    pub owners: BTreeMap<LeaseId, Option<ClientId>>,
}

/// A lease at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseSnapshot {
    /// Its client; `None` until one claims it.
    pub owner: Option<ClientId>,
    /// Its devices as they were granted, in the same order; `None` while a worker of the
    /// lease has yet to join.
    pub devices: Option<Vec<LeasedDevice>>,
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
    /// Which lease has it.
    pub lease: Option<LeaseId>,
    /// Its last lease has ended, and the worker has not reported it released.
    pub ending: bool,
    /// Why its worker cannot offer it, if so.
    pub out_of_service: Option<String>,
}
