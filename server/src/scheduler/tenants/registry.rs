//! The rules for tenants: their names, and what their guarantees, limits and weights can be.
//!
//! Pure data: the time comes as an argument, and the caller persists changes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tensord_scheduler::{Policy, TenantLimit, TenantPolicy};

use crate::{
    human::plural,
    scheduler::access::{UnixMillis, is_name},
};

/// The largest number of tenants of a pool.
const MAX_TENANTS: usize = 1000;

/// The largest number of kinds of devices in a guarantee or limit: more than there are kinds.
const MAX_KINDS: usize = 32;

/// The largest weight.
const MAX_WEIGHT: u32 = 1_000_000;

/// The largest number of tokens that an error names.
const MAX_LISTED_TOKENS: usize = 8;

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tenant {
    /// The time at which the tenant was added.
    pub(crate) created: UnixMillis,
    /// By how much its share is divided before it is compared with those of others.
    pub(crate) weight: u32,
    /// The number of devices of each kind for which its requests come first.
    pub(crate) guaranteed: BTreeMap<String, u32>,
    /// The largest number of devices of each kind.
    pub(crate) limit: BTreeMap<String, u32>,
    /// The largest sum of its devices' memory, in bytes.
    pub(crate) limit_memory_bytes: Option<u64>,
}

/// A change of a tenant, or what a new one has. What is `None` stays as it is, or is that of a new tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantChange {
    pub(crate) weight: Option<u32>,
    pub(crate) guaranteed: Option<BTreeMap<String, u32>>,
    pub(crate) limit: Option<TenantLimit>,
}

/// The reason why a tenant was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TenantError {
    #[error("{what} is {text:?}; it must have 1 to 64 letters, digits and - _ .")]
    Name { what: &'static str, text: String },
    #[error("there is a tenant {0:?} already; change it with `tensord tenant set`")]
    Exists(String),
    #[error(
        "there is no tenant {0:?}; `tensord tenant list` shows all, and `tensord tenant add` adds one"
    )]
    Unknown(String),
    #[error(
        "tenant {name:?} has tokens that are valid: {tokens}; revoke them first with `tensord token revoke`"
    )]
    HasTokens { name: String, tokens: String },
    #[error(
        "tenant {name:?} has {} and {}; end them first with `tensord lease end`", plural(*leases, "lease"), plural(*requests, "request")
    )]
    HasLeases {
        name: String,
        leases: usize,
        requests: usize,
    },
    #[error(
        "tenant {name:?} is in use: {what}; end the leases and revoke the tokens first, or apply the tenants with --force"
    )]
    InUse { name: String, what: String },
    #[error(
        "somebody else has changed the tenants in the meantime, so nothing was applied; run the command with --dry-run to see what it would change now"
    )]
    Outdated,
    #[error("tenant {0:?} is in the list twice")]
    Twice(String),
    #[error("the list has {count} tenants, and {MAX_TENANTS} is the most")]
    TooMany { count: usize },
    #[error("tenant {name:?}: {reason}")]
    Of {
        name: String,
        reason: Box<TenantError>,
    },
    #[error("there is nothing to change; name a weight, a guarantee or a limit")]
    Unchanged,
    #[error("the weight is {0}; it must be from 1 to {MAX_WEIGHT}")]
    Weight(u32),
    #[error("{count} kinds of devices were named, and {MAX_KINDS} is the most")]
    Kinds { count: usize },
    #[error(
        "a guarantee of {guaranteed} devices of kind {kind} is above the limit of {limit}; lower the guarantee or raise the limit, both in one change"
    )]
    AboveLimit {
        kind: String,
        guaranteed: u32,
        limit: u32,
    },
    #[error("the pool has {MAX_TENANTS} tenants, which is the limit; remove some")]
    Full,
}

impl TenantError {
    /// Returns the error for a tenant that is in a list twice.
    pub(crate) fn twice(name: &str) -> Self {
        Self::Twice(shortened(name))
    }
}

