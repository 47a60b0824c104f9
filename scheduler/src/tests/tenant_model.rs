//! The test's own model of the guarantees and limits of tenants: it tries and counts, where the engine
//! keeps order.

use std::collections::{BTreeMap, BTreeSet};

use super::share_model::{counted, needs_of};
use super::world::{SimLease, SimRequest, World, meets_demand, tenant_of};
use super::*;
use crate::Amounts;
use crate::device::{Requirement, Share};
use crate::lease::{Lease, Standing};

/// The devices for a request that waits.
struct Enough {
    /// Those that are coming, and fit it.
    coming: usize,
    /// Those of them that no lease needs which waits.
    certain: usize,
    /// Those of leases that make room.
    devices: usize,
}

impl World {
    /// Returns the devices that leases could get if nothing were leased.
    pub(super) fn offered(&self) -> impl Iterator<Item = &DeviceSpec> {
        let known = self.workers.iter().filter_map(|it| it.known.as_ref());
        let known = known.filter(|known| !known.is_draining());
        known.flat_map(|known| &known.devices)
    }

    /// Returns the number of devices of a kind that a tenant has, and the memory of all that it has.
    fn used(&self, tenant: &TenantName, kind: &str) -> (u64, u128) {
        let used = self.engine.used_by_tenants().get(tenant).cloned();
        let used = used.unwrap_or_default();
        let count = used.permille.get(kind).copied().unwrap_or_default();
        (count, used.memory_bytes)
    }

    /// Returns whether the tenant of a request may have as many devices like this one as are requested, in
    /// addition to what it has, or by themselves.
    pub(super) fn is_allowed(
        &self,
        waiting: &SimRequest,
        device: &DeviceSpec,
        in_addition: bool,
    ) -> bool {
        let (tenant, kind) = (tenant_of(waiting.client), &device.kind);
        let used = match in_addition {
            true => self.used(&tenant, kind),
            false => (0, 0),
        };
        self.is_allowed_beside(waiting, device, used)
    }

    /// As [`is_allowed`](Self::is_allowed) in addition to what its tenant has, without what is `gone`.
    pub(super) fn is_allowed_without(
        &self,
        waiting: &SimRequest,
        device: &DeviceSpec,
        gone: &Amounts,
    ) -> bool {
        let (count, bytes) = self.used(&tenant_of(waiting.client), &device.kind);
        let gone_of_kind = gone.permille.get(&device.kind).copied();
        let count = count - gone_of_kind.unwrap_or_default();
        self.is_allowed_beside(waiting, device, (count, bytes - gone.memory_bytes))
    }

    /// As [`is_allowed`](Self::is_allowed) in addition to what its tenant has, if that were `more`, and `less`.
    pub(super) fn is_allowed_with(
        &self,
        waiting: &SimRequest,
        device: &DeviceSpec,
        more: &Amounts,
        less: &Amounts,
    ) -> bool {
        let (count, bytes) = self.used(&tenant_of(waiting.client), &device.kind);
        let of_kind = |it: &Amounts| it.permille.get(&device.kind).copied().unwrap_or_default();
        let count = count + of_kind(more) - of_kind(less);
        let bytes = bytes + more.memory_bytes - less.memory_bytes;
        self.is_allowed_beside(waiting, device, (count, bytes))
    }

    fn is_allowed_beside(
        &self,
        waiting: &SimRequest,
        device: &DeviceSpec,
        (count, bytes): (u64, u128),
    ) -> bool {
        let Some(policy) = self.policy.get(&tenant_of(waiting.client)) else {
            return true;
        };
        let wanted = u64::from(waiting.demand.devices);
        let needed_bytes = u128::from(wanted) * u128::from(waiting.demand.memory_of(device));
        let permille = wanted * counted(device, needs_of(waiting)(device));
        let most = policy.limit.devices.get(&device.kind);
        let most_bytes = policy.limit.memory_bytes;
        most.is_none_or(|most| count + permille <= 1000 * u64::from(*most))
            && most_bytes.is_none_or(|most| bytes + needed_bytes <= u128::from(most))
    }

