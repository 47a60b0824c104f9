//! The account of what leases use, from messages of workers to the reply to an administrator.

use tensord_proto::v1::{
    CreateTokenRequest, GrantUsage, SumUsageRequest, UsageColumn, UsageCounters, UsageRow,
    UsageSums,
};

use super::*;
use crate::scheduler::usage::UsageLog;

impl Rig {
    /// Starts a scheduler that keeps usage, on the state of an earlier one if there was one.
    async fn with_usage(directory: tempfile::TempDir) -> Self {
        let state = StateDir::open(directory.path()).unwrap();
        let opening = async {
            loop {
                // An earlier scheduler, whose tasks may still be ending, has the file open.
                match UsageLog::open(&state) {
                    Ok(log) => return log,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        let usage = Some(with_timeout("usage", opening).await);
        Self::on(directory, Options { usage, ..options() }).await
    }

    async fn sum_usage(&self, token: &Secret) -> Result<UsageSums, Status> {
        let by = [UsageColumn::Tenant, UsageColumn::User, UsageColumn::Lease];
        let request = SumUsageRequest {
            since_ms: 0,
            by: by.map(Into::into).to_vec(),
        };
        let request = with_token(request, token);
        let sums = self.admin().await.sum_usage(request).await;
        sums.map(tonic::Response::into_inner)
    }

    async fn usage_rows(&self) -> Vec<(String, String, u64, u64)> {
        let sums = self.sum_usage(&self.admin_token).await.unwrap();
        let ops = |row: &UsageRow| row.sum.unwrap().ops;
        let rows = sums.rows.into_iter();
        rows.map(|row| {
            (
                row.tenant.clone(),
                row.user.clone(),
                row.lease_id,
                ops(&row),
            )
        })
        .collect()
    }
}

/// The grant of the only device of a lease.
fn grant_of_device(granted: &Granted) -> tensord_proto::v1::DeviceGrant {
    let share = &claims(&granted.token).shares[0];
    tensord_proto::v1::DeviceGrant {
        device_index: share.device_index,
        grant: share.grant,
        share: share.share,
    }
}

/// A heartbeat with the ops that were processed for grants.
fn heartbeat(grants: &[(&Granted, u64, bool)]) -> worker_message::Body {
    let leases = grants.iter().map(|(granted, ops, released)| GrantUsage {
        lease_id: granted.lease_id,
        grant: Some(grant_of_device(granted)),
        used: Some(UsageCounters {
            ops: *ops,
            ..UsageCounters::default()
        }),
        released: *released,
    });
    worker_message::Body::Heartbeat(Heartbeat {
        leases: leases.collect(),
        ..Heartbeat::default()
    })
}

impl TestWorker {
    /// Sends a heartbeat, and returns how many grants the reply allows to forget.
    async fn beat(&mut self, grants: &[(&Granted, u64, bool)]) -> usize {
        self.send(heartbeat(grants)).await;
        loop {
            if let worker_command::Body::Time(time) = self.recv_any().await.unwrap() {
                return time.usage_recorded.len();
            }
        }
    }

    /// Sends heartbeats until a reply allows to forget a grant.
    async fn beat_until_recorded(&mut self, grants: &[(&Granted, u64, bool)]) {
        with_timeout("record", async {
            while self.beat(grants).await == 0 {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn usage_is_that_of_the_token_and_survives_a_restart() {
    let rig = Rig::with_usage(tempfile::tempdir().unwrap()).await;
    rig.add_tenant("red").await;
    let request = CreateTokenRequest {
        name: "ada-1".into(),
        role: "program".into(),
        tenant: "red".into(),
        user: "ada".into(),
        ..CreateTokenRequest::default()
    };
    let request = with_token(request, &rig.admin_token);
    let made = rig.admin().await.create_token(request).await.unwrap();
    let token = Secret::new(made.into_inner().token);
    let mut worker = rig.worker(1, 2).await;
    let mut client = rig.client_with_tokens(&token, 1, vec![]).await.unwrap();
    client.request(1, 1).await;
    let first = client.granted().await;
    let mut other = rig.client(2).await;
    other.request(1, 1).await;
    let second = other.granted().await;
    assert_eq!(
        worker
            .beat(&[(&first, 5, false), (&second, 2, false)])
            .await,
        0
    );
    let row = |tenant: &str, user: &str, lease: &Granted, ops| {
        (tenant.to_owned(), user.to_owned(), lease.lease_id, ops)
    };
    // Both have had their devices for no time, so the order is that of the tenants.
    let expected = [row("default", "", &second, 2), row("red", "ada", &first, 5)];
    assert_eq!(rig.usage_rows().await, expected);
    client.release(&first).await;
    worker.end_lease().await;
    worker
        .beat_until_recorded(&[(&first, 6, true), (&second, 2, false)])
        .await;
    for refused in [&rig.client_token, &rig.worker_token] {
        error_of(rig.sum_usage(refused).await);
    }

    let Rig {
        directory,
        scheduler,
        ..
    } = rig;
    drop((scheduler, worker, client, other));
    let rig = Rig::with_usage(directory).await;
    let mut worker = rig.worker(1, 2).await;
    // The reply was lost, and the second lease has no client yet.
    worker
        .beat_until_recorded(&[(&first, 6, true), (&second, 4, false)])
        .await;
    let expected = [row("default", "", &second, 4), row("red", "ada", &first, 6)];
    assert_eq!(rig.usage_rows().await, expected);
}

/// As if the scheduler had crashed before the grant was on disk, and the lease was never claimed.
#[tokio::test]
async fn usage_of_a_lease_that_nobody_claims_has_no_tenant() {
    let rig = Rig::with_usage(tempfile::tempdir().unwrap()).await;
    let mut worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    let rig = Rig::with_usage(tempfile::tempdir().unwrap()).await;
    let rejoined = Register {
        ended: vec![grant_of_device(&lease)],
        ..register(1, 1)
    };
    drop(std::mem::replace(
        &mut worker,
        rig.register(rejoined).await.unwrap(),
    ));
    assert_eq!(worker.beat(&[(&lease, 5, false)]).await, 0);
    assert_eq!(rig.usage_rows().await, []);
    worker.beat_until_recorded(&[(&lease, 5, true)]).await;
    let expected = (String::new(), String::new(), 0, 5);
    assert_eq!(rig.usage_rows().await, [expected]);
}
