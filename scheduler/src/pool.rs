//! The workers, their devices, and which lease has which device.
//!
//! The pool guarantees that leases do not have more of a device than there is, and decides whether a demand
//! can be met now, later, or never. It must not know clients, requests, or why a lease
//! begins or ends.

mod demands;
mod ending;
mod fitting;
mod grant_numbers;
mod held_back;
mod index;
mod room;
mod worker;
mod worker_mut;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tensord_proto::ids::{LeaseId, WorkerId};
#[cfg(test)]
use tensord_proto::share::DeviceShare;

use crate::command::LeasedDevice;
use crate::device::{DeviceSpec, Inventory, Share};
use crate::event::{DeviceGrant, DeviceRef, GrantedDevice, Outages, Registration, StreamId};
use crate::snapshot::WorkerSnapshot;
use crate::time::Timestamp;
use crate::waiting::SuitableDevices;
use held_back::HeldBack;
#[cfg(test)]
pub(crate) use held_back::Holds;
pub(crate) use index::{DeviceClass, WorkerIndex};
pub(crate) use room::Room;
pub(crate) use worker::Worker;
use worker::{Usage, excludes};
use worker_mut::{Entry, keys_of};

/// All workers that have joined and are not lost.
#[derive(Default)]
pub(crate) struct Pool {
    workers: BTreeMap<WorkerId, Entry>,
    index: WorkerIndex,
    held_back: HeldBack,
    /// Whether a demand that was [`Busy`](Feasibility::Busy) may now fit, or can never fit.
    changed: bool,
    /// Whether a lease may get devices now for which there was no room before: another one has got a share of a device,
    /// or devices are not held back for a request any more.
    has_new_room: bool,
}

/// The verdict on a demand.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Feasibility {
    /// The demand can be met now, with these devices.
    Fits(Vec<DeviceRef>),
    /// The demand can be met later, when devices are released or in service again, or a
    /// worker is back.
    Busy,
    /// The demand cannot be met with the workers in the pool.
    Never,
}

/// The error when a device has another lease, is not free of one that ended, or does not
/// exist, or when the grant has ended.
#[derive(Debug)]
pub(crate) struct Unavailable;

/// Workers join, leave and are lost.
impl Pool {
    pub(crate) fn get(&self, worker: WorkerId) -> Option<&Worker> {
        self.workers.get(&worker).map(|entry| &entry.worker)
    }

    /// Returns the workers by what they offer and have free.
    pub(crate) fn index(&self) -> &WorkerIndex {
        &self.index
    }

    /// Returns the workers that were new, gone, or had another stream or offer, since the last call.
    pub(crate) fn take_changed_workers(&mut self) -> BTreeSet<WorkerId> {
        self.index.take_changed()
    }

    /// Records how many parts of leases there are whose snapshots a worker keeps.
    pub(crate) fn set_kept(&mut self, worker: WorkerId, kept: usize) {
        if let Some(mut worker) = self.worker_mut(worker) {
            worker.kept = kept;
        }
    }

    /// Changes a worker, and records if that may have changed the verdict on a demand: if `change` returns so.
    fn change(&mut self, worker: WorkerId, change: impl FnOnce(&mut Worker) -> bool) {
        let worker = self.worker_mut(worker);
        let is_changed = worker.is_some_and(|mut worker| change(&mut worker));
        self.changed |= is_changed;
    }

    fn workers(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.workers.iter().map(|(id, entry)| (*id, &entry.worker))
    }

    pub(crate) fn contains(&self, worker: WorkerId) -> bool {
        self.workers.contains_key(&worker)
    }

    pub(crate) fn is_connected(&self, worker: WorkerId) -> bool {
        self.get(worker)
            .is_some_and(|worker| worker.stream.is_some())
    }

    /// Returns the time since the last heartbeat of a worker whose stream is down; zero if it is up.
    pub(crate) fn silence(&self, worker: WorkerId, now: Timestamp) -> Duration {
        let worker = self.get(worker).filter(|worker| worker.stream.is_none());
        worker.map_or(Duration::ZERO, |worker| {
            now.saturating_since(worker.last_beat)
        })
    }

