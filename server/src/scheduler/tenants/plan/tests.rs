use std::time::Duration;

use proptest::{collection::btree_map, option, prelude::*};

use super::*;
use crate::scheduler::access::NewToken;

const NOW: UnixMillis = UnixMillis(1_000_000);

type Texts = &'static [&'static str];

fn kinds(kinds: &[(&str, u32)]) -> BTreeMap<String, u32> {
    let kinds = kinds.iter().map(|(kind, count)| ((*kind).into(), *count));
    kinds.collect()
}

fn limit(devices: &[(&str, u32)], memory_bytes: Option<u64>) -> TenantChange {
    TenantChange {
        limit: Some(TenantLimit {
            devices: kinds(devices),
            memory_bytes,
        }),
        ..TenantChange::default()
    }
}

fn guaranteed(devices: &[(&str, u32)], change: TenantChange) -> TenantChange {
    TenantChange {
        guaranteed: Some(kinds(devices)),
        ..change
    }
}

fn list(tenants: &[(&str, TenantChange)]) -> DeclaredTenants {
    let tenants = tenants.iter();
    let tenants = tenants.map(|(name, change)| ((*name).to_owned(), change.clone()));
    tenants.collect()
}

fn registry(tenants: &DeclaredTenants) -> Registry {
    Registry::default()
        .declared(tenants, UnixMillis(5))
        .unwrap()
}

/// Tokens of these names, roles, tenants and lifetimes in milliseconds.
fn tokens(tokens: &[(&str, Role, &str, Option<u64>)]) -> Tokens {
    let mut all = Tokens::default();
    for (name, role, tenant, life) in tokens {
        let new = NewToken {
            name: (*name).into(),
            role: *role,
            tenant: (*tenant).into(),
            user: String::new(),
            note: String::new(),
            life: life.map(Duration::from_millis),
            uses: None,
        };
        let hash = blake3::hash(name.as_bytes());
        all.create(new, hash, UnixMillis(5)).unwrap();
    }
    all
}

fn proposal(current: &Registry, declared: DeclaredTenants, mode: Mode) -> Proposal {
    Proposal {
        declared,
        mode,
        current: current.clone(),
        tokens: Tokens::default().into(),
        now: NOW,
    }
}

fn apply(current: &Registry, force: bool) -> Mode {
    let revision = current.revision().to_vec();
    Mode::Apply { revision, force }
}

/// The usage of one tenant, in thousandths of devices.
fn usage(tenant: &str, permille: &[(&str, u64)], memory_bytes: u128, counts: [usize; 3]) -> Usage {
    let permille = permille
        .iter()
        .map(|(kind, count)| ((*kind).into(), *count));
    let used = Amounts {
        permille: permille.collect(),
        all_permille: 0,
        memory_bytes,
    };
    let [leases, suspended, requests] = counts;
    let counts = TenantCounts {
        leases,
        suspended,
        requests,
    };
    Usage {
        used: [(tenant.into(), used)].into(),
        counts: [(tenant.into(), counts)].into(),
    }
}

#[test]
fn a_plan_adds_changes_and_removes() {
    let new = TenantChange::default;
    let current = registry(&list(&[
        ("default", new()),
        ("old", new()),
        ("red", limit(&[("cuda", 8)], Some(9))),
        ("same", limit(&[("cuda", 1)], None)),
    ]));
    let declared = list(&[
        ("blue", limit(&[("flex", 2)], None)),
        ("default", new()),
        ("red", guaranteed(&[("cuda", 2)], new())),
        ("same", limit(&[("cuda", 1)], None)),
    ]);
    let proposal = proposal(&current, declared, apply(&current, false));
    let plan = proposal.plan(&Usage::default()).unwrap();
    let names: Vec<_> = plan.changes.keys().map(String::as_str).collect();
    assert_eq!(names, ["blue", "old", "red"]);
    let records = plan.records();
    assert_eq!(records["old"], None);
    let blue = records["blue"].as_ref().unwrap();
    assert_eq!((blue.created, blue.weight), (NOW, 1));
    // The limit is not in the list, so there is none any more.
    let expected = Tenant {
        created: UnixMillis(5),
        weight: 1,
        guaranteed: kinds(&[("cuda", 2)]),
        limit: BTreeMap::new(),
        limit_memory_bytes: None,
    };
    assert_eq!(records["red"].as_ref(), Some(&expected));
    assert_eq!(plan.changes["red"].before, current.get("red").ok().cloned());
    assert_eq!(plan.after.get("red"), Ok(&expected));
}

