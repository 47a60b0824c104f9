//! The requests that will surely get devices, as others are being released or leases make room for them.
//!
//! What they can count on counts in the limits of their tenants already, for requests and spot leases that come later.
//! Otherwise one of these could use a limit up, and leases had made room in vain.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::holds::Expected;
use crate::tenants::{Amounts, TenantLimit, TenantName};

/// Requests that can count on devices, of tenants with limits: by tenant, each with what these are; the next first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CountingRequests {
    by_tenant: BTreeMap<TenantName, Vec<(LeaseId, Amounts)>>,
}

impl CountingRequests {
    pub(super) fn has_any_of(&self, tenant: &TenantName) -> bool {
        self.by_tenant.contains_key(tenant)
    }

    /// Returns the requests of a tenant that come before one; all if this one is not among them, as it comes later then
    /// if there are devices for it.
    fn before(
        &self,
        tenant: &TenantName,
        request: Option<LeaseId>,
    ) -> impl Iterator<Item = (LeaseId, &Amounts)> {
        let all = self.by_tenant.get(tenant).into_iter().flatten();
        let before = all.take_while(move |(lease, _)| Some(*lease) != request);
        before.map(|(lease, devices)| (*lease, devices))
    }

    /// Returns the number of requests of a tenant that come before one, if that can count on devices itself.
    pub(super) fn place_of(&self, tenant: &TenantName, request: LeaseId) -> Option<usize> {
        let mut all = self.by_tenant.get(tenant)?.iter();
        all.position(|(lease, _)| *lease == request)
    }
}

impl Engine {
    /// Returns what a request's tenant has, for the check of the limit, with what earlier requests of the tenant can
    /// count on.
    pub(super) fn counts_for(&self, tenant: &TenantName, request: LeaseId) -> Cow<'_, Amounts> {
        match self.counting.has_any_of(tenant) {
            true => Cow::Owned(self.counts_with_requests(tenant, Some(request))),
            false => Cow::Borrowed(self.used_by(tenant)),
        }
    }

    /// Returns what a tenant has, with what its requests can count on that come before one, or else all.
    pub(super) fn counts_with_requests(
        &self,
        tenant: &TenantName,
        request: Option<LeaseId>,
    ) -> Amounts {
        let mut counts = self.used_by(tenant).clone();
        let before = self.counting.before(tenant, request);
        let waiting = before.filter(|(lease, _)| self.queue.get(*lease).is_some());
        waiting.for_each(|(_, devices)| counts.add(devices));
        counts
    }

    /// Records which requests can count on devices.
    pub(super) fn set_counting(&mut self, expected: &Expected) {
        let mut counting = CountingRequests::default();
        for (entitled, devices) in &expected.counting {
            if self.policy_of(&entitled.tenant).limit == TenantLimit::default() {
                continue;
            }
            let devices = devices.iter().filter_map(|it| self.pool.device(*it));
            let amounts = Amounts::most_of(&entitled.demand, devices);
            let of_tenant = counting.by_tenant.entry(entitled.tenant.clone());
            of_tenant.or_default().push((entitled.lease, amounts));
        }
        if counting != self.counting {
            self.counting = counting;
            // Other requests of the tenants may fit now.
            self.decided_version = None;
        }
    }
}
