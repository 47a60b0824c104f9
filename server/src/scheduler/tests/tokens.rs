//! Tokens that are created, rotated and revoked while the pool runs.

use tensord_proto::{
    ids::LeaseId,
    v1::{
        ChangeTenantRequest, CreateTokenRequest, ListTenantsRequest, ListTokensRequest, MadeToken,
        OutOfService, RevokeTokenRequest, Revoked, RotateTokenRequest, admin_client::AdminClient,
    },
};
use tensord_scheduler::{Claim, Durability};
use tokio::sync::oneshot;
use tonic::codec::{DecodeBuf, Decoder};

use super::*;
use crate::scheduler::{access::AuthContext, convert::ClaimedLeases, stream::AcceptedStream};

impl Rig {
    pub(super) async fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.channel().await)
    }

    pub(super) async fn create(&self, name: &str, role: &str, tenant: &str) -> Secret {
        let request = CreateTokenRequest {
            name: name.into(),
            role: role.into(),
            tenant: tenant.into(),
            ..CreateTokenRequest::default()
        };
        let request = with_token(request, &self.admin_token);
        let made = self.admin().await.create_token(request).await.unwrap();
        Secret::new(made.into_inner().token)
    }

    pub(super) async fn add_tenant(&self, name: &str) {
        let request = ChangeTenantRequest {
            name: name.into(),
            ..ChangeTenantRequest::default()
        };
        let request = with_token(request, &self.admin_token);
        self.admin().await.add_tenant(request).await.unwrap();
    }

    async fn revoke(&self, name: &str, keep_leases: bool) -> Revoked {
        let name = name.into();
        let request = RevokeTokenRequest { name, keep_leases };
        let request = with_token(request, &self.admin_token);
        let revoked = self.admin().await.revoke_token(request).await;
        revoked.unwrap().into_inner()
    }

    async fn rotate(&self, name: &str, grace_ms: u64) -> MadeToken {
        let name = name.into();
        let request = RotateTokenRequest { name, grace_ms };
        let request = with_token(request, &self.admin_token);
        let rotated = self.admin().await.rotate_token(request).await;
        rotated.unwrap().into_inner()
    }
}

#[tokio::test]
async fn administration_takes_an_admin_token() {
    let rig = Rig::start().await;
    for token in [&rig.client_token, &rig.worker_token, &Secret::new("x")] {
        let mut admin = rig.admin().await;
        let list = admin.list_tokens(with_token(ListTokensRequest {}, token));
        let (_, error) = error_of(with_timeout("answer", list).await);
        assert_eq!(error.code(), ErrorCode::Token);
        let request = RevokeTokenRequest {
            name: "program".into(),
            keep_leases: false,
        };
        let revoke = admin.revoke_token(with_token(request, token));
        error_of(with_timeout("answer", revoke).await);
    }
    let list = with_token(ListTokensRequest {}, &rig.admin_token);
    let tokens = rig.admin().await.list_tokens(list).await.unwrap();
    let tokens = tokens.into_inner().tokens;
    let reply: Vec<_> = tokens
        .iter()
        .map(|token| (&*token.name, &*token.role, &*token.standing))
        .collect();
    let expected = [
        ("program", "program", "good"),
        ("worker", "worker", "good"),
        ("admin", "admin", "good"),
    ];
    assert_eq!(reply, expected);
}

#[tokio::test]
async fn revocation_ends_only_dependent_streams_and_leases() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 3).await;
    let token = rig.create("ci", "program", "default").await;
    let mut revoked = rig.client_with_tokens(&token, 1, vec![]).await.unwrap();
    revoked.request(1, 1).await;
    let lease = revoked.granted().await;
    let mut away = rig.client_with_tokens(&token, 2, vec![]).await.unwrap();
    away.request(1, 1).await;
    let left = away.granted().await;
    away.close().await;
    let mut other = rig.client(3).await;
    other.request(1, 1).await;
    let kept = other.granted().await;

    let reply = rig.revoke("ci", false).await;
    assert_eq!((reply.clients, reply.workers), (2, 0));
    let error = revoked.ended(lease.lease_id).await;
    assert!(error.message.contains("revoked"), "{error}");
    assert_eq!(revoked.recv_stream_error().await.code(), ErrorCode::Token);
    let mut ended = [worker.end_lease().await, worker.end_lease().await];
    let mut expected = [lease.lease_id, left.lease_id];
    ended.sort_unstable();
    expected.sort_unstable();
    assert_eq!(ended, expected);
    let back = rig.client_with_tokens(&token, 1, vec![lease.token]).await;
    assert_eq!(error_of(back).1.code(), ErrorCode::Token);
    assert_eq!(rig.status().await.leases, 1);
    other.release(&kept).await;
    assert_eq!(worker.end_lease().await, kept.lease_id);
}

