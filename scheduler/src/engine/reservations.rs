//! Reservations: they keep small requests from taking, one by one, the devices for which a large one waits.
//!
//! Of the requests that have waited for [`Options::reserve_after`](crate::Options::reserve_after), the one that is next
//! for some devices has a reservation for these, unless it waits because of its tenant's limit. Next is one within a
//! guarantee, which may wait for leases that cannot be suspended; then a request of the tenant with the smallest share,
//! present and past, by weight. What passed the tenant's own requests does not count there, as
//! otherwise small requests of a tenant would keep back its large one; and what was taken from a tenant for such
//! a request counts, as otherwise the tenant would get it back at once. A request that comes before, as its tenant
//! has less, need not wait behind the one that has the reservation.
//!
//! A later request *passes* a reservation when it gets devices of it. It may do so only if its lease surely ends
//! before there would be enough devices without it, as the request declares how long it takes (EASY backfill:
//! Mu'alem and Feitelson, "Utilization, Predictability, Workloads, and User Runtime Estimates in Scheduling the
//! IBM SP2 with Backfilling", IEEE TPDS, 2001), or if it can be suspended, or may end. A lease that can be suspended
//! then is, with others that passed the same reservation, once there are enough devices together with those that
//! are free or being released (`reclaim.rs`); the free ones are held back from then on (`holds.rs`). So of the devices of
//! a reservation, all count for it that were granted since it was made, and it waits no longer than leases that had
//! devices before keep these.
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
use crate::queue::{Arrival, QueuedRequest, Rank, TenantRequests};
use crate::tenants::{Amounts, NOTHING, TenantLimit, TenantName};
use crate::time::Timestamp;

/// Devices for a request that waits, which later requests get only with leases that give them back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    /// The lease that the request would become.
    pub(crate) lease: LeaseId,
    tenant: TenantName,
    rank: Rank,
    /// Whether the request is within its tenant's guarantee.
    is_guaranteed: bool,
    /// Which devices it could get that no request with an earlier reservation could get.
    classes: BTreeSet<DeviceClass>,
    /// When there will be enough of these devices, if that is known, as leases that declare how long they take
    /// will have ended by then; the first of all times if there are enough already.
    starts_by: Option<Timestamp>,
}

/// The reservations, those first that are next, and the order of tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reservations {
    all: Vec<Reservation>,
    /// The place of each tenant in the order, if there are reservations.
    places: BTreeMap<TenantName, Place>,
}

/// What the order of requests depends on, as versions of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OrderBasis {
    leases: u64,
    queue: u64,
    pool: u64,
    policy: u64,
    past: u64,
    ranked_at: Timestamp,
}

/// What reservations depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Basis {
    order: OrderBasis,
    /// The latest of the requests that have waited for long enough.
    latest_due: Option<Arrival>,
}

/// The place of a tenant in the order: its share, and the number of its next request.
type Place = (u64, u64);

/// The next request of a tenant and shape.
type Head<'a> = (&'a TenantName, Rank, &'a Shape);

impl Engine {
    /// Finds the reservations as of now. Returns whether they or the order of tenants are others than before.
    pub(super) fn find_reservations(&mut self) -> bool {
        let basis = Basis {
            order: self.order_basis(),
            latest_due: self.latest_due(),
        };
        if self.reservations_basis.replace(basis) == Some(basis) {
            return false;
        }
        let found = self.reservations_now();
        let has_changed = found != self.reservations;
        self.reservations = found;
        has_changed
    }

    /// Returns what the order of requests depends on now.
    pub(super) fn order_basis(&self) -> OrderBasis {
        OrderBasis {
            leases: self.leases.index().used_version(),
            queue: self.queue.version(),
            pool: self.pool.index().version(),
            policy: self.policy_version,
            past: self.past_version,
            ranked_at: self.ranked_at,
        }
    }

    /// Returns whether a request may get a device, as far as reservations are concerned.
    pub(super) fn may_pass(&self, request: LeaseId, demand: &Demand, device: &DeviceSpec) -> bool {
        self.reservation_against(request, demand, device).is_none()
    }

