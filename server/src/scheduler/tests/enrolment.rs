//! Which workers may join, and that rejected workers do not affect others.

use tensord_proto::v1::{
    CreateTokenRequest, EnrolledWorker, ListWorkersRequest, RemoveWorkerRequest,
    RevokeTokenRequest, admin_client::AdminClient,
};
use tonic::Code;

use super::*;

impl Rig {
    async fn workers(&self) -> Vec<EnrolledWorker> {
        let mut admin = AdminClient::new(self.channel().await);
        let list = admin.list_workers(with_token(ListWorkersRequest {}, &self.admin_token));
        with_timeout("answer", list)
            .await
            .unwrap()
            .into_inner()
            .workers
    }

    async fn remove(&self, name: &str) -> Result<bool, Status> {
        let mut admin = AdminClient::new(self.channel().await);
        let request = RemoveWorkerRequest { name: name.into() };
        let remove = admin.remove_worker(with_token(request, &self.admin_token));
        let removed = with_timeout("answer", remove).await?;
        Ok(removed.into_inner().was_joined)
    }

    /// Creates a worker token with these limits.
    async fn worker_token(&self, name: &str, uses: Option<u64>, life_ms: Option<u64>) -> Secret {
        let request = CreateTokenRequest {
            name: name.into(),
            role: "worker".into(),
            tenant: "default".into(),
            life_ms,
            uses,
            ..CreateTokenRequest::default()
        };
        let request = with_token(request, &self.admin_token);
        let mut admin = AdminClient::new(self.channel().await);
        let made = admin.create_token(request).await.unwrap();
        Secret::new(made.into_inner().token)
    }

    async fn with_register(
        &self,
        token: &Secret,
        register: Register,
    ) -> Result<TestWorker, Status> {
        self.join(token, worker_message::Body::Register(register))
            .await
    }
}

/// A token that the pool does not know.
fn unknown_token() -> Secret {
    Secret::new("0123456789abcdef0123")
}

/// The registration of a test worker, changed to take another worker's name, id or
/// certificate.
fn impostor(number: u64, change: impl FnOnce(&mut Register)) -> Register {
    let mut register = register(number, 1);
    change(&mut register);
    register
}

/// A joined worker with a lease. [`assert_unaffected`](Self::assert_unaffected) checks that
/// both are still there.
struct Bystander {
    _worker: TestWorker,
    client: TestClient,
    lease: Granted,
}

impl Bystander {
    async fn join(rig: &Rig) -> Self {
        let worker = rig.worker(1, 2).await;
        let mut client = rig.client(1).await;
        client.request(1, 1).await;
        let lease = client.granted().await;
        Self {
            _worker: worker,
            client,
            lease,
        }
    }

    async fn assert_unaffected(mut self, rig: &Rig) {
        let status = rig.status().await;
        let names: Vec<_> = status.workers.iter().map(|worker| &*worker.name).collect();
        assert_eq!((names, status.leases), (vec!["w1"], 1));
        // The other device is granted on the same worker, with the worker's own
        // certificate.
        self.client.request(2, 1).await;
        let second = self.client.granted().await;
        assert_ne!(second.lease_id, self.lease.lease_id);
        let endpoint = second.devices[0].worker.clone().unwrap();
        let own = identity_of(1).fingerprint().0.to_vec();
        assert_eq!(endpoint.certificate_sha256, own);
    }
}

#[tokio::test]
async fn worker_token_cannot_replace_a_live_worker() {
    let rig = Rig::start().await;
    let bystander = Bystander::join(&rig).await;
    let before = rig.workers().await;
    let victim = register(1, 1);
    let cases = [
        (
            impostor(2, |rogue| rogue.name = victim.name.clone()),
            "\"w1\" is enrolled with another key",
        ),
        (
            impostor(2, |rogue| rogue.worker_id = victim.worker_id),
            "the worker's id is not derived from",
        ),
        (
            impostor(2, |rogue| {
                rogue.worker_id = victim.worker_id;
                rogue.start = victim.start.clone();
            }),
            "the worker's id is not derived from",
        ),
    ];
    for (rogue, expected) in cases {
        let (code, error) = error_of(rig.register(rogue).await);
        assert_eq!(
            (code, error.code()),
            (Code::PermissionDenied, ErrorCode::Enrolment)
        );
        assert!(error.message.contains(expected), "{error}");
    }
    // The victim's complete registration over a connection that proves another key, as in a
    // replay of the victim's first message.
    for rogue in [identity_of(2), identity_of(3)] {
        let outbound_receiver = worker_message::Body::Register(victim.clone());
        let (_, error) = error_of(
            rig.join_as(rogue, &rig.worker_token, outbound_receiver)
                .await,
        );
        let expected = "the worker registered a certificate that differs from the one it presented";
        assert_eq!(
            (error.code(), &*error.message),
            (ErrorCode::Enrolment, expected)
        );
    }
    assert_eq!(
        rig.workers().await.len(),
        before.len(),
        "nobody was enrolled"
    );
    bystander.assert_unaffected(&rig).await;
}

