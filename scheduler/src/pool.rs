//! The workers, their devices, and which lease has which device.
//!
//! The pool keeps the one fact that must never be wrong, that a device has at
//! most one lease, and answers whether a demand can be met now, later, or
//! never. It must not know clients, requests, or why a lease begins or ends.

mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{LeaseId, WorkerId};

use crate::command::LeasedDevice;
use crate::device::{Demand, Inventory};
use crate::event::{DeviceGrant, DeviceRef, GrantedShare, Outages, Registration, StreamId};
use crate::placement::{self, Candidate};
use crate::snapshot::WorkerSnapshot;
use crate::time::Timestamp;
use worker::Grants;
pub(crate) use worker::Worker;

/// Every worker that joined and is not lost.
#[derive(Default)]
pub(crate) struct Pool {
    workers: BTreeMap<WorkerId, Worker>,
    /// A demand that was busy may now fit, or never will.
    changed: bool,
}

/// Whether a demand can be met.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Now, with these devices.
    Fits(Vec<DeviceRef>),
    /// Later, when devices are released or in service again, or a worker is back.
    Busy,
    /// Not with the workers there are.
    Never,
}

/// The device has another lease, is not free of one that ended, or does not exist.
#[derive(Debug)]
pub(crate) struct Unavailable;

/// Workers come and go.
impl Pool {
    pub(crate) fn get(&self, worker: WorkerId) -> Option<&Worker> {
        self.workers.get(&worker)
    }

    pub(crate) fn contains(&self, worker: WorkerId) -> bool {
        self.workers.contains_key(&worker)
    }

    pub(crate) fn is_connected(&self, worker: WorkerId) -> bool {
        self.get(worker)
            .is_some_and(|worker| worker.stream.is_some())
    }

    /// Whether `stream` is the one the worker speaks on.
    pub(crate) fn is_speaking(&self, worker: WorkerId, stream: StreamId) -> bool {
        self.get(worker)
            .is_some_and(|worker| worker.stream == Some(stream))
    }

    pub(crate) fn insert(
        &mut self,
        worker: WorkerId,
        registration: Registration,
        stream: StreamId,
        now: Timestamp,
    ) {
        self.workers
            .insert(worker, Worker::new(registration, stream, now));
        self.changed = true;
    }

    /// A worker is back, with its leases and, if it was leaving, still leaving.
    pub(crate) fn reconnect(&mut self, worker: WorkerId, stream: StreamId, now: Timestamp) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.stream = Some(stream);
            worker.last_beat = now;
            worker.spared_until = None;
            self.changed = true;
        }
    }

    pub(crate) fn disconnect(&mut self, worker: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.stream = None;
        }
    }

    pub(crate) fn beat(&mut self, worker: WorkerId, now: Timestamp) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.last_beat = now;
        }
    }

    pub(crate) fn leave(&mut self, worker: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.leaving = true;
            self.changed = true;
        }
    }

    pub(crate) fn remove(&mut self, worker: WorkerId) -> Option<Worker> {
        let removed = self.workers.remove(&worker)?;
        self.changed = true;
        Some(removed)
    }

    /// Loses no worker that is here before `until`.
    pub(crate) fn spare_until(&mut self, until: Timestamp) {
        for worker in self.workers.values_mut() {
            worker.spared_until = Some(until);
        }
    }

    /// Workers without a stream, and when each is lost.
    pub(crate) fn losses(&self, timeout: Duration) -> impl Iterator<Item = (Timestamp, WorkerId)> {
        self.workers
            .iter()
            .filter(|(_, worker)| worker.stream.is_none())
            .map(move |(id, worker)| (worker.lost_at(timeout), *id))
    }
}

/// Grants have numbers.
impl Pool {
    /// Whether a grant of a device may be one that has not ended.
    pub(crate) fn is_good(&self, share: DeviceRef, grant: GrantNumber) -> bool {
        let grants = self.grants(share);
        grants.is_some_and(|grants| grant > grants.ended)
    }

    /// Above every grant of the device that is known.
    pub(crate) fn next_grant(&self, share: DeviceRef) -> GrantNumber {
        let latest = self.grants(share).map_or(GrantNumber::ZERO, |g| g.latest);
        latest.next().unwrap_or(latest)
    }

    /// There is, or was, this grant of a device.
    pub(crate) fn note_grant(&mut self, share: DeviceRef, grant: GrantNumber) {
        let worker = self.workers.get_mut(&share.worker);
        let grants = worker.and_then(|worker| worker.grants.get_mut(share.index as usize));
        if let Some(grants) = grants {
            grants.latest = grants.latest.max(grant);
        }
    }

