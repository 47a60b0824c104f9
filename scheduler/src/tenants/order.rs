//! The order in which requests get devices.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Amounts, Policy, TenantName, TenantPolicy, policy_of};
use crate::device::Demand;

/// A request, as far as its place in the order depends on it.
#[derive(Clone, Debug)]
pub(crate) struct Ranked<'a> {
    pub(crate) tenant: &'a TenantName,
    /// Requests with a higher one come before others of the tenant.
    pub(crate) priority: i32,
    /// Rises with each request of the pool.
    pub(crate) number: u64,
    pub(crate) demand: &'a Demand,
    /// The kinds of devices that it could get.
    pub(crate) kinds: BTreeSet<&'a str>,
}

impl Ranked<'_> {
    /// Adds the devices that it will have to those that its tenant has. Their kind may not be known yet.
    fn charge(&self, used: &mut Amounts) {
        let kind = self.kinds.first().filter(|_| self.kinds.len() == 1);
        let (count, memory_bytes) = (self.demand.devices, self.demand.memory_bytes);
        used.add_devices(kind.copied(), count.into(), memory_bytes);
    }

    /// Counts the devices of a request of several kinds as some of each, so that the guarantees of all are
    /// used up.
    fn charge_all_kinds(&self, used: &mut Amounts) {
        for kind in self.kinds.iter().filter(|_| self.kinds.len() > 1) {
            let count = u64::from(self.demand.devices);
            *used.devices.entry((*kind).to_owned()).or_default() += count;
        }
    }

    /// Returns whether its tenant, which has `used`, is guaranteed the devices.
    fn is_guaranteed(&self, policy: &TenantPolicy, used: &Amounts) -> bool {
        let has_room = |kind: &&str| {
            let most = policy.guaranteed.get(*kind).copied().unwrap_or_default();
            let has = used.devices.get(*kind).copied().unwrap_or_default();
            has + u64::from(self.demand.devices) <= u64::from(most)
        };
        !self.kinds.is_empty() && self.kinds.iter().all(has_room)
    }
}

/// The place of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The position of the request in what [`order`] was given.
    pub(crate) index: usize,
    /// Whether it is within its tenant's guarantee.
    pub(crate) is_guaranteed: bool,
}

/// A tenant with requests.
struct Waiting<'a> {
    policy: &'a TenantPolicy,
    /// What it has, and would have if those of its requests were granted that are in order already.
    used: Amounts,
    /// Its requests that are not in order yet, the next first.
    requests: VecDeque<usize>,
}

/// Returns the order of `requests` in a pool that has the devices `pool`, of which the tenants have `used`.
pub(crate) fn order(
    policy: &Policy,
    used: &BTreeMap<TenantName, Amounts>,
    pool: &Amounts,
    requests: &[Ranked<'_>],
) -> Vec<Place> {
    let mut tenants = BTreeMap::<&TenantName, Waiting<'_>>::new();
    let mut by_rank: Vec<usize> = (0..requests.len()).collect();
    by_rank.sort_by_key(|&index| (Reverse(requests[index].priority), requests[index].number));
    let mut guaranteed = BTreeMap::<&TenantName, VecDeque<usize>>::new();
    for index in by_rank {
        let request = &requests[index];
        let tenant = tenants.entry(request.tenant).or_insert_with(|| Waiting {
            policy: policy_of(policy, request.tenant),
            used: used.get(request.tenant).cloned().unwrap_or_default(),
            requests: VecDeque::new(),
        });
        if request.is_guaranteed(tenant.policy, &tenant.used) {
            request.charge(&mut tenant.used);
            request.charge_all_kinds(&mut tenant.used);
            guaranteed
                .entry(request.tenant)
                .or_default()
                .push_back(index);
        } else {
            tenant.requests.push_back(index);
        }
    }
    let mut places = in_order_of_arrival(guaranteed, requests);
    places.extend(in_order_of_shares(tenants, pool, requests));
    places
}

/// Returns the guaranteed requests of the tenants, each time the earliest of those that are next of a tenant.
fn in_order_of_arrival(
    mut guaranteed: BTreeMap<&TenantName, VecDeque<usize>>,
    requests: &[Ranked<'_>],
) -> Vec<Place> {
    let heads = guaranteed.iter();
    let heads = heads.filter_map(|(tenant, of_tenant)| {
        let first = requests[*of_tenant.front()?].number;
        Some((first, *tenant))
    });
    let mut next: BTreeSet<_> = heads.collect();
    let mut places = Vec::new();
    while let Some((_, tenant)) = next.pop_first() {
        let of_tenant = guaranteed.entry(tenant).or_default();
        places.extend(of_tenant.pop_front().map(|index| Place {
            index,
            is_guaranteed: true,
        }));
        next.extend(of_tenant.front().map(|&at| (requests[at].number, tenant)));
    }
    places
}

/// Returns the other requests of the tenants, each time the next of the tenant that has the smallest share.
fn in_order_of_shares<'a>(
    mut tenants: BTreeMap<&'a TenantName, Waiting<'_>>,
    pool: &Amounts,
    requests: &[Ranked<'_>],
) -> Vec<Place> {
    // Shares are not negative, so their bits have the same order.
    let key = |tenant: &'a TenantName, waiting: &Waiting<'_>| {
        let first = *waiting.requests.front()?;
        let share = waiting
            .used
            .weighted_share(pool, waiting.policy.weight)
            .to_bits();
        Some((share, requests[first].number, tenant))
    };
    let heads = tenants.iter();
    let heads = heads.filter_map(|(tenant, waiting)| key(tenant, waiting));
    let mut next: BTreeSet<_> = heads.collect();
    let mut places = Vec::new();
    while let Some((.., tenant)) = next.pop_first() {
        let Some(waiting) = tenants.get_mut(tenant) else {
            continue;
        };
        if let Some(index) = waiting.requests.pop_front() {
            requests[index].charge(&mut waiting.used);
            places.push(Place {
                index,
                is_guaranteed: false,
            });
        }
        next.extend(key(tenant, waiting));
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceSpec, Durability};
    use crate::tests::{cuda, flex};

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
        let names: Vec<_> = requests.iter().map(|it| TenantName::from(it.0)).collect();
        let demand = |devices| Demand {
            devices,
            kind: None,
            memory_bytes: 0,
            durability: Durability::Off,
            recover_within: None,
        };
        let demands: Vec<_> = requests.iter().map(|it| demand(it.2)).collect();
        let ranked = (0..).zip(requests).map(|(at, request)| Ranked {
            tenant: &names[at],
            priority: request.1,
            number: at as u64,
            demand: &demands[at],
            kinds: request.3.iter().copied().collect(),
        });
        let ranked: Vec<_> = ranked.collect();
        let places = order(&policy, &used, &Amounts::of(&pool), &ranked);
        let found = places.iter().map(|place| {
            let number = place.index as i32 + 1;
            if place.is_guaranteed { -number } else { number }
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
