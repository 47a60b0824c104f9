//! The order in which requests get devices.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tensord_proto::ids::LeaseId;

use super::{Amounts, NOTHING, PastUse, Policy, TenantName, TenantPolicy, in_permille, policy_of};
use crate::device::{Demand, Shape};
use crate::queue::{Rank, Requests, TenantRequests};
use crate::time::Timestamp;

/// The kinds of devices that requests of each shape could get.
pub(crate) type Kinds<'a> = BTreeMap<&'a Shape, KindsOfShape<'a>>;

/// Kinds of devices, each with what one of these devices counts as at most for a request, in thousandths: a share
/// with some memory counts as most on the smallest device that has it.
type KindsOfShape<'a> = BTreeMap<&'a str, u64>;

/// The requests that wait and are within the guarantees of their tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Guaranteed {
    /// The leases that they would become, in the order in which they get devices.
    pub(crate) order: Vec<LeaseId>,
    leases: BTreeSet<LeaseId>,
    /// The devices that those of each tenant would get.
    charges: BTreeMap<TenantName, Amounts>,
}

impl Guaranteed {
    /// Returns whether the request that would become this lease is among them.
    pub(crate) fn contains(&self, lease: LeaseId) -> bool {
        self.leases.contains(&lease)
    }

    /// Returns the requests that are among these or among `other` ones, and not among both.
    pub(crate) fn differing(&self, other: &Self) -> Vec<LeaseId> {
        let differing = self.leases.symmetric_difference(&other.leases);
        differing.copied().collect()
    }

    /// Returns what a tenant that has `used` would have if they were granted.
    pub(crate) fn with(&self, used: &Amounts, tenant: &TenantName) -> Amounts {
        let mut all = used.clone();
        all.add(self.charges.get(tenant).unwrap_or(&NOTHING));
        all
    }
}

/// The requests of each tenant that are within its guarantee, as they were found last.
#[derive(Debug, Default)]
pub(crate) struct KnownGuaranteed(BTreeMap<TenantName, OfTenant>);

/// The requests of a tenant that are within its guarantee.
#[derive(Debug)]
struct OfTenant {
    /// What the tenant had, without spot leases.
    used: Amounts,
    /// The version of its requests.
    version: u64,
    ranks: Vec<Rank>,
    charge: Amounts,
}

/// Returns the requests that are within the guarantees of their tenants, which have `used`, of that `spot` in
/// spot leases. What is `known` stands for tenants that have the same requests and devices as before; it must be that
/// of the same policy and kinds.
pub(crate) fn guaranteed<'a>(
    policy: &Policy,
    used: &BTreeMap<TenantName, Amounts>,
    spot: &BTreeMap<TenantName, Amounts>,
    kinds: impl Fn() -> Kinds<'a>,
    requests: &Requests,
    known: &mut KnownGuaranteed,
) -> Guaranteed {
    let mut found = Guaranteed::default();
    let mut by_tenant = Vec::new();
    let kinds = LazyCell::new(kinds);
    known.0.retain(|tenant, _| requests.contains_key(tenant));
    for (tenant, policy) in policy {
        let Some(requests) = requests.get(tenant) else {
            continue;
        };
        if policy.guaranteed.is_empty() {
            continue;
        }
        let mut used = used.get(tenant).unwrap_or(&NOTHING).clone();
        used.subtract(spot.get(tenant).unwrap_or(&NOTHING));
        let version = requests.version();
        let is_same = |it: &&OfTenant| it.version == version && it.used == used;
        if known.0.get(tenant).filter(is_same).is_none() {
            let (ranks, charge) = within_guarantee(policy, used.clone(), &kinds, requests);
            let of_tenant = OfTenant {
                used,
                version,
                ranks,
                charge,
            };
            known.0.insert(tenant.clone(), of_tenant);
        }
        if let Some(of_tenant) = known.0.get(tenant) {
            let leases = of_tenant.ranks.iter().map(|rank| rank.lease);
            found.leases.extend(leases);
            found
                .charges
                .insert(tenant.clone(), of_tenant.charge.clone());
            by_tenant.push(of_tenant.ranks.iter().copied().collect());
        }
    }
    found.order = in_order_of_arrival(by_tenant);
    found
}

