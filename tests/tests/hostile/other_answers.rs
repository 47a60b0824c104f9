//! A worker that computes other values when it executes ops again after a loss. This is no attack; it is
//! tested here because `processes` has the worker for it.

use burn::tensor::{Device, Tensor};
use tensord_client::{CustomOp, Durability, Lease, LeaseRequest};

use crate::processes::UncheckedPool;

/// Returns the id of the process that executes the session, or the error of the read.
fn process_id(device: &Device) -> Result<f32, String> {
    let id: Tensor<1> = CustomOp::new("process_id").on(device).call([1]);
    let id = id.try_into_data().map_err(|e| e.to_string())?;
    Ok(id.iter::<f32>().next().expect("one number"))
}

/// Leases a device, reads the id of the lease's process, and kills that process. Returns the lease and the id.
fn killed_after_a_read(pool: &UncheckedPool, durability: Durability) -> (Lease, f32) {
    loop {
        let (lease, id, commits) = read_and_kill(pool, durability);
        // Marks are 2 s apart. If one was committed between the read and the kill, no process repeats the answer.
        if lease.durability_status().commits == commits {
            return (lease, id);
        }
    }
}

/// The same, once. Also returns how often snapshots had been kept before the read.
fn read_and_kill(
    UncheckedPool { cluster, worker }: &UncheckedPool,
    durability: Durability,
) -> (Lease, f32, u64) {
    let lease = LeaseRequest::devices(1).durable(durability);
    let lease = cluster.pool().lease(lease).unwrap();
    let device = &lease.devices()[0];
    let first: f32 = Tensor::<1>::ones([2], device).sum().into_scalar();
    assert_eq!(first, 2.0);
    cluster.wait("a snapshot", || {
        lease.durability_status().since_commit.is_some()
    });
    let commits = lease.durability_status().commits;
    let id = process_id(device).unwrap();
    let process = worker.process_of_lease();
    assert_eq!(id, process as f32);
    worker.signal_child(process, "KILL");
    (lease, id, commits)
}

fn start() -> UncheckedPool {
    let snapshots = (64 << 20).to_string();
    UncheckedPool::start_with("flex", &[("UNCHECKED_SNAPSHOTS", &snapshots)])
}

#[test]
fn exact_session_ends_and_names_the_read_whose_answer_differs() {
    let pool = start();
    let (lease, _) = killed_after_a_read(&pool, Durability::Exact);
    let error = process_id(&lease.devices()[0]).unwrap_err();
    for expected in [
        "computed another value for read 2 (1 f32, after",
        "with Durability::Continue, the session would go on with other values",
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn session_that_may_differ_goes_on_with_the_other_answers() {
    let pool = start();
    let (lease, before) = killed_after_a_read(&pool, Durability::Continue);
    let after = process_id(&lease.devices()[0]).unwrap();
    assert_ne!(after, before);
    assert_eq!(after, pool.worker.process_of_lease() as f32);
    assert_eq!(lease.ended(), None);
}
