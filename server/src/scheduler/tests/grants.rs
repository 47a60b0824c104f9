//! Grant numbers and expiry times in lease tokens, and the messages that workers receive
//! about them.

use tensord_proto::{
    grant,
    v1::{Beat, DeviceGrant, LeaseGranted},
};

use super::*;

/// The grant number of the first device of a lease.
fn grant_of(lease: &Granted) -> grant::GrantNumber {
    grant::number(claims(&lease.token).shares[0].grant)
}

#[tokio::test]
async fn grant_numbers_rise_across_leases_and_restarts() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    let mut last = grant::GrantNumber::ZERO;
    for request in 1..=3 {
        client.request(request, 1).await;
        let lease = client.granted().await;
        assert!(grant_of(&lease) > last);
        last = grant_of(&lease);
        let announced = DeviceGrant {
            device_index: 0,
            grant: Some(last.into()),
            share: None,
        };
        let granted = worker_command::Body::Granted(LeaseGranted {
            lease_id: lease.lease_id,
            grants: vec![announced],
            tenant: claims(&lease.token).tenant,
            epoch: 0,
            has_other_workers: false,
            part: 0,
            load_stored: false,
        });
        assert_eq!(worker.recv_any().await.unwrap(), granted);
        client.release(&lease).await;
        match worker.recv_any().await.unwrap() {
            worker_command::Body::EndLease(end) => assert_eq!(end.grants, [announced]),
            other => panic!("{other:?} ends no lease"),
        }
        worker.released(lease.lease_id, &[]).await;
        let free = |status: &StatusReply| !status.workers[0].devices[0].ending;
        rig.wait_for_status(free).await;
    }
    let rig = rig.restart().await;
    let _worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    assert!(grant_of(&lease) > last);
    assert!(grant_of(&lease).term > last.term);
}

#[tokio::test]
async fn token_of_an_ended_grant_is_invalid_after_restart() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    let rig = rig.restart().await;
    let ended = DeviceGrant {
        device_index: 0,
        grant: Some(grant_of(&lease).into()),
        share: None,
    };
    let register = Register {
        ended: vec![ended],
        ..register(1, 1)
    };
    let _worker = rig.register(register).await.unwrap();
    rig.wait_for_status(|status| status.workers.len() == 1)
        .await;
    let mut client = rig.client_holding(1, &[&lease]).await;
    client.ended(lease.lease_id).await;
    let mut other = rig.client(2).await;
    other.request(1, 1).await;
    assert!(grant_of(&other.granted().await) > grant_of(&lease));
}

#[tokio::test]
async fn tokens_are_renewed_in_time_and_after_reattach() {
    let mut options = options();
    // Half of the life is the margin for a busy host.
    options.timing.lease_token_life = Duration::from_secs(4);
    let rig = Rig::with(options).await;
    let _worker = rig.worker(1, 2).await;
    let mut client = rig.client(1).await;
    client.request(1, 2).await;
    let lease = client.granted().await;
    let mut last = claims(&lease.token);
    for _ in 0..3 {
        let token = claims(&client.renewed(lease.lease_id).await);
        assert!(token.issued_at_ms < last.expires_at_ms, "a gap");
        assert!(token.expires_at_ms > last.expires_at_ms);
        let same = LeaseClaims {
            issued_at_ms: last.issued_at_ms,
            expires_at_ms: last.expires_at_ms,
            ..token.clone()
        };
        assert_eq!(same, last, "and nothing else has changed");
        last = token;
    }
    client.close().await;
    // The token that it presents expired long ago, but the lease goes on.
    let mut back = rig.client_holding(1, &[&lease]).await;
    let token = claims(&back.renewed(lease.lease_id).await);
    assert!(token.expires_at_ms > last.expires_at_ms);
    assert_eq!(token.shares, last.shares);
}

#[tokio::test]
async fn closed_client_gets_no_renewed_token() {
    use tensord_proto::v1::{RevokeTokenRequest, admin_client::AdminClient};
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    let request = RevokeTokenRequest {
        name: "program".into(),
        keep_leases: true,
    };
    let mut admin = AdminClient::new(rig.channel().await);
    let request = with_token(request, &rig.admin_token);
    admin.revoke_token(request).await.unwrap();
    client.close().await;
    let mut back = rig.client_holding(1, &[&lease]).await;
    back.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    back.request(2, 1).await;
    let next = loop {
        let next = back.recv_any().await.unwrap();
        if next != Some(pool_message::Body::Beat(Beat {})) {
            break next;
        }
    };
    assert!(
        matches!(next, Some(pool_message::Body::Refused(_))),
        "{next:?}"
    );
}

#[tokio::test]
async fn a_heartbeat_is_answered_with_the_time() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let heartbeat = worker_message::Body::Heartbeat(Heartbeat::default());
    for _ in 0..2 {
        worker.send(heartbeat.clone()).await;
        match worker.recv_any().await.unwrap() {
            worker_command::Body::Time(time) => {
                assert!(time.time_ms >= worker.registered.time_ms);
                assert!(time.time_ms - worker.registered.time_ms < 60_000);
            }
            other => panic!("{other:?} is no time"),
        }
    }
}
