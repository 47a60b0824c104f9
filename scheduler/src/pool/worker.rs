//! The pool's record of one worker: what it offers, whether it is connected, and which of
//! its devices are leased.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{LeaseId, StoreId, WorkerId};
use tensord_proto::share::{DeviceShare, MAX_LANES, lane};

use super::ending::{Ending, EndingLeases};
use super::held_back::Held;
use super::index::{ClassCounts, DeviceClass, GroupKey, WorkerKeys};
use super::room::Room;
use crate::device::DeviceSpec;
use crate::event::{
    DeviceGrant, DeviceRef, Endpoint, GrantedDevice, Outages, Registration, StreamId,
};
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
    /// The leases that have each device, or a share of it, by device index.
    holders: Vec<Vec<Holder>>,
    /// The known grants of each device, by device index.
    pub(super) grants: Vec<Grants>,
    ending: EndingLeases,
    /// The devices that the worker cannot offer at the moment.
    out_of_service: Outages,
    /// The class of each device, by device index.
    classes: Vec<DeviceClass>,
    /// The number of parts of leases whose snapshots the worker keeps.
    pub(super) kept: usize,
}

/// A lease that has a device, or a share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) lease: LeaseId,
    pub(super) share: Option<DeviceShare>,
}

/// The known grants of a device.
#[derive(Clone, Default)]
pub(super) struct Grants {
    /// The highest number that the engine assigned or the worker reported.
    latest: GrantNumber,
    /// For each lane, the latest grant known to have ended; all earlier ones of the lane have ended, too.
    ended: BTreeMap<u32, GrantNumber>,
}

impl Grants {
    pub(super) fn latest(&self) -> GrantNumber {
        self.latest
    }

    /// Records that a grant exists or existed.
    pub(super) fn record(&mut self, grant: GrantNumber) {
        self.latest = self.latest.max(grant);
    }

    /// Records that the grants of a lane up to this one have ended.
    pub(super) fn record_ended(&mut self, lane: u32, grant: GrantNumber) {
        self.record(grant);
        let ended = self.ended.entry(lane).or_default();
        *ended = grant.max(*ended);
    }

    /// Returns whether a grant of a lane is later than all that are known to have ended and exclude it: those of
    /// the lane and of the whole device, and for the whole device those of all lanes.
    pub(super) fn may_be_valid(&self, lane: u32, grant: GrantNumber) -> bool {
        let excluding = self.ended.iter();
        let mut excluding = excluding.filter(|(of, _)| lane == 0 || [0, lane].contains(of));
        grant > GrantNumber::ZERO && excluding.all(|(_, ended)| grant > *ended)
    }

    /// Returns whether the device can be granted again: its worker has not reported the highest possible
    /// number.
    fn can_rise(&self) -> bool {
        self.latest.next().is_some()
    }
}

/// Returns whether two leases with these shares of a device, or all of it, exclude each other.
pub(super) fn excludes(one: Option<DeviceShare>, other: Option<DeviceShare>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.lane == other.lane,
        _ => true,
    }
}

