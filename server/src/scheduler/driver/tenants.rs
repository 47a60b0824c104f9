//! What administrators see of tenants.

use std::collections::BTreeMap;

use tensord_proto::v1::{DeviceCounts, KindCount, TenantInfo, TenantLimit};
use tensord_scheduler::{Amounts, TenantCounts};

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
        let (used, counts) = (
            self.engine.used_by_tenants(),
            self.engine.counts_by_tenant(),
        );
        let excess = self.excess_guarantees(&registry);
        let tokens = self.access.tokens().valid_by_tenant(UnixMillis::now());
        let wanted = registry
            .iter()
            .filter(|(known, _)| name.is_none_or(|name| name == *known));
        wanted
            .map(|(name, tenant)| {
                let kinds = tenant.guaranteed.keys();
                let warnings = kinds.filter_map(|kind| excess.get(kind)).cloned();
                TenantInfo {
                    tokens: tokens.get(name).cloned().unwrap_or_default(),
                    warnings: warnings.collect(),
                    ..tenant_info(
                        name,
                        tenant,
                        &used.get(name).cloned().unwrap_or_default(),
                        counts.get(name).copied().unwrap_or_default(),
                    )
                }
            })
            .collect()
    }

    /// Returns a warning for each kind of which tenants are guaranteed more than the pool has.
    fn excess_guarantees(&self, registry: &Registry) -> BTreeMap<String, String> {
        let pool = self.engine.offered();
        let mut guaranteed = BTreeMap::<&str, u64>::new();
        for (_, tenant) in registry.iter() {
            for (kind, count) in &tenant.guaranteed {
                *guaranteed.entry(kind).or_default() += u64::from(*count);
            }
        }
        let excess = guaranteed.into_iter().filter_map(|(kind, all)| {
            let has = pool.devices.get(kind).copied().unwrap_or_default();
            let warning = || {
                format!("tenants are guaranteed {all} {kind} in all, and the pool has {has} now")
            };
            (all > has).then(|| (kind.to_owned(), warning()))
        });
        excess.collect()
    }
}

fn tenant_info(name: &str, tenant: &Tenant, used: &Amounts, counts_of: TenantCounts) -> TenantInfo {
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
        leases: view::count(counts_of.leases),
        suspended: view::count(counts_of.suspended),
        waiting: view::count(counts_of.requests),
        ..TenantInfo::default()
    }
}

fn counts<T: Copy + TryInto<u32>>(kinds: &BTreeMap<String, T>) -> Vec<KindCount> {
    let counted = kinds.iter().map(|(kind, count)| KindCount {
        kind: kind.clone(),
        count: (*count).try_into().unwrap_or(u32::MAX),
    });
    counted.collect()
}
