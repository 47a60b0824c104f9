//! Leases: an old token opens nothing, no client can take over another's id, and a
//! scheduler that was suspended ends nothing.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use burn::tensor::Tensor;
use prost::Message;
use tensord_client::LeaseRequest;
use tensord_proto::v1::{ClientHello, Error, ErrorCode, LeaseClaims, pool_message};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession, Target},
};

/// Timeout for any single step, long enough for a slow machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the worker's error for a token that it does not admit.
async fn rejected(target: &Target) -> Error {
    let broken = RawSession::open(target).await.unwrap_err();
    let error = broken.error().cloned();
    error.unwrap_or_else(|| panic!("{broken}"))
}

/// Checks that the session still computes.
async fn works(session: &mut RawSession) {
    let tensor = session.upload(&[1.0, 2.0]);
    let read = session.fetch(&tensor).await.unwrap();
    assert_eq!(raw::floats(&read.unwrap()), [1.0, 2.0]);
}

fn assert_lease_error(error: &Error) {
    assert_eq!(error.code(), ErrorCode::Lease, "{error}");
}

#[test]
fn token_of_an_ended_lease_opens_nothing_after_restart() {
    let mut cluster = Cluster::start(&["flex"]);
    let old = raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        attached.lease(1).await.unwrap().remove(0)
    });
    // No client claims the lease at the new scheduler, which grants its device again.
    cluster.restart_scheduler_with(&[]);
    cluster.wait_for_workers(1);
    // The old lease expires after 30 s, which is as long as a raw client waits for an answer.
    let pool = cluster.pool();
    cluster.wait("the device to be free", || {
        pool.status().unwrap().workers[0].devices[0].is_free()
    });
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        assert_eq!(target.worker_id, old.worker_id);
        // Before the worker has learned of the new lease, and after.
        assert_lease_error(&rejected(&old).await);
        let mut session = RawSession::open(&target).await.unwrap();
        works(&mut session).await;
        assert_lease_error(&rejected(&old).await);
        works(&mut session).await;
    });
}

#[test]
fn token_of_an_ended_lease_stays_invalid() {
    const LEASES: usize = 400;
    let cluster = Cluster::start(&["flex"]);
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let old = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&old).await.unwrap();
        works(&mut session).await;
        attached.release(old.lease_id).await.unwrap();
        session.end().await;
        for _ in 0..LEASES {
            let target = attached.lease(1).await.unwrap().remove(0);
            attached.release(target.lease_id).await.unwrap();
        }
        let target = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&target).await.unwrap();
        assert_lease_error(&rejected(&old).await);
        works(&mut session).await;
    });
}

/// Returns when the token of `target` expires, in Unix milliseconds by the scheduler's
/// clock.
fn end_ms(target: &Target) -> u64 {
    const SIGNATURE_BYTES: usize = 64;
    let claims = &target.token[..target.token.len() - SIGNATURE_BYTES];
    LeaseClaims::decode(claims).unwrap().expires_at_ms
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap().as_millis().try_into().unwrap()
}

