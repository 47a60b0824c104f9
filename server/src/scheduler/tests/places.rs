//! The places of the pool for clients: how they are divided among tenants, and which are kept for clients that come back
//! to leases.

use super::*;

/// Options with 16 places, of which 14 are for new clients.
fn few_places() -> Options {
    Options {
        max_clients: 16,
        ..options()
    }
}

/// Adds two tenants, and returns a token of each.
async fn red_and_blue(rig: &Rig) -> (Secret, Secret) {
    for tenant in ["red", "blue"] {
        rig.add_tenant(tenant).await;
    }
    (
        rig.create("red", "program", "red").await,
        rig.create("blue", "program", "blue").await,
    )
}

/// Attaches new clients of a tenant, from the test client `first` on, until one is refused. Returns those that are
/// attached, and the reason of the refusal.
async fn fill(rig: &Rig, token: &Secret, first: u64) -> (Vec<TestClient>, String) {
    let mut attached = Vec::new();
    for id in first..first + 32 {
        match rig.client_with_tokens(token, id, vec![]).await {
            Ok(client) => attached.push(client),
            Err(status) => {
                let (code, error) = error_of(Err::<(), _>(status));
                assert_eq!(
                    (code, error.code()),
                    (tonic::Code::ResourceExhausted, ErrorCode::Limit)
                );
                return (attached, error.message);
            }
        }
    }
    panic!("no client was refused");
}

#[tokio::test]
async fn one_tenant_leaves_places_for_others_and_for_clients_with_leases() {
    let rig = Rig::with(few_places()).await;
    let _worker = rig.worker(1, 1).await;
    let (red, blue) = red_and_blue(&rig).await;
    let mut client = rig.client_with_tokens(&blue, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    let lease = client.granted().await;
    // It keeps its place while it is away.
    client.close().await;

    let (of_red, refusal) = fill(&rig, &red, 100).await;
    assert_eq!(of_red.len(), 10);
    let expected = "10 programs of the tenant are attached or may come back to leases";
    assert!(refusal.starts_with(expected), "{refusal}");
    let (of_blue, _) = fill(&rig, &blue, 200).await;
    assert_eq!(of_blue.len(), 2);
    // The last place for new clients.
    let _other = rig.client(2).await;
    let (none, refusal) = fill(&rig, &red, 300).await;
    assert!(none.is_empty());
    let expected = "14 programs are attached or may come back to leases, and the pool has 16 places, of which 2 are only for programs that come back to leases";
    assert!(refusal.starts_with(expected), "{refusal}");

    let held = vec![lease.token.clone()];
    let mut client = rig.client_with_tokens(&blue, 1, held).await.unwrap();
    client.renewed(lease.lease_id).await;
}

#[tokio::test]
async fn places_are_kept_for_clients_that_come_back_after_a_restart() {
    let rig = Rig::start().await;
    let _worker = rig.worker(1, 1).await;
    let (red, blue) = red_and_blue(&rig).await;
    let mut client = rig.client_with_tokens(&blue, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    let lease = client.granted().await;
    let Rig {
        directory,
        scheduler,
        ..
    } = rig;
    drop(scheduler);
    let rig = Rig::on(directory, few_places()).await;
    let _worker = rig.worker(1, 1).await;
    let (of_red, _) = fill(&rig, &red, 100).await;
    let (of_blue, _) = fill(&rig, &blue, 200).await;
    assert_eq!((of_red.len(), of_blue.len()), (11, 3));

    let held = vec![lease.token.clone()];
    let mut client = rig.client_with_tokens(&blue, 1, held).await.unwrap();
    client.renewed(lease.lease_id).await;
    // One more could come back, and no new client can attach.
    assert!(fill(&rig, &blue, 300).await.0.is_empty());
}

#[tokio::test]
async fn clients_without_leases_leave_no_trace_when_they_detach() {
    let rig = Rig::with(few_places()).await;
    for id in 1..=32 {
        rig.client(id).await.close().await;
    }
}
