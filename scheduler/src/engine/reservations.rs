//! Reservations: what keeps small requests from taking the devices for which a large one waits, one by one.
//!
//! Of the requests beyond guarantees, the one that is next for some devices has a reservation for these, once
//! it has waited for [`Options::reserve_after`](crate::Options::reserve_after) and does not wait because of its
//! tenant's limit. Next is a request of the tenant with the smallest share, present and past, by weight; what
//! passed the tenant's own requests does not count there, as otherwise small requests of a tenant would keep
//! back its large one.
//!
//! A later request *passes* a reservation when it gets devices of it. It may do so only if its lease surely ends
//! before there would be enough devices without it, as the request declares how long it takes (EASY backfill:
//! Mu'alem and Feitelson, "Utilization, Predictability, Workloads, and User Runtime Estimates in Scheduling the
//! IBM SP2 with Backfilling", IEEE TPDS, 2001), or if it can be suspended, or may end. The lease is then suspended, with others that passed the same reservation, once there are enough
//! devices together with those that are free or being released (`reclaim.rs`); the free ones are held back from
//! then on (`holds.rs`). So of the devices of a reservation, all count for it that were granted since it was
//! made, and it waits no longer than leases that had devices before keep these.
//!
//! Each such suspension is for a request that becomes a lease, which passes no reservation of a request that
//! waited before it. So without new requests, there are at most as many as there are requests.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::device::{Demand, DeviceSpec, Shape};
use crate::event::DeviceRef;
use crate::options::RequestOrder;
use crate::pool::DeviceClass;
use crate::queue::{Rank, TenantRequests};
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// Devices for a request that waits, which later requests get only if their leases can be suspended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    /// The lease that the request would become.
    pub(crate) lease: LeaseId,
    /// What devices it could get that no request before it could get.
    classes: BTreeSet<DeviceClass>,
    /// When there will be enough of these devices, if that is known: leases that declare how long they take
    /// will have ended by then.
    starts_by: Option<Timestamp>,
}

/// The place of a tenant in the order: its share, the number of its next request, and its name.
type Place<'a> = (u64, u64, &'a TenantName);

/// The next request of a tenant and shape.
type Head<'a> = (Rank, &'a Shape);

impl Engine {
    /// Finds the reservations as of now. Returns whether there are others than before.
    pub(super) fn find_reservations(&mut self) -> bool {
        let found = self.reservations_now();
        let has_changed = found != self.reservations;
        self.reservations = found;
        has_changed
    }

    /// Returns whether a request beyond guarantees may get a device, as far as the reservations of others are
    /// concerned.
    pub(super) fn may_pass(&self, request: LeaseId, demand: &Demand, device: &DeviceSpec) -> bool {
        self.reservation_against(request, demand, device).is_none()
    }

    /// Returns the reservation of another request because of which one beyond guarantees may not get a device.
    pub(super) fn reservation_against(
        &self,
        request: LeaseId,
        demand: &Demand,
        device: &DeviceSpec,
    ) -> Option<&Reservation> {
        let mut others = self.reservations.iter().filter(|it| it.lease != request);
        if demand.gives_way_on(device) {
            return None;
        }
        let ends_at = demand.rounded_duration().map(|it| self.now + it);
        let ends_too_late = |it: &Reservation| match (ends_at, it.starts_by) {
            (Some(ends_at), Some(starts_by)) => ends_at > starts_by,
            (None, _) | (_, None) => true,
        };
        others.find(|it| it.includes(device) && ends_too_late(it))
    }

    /// Returns the reservations, those first that are next.
    pub(super) fn reservations(&self) -> impl Iterator<Item = &Reservation> {
        self.reservations.iter()
    }

    /// Returns the reservation of a request, if it has one.
    pub(super) fn reservation_of(&self, request: LeaseId) -> Option<&Reservation> {
        self.reservations.iter().find(|it| it.lease == request)
    }

    /// Returns the requests whose reservations a lease passes that gets these devices.
    pub(super) fn passed_by(&self, lease: LeaseId, devices: &[DeviceRef]) -> BTreeSet<LeaseId> {
        let others = self.reservations.iter().filter(|it| it.lease != lease);
        let passed = others.filter(|reservation| {
            let mut devices = devices.iter().filter_map(|it| self.pool.device(*it));
            devices.any(|device| reservation.includes(device))
        });
        passed.map(|it| it.lease).collect()
    }

    /// Returns the reservations that there should be now, in the order in which the requests are next.
    fn reservations_now(&self) -> Vec<Reservation> {
        let is_due = |since| since + self.options.reserve_after <= self.now;
        let has_due = self.queue.oldest().is_some_and(|it| is_due(it.since));
        if self.options.order != RequestOrder::Fair || !has_due {
            return Vec::new();
        }
        let mut unclaimed: BTreeSet<_> = self.pool.classes().collect();
        let mut reservations = Vec::new();
        for (tenant, rank, shape) in self.heads_in_order() {
            if unclaimed.is_empty() {
                break;
            }
            let (used, limit) = (self.used_by(tenant), &self.policy_of(tenant).limit);
            let may_have = |device: &DeviceSpec| {
                shape.accepts(device) && limit.allows(used, device, shape.devices)
            };
            let wanted = shape.devices as usize;
            if self.pool.offers(shape, may_have) < wanted {
                continue;
            }
            let classes = unclaimed.extract_if(.., |class| may_have(class));
            let classes: BTreeSet<_> = classes.cloned().collect();
            let has_waited = self
                .queue
                .get(rank.lease)
                .is_some_and(|it| is_due(it.since));
            let mut reservation = Reservation {
                lease: rank.lease,
                classes,
                starts_by: None,
            };
            let is_enough = self.pool.offers(shape, |it| reservation.includes(it)) >= wanted;
            if has_waited && is_enough {
                reservation.starts_by = self.starts_by(&reservation, wanted);
                reservations.push(reservation);
            }
        }
        reservations
    }

