//! A training goes on when the process of its lease dies, and computes the same bits.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use burn::tensor::{Device, Distribution, Float, Int, Tensor, TensorData};
use tensord_client::{Durability, Lease, LeaseRequest, data, testing::Options};
use tensord_testkit::{
    administrator::Administrator,
    cluster::{Cluster, Process},
    models::{Classifier, Cnn, Mlp, Transformer},
    training::losses,
};
use tensord_transport::faults::FaultSwitch;

use crate::worker_failover::wait_for_keeper;

fn lease(cluster: &Cluster) -> Lease {
    cluster.pool().lease(LeaseRequest::devices(1)).unwrap()
}

fn worker(cluster: &Cluster) -> &Process {
    &cluster.workers[0]
}

/// Kills the process of the only lease.
fn kill_process(cluster: &Cluster) {
    kill_process_at(worker(cluster));
}

fn kill_process_at(worker: &Process) {
    worker.signal_child(worker.process_of_lease(), "KILL");
}

/// Waits until the worker has a snapshot of a session of the process that runs now.
fn wait_for_snapshot(cluster: &Cluster) {
    let worker = worker(cluster);
    let process = worker.process_of_lease();
    cluster.wait("a snapshot", || !worker.snapshots_bytes().is_empty());
    assert_eq!(worker.process_of_lease(), process);
}

/// Trains a model while the process of its lease is killed before some steps. The losses are
/// those of an undisturbed training.
fn check<M: Classifier>(kills: &[usize], steps: usize) {
    let cluster = Cluster::start(&["flex"]);
    let undisturbed = losses::<M>(&Device::flex(), steps, |_| {}).unwrap();
    let lease = lease(&cluster);
    let ours = losses::<M>(&lease.devices()[0], steps, |step| {
        if kills.contains(&step) {
            wait_for_snapshot(&cluster);
            kill_process(&cluster);
        }
    });
    assert_eq!(ours.unwrap(), undisturbed, "{}", worker(&cluster).log());
    assert_eq!(lease.ended(), None);
    let log = worker(&cluster).log();
    let moved = log.matches("the lease goes on in another process").count();
    assert_eq!(moved, kills.len(), "{log}");
}

#[test]
fn mlp_trains_on_when_its_process_is_killed() {
    check::<Mlp>(&[3, 4, 11, 30], 60);
}

#[test]
fn cnn_trains_on_when_its_process_is_killed() {
    check::<Cnn>(&[2, 9], 20);
}

#[test]
fn transformer_trains_on_when_its_process_is_killed() {
    check::<Transformer>(&[5], 20);
}

#[test]
fn session_shares_its_uploads_again_when_its_process_is_killed() {
    let cluster = Cluster::start(&["flex*2"]);
    let first = lease(&cluster);
    let device = &first.devices()[0];
    let upload = |value: f32, device: &Device| {
        data::from_data::<1, Float>(TensorData::new(vec![value; 1 << 18], [1 << 18]), device)
    };
    let kept = upload(1.0, device);
    first.share_uploads().unwrap();
    wait_for_snapshot(&cluster);
    kill_process(&cluster);
    // The new process does not know what the other one has shared.
    let later = upload(2.0, device);
    first.share_uploads().unwrap();
    assert_eq!((kept + later).mean().into_scalar::<f32>(), 3.0);
    let second = lease(&cluster);
    for value in [1.0, 2.0] {
        let uploaded = upload(value, &second.devices()[0]);
        assert_eq!(uploaded.mean().into_scalar::<f32>(), value);
    }
    assert_eq!(second.traffic().tensor_bytes_up, 0);
    let log = worker(&cluster).log();
    assert!(
        log.contains("the lease goes on in another process"),
        "{log}"
    );
}