/// All tenants of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registry {
    tenants: BTreeMap<String, Tenant>,
}

impl Registry {
    pub(super) fn new(tenants: BTreeMap<String, Tenant>) -> Self {
        Self { tenants }
    }

    /// Returns the tenants, by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Tenant)> {
        self.tenants.iter().map(|(name, tenant)| (&**name, tenant))
    }

    /// Returns the tenant of this name.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(crate) fn get(&self, name: &str) -> Result<&Tenant, TenantError> {
        let unknown = || TenantError::Unknown(shortened(name));
        self.tenants.get(name).ok_or_else(unknown)
    }

    /// Returns the guarantees, limits and weights of the tenants, as the engine needs them.
    pub(crate) fn policy(&self) -> Policy {
        let tenants = self.tenants.iter();
        tenants
            .map(|(name, tenant)| (name.as_str().into(), tenant.policy()))
            .collect()
    }

    /// Adds a tenant.
    ///
    /// # Errors
    ///
    /// If it breaks a rule.
    pub(super) fn add(
        &mut self,
        name: &str,
        change: TenantChange,
        now: UnixMillis,
    ) -> Result<&Tenant, TenantError> {
        check_name("the tenant's name", name)?;
        if self.tenants.contains_key(name) {
            return Err(TenantError::Exists(name.into()));
        }
        if self.tenants.len() >= MAX_TENANTS {
            return Err(TenantError::Full);
        }
        let mut tenant = Tenant::new(now);
        tenant.apply(change)?;
        Ok(self.tenants.entry(name.into()).or_insert(tenant))
    }

    /// Changes a tenant.
    ///
    /// # Errors
    ///
    /// If there is none of this name, or the change breaks a rule. The tenant is then as before.
    pub(super) fn set(&mut self, name: &str, change: TenantChange) -> Result<&Tenant, TenantError> {
        let mut changed = self.get(name)?.clone();
        if change == TenantChange::default() {
            return Err(TenantError::Unchanged);
        }
        changed.apply(change)?;
        let entry = self.tenants.entry(name.into()).insert_entry(changed);
        Ok(entry.into_mut())
    }

    /// Removes a tenant that has none of these valid `tokens`.
    ///
    /// # Errors
    ///
    /// If there is none of this name, or it has tokens.
    pub(super) fn remove(&mut self, name: &str, tokens: &[String]) -> Result<(), TenantError> {
        self.get(name)?;
        if !tokens.is_empty() {
            let (name, tokens) = (name.into(), listed(tokens));
            return Err(TenantError::HasTokens { name, tokens });
        }
        self.tenants.remove(name);
        Ok(())
    }

    /// Returns the tenants of a list that has all of them. A tenant that exists keeps the time at which it
    /// was added, and nothing else.
    ///
    /// # Errors
    ///
    /// If the list breaks a rule; the error names the tenant.
    pub(super) fn declared(
        &self,
        list: &BTreeMap<String, TenantChange>,
        now: UnixMillis,
    ) -> Result<Self, TenantError> {
        let count = list.len();
        if count > MAX_TENANTS {
            return Err(TenantError::TooMany { count });
        }
        let tenants = list.iter().map(|(name, change)| {
            check_name("the tenant's name", name)?;
            let known = self.tenants.get(name);
            let mut tenant = Tenant::new(known.map_or(now, |known| known.created));
            let applied = tenant.apply(change.clone());
            applied.map_err(|reason| TenantError::Of {
                name: name.clone(),
                reason: reason.into(),
            })?;
            Ok((name.clone(), tenant))
        });
        tenants.collect::<Result<_, _>>().map(Self::new)
    }

    /// Returns bytes that are others after each change of a tenant.
    pub(crate) fn revision(&self) -> [u8; blake3::OUT_LEN] {
        let json = serde_json::to_vec(&self.tenants);
        let json = json.expect("numbers and texts serialize without failing");
        blake3::hash(&json).into()
    }
}

