//! The test's own model of reservations: it goes through all requests and devices, where the engine goes
//! through the next requests and the classes of devices.

use std::collections::{BTreeMap, BTreeSet};

use super::share_model::needs_of;
use super::world::{SimRequest, World, meets_demand, tenant_of};
use super::*;
use crate::Amounts;
use crate::device::Shape;
use crate::lease::Lease;
use crate::pool::DeviceClass;
use crate::tenants::NOTHING;

/// After this time, in ms, a request may have a reservation.
pub(super) const RESERVE_AFTER: u64 = 3_000;

/// A device without its name, which makes no difference.
pub(super) type Class = (String, u64, Option<([u8; 16], bool)>);

/// What is reserved for a request.
pub(super) type Reserved = BTreeMap<LeaseId, BTreeSet<Class>>;

pub(super) fn class_of(device: &DeviceSpec) -> Class {
    let fingerprint = device.fingerprint.map(|it| (it.hash, it.is_exact));
    (device.kind.clone(), device.memory_bytes, fingerprint)
}

/// Returns whether a request may get a device although it is reserved for another.
fn gives_way_on(demand: &Demand, device: &DeviceSpec) -> bool {
    let is_exact = device.fingerprint.map(|it| it.is_exact);
    let can_go_on = match (demand.durability, is_exact) {
        (Durability::Off, _) | (_, None) => false,
        (Durability::Exact, Some(is_exact)) => is_exact,
        (Durability::Auto | Durability::Continue, Some(_)) => true,
    };
    demand.is_spot || demand.may_end || can_go_on && (demand.devices == 1 || demand.kind.is_some())
}

impl World {
    /// Returns the reservations that there must be.
    fn expected_reservations(&self) -> Reserved {
        let mut unclaimed: BTreeSet<_> = self.offered().map(class_of).collect();
        let mut reserved = Reserved::new();
        let order = self.order.iter().copied();
        let guaranteed = order.filter(|(_, is_guaranteed)| *is_guaranteed);
        let guaranteed: Vec<_> = guaranteed.map(|(index, _)| index).collect();
        for index in guaranteed.into_iter().chain(self.reservation_order()) {
            let waiting = &self.waiting[index];
            if self.now < waiting.since + RESERVE_AFTER {
                continue;
            }
            let wanted = waiting.demand.devices as usize;
            let own_spot = self.engine.used_for_spot().get(&tenant_of(waiting.client));
            let own_spot = own_spot.cloned().unwrap_or_default();
            let suitable = self.offered().filter(|device| {
                meets_demand(device, &waiting.demand)
                    && self.is_allowed_without(waiting, device, &own_spot)
            });
            let suitable: Vec<_> = suitable.map(class_of).collect();
            if suitable.len() < wanted || !self.is_head(index) {
                continue;
            }
            let own = unclaimed.extract_if(.., |class| suitable.contains(class));
            let own: BTreeSet<_> = own.collect();
            let left = suitable.iter().filter(|class| own.contains(*class));
            if left.count() >= wanted {
                reserved.insert(waiting.lease, own);
            }
        }
        reserved
    }

    /// Returns whether no request of the same tenant and shape comes before one, of those within guarantees, or of those
    /// beyond them.
    fn is_head(&self, index: usize) -> bool {
        let waiting = &self.waiting[index];
        let is_guaranteed = |other: usize| self.order.contains(&(other, true));
        let shape = Shape::of(&waiting.demand);
        let mut others = (0..).zip(&self.waiting);
        !others.any(|(at, other)| {
            let is_own = tenant_of(other.client) == tenant_of(waiting.client);
            let is_alike = is_own && Shape::of(&other.demand) == shape;
            is_alike
                && is_guaranteed(at) == is_guaranteed(index)
                && self.rank(at) < self.rank(index)
        })
    }