#[test]
fn expired_lease_token_opens_nothing_and_ends_nothing() {
    let mut cluster = Cluster::start(&[]);
    cluster.restart_scheduler_with(&["--lease-token-seconds", "2"]);
    cluster.add_worker("flex");
    cluster.wait_for_workers(1);
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let open = target.open();
        let opened = RawSession::open_with(&target, open.clone()).await;
        let mut session = opened.unwrap();
        works(&mut session).await;
        let until = Instant::now() + STEP_TIMEOUT;
        let refused = loop {
            assert!(Instant::now() < until, "the token never ends");
            session
                .stay_connected(Duration::from_millis(200))
                .await
                .unwrap();
            match RawSession::open(&target).await {
                // Closed at once, because the number of a lease's sessions is bounded.
                Ok(another) => drop(another),
                Err(broken) => break broken.error().cloned().expect("an answer"),
            }
        };
        assert_lease_error(&refused);
        assert!(
            refused.message.contains("opens no new session"),
            "{refused}"
        );
        session.resume(&target, open.clone()).await.unwrap();
        works(&mut session).await;
        // Renewed tokens arrived in time; one that has not expired is valid.
        let mut later = target.clone();
        while end_ms(&later) < now_ms() + 1_000 {
            match attached.next().await.unwrap() {
                Some(pool_message::Body::Renewed(renewed)) => {
                    assert_eq!(renewed.lease_id, target.lease_id);
                    later.token = renewed.token;
                }
                other => panic!("{other:?} is no token"),
            }
        }
        let opened = RawSession::open(&later).await;
        works(&mut opened.unwrap()).await;
        // Losing the scheduler does not stop the open session either.
        let scheduler = cluster.scheduler.as_mut().unwrap();
        scheduler.kill();
        session.resume(&target, open).await.unwrap();
        works(&mut session).await;
    });
}

#[test]
fn suspended_scheduler_ends_no_leases() {
    /// Longer than a worker's stream may be silent (2.5 s), and than a lease outlives a lost
    /// worker (5 s).
    const STOPPED: Duration = Duration::from_secs(12);
    /// Longer than either, and than a worker's longest pause before it registers again.
    const AFTER: Duration = Duration::from_secs(12);
    let cluster = Cluster::start(&["flex", "flex"]);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(2)).unwrap();
    let device = lease.devices()[0].clone();
    let scheduler = cluster.scheduler.as_ref().unwrap();
    let mut weight = Tensor::<1>::zeros([4], &device);
    let mut steps = 0_u16;
    let mut train = |lasting: Duration| {
        let until = Instant::now() + lasting;
        while Instant::now() < until {
            weight = weight.clone() + 1.0;
            steps += 1;
            let sum = weight.clone().sum().into_scalar::<f32>();
            assert_eq!(sum, 4.0 * f32::from(steps));
            thread::sleep(Duration::from_millis(10));
        }
    };
    scheduler.signal("STOP");
    train(STOPPED);
    scheduler.signal("CONT");
    train(AFTER);
    assert_eq!(lease.ended(), None, "{}", scheduler.log());
    assert!(scheduler.log().contains("the scheduler did not run for"));
    cluster.wait("the pool to be as it was", || {
        pool.status()
            .is_ok_and(|status| (status.workers.len(), status.leases) == (2, 1))
    });
    drop((weight, device, lease));
    let again = LeaseRequest::devices(2).timeout(STEP_TIMEOUT);
    pool.lease(again).expect("the lease is given back");
}

#[test]
fn client_id_is_bound_to_its_credential() {
    let cluster = Cluster::start(&["flex"]);
    raw::block(async {
        let hello = raw::hello();
        let attached = ClientStream::with(cluster.client_url(), hello.clone()).await;
        let mut attached = attached.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&target).await.unwrap();
        works(&mut session).await;
        let stranger = raw::hello();
        for credential in [stranger.credential, Default::default()] {
            for lease_tokens in [vec![], vec![target.token.clone()]] {
                let hello = ClientHello {
                    credential: credential.clone(),
                    lease_tokens,
                    ..hello.clone()
                };
                let refused = ClientStream::with(cluster.client_url(), hello).await;
                let refused = refused.err().expect("it is another's id");
                assert!(refused.message().contains("credential"), "{refused}");
            }
        }
        works(&mut session).await;
        // The victim still has its stream and its lease.
        let more = attached.lease(2).await.unwrap_err();
        assert_eq!(more.code(), ErrorCode::Unsatisfiable);
        attached.release(target.lease_id).await.unwrap();
        assert_lease_error(session.end().await.error().expect("a reason"));
        attached.lease(1).await.unwrap();
    });
    let log = cluster.scheduler.as_ref().unwrap().log();
    assert!(log.contains("client refused"), "{log}");
}
