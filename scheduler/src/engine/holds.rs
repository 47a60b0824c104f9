//! Free devices that are held back for requests, and the leases that come after these.
//!
//! A request is *entitled* to devices if it is within its tenant's guarantee, has a reservation, or is not one
//! for a spot lease while there are such leases or requests. It may need more than are free. Once there will be
//! enough, as others are being released, or leases can be suspended for it (`reclaim.rs`), nothing else gets the free
//! ones, nor a share of a device whose leases are to make room for it. So it waits for leases that have just begun no
//! longer than until the first enough of them have run for [`Options::min_run_time`](crate::Options::min_run_time).

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use itertools::Itertools as _;
use tensord_proto::ids::LeaseId;

use super::Engine;
use super::borrowed_leases::BorrowedLeases;
use super::coming::Coming;
use super::possible_victims::{MakesRoom, Need};
use super::victims::take_away;
use crate::device::{Demand, DeviceSpec, Requirement};
use crate::event::DeviceRef;
use crate::lease::Standing;
use crate::pool::{DeviceClass, Pool};
use crate::queue::{QueuedRequest, Rank};
use crate::tenants::{Amounts, NOTHING, TenantName};

/// Largest number of requests that take devices of spot leases at once; others follow when these have got
/// theirs. Each costs a walk over the free devices and over all leases that could make room.
const MAX_ENTITLED_BEFORE_SPOT: usize = 16;

/// What requests can expect that are entitled to devices.
#[derive(Default)]
pub(super) struct Expected {
    /// The devices that are free or will be.
    pub(super) coming: Coming,
    /// What tenants have, with what requests before would get.
    pub(super) used: BTreeMap<TenantName, Amounts>,
    /// The leases that could be suspended.
    pub(super) borrowed: BorrowedLeases,
    /// What the devices are like that leases would get which come before what waits.
    pub(super) needed: Vec<Requirement>,
    /// Numbers that have the order of the shares of tenants, once they are needed.
    pub(super) shares: OnceCell<BTreeMap<TenantName, u64>>,
    /// The requests that can count on devices, each with these.
    pub(super) counting: Vec<(Entitled, Vec<DeviceRef>)>,
}

/// The devices that something which waits could get if they were free.
pub(super) enum MayHave {
    /// All of these classes.
    Classes(BTreeSet<DeviceClass>),
    /// These.
    Devices(BTreeSet<DeviceRef>),
}

impl MayHave {
    pub(super) fn contains(&self, pool: &Pool, device_ref: DeviceRef) -> bool {
        match self {
            Self::Classes(classes) => pool
                .usable_class(device_ref)
                .is_some_and(|class| classes.contains(class)),
            Self::Devices(devices) => devices.contains(&device_ref),
        }
    }
}

/// A request that is entitled to devices.
pub(super) struct Entitled {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantName,
    pub(super) demand: Demand,
    pub(super) by: Entitlement,
}

/// Why a request is entitled to devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entitlement {
    /// It is within its tenant's guarantee.
    Guarantee,
    /// It has a reservation.
    Reservation,
    /// Spot leases give their devices to all other requests.
    Spot,
}

impl Engine {
    /// Returns whether a lease that waits comes after requests within guarantees: it is a spot lease, or was suspended
    /// and is beyond the guarantee of its tenant. Another one that was lost or interrupted had its devices until then.
    pub(super) fn comes_after_guaranteed(&self, id: LeaseId) -> bool {
        let Some(lease) = self.leases.get(id) else {
            return false;
        };
        match lease.standing {
            Standing::Running | Standing::Suspended { .. } => false,
            Standing::Lost(_) | Standing::Resuming { cause: Some(_), .. } => lease.is_spot,
            Standing::Resuming { cause: None, .. } => {
                let tenant = lease.tenant.as_ref().filter(|_| !lease.is_spot);
                tenant.is_none_or(|tenant| {
                    let (used, spot) = (self.used_by(tenant), self.spot_by(tenant));
                    !self.policy_of(tenant).guarantees(used, spot, &lease.charge)
                })
            }
        }
    }

    /// Has leases go on that come after entitled requests, and for which there are devices that no such request
    /// needs.
    pub(super) fn go_on_after_entitled(&mut self, waiting: Vec<LeaseId>) {
        if waiting.is_empty() && self.queue.is_empty() {
            return self.set_counting(&Expected::default());
        }
        let is_spot = |id: &LeaseId| self.leases.get(*id).is_some_and(|it| it.is_spot);
        let (mut spot, mut waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_spot);
        loop {
            self.find_guaranteed_if_changed();
            self.find_reservations();
            let is_later = |id: &LeaseId| {
                self.queue.get(*id).is_some() || waiting.contains(id) || spot.contains(id)
            };
            let holders = self.pool.holders().filter(is_later).collect();
            self.pool.drop_held_back(&holders);
            self.queue.clear_newly_guaranteed();
            let entitled = self.entitled_requests();
            let mut expected = self.expected(&entitled);
            let has_entitled = !entitled.is_empty();
            let (before_spot, others): (Vec<_>, Vec<_>) = entitled
                .into_iter()
                .partition(|it| it.by == Entitlement::Spot);
            self.hold_back_for(others, &mut expected);
            let before = waiting.len() + spot.len();
            waiting.retain(|id| !self.go_on_or_wait(*id));
            if !before_spot.is_empty() {
                let demands = before_spot.iter().map(|it| &it.demand);
                let now = Coming::of(&self.pool, demands);
                expected.coming.retain_common(&now);
                self.hold_back_for(before_spot, &mut expected);
            }
            self.set_counting(&expected);
            spot.retain(|id| !self.spot_goes_on(*id));
            if has_entitled {
                self.give_back_borrowed(expected.borrowed);
            }
            if waiting.len() + spot.len() == before {
                return;
            }
            // A tenant has more now, so other requests may be within its guarantee.
        }
    }

