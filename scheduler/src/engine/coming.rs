//! The devices that are free or will be, for requests that count on them in turn.

use std::collections::BTreeMap;

use tensord_proto::ids::LeaseId;

use super::holds::MayHave;
use super::victims::Victim;
use crate::device::{Demand, Share};
use crate::event::DeviceRef;
use crate::pool::{Pool, Room};

/// The devices that are free and not held back, or will be free once ended leases have left them, and what leases
/// could get of devices that others have shares of.
#[derive(Default)]
pub(super) struct Coming {
    /// The devices, each with whether it is free now.
    pub(super) devices: BTreeMap<DeviceRef, bool>,
    rooms: BTreeMap<DeviceRef, Room>,
}

impl Coming {
    /// Returns what is coming for requests with these demands.
    pub(super) fn of<'a>(pool: &Pool, demands: impl IntoIterator<Item = &'a Demand>) -> Self {
        let mut demands = demands.into_iter();
        let has_share = demands.any(|demand| demand.share_permille.is_some());
        Self {
            devices: pool.free_or_ending(),
            rooms: match has_share {
                true => pool.coming_rooms(),
                false => BTreeMap::new(),
            },
        }
    }

    /// Returns the devices that meet a demand, of those that a request `may_have`, as far as there are enough: the
    /// `preferred` ones first. A share is one of a device that others share, if one has room for it.
    pub(super) fn choose(
        &self,
        pool: &Pool,
        demand: &Demand,
        may_have: &MayHave,
        preferred: &[DeviceRef],
    ) -> Vec<DeviceRef> {
        let shared = preferred.iter().chain(self.rooms.keys());
        let shared =
            shared.filter(|it| self.has_room(pool, demand, it) && may_have.contains(pool, **it));
        if let Some(shared) = shared.copied().next() {
            return vec![shared];
        }
        let first = preferred.iter().filter(|it| self.devices.contains_key(it));
        let others = self.devices.keys().filter(|it| !preferred.contains(it));
        let all = first
            .chain(others)
            .filter(|it| may_have.contains(pool, **it));
        all.copied().take(demand.devices as usize).collect()
    }

    /// Returns whether a device that leases share has room for the share that is demanded.
    fn has_room(&self, pool: &Pool, demand: &Demand, device_ref: &DeviceRef) -> bool {
        let room = self.rooms.get(device_ref);
        let share = pool.device(*device_ref).and_then(|it| demand.share_of(it));
        room.zip(share)
            .is_some_and(|(room, share)| room.has_room(share))
    }

    /// Returns what will be left of a device that leases share.
    pub(super) fn room(&self, device_ref: DeviceRef) -> Option<Room> {
        self.rooms.get(&device_ref).copied()
    }

    /// Takes the share of a device that is demanded, if one of those that a request `may_have` has room for it
    /// beside other leases. Returns whether that is so.
    pub(super) fn take_room(&mut self, pool: &Pool, demand: &Demand, may_have: &MayHave) -> bool {
        let chosen = self.choose(pool, demand, may_have, &[]);
        let mut shared = chosen.iter().filter(|it| self.rooms.contains_key(it));
        let has_room = shared.next().is_some();
        if has_room {
            self.take(pool, demand, &chosen);
        }
        has_room
    }

    /// Takes devices for a demand. What it leaves of them is for others.
    pub(super) fn take(&mut self, pool: &Pool, demand: &Demand, devices: &[DeviceRef]) {
        for device_ref in devices {
            self.devices.remove(device_ref);
            let device = pool.device(*device_ref);
            let share = device.and_then(|device| Some((device, demand.share_of(device)?)));
            if let Some((device, share)) = share {
                let room = self.rooms.entry(*device_ref);
                let room = room.or_insert_with(|| Room::of(device));
                room.subtract(share);
            }
        }
    }

    /// Adds the shares that are held back for requests and leases that are to count on them in turn: what is held back
    /// for a later one does not reduce the room of an earlier one.
    pub(super) fn add_held_shares(&mut self, pool: &Pool, requests: impl Iterator<Item = LeaseId>) {
        for (device_ref, share) in requests.flat_map(|request| pool.holds_of(request)) {
            if let (Some(share), Some(room)) = (share, self.rooms.get_mut(&device_ref)) {
                room.add(share);
            }
        }
    }

    /// Adds the devices that are held back for a request, for this request itself.
    pub(super) fn add_held_devices(&mut self, pool: &Pool, request: LeaseId) {
        let held = pool.holds_of(request).into_iter();
        let held = held.filter(|(it, share)| share.is_none() && pool.is_unused(*it));
        self.add(held.map(|(device_ref, _)| device_ref));
    }

    /// Takes away what is held back for a request, as it keeps that.
    pub(super) fn remove_held(&mut self, pool: &Pool, request: LeaseId) {
        for (device_ref, share) in pool.holds_of(request) {
            let room = self.rooms.get_mut(&device_ref);
            match (share, room) {
                (Some(share), Some(room)) => room.subtract(share),
                (None, _) => drop(self.devices.remove(&device_ref)),
                (Some(_), None) => {}
            }
        }
    }

    /// Adds what leases leave that make room for a demand.
    pub(super) fn add_freed(&mut self, demand: &Demand, victim: &Victim) {
        match victim.shared().filter(|_| demand.share_permille.is_some()) {
            Some(shared) => {
                if let Some(room) = self.rooms.get_mut(&shared) {
                    victim.shares().for_each(|share| room.add(share));
                }
            }
            None => {
                // All leases leave a device that is needed as a whole.
                for device_ref in victim.devices() {
                    self.rooms.remove(&device_ref);
                }
                self.add(victim.devices());
            }
        }
    }

    /// Leaves only what is also in `other`.
    pub(super) fn retain_common(&mut self, other: &Self) {
        self.devices.retain(|it, _| other.devices.contains_key(it));
        self.rooms.retain(|device_ref, room| {
            let common = other.rooms.get(device_ref).map(|other| room.least(*other));
            *room = common.unwrap_or(*room);
            common.is_some()
        });
    }

    /// Adds devices that will be free.
    fn add(&mut self, devices: impl IntoIterator<Item = DeviceRef>) {
        let devices = devices.into_iter().map(|device_ref| (device_ref, false));
        self.devices.extend(devices);
    }
}