    /// The tenant of a request that was granted has no more devices of these kinds than its limit.
    pub(super) fn check_limit(&self, granted: &SimRequest, devices: &BTreeSet<DeviceRef>) {
        let tenant = tenant_of(granted.client);
        let Some(policy) = self.policy.get(&tenant) else {
            return;
        };
        for device_ref in devices {
            let kind = &self.device(*device_ref).kind;
            let (count, bytes) = self.used(&tenant, kind);
            if let Some(most) = policy.limit.devices.get(kind) {
                assert!(
                    count <= 1000 * u64::from(*most),
                    "{tenant} has {count} {kind}"
                );
            }
            let most = policy.limit.memory_bytes;
            assert!(most.is_none_or(|most| bytes <= u128::from(most)));
        }
    }

    /// Returns whether a lease that was suspended and resumed would bring its tenant over its limit.
    pub(super) fn is_over_limit(&self, lease: &Lease) -> bool {
        let is_resumed = matches!(lease.standing, Standing::Resuming { cause: None, .. });
        let policy = lease.tenant.as_ref().and_then(|it| self.policy.get(it));
        let Some(policy) = policy.filter(|_| is_resumed) else {
            return false;
        };
        let used = self.engine.used_by_tenants();
        let used = lease.tenant.as_ref().and_then(|it| used.get(it)).cloned();
        let used = used.unwrap_or_default();
        let charge = &lease.charge;
        let mut kinds = charge.permille.iter();
        let is_kind_over = kinds.any(|(kind, count)| {
            let used = used.permille.get(kind).copied().unwrap_or_default();
            let most = policy.limit.devices.get(kind);
            most.is_some_and(|most| used + count > 1000 * u64::from(*most))
        });
        let bytes = used.memory_bytes + charge.memory_bytes;
        let most = policy.limit.memory_bytes;
        is_kind_over || most.is_some_and(|most| bytes > u128::from(most))
    }

    /// Returns whether a lease that waits is a spot lease that could bring its tenant over its limit, together with
    /// requests of the tenant that are not for spot leases.
    pub(super) fn is_over_limit_with_requests(&self, lease: &Lease) -> bool {
        let tenant = lease.tenant.as_ref().filter(|_| lease.is_spot);
        let charge = match lease.counts() {
            true => Amounts::default(),
            false => lease.charge.clone(),
        };
        tenant.is_some_and(|it| self.could_be_over_limit(it, &charge, |_| true))
    }

    /// Returns whether a request could bring its tenant over its limit, together with others of the tenant that can
    /// count on devices.
    pub(super) fn could_be_over_limit_with_others(&self, waiting: &SimRequest) -> bool {
        let tenant = tenant_of(waiting.client);
        let is_other =
            |it: &SimRequest| it.lease != waiting.lease && self.engine.counts_on_devices(it.lease);
        self.could_be_over_limit(&tenant, &self.most_of(waiting), is_other)
    }

    fn could_be_over_limit(
        &self,
        tenant: &TenantName,
        more: &Amounts,
        is_other: impl Fn(&SimRequest) -> bool,
    ) -> bool {
        let Some(policy) = self.policy.get(tenant) else {
            return false;
        };
        let others = self
            .waiting
            .iter()
            .filter(|it| is_other(it) && !it.demand.is_spot && tenant_of(it.client) == *tenant);
        let mut all = self.engine.used_by_tenants().get(tenant).cloned();
        let all = all.get_or_insert_default();
        all.add(more);
        let mut has_other = false;
        for waiting in others {
            has_other = true;
            all.add(&self.most_of(waiting));
        }
        let is_over = |(kind, most): (&String, &u32)| {
            all.permille.get(kind).copied().unwrap_or_default() > 1000 * u64::from(*most)
        };
        let most_bytes = policy.limit.memory_bytes.map(u128::from);
        let is_beyond = policy.limit.devices.iter().any(is_over)
            || most_bytes.is_some_and(|most| all.memory_bytes > most);
        has_other && is_beyond
    }

    /// Returns the most that a request could have, as far as limits are concerned.
    pub(super) fn most_of(&self, waiting: &SimRequest) -> Amounts {
        let mut most = Amounts::default();
        let wanted = u64::from(waiting.demand.devices);
        for device in self.offered() {
            if meets_demand(device, &waiting.demand) {
                let permille = wanted * counted(device, needs_of(waiting)(device));
                let bytes = u128::from(wanted) * u128::from(waiting.demand.memory_of(device));
                let of_kind = most.permille.entry(device.kind.clone()).or_default();
                *of_kind = permille.max(*of_kind);
                most.memory_bytes = most.memory_bytes.max(bytes);
            }
        }
        most.all_permille = most.permille.values().sum();
        most
    }

