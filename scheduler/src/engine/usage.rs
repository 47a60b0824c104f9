//! What tenants have.

use std::collections::BTreeMap;

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::lease::Standing;
use crate::tenants::{Amounts, Policy, TenantName};

impl Engine {
    /// Returns what the tenants of the pool are promised and may have.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns what each tenant has that has something: the devices of its leases. A lease that has lost its
    /// devices, and not given them back, has as many as before.
    pub fn used_by_tenants(&self) -> BTreeMap<TenantName, Amounts> {
        let mut used = BTreeMap::<TenantName, Amounts>::new();
        for (_, lease) in self.leases.iter() {
            if let Some(tenant) = lease.tenant.as_ref().filter(|_| lease.counts()) {
                match used.get_mut(tenant) {
                    Some(of_tenant) => of_tenant.add(&lease.charge),
                    None => drop(used.insert(tenant.clone(), lease.charge.clone())),
                }
            }
        }
        used
    }

    /// Returns the devices that leases may get now or later.
    pub fn offered(&self) -> Amounts {
        self.pool.amounts()
    }

    /// Returns the number of a tenant's leases.
    pub fn leases_of_tenant(&self, tenant: &str) -> usize {
        let leases = self.leases.iter();
        let own =
            leases.filter(|(_, it)| it.tenant.as_ref().is_some_and(|it| it.as_str() == tenant));
        own.count()
    }

    /// Returns the number of a tenant's requests that wait.
    pub fn requests_of_tenant(&self, tenant: &str) -> usize {
        let requests = self.queue.iter();
        requests.filter(|it| it.tenant.as_str() == tenant).count()
    }

    /// Counts the devices that a lease has now.
    pub(super) fn update_charge(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let devices = lease.lease_devices.keys();
        let devices = devices.filter_map(|device_ref| self.pool.device(*device_ref));
        let charge = Amounts::of(devices);
        if let Some(lease) = self.leases.get_mut(id) {
            lease.charge = charge;
        }
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
        let limit = self.policy.get(tenant).map(|policy| &policy.limit);
        limit.is_some_and(|limit| {
            let used = self.used_by_tenants().remove(tenant).unwrap_or_default();
            !limit.allows_all(&used, &lease.charge)
        })
    }
}