#[test]
fn snapshots_stay_if_the_keeper_replies_to_the_process_that_has_died() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let faults = FaultSwitch::default();
    let options = Options {
        faults: Some(faults.clone()),
    };
    let pool = cluster.pool_with("", options);
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let mut counter = Tensor::<1>::zeros([1 << 10], &lease.devices()[0]);
    let mut count = 0.0;
    assert_eq!(counter.clone().mean().into_scalar::<f32>(), count);
    wait_for_keeper(&Administrator::of(&cluster));
    let source = cluster.worker_of_lease().unwrap();
    let (source, keeper) = (&cluster.workers[source], &cluster.workers[1 - source]);
    keeper.signal("STOP");
    cluster.wait("a snapshot that the keeper lacks", || {
        counter = counter.clone() + 1.0;
        count += 1.0;
        assert_eq!(counter.clone().mean().into_scalar::<f32>(), count);
        source.snapshots_bytes().len() == 2
    });
    // The client must not come back before the keeper has replied.
    faults.half_open();
    kill_process_at(source);
    keeper.signal("CONT");
    cluster.wait("the snapshot at the keeper", || {
        keeper.snapshots_bytes().len() == 2
    });
    faults.heal();
    let counted = counter.mean().into_scalar::<f32>();
    assert_eq!(counted, count, "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

/// Uploads, draws and reads large tensors, which cross on the track for bulk bytes, and calls
/// `between` with the number of each round. Returns what was read.
fn large_tensors(
    device: &Device,
    rounds: usize,
    mut between: impl FnMut(usize),
) -> Vec<TensorData> {
    const SHAPE: [usize; 2] = [256, 300];
    device.seed(42);
    let mut sum = Tensor::<2>::zeros(SHAPE, device);
    let mut read = Vec::new();
    for round in 0..rounds {
        let values = (0..SHAPE[0] * SHAPE[1]).map(|i| ((i * 31 + round * 17) % 251) as f32);
        let uploaded = TensorData::new(values.collect::<Vec<f32>>(), SHAPE);
        let uploaded = Tensor::<2>::from_data(uploaded, device);
        let random = Tensor::<2>::random(SHAPE, Distribution::Default, device);
        // A view that outlives its tensor.
        sum = (sum + uploaded * random)
            .transpose()
            .mul_scalar(0.5)
            .transpose();
        between(round);
        read.push(sum.clone().into_data());
    }
    read
}

#[test]
fn large_tensors_and_random_numbers_are_the_same() {
    const ROUNDS: usize = 40;
    let cluster = Cluster::start(&["flex*2"]);
    let undisturbed = {
        let lease = lease(&cluster);
        large_tensors(&lease.devices()[0], ROUNDS, |_| {})
    };
    let disturbed = lease(&cluster);
    let ours = large_tensors(&disturbed.devices()[0], ROUNDS, |round| {
        if round % 13 == 5 {
            wait_for_snapshot(&cluster);
            kill_process(&cluster);
        }
    });
    assert!(ours == undisturbed, "{}", worker(&cluster).log());
}

/// Bytes of the tensor that does not change.
const CONSTANT_BYTES: usize = 8 << 20;

/// Returns whether two workers have one copy each of the tensor that does not change, and a snapshot of the same size
/// beside it: what is on its way to a worker is smaller.
fn have_constant_once(running: &Process, other: &Process) -> bool {
    let sizes_of = |worker: &Process| -> (Vec<u64>, Vec<u64>) {
        let sizes = worker.snapshots_bytes().into_iter();
        sizes.partition(|size| *size >= CONSTANT_BYTES as u64)
    };
    let (constant, snapshots) = sizes_of(running);
    let (copy, copies) = sizes_of(other);
    let has_copy = copies.iter().any(|it| *it > 0 && snapshots.contains(it));
    constant.len() == 1 && copy == constant && has_copy
}

/// Changes a small tensor by parts of a large one that stays, until `between`, which gets the number of
/// each round, returns `false`. Returns what was read, and the large tensor.
fn with_constant(
    device: &Device,
    mut between: impl FnMut(usize) -> bool,
) -> (Vec<TensorData>, TensorData) {
    let elements = CONSTANT_BYTES / size_of::<f32>();
    let constant = Tensor::<1, Int>::arange(0..elements as i64, device).float();
    let mut sum = Tensor::<1>::zeros([64], device);
    let mut read = Vec::new();
    while between(read.len()) {
        let start = read.len() * 64 % elements;
        sum = sum.mul_scalar(0.5) + constant.clone().narrow(0, start, 64);
        read.push(sum.clone().into_data());
    }
    (read, constant.into_data())
}

/// The process of a lease dies, and then its worker, and then the next one.
#[test]
fn what_does_not_change_is_kept_once_and_restored() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let mut losses = 0;
    let ours = with_constant(&lease.devices()[0], |_| {
        sleep(Duration::from_millis(20));
        let running = cluster.worker_of_lease();
        let are_kept = |running: usize| {
            let mut others = (0..).zip(&cluster.workers).filter(|it| it.0 != running);
            others.any(|(_, other)| have_constant_once(&cluster.workers[running], other))
        };
        if let Some(running) = running.filter(|it| are_kept(*it)) {
            match losses {
                0 => kill_process_at(&cluster.workers[running]),
                _ => {
                    cluster.workers[running].kill();
                    cluster.add_worker("flex");
                }
            }
            losses += 1;
        }
        losses < 3
    });
    let rounds = ours.0.len();
    let undisturbed = with_constant(&Device::flex(), |round| round < rounds);
    assert!(ours == undisturbed, "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

#[test]
fn training_goes_on_from_later_marks() {
    // Longer than the time between two marks.
    let until = Instant::now() + Duration::from_secs(7);
    let cluster = Cluster::start(&["flex"]);
    let lease = lease(&cluster);
    let steps = 280;
    let ours = losses::<Mlp>(&lease.devices()[0], steps, |step| {
        if step % 40 == 39 && Instant::now() < until {
            kill_process(&cluster);
        }
        sleep(Duration::from_millis(25));
    });
    let undisturbed = losses::<Mlp>(&Device::flex(), steps, |_| {}).unwrap();
    assert_eq!(ours.unwrap(), undisturbed, "{}", worker(&cluster).log());
    let log = worker(&cluster).log();
    let marks: Vec<u64> = log
        .lines()
        .filter_map(|line| {
            line.split_once("goes on in another process")?
                .1
                .split_once("mark=")
        })
        .filter_map(|(_, rest)| rest.split_whitespace().next()?.parse().ok())
        .collect();
    assert!(marks.iter().any(|mark| *mark > 1), "{marks:?}\n{log}");
}

#[test]
fn lease_that_is_not_durable_ends_with_its_process() {
    let cluster = Cluster::start(&["flex"]);
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let lease = cluster.pool().lease(request).unwrap();
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), 4.0);
    assert_eq!(worker(&cluster).snapshots_bytes(), [0; 0]);
    kill_process(&cluster);
    let error = ones.sum().try_into_data().unwrap_err().to_string();
    assert!(error.contains("SIGKILL"), "{error}");
}