    /// Returns the requests beyond guarantees that are not for spot leases, in the order in which they get
    /// reservations.
    pub(super) fn reservation_order(&self) -> Vec<usize> {
        let order = self.order.iter().copied();
        // Spot leases do not count.
        let mut used = self.engine.used_by_tenants().clone();
        for (tenant, spot) in self.engine.used_for_spot() {
            used.get_mut(tenant).unwrap().subtract(spot);
        }
        let (guaranteed, rest): (Vec<_>, Vec<_>) = order.partition(|(_, it)| *it);
        for (index, _) in guaranteed {
            self.add_guaranteed_to(&mut used, index);
        }
        let mut tenants = BTreeMap::<TenantName, Vec<usize>>::new();
        for (index, _) in rest {
            let tenant = tenant_of(self.waiting[index].client);
            tenants.entry(tenant).or_default().push(index);
        }
        let pool = Amounts::of(self.offered());
        let mut ordered = Vec::new();
        for (tenant, mut own) in tenants {
            own.retain(|index| !self.waiting[*index].demand.is_spot);
            own.sort_by_key(|&index| self.rank(index));
            let Some(first) = own.first().copied() else {
                continue;
            };
            let mut used = used.clone();
            let of_tenant = used.entry(tenant.clone()).or_default();
            let heads = self.heads(&own);
            of_tenant.subtract(&self.passed_own(&tenant, &heads));
            for (_, lease) in self.engine.leases().iter() {
                let mut passed = self.waiting.iter().map(|it| it.lease);
                let is_own = lease.tenant.as_ref() == Some(&tenant) && lease.is_reclaimed;
                let is_own = is_own && !lease.is_spot;
                let is_for_own = heads.iter().any(|it| lease.passed.contains(it));
                if is_own && passed.any(|it| lease.passed.contains(&it)) && !is_for_own {
                    of_tenant.add(&lease.charge);
                }
            }
            let share = self.share(&used, &BTreeMap::new(), &pool, &tenant);
            ordered.push((share, first, own));
        }
        ordered.sort_by(|one, other| one.partial_cmp(other).unwrap());
        ordered.into_iter().flat_map(|(.., own)| own).collect()
    }

    /// Returns the next one of each shape of a tenant's requests, which are in order.
    fn heads(&self, requests: &[usize]) -> Vec<LeaseId> {
        let mut heads = BTreeMap::new();
        for index in requests {
            let waiting = &self.waiting[*index];
            let shape = Shape::of(&waiting.demand);
            heads.entry(shape).or_insert(waiting.lease);
        }
        heads.into_values().collect()
    }

    /// Returns what a tenant has that passed one of these requests, which are the next ones of its own.
    fn passed_own(&self, tenant: &TenantName, heads: &[LeaseId]) -> Amounts {
        let mut passed = Amounts::default();
        for (_, lease) in self.engine.leases().iter() {
            let mut heads = heads.iter();
            let is_own = lease.tenant.as_ref() == Some(tenant) && lease.counts();
            let is_own = is_own && !lease.is_spot;
            if is_own && heads.any(|head| lease.passed.contains(head)) {
                passed.add(&lease.charge);
            }
        }
        passed
    }

    /// Returns when a request with a reservation of these classes will have enough devices, if that is known.
    fn starts_by(&self, waiting: &SimRequest, classes: &BTreeSet<Class>) -> Option<u64> {
        let known = self.leases.as_ref()?;
        let is_own = |it: &DeviceRef| {
            let is_one = classes.contains(&class_of(self.device(*it)));
            is_one && self.is_usable(*it)
        };
        let needs = needs_of(waiting);
        let is_enough = |gone: &BTreeSet<LeaseId>| {
            let is_left = |it: &DeviceRef| {
                self.has_only(*it, gone) && self.is_held_for_none_but(waiting.lease, *it)
            };
            let leases = gone.iter().filter_map(|id| known.get(id));
            let left = leases.flat_map(|lease| lease.lease_devices.iter().copied());
            let left = left
                .filter(is_left)
                .chain(self.coming().into_iter().filter(is_left));
            let with_room = self.with_room(&needs, gone, false, waiting.lease);
            let all: BTreeSet<_> = left.chain(with_room).filter(is_own).collect();
            all.len() >= waiting.demand.devices as usize
        };
        let passed = known.iter().filter(|(id, lease)| {
            let known = self.engine.leases().get(**id).unwrap();
            known.passed.contains(&waiting.lease) && !lease.is_suspended
        });
        let mut gone: BTreeSet<_> = passed.map(|(id, _)| *id).collect();
        if is_enough(&gone) {
            return Some(self.now);
        }
        let ends = known
            .iter()
            .filter_map(|(id, it)| Some((it.time_over_at()?, *id)));
        let mut ends: Vec<_> = ends.collect();
        ends.sort();
        for (at, id) in ends {
            gone.insert(id);
            if is_enough(&gone) {
                return Some(at);
            }
        }
        None
    }

