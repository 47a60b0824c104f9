//! What changes when the tenants of a pool become those of a list, and what is in use of what that takes
//! away.
//!
//! Pure data, as [`Registry`]. The rules:
//!
//! - The list has every tenant. One that it lacks is removed, and what it does not name of one has the value
//!   of a new tenant.
//! - A tenant that is removed is in use if it has valid tokens of programs, leases or requests; one whose
//!   limit becomes lower, if it has more than the new limit. Such a change is made only by force.
//! - By force, the tokens of programs of a removed tenant are revoked. A tenant with valid tokens of workers
//!   or administrators is not removed even so: the pool would lose its workers, or the caller its access.

use std::{collections::BTreeMap, sync::Arc};

use tensord_proto::share::WHOLE_PERMILLE;
use tensord_scheduler::{Amounts, TenantCounts, TenantLimit, TenantName};

use super::registry::{Registry, Tenant, TenantChange, TenantError, listed};
use crate::{
    human::{self, plural},
    scheduler::access::{Role, Token, TokenState, Tokens, UnixMillis},
};

/// Every tenant that a pool is to have, by name.
pub(crate) type DeclaredTenants = BTreeMap<String, TenantChange>;

/// What is done with a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is shown.
    DryRun,
    /// It is carried out.
    Apply {
        /// The [`Registry::revision`] of the tenants that the caller has seen.
        revision: Vec<u8>,
        /// Whether to make changes that concern what is in use.
        force: bool,
    },
}

/// A list of tenants, and what its plan depends on.
#[derive(Debug)]
pub(crate) struct Proposal {
    pub(crate) declared: DeclaredTenants,
    pub(crate) mode: Mode,
    /// The tenants as they are.
    pub(crate) current: Registry,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) now: UnixMillis,
}

/// What tenants have.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// The devices of their leases.
    pub(crate) used: BTreeMap<TenantName, Amounts>,
    pub(crate) counts: BTreeMap<TenantName, TenantCounts>,
}

impl Usage {
    /// Returns the devices of a tenant.
    pub(crate) fn used_by(&self, tenant: &str) -> Amounts {
        self.used.get(tenant).cloned().unwrap_or_default()
    }

    /// Returns the numbers of leases and requests of a tenant.
    pub(crate) fn counts_of(&self, tenant: &str) -> TenantCounts {
        self.counts.get(tenant).copied().unwrap_or_default()
    }
}

/// The changes of tenants that make them those of a list.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The tenants that change, by name.
    pub(crate) changes: BTreeMap<String, PlannedTenant>,
    /// All tenants after the changes.
    pub(crate) after: Registry,
}

/// The change of a tenant.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PlannedTenant {
    /// The tenant as it is; `None` if it is added.
    pub(crate) before: Option<Tenant>,
    /// The tenant as it will be; `None` if it is removed.
    pub(crate) after: Option<Tenant>,
    /// What it has and would lose, or would have beyond its limit, in words.
    pub(crate) in_use: Vec<String>,
    /// The names of its valid tokens of workers and administrators, if it is removed.
    pub(crate) kept_tokens: Vec<String>,
    /// The names of its tokens that are revoked with it.
    pub(crate) revoked_tokens: Vec<String>,
}

impl Proposal {
    /// Returns the changes that make the current tenants those of the list.
    ///
    /// # Errors
    ///
    /// If the list breaks a rule; or, if the plan is to be carried out, the tenants were changed since the
    /// caller has seen them, or a change concerns what is in use.
    pub(crate) fn plan(&self, usage: &Usage) -> Result<Plan, TenantError> {
        if let Mode::Apply { revision, .. } = &self.mode
            && *revision != self.current.revision()
        {
            return Err(TenantError::Outdated);
        }
        let after = self.current.declared(&self.declared, self.now)?;
        let names = self.current.iter().chain(after.iter());
        let changes = names.filter_map(|(name, _)| {
            let (before, after) = (self.current.get(name).ok(), after.get(name).ok());
            let change = || (name.to_owned(), self.change(name, before, after, usage));
            (before != after).then(change)
        });
        let plan = Plan {
            changes: changes.collect(),
            after,
        };
        if let Mode::Apply { force, .. } = self.mode {
            plan.check(force)?;
        }
        Ok(plan)
    }

