//! A training goes on at another worker when its own is lost, and computes the same bits.

use std::{
    thread::{sleep, spawn},
    time::Duration,
};

use burn::tensor::{Device, Tensor};
use tensord_client::{Durability, LeaseRequest};
use tensord_testkit::{
    cluster::Cluster,
    models::{Classifier, Cnn, Mlp, Transformer},
    training::losses,
};

/// How long another lease has the only device that is left: longer than a client waits for a worker
/// of which the pool reports nothing.
const RELEASE_AFTER: Duration = Duration::from_secs(12);

/// How long a worker that is stopped may take to exit after its lease has moved.
const EXIT_DEADLINE: Duration = Duration::from_secs(60);

/// Returns the worker that runs the only lease.
fn worker_of_lease(cluster: &Cluster) -> usize {
    let runs = |at: &usize| !cluster.workers[*at].processes_of_leases().is_empty();
    let mut running = (0..cluster.workers.len()).filter(runs);
    running.next().expect("a worker runs the lease")
}

/// Waits until another worker than `source` has a snapshot, whole.
fn wait_for_copy(cluster: &Cluster, source: usize) {
    cluster.wait("a snapshot at another worker", || {
        let taken = cluster.workers[source].snapshots_bytes();
        let mut others = (0..).zip(&cluster.workers).filter(|(at, _)| *at != source);
        others.any(|(_, worker)| {
            let mut kept = worker.snapshots_bytes().into_iter();
            kept.any(|bytes| bytes > 0 && taken.contains(&bytes))
        })
    });
}

fn logs(cluster: &Cluster) -> String {
    let processes = cluster.scheduler.iter().chain(&cluster.workers);
    processes.map(|process| process.log()).collect()
}

/// Trains a model while the worker of its lease is killed before some steps, and another worker is
/// started each time. The losses are those of an undisturbed training.
fn check<M: Classifier>(kills: &[usize], steps: usize) {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<M>(&Device::flex(), steps, |_| {}).unwrap();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let ours = losses::<M>(&lease.devices()[0], steps, |step| {
        if kills.contains(&step) {
            let source = worker_of_lease(&cluster);
            wait_for_copy(&cluster, source);
            cluster.workers[source].kill();
            cluster.add_worker("flex");
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", logs(&cluster));
    assert_eq!(lease.ended(), None);
}

#[test]
fn mlp_trains_on_when_its_worker_is_killed() {
    check::<Mlp>(&[3, 20, 40], 60);
}

#[test]
fn cnn_trains_on_when_its_worker_is_killed() {
    check::<Cnn>(&[4], 12);
}

#[test]
fn transformer_trains_on_when_its_worker_is_killed() {
    check::<Transformer>(&[5], 12);
}

#[test]
fn rolling_restart_disturbs_no_training() {
    // Longer than the test waits for a worker to exit.
    let drain = ["--drain-seconds", "300"];
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &drain);
    cluster.add_worker_with("flex", &drain);
    cluster.wait_for_workers(2);
    let undisturbed = losses::<Mlp>(&Device::flex(), 30, |_| {}).unwrap();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], 30, |step| {
        if [4, 8, 20].contains(&step) {
            let source = worker_of_lease(&cluster);
            cluster.add_worker_with("flex", &drain);
            cluster.workers[source].signal("TERM");
            let code = cluster.workers[source].exit_code(EXIT_DEADLINE);
            assert_eq!(code, Some(0), "{}", logs(&cluster));
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", logs(&cluster));
    assert_eq!(lease.ended(), None);
}

#[test]
fn training_waits_for_a_device_of_the_worker_with_its_snapshots() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let source = worker_of_lease(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step == 5 {
            let request = LeaseRequest::devices(1).durable(Durability::Off);
            let other = pool.lease(request).unwrap();
            wait_for_copy(&cluster, source);
            cluster.workers[source].kill();
            spawn(move || {
                sleep(RELEASE_AFTER);
                drop(other);
            });
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", logs(&cluster));
}

#[test]
fn lease_that_is_not_durable_ends_with_its_worker() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let lease = cluster.pool().lease(request).unwrap();
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), 4.0);
    let source = worker_of_lease(&cluster);
    cluster.workers[source].kill();
    let error = ones.sum().try_into_data().unwrap_err().to_string();
    assert!(error.contains("lost"), "{error}");
}