/// Returns the first of these names of tokens, and the number of the others.
pub(super) fn listed(tokens: &[String]) -> String {
    let mut listed: Vec<_> = tokens.iter().take(MAX_LISTED_TOKENS).cloned().collect();
    if tokens.len() > MAX_LISTED_TOKENS {
        listed.push(format!("and {} more", tokens.len() - MAX_LISTED_TOKENS));
    }
    listed.join(", ")
}

impl Tenant {
    fn new(created: UnixMillis) -> Self {
        Self {
            created,
            weight: 1,
            guaranteed: BTreeMap::new(),
            limit: BTreeMap::new(),
            limit_memory_bytes: None,
        }
    }

    fn apply(&mut self, change: TenantChange) -> Result<(), TenantError> {
        let TenantChange {
            weight,
            guaranteed,
            limit,
        } = change;
        if let Some(weight) = weight {
            if !(1..=MAX_WEIGHT).contains(&weight) {
                return Err(TenantError::Weight(weight));
            }
            self.weight = weight;
        }
        if let Some(guaranteed) = guaranteed {
            check_kinds(&guaranteed)?;
            self.guaranteed = guaranteed;
        }
        if let Some(TenantLimit {
            devices,
            memory_bytes,
        }) = limit
        {
            check_kinds(&devices)?;
            (self.limit, self.limit_memory_bytes) = (devices, memory_bytes);
        }
        for (kind, &guaranteed) in &self.guaranteed {
            if let Some(&limit) = self.limit.get(kind).filter(|limit| **limit < guaranteed) {
                let kind = kind.clone();
                return Err(TenantError::AboveLimit {
                    kind,
                    guaranteed,
                    limit,
                });
            }
        }
        Ok(())
    }

    /// Returns what the tenant may have.
    pub(crate) fn limit(&self) -> TenantLimit {
        TenantLimit {
            devices: self.limit.clone(),
            memory_bytes: self.limit_memory_bytes,
        }
    }

    fn policy(&self) -> TenantPolicy {
        TenantPolicy {
            weight: self.weight,
            guaranteed: self.guaranteed.clone(),
            limit: self.limit(),
        }
    }
}

/// Returns the policy of a pool that has these tenants alone.
///
/// # Errors
///
/// The name of the first tenant that breaks a rule, and the rule.
pub(crate) fn policy_of(
    tenants: impl IntoIterator<Item = (String, TenantChange)>,
) -> Result<Policy, (String, TenantError)> {
    let mut registry = Registry::default();
    for (name, change) in tenants {
        let added = registry.add(&name, change, UnixMillis(0));
        added.map(drop).map_err(|error| (name, error))?;
    }
    Ok(registry.policy())
}

fn check_kinds(kinds: &BTreeMap<String, u32>) -> Result<(), TenantError> {
    let count = kinds.len();
    if count > MAX_KINDS {
        return Err(TenantError::Kinds { count });
    }
    let mut kinds = kinds.keys();
    kinds.try_for_each(|kind| check_name("a kind of device", kind))
}

fn check_name(what: &'static str, text: &str) -> Result<(), TenantError> {
    match is_name(text) {
        true => Ok(()),
        false => Err(TenantError::Name {
            what,
            text: shortened(text),
        }),
    }
}