    /// A lease counts as the devices that it was granted, and its tenant is that of its client. After a restart that
    /// lost its record, it counts as those that it has then, and goes on counting as these.
    pub(super) fn check_charges(&self) {
        for (id, lease) in self.engine.leases().iter() {
            let tenant = lease.owner.map(|owner| {
                let mut clients = self.clients.iter();
                clients.position(|client| client.id == owner.0).unwrap()
            });
            // After a restart, it is not known before the client attaches.
            assert!(
                lease.tenant.is_none() || lease.tenant == tenant.map(tenant_of),
                "{id}"
            );
            if !lease.runs() {
                continue;
            }
            let share = lease.share();
            let mut tokens = self.clients.iter().flat_map(|it| it.tokens.get(&id));
            let granted = tokens.next().map(|it| charge_of(it.granted.iter(), share));
            let is_granted = granted.as_ref() == Some(&lease.charge);
            let devices = lease.lease_devices.keys().map(|it| self.device(*it));
            let has_restarted = self.leases.is_none();
            let counted = self.charges.get(&id) == Some(&lease.charge);
            let is_counted = counted || lease.charge == charge_of(devices, share);
            let counts = is_granted || has_restarted && is_counted;
            assert!(counts, "{id} counts as {:?}, not {granted:?}", lease.charge);
        }
    }