/// Returns the requests of a tenant that are within its guarantee, the next first, and the devices that they
/// would get.
fn within_guarantee(
    policy: &TenantPolicy,
    mut used: Amounts,
    kinds: &Kinds<'_>,
    requests: &TenantRequests,
) -> (Vec<Rank>, Amounts) {
    let mut charge_of_all = Amounts::default();
    let none = KindsOfShape::new();
    let mut next = BTreeMap::new();
    let shapes = requests.by_shape().filter(|(shape, _)| !shape.is_spot);
    for (shape, ranks) in shapes {
        let mut ranks = ranks.iter().copied();
        next.extend(ranks.next().map(|first| (first, (shape, ranks))));
    }
    let mut within = Vec::new();
    while let Some((rank, (shape, mut ranks))) = next.pop_first() {
        let kinds = kinds.get(shape).unwrap_or(&none);
        // What the tenant has only grows, so no later one of the shape is within the guarantee either.
        if !is_guaranteed(policy, &used, shape, kinds) {
            continue;
        }
        for amounts in [&mut used, &mut charge_of_all] {
            charge(amounts, shape, kinds);
            charge_all_kinds(amounts, shape, kinds);
        }
        within.push(rank);
        next.extend(ranks.next().map(|rank| (rank, (shape, ranks))));
    }
    (within, charge_of_all)
}

/// Returns the requests of tenants, of which each has its own in order: each time the earliest of those that
/// are next of a tenant.
fn in_order_of_arrival(mut tenants: Vec<VecDeque<Rank>>) -> Vec<LeaseId> {
    let heads = (0..).zip(&tenants);
    let heads = heads.filter_map(|(at, ranks)| Some((ranks.front()?.number, at)));
    let mut next: BTreeSet<(u64, usize)> = heads.collect();
    let mut order = Vec::new();
    while let Some((_, at)) = next.pop_first() {
        let ranks = &mut tenants[at];
        order.extend(ranks.pop_front().map(|rank| rank.lease));
        next.extend(ranks.front().map(|rank| (rank.number, at)));
    }
    order
}

/// What decides which tenant is next.
#[derive(Clone, Copy)]
pub(crate) struct Shares<'a> {
    pub(crate) policy: &'a Policy,
    /// The devices of the pool.
    pub(crate) pool: &'a Amounts,
    pub(crate) past: &'a PastUse,
    pub(crate) now: Timestamp,
}

impl Shares<'_> {
    /// Returns a number that has the order of the shares of tenants, present and past, divided by their
    /// weights: that of a tenant that has `used`, of that `spot` in spot leases.
    pub(crate) fn key(&self, tenant: &TenantName, used: &Amounts, spot: &Amounts) -> u64 {
        let present = used.dominant_share(spot, self.pool);
        let share = present + self.past.of(tenant, self.now);
        let weight = policy_of(self.policy, tenant).weight.max(1);
        // Shares are not negative, so their bits have the same order.
        (share / f64::from(weight)).to_bits()
    }
}

/// Returns the order in which all requests would get devices, if the tenants had `used`, of that `spot` in spot
/// leases, and there were enough for each that is next: those first that are guaranteed, then each time the next
/// of the tenant that has the smallest share; those for spot leases last.
pub(crate) fn order(
    shares: Shares<'_>,
    used: &BTreeMap<TenantName, Amounts>,
    spot: &BTreeMap<TenantName, Amounts>,
    kinds: &Kinds<'_>,
    requests: &Requests,
    guaranteed: &Guaranteed,
) -> Vec<LeaseId> {
    let mut order = guaranteed.order.clone();
    let mut tenants = BTreeMap::<&TenantName, (Amounts, Amounts, VecDeque<(Rank, &Shape)>)>::new();
    for (tenant, requests) in requests {
        let by_shape = requests.by_shape();
        let ranked = by_shape.flat_map(|(shape, of_shape)| {
            let others = of_shape.iter().filter(|it| !guaranteed.contains(it.lease));
            others.map(move |rank| (*rank, shape))
        });
        let ranked: BTreeMap<_, _> = ranked.collect();
        let used = guaranteed.with(used.get(tenant).unwrap_or(&NOTHING), tenant);
        let spot = spot.get(tenant).unwrap_or(&NOTHING).clone();
        tenants.insert(tenant, (used, spot, ranked.into_iter().collect()));
    }
    let key = |tenant, used: &Amounts, spot: &Amounts, first: Option<&(Rank, _)>| {
        let share = shares.key(tenant, used, spot);
        first.map(|(rank, _)| (rank.is_spot, share, rank.number, tenant))
    };
    let heads = tenants.iter();
    let heads =
        heads.filter_map(|(tenant, (used, spot, ranks))| key(*tenant, used, spot, ranks.front()));
    let mut next: BTreeSet<_> = heads.collect();
    let none = KindsOfShape::new();
    while let Some((.., tenant)) = next.pop_first() {
        let Some((used, spot, ranks)) = tenants.get_mut(tenant) else {
            continue;
        };
        if let Some((rank, shape)) = ranks.pop_front() {
            let kinds = kinds.get(shape).unwrap_or(&none);
            charge(used, shape, kinds);
            if rank.is_spot {
                charge(spot, shape, kinds);
            }
            order.push(rank.lease);
        }
        next.extend(key(tenant, used, spot, ranks.front()));
    }
    order
}

