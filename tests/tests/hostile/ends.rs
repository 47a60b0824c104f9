//! Ends: a worker that is told to stop keeps what it was given.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use tensord_client::LeaseRequest;
use tensord_tests::cluster::Cluster;

/// Longer than a worker may be silent before its stream is cut off (4 s), and than a
/// lease outlives a worker that was lost (5 s).
const LONG: Duration = Duration::from_secs(11);

#[test]
fn a_worker_that_drains_lets_its_sessions_end_by_themselves() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--drain-seconds", "120"]);
    cluster.wait_for_workers(1);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let mut worker = cluster.workers.remove(0);
    worker.signal("TERM");
    cluster.wait("the pool to know that the worker drains", || {
        let workers = pool.status().unwrap().workers;
        workers.len() == 1 && workers[0].draining
    });
    let refused = cluster.pool().lease(LeaseRequest::devices(1));
    assert!(refused.is_err(), "a worker that drains gets no new lease");
    let until = Instant::now() + LONG;
    let mut weight = Tensor::<1>::zeros([4], &device);
    let mut steps = 0_u16;
    while Instant::now() < until {
        weight = weight + 1.0;
        steps += 1;
        let sum = weight.clone().sum().into_scalar::<f32>();
        assert_eq!(sum, 4.0 * f32::from(steps));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(lease.ended(), None);
    assert_eq!(pool.status().unwrap().leases, 1);
    drop((weight, device, lease));
    assert_eq!(
        worker.exit_code(Duration::from_secs(10)),
        Some(0),
        "the process ends with its last session"
    );
    cluster.wait("the worker to be gone", || {
        pool.status().unwrap().workers.is_empty()
    });
}

#[test]
fn a_worker_ends_its_sessions_when_its_time_to_drain_is_over() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--drain-seconds", "6"]);
    cluster.wait_for_workers(1);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let mut worker = cluster.workers.remove(0);
    let told = Instant::now();
    worker.signal("TERM");
    let failed_after = loop {
        let sum = Tensor::<1>::ones([4], &device).sum().try_into_data();
        if sum.is_err() {
            break told.elapsed();
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(failed_after >= Duration::from_secs(6), "{failed_after:?}");
    assert_eq!(worker.exit_code(Duration::from_secs(10)), Some(0));
}
