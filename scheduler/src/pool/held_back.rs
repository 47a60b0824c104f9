//! The devices that are held back for leases and requests: free devices for those that need more than these, and
//! shares of devices that others share, or of which shares are held back for others.
//!
//! More can be held back of a device that leases share than is left of it, if some of these are to make room. What
//! is held back later than for a lease does not reduce the room of this one, as what comes later counts on leases that
//! make room.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::{Pool, Room};
use crate::by_key;
use crate::device::{DeviceSpec, Share};
use crate::event::DeviceRef;

/// What is held back of each device: for one lease, or the request that is to become it, all of the device, `None`,
/// or for several a share each, in the order in which they came.
pub(crate) type Holds = BTreeMap<DeviceRef, Vec<(LeaseId, Option<Share>)>>;

/// What is held back of devices.
#[derive(Debug, Default)]
pub(super) struct HeldBack {
    by_device: Holds,
    by_lease: BTreeMap<LeaseId, BTreeSet<DeviceRef>>,
}

/// What is held back of a device for others.
pub(super) enum Held {
    Nothing,
    Shares(Vec<Share>),
    Whole,
}

impl Held {
    fn of<'a>(held: impl Iterator<Item = &'a (LeaseId, Option<Share>)>) -> Self {
        let shares: Option<Vec<_>> = held.map(|(_, share)| *share).collect();
        match shares {
            Some(shares) if shares.is_empty() => Self::Nothing,
            Some(shares) => Self::Shares(shares),
            None => Self::Whole,
        }
    }

    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    /// Returns what it leaves of a room, if that may be something.
    pub(super) fn left_of(&self, mut room: Room) -> Option<Room> {
        match self {
            Self::Nothing => Some(room),
            Self::Shares(shares) => {
                shares.iter().for_each(|share| room.subtract(*share));
                Some(room)
            }
            Self::Whole => None,
        }
    }
}

impl HeldBack {
    /// Returns what is held back of a device for others than this lease, or for any.
    pub(super) fn for_others(&self, device_ref: DeviceRef, lease: Option<LeaseId>) -> Held {
        let held = self.by_device.get(&device_ref).into_iter().flatten();
        Held::of(held.filter(|(holder, _)| Some(*holder) != lease))
    }

    /// Returns what is held back of a device for others that come before this lease; for all if nothing is held back
    /// for this one.
    fn before(&self, device_ref: DeviceRef, lease: Option<LeaseId>) -> Held {
        let held = self.by_device.get(&device_ref).into_iter().flatten();
        Held::of(held.take_while(|(holder, _)| Some(*holder) != lease))
    }

    /// Returns the leases for which something of a device is held back.
    pub(super) fn holders(&self, device_ref: DeviceRef) -> impl Iterator<Item = LeaseId> {
        let held = self.by_device.get(&device_ref).into_iter().flatten();
        held.map(|(lease, _)| *lease)
    }

    /// Holds nothing of a device back for a lease any more. Returns whether something was.
    pub(super) fn remove(&mut self, device_ref: DeviceRef, lease: LeaseId) -> bool {
        let held = self.by_device.get_mut(&device_ref);
        let was_held =
            held.is_some_and(|held| held.extract_if(.., |(of, _)| *of == lease).count() > 0);
        if self.by_device.get(&device_ref).is_some_and(Vec::is_empty) {
            self.by_device.remove(&device_ref);
        }
        by_key::remove(&mut self.by_lease, &lease, &device_ref);
        was_held
    }

    fn insert(&mut self, device_ref: DeviceRef, lease: LeaseId, share: Option<Share>) {
        let held = self.by_device.entry(device_ref).or_default();
        match held.iter_mut().find(|(of, _)| *of == lease) {
            Some((_, known)) => *known = share,
            None => held.push((lease, share)),
        }
        by_key::insert(&mut self.by_lease, lease, device_ref);
    }
}

impl Pool {
    /// Removes and returns what is held back. [`hold_back`](Self::hold_back) and then
    /// [`compare_held_back`](Self::compare_held_back) must follow.
    pub(crate) fn take_held_back(&mut self) -> Holds {
        let taken = mem::take(&mut self.held_back).by_device;
        self.refresh(taken.keys().map(|device_ref| device_ref.worker).collect());
        taken
    }

