//! One worker as the pool keeps it: what it offers, whether it is there, and
//! which of its devices are leased.

use std::collections::BTreeSet;

use tensord_proto::ids::{LeaseId, WorkerId};

use crate::device::{Demand, DeviceSpec};
use crate::event::{Registration, StreamId};
use crate::snapshot::{DeviceSnapshot, WorkerSnapshot};
use crate::time::Timestamp;

/// A worker that joined and is not lost.
pub(crate) struct Worker {
    pub(super) registration: Registration,
    /// `None` between the end of a stream and the start of the next.
    pub(super) stream: Option<StreamId>,
    pub(super) last_beat: Timestamp,
    pub(super) leaving: bool,
    /// By device index.
    pub(super) leases: Vec<Option<LeaseId>>,
}

impl Worker {
    pub(super) fn new(registration: Registration, stream: StreamId, now: Timestamp) -> Self {
        Self {
            stream: Some(stream),
            last_beat: now,
            leaving: false,
            leases: vec![None; registration.devices.len()],
            registration,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.registration.endpoint.name
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Whether this is the worker that once joined with `registration`.
    pub(crate) fn is_registered_as(&self, registration: &Registration) -> bool {
        self.registration == *registration
    }

    /// The leases that have its devices.
    pub(crate) fn leases(&self) -> BTreeSet<LeaseId> {
        self.leases.iter().copied().flatten().collect()
    }

    /// The devices that new leases may get, sooner or later, and their state.
    fn offered(&self) -> impl Iterator<Item = (u32, &DeviceSpec, Option<LeaseId>)> {
        let devices = self.registration.devices.iter().zip(&self.leases);
        (0..)
            .zip(devices)
            .filter(|_| !self.leaving)
            .map(|(index, (device, lease))| (index, device, *lease))
    }

    /// What new leases may get, sooner or later.
    pub(super) fn offers(&self) -> impl Iterator<Item = &DeviceSpec> {
        self.offered().map(|(_, device, _)| device)
    }

    /// What a new lease may get now: memory and index of each device that
    /// `demand` accepts. A worker whose stream is down may be dead, so it
    /// gets no lease before it is back.
    pub(super) fn free(&self, demand: &Demand) -> impl Iterator<Item = (u64, u32)> {
        self.offered()
            .filter(|(_, device, lease)| {
                self.stream.is_some() && lease.is_none() && demand.accepts(device)
            })
            .map(|(index, device, _)| (device.memory_bytes, index))
    }

    pub(super) fn snapshot(&self, worker: WorkerId) -> WorkerSnapshot {
        let Registration { endpoint, devices } = &self.registration;
        let device = |(device, lease): (&DeviceSpec, &Option<LeaseId>)| DeviceSnapshot {
            device: device.clone(),
            leased: lease.is_some(),
            lease: *lease,
        };
        WorkerSnapshot {
            worker,
            name: endpoint.name.clone(),
            address: endpoint.address.clone(),
            last_beat: self.last_beat,
            connected: self.stream.is_some(),
            leaving: self.leaving,
            devices: devices.iter().zip(&self.leases).map(device).collect(),
        }
    }
}
