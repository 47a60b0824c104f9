//! The devices that are free or will be, for requests that count on them in turn.

use std::collections::{BTreeMap, BTreeSet};

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

    /// Takes the share of a device that is demanded, if one of those that a request `may_have` has room for it
    /// beside other leases. Returns the device.
    pub(super) fn take_room(
        &mut self,
        pool: &Pool,
        demand: &Demand,
        may_have: &BTreeSet<DeviceRef>,
    ) -> Option<DeviceRef> {
        demand.share_permille?;
        let mut rooms = self.rooms.iter_mut();
        rooms.find_map(|(device_ref, room)| {
            let share = demand.share_of(pool.device(*device_ref)?)?;
            let is_enough = may_have.contains(device_ref) && room.has_room(share);
            is_enough.then(|| {
                room.subtract(share);
                *device_ref
            })
        })
    }

    /// Takes devices for a demand. What it leaves of them is for others.
    pub(super) fn take(&mut self, pool: &Pool, demand: &Demand, devices: &[DeviceRef]) {
        for device_ref in devices {
            self.devices.remove(device_ref);
            let device = pool.device(*device_ref);
            let share = device.and_then(|device| Some((device, demand.share_of(device)?)));
            if let Some((device, share)) = share {
                let room = pool.coming_room(*device_ref);
                let mut room = room.unwrap_or_else(|| Room::of(device));
                room.subtract(share);
                self.rooms.insert(*device_ref, room);
            }
        }
    }

    /// Leaves out what could be had of devices beside the leases that share them.
    pub(super) fn leave_out(&mut self, shared: &[DeviceRef]) {
        self.rooms
            .retain(|device_ref, _| !shared.contains(device_ref));
    }

    /// Adds devices that will be free.
    pub(super) fn add(&mut self, devices: impl IntoIterator<Item = DeviceRef>) {
        let devices = devices.into_iter().map(|device_ref| (device_ref, false));
        self.devices.extend(devices);
    }
}

/// Returns few of these shares of one device, of which `room` is left, that make room for a share of it: of single
/// ones that are enough the smallest, of these the first; or else large ones, without those that turn out not to
/// be needed. `None` if all together are not enough.
pub(super) fn few_shares<T>(
    room: Room,
    mut shares: Vec<(Share, T)>,
    needed: Share,
) -> Option<Vec<T>> {
    let is_enough = |shares: &[(Share, T)]| {
        let mut room = room;
        shares.iter().for_each(|(share, _)| room.add(*share));
        room.has_room(needed)
    };
    // The order among equals stays.
    shares.sort_by_key(|(share, _)| *share);
    let single = shares.chunks(1).position(&is_enough);
    if let Some(single) = single {
        return Some(vec![shares.swap_remove(single).1]);
    }
    if !is_enough(&shares) {
        return None;
    }
    let mut at = 0;
    while at < shares.len() {
        let spared = shares.remove(at);
        if !is_enough(&shares) {
            shares.insert(at, spared);
            at += 1;
        }
    }
    Some(shares.into_iter().map(|(_, of)| of).collect())
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
