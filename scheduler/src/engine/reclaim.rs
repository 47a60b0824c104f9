//! Devices that tenants have beyond their guarantee, and give back when a request needs them that is entitled
//! to them (`holds.rs`): leases are suspended for it.
//!
//! The leases of a tenant count towards its guarantee in the order of their grants; those beyond it are
//! *borrowed*, and so are all spot leases. For a request within its tenant's guarantee, borrowed leases of other
//! tenants are suspended; for one with a reservation, those borrowed leases of any tenant that have passed it.
//! For all of these, and for any other that is not for a spot lease itself, spot leases are suspended, and before
//! others. A spot lease that cannot be suspended ends, and so does another borrowed lease whose request said that it
//! may, if leases that can be suspended are not enough. Spot leases make room for other leases that wait, too
//! (`spot.rs`).
//!
//! A request that its tenant's limit holds up, and nothing else, has spot leases of its own tenant suspended
//! (`own_spot.rs`).
//!
//! A lease is suspended if it could go on later, so not if it is not durable or has no snapshots, and not
//! before it has run for [`Options::min_run_time`](crate::Options::min_run_time). Either as many leases are
//! suspended as the request needs, or none; the fewest, and of single leases that are enough the smallest, then
//! one of the tenant that has and had the largest share by weight, then the latest.
//!
//! A reclaimed lease goes on by itself: before requests beyond guarantees, and after those that are entitled.
//! Nothing is reclaimed that a lease would get which comes before these requests, as one that was lost does.
//!
//! No two leases take each other's place in turn. What a reclaimed lease gives up goes to a request within a
//! guarantee, whose lease is not borrowed while its tenant's guarantee stays; to a request with a reservation,
//! whose lease has passed only requests that still wait; or from a spot lease to another request or lease, never
//! the other way. A lease that has ended for a request does not wait again. So each reclaim lowers the number of
//! requests and leases that wait and are not for spot leases, and nothing but new demand or a changed policy raises it.

use std::mem;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::borrowed_leases::Borrowed;
use super::coming::Coming;
use super::holds::{Entitled, Entitlement, Expected, MayHave};
use super::possible_victims::{Enough, MakesRoom, Need, PossibleVictims};
use super::spot::PartInNeed;
use super::victims::{Victim, fewest, take_away, useful};
use crate::event::{DeviceRef, Suspender};
use crate::reason::EndReason;
use crate::tenants::{NOTHING, TenantName};

/// What can be expected while leases are suspended.
pub(super) struct Plan {
    pub(super) expected: Expected,
    pub(super) has_suspended: bool,
}

impl Engine {
    /// Suspends borrowed leases for requests that are entitled to devices. Returns whether it has suspended
    /// some.
    pub(super) fn reclaim(&mut self) -> bool {
        self.reclaim_at = None;
        let requests = self.entitled_requests();
        let (first, later) = self.leases_before_spot();
        let has_waiting = !requests.is_empty() || !first.is_empty() || !later.is_empty();
        if !has_waiting || self.awaits_claims() {
            return false;
        }
        let parts_of = |leases: Vec<LeaseId>| {
            let parts = leases.into_iter().map(|id| (id, self.parts_in_need(id)));
            parts.collect::<Vec<_>>()
        };
        let (first, later) = (parts_of(first), parts_of(later));
        let leases = || first.iter().chain(&later);
        let of_leases = leases().flat_map(|(_, parts)| parts);
        let of_leases = of_leases.map(|part| &part.entitled.demand);
        let demands = of_leases.chain(requests.iter().map(|it| &it.demand));
        let mut coming = Coming::of(&self.pool, demands);
        let leases = leases().map(|(id, _)| *id);
        coming.add_held_shares(&self.pool, leases.chain(requests.iter().map(|it| it.lease)));
        let mut plan = Plan {
            expected: Expected {
                coming,
                used: self.used_by_tenants().clone(),
                borrowed: self.take_borrowed(),
                ..Expected::default()
            },
            has_suspended: false,
        };
        for (id, parts) in first {
            self.make_room_for_lease(id, &parts, &mut plan);
        }
        if plan.has_suspended {
            // These may have taken the last room for snapshots of others.
            let borrowed = mem::take(&mut plan.expected.borrowed);
            self.give_back_borrowed(borrowed);
            plan.expected.borrowed = self.take_borrowed();
        }
        plan.expected.needed = self.needed_by_leases();
        plan.expected.shares.take();
        let is_before_spot = |it: &Entitled| it.by == Entitlement::Spot;
        let (before_spot, others) = requests.into_iter().partition(is_before_spot);
        self.make_room_for_requests(others, &mut plan);
        for (id, parts) in later {
            self.make_room_for_lease(id, &parts, &mut plan);
        }
        self.make_room_for_requests(before_spot, &mut plan);
        self.give_back_borrowed(plan.expected.borrowed);
        plan.has_suspended
    }