#[tokio::test]
async fn join_without_certificate_is_refused() {
    let rig = Rig::start().await;
    let (outbound, outbound_receiver) = mpsc::channel(16);
    let body = Some(worker_message::Body::Register(register(1, 1)));
    outbound.try_send(WorkerMessage { body }).unwrap();
    let request = with_token(ReceiverStream::new(outbound_receiver), &rig.worker_token);
    let mut workers = WorkersClient::new(rig.channel().await);
    let (_, error) = error_of(with_timeout("answer", workers.join(request)).await);
    assert_eq!(error.code(), ErrorCode::Enrolment);
    assert!(
        error.message.contains("this worker presented none"),
        "{error}"
    );
}

#[tokio::test]
async fn only_enrolled_workers_join_without_a_token() {
    let rig = Rig::start().await;
    let (_, error) = error_of(rig.with_register(&unknown_token(), register(1, 1)).await);
    assert_eq!(error.code(), ErrorCode::Token);
    rig.worker(1, 2).await.close().await;
    rig.with_register(&unknown_token(), register(1, 2))
        .await
        .unwrap();
    // The same after a restart of the scheduler.
    let rig = rig.restart().await;
    let back = rig
        .with_register(&unknown_token(), register(1, 1))
        .await
        .unwrap();
    let (_, error) = error_of(rig.with_register(&unknown_token(), register(2, 1)).await);
    assert_eq!(error.code(), ErrorCode::Token);
    drop(back);
}

#[tokio::test]
async fn larger_offers_need_a_valid_token() {
    let rig = Rig::start().await;
    rig.worker(1, 2).await.close().await;
    let larger = impostor(1, |worker| worker.devices[0].memory_bytes *= 2);
    for (more, expected) in [
        (
            register(1, 3),
            "it offers 3 flex devices of 1.0 GiB at most and is enrolled with 2 flex devices of 1.0 GiB at most",
        ),
        (
            larger,
            "it offers 1 flex device of 2.0 GiB at most and is enrolled with 2 flex devices of 1.0 GiB at most",
        ),
    ] {
        let (_, error) = error_of(rig.with_register(&unknown_token(), more).await);
        assert_eq!(error.code(), ErrorCode::Enrolment);
        assert!(error.message.contains(expected), "{error}");
    }
    rig.worker(1, 3).await.close().await;
    let devices = rig.workers().await[0].devices.clone();
    assert_eq!((devices[0].count, devices[0].memory_bytes), (3, 1 << 30));
    rig.with_register(&unknown_token(), register(1, 3))
        .await
        .unwrap();
}

#[tokio::test]
async fn token_limits_enrolments_by_count_and_time() {
    let rig = Rig::start().await;
    let two = rig.worker_token("two", Some(2), None).await;
    let _first = rig.with_register(&two, register(1, 1)).await.unwrap();
    rig.with_register(&two, register(2, 1))
        .await
        .unwrap()
        .close()
        .await;
    // Neither a worker that joins again nor a refused one counts as a use.
    let taken = impostor(3, |rogue| rogue.name = "w1".into());
    error_of(rig.with_register(&two, taken).await);
    rig.with_register(&two, register(2, 1)).await.unwrap();
    let (_, error) = error_of(rig.with_register(&two, register(3, 1)).await);
    assert_eq!(error.code(), ErrorCode::Token);
    assert!(
        error.message.contains("has reached its limit of uses"),
        "{error}"
    );
    let brief = rig.worker_token("brief", None, Some(0)).await;
    let (_, error) = error_of(rig.with_register(&brief, register(3, 1)).await);
    assert!(error.message.contains("has expired"), "{error}");
    let names = rig.workers().await.into_iter().map(|worker| worker.name);
    assert_eq!(names.collect::<Vec<_>>(), ["w1", "w2"]);
}

