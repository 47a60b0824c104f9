//! Spot leases that give their devices to leases that wait: to lost, interrupted, resumed and reclaimed ones.
//!
//! A lease goes on at workers that have its snapshots, or can get them, and needs all devices of a part at one of
//! these. So room is made for each part at one worker: the one that has enough devices first, with those of spot
//! leases that have run for long enough by then, and of these the one that lacks the fewest; at a later one if another
//! part needs that worker (`assignment.rs`). The free devices there are held back, so that the lease gets them although
//! others leave theirs later.
//!
//! Such a lease does not take the devices of other leases: these are leases, too, and had them before.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::assignment::assign;
use super::coming::Coming;
use super::holds::{Entitled, Entitlement, Expected, MayHave};
use super::possible_victims::{MakesRoom, Need, PossibleVictims};
use super::waiting::WaitingPart;
use crate::device::{Demand, DeviceSpec};
use crate::event::DeviceRef;
use crate::lease::Standing;
use crate::time::Timestamp;

/// A part of a lease that waits, and the devices that it could get at each worker.
pub(super) struct PartInNeed {
    pub(super) entitled: Entitled,
    places: BTreeMap<WorkerId, MayHave>,
}

/// Where a part of a lease will have enough devices first.
pub(super) struct FirstPlace<'a> {
    pub(super) entitled: &'a Entitled,
    /// The devices that it could get there.
    pub(super) devices: &'a MayHave,
    /// From when on spot leases could make room there.
    pub(super) at: Timestamp,
}

impl Engine {
    /// Returns the leases that wait and for which spot leases make room, in the order in which they get devices:
    /// those before all requests, and those after requests within guarantees.
    pub(super) fn leases_before_spot(&self) -> (Vec<LeaseId>, Vec<LeaseId>) {
        let waiting = match self.leases.index().has_spot() {
            true => self.leases_without_devices(),
            false => Vec::new(),
        };
        let waiting = waiting.into_iter().filter(|id| self.is_before_spot(*id));
        waiting.partition(|id| !self.comes_after_guaranteed(*id))
    }

    /// Returns whether spot leases make room for a lease: it waits for devices, could go on once there are some, and
    /// is no spot lease itself.
    fn is_before_spot(&self, id: LeaseId) -> bool {
        let Some(lease) = self.leases.get(id) else {
            return false;
        };
        let waits = match lease.standing {
            Standing::Lost(_) | Standing::Resuming { .. } => true,
            Standing::Running | Standing::Suspended { .. } => false,
        };
        let can_go_on = self.attached_owner(id).is_some() && !self.has_old_process(id, lease);
        waits && can_go_on && !lease.is_spot && !self.is_over_limit(id)
    }

    /// Returns what the parts of a lease need which waits.
    pub(super) fn parts_in_need(&self, id: LeaseId) -> Vec<PartInNeed> {
        let Some(lease) = self.leases.get(id) else {
            return Vec::new();
        };
        let parts = (0..).zip(self.parts_that_wait(id, lease));
        let parts = parts.filter_map(|(index, part)| {
            let share = part.requirement.share;
            let demand = Demand {
                devices: u32::try_from(part.devices).ok()?,
                kind: None,
                memory_bytes: share.map_or(0, |share| share.memory_bytes),
                share_permille: share.map(|share| share.permille),
                durability: lease.durability,
                recover_within: None,
                max_duration: None,
                is_spot: false,
                may_end: false,
            };
            let entitled = Entitled {
                lease: id,
                tenant: lease.tenant.clone()?,
                demand,
                by: Entitlement::Spot,
            };
            let places = self.places_of(id, lease.receiver(index), &part);
            Some(PartInNeed { entitled, places })
        });
        parts.collect()
    }