    /// Suspends leases for requests, as far as there will be too few devices for each.
    fn make_room_for_requests(&mut self, requests: Vec<Entitled>, plan: &mut Plan) {
        for entitled in requests {
            let used = plan.expected.used.get(&entitled.tenant);
            let may_have = self.may_have(used.unwrap_or(&NOTHING), &entitled);
            plan.expected
                .coming
                .add_held_devices(&self.pool, entitled.lease);
            let devices = self.make_room_for(&entitled, &may_have, MakesRoom::Any, plan);
            let devices = devices.or_else(|| self.make_room_within_limit(&entitled, plan));
            match devices {
                Some(_) => self.count(&mut plan.expected.used, &entitled),
                None => plan.expected.coming.remove_held(&self.pool, entitled.lease),
            }
        }
    }

    /// Suspends spot leases for a lease that waits and has these parts: for all of them, or for none.
    fn make_room_for_lease(&mut self, id: LeaseId, parts: &[PartInNeed], plan: &mut Plan) {
        plan.expected.coming.add_held_devices(&self.pool, id);
        let places = self.first_places(parts, &plan.expected);
        let all_at = places
            .as_ref()
            .and_then(|it| it.iter().map(|it| it.at).max());
        match places {
            Some(places) if all_at <= Some(self.now) => {
                for place in places {
                    let (entitled, may_have) = (place.entitled, place.devices);
                    let devices = self.make_room_for(entitled, may_have, MakesRoom::Any, plan);
                    if devices.is_none() {
                        break;
                    }
                }
            }
            Some(_) | None => {
                let earliest = self.reclaim_at.into_iter().chain(all_at);
                self.reclaim_at = earliest.min();
                plan.expected.coming.remove_held(&self.pool, id);
            }
        }
    }

    /// Suspends leases for something that waits and may have these devices, as far as there will be too few. What is
    /// held back for it counts as coming. Returns the devices that it can count on; `None` if there are too few for
    /// now.
    pub(super) fn make_room_for(
        &mut self,
        entitled: &Entitled,
        may_have: &MayHave,
        from: MakesRoom,
        plan: &mut Plan,
    ) -> Option<Vec<DeviceRef>> {
        let coming = &plan.expected.coming;
        let (demand, wanted) = (&entitled.demand, entitled.demand.devices as usize);
        let held = self.pool.held_back_for(entitled.lease);
        let held = self.then_counted_on(entitled.lease, held);
        let devices = coming.choose(&self.pool, demand, may_have, &held);
        let missing = wanted.saturating_sub(devices.len());
        let need = Need {
            entitled,
            may_have,
            from,
            missing,
        };
        let victims = self.victims_now(&plan.expected, need)?;
        for victim in victims {
            self.suspend_victim(&victim, entitled, plan);
        }
        let coming = &mut plan.expected.coming;
        let devices = coming.choose(&self.pool, demand, may_have, &held);
        if devices.len() < wanted {
            // A victim could not be suspended any more: the snapshots of one before it took the room.
            return None;
        }
        coming.take(&self.pool, demand, &devices);
        Some(devices)
    }