    /// Holds back devices for a lease, or of each the share that `share_of` returns. Nothing of them is held back
    /// for others, unless all hold shares.
    pub(crate) fn hold_back(
        &mut self,
        lease: LeaseId,
        devices: Vec<DeviceRef>,
        share_of: impl Fn(&DeviceSpec) -> Option<Share>,
    ) {
        for device_ref in &devices {
            let share = self.device(*device_ref).and_then(&share_of);
            self.held_back.insert(*device_ref, lease, share);
        }
        self.refresh(devices.iter().map(|it| it.worker).collect());
    }

    /// Holds no devices back for these leases any more. Returns whether some were.
    pub(crate) fn drop_held_back(&mut self, leases: &BTreeSet<LeaseId>) -> bool {
        let mut workers = BTreeSet::new();
        for lease in leases {
            for device_ref in self.held_back_for(*lease) {
                self.held_back.remove(device_ref, *lease);
                workers.insert(device_ref.worker);
            }
        }
        let were_some = !workers.is_empty();
        self.refresh(workers);
        were_some
    }

    /// Holds no devices back any more for leases that need none. Demands may then fit that did not. Returns
    /// whether some were.
    pub(crate) fn give_up_held_back(&mut self, leases: &BTreeSet<LeaseId>) -> bool {
        let were_some = self.drop_held_back(leases);
        self.changed |= were_some;
        self.has_new_room |= were_some;
        were_some
    }

    /// Returns whether nothing of a device is held back for others than this lease.
    pub(crate) fn is_held_for_none_but(&self, lease: LeaseId, device_ref: DeviceRef) -> bool {
        let held = self.held_back.for_others(device_ref, Some(lease));
        held.is_nothing()
    }

    /// Returns the leases for which devices are held back.
    pub(crate) fn holders(&self) -> impl Iterator<Item = LeaseId> {
        self.held_back.by_lease.keys().copied()
    }

    /// Returns whether something is held back for a lease.
    pub(crate) fn is_held_back_for(&self, lease: LeaseId) -> bool {
        self.held_back.by_lease.contains_key(&lease)
    }

    /// Returns the devices that are held back for a lease, or shares of them.
    pub(crate) fn held_back_for(&self, lease: LeaseId) -> Vec<DeviceRef> {
        let held_back = self.held_back.by_lease.get(&lease);
        held_back.into_iter().flatten().copied().collect()
    }

    /// Returns the devices that are held back for a lease, with the share of each that is; `None` for all of it.
    pub(crate) fn holds_of(&self, lease: LeaseId) -> Vec<(DeviceRef, Option<Share>)> {
        let devices = self.held_back_for(lease).into_iter();
        let holds = devices.filter_map(|device_ref| {
            let mut held = self.held_back.by_device.get(&device_ref)?.iter();
            let (_, share) = held.find(|(of, _)| *of == lease)?;
            Some((device_ref, *share))
        });
        holds.collect()
    }

    /// Returns the devices that are held back for a lease and that it can have once ended leases have left them:
    /// not those whose leases have yet to make room.
    pub(crate) fn held_and_coming(&self, lease: LeaseId) -> Vec<DeviceRef> {
        let holds = self.holds_of(lease).into_iter();
        let coming = holds.filter(|(device_ref, share)| {
            let room = self.room_for(Some(lease), *device_ref, false);
            match room.zip(*share) {
                Some((room, share)) => room.has_room(share),
                None => self.is_unused(*device_ref),
            }
        });
        coming.map(|(device_ref, _)| device_ref).collect()
    }

    /// Returns what a lease, or else one for which nothing is held back, could get of a device that others share, or
    /// of which shares are held back for others: now, or once ended leases have left it. What is held back later than
    /// for this lease does not count.
    pub(crate) fn room_for(
        &self,
        lease: Option<LeaseId>,
        device_ref: DeviceRef,
        is_now: bool,
    ) -> Option<Room> {
        let for_others = self.held_back.for_others(device_ref, lease);
        let worker = self.get(device_ref.worker)?;
        let room = worker.room(device_ref.index, is_now, !for_others.is_nothing())?;
        self.held_back.before(device_ref, lease).left_of(room)
    }

    /// Records whether something else is held back than `before`: demands may then fit that did not.
    pub(crate) fn compare_held_back(&mut self, before: &Holds) {
        self.changed |= self.held_back.by_device != *before;
    }

    /// Updates the index for workers whose devices are held back, or are not any more.
    fn refresh(&mut self, workers: BTreeSet<WorkerId>) {
        for worker in workers {
            drop(self.worker_mut(worker));
        }
    }
}

#[cfg(test)]
impl Pool {
    pub(crate) fn held_back(&self) -> &Holds {
        &self.held_back.by_device
    }
}
