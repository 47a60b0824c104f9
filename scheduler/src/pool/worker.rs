//! One worker as the pool keeps it: what it offers, whether it is there, and
//! which of its devices are leased.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{LeaseId, WorkerId};

use crate::device::{Demand, DeviceSpec};
use crate::event::{DeviceGrant, Outages, Registration, StreamId};
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
    /// Devices that leases had which ended, until the worker has released them, and the
    /// grants by which they had them.
    ending: BTreeMap<(u32, LeaseId), GrantNumber>,
    /// Devices that the worker cannot offer at the moment.
    out_of_service: Outages,
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
            ending: BTreeMap::new(),
            out_of_service: Outages::new(),
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

    /// Takes a device for a lease; taking it again changes nothing. False: another lease
    /// has it, or had it and the worker has not released it, or there is none.
    ///
    /// A grant that is later than those of the leases which are to release the device shows
    /// that they had released it before: such a one comes from before a restart.
    pub(super) fn take(&mut self, index: u32, lease: LeaseId, grant: GrantNumber) -> bool {
        let is_settled = self.ending_on(index).all(|(_, of)| *of < grant);
        match self.leases.get_mut(index as usize) {
            Some(Some(holder)) => *holder == lease,
            Some(free) if is_settled => {
                *free = Some(lease);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Takes from `lease` what it has here. Nobody gets it before it is released.
    pub(super) fn end(&mut self, lease: LeaseId, grants: &[DeviceGrant]) {
        for &DeviceGrant { index, grant } in grants {
            let holder = self.leases.get_mut(index as usize);
            if let Some(holder) = holder.filter(|holder| **holder == Some(lease)) {
                *holder = None;
                self.ending.insert((index, lease), grant);
            }
        }
    }

    /// Notes that a lease that has ended still uses a device, as the worker says.
    pub(super) fn note_ending(&mut self, lease: LeaseId, grant: DeviceGrant) {
        let DeviceGrant { index, grant } = grant;
        if (index as usize) < self.leases.len() {
            let noted = self.ending.entry((index, lease)).or_default();
            *noted = grant.max(*noted);
        }
    }

    /// The devices that `lease` had are free of it, but for those that are `busy`. Says
    /// whether any was released.
    pub(super) fn release(&mut self, lease: LeaseId, busy: &BTreeSet<u32>) -> bool {
        let before = self.ending.len();
        let stays = |index: &u32, of: &LeaseId| *of != lease || busy.contains(index);
        self.ending.retain(|(index, of), _| stays(index, of));
        self.ending.len() < before
    }

    /// The leases that have ended and whose devices are not released yet, with the grants
    /// of these.
    pub(super) fn ending(&self) -> BTreeMap<LeaseId, Vec<DeviceGrant>> {
        let mut ending = BTreeMap::<_, Vec<_>>::new();
        for (&(index, lease), &grant) in &self.ending {
            let grants = ending.entry(lease).or_default();
            grants.push(DeviceGrant { index, grant });
        }
        ending
    }

    fn is_ending(&self, index: u32) -> bool {
        self.ending_on(index).next().is_some()
    }

    /// The leases which are to release a device, and the grants by which they had it.
    fn ending_on(&self, index: u32) -> impl Iterator<Item = (&(u32, LeaseId), &GrantNumber)> {
        let first = (index, LeaseId(u64::MIN));
        let last = (index, LeaseId(u64::MAX));
        self.ending.range(first..=last)
    }

    /// Notes which devices the worker cannot offer. Says whether they are others than
    /// before.
    pub(super) fn set_out_of_service(&mut self, devices: Outages) -> bool {
        let before = mem::replace(&mut self.out_of_service, devices);
        before != self.out_of_service
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
    /// gets no lease before it is back. A device that is not free of its last
    /// lease, or is out of service, is waited for.
    pub(super) fn free(&self, demand: &Demand) -> impl Iterator<Item = (u64, u32)> {
        self.offered()
            .filter(|(index, device, lease)| {
                let is_ready = lease.is_none()
                    && !self.is_ending(*index)
                    && !self.out_of_service.contains_key(index);
                self.stream.is_some() && is_ready && demand.accepts(device)
            })
            .map(|(index, device, _)| (device.memory_bytes, index))
    }

    pub(super) fn snapshot(&self, worker: WorkerId) -> WorkerSnapshot {
        let Registration { endpoint, devices } = &self.registration;
        let device =
            |(index, (device, lease)): (u32, (&DeviceSpec, &Option<LeaseId>))| DeviceSnapshot {
                device: device.clone(),
                leased: lease.is_some(),
                lease: *lease,
                ending: self.is_ending(index),
                out_of_service: self.out_of_service.get(&index).cloned(),
            };
        WorkerSnapshot {
            worker,
            name: endpoint.name.clone(),
            address: endpoint.address.clone(),
            last_beat: self.last_beat,
            connected: self.stream.is_some(),
            leaving: self.leaving,
            devices: (0..)
                .zip(devices.iter().zip(&self.leases))
                .map(device)
                .collect(),
        }
    }
}