    /// Returns whether `stream` is the worker's current stream.
    pub(crate) fn is_current_stream(&self, worker: WorkerId, stream: StreamId) -> bool {
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
        let id = worker;
        let worker = Worker::new(registration, stream, now);
        let keys = keys_of(id, &worker, &self.held_back);
        self.index.replace(id, None, Some(&keys));
        self.workers.insert(id, Entry { worker, keys });
        self.changed = true;
    }

    /// Records a worker's new stream. Its leases stay, and so do its flags `leaving` and `drained`.
    pub(crate) fn reconnect(&mut self, worker: WorkerId, stream: StreamId, now: Timestamp) {
        self.change(worker, |worker| {
            worker.stream = Some(stream);
            worker.last_beat = now;
            worker.not_lost_before = None;
            true
        });
    }

    pub(crate) fn disconnect(&mut self, worker: WorkerId) {
        if let Some(mut worker) = self.worker_mut(worker) {
            worker.stream = None;
        }
    }

    pub(crate) fn beat(&mut self, worker: WorkerId, now: Timestamp) {
        if let Some(entry) = self.workers.get_mut(&worker) {
            entry.worker.last_beat = now;
        }
    }

    pub(crate) fn leave(&mut self, worker: WorkerId) {
        self.change(worker, |worker| {
            worker.leaving = true;
            true
        });
    }

    pub(crate) fn set_drained(&mut self, worker: WorkerId, is_drained: bool) {
        self.change(worker, |worker| {
            worker.drained = is_drained;
            true
        });
    }

    pub(crate) fn remove(&mut self, worker: WorkerId) -> Option<Worker> {
        let Entry {
            worker: removed,
            keys,
        } = self.workers.remove(&worker)?;
        self.index.replace(worker, Some(&keys), None);
        self.changed = true;
        Some(removed)
    }

    /// Postpones the loss of every current worker until `until` at the earliest.
    pub(crate) fn postpone_loss(&mut self, until: Timestamp) {
        for entry in self.workers.values_mut() {
            entry.worker.not_lost_before = Some(until);
        }
    }

    /// Returns the workers without a stream and the time at which each is lost.
    pub(crate) fn loss_deadlines(
        &self,
        timeout: Duration,
    ) -> impl Iterator<Item = (Timestamp, WorkerId)> {
        let disconnected = self.index.disconnected().iter();
        disconnected.filter_map(move |id| Some((self.get(*id)?.lost_at(timeout), *id)))
    }
}

/// Leases take and release devices.
impl Pool {
    /// Takes a device, or a share of it, for a lease by a grant that has not ended. Taking it again for the
    /// same lease changes nothing.
    pub(crate) fn take(
        &mut self,
        lease: LeaseId,
        granted: GrantedDevice,
    ) -> Result<(), Unavailable> {
        let device_ref = granted.device_ref;
        if !self.may_be_valid(granted) {
            return Err(Unavailable);
        }
        let worker = self.worker_mut(device_ref.worker);
        if !worker.is_some_and(|mut worker| worker.take(lease, granted)) {
            return Err(Unavailable);
        }
        let was_held_back = self.held_back.remove(device_ref, lease);
        if granted.share.is_some() {
            // Others may get the rest of the device.
            self.changed |= was_held_back;
            self.has_new_room = true;
        }
        self.record_grants(device_ref.worker, [granted]);
        Ok(())
    }

    /// Returns whether leases may have got room since the last call: as another one has got a share of a device, or
    /// devices are not held back for a request any more.
    pub(crate) fn take_new_room(&mut self) -> bool {
        mem::take(&mut self.has_new_room)
    }

    /// Returns the leases that have a device, or shares of it.
    pub(crate) fn holders_of(&self, device_ref: DeviceRef) -> impl Iterator<Item = LeaseId> {
        let worker = self.get(device_ref.worker).into_iter();
        let holders = worker.flat_map(move |worker| worker.holders(device_ref.index));
        holders.map(|holder| holder.lease)
    }

    /// Returns the leases that have devices of a worker, or shares of such.
    pub(crate) fn leases_at(&self, worker: WorkerId) -> BTreeSet<LeaseId> {
        let worker = self.get(worker).into_iter();
        worker.flat_map(Worker::all_leases).collect()
    }

