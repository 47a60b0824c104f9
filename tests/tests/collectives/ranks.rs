//! The effect on a group of devices when one member does not take part.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use burn::tensor::{
    Device, Tensor, TensorData,
    distributed::{ReduceOperation, all_reduce},
};
use tensord_client::{Durability, Lease, LeaseRequest, Pool, data};
use tensord_testkit::cluster::Cluster;

/// The workers' `--collective-timeout`.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum delay after `TIMEOUT` until a program gets the error.
const SLACK: Duration = Duration::from_secs(2);

fn start(workers: &[&str]) -> Cluster {
    let mut cluster = Cluster::start(&[]);
    let seconds = TIMEOUT.as_secs().to_string();
    for devices in workers {
        cluster.add_worker_with(devices, &["--collective-timeout", &seconds]);
    }
    cluster.wait_for_workers(workers.len());
    cluster
}

/// Leases three devices on two workers.
fn lease_three() -> (Cluster, Lease) {
    let cluster = start(&["flex*2", "flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(3)).unwrap();
    (cluster, lease)
}

fn values(tensor: Tensor<1>) -> Result<Vec<f32>, String> {
    let data = data::into_data(tensor).map_err(|e| e.to_string())?;
    data.try_to_vec().map_err(|e| e.to_string())
}

/// All-reduces a tensor of `length` elements, each equal to `rank`, among `group`, and
/// returns the sum.
fn sum_of(
    length: usize,
    rank: usize,
    device: &Device,
    group: &[Device],
) -> Result<Vec<f32>, String> {
    let tensor = Tensor::full([length], rank as f32, device);
    values(all_reduce(tensor, ReduceOperation::Sum, group.to_vec()).resolve())
}

/// Runs `work` for all devices at the same time.
fn on_each<T: Send>(devices: &[Device], work: impl Fn(usize, &Device) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads = devices.iter().enumerate();
        let threads: Vec<_> = threads
            .map(|(rank, device)| scope.spawn(move || work(rank, device)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[track_caller]
fn assert_names_all(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

/// Returns live bytes and sessions of all workers, as last reported to the scheduler.
fn usage(pool: &Pool) -> (u64, u32) {
    let status = pool.status().unwrap();
    let devices = status.workers.iter().flat_map(|worker| &worker.devices);
    devices.fold((0, 0), |(bytes, sessions), device| {
        (bytes + device.live_bytes, sessions + device.sessions)
    })
}

#[test]
fn every_rank_gets_the_sum_or_the_mean_of_all() {
    let (_cluster, lease) = lease_three();
    let group = lease.devices();
    // Fewer elements than ranks, more than a frame can hold, and sizes between.
    for length in [1, 2, 3, 1000, 3_000_001] {
        let reduced = on_each(group, |rank, device| {
            let content: Vec<f32> = (0..length).map(|i| (i % 100 + rank * 10) as f32).collect();
            let tensor: Tensor<1> = data::from_data(TensorData::new(content, [length]), device);
            let reduce = |op| values(all_reduce(tensor.clone(), op, group.to_vec()).resolve());
            [ReduceOperation::Sum, ReduceOperation::Mean].map(|op| reduce(op).unwrap())
        });
        for [sum, mean] in reduced {
            assert_eq!((sum.len(), mean.len()), (length, length));
            for i in 0..length {
                let expected = (3 * (i % 100) + 30) as f32;
                assert_eq!(
                    (sum[i], mean[i]),
                    (expected, expected / 3.0),
                    "{i} of {length}"
                );
            }
        }
    }
}

#[test]
fn missing_rank_is_named_by_all_others() {
    let (_cluster, lease) = lease_three();
    let (group, last) = (lease.devices(), &lease.descriptions()[2]);
    let errors = on_each(&group[..2], |rank, device| {
        let begun = Instant::now();
        (sum_of(4, rank, device, group).unwrap_err(), begun.elapsed())
    });
    for (error, after) in errors {
        assert_names_all(&error, &["rank 2", &last.worker]);
        assert!(after >= TIMEOUT && after <= TIMEOUT + SLACK, "{after:?}");
    }
    // Ops outside the group go on, on the same devices.
    for device in group {
        assert_eq!(values(Tensor::ones([2], device) * 2.0).unwrap(), [2.0; 2]);
    }
}

#[test]
fn shape_mismatch_fails_all_ranks_and_sessions_continue() {
    let (_cluster, lease) = lease_three();
    let group = lease.devices();
    for _ in 0..2 {
        let errors = on_each(group, |rank, device| {
            let length = [4, 4, 5][rank];
            sum_of(length, rank, device, group).unwrap_err()
        });
        for error in errors {
            assert_names_all(&error, &["rank 2", "[4]", "[5]"]);
            assert!(
                error.contains("rank 0") || error.contains("rank 1"),
                "{error}"
            );
        }
        let sums = on_each(group, |rank, device| sum_of(4, rank, device, group));
        assert_eq!(sums, vec![Ok(vec![3.0; 4]); 3]);
    }
}

#[test]
fn duplicate_device_in_a_group_fails_every_rank() {
    let (_cluster, lease) = lease_three();
    let devices = lease.devices();
    let twice = [&devices[..2], &devices[1..2]].concat();
    let errors = on_each(&devices[..2], |rank, device| {
        sum_of(4, rank, device, &twice).unwrap_err()
    });
    for error in errors {
        assert_names_all(&error, &["ranks 1 and 2", &lease.descriptions()[1].worker]);
    }
    let sums = on_each(devices, |rank, device| sum_of(4, rank, device, devices));
    assert_eq!(sums, vec![Ok(vec![3.0; 4]); 3]);
}

#[test]
fn poisoned_input_of_one_rank_faults_all_with_its_cause() {
    let (_cluster, lease) = lease_three();
    let group = lease.devices();
    let errors = on_each(group, |rank, device| {
        let tensor = Tensor::<1>::ones([4], device);
        let tensor = match rank {
            // An index out of bounds.
            1 => tensor.select(0, Tensor::from_data([9, 9, 9, 9], device)),
            _ => tensor,
        };
        values(all_reduce(tensor, ReduceOperation::Sum, group.to_vec()).resolve()).unwrap_err()
    });
    for error in errors {
        assert_names_all(&error, &["Select", &lease.descriptions()[1].worker]);
    }
    let sums = on_each(group, |rank, device| sum_of(4, rank, device, group));
    assert_eq!(sums, vec![Ok(vec![3.0; 4]); 3]);
}

/// Runs all-reduces of `length` elements in a loop and, after `some` rounds, makes one
/// worker fail by `fail_worker`. Checks that the other ranks name the worker in time.
fn check_lost_worker(length: usize, some: usize, fail_worker: fn(&mut Cluster, usize)) {
    let mut cluster = start(&["flex", "flex", "flex"]);
    let pool = cluster.pool();
    let before = usage(&pool);
    // A durable lease would wait for another worker.
    let request = LeaseRequest::devices(3).durable(Durability::Off);
    let lease = pool.lease(request).unwrap();
    let lost = lease.descriptions()[2].worker.clone();
    let at = lost.strip_prefix("worker-").unwrap().parse().unwrap();
    let (group, rounds) = (lease.devices(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = group
            .iter()
            .enumerate()
            .map(|(rank, device)| {
                let rounds = &rounds;
                scope.spawn(move || {
                    loop {
                        match sum_of(length, rank, device, group) {
                            Ok(_) => rounds.fetch_add(1, Ordering::Relaxed),
                            Err(error) => return (error, Instant::now()),
                        };
                    }
                })
            })
            .collect();
        cluster.wait("some rounds", || rounds.load(Ordering::Relaxed) >= some);
        let fell = Instant::now();
        fail_worker(&mut cluster, at);
        for (rank, thread) in ranks.into_iter().enumerate() {
            let (error, noticed) = thread.join().unwrap();
            assert_names_all(&error, &[&lost]);
            let after = noticed - fell;
            // The lost worker's own session notices later than its peers.
            let bound = [TIMEOUT + SLACK, TIMEOUT + SLACK, Duration::from_secs(10)][rank];
            assert!(after <= bound, "rank {rank}, after {after:?}: {error}");
        }
    });
    drop(lease);
    // The other two workers are free for other leases and hold no memory.
    let two = LeaseRequest::devices(2).timeout(Duration::from_secs(30));
    let lease = pool.lease(two).unwrap();
    let group = lease.devices();
    let left: BTreeSet<_> = lease.descriptions().into_iter().map(|d| d.worker).collect();
    assert!(!left.contains(&lost), "{left:?}");
    let sums = on_each(group, |rank, device| sum_of(4, rank, device, group));
    assert_eq!(sums, vec![Ok(vec![1.0; 4]); 2]);
    drop(lease);
    cluster.wait("the memory to be back", || usage(&pool) == before);
}

#[test]
fn killed_worker_is_named_by_other_ranks() {
    check_lost_worker(1000, 31, |cluster, at| cluster.workers[at].kill());
}

#[test]
fn stopped_worker_is_named_by_other_ranks() {
    check_lost_worker(1000, 31, |cluster, at| {
        cluster.workers[at].signal_all("STOP")
    });
}

#[test]
fn stopped_worker_in_a_ring_is_named() {
    // Large enough that the first round measures the links and later rounds use a ring.
    check_lost_worker(6 << 20, 9, |cluster, at| {
        cluster.workers[at].signal_all("STOP")
    });
}

#[test]
fn tensor_moves_between_devices_without_the_program() {
    const ELEMENTS: usize = 16 << 20;
    let (_cluster, lease) = lease_three();
    let content: Vec<f32> = (0..ELEMENTS as u32).map(f32::from_bits).collect();
    let same = |tensor: Tensor<1>| {
        let read = data::into_data(tensor)
            .unwrap()
            .try_to_vec::<f32>()
            .unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        bits(&read) == bits(&content)
    };
    let mut devices = lease.devices().iter();
    let first = devices.next().unwrap();
    let mut tensor: Tensor<1> =
        data::from_data(TensorData::new(content.clone(), [ELEMENTS]), first);
    first.sync().unwrap();
    // To another device of the worker, and to another worker.
    for device in devices {
        let before = lease.traffic();
        tensor = tensor.to_device(device);
        device.sync().unwrap();
        let after = lease.traffic();
        let bytes = after.bytes_up - before.bytes_up + after.bytes_down - before.bytes_down;
        assert!(bytes < 10 << 10, "{bytes} bytes went by way of the program");
        assert!(same(tensor.clone()), "other bits on {device:?}");
    }
}

#[test]
fn poisoned_tensor_keeps_its_fault_on_another_device() {
    let (_cluster, lease) = lease_three();
    for other in &lease.devices()[1..] {
        let tensor = Tensor::<1>::ones([4], &lease.devices()[0]);
        let bad = tensor.select(0, Tensor::from_data([9], &lease.devices()[0]));
        let error = values(bad.to_device(other) + 1.0).unwrap_err();
        assert_names_all(&error, &["Select", &lease.descriptions()[0].worker]);
        assert_eq!(values(Tensor::ones([2], other)).unwrap(), [1.0; 2]);
    }
}