#[tokio::test]
async fn kept_leases_continue_without_new_ones() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 2).await;
    let token = rig.create("ci", "program", "default").await;
    let mut client = rig.client_with_tokens(&token, 1, vec![]).await.unwrap();
    client.request(1, 2).await;
    let lease = client.granted().await;
    let mut waiting = rig.client_with_tokens(&token, 2, vec![]).await.unwrap();
    waiting.request(1, 1).await;
    assert_eq!(waiting.queued(1).await, 1);

    let reply = rig.revoke("ci", true).await;
    assert_eq!((reply.clients, reply.workers), (0, 0));
    client.request(2, 1).await;
    assert_eq!(client.refused(2).await.code(), ErrorCode::Token);
    // Its connection breaks, and it attaches again with its lease.
    client.close().await;
    let held = vec![lease.token.clone()];
    let client = rig.client_with_tokens(&token, 1, held).await.unwrap();
    let fresh = rig.client_with_tokens(&token, 9, vec![]).await;
    assert_eq!(error_of(fresh).1.code(), ErrorCode::Token);
    client.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    // A request that was pending when the token was revoked is refused.
    assert_eq!(waiting.refused(1).await.code(), ErrorCode::Token);
}

#[tokio::test]
async fn old_and_new_string_are_valid_during_rotation() {
    let rig = Rig::start().await;
    let made = rig.rotate("program", 3_600_000).await;
    assert_eq!(made.info.unwrap().standing, "rotating");
    let successor = Secret::new(made.token);
    rig.status_with(&rig.client_token).await.unwrap();
    rig.status_with(&successor).await.unwrap();
    let last = Secret::new(rig.rotate("program", 0).await.token);
    error_of(rig.status_with(&rig.client_token).await);
    error_of(rig.status_with(&successor).await);
    rig.status_with(&last).await.unwrap();
}

#[tokio::test]
async fn expired_token_opens_nothing_new() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    let request = CreateTokenRequest {
        name: "brief".into(),
        role: "program".into(),
        tenant: "default".into(),
        life_ms: Some(0),
        ..CreateTokenRequest::default()
    };
    let request = with_token(request, &rig.admin_token);
    let made = rig.admin().await.create_token(request).await.unwrap();
    let token = Secret::new(made.into_inner().token);
    let refused = rig.client_with_tokens(&token, 1, vec![]).await;
    let (_, error) = error_of(refused);
    assert!(error.message.contains("has expired"), "{error}");
    error_of(rig.status_with(&token).await);
}

#[tokio::test]
async fn an_admin_token_that_has_ended_administers_nothing() {
    let rig = Rig::start().await;
    let expired = CreateTokenRequest {
        name: "expired".into(),
        role: "admin".into(),
        tenant: "default".into(),
        life_ms: Some(0),
        ..CreateTokenRequest::default()
    };
    let expired = with_token(expired, &rig.admin_token);
    let expired = rig.admin().await.create_token(expired).await.unwrap();
    let expired = Secret::new(expired.into_inner().token);
    let kept = rig.create("kept", "admin", "default").await;
    let revoke = RevokeTokenRequest {
        name: "kept".into(),
        keep_leases: true,
    };
    let revoke = with_token(revoke, &rig.admin_token);
    rig.admin().await.revoke_token(revoke).await.unwrap();
    for token in [expired, kept] {
        let list = with_token(ListTenantsRequest::default(), &token);
        let refused = rig.admin().await.list_tenants(list).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unauthenticated, "{refused}");
    }
}