    /// Returns the worker of this name.
    pub(crate) fn worker_named(&self, name: &str) -> Option<WorkerId> {
        let mut workers = self.workers();
        let worker = workers.find(|(_, worker)| worker.registration.endpoint.name == name);
        worker.map(|(id, _)| id)
    }

    /// Returns the other leases that have what a lease was granted: the device, or the lane.
    pub(crate) fn conflicting(
        &self,
        lease: LeaseId,
        granted: GrantedDevice,
    ) -> impl Iterator<Item = LeaseId> {
        let DeviceRef { worker, index } = granted.device_ref;
        let worker = self.get(worker).into_iter();
        let holders = worker.flat_map(move |worker| worker.holders(index));
        let others = holders.filter(move |it| it.lease != lease);
        let conflicting = others.filter(move |it| excludes(it.share, granted.share));
        conflicting.map(|holder| holder.lease)
    }

    /// Returns the first lane of a device that no lease has.
    pub(crate) fn free_lane(&self, device_ref: DeviceRef) -> u32 {
        let worker = self.get(device_ref.worker);
        worker.map_or(0, |worker| worker.free_lane(device_ref.index))
    }

    /// Returns whether leases have shares of a device.
    pub(crate) fn is_shared(&self, device_ref: DeviceRef) -> bool {
        let worker = self.get(device_ref.worker);
        let left = worker.and_then(|worker| worker.left_of(device_ref.index, false));
        left.is_some() && !self.is_unused(device_ref)
    }

    /// Returns whether no lease has a device or a share of it. An ended one may not have left it yet.
    pub(crate) fn is_unused(&self, device_ref: DeviceRef) -> bool {
        self.holders_of(device_ref).next().is_none()
    }

    /// Takes the devices granted by `grants` on a worker from `lease`; they stay
    /// unavailable until the worker has released them. These grants and all earlier ones
    /// have ended.
    pub(crate) fn end(&mut self, worker: WorkerId, lease: LeaseId, grants: &[DeviceGrant]) {
        self.record_ended(worker, grants);
        if let Some(mut worker) = self.worker_mut(worker) {
            worker.end(lease, grants);
        }
    }

    /// Records a worker's report that ended leases still use these devices of it. These grants and
    /// all earlier ones have ended.
    pub(crate) fn record_ending(
        &mut self,
        worker: WorkerId,
        ending: impl IntoIterator<Item = (LeaseId, GrantedDevice)>,
    ) {
        let Some(mut worker) = self.worker_mut(worker) else {
            return;
        };
        for (lease, granted) in ending {
            worker.record_ended(granted.device_grant());
            worker.record_ending(lease, granted);
        }
    }

    /// Records that a worker has released the devices of an ended lease, except the `busy`
    /// ones.
    pub(crate) fn release(&mut self, worker: WorkerId, lease: LeaseId, busy: &BTreeSet<u32>) {
        self.change(worker, |worker| worker.release(lease, busy));
    }

    /// Returns the ended leases with devices that the worker has not released, each with
    /// the grants of these devices.
    pub(crate) fn ending(&self, worker: WorkerId) -> BTreeMap<LeaseId, Vec<DeviceGrant>> {
        self.get(worker).map(Worker::ending).unwrap_or_default()
    }

    /// Returns whether a worker has not released a device from a lease that ended there.
    pub(crate) fn is_ending(&self, worker: WorkerId, lease: LeaseId) -> bool {
        self.get(worker)
            .is_some_and(|worker| worker.is_ending_lease(lease))
    }

    /// Records which devices a worker cannot offer at the moment.
    pub(crate) fn set_out_of_service(&mut self, worker: WorkerId, devices: Outages) {
        self.change(worker, |worker| worker.set_out_of_service(devices));
    }

