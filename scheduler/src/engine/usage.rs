//! What tenants have.

use std::collections::BTreeMap;

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::device::{DeviceSpec, Share};
use crate::lease::Standing;
use crate::queue::QueuedRequest;
use crate::tenants::{Amounts, NOTHING, Shares, TenantCounts, TenantName, TenantPolicy, policy_of};

impl Engine {
    /// Returns the guarantee, limit and weight of a tenant.
    pub(super) fn policy_of(&self, tenant: &TenantName) -> &TenantPolicy {
        policy_of(&self.policy, tenant)
    }

    /// Returns what each tenant has that has something: the devices of its leases. A lease that has lost its
    /// devices, and not given them back, has as many as before.
    pub fn used_by_tenants(&self) -> &BTreeMap<TenantName, Amounts> {
        self.leases.index().used()
    }

    /// Returns what a tenant has, as [`used_by_tenants`](Self::used_by_tenants).
    pub(super) fn used_by(&self, tenant: &TenantName) -> &Amounts {
        self.used_by_tenants().get(tenant).unwrap_or(&NOTHING)
    }

    /// Returns what a tenant has in spot leases.
    pub(super) fn spot_by(&self, tenant: &TenantName) -> &Amounts {
        let spot = self.leases.index().used_for_spot();
        spot.get(tenant).unwrap_or(&NOTHING)
    }

    /// Returns what a tenant has in other leases than spot leases.
    pub(super) fn used_without_spot(&self, tenant: &TenantName) -> Amounts {
        let mut used = self.used_by(tenant).clone();
        used.subtract(self.spot_by(tenant));
        used
    }

    /// Returns what decides which tenant is next, in a pool that has these devices.
    pub(super) fn shares<'a>(&'a self, pool: &'a Amounts) -> Shares<'a> {
        Shares {
            policy: &self.policy,
            pool,
            past: &self.past,
            now: self.ranked_at,
        }
    }

    /// Returns the average of the shares that each tenant has had, as of the last event: from 0 to 1. It counts
    /// in whose request is next as the present share does.
    pub fn past_shares(&self) -> BTreeMap<TenantName, f64> {
        let tenants = self.past.tenants();
        let shares = tenants.map(|tenant| (tenant.clone(), self.past.of(tenant, self.now)));
        shares.collect()
    }

    /// Records which shares tenants have from now on: those that have other devices than before, or all if the
    /// devices of the pool have changed.
    pub(super) fn record_shares(&mut self, has_pool_changed: bool) {
        let mut changed = self.leases.take_changed_tenants();
        if has_pool_changed {
            changed.extend(self.past.tenants().cloned());
            changed.extend(self.used_by_tenants().keys().cloned());
        }
        if changed.is_empty() {
            return;
        }
        // They are by shares, present and past.
        self.past_version += 1;
        let pool = self.pool.amounts();
        for tenant in changed {
            let (used, spot) = (self.used_by(&tenant), self.spot_by(&tenant));
            let share = used.dominant_share(spot, &pool);
            // It may have devices of workers that drain, which the pool does not offer.
            self.past.set_share(&tenant, share.min(1.0), self.now);
        }
    }

    /// Returns the devices that leases may get now or later.
    pub fn offered(&self) -> Amounts {
        self.pool.amounts()
    }

    /// Returns the numbers of leases and requests of each tenant that has some.
    pub fn counts_by_tenant(&self) -> BTreeMap<TenantName, TenantCounts> {
        let mut counts = BTreeMap::<TenantName, TenantCounts>::new();
        for (_, lease) in self.leases.iter() {
            if let Some(tenant) = &lease.tenant {
                let of_tenant = counts.entry(tenant.clone()).or_default();
                match lease.counts() {
                    true => of_tenant.leases += 1,
                    false => of_tenant.suspended += 1,
                }
            }
        }
        for queued in self.queue.iter() {
            counts.entry(queued.tenant.clone()).or_default().requests += 1;
        }
        counts
    }

    /// Counts the devices that a lease has, unless they are counted already. A lease goes on counting as the devices
    /// that it was granted when it goes on at others: these may have more memory, which the tenant did not demand, and
    /// by which it must not get beyond its limit.
    pub(super) fn set_charge(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let mut charge = Amounts::default();
        for (device_ref, granted) in &lease.lease_devices {
            if let Some(device) = self.pool.device(*device_ref) {
                charge.add_share(device, granted.share.map(Share::from));
            }
        }
        // After a restart, the workers of a lease join one after the other.
        let is_counted = match lease.share() {
            Some(_) => !lease.charge.is_nothing(),
            None => lease.charge.permille == charge.permille,
        };
        if let Some(mut lease) = self.leases.get_mut(id).filter(|_| !is_counted) {
            lease.charge = charge;
        }
    }

    /// Returns whether a request cannot be granted because its tenant would have more than its limit, with what the tenant
    /// has and what earlier requests of the tenant can count on.
    pub(super) fn is_at_limit(&self, queued: &QueuedRequest) -> bool {
        let (tenant, demand) = (&queued.tenant, &queued.demand);
        let limit = &self.policy_of(tenant).limit;
        let used = self.counts_for(tenant, queued.rank());
        let may_have = |device: &DeviceSpec| limit.allows(&used, device, demand);
        self.pool.offers(demand, may_have) < demand.devices as usize
    }

    /// Returns whether a lease that was suspended and resumed must not get as many devices as it had now, as
    /// its tenant would have more than its limit.
    pub(super) fn is_over_limit(&self, id: LeaseId) -> bool {
        let lease = self.leases.get(id);
        let Some((lease, tenant)) = lease.and_then(|lease| Some((lease, lease.tenant.as_ref()?)))
        else {
            return false;
        };
        if !matches!(lease.standing, Standing::Resuming { cause: None, .. }) {
            return false;
        }
        let limit = &self.policy_of(tenant).limit;
        !limit.allows_all(self.used_by(tenant), &lease.charge)
    }
}