    /// Returns the reservation because of which a request may not get a device.
    pub(super) fn reservation_against(
        &self,
        request: LeaseId,
        demand: &Demand,
        device: &DeviceSpec,
    ) -> Option<&Reservation> {
        if self.reservations.all.is_empty() || self.queue.guaranteed().contains(request) {
            return None;
        }
        let waiting = self.queue.get(request)?;
        let gives_way = demand.gives_way_on(device);
        let ends_at = demand.rounded_duration().map(|it| self.now + it);
        let may_pass = |it: &Reservation| {
            let is_limited =
                it.tenant == waiting.tenant && !self.are_allowed_together(it, waiting, device);
            let ends_in_time = match (ends_at, it.starts_by) {
                (Some(ends_at), Some(starts_by)) => ends_at <= starts_by,
                (None, _) | (_, None) => false,
            };
            ends_in_time || gives_way && !is_limited || !self.is_after(waiting, it)
        };
        let mut all = self.reservations.all.iter();
        all.find(|it| it.includes(device) && !may_pass(it))
    }

    /// Returns whether a tenant's limit allows devices like this one for a request, in addition to the most that its
    /// request with this reservation could get, and others that come before and can count on devices. Otherwise the
    /// request with the reservation would have to wait for the limit. Spot leases do not count, as they make room within
    /// the limit.
    fn are_allowed_together(
        &self,
        reservation: &Reservation,
        waiting: &QueuedRequest,
        device: &DeviceSpec,
    ) -> bool {
        let tenant = &reservation.tenant;
        let limit = &self.policy_of(tenant).limit;
        if *limit == TenantLimit::default() {
            return true;
        }
        let Some(reserved) = self.queue.get(reservation.lease) else {
            return true;
        };
        let mut used = self.counts_for(tenant, waiting.rank()).into_owned();
        used.subtract(self.spot_by(tenant));
        if !self.counting.contains(tenant, reservation.lease) {
            used.add(&self.most_for(&reserved.demand));
        }
        limit.allows_all(&used, &Amounts::most_of(&waiting.demand, [device]))
    }

    /// Returns whether a reservation concerns devices that meet a demand.
    pub(super) fn is_any_reserved(&self, demand: &Demand) -> bool {
        let mut classes = self.reservations.all.iter().flat_map(|it| &it.classes);
        classes.any(|class| demand.accepts(class))
    }

    /// Returns the reservations, those first that are next.
    pub(super) fn reservations(&self) -> impl Iterator<Item = &Reservation> {
        self.reservations.all.iter()
    }

    /// Returns the classes of devices that are reserved for each request.
    pub(super) fn reserved_devices(&self) -> Vec<(LeaseId, BTreeSet<DeviceClass>)> {
        let reservations = self.reservations();
        reservations
            .map(|it| (it.lease, it.classes.clone()))
            .collect()
    }

    /// Returns the reservation of a request, if it has one.
    pub(super) fn reservation_of(&self, request: LeaseId) -> Option<&Reservation> {
        self.reservations().find(|it| it.lease == request)
    }

    /// Returns the requests whose reservations a lease passes that gets these devices: by this request, or else
    /// as it goes on after entitled requests.
    pub(super) fn passed_by(
        &self,
        request: Option<&QueuedRequest>,
        devices: &[DeviceRef],
    ) -> BTreeSet<LeaseId> {
        let is_after = |it: &&Reservation| request.is_none_or(|request| self.is_after(request, it));
        let passed = self.reservations().filter(is_after).filter(|reservation| {
            let mut devices = devices.iter().filter_map(|it| self.pool.device(*it));
            devices.any(|device| reservation.includes(device))
        });
        passed.map(|it| it.lease).collect()
    }

    /// Returns the number of reservations of its own tenant that are before a request.
    pub(super) fn own_reservations_before(&self, request: &QueuedRequest) -> usize {
        let own = self.reservations().filter(|it| it.tenant == request.tenant);
        own.filter(|it| self.is_after(request, it)).count()
    }

    /// Returns whether a request beyond guarantees comes after another one that has a reservation.
    fn is_after(&self, request: &QueuedRequest, reservation: &Reservation) -> bool {
        if request.demand.is_spot || reservation.is_guaranteed {
            return true;
        }
        if request.tenant == reservation.tenant {
            return request.rank() > reservation.rank;
        }
        let place = |tenant: &TenantName| {
            let place = self.reservations.places.get(tenant);
            place.map(|place| (*place, tenant.clone()))
        };
        place(&request.tenant) > place(&reservation.tenant)
    }

