//! The leases that a restarted scheduler with the same state adopts.

use super::*;

fn holding(id: u64, lease: &Granted) -> Register {
    let held = HeldDevice {
        lease_id: lease.lease_id,
        device_index: 0,
        grant: claims(&lease.token).shares[0].grant,
        ended: false,
        share: None,
    };
    Register {
        held: vec![held],
        ..register(id, 1)
    }
}

/// Returns a restarted pool whose one device client 1 had leased before the restart.
async fn restarted_with_a_lease() -> (Rig, Granted) {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    (rig.restart().await, lease)
}

#[tokio::test]
async fn lease_survives_restart_when_worker_and_client_return() {
    let (rig, lease) = restarted_with_a_lease().await;
    let mut worker = rig.register(holding(1, &lease)).await.unwrap();
    let mut other = rig.client(2).await;
    other.request(1, 1).await;
    assert_eq!(other.queued(1).await, 1, "the device is taken");
    let client = rig.client_holding(1, &[&lease]).await;
    assert_eq!(rig.status().await.leases, 1);
    client.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    other.granted().await;
}

#[tokio::test]
async fn client_can_return_before_its_worker() {
    let (rig, lease) = restarted_with_a_lease().await;
    let mut client = rig.client_holding(1, &[&lease]).await;
    let mut worker = rig.register(holding(1, &lease)).await.unwrap();
    client.request(2, 1).await;
    assert_eq!(client.queued(2).await, 1, "the device is taken");
    client.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    client.granted().await;
}

#[tokio::test]
async fn unreleased_devices_are_not_granted_after_restart() {
    let (rig, lease) = restarted_with_a_lease().await;
    let mut register = holding(1, &lease);
    register.held[0].ended = true;
    let mut worker = rig.register(register).await.unwrap();
    assert_eq!(worker.recv_end_lease().await, lease.lease_id);
    let mut client = rig.client_holding(1, &[&lease]).await;
    let error = client.ended(lease.lease_id).await;
    assert_eq!(error.code(), ErrorCode::WorkerLost, "{error}");
    client.request(2, 1).await;
    assert_eq!(client.queued(2).await, 1);
    worker.released(lease.lease_id, &[]).await;
    client.granted().await;
}

#[tokio::test]
async fn stopping_scheduler_announces_it() {
    let rig = Rig::start().await;
    let mut client = rig.client(1).await;
    let mut worker = rig.worker(1, 1).await;
    with_timeout("stop", rig.scheduler.stop()).await;
    let (_, error) = error_of(worker.recv().await);
    for error in [client.recv_stream_error().await, error] {
        assert_eq!(error.code(), ErrorCode::Draining);
    }
}

#[tokio::test]
async fn streams_to_a_scheduler_that_dies_end() {
    let rig = Rig::start().await;
    let mut client = rig.client(1).await;
    let mut worker = rig.worker(1, 1).await;
    let _new = rig.restart().await;
    while let Ok(Some(_)) = client.recv_any().await {}
    assert!(!matches!(
        with_timeout("end", worker.inbound.message()).await,
        Ok(Some(_))
    ));
}

#[tokio::test]
async fn invalid_lease_token_is_answered_with_lease_ended() {
    let (rig, lease) = restarted_with_a_lease().await;
    // Another client's token.
    let mut thief = rig.client_holding(2, &[&lease]).await;
    assert_eq!(thief.ended(lease.lease_id).await.code(), ErrorCode::Lease);
    // A token of a pool with another key.
    let (other_pool, _) = restarted_with_a_lease().await;
    let mut client = other_pool.client_holding(1, &[&lease]).await;
    assert_eq!(client.ended(lease.lease_id).await.code(), ErrorCode::Lease);
    // Not a lease token at all.
    let hello = ClientHello {
        lease_tokens: vec![vec![1; 65].into()],
        ..hello_of(3)
    };
    let first_message = client_message::Body::Hello(hello);
    let (_, error) = error_of(rig.attach(&rig.client_token, first_message).await);
    assert_eq!(error.code(), ErrorCode::Protocol);
}

#[tokio::test]
async fn what_a_tenant_had_outlives_the_scheduler() {
    let mut options = options();
    options.engine.half_life = Duration::from_secs(2);
    options.timing.past_use = Duration::from_millis(20);
    let rig = Rig::with(options).await;
    let _worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    client.granted().await;
    let path = rig.directory.path().join("past-use.json");
    let written = async {
        loop {
            let text = tokio::fs::read(&path).await.unwrap_or_default();
            let record = serde_json::from_slice(&text).unwrap_or(serde_json::Value::Null);
            if record["shares"]["default"].as_f64() > Some(0.1) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    with_timeout("the share is written", written).await;
    // It counts for a day now.
    let rig = rig.restart().await;
    let past_share = rig.tenant("default").await.unwrap().past_share;
    assert!((0.09..=1.0).contains(&past_share), "{past_share}");
}