/// Returns few of these shares of one device, of which `room` is left, that make room for a share of it, as [`few`]
/// does: the smallest single one.
pub(super) fn few_shares<T>(
    room: Room,
    mut shares: Vec<(Share, T)>,
    needed: Share,
) -> Option<Vec<T>> {
    // The order among equals stays.
    shares.sort_by_key(|(share, _)| *share);
    let chosen = few(shares, |shares| {
        let mut room = room;
        shares.iter().for_each(|(share, _)| room.add(*share));
        room.has_room(needed)
    });
    Some(chosen?.into_iter().map(|(_, of)| of).collect())
}

/// Returns few of these items that are enough together: the first that is enough alone; or else all without those
/// that turn out not to be needed, the first first. `None` if all together are not enough.
pub(super) fn few<T>(mut items: Vec<T>, is_enough: impl Fn(&[T]) -> bool) -> Option<Vec<T>> {
    let single = items.chunks(1).position(&is_enough);
    if let Some(single) = single {
        return Some(vec![items.swap_remove(single)]);
    }
    if !is_enough(&items) {
        return None;
    }
    let mut at = 0;
    while at < items.len() {
        let spared = items.remove(at);
        if !is_enough(&items) {
            items.insert(at, spared);
            at += 1;
        }
    }
    Some(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::cuda;

    /// Asserts which of these shares of a device of 100 GiB make room: their thousandths and GiB, and what is
    /// needed.
    #[track_caller]
    fn check(shares: &[(u32, u64)], needed: (u32, u64), expected: Option<&[usize]>) {
        let share = |(permille, gib): (u32, u64)| Share {
            permille,
            memory_bytes: gib << 30,
        };
        let mut room = Room::of(&cuda(100));
        shares.iter().for_each(|it| room.subtract(share(*it)));
        let shares = shares.iter().enumerate().map(|(at, it)| (share(*it), at));
        let chosen = few_shares(room, shares.collect(), share(needed));
        let chosen = chosen.map(|mut chosen| {
            chosen.sort_unstable();
            chosen
        });
        assert_eq!(chosen.as_deref(), expected);
    }

    #[test]
    fn the_smallest_share_that_is_enough_makes_room() {
        check(&[(600, 10), (400, 10)], (100, 1), Some(&[1]));
        check(&[(600, 10), (400, 10)], (500, 1), Some(&[0]));
        check(&[(300, 10), (300, 10), (400, 10)], (300, 1), Some(&[0]));
    }

    #[test]
    fn no_share_ends_in_vain() {
        // Memory is what lacks.
        check(&[(400, 1), (100, 60), (100, 30)], (100, 50), Some(&[1]));
        check(&[(100, 10), (400, 10), (500, 10)], (900, 10), Some(&[1, 2]));
        check(&[(500, 50), (500, 50)], (900, 90), Some(&[0, 1]));
        check(&[(500, 50)], (900, 101), None);
    }
}
