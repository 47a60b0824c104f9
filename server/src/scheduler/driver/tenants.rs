//! What administrators see of tenants, and plans of their changes.

use std::collections::BTreeMap;

use tensord_proto::{
    share::WHOLE_PERMILLE,
    v1::{DeviceCounts, KindCount, PlannedTenant, TenantInfo, TenantLimit, TenantPlan},
};
use tensord_scheduler::{Event, TenantName};

use super::Driver;
use crate::scheduler::{
    access::UnixMillis,
    tenants::{Plan, Proposal, Registry, Tenant, TenantError, Usage},
    view,
};

/// What tenants have, for messages.
struct Holdings {
    usage: Usage,
    /// The names of the valid tokens of each tenant.
    tokens: BTreeMap<String, Vec<String>>,
    past_shares: BTreeMap<TenantName, f64>,
}

impl Driver {
    /// Returns the tenant of this name, or all, with what they have.
    pub(super) fn list_tenants(&self, name: Option<&str>) -> Vec<TenantInfo> {
        let registry = self.tenants.read();
        let excess = self.excess_guarantees(&registry);
        let holdings = self.holdings();
        let wanted = registry
            .iter()
            .filter(|(known, _)| name.is_none_or(|name| name == *known));
        wanted
            .map(|(name, tenant)| {
                let kinds = tenant.guaranteed.keys();
                let warnings = kinds.filter_map(|kind| excess.get(kind)).cloned();
                TenantInfo {
                    warnings: warnings.collect(),
                    ..holdings.info(name, tenant)
                }
            })
            .collect()
    }

    /// Returns whether the pool has more than one tenant.
    pub(super) fn has_several_tenants(&self) -> bool {
        self.tenants.read().iter().nth(1).is_some()
    }

    /// Has the engine follow the tenants.
    pub(super) fn on_tenants_changed(&mut self) {
        self.apply(Event::SetPolicy {
            policy: self.tenants.read().policy(),
        });
    }

    /// Plans that the tenants become those of a list. While the changes are written, a lease may be granted
    /// within the limit before; it goes on like others beyond a lowered limit. A tenant that is removed without
    /// force gets none, as it has no valid token.
    pub(super) fn plan_tenants(
        &self,
        proposal: &Proposal,
    ) -> Result<(Plan, TenantPlan), TenantError> {
        let holdings = self.holdings();
        let plan = proposal.plan(&holdings.usage)?;
        let changes = plan.changes.iter().map(|(name, planned)| PlannedTenant {
            before: planned.before.as_ref().map(|it| holdings.info(name, it)),
            after: planned.after.as_ref().map(|it| holdings.info(name, it)),
            in_use: planned.in_use.clone(),
            kept_tokens: planned.kept_tokens.clone(),
        });
        let warnings = self.excess_guarantees(&plan.after).into_values();
        let reply = TenantPlan {
            revision: proposal.current.revision().to_vec().into(),
            changes: changes.collect(),
            warnings: warnings.collect(),
            ..TenantPlan::default()
        };
        Ok((plan, reply))
    }

    fn holdings(&self) -> Holdings {
        Holdings {
            usage: Usage {
                used: self.engine.used_by_tenants().clone(),
                counts: self.engine.counts_by_tenant(),
            },
            tokens: self.access.tokens().valid_by_tenant(UnixMillis::now()),
            past_shares: self.engine.past_shares(),
        }
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
            let has = pool.permille.get(kind).copied().unwrap_or_default();
            let has = has / u64::from(WHOLE_PERMILLE);
            let warning = || {
                format!("tenants are guaranteed {all} {kind} in all, and the pool has {has} now")
            };
            (all > has).then(|| (kind.to_owned(), warning()))
        });
        excess.collect()
    }
}

impl Holdings {
    fn info(&self, name: &str, tenant: &Tenant) -> TenantInfo {
        let (used, counted) = (self.usage.used_by(name), self.usage.counts_of(name));
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
                kinds: fractions(&used.permille),
            }),
            used_memory_bytes: used.memory_bytes.try_into().unwrap_or(u64::MAX),
            leases: view::count(counted.leases),
            suspended: view::count(counted.suspended),
            waiting: view::count(counted.requests),
            tokens: self.tokens.get(name).cloned().unwrap_or_default(),
            past_share: self.past_shares.get(name).copied().unwrap_or_default(),
            ..TenantInfo::default()
        }
    }
}

fn counts(kinds: &BTreeMap<String, u32>) -> Vec<KindCount> {
    let counted = kinds.iter().map(|(kind, count)| KindCount {
        kind: kind.clone(),
        count: *count,
        permille: 0,
    });
    counted.collect()
}

/// Returns numbers of devices that are given in thousandths of one.
fn fractions(kinds: &BTreeMap<String, u64>) -> Vec<KindCount> {
    let whole = u64::from(WHOLE_PERMILLE);
    let counted = kinds.iter().map(|(kind, permille)| KindCount {
        kind: kind.clone(),
        count: u32::try_from(permille / whole).unwrap_or(u32::MAX),
        // Less than 1000.
        permille: (permille % whole) as u32,
    });
    counted.collect()
}
