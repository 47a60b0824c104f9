//! The requests that will surely get devices, as others are being released or leases make room for them.
//!
//! They count in the limits of their tenants already, for requests and spot leases that come later. Otherwise one of
//! these could use a limit up, and leases would have made room in vain. Each counts as the most that it could get: it may
//! get other devices than those on which it counts, also larger ones.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::holds::Expected;
use crate::device::Demand;
use crate::event::DeviceRef;
use crate::queue::Rank;
use crate::tenants::{Amounts, TenantLimit, TenantName};

/// Requests that can count on devices, of tenants with limits: by tenant, each with the most that it could get.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CountingRequests {
    by_tenant: BTreeMap<TenantName, BTreeMap<LeaseId, Amounts>>,
}

/// The devices on which each request could count when that was found out last.
pub(super) type CountedOn = BTreeMap<LeaseId, Vec<DeviceRef>>;

impl CountingRequests {
    pub(super) fn has_any_of(&self, tenant: &TenantName) -> bool {
        self.by_tenant.contains_key(tenant)
    }

    pub(super) fn contains(&self, tenant: &TenantName, request: LeaseId) -> bool {
        let of_tenant = self.by_tenant.get(tenant);
        of_tenant.is_some_and(|requests| requests.contains_key(&request))
    }

    fn of(&self, tenant: &TenantName) -> impl Iterator<Item = (&LeaseId, &Amounts)> {
        self.by_tenant.get(tenant).into_iter().flatten()
    }
}

impl Engine {
    /// Returns what a tenant counts as when its limit is checked for a request: what it has, and the most that each
    /// earlier request could get that can count on devices.
    pub(super) fn counts_for(&self, tenant: &TenantName, request: Rank) -> Cow<'_, Amounts> {
        match self.counting.has_any_of(tenant) {
            true => Cow::Owned(self.used_with(tenant, self.counting_of(tenant, request))),
            false => Cow::Borrowed(self.used_by(tenant)),
        }
    }

    /// Returns what a tenant has, and the most that each request could get that can count on devices.
    pub(super) fn most_with_requests(&self, tenant: &TenantName) -> Amounts {
        self.used_with(tenant, self.counting.of(tenant).map(|(_, most)| most))
    }

    /// Returns what a tenant has, with more.
    fn used_with<'a>(
        &self,
        tenant: &TenantName,
        more: impl Iterator<Item = &'a Amounts>,
    ) -> Amounts {
        let mut used = self.used_by(tenant).clone();
        more.for_each(|it| used.add(it));
        used
    }

    /// Returns the most that a request with this demand could get.
    pub(super) fn most_for(&self, demand: &Demand) -> Amounts {
        let suitable = self.pool.classes().map(|class| &**class);
        Amounts::most_of(demand, suitable.filter(|it| demand.accepts(it)))
    }

    /// Returns the number of requests of a tenant that come before one of it and can count on devices.
    pub(super) fn counting_before(&self, tenant: &TenantName, request: Rank) -> usize {
        self.counting_of(tenant, request).count()
    }

    /// Returns the most that each request of a tenant could get that can count on devices, still waits, and comes before
    /// a request of the tenant: those within its guarantee first, then in order.
    fn counting_of(&self, tenant: &TenantName, request: Rank) -> impl Iterator<Item = &Amounts> {
        let place = |rank: Rank| (!self.queue.guaranteed().contains(rank.lease), rank);
        let until = place(request);
        let counting = self.counting.of(tenant);
        counting.filter_map(move |(lease, most)| {
            let counting = self.queue.get(*lease)?;
            (place(counting.rank()) < until).then_some(most)
        })
    }

    /// Returns these devices, and then those on which something that waits could count before. If it counted on others
    /// instead, later requests would not find what leases have made room for meanwhile.
    pub(super) fn then_counted_on(
        &self,
        lease: LeaseId,
        mut devices: Vec<DeviceRef>,
    ) -> Vec<DeviceRef> {
        let before = self.counted_on.get(&lease);
        for device_ref in before.into_iter().flatten() {
            if !devices.contains(device_ref) {
                devices.push(*device_ref);
            }
        }
        devices
    }

    /// Records which requests can count on devices.
    pub(super) fn set_counting(&mut self, expected: &Expected) {
        let mut counting = CountingRequests::default();
        self.counted_on.clear();
        for (entitled, devices) in &expected.counting {
            self.counted_on.insert(entitled.lease, devices.clone());
            if self.policy_of(&entitled.tenant).limit == TenantLimit::default() {
                continue;
            }
            let of_tenant = counting.by_tenant.entry(entitled.tenant.clone());
            let most = self.most_for(&entitled.demand);
            of_tenant.or_default().insert(entitled.lease, most);
        }
        if counting != self.counting {
            self.counting = counting;
            // Other requests of the tenants may fit now.
            self.decided_version = None;
        }
    }
}