    /// Returns whether a request that is not within a guarantee may get a device, as far as reservations are
    /// concerned.
    pub(super) fn may_pass(&self, waiting: &SimRequest, device: &DeviceSpec) -> bool {
        let mut others = self.reserved.iter().filter(|(of, _)| **of != waiting.lease);
        let order = self.reservation_order();
        let place = |lease: LeaseId| order.iter().position(|at| self.waiting[*at].lease == lease);
        let is_free = |(of, classes): (&LeaseId, &BTreeSet<Class>)| {
            // Those for spot leases come last.
            let is_before = place(waiting.lease).is_some_and(|it| Some(it) < place(*of));
            let mut requests = self.waiting.iter();
            let first = requests.find(|it| it.lease == *of).unwrap();
            let is_in_time = || {
                let takes = waiting.demand.max_duration?.as_millis() as u64;
                let starts_by = self.starts_by(first, classes)?;
                (self.now + takes.next_power_of_two() <= starts_by).then_some(())
            };
            let tenant = tenant_of(first.client);
            let spot = self.engine.used_for_spot().get(&tenant).cloned();
            let spot = spot.unwrap_or_default();
            let more = || {
                let mut more = self.most_of(first);
                let counting = self.waiting.iter().filter(|it| {
                    let is_other = it.lease != *of && tenant_of(it.client) == tenant;
                    is_other
                        && self.engine.counts_on_devices(it.lease)
                        && self.counts_before(it, waiting)
                });
                counting.for_each(|it| more.add(&self.most_of(it)));
                more
            };
            let is_limited = tenant == tenant_of(waiting.client)
                && !self.is_allowed_with(waiting, device, &more(), &spot);
            let gives_way = gives_way_on(&waiting.demand, device) && !is_limited;
            let is_of_other = !classes.contains(&class_of(device));
            is_of_other || is_before || gives_way || is_in_time().is_some()
        };
        others.all(is_free)
    }

    /// Returns whether a request of a tenant comes before another one of it: those within the guarantee first, then by
    /// priority and arrival.
    fn counts_before(&self, one: &SimRequest, other: &SimRequest) -> bool {
        let is_guaranteed = |it: &SimRequest| {
            let mut order = self.order.iter();
            order.any(|(at, is_guaranteed)| self.waiting[*at].lease == it.lease && *is_guaranteed)
        };
        let place = |it: &SimRequest| {
            let priority = std::cmp::Reverse(it.priority);
            (!is_guaranteed(it), it.demand.is_spot, priority, it.lease)
        };
        place(one) < place(other)
    }

    /// Reservations are as they must be, and of those for which there are enough devices, none waits.
    pub(super) fn check_reservations(&self) {
        let expected = self.expected_reservations();
        assert_eq!(self.reserved, expected);
        if self.leases.is_none() {
            return;
        }
        // Requests within guarantees get devices first.
        if self.order.iter().any(|(_, is_guaranteed)| *is_guaranteed) {
            return;
        }
        // Only as of the last event in which something could have changed.
        if let Some((lease, classes)) = self.engine.reserved().into_iter().next() {
            let mut waiting = self.waiting.iter();
            let Some(waiting) = waiting.find(|it| it.lease == lease) else {
                panic!("{lease} does not wait");
            };
            let fits = |device_ref: &DeviceRef| {
                let device = self.device(*device_ref);
                let is_own = classes.iter().any(|class| class.is_of(device));
                is_own && self.is_allowed(waiting, device, true)
            };
            let needed = self.engine.needed_by_leases();
            self.check_too_few(waiting, &needed, fits, |id, sim| {
                let known = self.engine.leases().get(id);
                let is_for = known.is_some_and(|it| it.passed.contains(&lease) || it.is_spot);
                is_for && self.is_suspendable(id, sim)
            });
        }
    }
}

