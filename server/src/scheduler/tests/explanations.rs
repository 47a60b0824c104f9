//! A wait is explained to the program that owns the request or lease, and to nobody else.

use tensord_proto::v1::{
    ChangeStanding, DeviceFingerprint, Durability, ExplainWait, Heartbeat, KeptLease, MarkPlaced,
    Released, Restorable, explain_wait, wait_explained,
};

use super::*;

impl TestClient {
    async fn explain(&self, waiter: explain_wait::Waiter) {
        let waiter = Some(waiter);
        self.send(client_message::Body::ExplainWait(ExplainWait { waiter }))
            .await;
    }

    /// Returns what the next explanation is about, and its lines.
    async fn explained(&mut self) -> (wait_explained::Waiter, Vec<String>) {
        loop {
            if let pool_message::Body::WaitExplained(explained) = self.recv().await.unwrap() {
                return (explained.waiter.unwrap(), explained.lines);
            }
        }
    }

    /// Suspends a lease, or resumes it, once the scheduler has handled what it needs for that.
    async fn change(&mut self, lease_id: u64, suspend: bool) {
        let change = ChangeStanding {
            request_id: 99,
            lease_id,
            suspend,
            ..ChangeStanding::default()
        };
        let change = client_message::Body::ChangeStanding(change);
        self.send(change.clone()).await;
        loop {
            match self.recv().await.unwrap() {
                pool_message::Body::PlaceMark(place) => {
                    let lease_id = place.lease_id;
                    self.send(client_message::Body::MarkPlaced(MarkPlaced { lease_id }))
                        .await;
                }
                pool_message::Body::StandingChanged(changed) => {
                    if changed.error.is_none() {
                        return;
                    }
                    // The heartbeat is on its way.
                    self.send(change.clone()).await;
                }
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn a_wait_is_explained_to_the_program_whose_it_is_alone() {
    let rig = Rig::start().await;
    let mut registration = register(1, 1);
    registration.devices[0].fingerprint = Some(DeviceFingerprint {
        hash: vec![7; 16].into(),
        is_exact: true,
    });
    let worker = rig.register(registration).await.unwrap();
    // A lease that was suspended and resumed waits for the device, which another program has.
    let mut victim = rig.client(1).await;
    let request = LeaseRequest {
        request_id: 1,
        devices: 1,
        durability: Durability::Auto.into(),
        ..LeaseRequest::default()
    };
    victim.send(client_message::Body::Request(request)).await;
    let lease_id = victim.granted().await.lease_id;
    let restorable = Restorable {
        lease_id,
        restorable: true,
    };
    victim
        .send(client_message::Body::Restorable(restorable))
        .await;
    let kept = KeptLease {
        lease_id,
        keeper_id: worker_id(1).0,
        ..KeptLease::default()
    };
    let heartbeat = Heartbeat {
        kept: vec![kept],
        ..Heartbeat::default()
    };
    worker
        .send(worker_message::Body::Heartbeat(heartbeat))
        .await;
    victim.change(lease_id, true).await;
    let released = Released {
        lease_id,
        busy_devices: Vec::new(),
    };
    worker.send(worker_message::Body::Released(released)).await;
    rig.add_tenant("red").await;
    let red = rig.create("red", "program", "red").await;
    let mut curious = rig.client_with_tokens(&red, 2, vec![]).await.unwrap();
    curious.request(1, 1).await;
    let own = curious.granted().await.lease_id;
    victim.change(lease_id, false).await;
    victim
        .explain(explain_wait::Waiter::LeaseId(lease_id))
        .await;
    let (about, lines) = victim.explained().await;
    assert_eq!(about, wait_explained::Waiter::LeaseId(lease_id));
    assert!(
        lines[0].ends_with("waits for 1 device like those it had"),
        "{lines:?}"
    );
    assert!(!lines.join("\n").contains("red"), "{lines:?}");

    // The other one's lease, its request, which it had, and one that nobody has.
    for waiter in [
        explain_wait::Waiter::LeaseId(lease_id),
        explain_wait::Waiter::RequestId(1),
        explain_wait::Waiter::LeaseId(own),
        explain_wait::Waiter::LeaseId(12345),
    ] {
        curious.explain(waiter).await;
    }
    curious.request(2, 1).await;
    curious.explain(explain_wait::Waiter::RequestId(2)).await;
    let (about, lines) = curious.explained().await;
    assert_eq!(about, wait_explained::Waiter::RequestId(2));
    assert!(!lines.join("\n").contains("default"), "{lines:?}");
}
