//! Applying a list of all tenants while the pool runs.

use serde_json::Value;
use tensord_proto::v1::{
    ApplyTenantsRequest, ChangeTenantRequest, ListTenantsRequest, TenantInfo, TenantPlan,
};

use super::{tenants::*, *};
use crate::audit::{Audit, Settings};

/// A list of these tenants for a dry run.
fn dry_run(tenants: &[ChangeTenantRequest]) -> ApplyTenantsRequest {
    ApplyTenantsRequest {
        tenants: tenants.to_vec(),
        dry_run: true,
        ..ApplyTenantsRequest::default()
    }
}

impl Rig {
    async fn apply(&self, request: ApplyTenantsRequest) -> Result<TenantPlan, Status> {
        let request = with_token(request, &self.admin_token);
        let applied = self.admin().await.apply_tenants(request).await;
        applied.map(tonic::Response::into_inner)
    }

    /// Plans the change to these tenants, and has it made.
    async fn planned_and_applied(
        &self,
        tenants: &[ChangeTenantRequest],
        force: bool,
    ) -> Result<TenantPlan, Status> {
        let plan = self.apply(dry_run(tenants)).await?;
        let apply = ApplyTenantsRequest {
            revision: plan.revision,
            dry_run: false,
            force,
            ..dry_run(tenants)
        };
        self.apply(apply).await
    }

    async fn all_tenants(&self) -> Vec<TenantInfo> {
        let request = with_token(ListTenantsRequest::default(), &self.admin_token);
        let listed = self.admin().await.list_tenants(request).await;
        listed.unwrap().into_inner().tenants
    }

    async fn tenant_names(&self) -> Vec<String> {
        let tenants = self.all_tenants().await;
        tenants.into_iter().map(|tenant| tenant.name).collect()
    }
}

/// The names in a plan.
fn names(plan: &TenantPlan) -> Vec<&str> {
    let tenants = plan
        .changes
        .iter()
        .map(|it| it.before.as_ref().or(it.after.as_ref()).unwrap());
    tenants.map(|tenant| &*tenant.name).collect()
}

#[tokio::test]
async fn a_list_is_applied_by_administrators_only() {
    let rig = Rig::start().await;
    for token in [&rig.client_token, &rig.worker_token] {
        let request = with_token(dry_run(&[change("default")]), token);
        let (_, error) = error_of(rig.admin().await.apply_tenants(request).await);
        assert_eq!(error.code(), ErrorCode::Token);
    }
}

#[tokio::test]
async fn a_list_defines_the_tenants_and_they_survive_a_restart() {
    let rig = Rig::start().await;
    rig.add_tenant("old").await;
    rig.set_tenant(limited("default", 5)).await.unwrap();
    let tenants = [change("default"), limited("red", 3)];
    let plan = rig.apply(dry_run(&tenants)).await.unwrap();
    assert_eq!(names(&plan), ["default", "old", "red"]);
    let default = &plan.changes[0];
    let limit_of = |tenant: &Option<TenantInfo>| tenant.clone().unwrap().limit.unwrap().kinds;
    assert_eq!(limit_of(&default.before), kinds("flex", 5));
    assert!(limit_of(&default.after).is_empty() && default.in_use.is_empty());
    assert!(plan.changes[1].after.is_none() && plan.changes[2].before.is_none());
    assert_eq!(rig.tenant_names().await, ["default", "old"]);
    let applied = rig.planned_and_applied(&tenants, false).await.unwrap();
    assert_eq!(names(&applied), names(&plan));
    assert_eq!(applied.revision, plan.revision);
    let rig = rig.restart().await;
    assert_eq!(rig.tenant_names().await, ["default", "red"]);
    let red = rig.tenant("red").await.unwrap();
    assert_eq!(red.limit.unwrap().kinds, kinds("flex", 3));
    let again = rig.planned_and_applied(&tenants, false).await.unwrap();
    assert!(again.changes.is_empty());
}

#[tokio::test]
async fn guarantees_beyond_the_pool_are_warned_of() {
    let rig = Rig::start().await;
    let guaranteed = ChangeTenantRequest {
        guaranteed: Some(tensord_proto::v1::DeviceCounts {
            kinds: kinds("flex", 2),
        }),
        ..change("red")
    };
    let plan = rig.apply(dry_run(&[change("default"), guaranteed])).await;
    assert_eq!(
        plan.unwrap().warnings,
        ["tenants are guaranteed 2 flex in all, and the pool has 0 now"]
    );
}