/// What a request that is to be granted would pass, by the world's knowledge before an event.
pub(super) struct Before {
    reserved: Reserved,
    /// The requests that come after each of these, of the same tenant.
    later: BTreeMap<LeaseId, BTreeSet<LeaseId>>,
}

impl World {
    /// Returns what is reserved now, by the engine.
    pub(super) fn reserved_now(&self) -> Reserved {
        let reserved = self.engine.reserved_now().into_iter();
        let classes =
            |classes: BTreeSet<DeviceClass>| classes.iter().map(|it| class_of(it)).collect();
        reserved.map(|(of, it)| (of, classes(it))).collect()
    }

    /// Returns what is reserved now, and which requests of the same tenants come later.
    pub(super) fn before(&self) -> Before {
        let reserved = self.reserved.clone();
        let mut later = BTreeMap::new();
        for lease in reserved.keys() {
            let mut waiting = self.waiting.iter();
            let Some(at) = waiting.position(|it| it.lease == *lease) else {
                continue;
            };
            let first = &self.waiting[at];
            let others = (0..).zip(&self.waiting);
            let others = others.filter(|(index, other)| {
                let is_own = tenant_of(other.client) == tenant_of(first.client);
                is_own && self.rank(*index) > self.rank(at)
            });
            later.insert(*lease, others.map(|(_, other)| other.lease).collect());
        }
        Before { reserved, later }
    }

    /// Returns whether a request waits that would be within the guarantee of its tenant if the tenant did not have a lease.
    fn was_guaranteed_another_without(&self, lease: &Lease) -> bool {
        let tenant = lease.tenant.as_ref().filter(|_| lease.counts());
        let policy = tenant.and_then(|tenant| self.policy.get(tenant));
        let Some((tenant, policy)) = tenant.zip(policy) else {
            return false;
        };
        let mut used = self.engine.used_by_tenants()[tenant].clone();
        used.subtract(&lease.charge);
        let spot = self.engine.used_for_spot().get(tenant);
        let mut own = self.waiting.iter();
        own.any(|it| {
            let is_own = tenant_of(it.client) == *tenant;
            is_own && policy.guarantees(&used, spot.unwrap_or(&NOTHING), &self.most_of(it))
        })
    }

    /// A request that was granted is not one that comes after another of its tenant with a reservation of these
    /// devices, unless it can be suspended; then it has passed that one. A request that has arrived in this
    /// event is the last. `has_reclaimed` is whether leases were suspended for others in this event.
    pub(super) fn check_passed(
        &self,
        before: &Before,
        granted: &SimRequest,
        devices: &[DeviceSpec],
        has_reclaimed: bool,
    ) {
        let now = &self.reserved;
        for (lease, classes) in &before.reserved {
            let still = now.get(lease).is_some_and(|it| it == classes);
            let is_later = before
                .later
                .get(lease)
                .is_some_and(|it| it.contains(&granted.lease));
            let mut devices = devices.iter().filter(|it| classes.contains(&class_of(it)));
            let Some(first) = devices.next().filter(|_| still && is_later) else {
                continue;
            };
            let known = self.engine.leases().get(granted.lease);
            let is_passed = known.is_none_or(|known| known.passed.contains(lease));
            // While several are granted, others may be next for a moment, or within the guarantee. So may be another
            // tenant before leases are suspended: what it had counts anew with time.
            let is_one_of_several = self.granted.len() > 1 || has_reclaimed;
            let is_guaranteed =
                is_one_of_several || self.leases.is_none() || !self.is_borrowed(granted.lease);
            // Another request of the tenant may have been within the guarantee until then, and had the reservation of some
            // of these devices.
            let had_other = known.is_some_and(|it| self.was_guaranteed_another_without(it));
            let is_guaranteed = is_guaranteed || had_other;
            // Whether it ends in time was decided with what others had at that moment.
            let may_pass =
                gives_way_on(&granted.demand, first) || granted.demand.max_duration.is_some();
            assert!(
                is_guaranteed || is_passed && may_pass,
                "{} passed {lease}",
                granted.demand
            );
        }
    }
}