/// Returns the start of a text that may be long.
fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(kinds: &[(&str, u32)]) -> BTreeMap<String, u32> {
        let kinds = kinds.iter().map(|(kind, count)| ((*kind).into(), *count));
        kinds.collect()
    }

    fn limit(devices: &[(&str, u32)]) -> TenantLimit {
        TenantLimit {
            devices: kinds(devices),
            memory_bytes: None,
        }
    }

    #[test]
    fn a_change_leaves_what_it_does_not_name() {
        let mut registry = Registry::default();
        let new = TenantChange {
            weight: Some(3),
            guaranteed: Some(kinds(&[("cuda", 2)])),
            limit: None,
        };
        registry.add("red", new, UnixMillis(5)).unwrap();
        let change = TenantChange {
            limit: Some(TenantLimit {
                memory_bytes: Some(9),
                ..limit(&[("cuda", 4)])
            }),
            ..TenantChange::default()
        };
        let expected = Tenant {
            created: UnixMillis(5),
            weight: 3,
            guaranteed: kinds(&[("cuda", 2)]),
            limit: kinds(&[("cuda", 4)]),
            limit_memory_bytes: Some(9),
        };
        assert_eq!(registry.set("red", change), Ok(&expected));
        let policy = registry.policy();
        assert_eq!(policy["red"], expected.policy());
        assert_eq!(policy["red"].limit.memory_bytes, Some(9));
    }

    #[test]
    fn a_change_that_breaks_a_rule_changes_nothing() {
        let mut registry = Registry::default();
        let now = UnixMillis(5);
        registry.add("red", TenantChange::default(), now).unwrap();
        let before = registry.clone();
        let change = |weight, guaranteed: &[_], devices: &[_]| TenantChange {
            weight,
            guaranteed: Some(kinds(guaranteed)),
            limit: Some(limit(devices)),
        };
        let many: Vec<_> = (0..33).map(|n| format!("k{n}")).collect();
        let many: Vec<_> = many.iter().map(|kind| (&**kind, 1)).collect();
        let cases = [
            (
                change(Some(0), &[], &[]),
                "the weight is 0; it must be from 1 to 1000000",
            ),
            (
                change(Some(7), &[("cu da", 1)], &[]),
                "a kind of device is \"cu da\"; it must have 1 to 64 letters, digits and - _ .",
            ),
            (
                change(None, &many, &[]),
                "33 kinds of devices were named, and 32 is the most",
            ),
            (
                change(None, &[], &many),
                "33 kinds of devices were named, and 32 is the most",
            ),
            (
                change(None, &[("cuda", 5)], &[("cuda", 4)]),
                "a guarantee of 5 devices of kind cuda is above the limit of 4; lower the guarantee or raise the limit, both in one change",
            ),
        ];
        for (change, expected) in cases {
            let refused = registry.set("red", change.clone()).unwrap_err();
            assert_eq!(refused.to_string(), expected);
            let refused = registry.add("blue", change, now).unwrap_err();
            assert_eq!(refused.to_string(), expected);
            assert_eq!(registry, before);
        }
        let default = TenantChange::default;
        assert_eq!(
            registry.add("red", default(), now),
            Err(TenantError::Exists("red".into()))
        );
        assert_eq!(
            registry.set("blue", default()),
            Err(TenantError::Unknown("blue".into()))
        );
        assert_eq!(registry.set("red", default()), Err(TenantError::Unchanged));
        assert!(matches!(
            registry.add("", default(), now),
            Err(TenantError::Name { .. })
        ));
        for n in 1..1000 {
            registry.add(&format!("t{n}"), default(), now).unwrap();
        }
        assert_eq!(registry.add("last", default(), now), Err(TenantError::Full));
    }

    #[test]
    fn a_tenant_with_tokens_stays() {
        let mut registry = Registry::default();
        let now = UnixMillis(5);
        registry.add("red", TenantChange::default(), now).unwrap();
        let refused = registry.remove("red", &["ci".into(), "night".into()]);
        assert_eq!(
            refused.unwrap_err().to_string(),
            "tenant \"red\" has tokens that are valid: ci, night; revoke them first with `tensord token revoke`"
        );
        let many: Vec<_> = (0..500).map(|n| format!("t{n}")).collect();
        let refused = registry.remove("red", &many).unwrap_err().to_string();
        assert!(refused.contains("t6, t7, and 492 more;"), "{refused}");
        assert_eq!(registry.remove("red", &[]), Ok(()));
        let unknown = TenantError::Unknown("red".into());
        assert_eq!(registry.remove("red", &[]), Err(unknown));
    }
}
