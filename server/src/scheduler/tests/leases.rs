//! Leases from request to end, as clients and workers see them.

use tensord_proto::{
    v1::{Beat, CancelRequest, LeaseShare, Leaving, Left, OutOfService},
    version,
};
use tensord_transport::token;

use super::*;

#[tokio::test]
async fn a_lease_names_the_worker_and_carries_a_token_it_can_check() {
    let rig = Rig::start().await;
    let worker = rig.worker(5, 2).await;
    let mut client = rig.client(1).await;
    assert_eq!(client.hello.protocol, version::PROTOCOL_MAX);
    assert_eq!(client.hello.lease_expiry_ms, 3_600_000);
    client.request(7, 2).await;
    let granted = client.granted().await;
    assert_eq!(granted.request_id, 7);
    assert_eq!(granted.devices.len(), 2);
    let endpoint = granted.devices[0].worker.as_ref().unwrap();
    assert_eq!(
        endpoint.address, "127.0.0.1:7005",
        "the host it left open is the one it called from"
    );
    let id = worker_id(5).0;
    let certificate = identity_of(5).fingerprint().0.to_vec();
    assert_eq!((endpoint.worker_id, endpoint.name.as_str()), (id, "w5"));
    assert_eq!(endpoint.certificate_sha256, certificate);

    let claims = token::verify(&granted.token, &worker.registered.lease_key).unwrap();
    let hash = credential(1).hash();
    assert_eq!(claims.lease_id, granted.lease_id);
    assert_eq!(claims.client_id, hash.client_id().0);
    assert_eq!(claims.credential_hash, hash.to_bytes());
    let life = claims.expires_at_ms - claims.issued_at_ms;
    assert_eq!(u128::from(life), LEASE_TOKEN_LIFE.as_millis());
    let registered_at = worker.registered.time_ms;
    assert!(claims.issued_at_ms.abs_diff(registered_at) < 60_000);
    let grant = claims.shares[0].grant;
    assert!(grant.unwrap().term > 0);
    let share = |device_index| LeaseShare {
        worker_id: id,
        device_index,
        worker: "w5".into(),
        address: "127.0.0.1:7005".into(),
        certificate_sha256: certificate.clone().into(),
        grant,
        share: None,
    };
    assert_eq!(claims.shares, [share(0), share(1)]);
}

#[tokio::test]
async fn requests_queue_and_advance_on_release() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let [mut first, mut second, mut third] = [
        rig.client(1).await,
        rig.client(2).await,
        rig.client(3).await,
    ];
    first.request(1, 1).await;
    let lease = first.granted().await;
    second.request(1, 1).await;
    assert_eq!(second.queued(1).await, 1);
    third.request(1, 1).await;
    assert_eq!(third.queued(1).await, 2);
    second
        .send(client_message::Body::Cancel(CancelRequest {
            request_id: 1,
        }))
        .await;
    assert_eq!(second.refused(1).await.code(), ErrorCode::Cancelled);
    assert_eq!(third.queued(1).await, 1);
    first.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    let next = third.granted().await;
    assert_ne!(next.lease_id, lease.lease_id);
}

#[tokio::test]
async fn unsatisfiable_request_is_refused_with_reason() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 2).await;
    let mut client = rig.client(1).await;
    client.request(1, 3).await;
    let error = client.refused(1).await;
    assert_eq!(error.code(), ErrorCode::Unsatisfiable);
    assert_eq!(
        error.message,
        "requested 3 devices of any kind; the pool has 2 flex (1.0 GiB)"
    );
    client.request(2, 0).await;
    assert_eq!(client.refused(2).await.code(), ErrorCode::Protocol);
}

#[tokio::test]
async fn lease_outlives_its_clients_stream_until_expiry() {
    let mut options = options();
    options.engine.lease_expiry = Duration::from_millis(100);
    let rig = Rig::with(options).await;
    let mut worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    let mut waiting = rig.client(2).await;
    waiting.request(1, 1).await;
    assert_eq!(waiting.queued(1).await, 1);
    drop(client);
    assert_eq!(worker.end_lease().await, lease.lease_id);
    waiting.granted().await;
}

#[tokio::test]
async fn messages_sent_before_a_stream_ends_are_processed() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    // Repeated, because the message and the end of the stream could race. If the release
    // were lost, the lease would be held for an hour.
    for id in 1..=20 {
        let mut client = rig.client(id).await;
        client.request(1, 1).await;
        let lease = client.granted().await;
        client.release(&lease).await;
        client.close().await;
        assert_eq!(worker.end_lease().await, lease.lease_id);
    }
}

#[tokio::test]
async fn second_stream_of_a_client_replaces_the_first() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let mut old = rig.client(1).await;
    old.request(1, 1).await;
    let lease = old.granted().await;
    let mut new = rig.client_holding(1, &[&lease]).await;
    assert_eq!(old.recv_stream_error().await.code(), ErrorCode::Cancelled);
    new.request(2, 1).await;
    assert_eq!(new.queued(2).await, 1, "the lease is still held");
    new.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    new.granted().await;
}

