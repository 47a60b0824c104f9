//! Tenants: administration while the pool runs, limits, and what programs see.

use tensord_proto::v1::{
    ChangeTenantRequest, DeviceCounts, KindCount, ListTenantsRequest, RemoveTenantRequest,
    RevokeTokenRequest, TenantInfo, TenantLimit, admin_client::AdminClient,
};

use super::*;

pub(super) fn kinds(kind: &str, count: u32) -> Vec<KindCount> {
    let kind = kind.into();
    vec![KindCount {
        kind,
        count,
        permille: 0,
    }]
}

pub(super) fn change(name: &str) -> ChangeTenantRequest {
    ChangeTenantRequest {
        name: name.into(),
        ..ChangeTenantRequest::default()
    }
}

pub(super) fn limited(name: &str, count: u32) -> ChangeTenantRequest {
    ChangeTenantRequest {
        limit: Some(TenantLimit {
            kinds: kinds("flex", count),
            memory_bytes: None,
        }),
        ..change(name)
    }
}

impl Rig {
    pub(super) async fn set_tenant(
        &self,
        request: ChangeTenantRequest,
    ) -> Result<TenantInfo, Status> {
        let request = with_token(request, &self.admin_token);
        let set = self.admin().await.set_tenant(request).await;
        set.map(tonic::Response::into_inner)
    }

    pub(super) async fn tenant(&self, name: &str) -> Result<TenantInfo, Status> {
        let request = ListTenantsRequest { name: name.into() };
        let request = with_token(request, &self.admin_token);
        let listed = self.admin().await.list_tenants(request).await?;
        Ok(listed.into_inner().tenants.remove(0))
    }

    pub(super) async fn remove_tenant(&self, name: &str) -> Result<(), Status> {
        let request = RemoveTenantRequest { name: name.into() };
        let request = with_token(request, &self.admin_token);
        let removed = self.admin().await.remove_tenant(request).await;
        removed.map(drop)
    }
}

#[tokio::test]
async fn tenants_are_changed_by_administrators_only() {
    let rig = Rig::start().await;
    for token in [&rig.client_token, &rig.worker_token] {
        let mut admin = rig.admin().await;
        error_of(admin.add_tenant(with_token(change("red"), token)).await);
        error_of(admin.set_tenant(with_token(change("default"), token)).await);
        let list = ListTenantsRequest::default();
        error_of(admin.list_tenants(with_token(list, token)).await);
        let remove = RemoveTenantRequest {
            name: "default".into(),
        };
        error_of(admin.remove_tenant(with_token(remove, token)).await);
    }
    let tenant = rig.tenant("default").await.unwrap();
    assert_eq!(tenant.weight, 1);
    assert_eq!(tenant.tokens, ["program", "worker", "admin"]);
}

#[tokio::test]
async fn a_limit_counts_for_requests_that_wait_and_for_later_ones() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 3).await;
    rig.add_tenant("red").await;
    let token = rig.create("red", "program", "red").await;
    rig.set_tenant(limited("red", 1)).await.unwrap();
    let mut client = rig.client_with_tokens(&token, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    let lease = client.granted().await;
    client.request(2, 1).await;
    client.queued(2).await;
    let tenant = rig.tenant("red").await.unwrap();
    assert_eq!((tenant.leases, tenant.waiting), (1, 1));
    assert_eq!(tenant.used.unwrap().kinds, kinds("flex", 1));
    client.request(3, 2).await;
    let refused = client.refused(3).await;
    assert_eq!(refused.code(), ErrorCode::Unsatisfiable);
    assert_eq!(
        refused.message,
        "requested 2 devices of any kind; the limit of the tenant is 1 flex"
    );
    // The other tenant has no limit.
    let mut other = rig.client(2).await;
    other.request(1, 1).await;
    other.granted().await;
    rig.set_tenant(limited("red", 2)).await.unwrap();
    let second = client.granted().await;
    assert_ne!(second.lease_id, lease.lease_id);
}

#[tokio::test]
async fn tenants_survive_a_restart_of_the_scheduler() {
    let rig = Rig::start().await;
    rig.add_tenant("red").await;
    rig.set_tenant(ChangeTenantRequest {
        weight: Some(4),
        guaranteed: Some(DeviceCounts {
            kinds: kinds("flex", 2),
        }),
        ..limited("red", 3)
    })
    .await
    .unwrap();
    let rig = rig.restart().await;
    let _worker = rig.worker(1, 1).await;
    let tenant = rig.tenant("red").await.unwrap();
    assert_eq!(tenant.weight, 4);
    assert_eq!(tenant.limit.unwrap().kinds, kinds("flex", 3));
    assert_eq!(
        tenant.warnings,
        ["tenants are guaranteed 2 flex in all, and the pool has 1 now"]
    );
}

#[tokio::test]
async fn a_tenant_with_leases_or_requests_stays() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    rig.add_tenant("red").await;
    let token = rig.create("ci", "program", "red").await;
    let mut client = rig.client_with_tokens(&token, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    client.granted().await;
    client.request(2, 1).await;
    client.queued(2).await;
    let (_, error) = error_of(rig.remove_tenant("red").await);
    let has = "tenant \"red\" has 1 lease and 1 request; end them first";
    assert!(error.message.starts_with(has), "{error}");
}

#[tokio::test]
async fn a_tenant_is_removed_once_its_tokens_are_revoked() {
    let rig = Rig::start().await;
    let (_, error) = error_of(rig.remove_tenant("red").await);
    assert!(error.message.contains("there is no tenant"), "{error}");
    rig.add_tenant("red").await;
    let mut admin: AdminClient<_> = rig.admin().await;
    let again = admin.add_tenant(with_token(change("red"), &rig.admin_token));
    let (_, error) = error_of(again.await);
    assert!(error.message.contains("already"), "{error}");
    rig.create("ci", "program", "red").await;
    let (_, error) = error_of(rig.remove_tenant("red").await);
    assert!(error.message.contains("ci"), "{error}");
    let request = RevokeTokenRequest {
        name: "ci".into(),
        keep_leases: false,
    };
    let request = with_token(request, &rig.admin_token);
    admin.revoke_token(request).await.unwrap();
    rig.remove_tenant("red").await.unwrap();
    error_of(rig.tenant("red").await);
}