    /// Returns the devices that a part of a lease could get at each worker, of which one may get its snapshots
    /// already.
    fn places_of(
        &self,
        id: LeaseId,
        receiver: Option<WorkerId>,
        part: &WaitingPart<'_>,
    ) -> BTreeMap<WorkerId, MayHave> {
        let accepts = |device: &DeviceSpec| part.requirement.accepts(device);
        let mut places = BTreeMap::<WorkerId, BTreeSet<DeviceRef>>::new();
        for device_ref in self.pool.usable(accepts) {
            let here = places.entry(device_ref.worker).or_default();
            here.insert(device_ref);
        }
        places.retain(|worker, _| {
            let has_snapshots = part.with_snapshots.contains(worker);
            let has_place = has_snapshots || receiver == Some(*worker) || self.has_room(*worker);
            // It may go on where it was, once the worker has released it.
            let is_possible = has_snapshots || !self.pool.is_ending(*worker, id);
            (part.can_run_at)(*worker) && has_place && is_possible
        });
        let places = places.into_iter();
        places
            .map(|(worker, devices)| (worker, MayHave::Devices(devices)))
            .collect()
    }

    /// Returns the devices at which the parts of a lease will have enough first, each at a worker of its own; `None`
    /// if the spot leases that are expected to make room are not enough.
    pub(super) fn first_places<'a>(
        &self,
        parts: &'a [PartInNeed],
        expected: &Expected,
    ) -> Option<Vec<FirstPlace<'a>>> {
        let possible = parts.iter().map(|part| {
            let places = part.places.iter();
            let possible = places.filter_map(|(worker, devices)| {
                let (at, missing) = self.enough_at_place(&part.entitled, devices, expected)?;
                Some((at, missing, *worker))
            });
            possible.collect::<BTreeSet<_>>()
        });
        let possible: Vec<_> = possible.collect();
        let candidates = possible.iter().map(|places| {
            let workers = places.iter().map(|(.., worker)| *worker);
            workers.collect()
        });
        let workers = assign(&candidates.collect::<Vec<_>>())?.into_iter();
        let assigned = workers.zip(parts).zip(&possible);
        let places = assigned.map(|((worker, part), possible)| {
            let (at, ..) = possible.iter().find(|(.., it)| *it == worker)?;
            Some(FirstPlace {
                entitled: &part.entitled,
                devices: part.places.get(&worker)?,
                at: *at,
            })
        });
        places.collect()
    }

    /// Returns when there will be enough of these devices for a part of a lease, and how many are missing without
    /// those of spot leases.
    fn enough_at_place(
        &self,
        entitled: &Entitled,
        devices: &MayHave,
        expected: &Expected,
    ) -> Option<(Timestamp, usize)> {
        let there = expected
            .coming
            .choose(&self.pool, &entitled.demand, devices, &[]);
        let missing = (entitled.demand.devices as usize).saturating_sub(there.len());
        let need = Need {
            entitled,
            may_have: devices,
            from: MakesRoom::Any,
            missing,
        };
        let possible = PossibleVictims::new(self, expected, need);
        let mut left = missing;
        let mut at = self.now;
        for victim in possible.in_order(true) {
            if left == 0 {
                break;
            }
            at = at.max(victim.order().0);
            left = left.saturating_sub(victim.useful);
        }
        (left == 0).then_some((at, missing))
    }

    /// Returns the free devices to hold back for a lease for which spot leases make room, if these are enough.
    pub(super) fn free_beside_spot(&self, id: LeaseId) -> Option<Vec<DeviceRef>> {
        if !self.leases.index().has_spot() || !self.is_before_spot(id) {
            return None;
        }
        let parts = self.parts_in_need(id);
        let mut expected = Expected {
            coming: Coming::of(&self.pool, parts.iter().map(|part| &part.entitled.demand)),
            borrowed: self.spot_leases(),
            ..Expected::default()
        };
        let places = self.first_places(&parts, &expected)?;
        let mut free = Vec::new();
        for place in places {
            free.extend(self.count_on(place.entitled, place.devices, &mut expected)?);
        }
        // What others hold back of a shared device comes first: they may be about to get it.
        let is_shared =
            |it: DeviceRef| self.pool.is_shared(it) && self.pool.is_held_for_none_but(id, it);
        free.retain(|it| self.pool.is_free(*it) || is_shared(*it));
        Some(free)
    }
}