/// Adds the devices that a request will have to those that its tenant has. Their kind may not be known yet.
fn charge(used: &mut Amounts, demand: &Demand, kinds: &KindsOfShape<'_>) {
    let kind = kinds.keys().next().filter(|_| kinds.len() == 1);
    let count = u64::from(demand.devices);
    let most = kinds.values().max().copied();
    let permille = count * most.unwrap_or_else(|| demand.permille());
    let memory_bytes = u128::from(count) * u128::from(demand.memory_bytes);
    used.add_permille(kind.copied(), permille, memory_bytes);
}

/// Counts the devices of a request of several kinds as some of each, so that the guarantees of all are used
/// up.
fn charge_all_kinds(used: &mut Amounts, demand: &Demand, kinds: &KindsOfShape<'_>) {
    for (kind, each) in kinds.iter().filter(|_| kinds.len() > 1) {
        let permille = u64::from(demand.devices) * each;
        *used.permille.entry((*kind).to_owned()).or_default() += permille;
    }
}

/// Returns whether the tenant of a request, which has `used`, is guaranteed the devices.
fn is_guaranteed(
    policy: &TenantPolicy,
    used: &Amounts,
    demand: &Demand,
    kinds: &KindsOfShape<'_>,
) -> bool {
    let has_room = |(kind, each): (&&str, &u64)| {
        let most = policy.guaranteed.get(*kind).copied().unwrap_or_default();
        let has = used.permille.get(*kind).copied().unwrap_or_default();
        has + u64::from(demand.devices) * each <= in_permille(most)
    };
    !kinds.is_empty() && kinds.iter().all(has_room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use tensord_proto::ids::{ClientId, RequestId};

    use crate::device::DeviceSpec;
    use crate::queue::{Queue, QueuedRequest};
    use crate::tests::{at, cuda, demand_of, flex};

    /// A tenant's name, weight, number of guaranteed devices of kind cuda, and devices.
    type Tenant<'a> = (&'a str, u32, u32, &'a [DeviceSpec]);

    /// A request's tenant, priority, number of devices, and kinds that it could get.
    type Request<'a> = (&'a str, i32, u32, &'a [&'a str]);

    /// Asserts the order of requests, which arrive in the order given, in a pool of 8 devices of kind cuda
    /// and 8 of kind flex. A guaranteed one is negative.
    #[track_caller]
    fn check(tenants: &[Tenant<'_>], requests: &[Request<'_>], expected: &[i32]) {
        let mut policy = Policy::new();
        let mut used = BTreeMap::new();
        for (name, weight, guaranteed, devices) in tenants {
            let of_tenant = TenantPolicy {
                weight: *weight,
                guaranteed: [("cuda".into(), *guaranteed)].into(),
                ..TenantPolicy::default()
            };
            policy.insert((*name).into(), of_tenant);
            used.insert(TenantName::from(*name), Amounts::of(*devices));
        }
        let pool = [vec![cuda(16); 8], vec![flex(4); 8]].concat();
        let mut queue = Queue::default();
        for (number, (tenant, priority, devices, kinds)) in (1..).zip(requests) {
            let kind = match kinds {
                [] => Some("none"),
                [kind] => Some(*kind),
                _ => None,
            };
            let demand = demand_of(*devices, kind);
            queue.push(QueuedRequest::new(
                ClientId(1),
                (*tenant).into(),
                RequestId(number),
                demand,
                *priority,
                LeaseId(number),
                at(0),
            ));
        }
        let kinds_of = |shape: &Shape| {
            let accepted = pool.iter().filter(|device| shape.accepts(device));
            accepted.map(|device| (&*device.kind, 1000)).collect()
        };
        let kinds = queue.shapes().map(|shape| (shape, kinds_of(shape)));
        let (kinds, requests) = (kinds.collect::<Kinds<'_>>(), queue.by_tenant());
        let mut known = KnownGuaranteed::default();
        let (none, kinds_of) = (BTreeMap::new(), || kinds.clone());
        let guaranteed = guaranteed(&policy, &used, &none, kinds_of, requests, &mut known);
        let pool = Amounts::of(&pool);
        let shares = Shares {
            policy: &policy,
            pool: &pool,
            past: &PastUse::new(Duration::ZERO),
            now: at(0),
        };
        let order = order(
            shares,
            &used,
            &BTreeMap::new(),
            &kinds,
            requests,
            &guaranteed,
        );
        let found = order.iter().map(|lease| {
            let number = lease.0 as i32;
            if guaranteed.contains(*lease) {
                -number
            } else {
                number
            }
        });
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    const CUDA: &[&str] = &["cuda"];
    const BOTH: &[&str] = &["cuda", "flex"];

    #[test]
    fn one_tenant_has_its_requests_by_priority_and_arrival() {
        let requests = [
            ("a", 0, 1, BOTH),
            ("a", 5, 8, CUDA),
            ("a", -1, 1, CUDA),
            ("a", 0, 1, CUDA),
            ("a", 5, 1, CUDA),
        ];
        check(&[], &requests, &[2, 5, 1, 4, 3]);
    }

    #[test]
    fn the_tenant_with_less_is_next() {
        let requests = [
            ("a", 0, 1, CUDA),
            ("a", 0, 1, CUDA),
            ("b", 0, 1, CUDA),
            ("b", 0, 1, CUDA),
        ];
        // Nobody has any: in turns, the earliest first.
        check(&[], &requests, &[1, 3, 2, 4]);
        check(&[("a", 1, 0, &[cuda(16)])], &requests, &[3, 1, 4, 2]);
        let two = [cuda(16), cuda(16)];
        check(&[("a", 1, 0, &two)], &requests, &[3, 4, 1, 2]);
        // A request for many counts as many.
        let large = [
            ("a", 0, 3, CUDA),
            ("a", 0, 1, CUDA),
            ("b", 0, 1, CUDA),
            ("b", 9, 1, CUDA),
        ];
        check(&[], &large, &[1, 4, 3, 2]);
    }

    #[test]
    fn shares_are_by_weight_and_of_the_scarcest_resource() {
        let requests = [
            ("a", 0, 1, CUDA),
            ("a", 0, 1, CUDA),
            ("a", 0, 1, CUDA),
            ("b", 0, 1, CUDA),
        ];
        check(&[("a", 3, 0, &[cuda(16)])], &requests, &[4, 1, 2, 3]);
        let weighted = [("a", 3, 0, &[cuda(16)][..]), ("b", 1, 0, &[cuda(16)])];
        check(&weighted, &requests, &[1, 2, 3, 4]);
        // Two of eight devices of kind flex are as much as two of eight of kind cuda.
        let other_kinds = [
            ("a", 1, 0, &[flex(4), flex(4)][..]),
            ("b", 1, 0, &[cuda(16)]),
        ];
        check(&other_kinds, &requests, &[4, 1, 2, 3]);
    }

    #[test]
    fn guaranteed_requests_come_first() {
        let requests = [
            ("a", 0, 1, CUDA),
            ("b", 0, 2, CUDA),
            ("b", 0, 1, CUDA),
            ("c", 0, 1, CUDA),
        ];
        let many = vec![cuda(16); 4];
        // `b` has no device, `c` has as many as it is guaranteed, `a` has no guarantee.
        let tenants = [("b", 1, 2, &[][..]), ("c", 1, 4, &many)];
        check(&tenants, &requests, &[-2, 1, 3, 4]);
        // A smaller one is within the guarantee, and the larger one before it is not.
        let tenants = [("b", 1, 1, &[][..]), ("c", 1, 5, &many)];
        check(&tenants, &requests, &[-3, -4, 1, 2]);
    }

    #[test]
    fn guaranteed_requests_of_several_tenants_are_in_order_of_arrival() {
        let requests = [
            ("a", 0, 1, CUDA),
            ("b", 0, 1, CUDA),
            ("a", 3, 1, CUDA),
            ("b", 0, 1, CUDA),
        ];
        let tenants = [("a", 1, 2, &[][..]), ("b", 1, 2, &[])];
        check(&tenants, &requests, &[-2, -3, -1, -4]);
    }

    #[test]
    fn a_request_of_any_kind_is_guaranteed_only_if_each_kind_is() {
        let requests = [("a", 0, 1, CUDA), ("b", 0, 1, BOTH), ("b", 0, 1, CUDA)];
        check(&[("b", 1, 8, &[])], &requests, &[-3, 1, 2]);
        // Without a device that it could get, nothing is guaranteed.
        check(&[("b", 1, 8, &[])], &[("b", 0, 1, &[])], &[1]);
    }
}
