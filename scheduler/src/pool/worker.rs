//! The pool's record of one worker: what it offers, whether it is connected, and which of
//! its devices are leased.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{LeaseId, StoreId, WorkerId};

use super::index::{ClassCounts, DeviceClass, GroupKey, WorkerKeys};
use crate::device::DeviceSpec;
use crate::event::{DeviceGrant, Endpoint, Outages, Registration, StreamId};
use crate::snapshot::{DeviceSnapshot, WorkerSnapshot};
use crate::time::Timestamp;

/// A worker that joined and is not lost.
pub(crate) struct Worker {
    pub(super) registration: Registration,
    /// The worker's current stream; `None` between the end of a stream and the start of the
    /// next.
    pub(super) stream: Option<StreamId>,
    pub(super) last_beat: Timestamp,
    /// The worker is not lost before this time, because the scheduler did not run for a
    /// while.
    pub(super) not_lost_before: Option<Timestamp>,
    /// Whether the worker is about to stop.
    pub(super) leaving: bool,
    /// Whether an administrator drains the worker.
    pub(super) drained: bool,
    /// The lease that has each device, by device index.
    pub(super) leases: Vec<Option<LeaseId>>,
    /// The known grants of each device, by device index.
    pub(super) grants: Vec<Grants>,
    /// The devices that ended leases have not left yet, each with the grant by which the
    /// lease had it. An entry is removed when the worker has released the device.
    ending: BTreeMap<(u32, LeaseId), GrantNumber>,
    /// The devices that the worker cannot offer at the moment.
    out_of_service: Outages,
    /// The class of each device, by device index.
    classes: Vec<DeviceClass>,
    /// The number of parts of leases whose snapshots the worker keeps.
    pub(super) kept: usize,
}

/// The known grants of a device.
#[derive(Clone, Copy, Default)]
pub(super) struct Grants {
    /// The highest number that the engine assigned or the worker reported.
    pub(super) latest: GrantNumber,
    /// The latest grant known to have ended; all earlier ones have ended, too.
    pub(super) ended: GrantNumber,
}

impl Grants {
    /// Returns whether the device can be granted again: its worker has not reported the highest possible
    /// number.
    fn can_rise(&self) -> bool {
        self.latest.next().is_some()
    }
}

/// How a device is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usage {
    /// A new lease may get it.
    Free,
    Leased(LeaseId),
    /// An earlier lease has not released it yet.
    Ending,
    /// Its worker gets no new leases.
    Draining,
    /// Its worker cannot offer it at the moment, or it can never be granted again.
    OutOfService,
    /// Its worker's stream is down.
    Unreachable,
}