    /// Drops what is held back for requests that are not entitled to devices any more, and for leases that would exceed
    /// the limit of their tenant, which has got others. Returns whether something was dropped.
    pub(super) fn drop_stale_holds(&mut self) -> bool {
        if self.pool.holders().next().is_none() {
            return false;
        }
        let entitled = self.entitled_requests();
        let is_stale = |id: &LeaseId| {
            let is_entitled = entitled.iter().any(|it| it.lease == *id);
            self.queue.get(*id).is_some() && !is_entitled || self.is_over_limit(*id)
        };
        let stale = self.pool.holders().filter(is_stale).collect();
        self.pool.give_up_held_back(&stale)
    }

    /// Returns what these requests can expect.
    fn expected(&mut self, entitled: &[Entitled]) -> Expected {
        match entitled.is_empty() {
            true => Expected::default(),
            false => Expected {
                coming: Coming::of(&self.pool, entitled.iter().map(|it| &it.demand)),
                used: self.used_by_tenants().clone(),
                borrowed: self.take_borrowed(),
                needed: self.needed_by_leases(),
                ..Expected::default()
            },
        }
    }

    /// Returns a number that has the order of the shares of tenants, as they are when leases are chosen for the first time.
    pub(super) fn share_in(&self, expected: &Expected, tenant: &TenantName) -> u64 {
        let shares = expected.shares.get_or_init(|| {
            let pool = self.pool.amounts();
            let used = self.used_by_tenants().iter();
            let shares = used.map(|(tenant, used)| {
                let share = self.shares(&pool).key(tenant, used, self.spot_by(tenant));
                (tenant.clone(), share)
            });
            shares.collect()
        });
        shares.get(tenant).copied().unwrap_or_default()
    }

    /// Holds back devices for those requests for which there will be enough once others are released or leases are
    /// suspended. What one of them can count on is taken out of `expected`.
    fn hold_back_for(&mut self, requests: Vec<Entitled>, expected: &mut Expected) {
        for entitled in requests {
            let used = expected.used.get(&entitled.tenant).unwrap_or(&NOTHING);
            let may_have = self.may_have(used, &entitled);
            let devices = self.count_on(&entitled, &may_have, expected);
            let devices = devices.or_else(|| {
                let used = self.used_without_own_spot(&entitled, expected, |_| true)?;
                self.count_on(&entitled, &self.may_have(&used, &entitled), expected)
            });
            let Some(devices) = devices else {
                continue;
            };
            self.count(&mut expected.used, &entitled);
            // Nobody gets those that are being released before that, or what a lease has as a whole. Others could
            // take the room beside those that are to make some, and would have to run for as long in turn.
            let is_held = |it: &DeviceRef| self.pool.is_free(*it) || self.pool.is_shared(*it);
            let held = devices.iter().copied().filter(is_held).collect();
            let demand = &entitled.demand;
            let share_of = |device: &DeviceSpec| demand.share_of(device);
            self.pool.hold_back(entitled.lease, held, share_of);
            expected.counting.push((entitled, devices));
        }
    }

    /// Returns the devices on which a request can count that may have these, if there will be enough: free ones,
    /// those that are being released, and those of the leases that could be suspended first.
    pub(super) fn count_on(
        &self,
        entitled: &Entitled,
        may_have: &MayHave,
        expected: &mut Expected,
    ) -> Option<Vec<DeviceRef>> {
        let (demand, wanted) = (&entitled.demand, entitled.demand.devices as usize);
        let free = expected.coming.devices.iter();
        let free = free.filter(|(at, is_free)| **is_free && may_have.contains(&self.pool, **at));
        let free: Vec<_> = free.map(|(device_ref, _)| *device_ref).collect();
        let best = self.pool.choose(&free, wanted).unwrap_or(free);
        let best = self.then_counted_on(entitled.lease, best);
        let devices = expected.coming.choose(&self.pool, demand, may_have, &best);
        let need = Need {
            entitled,
            may_have,
            from: MakesRoom::Any,
            missing: wanted.saturating_sub(devices.len()),
        };
        let victims = match need.missing {
            0 => Vec::new(),
            // Those that make room if they may already: what is left is for the requests after this one.
            _ => self.victims(expected, need)?.victims,
        };
        let Expected {
            coming,
            used,
            borrowed,
            ..
        } = expected;
        for victim in victims {
            coming.add_freed(demand, &victim);
            // The next request cannot count on these leases, too.
            for lease in &victim.leases {
                if borrowed.take(&self.pool, lease.lease).is_some() {
                    take_away(used, lease);
                }
            }
        }
        let devices = coming.choose(&self.pool, demand, may_have, &best);
        coming.take(&self.pool, demand, &devices);
        Some(devices)
    }

