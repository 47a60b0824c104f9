//! Requests within the guarantees of their tenants: which these are, and their grants.

use std::collections::BTreeMap;
use std::mem;

use super::Engine;
use crate::device::Shape;
use crate::options::RequestOrder;
use crate::tenants::{Guaranteed, KnownGuaranteed, guaranteed};

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
        self.queue.set_guaranteed(guaranteed)
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
