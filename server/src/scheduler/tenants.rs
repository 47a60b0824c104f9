//! The tenants of a pool, on disk, and their changes while the pool runs.
//!
//! [`Registry`] has the rules. A change takes effect once it is on disk.

mod plan;
mod registry;
mod store;

use std::{collections::BTreeMap, sync::Arc};

pub(crate) use self::{
    plan::{DeclaredTenants, Mode, Plan, Proposal, Usage},
    registry::{Registry, Tenant, TenantChange, TenantError, policy_of},
    store::{RedbTenants, TenantStore},
};
use super::access::{Access, ChangeError, TokenState, UnixMillis};
use crate::state::{StateError, WriteThrough};

/// The tenants of a pool.
#[derive(Debug)]
pub(crate) struct Tenants {
    store: Box<dyn TenantStore>,
    registry: WriteThrough<Registry>,
}

impl Tenants {
    /// Opens the tenants in `store`. Adds those that valid tokens name and the store does not have: the
    /// default one at the first start, and all if tokens are older than the store.
    ///
    /// # Errors
    ///
    /// If the store cannot be read or written.
    pub(crate) fn open(store: Box<dyn TenantStore>, access: &Access) -> Result<Self, StateError> {
        let mut registry = Registry::new(store.load()?);
        let (tokens, now) = (access.tokens(), UnixMillis::now());
        let mut added = BTreeMap::new();
        for token in tokens
            .iter()
            .filter(|it| it.state_at(now) == TokenState::Valid)
        {
            // `add` fails if the tenant exists, or if the pool has as many as it may. A tenant that is left out
            // has the policy of a new one.
            if let Ok(tenant) = registry.add(&token.tenant, TenantChange::default(), now) {
                added.insert(token.tenant.clone(), Some(tenant.clone()));
            }
        }
        if !added.is_empty() {
            store.write(&added)?;
        }
        Ok(Self {
            store,
            registry: WriteThrough::new(registry),
        })
    }

    /// Returns the current tenants.
    pub(crate) fn read(&self) -> Arc<Registry> {
        self.registry.read()
    }

    /// Adds a tenant. Blocks until it is on disk.
    ///
    /// # Errors
    ///
    /// If it breaks a rule, or cannot be written.
    pub(super) fn add(&self, name: &str, change: TenantChange) -> Result<(), ChangeError> {
        self.change(name, |registry| {
            let added = registry.add(name, change, UnixMillis::now())?;
            Ok(Some(added.clone()))
        })
    }

    /// Changes a tenant. Blocks until that is on disk.
    ///
    /// # Errors
    ///
    /// If there is no such tenant, or the change breaks a rule or cannot be written.
    pub(super) fn set(&self, name: &str, change: TenantChange) -> Result<(), ChangeError> {
        self.change(name, |registry| {
            Ok(Some(registry.set(name, change)?.clone()))
        })
    }

    /// Removes a tenant without valid tokens. Blocks until that is on disk.
    ///
    /// # Errors
    ///
    /// If there is no such tenant, or `access` has valid tokens of it, or the change cannot be written.
    pub(super) fn remove(&self, name: &str, access: &Access) -> Result<(), ChangeError> {
        self.change(name, |registry| {
            // Creating a token takes the same lock, so the tenant gets no token meanwhile.
            let tokens = access.tokens().valid_by_tenant(UnixMillis::now());
            registry.remove(name, tokens.get(name).map_or(&[], Vec::as_slice))?;
            Ok(None)
        })
    }

    /// Makes the tenants those of a list, or plans it. `decide` makes the plan, and `revoke` revokes tokens and
    /// ends what was opened with them. Blocks until the change is on disk.
    ///
    /// # Errors
    ///
    /// Those of `decide` and `revoke`, and if the change cannot be written. The tenants are then as before.
    pub(super) fn apply<T>(
        &self,
        access: &Access,
        declared: DeclaredTenants,
        mode: Mode,
        decide: impl FnOnce(Proposal) -> Result<(Plan, T), ChangeError>,
        revoke: impl FnOnce(&[String]) -> Result<(), ChangeError>,
    ) -> Result<(Plan, T), ChangeError> {
        let is_applied = mode != Mode::DryRun;
        let plan = |registry: &mut Registry| {
            let proposal = Proposal {
                declared,
                mode,
                current: registry.clone(),
                // Creating a token takes the same lock, so no tenant gets a token meanwhile.
                tokens: access.tokens(),
                now: UnixMillis::now(),
            };
            let decided = decide(proposal)?;
            if is_applied {
                *registry = decided.0.after.clone();
            }
            Ok(decided)
        };
        let write = |_: &Registry, (plan, _): &(Plan, T)| {
            if !is_applied || plan.changes.is_empty() {
                return Ok(());
            }
            // Before the tenants are removed: the next start would add the tenants of valid tokens again,
            // without their limits.
            let tokens = plan.revoked_tokens();
            if !tokens.is_empty() {
                revoke(&tokens)?;
            }
            self.store
                .write(&plan.records())
                .map_err(|source| match tokens.is_empty() {
                    true => source.into(),
                    false => ChangeError::OnlyRevoked {
                        tokens: registry::listed(&tokens),
                        source,
                    },
                })
        };
        self.registry.change(plan, write)
    }

    /// Runs `change` if the tenant exists, which cannot be removed meanwhile.
    ///
    /// # Errors
    ///
    /// If there is no such tenant, and those of `change`.
    pub(super) fn with_tenant<T>(
        &self,
        name: &str,
        change: impl FnOnce() -> Result<T, ChangeError>,
    ) -> Result<T, ChangeError> {
        let _held = self.registry.hold();
        self.read().get(name)?;
        change()
    }

    fn change(
        &self,
        name: &str,
        change: impl FnOnce(&mut Registry) -> Result<Option<Tenant>, ChangeError>,
    ) -> Result<(), ChangeError> {
        let write = |_: &Registry, record: &Option<Tenant>| {
            let written = self
                .store
                .write(&[(name.to_owned(), record.clone())].into());
            Ok(written?)
        };
        self.registry.change(change, write).map(drop)
    }
}

#[cfg(test)]
mod tests;