    /// No grant of these devices of `worker` up to these is good any more.
    pub(crate) fn note_ended(&mut self, worker: WorkerId, ended: &[DeviceGrant]) {
        let Some(worker) = self.workers.get_mut(&worker) else {
            return;
        };
        for &DeviceGrant { index, grant } in ended {
            if let Some(grants) = worker.grants.get_mut(index as usize) {
                grants.latest = grants.latest.max(grant);
                grants.ended = grants.ended.max(grant);
            }
        }
    }

    fn grants(&self, share: DeviceRef) -> Option<&Grants> {
        self.get(share.worker)?.grants.get(share.index as usize)
    }
}

/// Leases take devices and give them back.
impl Pool {
    /// Takes a device for a lease by a grant that has not ended; taking it again changes
    /// nothing.
    pub(crate) fn take(
        &mut self,
        share: DeviceRef,
        lease: LeaseId,
        grant: GrantNumber,
    ) -> Result<(), Unavailable> {
        if !self.is_good(share, grant) {
            return Err(Unavailable);
        }
        let worker = self.workers.get_mut(&share.worker);
        if !worker.is_some_and(|worker| worker.take(share.index, lease, grant)) {
            return Err(Unavailable);
        }
        self.note_grant(share, grant);
        Ok(())
    }

    /// The lease that has a device.
    pub(crate) fn holder(&self, share: DeviceRef) -> Option<LeaseId> {
        *self.get(share.worker)?.leases.get(share.index as usize)?
    }

    /// Takes from `lease` what it has on a worker by `grants`, which is to release it. None
    /// up to these is good any more.
    pub(crate) fn end(&mut self, worker: WorkerId, lease: LeaseId, grants: &[DeviceGrant]) {
        self.note_ended(worker, grants);
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.end(lease, grants);
        }
    }

    /// Notes that a lease that has ended still uses a device, as its worker says, and that
    /// no grant up to this is good any more.
    pub(crate) fn note_ending(&mut self, worker: WorkerId, lease: LeaseId, grant: DeviceGrant) {
        self.note_ended(worker, &[grant]);
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.note_ending(lease, grant);
        }
    }

    /// A worker has released what a lease had that ended, but for the `busy` devices.
    pub(crate) fn release(&mut self, worker: WorkerId, lease: LeaseId, busy: &BTreeSet<u32>) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            self.changed |= worker.release(lease, busy);
        }
    }

    /// The leases that have ended and whose devices a worker has not released, with the
    /// grants of these.
    pub(crate) fn ending(&self, worker: WorkerId) -> BTreeMap<LeaseId, Vec<DeviceGrant>> {
        self.get(worker).map(Worker::ending).unwrap_or_default()
    }

    /// Notes which devices a worker cannot offer at the moment.
    pub(crate) fn set_out_of_service(&mut self, worker: WorkerId, devices: Outages) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            self.changed |= worker.set_out_of_service(devices);
        }
    }

    /// Whether a demand can be met, and with what.
    pub(crate) fn assess(&self, demand: &Demand) -> Verdict {
        let wanted = demand.devices as usize;
        let free = self.workers.values().flat_map(|worker| worker.free(demand));
        // Any `wanted` devices will do, so counting tells before choosing.
        if free.count() >= wanted
            && let Some(shares) = placement::choose(self.candidates(demand), wanted)
        {
            return Verdict::Fits(shares);
        }
        let offered = self.workers.values().flat_map(Worker::offers);
        if offered.filter(|device| demand.accepts(device)).count() >= wanted {
            Verdict::Busy
        } else {
            Verdict::Never
        }
    }

    fn candidates(&self, demand: &Demand) -> Vec<Candidate> {
        self.workers
            .iter()
            .map(|(id, worker)| Candidate::new(*id, worker.free(demand).collect()))
            .collect()
    }

    /// Whether, since the last call, anything happened that may have changed
    /// the verdict on a demand that was busy.
    pub(crate) fn take_changed(&mut self) -> bool {
        mem::take(&mut self.changed)
    }

    pub(crate) fn leased_device(&self, granted: GrantedShare) -> Option<LeasedDevice> {
        let GrantedShare { share, grant } = granted;
        let Registration { endpoint, devices } = &self.get(share.worker)?.registration;
        Some(LeasedDevice {
            share,
            grant,
            device: devices.get(share.index as usize)?.clone(),
            worker: endpoint.clone(),
        })
    }

    pub(crate) fn inventory(&self) -> Inventory {
        let mut inventory = Inventory::default();
        for worker in self.workers.values() {
            inventory.add(worker.offers());
        }
        inventory
    }

    pub(crate) fn snapshot(&self) -> Vec<WorkerSnapshot> {
        self.workers
            .iter()
            .map(|(id, worker)| worker.snapshot(*id))
            .collect()
    }
}