    /// Returns the requests that wait and are entitled to devices, in order.
    pub(super) fn entitled_requests(&mut self) -> Vec<Entitled> {
        let first_before_spot = self.first_before_spot();
        let guaranteed = self.first_guaranteed.iter();
        let first_guaranteed: BTreeSet<_> = guaranteed.clone().copied().collect();
        let guaranteed = guaranteed.map(|lease| (*lease, Entitlement::Guarantee));
        let reserved = self.reservations();
        let reserved = reserved.filter(|it| !first_guaranteed.contains(&it.lease));
        let reserved = reserved.map(|it| (it.lease, Entitlement::Reservation));
        let first = first_before_spot.into_iter();
        let first = first.filter(|lease| self.reservation_of(*lease).is_none());
        let first = first.map(|lease| (lease, Entitlement::Spot));
        let waiting = guaranteed.chain(reserved).chain(first);
        let entitled = waiting.filter_map(|(lease, by)| {
            let waiting = self.queue.get(lease)?;
            Some(Entitled {
                lease,
                tenant: waiting.tenant.clone(),
                demand: waiting.demand.clone(),
                by,
            })
        });
        entitled.collect()
    }

    /// Returns the requests beyond guarantees for which spot leases are suspended first, in order. Requests for such
    /// leases wait for them, too: otherwise these would get devices that they had to give back soon.
    fn first_before_spot(&mut self) -> Vec<LeaseId> {
        if !self.has_spot_or_requests() {
            return Vec::new();
        }
        let basis = self.order_basis();
        if let Some((_, first)) = self.before_spot.as_ref().filter(|(it, _)| *it == basis) {
            return first.clone();
        }
        let first = self.first_in_order(MAX_ENTITLED_BEFORE_SPOT);
        self.before_spot = Some((basis, first.clone()));
        first
    }

    /// Returns so many of the requests beyond guarantees, other than those for spot leases, in order: those that are
    /// next of their tenant and shape, and the ones that are next otherwise. Requests of one shape may
    /// wait for devices that no spot lease has.
    fn first_in_order(&self, count: usize) -> Vec<LeaseId> {
        let tenants = self.tenants_in_order();
        let heads = tenants
            .values()
            .flat_map(|requests| requests.heads().keys());
        let heads: BTreeSet<_> = heads.take(count).copied().collect();
        let mut others = count - heads.len();
        let mut first = Vec::new();
        for requests in tenants.into_values() {
            let by_shape = requests.heads().iter().map(|(head, shape)| {
                let of_shape = requests.of_shape(shape);
                of_shape.skip_while(move |rank| rank < head)
            });
            let is_other = |rank: &Rank| !requests.heads().contains_key(rank);
            let next = by_shape.kmerge().filter(is_other).take(others);
            let its_heads = requests.heads().keys().copied();
            let mut ranks: Vec<_> = its_heads.filter(|it| heads.contains(it)).collect();
            let head_count = ranks.len();
            ranks.extend(next);
            others -= ranks.len() - head_count;
            ranks.sort();
            first.extend(ranks.into_iter().map(|rank| rank.lease));
        }
        first
    }

    /// Returns whether there are spot leases, or requests for such.
    pub(crate) fn has_spot_or_requests(&self) -> bool {
        self.leases.index().has_spot() || self.queue.shapes().any(|shape| shape.is_spot)
    }

    /// Returns the devices that a request could get if they were free, whose tenant has `used`.
    pub(super) fn usable_by(&self, request: &QueuedRequest, used: &Amounts) -> BTreeSet<DeviceRef> {
        self.pool.usable(self.may_get(request, used))
    }

    /// Returns the devices that an entitled request could get if they were free, whose tenant has `used`.
    pub(super) fn may_have(&self, used: &Amounts, entitled: &Entitled) -> MayHave {
        let request = self.queue.get(entitled.lease);
        let reservation = self.reservation_of(entitled.lease);
        let reservation = reservation.filter(|_| entitled.by == Entitlement::Reservation);
        let classes = request.map(|request| {
            let may_get = self.may_get(request, used);
            let is_reserved = |class: &DeviceClass| reservation.is_none_or(|it| it.includes(class));
            let classes = self
                .pool
                .classes()
                .filter(|it| may_get(it) && is_reserved(it));
            classes.cloned().collect()
        });
        MayHave::Classes(classes.unwrap_or_default())
    }

    /// Counts the most that a request could get as its tenant's.
    pub(super) fn count(&self, used: &mut BTreeMap<TenantName, Amounts>, entitled: &Entitled) {
        let used = used.entry(entitled.tenant.clone()).or_default();
        used.add(&self.most_for(&entitled.demand));
    }
}
