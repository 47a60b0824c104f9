//! The leases that could make room for something that waits, in the order in which they could.
//!
//! Most requests need few of them. So these are found one by one, without a look at those after them, where the order is
//! known (`borrowed_leases.rs`): for requests within guarantees, of which there may be many. For other requests, only
//! spot leases make room, and leases that have passed a reservation. These are few, and are listed.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use itertools::Itertools as _;
use tensord_proto::ids::LeaseId;

use super::Engine;
use super::borrowed_leases::{Borrowed, Position};
use super::coming::few_shares;
use super::holds::{Entitled, Entitlement, Expected, MayHave};
use super::victims::{Victim, useful};
use crate::event::DeviceRef;
use crate::pool::DeviceClass;
use crate::time::Timestamp;

/// What something that waits lacks.
#[derive(Clone, Copy)]
pub(super) struct Need<'a> {
    pub(super) entitled: &'a Entitled,
    /// The devices that it may have.
    pub(super) may_have: &'a MayHave,
    /// Which leases make room.
    pub(super) from: MakesRoom,
    /// The number of devices that it lacks.
    pub(super) missing: usize,
}

/// Which leases make room for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MakesRoom {
    /// All that may have to.
    Any,
    /// Only the spot leases of its own tenant.
    OwnSpot,
}

/// Leases that are enough for something that waits.
pub(super) struct Enough {
    pub(super) victims: Vec<Victim>,
    /// From when on all of them may be suspended.
    pub(super) at: Timestamp,
    /// Whether some of them may end that are no spot leases, as the others are not enough.
    pub(super) with_ending: bool,
}

/// The leases that could make room for something that waits.
pub(super) struct PossibleVictims<'a> {
    engine: &'a Engine,
    expected: &'a Expected,
    need: Need<'a>,
    /// Those that were looked for, in order.
    listed: Vec<Victim>,
    /// The classes of devices of which the others are taken from the order that is known.
    classes: Option<&'a BTreeSet<DeviceClass>>,
}

impl<'a> PossibleVictims<'a> {
    pub(super) fn new(engine: &'a Engine, expected: &'a Expected, need: Need<'a>) -> Self {
        let is_known = need.entitled.by == Entitlement::Guarantee && need.from == MakesRoom::Any;
        let mut possible = Self {
            engine,
            expected,
            need,
            listed: Vec::new(),
            classes: match need.may_have {
                MayHave::Classes(classes) if is_known => Some(classes),
                MayHave::Classes(_) | MayHave::Devices(_) => None,
            },
        };
        possible.listed = possible.list();
        possible.listed.sort_by_key(Victim::order);
        possible
    }

    /// Returns them in order; those that would end, and are no spot leases, only if `with_ending`.
    pub(super) fn in_order(&self, with_ending: bool) -> impl Iterator<Item = Victim> {
        let known = self.classes.into_iter();
        let known = known.flat_map(move |it| self.expected.borrowed.in_order(it, with_ending));
        let known = known.filter_map(|position| self.at(position));
        let listed = self.listed.iter().cloned();
        let listed = listed.filter(move |victim| with_ending || !victim.ends());
        known.merge_by(listed, |one, other| one.order() <= other.order())
    }

    /// Returns the first that are enough, without those that would end if the others are enough, though later.
    pub(super) fn first_enough(&self) -> Option<Enough> {
        let missing = self.need.missing;
        let possible = [false, true].into_iter();
        possible
            .filter(|it| self.most_useful(*it) >= missing)
            .find_map(|with_ending| {
                let mut victims = Vec::new();
                let mut left = missing;
                let mut all = self.in_order(with_ending);
                while left > 0 {
                    let victim = all.next()?;
                    left = left.saturating_sub(victim.useful);
                    victims.push(victim);
                }
                let at = victims.last().map(|it| it.order().0);
                Some(Enough {
                    victims,
                    at: at.unwrap_or_default(),
                    with_ending,
                })
            })
    }

    /// Returns a number of useful devices that they do not exceed together.
    fn most_useful(&self, with_ending: bool) -> usize {
        let known = self
            .classes
            .map(|it| self.expected.borrowed.devices(it, with_ending));
        known.unwrap_or_default() + useful(&self.listed)
    }

    /// Returns those that are not taken from the order that is known.
    fn list(&self) -> Vec<Victim> {
        let borrowed = &self.expected.borrowed;
        let is_for_share = self.need.entitled.demand.share_permille.is_some();
        if self.classes.is_some() {
            let shared = borrowed
                .shared_devices()
                .filter(|it| is_for_share && self.need.may_have.contains(&self.engine.pool, *it));
            return shared.filter_map(|it| self.of_shared(it)).collect();
        }
        let passing = self.engine.leases.index().passing(self.need.entitled.lease);
        let ids = borrowed.spot().map(|it| it.lease).chain(passing);
        let ids: BTreeSet<LeaseId> = ids.collect();
        let leases: Vec<_> = ids.into_iter().filter_map(|id| borrowed.get(id)).collect();
        let shared: BTreeSet<_> = leases.iter().filter_map(|it| it.shared()).collect();
        let whole = leases.into_iter().filter(|it| it.device_share.is_none());
        let whole = whole.filter_map(|it| self.of_whole(it));
        let shared = shared.into_iter().filter_map(|it| self.of_shared(it));
        whole.chain(shared).collect()
    }