#[test]
fn a_limit_below_what_a_tenant_has_is_in_use() {
    const GIB: u64 = 1 << 30;
    let cases: [(TenantChange, TenantChange, Texts); 10] = [
        (limit(&[], None), limit(&[("cuda", 6)], None), &[]),
        (
            limit(&[], None),
            limit(&[("cuda", 5)], None),
            &["6 cuda, above the new limit of 5"],
        ),
        (
            limit(&[("cuda", 8)], None),
            limit(&[("cuda", 5), ("flex", 0)], None),
            &[
                "6 cuda, above the new limit of 5",
                "1.25 flex, above the new limit of 0",
            ],
        ),
        (
            limit(&[], None),
            limit(&[("flex", 1)], None),
            &["1.25 flex, above the new limit of 1"],
        ),
        // The limit was lower still, and what the tenant has above it goes on already.
        (
            limit(&[("cuda", 4)], None),
            limit(&[("cuda", 5)], None),
            &[],
        ),
        (
            limit(&[("cuda", 4)], None),
            limit(&[("cuda", 3)], None),
            &["6 cuda, above the new limit of 3"],
        ),
        (limit(&[("cuda", 4)], None), limit(&[], None), &[]),
        (
            limit(&[], None),
            limit(&[], Some(500 * GIB)),
            &["512.0 GiB, above the new limit of 500 GiB"],
        ),
        (limit(&[], Some(GIB)), limit(&[], Some(2 * GIB)), &[]),
        (limit(&[], None), limit(&[], Some(512 * GIB)), &[]),
    ];
    let permille = [("cuda", 6000), ("flex", 1250)];
    let usage = usage("red", &permille, u128::from(512 * GIB), [4, 0, 0]);
    for (before, after, expected) in cases {
        let current = registry(&list(&[("red", before)]));
        let declared = list(&[("red", after)]);
        let dry_run = proposal(&current, declared.clone(), Mode::DryRun);
        let plan = dry_run.plan(&usage).unwrap();
        assert_eq!(plan.changes["red"].in_use, expected, "{dry_run:?}");
        let applied = proposal(&current, declared.clone(), apply(&current, false));
        assert_eq!(applied.plan(&usage).is_ok(), expected.is_empty());
        let forced = proposal(&current, declared, apply(&current, true));
        let plan = forced.plan(&usage).unwrap();
        assert!(plan.revoked_tokens().is_empty());
    }
}

#[test]
fn a_tenant_with_tokens_leases_or_requests_is_in_use() {
    let current = registry(&list(&[("red", TenantChange::default())]));
    let two = tokens(&[
        ("ci", Role::Client, "red", None),
        ("other", Role::Client, "blue", None),
        ("night", Role::Client, "red", None),
        ("over", Role::Client, "red", Some(1)),
    ]);
    let over = tokens(&[("over", Role::Client, "red", Some(1))]);
    let none = Tokens::default();
    let cases: [(&Tokens, [usize; 3], Texts, Texts); 5] = [
        (&none, [0, 0, 0], &[], &[]),
        (
            &two,
            [1, 0, 0],
            &["valid tokens ci, night", "1 lease"],
            &["ci", "night", "over"],
        ),
        (
            &none,
            [2, 1, 3],
            &["2 leases, 1 suspended lease, 3 requests"],
            &[],
        ),
        // What an expired token has opened goes on, until the token is revoked.
        (&over, [1, 0, 0], &["1 lease"], &["over"]),
        (&over, [0, 0, 0], &[], &[]),
    ];
    for (tokens, counts, in_use, revoked) in cases {
        let usage = usage("red", &[], 0, counts);
        let mut proposal = proposal(&current, list(&[]), Mode::DryRun);
        proposal.tokens = tokens.clone().into();
        let planned = &proposal.plan(&usage).unwrap().changes["red"];
        assert_eq!(planned.in_use, in_use);
        assert_eq!(planned.revoked_tokens, revoked);
        assert!(planned.kept_tokens.is_empty());
        proposal.mode = apply(&current, false);
        match proposal.plan(&usage) {
            Ok(_) => assert!(in_use.is_empty()),
            Err(refused) => assert_eq!(
                refused.to_string(),
                format!(
                    "tenant \"red\" is in use: {}; end the leases and revoke the tokens first, or apply the tenants with --force",
                    in_use.join(", ")
                )
            ),
        }
        proposal.mode = apply(&current, true);
        assert_eq!(proposal.plan(&usage).unwrap().revoked_tokens(), revoked);
    }
}