#[tokio::test]
async fn tenants_cannot_see_each_other() {
    let rig = Rig::start().await;
    let worker = rig.worker(1, 3).await;
    for tenant in ["red", "blue"] {
        rig.add_tenant(tenant).await;
    }
    let (red, blue) = (
        rig.create("red", "program", "red").await,
        rig.create("blue", "program", "blue").await,
    );
    let mut client = rig.client_with_tokens(&red, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    let lease = client.granted().await;
    client.request(2, 3).await;
    client.queued(2).await;
    let usage = DeviceUsage {
        sessions: 2,
        live_bytes: 3,
        ops_executed: 4,
        reserved_bytes: Some(5),
        busy_us: 6,
    };
    let usage = Heartbeat {
        usage: vec![usage; 3],
        ..Heartbeat::default()
    };
    worker.send(worker_message::Body::Heartbeat(usage)).await;
    let has_usage = |status: &StatusReply| status.workers[0].devices[1].sessions == 2;
    rig.wait_for_status(has_usage).await;
    let shown = async |token: &Secret| {
        let status = rig.status_with(token).await.unwrap();
        let devices = &status.workers[0].devices;
        let device = devices.iter().find(|device| device.leased).unwrap();
        let used = (device.sessions, device.live_bytes, device.ops_executed);
        // The ops that others ran on a device that is free now.
        let free = devices.iter().find(|device| !device.leased).unwrap();
        (
            status.leases,
            status.waiting_requests,
            used,
            free.ops_executed,
        )
    };
    assert_eq!(shown(&red).await, (1, 1, (2, 3, 4), 0));
    assert_eq!(shown(&blue).await, (0, 0, (0, 0, 0), 0));
    assert_eq!(shown(&rig.admin_token).await, (1, 1, (2, 3, 4), 4));
    // The same client id and lease token prove nothing under another tenant.
    let mut thief = rig
        .client_with_tokens(&blue, 9, vec![lease.token.clone()])
        .await
        .unwrap();
    assert_eq!(thief.ended(lease.lease_id).await.code(), ErrorCode::Lease);
    assert_eq!(shown(&red).await.0, 1);
}

#[tokio::test]
async fn reasons_of_outages_are_hidden_from_programs_if_there_are_several_tenants() {
    let rig = Rig::start().await;
    let worker = rig.worker(1, 2).await;
    let reason = "an op of tenant red, secret_kernel, takes too long";
    let outage = OutOfService {
        device_index: 1,
        reason: reason.into(),
    };
    let beat = Heartbeat {
        out_of_service: vec![outage],
        ..Heartbeat::default()
    };
    worker.send(worker_message::Body::Heartbeat(beat)).await;
    let shown = |status: StatusReply| {
        let devices = status.workers[0].devices.iter();
        devices.map(|it| it.out_of_service.clone()).collect()
    };
    let is_out = |status: &StatusReply| !status.workers[0].devices[1].out_of_service.is_empty();
    let of_only_tenant: Vec<_> = shown(rig.wait_for_status(is_out).await);
    assert_eq!(of_only_tenant, ["", reason]);
    rig.add_tenant("red").await;
    let red = rig.create("red", "program", "red").await;
    for (token, expected) in [
        (&red, "out of service"),
        (&rig.client_token, "out of service"),
        (&rig.admin_token, reason),
    ] {
        let of_token: Vec<_> = shown(rig.status_with(token).await.unwrap());
        assert_eq!(of_token, ["", expected]);
    }
}

/// A decoder for streams without messages.
struct NoMessages;

impl Decoder for NoMessages {
    type Item = ClientMessage;
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<ClientMessage>, Status> {
        Ok(None)
    }
}

/// Has the driver attach test client 1, whose call was admitted with `token` while that was valid. Returns the driver's
/// decision.
async fn attach_in_driver(rig: &Rig, token: &Secret, claims: Vec<Claim>) -> Result<(), Error> {
    let credential = credential(1).hash();
    let (outgoing, _messages) = mpsc::channel(16);
    let (reply_sender, decision) = oneshot::channel();
    let attach = Input::Attach {
        client: credential.client_id(),
        credential,
        auth: AuthContext::of_program(token.reveal()),
        held: ClaimedLeases {
            claims,
            invalid: vec![],
        },
        opened: AcceptedStream {
            incoming: Streaming::new_empty(NoMessages, tonic::body::Body::empty()),
            outgoing,
            peer: rig.scheduler.address(),
        },
        reply_sender,
    };
    assert!(rig.scheduler.driver.send(attach.into()).await.is_ok());
    with_timeout("decision", decision).await.unwrap()
}

#[tokio::test]
async fn a_token_that_ends_while_its_call_waits_for_the_hello_admits_no_client() {
    let rig = Rig::start().await;
    let claim = || Claim {
        lease: LeaseId(7),
        lease_devices: vec![],
        durability: Durability::Off,
        epoch: 0,
        time_left: None,
        is_spot: false,
        may_end: false,
    };
    for (name, keep_leases, may_return) in [("kept", true, true), ("ended", false, false)] {
        let token = rig.create(name, "program", "default").await;
        attach_in_driver(&rig, &token, vec![]).await.unwrap();
        rig.revoke(name, keep_leases).await;
        let refused = attach_in_driver(&rig, &token, vec![]).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Token);
        assert!(refused.message.contains("was revoked"), "{refused}");
        let returned = attach_in_driver(&rig, &token, vec![claim()]).await;
        assert_eq!(returned.is_ok(), may_return, "{returned:?}");
    }
}

#[tokio::test]
async fn a_revoked_workers_token_ends_its_workers_and_their_leases() {
    let rig = Rig::start().await;
    let token = rig.create("host", "worker", "default").await;
    let register = register(1, 1);
    let first_message = worker_message::Body::Register(register);
    let mut worker = rig.join(&token, first_message.clone()).await.unwrap();
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    let reply = rig.revoke("host", false).await;
    assert_eq!((reply.clients, reply.workers), (0, 1));
    let ended = client.ended(lease.lease_id).await;
    assert_eq!(ended.code(), ErrorCode::WorkerLost);
    while worker.recv().await.is_ok() {}
    assert_eq!(
        error_of(rig.join(&token, first_message).await).1.code(),
        ErrorCode::Token
    );
}
