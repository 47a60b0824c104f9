use tensord_proto::v1::{DeviceCounts, KindCount, TenantLimit};

use super::*;

fn kinds(kinds: &[(&str, u32)]) -> Vec<KindCount> {
    let kinds = kinds.iter().map(|(kind, count)| KindCount {
        kind: (*kind).into(),
        count: *count,
        permille: 0,
    });
    kinds.collect()
}

fn tenant(
    name: &str,
    weight: u32,
    guaranteed: &[(&str, u32)],
    limit: &[(&str, u32)],
) -> TenantInfo {
    TenantInfo {
        name: name.into(),
        weight,
        guaranteed: Some(DeviceCounts {
            kinds: kinds(guaranteed),
        }),
        limit: Some(TenantLimit {
            kinds: kinds(limit),
            memory_bytes: None,
        }),
        ..TenantInfo::default()
    }
}

fn change(before: Option<TenantInfo>, after: Option<TenantInfo>) -> PlannedTenant {
    PlannedTenant {
        before,
        after,
        ..PlannedTenant::default()
    }
}

/// A tenant that is removed although it is in use, one that is changed and two that are added.
fn plan() -> TenantPlan {
    let old = PlannedTenant {
        in_use: vec!["valid tokens ci, night".into(), "1 lease".into()],
        ..change(Some(tenant("old", 2, &[], &[("cuda", 8)])), None)
    };
    let mut limited = tenant("research", 1, &[("cuda", 6)], &[("cuda", 8)]);
    limited.limit.as_mut().unwrap().memory_bytes = Some(512 << 30);
    let research = tenant("research", 1, &[("cuda", 4)], &[]);
    TenantPlan {
        revision: vec![7; 32].into(),
        changes: vec![
            change(None, Some(tenant("guests", 1, &[], &[]))),
            old,
            change(Some(research), Some(limited)),
            change(None, Some(tenant("students", 2, &[], &[("cuda", 2)]))),
        ],
        warnings: vec!["tenants are guaranteed 6 cuda in all, and the pool has 4 now".into()],
        ..TenantPlan::default()
    }
}

const CHANGES: &str = "\
+ tenant guests
- tenant old       weight 2; limit 8 cuda
    in use: valid tokens ci, night
    in use: 1 lease
~ tenant research  guarantee 4 cuda -> 6 cuda; limit none -> 8 cuda, 512 GiB
+ tenant students  weight 2; limit 2 cuda
warning: tenants are guaranteed 6 cuda in all, and the pool has 4 now
";

#[test]
fn a_plan_is_shown_in_lines() {
    let plan = plan();
    let forced = TenantPlan {
        revoked_tokens: vec!["ci".into(), "night".into()],
        disconnected_clients: 1,
        ..plan.clone()
    };
    let mut kept = plan.clone();
    kept.changes[1].kept_tokens = vec!["ops".into()];
    let cases = [
        (&plan, Outcome::Refused, false, "4 changes, nothing applied"),
        (
            &plan,
            Outcome::DryRun,
            false,
            "4 changes, nothing applied (--dry-run); they need --force",
        ),
        (
            &plan,
            Outcome::DryRun,
            true,
            "4 changes, nothing applied (--dry-run)",
        ),
        (
            &forced,
            Outcome::Applied,
            true,
            "4 changes applied; 2 tokens revoked, 1 client disconnected",
        ),
    ];
    for (plan, outcome, force, last) in cases {
        let expected = format!("{CHANGES}{last}\n");
        assert_eq!(text_of(plan, outcome, force), expected);
    }
    let text = text_of(&kept, Outcome::DryRun, true);
    let line = "    in use: 1 lease\n    has admin or worker tokens: ops\n";
    assert!(text.contains(line), "{text}");
    let last = "4 changes, nothing applied (--dry-run); they would be refused\n";
    assert!(text.ends_with(last), "{text}");
    let added = TenantPlan {
        changes: vec![change(None, Some(tenant("red", 1, &[], &[])))],
        ..TenantPlan::default()
    };
    let text = text_of(&added, Outcome::Applied, false);
    assert_eq!(text, "+ tenant red\n1 change applied\n");
    for outcome in [Outcome::Applied, Outcome::DryRun] {
        let text = text_of(&TenantPlan::default(), outcome, false);
        assert_eq!(text, "nothing to change\n");
    }
}

#[test]
fn a_plan_that_concerns_what_is_in_use_is_refused() {
    let plan = plan();
    assert!(is_refused(&plan, false) && !is_refused(&plan, true));
    assert_eq!(
        refusal(&plan).to_string(),
        "nothing was applied: 1 tenant is in use; correct the file, or repeat the command with --force, which revokes the tokens of programs of removed tenants, ends the leases opened with them, and lets leases beyond a lowered limit go on"
    );
    let mut kept = plan;
    kept.changes[1].kept_tokens = vec!["ops".into(), "w".into()];
    assert!(is_refused(&kept, true));
    assert_eq!(
        refusal(&kept).to_string(),
        "nothing was applied: the file does not have tenant \"old\", which has admin or worker tokens (ops, w); add `[tenants.old]` to the file, or revoke the tokens first with `tensord token revoke`, as --force does not revoke them"
    );
    assert!(!is_refused(&TenantPlan::default(), false));
}

#[test]
fn a_plan_is_printed_as_json() {
    let plan = plan();
    let json = serde_json::to_value(json_of(&plan, Outcome::DryRun)).unwrap();
    assert_eq!(json["applied"], false);
    let changes = json["changes"].as_array().unwrap();
    let kinds = changes.iter().map(|change| &change["change"]);
    let kinds: Vec<_> = kinds.collect();
    assert_eq!(kinds, ["add", "remove", "change", "add"]);
    let old = &changes[1];
    assert_eq!(
        (&old["tenant"], old["after"].is_null()),
        (&"old".into(), true)
    );
    assert_eq!(old["in_use"][1], "1 lease");
    let expected = serde_json::json!({
        "weight": 1,
        "guaranteed": { "cuda": 6 },
        "limit": { "cuda": 8 },
        "limit_memory_bytes": 512_u64 << 30,
    });
    assert_eq!(changes[2]["after"], expected);
}