#[tokio::test]
async fn an_idle_stream_carries_beats() {
    let mut options = options();
    options.timing.beat = Duration::from_millis(10);
    let rig = Rig::with(options).await;
    let mut client = rig.client(1).await;
    for _ in 0..3 {
        let beat = client.recv_any().await.unwrap();
        assert_eq!(beat, Some(pool_message::Body::Beat(Beat {})));
    }
}

#[tokio::test]
async fn status_shows_last_reported_usage() {
    let rig = Rig::start().await;
    let worker = rig.worker(1, 2).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    client.granted().await;
    let usage = DeviceUsage {
        sessions: 1,
        live_bytes: 4096,
        reserved_bytes: Some(8192),
        ops_executed: 99,
        busy_us: 7,
    };
    // A report with too many devices, and one with too few, do no harm.
    let heartbeat = |usage| {
        worker_message::Body::Heartbeat(Heartbeat {
            usage,
            ..Heartbeat::default()
        })
    };
    worker
        .send(heartbeat(vec![DeviceUsage::default(); 9]))
        .await;
    worker.send(heartbeat(vec![usage])).await;
    let heard = |status: &StatusReply| status.workers[0].devices[0].ops_executed == 99;
    let status = rig.wait_for_status(heard).await;
    assert_eq!((status.leases, status.waiting_requests), (1, 0));
    assert_eq!(status.workers[0].address, "127.0.0.1:7001");
    let devices = &status.workers[0].devices;
    assert_eq!((devices[0].leased, devices[0].live_bytes), (true, 4096));
    assert_eq!(devices[0].reserved_bytes, Some(8192));
    assert_eq!((devices[1].leased, devices[1].live_bytes), (false, 0));
}

#[tokio::test]
async fn a_device_is_not_free_before_its_worker_has_released_it() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 2).await;
    let mut client = rig.client(1).await;
    client.request(1, 2).await;
    let lease = client.granted().await;
    client.release(&lease).await;
    assert_eq!(worker.recv_end_lease().await, lease.lease_id);
    let usage = DeviceUsage {
        live_bytes: 9,
        ..DeviceUsage::default()
    };
    let heartbeat = Heartbeat {
        usage: vec![usage, usage],
        ..Heartbeat::default()
    };
    worker
        .send(worker_message::Body::Heartbeat(heartbeat))
        .await;
    client.request(2, 2).await;
    assert_eq!(client.queued(2).await, 1);
    worker.released(lease.lease_id, &[1]).await;
    let status = rig
        .wait_for_status(|status| !status.workers[0].devices[0].ending)
        .await;
    let [first, second] = &status.workers[0].devices[..] else {
        panic!("{status:?}");
    };
    assert!(!second.leased && second.ending && status.leases == 0);
    // The tenant of the lease that ended on the second device is no longer known, so its
    // usage is hidden.
    assert_eq!((first.live_bytes, second.live_bytes), (9, 0));
    client.request(3, 1).await;
    client.granted().await;
    worker.released(lease.lease_id, &[]).await;
    let free = |status: &StatusReply| !status.workers[0].devices[1].ending;
    rig.wait_for_status(free).await;
}

#[tokio::test]
async fn device_out_of_service_is_shown_and_requests_wait() {
    let rig = Rig::start().await;
    let worker = rig.worker(1, 1).await;
    let heartbeat = |out_of_service| {
        worker_message::Body::Heartbeat(Heartbeat {
            out_of_service,
            ..Heartbeat::default()
        })
    };
    let out = OutOfService {
        device_index: 0,
        reason: "it is stuck\n".into(),
    };
    worker.send(heartbeat(vec![out])).await;
    let status = rig
        .wait_for_status(|status| !status.workers[0].devices[0].out_of_service.is_empty())
        .await;
    let device = &status.workers[0].devices[0];
    assert_eq!(device.out_of_service, "it is stuck\\n");
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    assert_eq!(client.queued(1).await, 1);
    worker.send(heartbeat(Vec::new())).await;
    client.granted().await;
}

#[tokio::test]
async fn leaving_worker_keeps_leases_until_it_has_left() {
    let rig = Rig::start().await;
    let worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    worker.send(worker_message::Body::Leaving(Leaving {})).await;
    let status = rig
        .wait_for_status(|status| status.workers[0].draining)
        .await;
    assert!(status.workers[0].devices[0].leased);
    worker.send(worker_message::Body::Left(Left {})).await;
    worker.close().await;
    let error = client.ended(lease.lease_id).await;
    assert_eq!(error.code(), ErrorCode::WorkerLost);
    let id = worker_id(1);
    assert_eq!(error.message, format!("worker w1 ({id}) left the pool"));
}

#[tokio::test]
async fn a_scheduler_about_to_stop_grants_nothing() {
    let rig = Rig::start().await;
    let mut worker = rig.worker(1, 1).await;
    let mut holder = rig.client(1).await;
    holder.request(1, 1).await;
    let lease = holder.granted().await;
    let mut waiting = rig.client(2).await;
    waiting.request(1, 1).await;
    assert_eq!(waiting.queued(1).await, 1);
    rig.scheduler.stop_granting().await;
    holder.request(2, 1).await;
    assert_eq!(holder.refused(2).await.code(), ErrorCode::Draining);
    holder.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    assert_eq!(waiting.refused(1).await.code(), ErrorCode::Draining);
    rig.wait_for_status(|status| status.leases == 0).await;
}
