use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::{
    scheduler::access::{NewToken, Role, TokenError},
    state::{StateDir, StateError},
};

struct Rig {
    directory: tempfile::TempDir,
    access: Access,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::open(directory.path()).unwrap();
        let secrets = state.pool_secrets().unwrap();
        let access = Access::open(state, &secrets).unwrap();
        Self { directory, access }
    }

    fn open(&self) -> Result<Tenants, StateError> {
        let state = StateDir::open(self.directory.path()).unwrap();
        Tenants::open(Box::new(RedbTenants::open(&state)?), &self.access)
    }

    fn create_token(&self, tenants: &Tenants, name: &str, tenant: &str) -> Result<(), ChangeError> {
        let new = NewToken {
            name: name.into(),
            role: Role::Client,
            tenant: tenant.into(),
            user: String::new(),
            note: String::new(),
            life: None,
            uses: None,
        };
        tenants.with_tenant(tenant, || self.access.create(new).map(drop))
    }
}

fn names(tenants: &Tenants) -> Vec<String> {
    let registry = tenants.read();
    registry.iter().map(|(name, _)| name.to_owned()).collect()
}

fn weight(weight: u32) -> TenantChange {
    TenantChange {
        weight: Some(weight),
        ..TenantChange::default()
    }
}

#[test]
fn tenants_are_the_same_after_a_restart() {
    let rig = Rig::new();
    let tenants = rig.open().unwrap();
    assert_eq!(names(&tenants), ["default"]);
    tenants.add("red", weight(2)).unwrap();
    tenants.add("blue", weight(3)).unwrap();
    tenants.set("red", weight(7)).unwrap();
    tenants.remove("blue", &rig.access).unwrap();
    let before = Registry::clone(&tenants.read());
    drop(tenants);
    let tenants = rig.open().unwrap();
    assert_eq!(*tenants.read(), before);
    assert_eq!(names(&tenants), ["default", "red"]);
    assert_eq!(tenants.read().get("red").unwrap().weight, 7);
    let file = rig.directory.path().join("tenants.redb");
    let mode = std::fs::metadata(file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn tenants_of_earlier_tokens_are_added() {
    let rig = Rig::new();
    let new = NewToken {
        name: "ci".into(),
        role: Role::Client,
        tenant: "red".into(),
        user: String::new(),
        note: String::new(),
        life: None,
        uses: None,
    };
    rig.access.create(new).unwrap();
    assert_eq!(names(&rig.open().unwrap()), ["default", "red"]);
}

#[test]
fn tokens_and_tenants_depend_on_each_other() {
    let rig = Rig::new();
    let tenants = rig.open().unwrap();
    let refused = rig.create_token(&tenants, "ci", "red").unwrap_err();
    assert_eq!(
        refused.to_string(),
        "there is no tenant \"red\"; `tensord tenant list` shows all, and `tensord tenant add` adds one"
    );
    tenants.add("red", weight(1)).unwrap();
    rig.create_token(&tenants, "ci", "red").unwrap();
    let refused = tenants.remove("red", &rig.access).unwrap_err().to_string();
    assert!(refused.contains("tokens that are valid: ci;"), "{refused}");
    rig.access.revoke("ci", true).unwrap();
    tenants.remove("red", &rig.access).unwrap();
    drop(tenants);
    // The revoked token does not bring it back.
    let tenants = rig.open().unwrap();
    assert_eq!(names(&tenants), ["default"]);
    // What a token breaks is reported, and not taken for the tenant's fault.
    let refused = rig.create_token(&tenants, "ci", "default").unwrap_err();
    assert!(matches!(refused, ChangeError::Token(TokenError::Taken(_))));
}

/// Quotas are not dropped silently.
#[test]
fn a_damaged_file_is_an_error_and_stays() {
    let rig = Rig::new();
    drop(rig.open().unwrap());
    let file = rig.directory.path().join("tenants.redb");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.truncate(bytes.len() / 2);
    std::fs::write(&file, &bytes).unwrap();
    let error = rig.open().unwrap_err();
    let error = error.to_string();
    assert!(error.contains("tenants.redb is damaged"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap().len(), bytes.len());
}

/// Applies a list of tenants by force, at a pool without leases. Returns the tokens that are revoked, also
/// if that fails.
fn apply(
    rig: &Rig,
    tenants: &Tenants,
    declared: &[&str],
) -> (Vec<String>, Result<(), ChangeError>) {
    let declared = declared
        .iter()
        .map(|name| ((*name).to_owned(), TenantChange::default()));
    let mode = Mode::Apply {
        revision: tenants.read().revision().to_vec(),
        force: true,
    };
    let decide = |proposal: Proposal| Ok((proposal.plan(&Usage::default())?, ()));
    let mut revoked = Vec::new();
    let revoke = |tokens: &[String]| {
        revoked = tokens.to_vec();
        rig.access.revoke_all(tokens).map(drop)
    };
    let applied = tenants.apply(&rig.access, declared.collect(), mode, decide, revoke);
    (revoked, applied.map(drop))
}

#[test]
fn a_list_is_applied_and_written() {
    let rig = Rig::new();
    let tenants = rig.open().unwrap();
    tenants.add("red", weight(2)).unwrap();
    tenants.add("blue", weight(2)).unwrap();
    rig.create_token(&tenants, "ci", "red").unwrap();
    let (revoked, applied) = apply(&rig, &tenants, &["blue", "default", "green"]);
    applied.unwrap();
    assert_eq!(revoked, ["ci"]);
    let before = Registry::clone(&tenants.read());
    assert_eq!(names(&tenants), ["blue", "default", "green"]);
    assert_eq!(before.get("blue").unwrap().weight, 1);
    drop(tenants);
    assert_eq!(*rig.open().unwrap().read(), before);
}

/// A store whose disk fails from some time on.
#[derive(Debug, Default)]
struct FailingStore(std::sync::atomic::AtomicBool);

impl TenantStore for FailingStore {
    fn load(&self) -> Result<BTreeMap<String, Tenant>, StateError> {
        Ok(BTreeMap::new())
    }

    fn write(&self, _: &BTreeMap<String, Option<Tenant>>) -> Result<(), StateError> {
        match self.0.load(std::sync::atomic::Ordering::Relaxed) {
            true => Err(StateError::Unwritten {
                path: "tenants.redb".into(),
                reason: "the disk is full".into(),
            }),
            false => Ok(()),
        }
    }
}

#[test]
fn a_change_that_cannot_be_written_has_no_effect() {
    let rig = Rig::new();
    let store = FailingStore::default();
    let tenants = Tenants::open(Box::new(store), &rig.access).unwrap();
    tenants.add("red", weight(2)).unwrap();
    let before = Registry::clone(&tenants.read());
    let failing = FailingStore(true.into());
    let tenants = Tenants {
        store: Box::new(failing),
        ..tenants
    };
    let failed = tenants.set("red", weight(3)).unwrap_err().to_string();
    assert_eq!(
        failed,
        "cannot write tenants.redb: the disk is full; free some space or correct the permissions, and repeat the command"
    );
    assert!(tenants.add("blue", weight(3)).is_err());
    assert!(tenants.remove("red", &rig.access).is_err());
    let (_, failed) = apply(&rig, &tenants, &["default"]);
    assert!(matches!(failed, Err(ChangeError::State(_))));
    assert_eq!(*tenants.read(), before);
}

/// A removed tenant of which a token is valid would be added again at the next start, without its limit.
#[test]
fn tokens_are_revoked_before_their_tenant_is_removed() {
    let rig = Rig::new();
    let store = FailingStore::default();
    let tenants = Tenants::open(Box::new(store), &rig.access).unwrap();
    tenants.add("red", weight(2)).unwrap();
    rig.create_token(&tenants, "ci", "red").unwrap();
    let tenants = Tenants {
        store: Box::new(FailingStore(true.into())),
        ..tenants
    };
    let (revoked, failed) = apply(&rig, &tenants, &["default"]);
    assert_eq!(revoked, ["ci"]);
    assert_eq!(
        failed.unwrap_err().to_string(),
        "the tokens ci are revoked, but the tenants are as before: cannot write tenants.redb: the disk is full; free some space or correct the permissions, and repeat the command"
    );
    assert_eq!(names(&tenants), ["default", "red"]);
}
