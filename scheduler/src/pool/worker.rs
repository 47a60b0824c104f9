//! One worker as the pool keeps it: what it offers, whether it is there, and
//! which of its devices are leased.

use std::collections::BTreeSet;
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
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
    /// It is not lost before this, as the scheduler did not run for a while.
    pub(super) spared_until: Option<Timestamp>,
    pub(super) leaving: bool,
    /// By device index.
    pub(super) leases: Vec<Option<LeaseId>>,
    /// By device index.
    pub(super) grants: Vec<Grants>,
}

/// What is known of the grants of a device.
#[derive(Clone, Copy, Default)]
pub(super) struct Grants {
    /// The highest number that the engine gave or its worker reported.
    pub(super) latest: GrantNumber,
    /// No grant up to this one is good any more.
    pub(super) ended: GrantNumber,
}

impl Worker {
    pub(super) fn new(registration: Registration, stream: StreamId, now: Timestamp) -> Self {
        Self {
            stream: Some(stream),
            last_beat: now,
            spared_until: None,
            leaving: false,
            leases: vec![None; registration.devices.len()],
            grants: vec![Grants::default(); registration.devices.len()],
            registration,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.registration.endpoint.name
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// When it is lost if it stays away.
    pub(super) fn lost_at(&self, timeout: Duration) -> Timestamp {
        (self.last_beat + timeout).max(self.spared_until.unwrap_or(self.last_beat))
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
        let devices = (0..).zip(devices.zip(&self.grants));
        // One whose worker reports the highest number there is cannot be granted again.
        devices
            .filter(|(_, (_, grants))| !self.leaving && grants.latest.next().is_some())
            .map(|(index, ((device, lease), _))| (index, device, *lease))
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