    /// Returns the latest of the requests that have waited for long enough for a reservation.
    fn latest_due(&self) -> Option<Arrival> {
        let latest = self.now.checked_sub(self.options.reserve_after)?;
        self.queue.latest_arrival_until(latest)
    }

    /// Returns when the next request will have waited for long enough for a reservation.
    pub(super) fn next_reservation_at(&self) -> Option<Timestamp> {
        let latest_due = self.now.checked_sub(self.options.reserve_after);
        let next = self.queue.first_arrival_after(latest_due)?;
        Some(next + self.options.reserve_after)
    }

    /// Returns the reservations that there should be now.
    fn reservations_now(&self) -> Reservations {
        let latest = self.latest_due();
        let latest = latest.filter(|_| self.options.order == RequestOrder::Fair);
        let Some(latest_due) = latest else {
            return Reservations::default();
        };
        let tenants = self.tenants_in_order();
        let beyond = tenants.iter().flat_map(|((_, tenant), requests)| {
            let heads = requests.heads().iter();
            heads.map(|(rank, shape)| (*tenant, *rank, shape))
        });
        let guaranteed = self.guaranteed_heads();
        let is_due = |(_, rank, _): &Head<'_>| {
            let waiting = self.queue.get(rank.lease);
            waiting.is_some_and(|it| it.since <= latest_due.0)
        };
        let mut unclaimed: BTreeSet<_> = self.pool.classes().collect();
        let mut all = Vec::new();
        for (tenant, rank, shape) in guaranteed.into_iter().chain(beyond).filter(is_due) {
            if unclaimed.is_empty() {
                break;
            }
            let limit = &self.policy_of(tenant).limit;
            // Spot leases of the tenant make room within its limit (`own_spot.rs`). If they counted, a request would get
            // its reservation only after that, and keep a later one from devices for which some made room, too.
            let counts = self.used_without_spot(tenant);
            let may_have =
                |device: &DeviceSpec| shape.accepts(device) && limit.allows(&counts, device, shape);
            let wanted = shape.devices as usize;
            if self.pool.offers(shape, may_have) < wanted {
                continue;
            }
            let classes = unclaimed.extract_if(.., |class| may_have(class));
            let mut reservation = Reservation {
                lease: rank.lease,
                tenant: tenant.clone(),
                rank,
                is_guaranteed: self.queue.guaranteed().contains(rank.lease),
                classes: classes.cloned().collect(),
                starts_by: None,
            };
            if self.pool.offers(shape, |it| reservation.includes(it)) >= wanted {
                reservation.starts_by = self.starts_by(&reservation, wanted);
                all.push(reservation);
            }
        }
        let places = tenants.keys();
        let places = places.map(|(place, tenant)| ((*tenant).clone(), *place));
        let places = places.filter(|_| !all.is_empty()).collect();
        Reservations { all, places }
    }

    /// Returns when there will be as many devices as `wanted` of a reservation, if that is known and makes a
    /// difference for a request that waits.
    fn starts_by(&self, reservation: &Reservation, wanted: usize) -> Option<Timestamp> {
        let mut shapes = self.queue.shapes();
        let makes_difference = shapes.any(|shape| shape.max_duration.is_some());
        let includes = |device: &DeviceSpec| reservation.includes(device);
        if !makes_difference {
            return None;
        }
        let at = self.enough_at(reservation.lease, wanted, includes);
        // Otherwise it would be another reservation at each event.
        at.map(|at| {
            if at > self.now {
                at
            } else {
                Timestamp::default()
            }
        })
    }

    /// Returns the tenants with requests beyond guarantees, other than those for spot leases, in order; each with its
    /// place. Spot leases do not count in that: otherwise one that is suspended for a request could make another tenant
    /// the next, whose reservation keeps the request from the devices.
    pub(super) fn tenants_in_order(&self) -> BTreeMap<(Place, &TenantName), &TenantRequests> {
        let pool = self.pool.amounts();
        let (taken, passed) = (self.taken_for_reservations(), self.passed_own());
        let tenants = self
            .queue
            .by_tenant()
            .iter()
            .filter_map(|(tenant, requests)| {
                let (first, _) = requests.heads().first_key_value()?;
                let used = self.used_without_spot(tenant);
                let mut used = self.queue.guaranteed().with(&used, tenant);
                used.subtract(passed.get(tenant).unwrap_or(&NOTHING));
                used.add(taken.get(tenant).unwrap_or(&NOTHING));
                let share = self.shares(&pool).key(tenant, &used, &NOTHING);
                Some((((share, first.number), tenant), requests))
            });
        tenants.collect()
    }

    /// Returns the next request within its guarantee of each tenant and shape, in order. Leases of others that cannot be
    /// suspended would keep such a request waiting for ever if any could follow them.
    fn guaranteed_heads(&self) -> Vec<Head<'_>> {
        let guaranteed = self.queue.guaranteed().order.iter();
        let requests = guaranteed.filter_map(|lease| self.queue.get(*lease));
        let mut known = BTreeSet::new();
        let heads = requests.filter_map(|request| {
            let tenant = &request.tenant;
            let shape = self
                .queue
                .by_tenant()
                .get(tenant)?
                .shape_of(&request.demand)?;
            let is_first = known.insert((tenant, shape));
            is_first.then(|| (tenant, request.rank(), shape))
        });
        heads.collect()
    }

    /// Returns what was taken from tenants for requests with reservations that still wait. Without that, such a
    /// tenant would be next as soon as its leases are suspended, and get the devices back. What was taken for the tenant's
    /// own next request did not count before either; if it counted then, that request would not be next any more.
    fn taken_for_reservations(&self) -> BTreeMap<&TenantName, Amounts> {
        let mut taken = BTreeMap::<_, Amounts>::new();
        let reclaimed = self.leases.index().reclaimed();
        for lease in reclaimed.filter_map(|id| self.leases.get(id)) {
            let Some(tenant) = lease.tenant.as_ref().filter(|_| !lease.is_spot) else {
                continue;
            };
            let waits = |it: &LeaseId| self.queue.get(*it).is_some();
            let is_own_next = |it: &LeaseId| self.tenant_if_next(*it) == Some(tenant);
            let mut passed = lease.passed.iter();
            if lease.passed.iter().any(waits) && !passed.any(is_own_next) {
                taken.entry(tenant).or_default().add(&lease.charge);
            }
        }
        taken
    }

    /// Returns what tenants have that passed requests of their own which are next of their shape, without spot leases.
    fn passed_own(&self) -> BTreeMap<&TenantName, Amounts> {
        let passed = self.leases.index().passed();
        let mut leases_of = BTreeMap::<_, BTreeSet<LeaseId>>::new();
        for (request, leases) in passed {
            if let Some(tenant) = self.tenant_if_next(*request) {
                leases_of.entry(tenant).or_default().extend(leases);
            }
        }
        let has = leases_of.into_iter().map(|(tenant, leases)| {
            let mut has = Amounts::default();
            for lease in leases.into_iter().filter_map(|id| self.leases.get(id)) {
                if lease.tenant.as_ref() == Some(tenant) && !lease.is_spot {
                    has.add(&lease.charge);
                }
            }
            (tenant, has)
        });
        has.collect()
    }

    /// Returns the tenant of a request if it is next of its tenant and shape.
    fn tenant_if_next(&self, request: LeaseId) -> Option<&TenantName> {
        let waiting = self.queue.get(request)?;
        let requests = self.queue.by_tenant().get(&waiting.tenant)?;
        let is_next = requests.heads().contains_key(&waiting.rank());
        is_next.then_some(&waiting.tenant)
    }
}

#[cfg(test)]
impl Engine {
    /// Returns the reservations as of the last decision, the first first.
    pub(crate) fn reserved(&self) -> Vec<(LeaseId, BTreeSet<DeviceClass>)> {
        self.reserved_devices()
    }

    /// Returns the reservations that there should be now.
    pub(crate) fn reserved_now(&self) -> Vec<(LeaseId, BTreeSet<DeviceClass>)> {
        let reservations = self.reservations_now().all.into_iter();
        reservations.map(|it| (it.lease, it.classes)).collect()
    }
}

impl Reservation {
    /// Returns whether a device is one of those that are reserved.
    pub(super) fn includes(&self, device: &DeviceSpec) -> bool {
        self.classes.iter().any(|class| class.is_of(device))
    }
}