    /// Returns the position of each request that waits in `self.waiting`, in the order in which they get
    /// devices, and whether it is within its tenant's guarantee.
    pub(super) fn expected_order(&self) -> Vec<(usize, bool)> {
        let mut used: BTreeMap<_, Amounts> = self.engine.used_by_tenants().clone();
        let in_spot = self.engine.used_for_spot();
        let mut rest: Vec<_> = (0..self.waiting.len()).collect();
        rest.sort_by_key(|&index| self.rank(index));
        let is_guaranteed = |index: usize, used: &BTreeMap<TenantName, Amounts>| {
            let waiting = &self.waiting[index];
            if waiting.demand.is_spot {
                return false;
            }
            let tenant = tenant_of(waiting.client);
            let kinds = self.kinds_of(waiting);
            let is_within = |(kind, each): (&String, &u64)| {
                let policy = self.policy.get(&tenant)?;
                let most = *policy.guaranteed.get(kind)?;
                let count = |used: &BTreeMap<TenantName, Amounts>| {
                    let count = used.get(&tenant).and_then(|used| used.permille.get(kind));
                    count.copied().unwrap_or_default()
                };
                let all = count(used) - count(in_spot) + each * u64::from(waiting.demand.devices);
                (all <= 1000 * u64::from(most)).then_some(())
            };
            !kinds.is_empty() && kinds.iter().all(|it| is_within(it).is_some())
        };
        let mut guaranteed = Vec::new();
        rest.retain(|&index| {
            let is_guaranteed = is_guaranteed(index, &used);
            if is_guaranteed {
                self.add_guaranteed_to(&mut used, index);
                guaranteed.push(index);
            }
            !is_guaranteed
        });
        let mut order = Vec::new();
        while let Some(next) = self.first_of_tenants(&guaranteed, |_| 0.0) {
            guaranteed.retain(|index| *index != next);
            order.push((next, true));
        }
        let pool = Amounts::of(self.offered());
        let mut spot = self.engine.used_for_spot().clone();
        let is_spot = |index: &usize| self.waiting[*index].demand.is_spot;
        let (for_spot, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(is_spot);
        for mut rest in [others, for_spot] {
            while let Some(next) =
                self.first_of_tenants(&rest, |tenant| self.share(&used, &spot, &pool, tenant))
            {
                rest.retain(|index| *index != next);
                self.add_to(&mut used, next);
                if is_spot(&next) {
                    self.add_to(&mut spot, next);
                }
                order.push((next, false));
            }
        }
        order
    }

    /// Returns what orders the requests of a tenant.
    pub(super) fn rank(&self, index: usize) -> (bool, i32, usize) {
        let waiting = &self.waiting[index];
        (waiting.demand.is_spot, -waiting.priority, index)
    }

    /// Returns the first request of the tenant that has the smallest share, or else whose first one is the
    /// earliest.
    fn first_of_tenants(
        &self,
        requests: &[usize],
        share: impl Fn(&TenantName) -> f64,
    ) -> Option<usize> {
        let tenants: BTreeSet<_> = requests
            .iter()
            .map(|index| tenant_of(self.waiting[*index].client))
            .collect();
        let firsts = tenants.iter().filter_map(|tenant| {
            let mut requests = requests.iter();
            let first = requests.find(|it| tenant_of(self.waiting[**it].client) == *tenant);
            Some((share(tenant), *first?))
        });
        let first = firsts.min_by(|one, other| one.partial_cmp(other).unwrap());
        first.map(|(_, index)| index)
    }

    /// Returns the share of a tenant, of which a spot lease counts a quarter.
    pub(super) fn share(
        &self,
        used: &BTreeMap<TenantName, Amounts>,
        spot: &BTreeMap<TenantName, Amounts>,
        pool: &Amounts,
        of: &TenantName,
    ) -> f64 {
        let used = used.get(of).cloned().unwrap_or_default();
        let spot = spot.get(of).cloned().unwrap_or_default();
        let mut present = 0_f64;
        let mut part = |used: f64, spot: f64, total: f64| {
            if total > 0.0 {
                present = present.max((used - 0.75 * spot).max(0.0) / total);
            }
        };
        for (kind, count) in &used.permille {
            let spot = spot.permille.get(kind).copied().unwrap_or_default();
            let total = pool.permille.get(kind).copied().unwrap_or_default();
            part(*count as f64, spot as f64, total as f64);
        }
        let all = |it: &Amounts| it.all_permille as f64;
        part(all(&used), all(&spot), all(pool));
        let (memory, pool_memory) = (used.memory_bytes as f64, pool.memory_bytes as f64);
        part(memory, spot.memory_bytes as f64, pool_memory);
        let weight = self.policy.get(of).map_or(1, |policy| policy.weight);
        // Its definition is tested where it is.
        (present + self.engine.ranked_past_share(of)) / f64::from(weight)
    }

    /// Returns the kinds of devices that a request could get, each with the most that one of these counts as, of
    /// all that meet the demand.
    fn kinds_of(&self, waiting: &SimRequest) -> BTreeMap<String, u64> {
        let suitable = self
            .offered()
            .filter(|it| meets_demand(it, &waiting.demand));
        let mut kinds = BTreeMap::<String, u64>::new();
        for device in suitable {
            let most = kinds.entry(device.kind.clone()).or_default();
            *most = (*most).max(counted(device, needs_of(waiting)(device)));
        }
        kinds
    }

    /// Counts a request within a guarantee as granted: it uses up the guarantees of all kinds that it could get.
    pub(super) fn add_guaranteed_to(&self, used: &mut BTreeMap<TenantName, Amounts>, index: usize) {
        self.add_to(used, index);
        let waiting = &self.waiting[index];
        let kinds = self.kinds_of(waiting);
        let used = used.entry(tenant_of(waiting.client)).or_default();
        for (kind, each) in kinds.iter().filter(|_| kinds.len() > 1) {
            let count = u64::from(waiting.demand.devices) * each;
            *used.permille.entry(kind.clone()).or_default() += count;
        }
    }

    /// Counts a request as granted.
    fn add_to(&self, used: &mut BTreeMap<TenantName, Amounts>, index: usize) {
        let waiting = &self.waiting[index];
        let used = used.entry(tenant_of(waiting.client)).or_default();
        let (count, kinds) = (u64::from(waiting.demand.devices), self.kinds_of(waiting));
        let each = kinds.values().max().copied();
        let permille = count * each.unwrap_or_else(|| waiting.demand.permille());
        if let (1, Some(kind)) = (kinds.len(), kinds.keys().next()) {
            *used.permille.entry(kind.clone()).or_default() += permille;
        }
        used.all_permille += permille;
        used.memory_bytes += u128::from(count) * u128::from(waiting.demand.memory_bytes);
    }

    /// The engine has suspended a lease for something that waits: it was beyond its tenant's guarantee, and has run for
    /// long enough. For what it has is checked after the event (`victim_model.rs`).
    pub(super) fn reclaim(&mut self, id: LeaseId) {
        let is_new = |lease: &&SimLease| !lease.is_suspended;
        let known = self.leases.as_ref().and_then(|leases| leases.get(&id));
        if let Some(lease) = known.filter(is_new) {
            assert!(
                self.now >= lease.running_since + 10_000,
                "{id} has just begun"
            );
            assert!(self.is_borrowed(id), "{id} is within the guarantee");
            let lease = lease.clone();
            self.add_victim(id, lease);
        }
        let leases = self.leases.as_mut();
        if let Some(lease) = leases.and_then(|leases| leases.get_mut(&id)) {
            lease.lose_devices(self.now);
            lease.is_suspended = true;
        }
    }

    /// Returns whether a lease that the world knows is beyond its tenant's guarantee, as the tenant's earlier
    /// leases use that up.
    pub(super) fn is_borrowed(&self, id: LeaseId) -> bool {
        let leases = self.leases.as_ref().expect("it knows leases");
        let tenant = tenant_of(leases[&id].client);
        let guaranteed = self.policy.get(&tenant).map(|policy| &policy.guaranteed);
        let mut used = BTreeMap::<&str, u64>::new();
        let own = leases
            .iter()
            .filter(|(_, it)| tenant_of(it.client) == tenant);
        let mut own: Vec<_> = own.collect();
        own.sort_by_key(|(id, lease)| (lease.granted_at, **id));
        for (other, lease) in own {
            let lost = lease.lost_until.is_some();
            if lease.is_suspended && !lost {
                continue;
            }
            let mut more = used.clone();
            let known = self.engine.leases().get(*other).and_then(Lease::share);
            for device in &lease.granted {
                *more.entry(&device.kind).or_default() += counted(device, known);
            }
            let own = lease.granted.iter().map(|device| &*device.kind);
            let mut own = own.collect::<BTreeSet<_>>().into_iter();
            let is_within = !lease.is_spot
                && own.all(|kind| {
                    let most = guaranteed.and_then(|guaranteed| guaranteed.get(kind));
                    more[kind] <= 1000 * u64::from(most.copied().unwrap_or_default())
                });
            if other == &id {
                return !is_within;
            }
            if is_within {
                used = more;
            }
        }
        panic!("{id} is not among the leases");
    }

    /// The first request within a guarantee that waits has no devices to come, and there are too few leases
    /// that could be suspended for it. Devices are held back for entitled requests only.
    pub(super) fn check_reclaims(&self) {
        let guaranteed = self.order.iter().copied();
        let guaranteed = guaranteed.filter(|(_, is_guaranteed)| *is_guaranteed);
        let guaranteed: Vec<_> = guaranteed.map(|(at, _)| &self.waiting[at]).collect();
        let holders = self.engine.held_back().values().flatten();
        for (holder, _) in holders {
            let mut requests = guaranteed.iter();
            let is_request = requests.any(|waiting| waiting.lease == *holder);
            let is_reserved = self.engine.reserved().iter().any(|(it, _)| it == holder);
            let mut others = self.waiting.iter();
            let holding = others.find(|it| it.lease == *holder);
            let is_before_spot =
                self.engine.has_spot_or_requests() && holding.is_some_and(|it| !it.demand.is_spot);
            let is_lease = self.engine.leases().get(*holder).is_some();
            assert!(is_request || is_reserved || is_lease || is_before_spot);
        }
        let (Some(first), Some(_)) = (guaranteed.first(), &self.leases) else {
            return;
        };
        let fits = |device_ref: &DeviceRef| {
            let device = self.device(*device_ref);
            meets_demand(device, &first.demand) && self.is_allowed(first, device, true)
        };
        let tenant = tenant_of(first.client);
        let is_other = |lease: &SimLease| tenant_of(lease.client) != tenant || lease.is_spot;
        let needed = self.engine.needed_by_leases();
        self.check_too_few(first, &needed, fits, |id, lease| {
            is_other(lease) && self.is_suspendable(id, lease)
        });
        // Leases end only if those that go on are not enough, though later.
        let Enough {
            coming, devices, ..
        } = self.enough(first, &needed, fits, |id, lease| {
            let goes_on = self
                .engine
                .check_suspend(id, Suspender::Administrator)
                .is_ok();
            is_other(lease) && (goes_on || lease.is_spot) && self.could_make_room(id, lease)
        });
        if coming + devices < first.demand.devices as usize {
            self.check_too_few(first, &needed, fits, |id, lease| {
                let may_end = self.may_end_now(id, lease) && self.is_borrowed(id);
                is_other(lease) && (may_end || self.is_suspendable(id, lease))
            });
        }
    }

    /// What the first request within a guarantee needs of devices that leases share is held back for it as soon as
    /// all those that could be suspended are enough, however short they have run. So its wait has an end.
    pub(super) fn check_room_is_held_back(&self) {
        let first = self.order.first().copied();
        let first = first.filter(|(_, is_guaranteed)| *is_guaranteed);
        let (Some((first, _)), Some(leases)) = (first, &self.leases) else {
            return;
        };
        let first = &self.waiting[first];
        let needs = needs_of(first);
        let needed = self.engine.needed_by_leases();
        let fits = |it: &DeviceRef| {
            let device = self.device(*it);
            let is_meant = meets_demand(device, &first.demand) && self.is_usable(*it);
            is_meant && self.is_allowed(first, device, true)
        };
        let is_for_none_but = |it: &DeviceRef| self.is_held_for_none_but(first.lease, *it);
        let with_room = self.with_room(&needs, &BTreeSet::new(), false, first.lease);
        let coming = self.coming().into_iter().filter(is_for_none_but);
        let coming: BTreeSet<_> = coming.chain(with_room).collect();
        let coming = coming.iter().filter(|it| fits(it)).count();
        let tenant = tenant_of(first.client);
        let gives_way = |(id, lease): &(&LeaseId, &SimLease)| {
            let is_other = tenant_of(lease.client) != tenant || lease.is_spot;
            is_other && self.could_make_room(**id, lease)
        };
        let gone: Vec<_> = leases.iter().filter(gives_way).collect();
        let ids: BTreeSet<_> = gone.iter().map(|(id, _)| **id).collect();
        let with_room = self.with_room(&needs, &ids, false, first.lease);
        let makes_room = |it: &DeviceRef| {
            let is_needed = needed.iter().any(|one| one.accepts(self.device(*it)));
            let has_only = self.has_only(*it, &ids) && is_for_none_but(it);
            let is_enough = has_only || with_room.contains(it);
            fits(it) && is_enough && !is_needed
        };
        let devices = |has_share: bool| {
            let of_such = gone
                .iter()
                .filter(|(_, lease)| lease.has_share == has_share);
            let devices = of_such.flat_map(|(_, lease)| lease.lease_devices.iter().copied());
            devices.filter(makes_room).collect::<BTreeSet<_>>()
        };
        let (whole, shared) = (devices(false).len(), devices(true));
        let held = shared
            .iter()
            .filter(|it| self.is_held_for(first.lease, **it));
        let (held, wanted) = (held.count(), first.demand.devices as usize);
        let is_enough = coming + whole + shared.len() >= wanted;
        assert!(
            !is_enough || coming + whole + held >= wanted,
            "{} waits, with {coming} devices to come, {whole} whole ones of leases that make room, and of {shared:?} only {held} held back",
            first.demand
        );
    }

    /// Returns whether a lease is borrowed, and could be suspended for a request, or would end, at some time.
    fn could_make_room(&self, id: LeaseId, lease: &SimLease) -> bool {
        let can_suspend = self
            .engine
            .check_suspend(id, Suspender::Administrator)
            .is_ok();
        let known = self.engine.leases().get(id);
        let is_running = known.is_some_and(Lease::runs);
        let ends = (lease.is_spot || lease.may_end) && self.ends_after(id).is_some();
        let may_end = ends && self.clients[lease.client].attached;
        is_running && !lease.is_suspended && self.is_borrowed(id) && (can_suspend || may_end)
    }

    /// Returns whether a lease is borrowed, has run for long enough to be suspended for a request, and could be.
    pub(super) fn is_suspendable(&self, id: LeaseId, lease: &SimLease) -> bool {
        let is_due = self.now >= lease.running_since + 10_000;
        let can_suspend = || self.engine.check_suspend(id, Suspender::Administrator);
        !lease.is_suspended && is_due && self.is_borrowed(id) && can_suspend().is_ok()
    }

    /// A request that waits has enough devices to come, of those that fit it, or would have too few with those of
    /// all leases that make room for it. Leases that come before it wait for devices that are `needed`.
    pub(super) fn check_too_few(
        &self,
        waiting: &SimRequest,
        needed: &[Requirement],
        fits: impl Fn(&DeviceRef) -> bool,
        makes_room: impl Fn(LeaseId, &SimLease) -> bool,
    ) {
        let Enough {
            coming,
            certain,
            devices,
        } = self.enough(waiting, needed, fits, makes_room);
        let wanted = waiting.demand.devices as usize;
        assert!(
            coming >= wanted || devices + certain < wanted,
            "{} waits, with {coming} devices to come and {devices} of leases that make room",
            waiting.demand
        );
    }

    /// Returns the number of devices to come for a request, of those that fit it, and of those of all leases that
    /// make room for it.
    fn enough(
        &self,
        waiting: &SimRequest,
        needed: &[Requirement],
        fits: impl Fn(&DeviceRef) -> bool,
        makes_room: impl Fn(LeaseId, &SimLease) -> bool,
    ) -> Enough {
        let coming = self.coming().into_iter().filter(|device_ref| {
            fits(device_ref) && self.is_held_for_none_but(waiting.lease, *device_ref)
        });
        let needs = needs_of(waiting);
        let shared = self.with_room(&needs, &BTreeSet::new(), false, waiting.lease);
        let shared = shared.into_iter().filter(&fits);
        let coming: Vec<_> = coming.chain(shared).collect();
        let room = self.leases.iter().flatten().filter(|(id, lease)| {
            let known = self.engine.leases().get(**id);
            let is_running = known.is_some_and(|known| known.standing == Standing::Running);
            is_running && makes_room(**id, lease)
        });
        let room: Vec<_> = room.collect();
        let leases: BTreeSet<_> = room.iter().map(|(id, _)| **id).collect();
        let with_room = self.with_room(&needs, &leases, false, waiting.lease);
        let devices = room.into_iter().flat_map(|(_, lease)| &lease.lease_devices);
        let has_only =
            |it| self.has_only(it, &leases) && self.is_held_for_none_but(waiting.lease, it);
        let devices = devices.filter(|it| has_only(**it) || with_room.contains(*it));
        let devices = devices.collect::<BTreeSet<_>>().into_iter();
        // Leases that come before would get these.
        let is_needed = |it: &DeviceRef| needed.iter().any(|one| one.accepts(self.device(*it)));
        let devices = devices.filter(|it| self.is_usable(**it) && fits(it) && !is_needed(it));
        // If spot leases make room for leases, these take what is coming, too.
        let certain = coming
            .iter()
            .filter(|it| !self.engine.has_spot() || !is_needed(it));
        Enough {
            certain: certain.count(),
            coming: coming.len(),
            devices: devices.count(),
        }
    }

    /// Returns the devices that are free or will be.
    pub(super) fn coming(&self) -> Vec<DeviceRef> {
        let workers = self.snapshot.workers.iter();
        let workers = workers.filter(|worker| worker.connected && !worker.draining);
        let devices = workers.flat_map(|worker| {
            let devices = (0..).zip(&worker.devices);
            let coming =
                devices.filter(|(_, it)| it.leases.is_empty() && it.out_of_service.is_none());
            let id = worker.worker.0;
            coming.map(move |(index, _)| device_ref(id, index))
        });
        devices.collect()
    }

    /// Returns whether a new lease could get a device if it were free.
    pub(super) fn is_usable(&self, device_ref: DeviceRef) -> bool {
        let workers = self.snapshot.workers.iter();
        let mut workers = workers.filter(|worker| worker.worker == device_ref.worker);
        workers.any(|worker| {
            let device = &worker.devices[device_ref.index as usize];
            worker.connected && !worker.draining && device.out_of_service.is_none()
        })
    }
}

/// Returns what a lease counts as that has these devices, or a share of the one.
fn charge_of<'a>(devices: impl Iterator<Item = &'a DeviceSpec>, share: Option<Share>) -> Amounts {
    let devices: Vec<_> = devices.collect();
    let Some(share) = share else {
        return Amounts::of(devices);
    };
    let permille = counted(devices[0], Some(share));
    Amounts {
        permille: [(devices[0].kind.clone(), permille)].into(),
        all_permille: permille,
        memory_bytes: share.memory_bytes.into(),
    }
}