/// How a device is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usage {
    /// A new lease may get it.
    Free,
    /// A lease has it, or some have shares of it.
    Leased,
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
            holders: vec![Vec::new(); registration.devices.len()],
            grants: vec![Grants::default(); registration.devices.len()],
            ending: EndingLeases::default(),
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
        let holders = self.holders.iter().flatten();
        holders.map(|holder| holder.lease).collect()
    }

    /// Returns the class of a device.
    pub(super) fn class(&self, index: u32) -> Option<&DeviceClass> {
        self.classes.get(index as usize)
    }

    /// Returns the leases that have a device, or a share of it.
    pub(super) fn holders(&self, index: u32) -> &[Holder] {
        let holders = self.holders.get(index as usize);
        holders.map_or(&[], Vec::as_slice)
    }

    /// Returns the lease of each device, or of each share of it.
    pub(super) fn all_leases(&self) -> impl Iterator<Item = LeaseId> {
        self.holders.iter().flatten().map(|holder| holder.lease)
    }

    /// Takes a device, or a share of it, for a lease and returns whether that succeeded. Taking it again for
    /// the same lease changes nothing. Fails if another lease has the device or the lane, if the worker
    /// has not released it from an ended lease, if too little of the device is left, or if it does not exist.
    ///
    /// A grant later than those of the ended leases proves that the device had been
    /// released from them when it was granted. Such a grant comes from before a restart.
    pub(super) fn take(&mut self, lease: LeaseId, granted: GrantedDevice) -> bool {
        let GrantedDevice {
            device_ref: DeviceRef { index, .. },
            grant,
            share,
        } = granted;
        let known = self.holders(index);
        if let Some(holder) = known.iter().find(|holder| holder.lease == lease) {
            return holder.share == share;
        }
        let is_excluded = known.iter().any(|holder| excludes(holder.share, share));
        let is_settled = self
            .ending
            .on_device(index)
            .all(|(_, ending)| !excludes(ending.share, share) || ending.grant < grant);
        let is_enough = share.is_none_or(|share| {
            let left = self.left_of(index, false);
            left.is_some_and(|left| left.has_room(share.into()))
        });
        let holders = self.holders.get_mut(index as usize);
        let holders = holders.filter(|_| !is_excluded && is_settled && is_enough);
        holders
            .map(|holders| holders.push(Holder { lease, share }))
            .is_some()
    }

    /// Returns what is left of a device beside its leases, and beside the ended ones that have not left it if
    /// `with_ending`; `None` if one of these has all of it, or it does not exist.
    pub(super) fn left_of(&self, index: u32, with_ending: bool) -> Option<Room> {
        let device = self.registration.devices.get(index as usize)?;
        let ending = with_ending.then(|| self.ending_shares(index));
        let ending = ending.into_iter().flatten();
        let holders = self.holders(index).iter().map(|holder| holder.share);
        let mut left = Room::of(device);
        for share in holders.chain(ending) {
            left.subtract(share?.into());
        }
        Some(left)
    }

    /// Returns what is left of a device that others have shares of, or of which shares are held back: now, or once
    /// it is released by ended leases.
    pub(super) fn room(&self, index: u32, is_now: bool, is_partly_held: bool) -> Option<Room> {
        let is_shared = match self.usage(index) {
            Usage::Leased => true,
            Usage::Free => is_partly_held,
            Usage::Ending => is_partly_held && !is_now,
            Usage::Draining | Usage::OutOfService | Usage::Unreachable => false,
        };
        let is_shared = is_shared && self.stream.is_some();
        let left = is_shared.then(|| self.left_of(index, is_now));
        left.flatten()
    }

    /// Returns the first lane of a device that no lease has, nor an ended one that has not left it; the whole
    /// device's if there is none.
    pub(super) fn free_lane(&self, index: u32) -> u32 {
        let ending = self.ending_shares(index);
        let holders = self.holders(index).iter().map(|holder| holder.share);
        let taken: BTreeSet<_> = holders.chain(ending).map(lane).collect();
        (1..=MAX_LANES)
            .find(|lane| !taken.contains(lane))
            .unwrap_or_default()
    }

    /// Takes the devices granted by `grants` from `lease`. No lease gets them before they
    /// are released.
    pub(super) fn end(&mut self, lease: LeaseId, grants: &[DeviceGrant]) {
        for &DeviceGrant { index, grant, .. } in grants {
            let Some(holders) = self.holders.get_mut(index as usize) else {
                continue;
            };
            for Holder { share, .. } in holders.extract_if(.., |holder| holder.lease == lease) {
                self.ending.insert(index, lease, Ending { grant, share });
            }
        }
    }

    /// Records that a grant of a device, and all earlier ones of the lane, have ended.
    pub(super) fn record_ended(&mut self, ended: DeviceGrant) {
        let DeviceGrant { index, lane, grant } = ended;
        if let Some(grants) = self.grants.get_mut(index as usize)
            && lane <= MAX_LANES
        {
            grants.record_ended(lane, grant);
        }
    }

    /// Records the worker's report that an ended lease still uses a device.
    pub(super) fn record_ending(&mut self, lease: LeaseId, granted: GrantedDevice) {
        let GrantedDevice {
            device_ref: DeviceRef { index, .. },
            grant,
            share,
        } = granted;
        if (index as usize) < self.holders.len() {
            let ending = Ending { grant, share };
            self.ending.insert_reported(index, lease, ending);
        }
    }

    /// Marks the devices that `lease` had as released, except the `busy` ones, and returns
    /// whether any was released.
    pub(super) fn release(&mut self, lease: LeaseId, busy: &BTreeSet<u32>) -> bool {
        self.ending.release(lease, busy)
    }

    /// Returns the ended leases with devices that are not released yet, each with the
    /// grants of these devices.
    pub(super) fn ending(&self) -> BTreeMap<LeaseId, Vec<DeviceGrant>> {
        self.ending.by_lease()
    }

    /// Returns whether a device has not been released from this ended lease.
    pub(super) fn is_ending_lease(&self, lease: LeaseId) -> bool {
        self.ending.contains(lease)
    }

    fn is_ending(&self, index: u32) -> bool {
        self.ending.on_device(index).next().is_some()
    }

    /// Returns what ended leases had of a device that have not left it.
    pub(super) fn ending_shares(&self, index: u32) -> impl Iterator<Item = Option<DeviceShare>> {
        let on_device = self.ending.on_device(index);
        on_device.map(|(_, ending)| ending.share)
    }

    /// Records which devices the worker cannot offer, and returns whether they differ from
    /// the previous ones.
    pub(super) fn set_out_of_service(&mut self, devices: Outages) -> bool {
        let before = mem::replace(&mut self.out_of_service, devices);
        before != self.out_of_service
    }

    /// Returns the keys of the worker in the index; `held_back` returns what is held back of the device with an
    /// index.
    pub(super) fn keys(&self, held_back: impl Fn(u32) -> Held) -> WorkerKeys {
        let (mut offered, mut free) = (ClassCounts::default(), ClassCounts::default());
        let mut rooms = Vec::new();
        let (mut has_unused, mut has_shared) = (false, false);
        for (index, class) in (0..).zip(&self.classes) {
            if self.is_offered(index) {
                offered.add(class, 1);
            }
            let (held, usage) = (held_back(index), self.usage(index));
            if usage == Usage::Free && held.is_nothing() {
                free.add(class, 1);
            }
            has_unused |= matches!(usage, Usage::Free | Usage::Ending);
            let is_shared = self.room(index, false, !held.is_nothing()).is_some();
            has_shared |= is_shared;
            // Less is left now than once ended leases have left the device.
            let room = is_shared.then(|| self.room(index, true, !held.is_nothing()));
            let room = room.flatten();
            let room = room.and_then(|room| held.left_of(room));
            let room = room.filter(|room| !room.is_empty());
            rooms.extend(room.map(|room| (class.clone(), room, index)));
        }
        let group = GroupKey {
            offered,
            free,
            is_connected: self.stream.is_some(),
            is_draining: self.is_draining(),
        };
        WorkerKeys {
            group,
            rooms,
            has_unused,
            has_shared,
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

    pub(super) fn usage(&self, index: u32) -> Usage {
        let at = index as usize;
        let can_be_granted = self.grants.get(at).is_some_and(Grants::can_rise);
        let is_out_of_service = self.out_of_service.contains_key(&index) || !can_be_granted;
        match self.holders(index).is_empty() {
            // The end of a lease does not make such a device free.
            _ if self.is_draining() => Usage::Draining,
            _ if is_out_of_service => Usage::OutOfService,
            false => Usage::Leased,
            true if self.is_ending(index) => Usage::Ending,
            // The worker may be dead.
            true if self.stream.is_none() => Usage::Unreachable,
            true => Usage::Free,
        }
    }

    pub(super) fn snapshot(&self, worker: WorkerId) -> WorkerSnapshot {
        let Registration {
            endpoint, devices, ..
        } = &self.registration;
        let device =
            |(index, (device, holders)): (u32, (&DeviceSpec, &Vec<Holder>))| DeviceSnapshot {
                device: device.clone(),
                leases: holders.iter().map(|it| (it.lease, it.share)).collect(),
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
                .zip(devices.iter().zip(&self.holders))
                .map(device)
                .collect(),
        }
    }
}