    fn change(
        &self,
        name: &str,
        before: Option<&Tenant>,
        after: Option<&Tenant>,
        usage: &Usage,
    ) -> PlannedTenant {
        let mut planned = PlannedTenant {
            before: before.cloned(),
            after: after.cloned(),
            in_use: Vec::new(),
            kept_tokens: Vec::new(),
            revoked_tokens: Vec::new(),
        };
        match (before, after) {
            (Some(before), Some(after)) => {
                planned.in_use = beyond(&before.limit(), &after.limit(), &usage.used_by(name));
            }
            (Some(_), None) => self.remove(name, usage.counts_of(name), &mut planned),
            (None, _) => {}
        }
        planned
    }

    /// Completes the plan of a tenant that is removed.
    fn remove(&self, name: &str, counts: TenantCounts, planned: &mut PlannedTenant) {
        let names = |is_wanted: &dyn Fn(&Token) -> bool| {
            let of_tenant = self.tokens.iter().filter(|token| token.tenant == name);
            let wanted = of_tenant.filter(|token| is_wanted(token));
            wanted.map(|token| token.name.clone()).collect::<Vec<_>>()
        };
        let is_program = |token: &Token| token.role == Role::Client;
        let is_valid = |token: &Token| token.state_at(self.now) == TokenState::Valid;
        planned.kept_tokens = names(&|token| !is_program(token) && is_valid(token));
        let valid = names(&|token| is_program(token) && is_valid(token));
        if !valid.is_empty() {
            let tokens = if valid.len() == 1 { "token" } else { "tokens" };
            let words = format!("valid {tokens} {}", listed(&valid));
            planned.in_use.push(words);
        }
        planned.in_use.extend(in_words(counts));
        if !planned.in_use.is_empty() {
            // A token that has expired may have leases, too.
            let has_ended =
                |token: &Token| matches!(token.state_at(self.now), TokenState::Ended(_));
            planned.revoked_tokens = names(&|token| is_program(token) && !has_ended(token));
        }
    }
}

impl Plan {
    fn check(&self, force: bool) -> Result<(), TenantError> {
        for (name, planned) in &self.changes {
            if !planned.kept_tokens.is_empty() {
                return Err(TenantError::HasTokens {
                    name: name.clone(),
                    tokens: listed(&planned.kept_tokens),
                });
            }
            if !planned.in_use.is_empty() && !force {
                return Err(TenantError::InUse {
                    name: name.clone(),
                    what: planned.in_use.join(", "),
                });
            }
        }
        Ok(())
    }

    /// Returns the tenants that change as they will be, and `None` for each that is removed.
    pub(crate) fn records(&self) -> BTreeMap<String, Option<Tenant>> {
        let changes = self.changes.iter();
        changes
            .map(|(name, planned)| (name.clone(), planned.after.clone()))
            .collect()
    }

    /// Returns the names of the tokens that are revoked.
    pub(crate) fn revoked_tokens(&self) -> Vec<String> {
        let changes = self.changes.values();
        let tokens = changes.flat_map(|planned| &planned.revoked_tokens);
        tokens.cloned().collect()
    }
}

/// Returns which of the devices that a tenant has are beyond its new limit, in words, where the earlier limit
/// was higher.
fn beyond(earlier: &TenantLimit, new: &TenantLimit, used: &Amounts) -> Vec<String> {
    let kinds = new.devices.iter().filter_map(|(kind, &max)| {
        let is_lower = earlier
            .devices
            .get(kind)
            .is_none_or(|earlier| max < *earlier);
        let has = used.permille.get(kind).copied().unwrap_or_default();
        let has_text = human::thousandths(has);
        let words = || format!("{has_text} {kind}, above the new limit of {max}");
        (is_lower && has > u64::from(max) * u64::from(WHOLE_PERMILLE)).then(words)
    });
    let memory = new.memory_bytes.and_then(|max| {
        let is_lower = earlier.memory_bytes.is_none_or(|earlier| max < earlier);
        let has = u64::try_from(used.memory_bytes).unwrap_or(u64::MAX);
        let (has_text, max_text) = (human::bytes(has), human::exact_bytes(max));
        let words = || format!("{has_text}, above the new limit of {max_text}");
        (is_lower && has > max).then(words)
    });
    kinds.chain(memory).collect()
}

/// Returns the numbers of leases and requests in words, or `None` if there are none.
fn in_words(counts: TenantCounts) -> Option<String> {
    let TenantCounts {
        leases,
        suspended,
        requests,
    } = counts;
    let counted = [
        (leases, "lease"),
        (suspended, "suspended lease"),
        (requests, "request"),
    ];
    let counted = counted.into_iter().filter(|(count, _)| *count > 0);
    let words: Vec<_> = counted.map(|(count, what)| plural(count, what)).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

#[cfg(test)]
mod tests;