    /// Returns what could make room at a position, for a request that needs whole devices if leases share the one there.
    fn at(&self, position: Position) -> Option<Victim> {
        match position.shared {
            Some(_) if self.need.entitled.demand.share_permille.is_some() => None,
            Some(device_ref) => self.of_shared(device_ref),
            None => self.of_whole(self.expected.borrowed.get(position.first)?),
        }
    }

    /// Returns a lease with whole devices, if some are useful.
    fn of_whole(&self, lease: &Arc<Borrowed>) -> Option<Victim> {
        let useful = self.useful(lease);
        (useful > 0).then(|| Victim {
            leases: vec![self.engine.without_needed(lease, self.expected)],
            useful,
        })
    }

    /// Returns those leases that make room of the ones that share a device.
    fn of_shared(&self, device_ref: DeviceRef) -> Option<Victim> {
        let sharing = self.expected.borrowed.sharing(device_ref);
        let sharing: Vec<_> = sharing.filter(|it| self.useful(it) > 0).collect();
        let is_due = |it: &Borrowed| it.suspendable_at <= self.engine.now;
        let goes_on = |it: &Borrowed| !it.is_last_resort();
        let choose = |is_one: &dyn Fn(&Borrowed) -> bool| {
            let those = sharing.iter().copied().filter(|it| is_one(it)).collect();
            self.sharing_to_suspend(device_ref, those)
        };
        let leases = choose(&|it| goes_on(it) && is_due(it))
            .or_else(|| choose(&goes_on))
            .or_else(|| choose(&is_due))
            .or_else(|| choose(&|_| true))?;
        let leases: Vec<_> = leases.into_iter().cloned().collect();
        let has_some = !leases.is_empty();
        has_some.then_some(Victim { leases, useful: 1 })
    }

    /// Returns those leases which must be suspended of the ones that share a device, for a request that demands it
    /// or a share of it beside what is coming for others; `None` if these are not enough.
    fn sharing_to_suspend<'b>(
        &self,
        device_ref: DeviceRef,
        sharing: Vec<&'b Arc<Borrowed>>,
    ) -> Option<Vec<&'b Arc<Borrowed>>> {
        let (pool, entitled) = (&self.engine.pool, self.need.entitled);
        let device = pool.device(device_ref)?;
        let Some(needed) = entitled.demand.share_of(device) else {
            let is_all = sharing.len() == pool.holders_of(device_ref).count();
            let is_left = pool.is_held_for_none_but(entitled.lease, device_ref);
            return (is_all && is_left).then_some(sharing);
        };
        let room = self.expected.coming.room(device_ref)?;
        let sharing = sharing.into_iter();
        let mut shares: Vec<_> = sharing
            .filter_map(|it| Some((it.device_share?, it)))
            .collect();
        // Of equal shares, the first makes room.
        shares.sort_by_key(|(_, it)| {
            let share = self.engine.share_in(self.expected, &it.tenant);
            (Reverse(share), Reverse(it.granted_at))
        });
        let spot = shares.iter().filter(|(_, it)| it.is_spot).copied();
        let spot = few_shares(room, spot.collect(), needed);
        spot.or_else(|| few_shares(room, shares, needed))
    }

    /// Returns the number of devices of a lease that the request could get.
    fn useful(&self, lease: &Borrowed) -> usize {
        let Need {
            entitled,
            may_have,
            from,
            ..
        } = self.need;
        let is_of_other = lease.tenant != entitled.tenant;
        let has_passed = || lease.passed.contains(&entitled.lease);
        let makes_room = match (from, entitled.by) {
            (MakesRoom::OwnSpot, _) => lease.is_spot && !is_of_other,
            (MakesRoom::Any, Entitlement::Guarantee) => {
                lease.is_spot || is_of_other || has_passed()
            }
            (MakesRoom::Any, Entitlement::Reservation) => lease.is_spot || has_passed(),
            (MakesRoom::Any, Entitlement::Spot) => lease.is_spot,
        };
        if !makes_room {
            return 0;
        }
        let devices = lease.devices.iter().filter(|it| {
            let may_have = may_have.contains(&self.engine.pool, **it);
            may_have && !self.engine.is_needed(**it, self.expected)
        });
        devices.count()
    }
}

impl Engine {
    /// Returns a borrowed lease without the devices that another lease would get which comes before what waits.
    pub(super) fn without_needed(
        &self,
        lease: &Arc<Borrowed>,
        expected: &Expected,
    ) -> Arc<Borrowed> {
        let is_needed = |it: &DeviceRef| self.is_needed(*it, expected);
        if !lease.devices.iter().any(is_needed) {
            return lease.clone();
        }
        let mut reduced = Borrowed::clone(lease);
        reduced.devices.retain(|it| !is_needed(it));
        Arc::new(reduced)
    }

    fn is_needed(&self, device_ref: DeviceRef, expected: &Expected) -> bool {
        let device = self.pool.device(device_ref);
        let mut needed = expected.needed.iter();
        device.is_none_or(|device| needed.any(|it| it.accepts(device)))
    }
}