#[tokio::test]
async fn a_plan_is_refused_once_a_tenant_was_changed() {
    let rig = Rig::start().await;
    let tenants = [change("default"), limited("red", 3)];
    let plan = rig.apply(dry_run(&tenants)).await.unwrap();
    let apply = ApplyTenantsRequest {
        revision: plan.revision,
        dry_run: false,
        force: true,
        ..dry_run(&tenants)
    };
    rig.add_tenant("blue").await;
    for request in [
        apply.clone(),
        ApplyTenantsRequest {
            revision: vec![].into(),
            ..apply.clone()
        },
    ] {
        let (_, error) = error_of(rig.apply(request).await);
        assert!(error.message.contains("in the meantime"), "{error}");
    }
    assert_eq!(rig.tenant_names().await, ["blue", "default"]);
    // The tenants are as they were for the plan, so it is right again.
    rig.remove_tenant("blue").await.unwrap();
    rig.apply(apply.clone()).await.unwrap();
    assert_eq!(rig.tenant_names().await, ["default", "red"]);
    let (_, error) = error_of(rig.apply(apply).await);
    assert!(error.message.contains("in the meantime"), "{error}");
}

#[tokio::test]
async fn one_of_two_at_once_is_refused() {
    let rig = Rig::start().await;
    let lists = [change("red"), change("blue")].map(|other| vec![change("default"), other]);
    let plan = rig.apply(dry_run(&lists[0])).await.unwrap();
    let [one, two] = lists.map(|tenants| ApplyTenantsRequest {
        revision: plan.revision.clone(),
        dry_run: false,
        ..dry_run(&tenants)
    });
    let (one, two) = tokio::join!(rig.apply(one), rig.apply(two));
    let left = if one.is_ok() { "red" } else { "blue" };
    let refused = if one.is_ok() { two } else { one };
    let (_, error) = error_of(refused);
    assert!(error.message.contains("in the meantime"), "{error}");
    let mut names = rig.tenant_names().await;
    names.retain(|name| name != "default");
    assert_eq!(names, [left]);
}

#[tokio::test]
async fn a_list_that_breaks_a_rule_changes_nothing() {
    let rig = Rig::start().await;
    let default = || change("default");
    let weightless = ChangeTenantRequest {
        weight: Some(0),
        ..change("red")
    };
    let cases = [
        (
            vec![default(), change("blue"), weightless],
            "tenant \"red\": the weight is 0; it must be from 1 to 1000000",
        ),
        (
            vec![default(), change("blue"), change("blue")],
            "tenant \"blue\" is in the list twice",
        ),
        (
            vec![default(), change("blue"), change("a b")],
            "the tenant's name is \"a b\"; it must have 1 to 64 letters, digits and - _ .",
        ),
    ];
    let revision = rig.apply(dry_run(&[default()])).await.unwrap().revision;
    for (tenants, expected) in cases {
        let request = ApplyTenantsRequest {
            dry_run: false,
            revision: revision.clone(),
            force: true,
            ..dry_run(&tenants)
        };
        let (_, error) = error_of(rig.apply(request).await);
        assert_eq!(error.message, expected);
        assert_eq!(error.code(), ErrorCode::Protocol);
    }
    let many: Vec<_> = (0..1001).map(|n| change(&format!("t{n}"))).collect();
    let (_, error) = error_of(rig.apply(dry_run(&many)).await);
    assert_eq!(error.code(), ErrorCode::Limit);
    let large = vec![change(&"x".repeat(MAX_ADMIN_MESSAGE_BYTES))];
    rig.apply(dry_run(&large)).await.unwrap_err();
    assert_eq!(rig.tenant_names().await, ["default"]);
}

