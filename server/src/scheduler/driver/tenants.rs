//! What administrators see of tenants.

use std::collections::BTreeMap;

use tensord_proto::v1::{DeviceCounts, KindCount, TenantInfo, TenantLimit};
use tensord_scheduler::Amounts;

use super::Driver;
use crate::scheduler::{
    access::UnixMillis,
    tenants::{Registry, Tenant},
    view,
};

impl Driver {
    /// Returns the tenant of this name, or all, with what they have.
    pub(super) fn list_tenants(&self, name: Option<&str>) -> Vec<TenantInfo> {
        let registry = self.tenants.read();
        let used = self.engine.used_by_tenants();
        let wanted = registry
            .iter()
            .filter(|(known, _)| name.is_none_or(|name| name == *known));
        wanted
            .map(|(name, tenant)| {
                let used = used.get(name).cloned().unwrap_or_default();
                self.tenant_info(name, tenant, &used, &registry)
            })
            .collect()
    }

    fn tenant_info(
        &self,
        name: &str,
        tenant: &Tenant,
        used: &Amounts,
        registry: &Registry,
    ) -> TenantInfo {
        let limit = tenant.limit();
        TenantInfo {
            name: name.into(),
            created_ms: tenant.created.0,
            weight: tenant.weight,
            guaranteed: Some(DeviceCounts {
                kinds: counts(&tenant.guaranteed),
            }),
            limit: Some(TenantLimit {
                kinds: counts(&limit.devices),
                memory_bytes: limit.memory_bytes,
            }),
            used: Some(DeviceCounts {
                kinds: counts(&used.devices),
            }),
            used_memory_bytes: used.memory_bytes.try_into().unwrap_or(u64::MAX),
            leases: view::count(self.engine.leases_of_tenant(name)),
            waiting: view::count(self.engine.requests_of_tenant(name)),
            tokens: self.access.tokens().valid_of(name, UnixMillis::now()),
            warnings: self.warnings(tenant, registry),
        }
    }

    /// Returns what cannot be fulfilled of what a tenant is promised.
    fn warnings(&self, tenant: &Tenant, registry: &Registry) -> Vec<String> {
        let pool = self.engine.offered();
        let beyond = tenant.guaranteed.keys().filter_map(|kind| {
            let has = pool.devices.get(kind).copied().unwrap_or_default();
            let all = registry.iter();
            let all = all.filter_map(|(_, tenant)| tenant.guaranteed.get(kind));
            let promised: u64 = all.map(|count| u64::from(*count)).sum();
            (promised > has).then(|| {
                format!("tenants are promised {promised} {kind} in all, and the pool has {has} now")
            })
        });
        beyond.collect()
    }
}

fn counts<T: Copy + TryInto<u32>>(kinds: &BTreeMap<String, T>) -> Vec<KindCount> {
    let counted = kinds.iter().map(|(kind, count)| KindCount {
        kind: kind.clone(),
        count: (*count).try_into().unwrap_or(u32::MAX),
    });
    counted.collect()
}
