//! Shares of a device in requests, grants, tokens, commands, and what programs see of each other's.

use tensord_proto::v1::{DeviceGrant, DeviceShare};

use super::*;

/// A registration of a worker with one device, of which leases can have shares.
fn sharing() -> Register {
    Register {
        takes_shares: true,
        ..register(1, 1)
    }
}

fn share_of(permille: u32, memory_bytes: u64, lane: u32) -> Option<DeviceShare> {
    Some(DeviceShare {
        permille,
        memory_bytes,
        lane,
    })
}

impl TestClient {
    async fn request_share(&self, request_id: u64, share_permille: u32, devices: u32) {
        let request = LeaseRequest {
            request_id,
            devices,
            share_permille,
            ..LeaseRequest::default()
        };
        self.send(client_message::Body::Request(request)).await;
    }

    /// Requests a share, and returns the lease.
    async fn share(&mut self, request_id: u64, permille: u32) -> Granted {
        self.request_share(request_id, permille, 1).await;
        self.granted().await
    }
}

/// The grant that a worker is told of.
async fn announced(worker: &mut TestWorker) -> DeviceGrant {
    match worker.recv_any().await.unwrap() {
        worker_command::Body::Granted(granted) => granted.grants[0],
        other => panic!("{other:?} is no grant"),
    }
}

#[tokio::test]
async fn program_worker_and_token_have_the_share_and_its_end_has_the_lane() {
    let rig = Rig::start().await;
    let mut worker = rig.register(sharing()).await.unwrap();
    let mut client = rig.client(1).await;
    let mut leases = Vec::new();
    for (request, permille, expected) in [
        (1, 250, share_of(250, 256 << 20, 1)),
        (2, 500, share_of(500, 512 << 20, 2)),
    ] {
        let lease = client.share(request, permille).await;
        assert_eq!(lease.devices[0].share, expected);
        assert_eq!(
            lease.devices[0].device.as_ref().unwrap().memory_bytes,
            1 << 30
        );
        let claimed = claims(&lease.token).shares.remove(0);
        let granted = announced(&mut worker).await;
        assert_eq!((claimed.share, granted.share), (expected, expected));
        assert_eq!(claimed.grant, granted.grant);
        leases.push((lease, granted));
    }
    // There is no room for it.
    client.request_share(3, 300, 1).await;
    client.queued(3).await;
    let (lease, granted) = &leases[1];
    client.release(lease).await;
    match worker.recv_any().await.unwrap() {
        worker_command::Body::EndLease(end) => {
            let ended = DeviceGrant {
                share: share_of(0, 0, 2),
                ..*granted
            };
            assert_eq!(end.grants, [ended]);
        }
        other => panic!("{other:?} ends no lease"),
    }
    worker.released(lease.lease_id, &[]).await;
    client.granted().await;
}

#[tokio::test]
async fn impossible_share_is_refused_and_the_stream_goes_on() {
    let rig = Rig::start().await;
    let _worker = rig.register(sharing()).await.unwrap();
    let mut client = rig.client(1).await;
    for (request, permille, devices, expected) in [
        (1, 1000, 1, "is for 1000 thousandths of a device's time"),
        (2, 500, 2, "is for a share of 2 devices"),
    ] {
        client.request_share(request, permille, devices).await;
        let error = client.refused(request).await;
        assert_eq!(error.code(), ErrorCode::Protocol);
        assert!(error.message.contains(expected), "{error}");
    }
    client.share(3, 999).await;
}

#[tokio::test]
async fn worker_that_takes_no_shares_gets_none() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request_share(1, 500, 1).await;
    let error = client.refused(1).await;
    assert_eq!(error.code(), ErrorCode::Unsatisfiable, "{error}");
}

#[tokio::test]
async fn malformed_shares_of_a_worker_are_refused() {
    let held = |share| HeldDevice {
        lease_id: 7,
        share,
        ..HeldDevice::default()
    };
    let ended = |share| DeviceGrant {
        share,
        ..DeviceGrant::default()
    };
    let rig = Rig::start().await;
    for register in [
        Register {
            held: vec![held(share_of(1000, 1, 1))],
            ..sharing()
        },
        Register {
            held: vec![held(share_of(500, 1, 0))],
            ..sharing()
        },
        Register {
            ended: vec![ended(share_of(0, 0, 17))],
            ..sharing()
        },
    ] {
        let (_, error) = error_of(rig.register(register).await);
        assert_eq!(error.code(), ErrorCode::Protocol);
        assert!(error.message.contains("malformed"), "{error}");
    }
    let register = Register {
        ended: vec![ended(share_of(0, 0, 16))],
        ..sharing()
    };
    rig.register(register).await.unwrap();
}

#[tokio::test]
async fn share_outlives_the_scheduler() {
    let rig = Rig::start().await;
    let _worker = rig.register(sharing()).await.unwrap();
    let mut client = rig.client(1).await;
    let lease = client.share(1, 600).await;
    let rig = rig.restart().await;
    let claimed = claims(&lease.token).shares.remove(0);
    let held = HeldDevice {
        lease_id: lease.lease_id,
        device_index: 0,
        grant: claimed.grant,
        ended: false,
        share: claimed.share,
    };
    let register = Register {
        held: vec![held],
        ..sharing()
    };
    let _worker = rig.register(register).await.unwrap();
    let client = rig.client_holding(1, &[&lease]).await;
    let mut other = rig.client(2).await;
    other.request_share(1, 500, 1).await;
    assert_eq!(other.queued(1).await, 1, "600 thousandths are taken");
    other.request_share(2, 400, 1).await;
    let second = other.granted().await;
    assert_eq!(second.devices[0].share.unwrap().lane, 2);
    let device = &rig.status().await.workers[0].devices[0];
    assert_eq!((device.leased, device.shared_permille), (true, 1000));
    drop(client);
}

#[tokio::test]
async fn tenant_sees_of_the_shares_of_others_only_that_the_device_is_leased() {
    let rig = Rig::start().await;
    let worker = rig.register(sharing()).await.unwrap();
    rig.add_tenant("red").await;
    let red = rig.create("red", "program", "red").await;
    let mut client = rig.client(1).await;
    client.share(1, 250).await;
    let mut other = rig.client_with_tokens(&red, 2, vec![]).await.unwrap();
    other.share(1, 300).await;
    other.share(2, 200).await;
    let usage = DeviceUsage {
        ops_executed: 99,
        ..DeviceUsage::default()
    };
    let heartbeat = Heartbeat {
        usage: vec![usage],
        ..Heartbeat::default()
    };
    worker
        .send(worker_message::Body::Heartbeat(heartbeat))
        .await;
    // An administrator sees what the device has executed, once it is reported.
    let all = with_timeout("the report", async {
        loop {
            let status = rig.status_with(&rig.admin_token).await.unwrap();
            let device = status.workers[0].devices[0].clone();
            if device.ops_executed == 99 {
                return device;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    let visible = |device: &tensord_proto::v1::DeviceStatus| {
        assert!(device.leased);
        (device.shared_permille, device.shares, device.ops_executed)
    };
    assert_eq!(visible(&all), (750, 3, 99));
    for (token, shares, permille) in [(&rig.client_token, 1, 250), (&red, 2, 500)] {
        let status = rig.status_with(token).await.unwrap();
        let device = &status.workers[0].devices[0];
        assert_eq!(visible(device), (permille, shares, 0));
    }
    let used = rig.tenant("red").await.unwrap().used.unwrap().kinds;
    assert_eq!((used[0].count, used[0].permille), (0, 500));
}