    /// Suspends the leases of a victim for something that waits.
    pub(super) fn suspend_victim(&mut self, victim: &Victim, entitled: &Entitled, plan: &mut Plan) {
        let expected = &mut plan.expected;
        let mut is_freed = true;
        for lease in &victim.leases {
            if expected.borrowed.take(&self.pool, lease.lease).is_none() {
                continue;
            }
            if self.make_room(lease) {
                #[cfg(test)]
                self.made_room.push((lease.lease, entitled.lease));
                plan.has_suspended = true;
                take_away(&mut expected.used, lease);
            } else {
                is_freed = false;
            }
        }
        // Of a device that leases share, one may make room within the limit of its tenant alone.
        let is_whole = entitled.demand.share_permille.is_none();
        let shared = victim.shared().filter(|_| is_whole);
        let is_left = shared.is_none_or(|device_ref| self.pool.is_unused(device_ref));
        if is_freed && is_left {
            // The next request may use what this one does not need.
            expected.coming.add_freed(&entitled.demand, victim);
        }
    }

    /// Returns whether the tenants of some leases are not known yet, as their clients have not attached since
    /// the scheduler started. These may be within guarantees that other requests of the tenants use, too.
    fn awaits_claims(&mut self) -> bool {
        let until = self.leases.adopt_until();
        let is_soon = self.now < until;
        let awaits = is_soon && self.leases.index().has_unclaimed();
        self.reclaim_at = awaits.then_some(until);
        awaits
    }

    /// Returns the leases to suspend for what something that waits lacks, or `None` if that cannot be done now. Sets the
    /// time at which it can, as leases have run for long enough by then.
    fn victims_now(&mut self, expected: &Expected, need: Need<'_>) -> Option<Vec<Victim>> {
        if need.missing == 0 {
            return Some(Vec::new());
        }
        let Enough { victims, at, .. } = self.victims(expected, need)?;
        if at > self.now {
            let earliest = self.reclaim_at.into_iter().chain([at]);
            self.reclaim_at = earliest.min();
            return None;
        }
        Some(victims)
    }

    /// Returns the leases that make room for what something that waits lacks, if there are enough: the fewest of those
    /// that may be suspended now, or else the first that may be.
    pub(super) fn victims(&self, expected: &Expected, need: Need<'_>) -> Option<Enough> {
        let possible = PossibleVictims::new(self, expected, need);
        let enough = possible.first_enough()?;
        if enough.at > self.now {
            return Some(enough);
        }
        let due = possible.in_order(enough.with_ending);
        let due = due.take_while(|victim| victim.order().0 <= self.now);
        let (spot, others): (Vec<_>, Vec<_>) = due.partition(Victim::is_spot);
        let candidates = match useful(&spot) >= need.missing {
            true => spot,
            false => spot.into_iter().chain(others).collect(),
        };
        let share_of = |tenant: &TenantName| self.share_in(expected, tenant);
        let victims = fewest(candidates, need.missing, share_of);
        Some(Enough { victims, ..enough })
    }

    /// Suspends a borrowed lease, or ends it if it cannot be suspended and may end. Returns whether that is done.
    fn make_room(&mut self, victim: &Borrowed) -> bool {
        if victim.ends {
            self.end_lease(victim.lease, Some(EndReason::Reclaimed));
            return true;
        }
        self.suspend_borrowed(victim.lease)
    }

    /// Suspends a borrowed lease, which goes on once there are devices for it again. Returns whether that is
    /// done: the snapshots of another lease may have taken the room for those of this one.
    fn suspend_borrowed(&mut self, id: LeaseId) -> bool {
        let by = Suspender::Administrator;
        if self.check_suspend(id, by).is_err() {
            return false;
        }
        self.suspend(id, by);
        self.resume_suspended(id, by);
        if let Some(mut lease) = self.leases.get_mut(id) {
            lease.is_reclaimed = true;
        }
        self.report_standing(id);
        true
    }
}