#[test]
fn tokens_of_workers_and_administrators_keep_their_tenant() {
    let current = registry(&list(&[("default", TenantChange::default())]));
    let mut proposal = proposal(&current, list(&[]), apply(&current, true));
    proposal.tokens = tokens(&[
        ("admin", Role::Admin, "default", None),
        ("ci", Role::Client, "default", None),
        ("over", Role::Worker, "default", Some(1)),
        ("worker", Role::Worker, "default", None),
    ])
    .into();
    let usage = Usage::default();
    assert_eq!(
        proposal.plan(&usage).unwrap_err().to_string(),
        "tenant \"default\" has tokens that are valid: admin, worker; revoke them first with `tensord token revoke`"
    );
    proposal.mode = Mode::DryRun;
    let planned = &proposal.plan(&usage).unwrap().changes["default"];
    assert_eq!(planned.kept_tokens, ["admin", "worker"]);
    assert_eq!(planned.in_use, ["valid token ci"]);
    assert_eq!(planned.revoked_tokens, ["ci"]);
}

#[test]
fn a_list_that_breaks_a_rule_is_refused_with_the_tenant() {
    let current = registry(&list(&[("red", TenantChange::default())]));
    let weight = TenantChange {
        weight: Some(0),
        ..TenantChange::default()
    };
    let above = guaranteed(&[("cuda", 5)], limit(&[("cuda", 4)], None));
    let many = (0..1001).map(|n| (format!("t{n}"), TenantChange::default()));
    let cases = [
        (
            list(&[("red", weight)]),
            "tenant \"red\": the weight is 0; it must be from 1 to 1000000",
        ),
        (
            list(&[("blue", above)]),
            "tenant \"blue\": a guarantee of 5 devices of kind cuda is above the limit of 4; lower the guarantee or raise the limit, both in one change",
        ),
        (
            list(&[("r d", TenantChange::default())]),
            "the tenant's name is \"r d\"; it must have 1 to 64 letters, digits and - _ .",
        ),
        (
            many.collect(),
            "the list has 1001 tenants, and 1000 is the most",
        ),
    ];
    for (declared, expected) in cases {
        for mode in [Mode::DryRun, apply(&current, true)] {
            let refused = proposal(&current, declared.clone(), mode).plan(&Usage::default());
            assert_eq!(refused.unwrap_err().to_string(), expected);
        }
    }
}

#[test]
fn a_plan_for_other_tenants_is_refused() {
    let current = registry(&list(&[("red", TenantChange::default())]));
    let later = registry(&list(&[("red", limit(&[("cuda", 4)], None))]));
    for revision in [Vec::new(), current.revision().to_vec()] {
        let mode = Mode::Apply {
            revision,
            force: true,
        };
        let refused = proposal(&later, list(&[]), mode).plan(&Usage::default());
        assert_eq!(refused.unwrap_err(), TenantError::Outdated);
    }
}

/// Counts of devices, of which a guarantee is never above the limit.
fn change() -> impl Strategy<Value = TenantChange> {
    let counts = |range: std::ops::Range<u32>| btree_map("[ab]", range, 0..3);
    let limit = (counts(5..9), option::of(1..9_u64));
    let limit = limit.prop_map(|(devices, memory_bytes)| TenantLimit {
        devices,
        memory_bytes,
    });
    let terms = (
        option::of(1..4_u32),
        option::of(counts(0..5)),
        option::of(limit),
    );
    terms.prop_map(|(weight, guaranteed, limit)| TenantChange {
        weight,
        guaranteed,
        limit,
    })
}

proptest! {
    /// The tenants become exactly those of the list, whatever there was, and then nothing is left to change.
    #[test]
    fn a_list_defines_the_tenants(
        earlier in btree_map("[a-e]", change(), 0..5),
        declared in btree_map("[a-e]", change(), 0..5),
    ) {
        let current = registry(&earlier);
        let first = proposal(&current, declared.clone(), apply(&current, false));
        let plan = first.plan(&Usage::default()).unwrap();
        let fresh = registry(&declared);
        prop_assert_eq!(plan.after.policy(), fresh.policy());
        for (name, tenant) in plan.after.iter() {
            let created = current.get(name).map_or(NOW, |earlier| earlier.created);
            prop_assert_eq!(tenant.created, created);
        }
        // What is written leads from the earlier records to these.
        let mut records: BTreeMap<_, _> = current.iter().collect();
        let written = plan.records();
        for (name, tenant) in &written {
            match tenant {
                Some(tenant) => drop(records.insert(name, tenant)),
                None => drop(records.remove(name.as_str())),
            }
        }
        prop_assert_eq!(records, plan.after.iter().collect());
        let second = proposal(&plan.after, declared, apply(&plan.after, false));
        prop_assert!(second.plan(&Usage::default()).unwrap().changes.is_empty());
        let is_same = plan.changes.is_empty();
        prop_assert_eq!(plan.after.revision() == current.revision(), is_same);
    }
}