#[tokio::test]
async fn concurrent_enrolments_respect_the_use_limit() {
    let rig = Rig::start().await;
    let three = rig.worker_token("three", Some(3), None).await;
    let joins = (1..=8).map(|n| rig.with_register(&three, register(n, 1)));
    let joined = futures::future::join_all(joins).await;
    assert_eq!(joined.iter().filter(|joined| joined.is_ok()).count(), 3);
    assert_eq!(rig.workers().await.len(), 3);
}

#[tokio::test]
async fn removed_worker_loses_leases_and_can_enrol_again() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    assert!(rig.workers().await[0].joined);
    assert!(rig.remove("w1").await.unwrap());
    assert_eq!(
        client.ended(lease.lease_id).await.code(),
        ErrorCode::WorkerLost
    );
    let removed = loop {
        match worker.recv().await {
            Ok(_) => {}
            Err(status) => break grpc_status::error(&status).unwrap(),
        }
    };
    assert_eq!(removed.code(), ErrorCode::Enrolment);
    assert!(removed.message.contains("\"w1\" was removed"), "{removed}");
    assert_eq!(rig.workers().await, []);
    let (_, error) = error_of(rig.with_register(&unknown_token(), register(1, 1)).await);
    assert_eq!(error.code(), ErrorCode::Token);
    // The name is free for another key, too.
    let other = impostor(2, |other| other.name = "w1".into());
    rig.register(other).await.unwrap();
    let (_, error) = error_of(rig.remove("w7").await);
    assert!(
        error.message.contains("there is no worker \"w7\""),
        "{error}"
    );
}

#[tokio::test]
async fn revoking_a_token_removes_its_workers() {
    let rig = Rig::start().await;
    let token = rig.worker_token("rack", None, None).await;
    let mut joined = rig.with_register(&token, register(1, 1)).await.unwrap();
    rig.with_register(&token, register(2, 1))
        .await
        .unwrap()
        .close()
        .await;
    let _kept = rig.worker(3, 1).await;
    let request = RevokeTokenRequest {
        name: "rack".into(),
        keep_leases: false,
    };
    let mut admin = AdminClient::new(rig.channel().await);
    let revoked = admin
        .revoke_token(with_token(request, &rig.admin_token))
        .await;
    assert_eq!(revoked.unwrap().into_inner().workers, 1);
    while joined.recv().await.is_ok() {}
    let names = rig.workers().await.into_iter().map(|worker| worker.name);
    assert_eq!(names.collect::<Vec<_>>(), ["w3"]);
    let (_, error) = error_of(rig.with_register(&unknown_token(), register(2, 1)).await);
    assert_eq!(error.code(), ErrorCode::Token);
}

#[tokio::test]
async fn restart_removes_workers_that_an_interrupted_revocation_has_left() {
    let rig = Rig::start().await;
    for (name, number) in [("rack", 1), ("room", 2)] {
        let token = rig.worker_token(name, None, None).await;
        let joined = rig.with_register(&token, register(number, 1)).await;
        joined.unwrap().close().await;
    }
    // The revocation is written to tokens.json first.
    let path = rig.directory.path().join("workers.json");
    let before = std::fs::read(&path).unwrap();
    let mut admin = AdminClient::new(rig.channel().await);
    for (name, keep_leases) in [("rack", false), ("room", true)] {
        let name = name.into();
        let request = RevokeTokenRequest { name, keep_leases };
        let request = with_token(request, &rig.admin_token);
        admin.revoke_token(request).await.unwrap();
    }
    assert_ne!(std::fs::read(&path).unwrap(), before);
    std::fs::write(&path, before).unwrap();
    let rig = rig.restart().await;
    let names = rig.workers().await.into_iter().map(|worker| worker.name);
    assert_eq!(names.collect::<Vec<_>>(), ["w2"]);
    let (_, error) = error_of(rig.with_register(&unknown_token(), register(1, 1)).await);
    assert_eq!(error.code(), ErrorCode::Token);
}

#[tokio::test]
async fn second_process_with_a_live_workers_key_is_refused() {
    let rig = Rig::start().await;
    let bystander = Bystander::join(&rig).await;
    let again = impostor(1, |again| {
        again.start = vec![9; identity::START_BYTES].into();
        let own = identity_of(1).fingerprint();
        again.worker_id = identity::worker_id(&own, &[9; identity::START_BYTES]).0;
    });
    let (_, error) = error_of(rig.register(again).await);
    assert_eq!(error.code(), ErrorCode::Enrolment);
    assert!(error.message.contains("already in the pool"), "{error}");
    bystander.assert_unaffected(&rig).await;
}