    /// Returns when there will be as many devices as `wanted` of a reservation, if that is known and makes a
    /// difference for a request that waits.
    fn starts_by(&self, reservation: &Reservation, wanted: usize) -> Option<Timestamp> {
        let mut shapes = self.queue.shapes();
        let makes_difference = shapes.any(|shape| shape.max_duration.is_some());
        let includes = |device: &DeviceSpec| reservation.includes(device);
        makes_difference.then(|| self.enough_at(reservation.lease, wanted, includes))?
    }

    /// Returns when as many devices as `wanted` will be there for a request, of those that it `may_have`, if that
    /// is known: they are free or being released, have passed its reservation, or are of leases that declare
    /// how long they take.
    pub(super) fn enough_at(
        &self,
        request: LeaseId,
        wanted: usize,
        may_have: impl Fn(&DeviceSpec) -> bool,
    ) -> Option<Timestamp> {
        let usable = self.pool.usable(may_have);
        let free = self.pool.free_or_ending().into_keys();
        let mut coming: BTreeSet<_> = free.collect();
        coming.extend(self.pool.held_back_for(request));
        for lease in self.leases.index().passing(request) {
            let lease = self.leases.get(lease);
            coming.extend(lease.into_iter().flat_map(|it| it.lease_devices.keys()));
        }
        coming.retain(|device_ref| usable.contains(device_ref));
        if coming.len() >= wanted {
            return Some(self.now);
        }
        for (at, id) in self.leases.index().time_over() {
            let lease = self.leases.get(id);
            let devices = lease.into_iter().flat_map(|it| it.lease_devices.keys());
            coming.extend(devices.filter(|it| usable.contains(*it)));
            if coming.len() >= wanted {
                return Some(at);
            }
        }
        None
    }

    /// Returns the next request beyond guarantees of each tenant and shape, other than those for spot leases, the
    /// first first.
    pub(super) fn heads_in_order(&self) -> impl Iterator<Item = (&TenantName, Rank, &Shape)> {
        let pool = self.pool.amounts();
        let mut tenants = BTreeMap::<Place<'_>, BTreeMap<Rank, &Shape>>::new();
        for (tenant, requests) in self.queue.by_tenant() {
            let heads: BTreeMap<_, _> = self.heads(requests).collect();
            let Some((first, _)) = heads.first_key_value() else {
                continue;
            };
            let mut used = self.queue.guaranteed().with(self.used_by(tenant), tenant);
            used.subtract(&self.passed_own(tenant, heads.keys()));
            let share = self.shares(&pool).key(tenant, &used, self.spot_by(tenant));
            tenants.insert((share, first.number, tenant), heads);
        }
        tenants.into_iter().flat_map(|((.., tenant), heads)| {
            let heads = heads.into_iter();
            heads.map(move |(rank, shape)| (tenant, rank, shape))
        })
    }

    fn heads<'a>(&self, requests: &'a TenantRequests) -> impl Iterator<Item = Head<'a>> {
        let guaranteed = self.queue.guaranteed();
        let shapes = requests.by_shape().filter(|(shape, _)| !shape.is_spot);
        shapes.filter_map(move |(shape, ranks)| {
            let mut beyond = ranks.iter().filter(|it| !guaranteed.contains(it.lease));
            Some((*beyond.next()?, shape))
        })
    }

    /// Returns what a tenant has that passed one of these requests of its own.
    fn passed_own<'a>(
        &self,
        tenant: &TenantName,
        heads: impl Iterator<Item = &'a Rank>,
    ) -> Amounts {
        let passing = heads.flat_map(|head| self.leases.index().passing(head.lease));
        let passing: BTreeSet<_> = passing.collect();
        let mut has = Amounts::default();
        for lease in passing.into_iter().filter_map(|id| self.leases.get(id)) {
            if lease.tenant.as_ref() == Some(tenant) {
                has.add(&lease.charge);
            }
        }
        has
    }
}

#[cfg(test)]
impl Engine {
    /// Returns the reservations as of the last decision, the first first.
    pub(crate) fn reserved(&self) -> Vec<(LeaseId, BTreeSet<DeviceClass>)> {
        let reservations = self.reservations.iter();
        reservations
            .map(|it| (it.lease, it.classes.clone()))
            .collect()
    }

    /// Returns the reservations that there should be now.
    pub(crate) fn reserved_now(&self) -> Vec<(LeaseId, BTreeSet<DeviceClass>)> {
        let reservations = self.reservations_now().into_iter();
        reservations.map(|it| (it.lease, it.classes)).collect()
    }
}

impl Reservation {
    /// Returns whether a device is one of those that are reserved.
    pub(super) fn includes(&self, device: &DeviceSpec) -> bool {
        self.classes.iter().any(|class| class.is_of(device))
    }
}
