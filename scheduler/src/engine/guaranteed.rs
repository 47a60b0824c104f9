//! Requests within the guarantees of their tenants: which these are, and their grants.

use std::collections::BTreeMap;
use std::mem;

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::device::Shape;
use crate::options::RequestOrder;
use crate::tenants::{Guaranteed, KnownGuaranteed, guaranteed};

/// Largest number of requests within guarantees for which devices are held back or leases are suspended at once; others
/// follow when these have got theirs. Each costs a walk over the devices that are coming, and the search for the first
/// leases that could make room, with each event.
const MAX_FIRST: usize = 64;

/// What it depends on which requests are within guarantees, as versions of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuaranteedBasis {
    leases: u64,
    requests: u64,
    offered: u64,
    policy: u64,
}

impl Engine {
    /// Finds the requests within guarantees if something has changed on which that depends.
    pub(super) fn find_guaranteed_if_changed(&mut self) {
        if !self.queue.is_empty() && self.has_changed() {
            self.find_guaranteed();
        }
    }

    /// Finds the requests within the guarantees of their tenants. Returns whether some were not before.
    pub(super) fn find_guaranteed(&mut self) -> bool {
        let basis = GuaranteedBasis {
            leases: self.leases.index().used_version(),
            requests: self.queue.requests_version(),
            offered: self.pool.index().offered_version(),
            policy: self.policy_version,
        };
        let before = self.guaranteed_basis.replace(basis);
        if before == Some(basis) {
            return false;
        }
        let are_known =
            before.is_some_and(|it| (it.offered, it.policy) == (basis.offered, basis.policy));
        let mut known = match are_known {
            true => mem::take(&mut self.known_guaranteed),
            false => KnownGuaranteed::default(),
        };
        let (used, requests) = (self.used_by_tenants(), self.queue.by_tenant());
        let spot = self.leases.index().used_for_spot();
        let mut tenants = self.policy.iter();
        let is_needed = self.options.order == RequestOrder::Fair
            && tenants.any(|(tenant, policy)| {
                !policy.guaranteed.is_empty() && requests.contains_key(tenant)
            });
        let guaranteed = match is_needed {
            true => {
                let kinds = || self.kinds();
                guaranteed(&self.policy, used, spot, kinds, requests, &mut known)
            }
            false => Guaranteed::default(),
        };
        self.known_guaranteed = known;
        let has_new = self.queue.set_guaranteed(guaranteed);
        self.first_guaranteed = self.first_within_guarantees();
        has_new
    }

    /// Returns [`MAX_FIRST`] of the requests within guarantees, in order: of each tenant as equally many as possible, and
    /// of these, of each shape. Those of one tenant or shape may wait for devices that nobody can give them.
    fn first_within_guarantees(&self) -> Vec<LeaseId> {
        let order = &self.queue.guaranteed().order;
        if order.len() <= MAX_FIRST {
            return order.clone();
        }
        let requests = order.iter().filter_map(|lease| self.queue.get(*lease));
        let requests: Vec<_> = requests.map(|it| (it, Shape::of(&it.demand))).collect();
        // The number of a request among those of its shape, and its place in the order.
        let mut of_shape = BTreeMap::<_, usize>::new();
        let numbered = requests.iter().zip(0..).map(|((request, shape), place)| {
            let number = of_shape.entry((&request.tenant, shape)).or_default();
            *number += 1;
            (*number, place)
        });
        let mut places: Vec<(usize, usize)> = numbered.collect();
        places.sort_unstable();
        // The same among those of its tenant, of which the first of each shape come first.
        let mut of_tenant = BTreeMap::<_, usize>::new();
        for (number, place) in &mut places {
            let (request, _) = &requests[*place];
            let of_tenant = of_tenant.entry(&request.tenant).or_default();
            *of_tenant += 1;
            *number = *of_tenant;
        }
        places.sort_unstable();
        let mut places: Vec<_> = places.into_iter().take(MAX_FIRST).collect();
        places.sort_unstable_by_key(|(_, place)| *place);
        let first = places.into_iter().map(|(_, place)| requests[place].0.lease);
        first.collect()
    }

    /// Grants requests within guarantees, as far as there are devices.
    pub(super) fn grant_guaranteed(&mut self) {
        loop {
            self.find_guaranteed();
            let mut has_granted = false;
            let mut fitting = BTreeMap::<Shape, bool>::new();
            for lease in self.queue.guaranteed().order.clone() {
                let Some(waiting) = self.queue.get(lease) else {
                    continue;
                };
                let shape = Shape::of(&waiting.demand);
                let has_free = fitting.get(&shape).copied();
                let has_free = has_free.unwrap_or_else(|| self.has_free(&shape));
                let may_fit = has_free || self.pool.is_held_back_for(lease);
                let is_granted = may_fit && self.try_grant(lease);
                has_granted |= is_granted;
                // There are fewer devices now.
                match is_granted {
                    true => fitting.clear(),
                    false => drop(fitting.insert(shape, has_free)),
                }
            }
            if !has_granted {
                return;
            }
            // Others may be within a guarantee now: one that could get several kinds of devices counted as some
            // of each before.
        }
    }

    /// Finds the requests within guarantees after a grant to one beyond them, which may have brought another one
    /// within: the tenant has more, so an earlier request may not be any more. Grants these as far as there are devices.
    pub(super) fn grant_newly_guaranteed(&mut self) {
        if self.find_guaranteed() {
            self.grant_guaranteed();
        }
    }
}
