//! A client's id is bound to its credential.

use super::*;

/// Attaches with the id of test client `victim` and another client's credential.
async fn attach_as(rig: &Rig, victim: u64, lease_tokens: Vec<bytes::Bytes>) -> Error {
    let hello = ClientHello {
        credential: credential(999).reveal(),
        lease_tokens,
        ..hello_of(victim)
    };
    let first_message = client_message::Body::Hello(hello);
    let (code, error) = error_of(rig.attach(&rig.client_token, first_message).await);
    assert_eq!(code, tonic::Code::Unauthenticated);
    error
}

#[tokio::test]
async fn client_id_is_bound_to_its_credential() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 2).await;
    let mut victim = rig.client(1).await;
    victim.request(1, 1).await;
    let lease = victim.granted().await;
    for tokens in [vec![], vec![lease.token.clone()]] {
        let error = attach_as(&rig, 1, tokens).await;
        assert_eq!(error.code(), ErrorCode::Token);
        assert!(
            error.message.contains("does not belong to client"),
            "{error}"
        );
    }
    // The victim is still attached and holds its lease.
    victim.request(2, 1).await;
    victim.granted().await;
    assert_eq!(rig.status().await.leases, 2);
    victim.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
}

#[tokio::test]
async fn client_id_stays_bound_after_scheduler_restart() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    let mut victim = rig.client(1).await;
    victim.request(1, 1).await;
    let lease = victim.granted().await;
    let rig = rig.restart().await;
    let _worker = rig.worker(1, 1).await;
    for tokens in [vec![], vec![lease.token.clone()]] {
        attach_as(&rig, 1, tokens).await;
    }
    // The lease token does not help under the stranger's own client id, either.
    let tokens = vec![lease.token.clone()];
    let stranger = rig.client_with_tokens(&rig.client_token, 999, tokens).await;
    let ended = stranger.unwrap().ended(lease.lease_id).await;
    assert_eq!(ended.code(), ErrorCode::Lease);
    let mut victim = rig.client_holding(1, &[&lease]).await;
    victim.renewed(lease.lease_id).await;
    assert_eq!(rig.status().await.leases, 1);
}

#[tokio::test]
async fn a_hello_without_a_credential_is_refused() {
    let rig = Rig::start().await;
    for length in [0, 31, 33] {
        let hello = ClientHello {
            credential: vec![7; length].into(),
            ..hello_of(1)
        };
        let first_message = client_message::Body::Hello(hello);
        let (_, error) = error_of(rig.attach(&rig.client_token, first_message).await);
        assert_eq!(error.code(), ErrorCode::Protocol);
        let expected = format!("the client's credential has {length} bytes; it must have 32");
        assert_eq!(error.message, expected);
    }
}