impl Worker {
    pub(super) fn new(registration: Registration, stream: StreamId, now: Timestamp) -> Self {
        Self {
            stream: Some(stream),
            last_beat: now,
            not_lost_before: None,
            leaving: false,
            drained: false,
            leases: vec![None; registration.devices.len()],
            grants: vec![Grants::default(); registration.devices.len()],
            ending: BTreeMap::new(),
            out_of_service: Outages::new(),
            classes: registration.devices.iter().map(DeviceClass::of).collect(),
            kept: 0,
            registration,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.registration.endpoint.name
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.registration.endpoint
    }

    /// Returns the snapshot store that the worker has open.
    pub(crate) fn store(&self) -> Option<StoreId> {
        self.registration.store
    }

    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.kept
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Returns whether the worker gets no new leases, and durable ones move away: it is about to
    /// stop, or an administrator drains it.
    pub(crate) fn is_draining(&self) -> bool {
        self.leaving || self.drained
    }

    /// Returns when the worker is lost unless it comes back.
    pub(super) fn lost_at(&self, timeout: Duration) -> Timestamp {
        (self.last_beat + timeout).max(self.not_lost_before.unwrap_or(self.last_beat))
    }

    /// Returns whether the worker joined with this `registration`.
    pub(crate) fn is_registered_as(&self, registration: &Registration) -> bool {
        self.registration == *registration
    }

    /// Returns the leases that have devices of this worker.
    pub(crate) fn leases(&self) -> BTreeSet<LeaseId> {
        self.leases.iter().copied().flatten().collect()
    }

    /// Takes a device for a lease and returns whether that succeeded. Taking it again for
    /// the same lease changes nothing. Fails if another lease has the device, if the worker
    /// has not released it from an ended lease, or if it does not exist.
    ///
    /// A `grant` later than those of the ended leases proves that the device had been
    /// released from them when it was granted. Such a grant comes from before a restart.
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

    /// Takes the devices granted by `grants` from `lease`. No lease gets them before they
    /// are released.
    pub(super) fn end(&mut self, lease: LeaseId, grants: &[DeviceGrant]) {
        for &DeviceGrant { index, grant } in grants {
            let holder = self.leases.get_mut(index as usize);
            if let Some(holder) = holder.filter(|holder| **holder == Some(lease)) {
                *holder = None;
                self.ending.insert((index, lease), grant);
            }
        }
    }

    /// Records the worker's report that an ended lease still uses a device.
    pub(super) fn record_ending(&mut self, lease: LeaseId, grant: DeviceGrant) {
        let DeviceGrant { index, grant } = grant;
        if (index as usize) < self.leases.len() {
            let noted = self.ending.entry((index, lease)).or_default();
            *noted = grant.max(*noted);
        }
    }

    /// Marks the devices that `lease` had as released, except the `busy` ones, and returns
    /// whether any was released.
    pub(super) fn release(&mut self, lease: LeaseId, busy: &BTreeSet<u32>) -> bool {
        let before = self.ending.len();
        let stays = |index: &u32, of: &LeaseId| *of != lease || busy.contains(index);
        self.ending.retain(|(index, of), _| stays(index, of));
        self.ending.len() < before
    }

    /// Returns the ended leases with devices that are not released yet, each with the
    /// grants of these devices.
    pub(super) fn ending(&self) -> BTreeMap<LeaseId, Vec<DeviceGrant>> {
        let mut ending = BTreeMap::<_, Vec<_>>::new();
        for (&(index, lease), &grant) in &self.ending {
            let grants = ending.entry(lease).or_default();
            grants.push(DeviceGrant { index, grant });
        }
        ending
    }

    /// Returns whether a device has not been released from this ended lease.
    pub(super) fn is_ending_lease(&self, lease: LeaseId) -> bool {
        self.ending.keys().any(|(_, of)| *of == lease)
    }

    fn is_ending(&self, index: u32) -> bool {
        self.ending_on(index).next().is_some()
    }

    /// Returns the ended leases that have not left a device, each with the grant by which
    /// it had the device.
    fn ending_on(&self, index: u32) -> impl Iterator<Item = (&(u32, LeaseId), &GrantNumber)> {
        let first = (index, LeaseId(u64::MIN));
        let last = (index, LeaseId(u64::MAX));
        self.ending.range(first..=last)
    }

    /// Records which devices the worker cannot offer, and returns whether they differ from
    /// the previous ones.
    pub(super) fn set_out_of_service(&mut self, devices: Outages) -> bool {
        let before = mem::replace(&mut self.out_of_service, devices);
        before != self.out_of_service
    }

    /// Returns the keys of the worker in the index; `is_held_back` returns whether the free device with an
    /// index is held back.
    pub(super) fn keys(&self, is_held_back: impl Fn(u32) -> bool) -> WorkerKeys {
        let (mut offered, mut free) = (ClassCounts::default(), ClassCounts::default());
        for (index, class) in (0..).zip(&self.classes) {
            if self.is_offered(index) {
                offered.add(class, 1);
            }
            if self.usage(index) == Usage::Free && !is_held_back(index) {
                free.add(class, 1);
            }
        }
        let group = GroupKey {
            offered,
            free,
            is_connected: self.stream.is_some(),
            is_draining: self.is_draining(),
        };
        WorkerKeys {
            group,
            kept: self.kept,
            store: self.store(),
        }
    }

    /// Returns whether new leases may get a device now or later.
    fn is_offered(&self, index: u32) -> bool {
        let grants = self.grants.get(index as usize);
        !self.is_draining() && grants.is_some_and(Grants::can_rise)
    }

    /// Returns the devices that new leases may get now or later.
    pub(super) fn offers(&self) -> impl Iterator<Item = &DeviceSpec> {
        let devices = (0..).zip(&self.registration.devices);
        let offered = devices.filter(|(index, _)| self.is_offered(*index));
        offered.map(|(_, device)| device)
    }

    /// Returns the devices that a lease may get now: memory and index of each device that is accepted.
    pub(super) fn free(
        &self,
        accepts: &impl Fn(&DeviceSpec) -> bool,
    ) -> impl Iterator<Item = (u64, u32)> {
        let free = self.devices().filter(|(.., usage)| *usage == Usage::Free);
        let accepted = free.filter(|(_, device, _)| accepts(device));
        accepted.map(|(index, device, _)| (device.memory_bytes, index))
    }

    /// Returns all devices, by index, with how each is used.
    pub(super) fn devices(&self) -> impl Iterator<Item = (u32, &DeviceSpec, Usage)> {
        let devices = (0..).zip(&self.registration.devices);
        devices.map(|(index, device)| (index, device, self.usage(index)))
    }

    fn usage(&self, index: u32) -> Usage {
        let at = index as usize;
        let can_be_granted = self.grants.get(at).is_some_and(Grants::can_rise);
        let is_out_of_service = self.out_of_service.contains_key(&index) || !can_be_granted;
        match self.leases.get(at).copied().flatten() {
            // The end of a lease does not make such a device free.
            _ if self.is_draining() => Usage::Draining,
            _ if is_out_of_service => Usage::OutOfService,
            Some(lease) => Usage::Leased(lease),
            None if self.is_ending(index) => Usage::Ending,
            // The worker may be dead.
            None if self.stream.is_none() => Usage::Unreachable,
            None => Usage::Free,
        }
    }

    pub(super) fn snapshot(&self, worker: WorkerId) -> WorkerSnapshot {
        let Registration {
            endpoint, devices, ..
        } = &self.registration;
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
            draining: self.is_draining(),
            devices: (0..)
                .zip(devices.iter().zip(&self.leases))
                .map(device)
                .collect(),
        }
    }
}