#[tokio::test]
async fn a_tenant_in_use_is_removed_by_force_with_its_tokens_and_leases() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 2).await;
    rig.add_tenant("red").await;
    let token = rig.create("ci", "program", "red").await;
    let mut client = rig.client_with_tokens(&token, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    let lease = client.granted().await;
    let mut other = rig.client(2).await;
    other.request(1, 1).await;
    other.granted().await;
    client.request(2, 1).await;
    client.queued(2).await;

    let tenants = [change("blue"), change("default")];
    let plan = rig.apply(dry_run(&tenants)).await.unwrap();
    let in_use = ["valid token ci", "1 lease, 1 request"];
    assert_eq!(plan.changes[1].in_use, in_use);
    let (_, error) = error_of(rig.planned_and_applied(&tenants, false).await);
    let words = "tenant \"red\" is in use: valid token ci, 1 lease, 1 request;";
    assert!(error.message.starts_with(words), "{error}");
    assert_eq!(rig.tenant_names().await, ["default", "red"]);

    let applied = rig.planned_and_applied(&tenants, true).await.unwrap();
    assert_eq!(applied.revoked_tokens, ["ci"]);
    assert_eq!(applied.disconnected_clients, 1);
    let error = client.ended(lease.lease_id).await;
    assert!(error.message.contains("revoked"), "{error}");
    assert_eq!(worker.end_lease().await, lease.lease_id);
    error_of(rig.client_with_tokens(&token, 1, vec![]).await);
    assert_eq!(rig.tenant_names().await, ["blue", "default"]);
    assert_eq!(rig.status().await.leases, 1);
    let rig = rig.restart().await;
    assert_eq!(rig.tenant_names().await, ["blue", "default"]);
}

#[tokio::test]
async fn a_limit_below_what_a_tenant_has_takes_force_and_ends_nothing() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 3).await;
    let mut client = rig.client(1).await;
    client.request(1, 2).await;
    let lease = client.granted().await;
    let tenants = [limited("default", 1)];
    let (_, error) = error_of(rig.planned_and_applied(&tenants, false).await);
    let words = "tenant \"default\" is in use: 2 flex, above the new limit of 1;";
    assert!(error.message.starts_with(words), "{error}");
    // Nothing is left of the refused change.
    client.request(2, 1).await;
    let second = client.granted().await;
    client.release(&second).await;
    assert_eq!(worker.end_lease().await, second.lease_id);
    let applied = rig.planned_and_applied(&tenants, true).await.unwrap();
    assert!(applied.revoked_tokens.is_empty());
    client.request(3, 1).await;
    client.queued(3).await;
    assert_eq!(rig.status().await.leases, 1);
    client.release(&lease).await;
    client.granted().await;
}

#[tokio::test]
async fn no_force_removes_the_tenant_of_admin_or_worker_tokens() {
    let rig = Rig::start().await;
    rig.create("more", "admin", "default").await;
    let plan = rig.apply(dry_run(&[change("red")])).await.unwrap();
    assert_eq!(plan.changes[0].kept_tokens, ["worker", "admin", "more"]);
    let (_, error) = error_of(rig.planned_and_applied(&[change("red")], true).await);
    let words = "tenant \"default\" has tokens that are valid: worker, admin, more;";
    assert!(error.message.starts_with(words), "{error}");
    assert_eq!(rig.tenant_names().await, ["default"]);
    rig.status().await;
}

#[tokio::test]
async fn tokens_that_are_revoked_with_their_tenant_are_in_the_audit_log() {
    let log = tempfile::tempdir().unwrap();
    let audit = Audit::open(Settings {
        directory: log.path().into(),
        file_bytes: 1 << 20,
        files: 2,
    })
    .unwrap();
    let rig = Rig::with(Options {
        audit: audit.clone(),
        ..options()
    })
    .await;
    rig.add_tenant("red").await;
    rig.create("ci", "program", "red").await;
    let applied = rig.planned_and_applied(&[change("default")], true).await;
    assert_eq!(applied.unwrap().disconnected_clients, 0);
    rig.scheduler.stop().await;
    // Dropping the last handle ensures that all entries are on disk.
    drop(audit);
    let text = std::fs::read_to_string(log.path().join("audit.jsonl")).unwrap();
    let mut entries = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let entry: Value = entries
        .find(|entry: &Value| entry["event"] == "revoked")
        .unwrap();
    assert_eq!(
        (&entry["token"], &entry["tenant"]),
        (&"ci".into(), &"red".into())
    );
    assert_eq!(entry["reason"], "by admin, with its tenant");
}