    /// Returns how the devices are used that `accepts` accepts as suitable for `lease`, which waits, and needs
    /// the share of one that `share_of` returns.
    pub(crate) fn suitable(
        &self,
        lease: LeaseId,
        accepts: impl Fn(WorkerId, &DeviceSpec) -> bool,
        share_of: impl Fn(&DeviceSpec) -> Option<Share>,
    ) -> SuitableDevices {
        let mut suitable = SuitableDevices::default();
        for (worker, known) in self.workers() {
            let free_before = suitable.free;
            for (index, _, usage) in known.devices().filter(|(_, it, _)| accepts(worker, it)) {
                let device_ref = DeviceRef { worker, index };
                let is_for_others = !self.is_held_for_none_but(lease, device_ref);
                let is_all_free = usage == Usage::Free && !is_for_others;
                let is_free = is_all_free || self.has_room(lease, device_ref, &share_of);
                let share = self.device(device_ref).and_then(&share_of);
                let left = known.room(index, true, false).zip(share);
                let has_left = left.is_some_and(|(left, share)| left.has_room(share));
                let is_held_back = is_for_others && (usage == Usage::Free || has_left);
                match usage {
                    Usage::Free | Usage::Leased if is_free => suitable.free += 1,
                    Usage::Free | Usage::Leased if is_held_back => {
                        let holders = self.held_back.holders(device_ref);
                        for holder in holders.filter(|holder| *holder != lease) {
                            *suitable.held_back.entry(holder).or_default() += 1;
                        }
                    }
                    Usage::Free | Usage::Leased => {
                        suitable.leased_devices += 1;
                        for by in known.holders(index) {
                            *suitable.leased.entry(by.lease).or_default() += 1;
                        }
                    }
                    Usage::Ending => suitable.ending += 1,
                    Usage::Draining => suitable.draining += 1,
                    Usage::OutOfService => suitable.out_of_service += 1,
                    Usage::Unreachable => suitable.unreachable += 1,
                }
            }
            let free_here = suitable.free - free_before;
            suitable.free_at_one_worker = suitable.free_at_one_worker.max(free_here);
        }
        suitable
    }

    /// Returns whether a worker drains. One that has not joined does not.
    pub(crate) fn is_draining(&self, id: WorkerId) -> bool {
        self.get(id).is_some_and(Worker::is_draining)
    }

    /// Returns the ids of all workers.
    pub(crate) fn ids(&self) -> impl Iterator<Item = WorkerId> {
        self.workers.keys().copied()
    }

    /// Returns the description of a device, if its worker has joined.
    pub(crate) fn device(&self, device_ref: DeviceRef) -> Option<&DeviceSpec> {
        let devices = &self.get(device_ref.worker)?.registration.devices;
        devices.get(device_ref.index as usize)
    }

    /// Returns whether a worker is known, and does not drain.
    pub(crate) fn stays(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some_and(|known| !known.is_draining())
    }

    /// Returns whether anything has happened since [`clear_changed`](Self::clear_changed) that may have
    /// changed the verdict on a demand that was busy.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    pub(crate) fn clear_changed(&mut self) {
        self.changed = false;
    }

    pub(crate) fn leased_device(&self, granted: GrantedDevice) -> Option<LeasedDevice> {
        let GrantedDevice {
            device_ref,
            grant,
            share,
        } = granted;
        let registration = &self.get(device_ref.worker)?.registration;
        Some(LeasedDevice {
            device_ref,
            grant,
            share,
            device: registration.devices.get(device_ref.index as usize)?.clone(),
            worker: registration.endpoint.clone(),
        })
    }

    pub(crate) fn inventory(&self) -> Inventory {
        let offered = self.index.offered().iter();
        let offered = offered.map(|(class, count)| (&**class, count));
        Inventory::new(self.workers.len(), offered)
    }

    pub(crate) fn snapshot(&self) -> Vec<WorkerSnapshot> {
        self.workers()
            .map(|(id, worker)| worker.snapshot(id))
            .collect()
    }
}

#[cfg(test)]
impl Pool {
    /// Returns what ended leases had of a device that have not left it.
    pub(crate) fn ending_shares(&self, device_ref: DeviceRef) -> Vec<Option<DeviceShare>> {
        let worker = self.get(device_ref.worker);
        worker.map_or_else(Vec::new, |it| it.ending_shares(device_ref.index).collect())
    }

    /// Asserts that the index is that of the workers.
    pub(crate) fn check_index(&self) {
        let mut index = WorkerIndex::default();
        for (id, worker) in self.workers() {
            let keys = keys_of(id, worker, &self.held_back);
            index.replace(id, None, Some(&keys));
        }
        assert_eq!(self.index.without_changes(), index.without_changes());
    }
}
