//! When there will be enough devices for a request, as far as that is known.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::device::{Demand, DeviceSpec};
use crate::event::DeviceRef;
use crate::pool::Room;
use crate::time::Timestamp;

/// The devices that a request could get if they were free, as leases leave them one after the other.
struct Leaving<'a> {
    engine: &'a Engine,
    demand: &'a Demand,
    /// Those that are free or will be, or have room for the share that is demanded.
    enough: BTreeSet<DeviceRef>,
    /// Those that leases share, with what is left of them and the number of these leases.
    shared: BTreeMap<DeviceRef, (Room, usize)>,
    /// Those that leases have as a whole.
    leased: BTreeSet<DeviceRef>,
}

impl Engine {
    /// Returns when as many devices as `wanted` will be there for a request, of those that it `may_have`, or a share
    /// of one, if that is known: they are free or being released, or of leases that have passed its reservation or
    /// declare how long they take.
    pub(super) fn enough_at(
        &self,
        request: LeaseId,
        wanted: usize,
        may_have: impl Fn(&DeviceSpec) -> bool,
    ) -> Option<Timestamp> {
        let demand = &self.queue.get(request)?.demand;
        let mut leaving = self.leaving(request, demand, may_have);
        let mut gone = BTreeSet::new();
        for id in self.leases.index().passing(request) {
            gone.insert(id);
            leaving.leave(id);
        }
        if leaving.enough.len() >= wanted {
            return Some(self.now);
        }
        for (at, id) in self.leases.index().time_over() {
            if gone.insert(id) {
                leaving.leave(id);
            }
            if leaving.enough.len() >= wanted {
                return Some(at);
            }
        }
        None
    }

    /// Returns the devices that a request `may_have`, as leases have them now.
    fn leaving<'a>(
        &'a self,
        request: LeaseId,
        demand: &'a Demand,
        may_have: impl Fn(&DeviceSpec) -> bool,
    ) -> Leaving<'a> {
        let usable = self.pool.usable(may_have);
        let mut free: BTreeSet<_> = self.pool.free_or_ending().into_keys().collect();
        let held = self.pool.held_and_coming(request).into_iter();
        free.extend(held.filter(|it| self.pool.is_unused(*it)));
        free.retain(|it| usable.contains(it));
        let mut leaving = Leaving {
            engine: self,
            demand,
            shared: BTreeMap::new(),
            leased: BTreeSet::new(),
            enough: free,
        };
        for device_ref in usable {
            let room = self.pool.room_for(Some(request), device_ref, false);
            if leaving.enough.contains(&device_ref) {
                continue;
            }
            if let Some(room) = room {
                let leases = self.pool.holders_of(device_ref).count();
                leaving.shared.insert(device_ref, (room, leases));
                leaving.count_if_enough(device_ref);
            } else if self.pool.is_held_for_none_but(request, device_ref) {
                leaving.leased.insert(device_ref);
            }
        }
        leaving
    }
}

impl Leaving<'_> {
    /// Has a lease leave its devices.
    fn leave(&mut self, lease: LeaseId) {
        let Some(lease) = self.engine.leases.get(lease) else {
            return;
        };
        for (device_ref, granted) in &lease.lease_devices {
            match (granted.share, self.shared.get_mut(device_ref)) {
                (None, _) => {
                    if self.leased.contains(device_ref) {
                        self.enough.insert(*device_ref);
                    }
                }
                (Some(share), Some((room, leases))) => {
                    room.add(share.into());
                    *leases = leases.saturating_sub(1);
                    self.count_if_enough(*device_ref);
                }
                (Some(_), None) => {}
            }
        }
    }

    /// Counts a device that leases share if enough of it is left.
    fn count_if_enough(&mut self, device_ref: DeviceRef) {
        let known = self.shared.get(&device_ref);
        let device = self.engine.pool.device(device_ref);
        let is_enough = known.zip(device).is_some_and(|((room, leases), device)| {
            match self.demand.share_of(device) {
                Some(share) => room.has_room(share),
                // Something may be held back for others.
                None => *leases == 0 && *room == Room::of(device),
            }
        });
        if is_enough {
            self.enough.insert(device_ref);
        }
    }
}
