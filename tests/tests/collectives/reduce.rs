//! All-reduces and transfers that programs request between devices of a lease, on one
//! worker and on several.

use burn::tensor::{
    Device, Distribution, Tensor, TensorData, Tolerance,
    distributed::{ReduceOperation, all_reduce},
};
use tensord_client::{Lease, LeaseRequest, data};
use tensord_testkit::cluster::Cluster;

/// Starts a cluster of workers with these devices, and leases all devices.
fn lease(workers: &[&str], devices: u32) -> (Cluster, Lease) {
    let cluster = Cluster::start(workers);
    let lease = cluster
        .pool()
        .lease(LeaseRequest::devices(devices))
        .unwrap();
    (cluster, lease)
}

/// All-reduces one tensor of each device and reads the results.
fn reduced<const D: usize>(
    tensors: Vec<Tensor<D>>,
    operation: ReduceOperation,
    devices: &[Device],
) -> Vec<TensorData> {
    let reduced = tensors.into_iter();
    let reduced = reduced.map(|t| all_reduce(t, operation, devices.to_vec()).resolve());
    // All all-reduces are requested before the first result is awaited.
    let reduced: Vec<Tensor<D>> = reduced.collect();
    let read = reduced.into_iter().map(|t| t.try_into_data().unwrap());
    read.collect()
}

#[test]
fn sums_and_means_do_not_depend_on_placement() {
    for workers in [
        &["flex*4"][..],
        &["flex*2", "flex*2"],
        &["flex", "flex*3"],
        &["flex"; 4],
    ] {
        let (_cluster, lease) = lease(workers, 4);
        let devices = lease.devices();
        let values: Vec<Tensor<2>> = devices
            .iter()
            .map(|d| Tensor::random([300, 70], Distribution::Default, d))
            .collect();
        let inputs: Vec<Vec<f32>> = values
            .iter()
            .map(|t| t.clone().into_data().try_to_vec().unwrap())
            .collect();
        for operation in [ReduceOperation::Sum, ReduceOperation::Mean] {
            let results = reduced(values.clone(), operation, devices);
            let divisor = match operation {
                ReduceOperation::Sum => 1.0,
                ReduceOperation::Mean => 4.0,
            };
            let expected: Vec<f32> = (0..300 * 70)
                .map(|i| inputs.iter().map(|v| f64::from(v[i])).sum::<f64>() / divisor)
                .map(|sum| sum as f32)
                .collect();
            let expected = TensorData::new(expected, [300, 70]);
            results[0].assert_approx_eq::<f32>(&expected, Tolerance::relative(1e-5));
            for result in &results {
                assert_eq!(result.bytes(), results[0].bytes(), "{workers:?}");
            }
        }
    }
}

#[test]
fn many_small_all_reduces_in_concurrent_groups() {
    let (_cluster, lease) = lease(&["flex", "flex", "flex*2"], 4);
    let devices = lease.devices();
    let groups: [&[usize]; 4] = [&[0, 1, 2, 3], &[0, 1], &[2, 3], &[1, 3]];
    let mut totals: Vec<Tensor<1>> = devices.iter().map(|d| Tensor::zeros([3], d)).collect();
    let mut expected = [0.0f32; 4];
    for round in 0..50 {
        for group in groups {
            let members: Vec<Device> = group.iter().map(|at| devices[*at].clone()).collect();
            for rank in group {
                let mine = Tensor::<1>::full([3], (rank + round) as f32, &devices[*rank]);
                let sum = all_reduce(mine, ReduceOperation::Sum, members.clone()).resolve();
                totals[*rank] = totals[*rank].clone() + sum;
                expected[*rank] += group.iter().map(|r| (r + round) as f32).sum::<f32>();
            }
        }
    }
    for (total, expected) in totals.into_iter().zip(expected) {
        assert_eq!(
            total.into_data().try_to_vec::<f32>().unwrap(),
            [expected; 3]
        );
    }
}

#[test]
fn ten_thousand_all_reduces_in_sequence() {
    let (_cluster, lease) = lease(&["flex", "flex"], 2);
    let devices = lease.devices();
    // Each all-reduce needs the result of the previous one, on either rank: first the sum
    // of both values, then always the mean of twice the same value.
    let mut values: Vec<Tensor<1>> = vec![
        Tensor::full([5], 3.0, &devices[0]),
        Tensor::full([5], 4.0, &devices[1]),
    ];
    for step in 0..10_000 {
        values = values
            .into_iter()
            .map(|value| {
                let sum = all_reduce(value, ReduceOperation::Sum, devices.to_vec()).resolve();
                if step % 2 == 0 { sum - 3.5 } else { sum / 2.0 }
            })
            .collect();
    }
    // 7 - 3.5 = 3.5, (3.5 + 3.5) / 2 = 3.5, and so on.
    for value in values {
        assert_eq!(value.into_data().try_to_vec::<f32>().unwrap(), [3.5; 5]);
    }
}

#[test]
fn eight_groups_at_once() {
    let (_cluster, lease) = lease(&["flex*2", "flex", "flex"], 4);
    let devices = lease.devices();
    let groups: [&[usize]; 8] = [
        &[0, 1, 2, 3],
        &[0, 1],
        &[0, 2],
        &[0, 3],
        &[1, 2, 3],
        &[0, 2, 3],
        &[1, 3],
        &[2, 3],
    ];
    std::thread::scope(|scope| {
        for (number, group) in groups.into_iter().enumerate() {
            for rank in group {
                scope.spawn(move || {
                    let members: Vec<Device> = group.iter().map(|r| devices[*r].clone()).collect();
                    let size = [1 + 700 * number];
                    let mut total = Tensor::<1>::zeros(size, &devices[*rank]);
                    let mut expected = 0.0f32;
                    for round in 0..40 {
                        let value = (number * 100 + round * 10 + rank) as f32;
                        let mine = Tensor::<1>::full(size, value, &devices[*rank]);
                        let sum = all_reduce(mine, ReduceOperation::Sum, members.clone());
                        total = total + sum.resolve();
                        let of = |r: &usize| (number * 100 + round * 10 + r) as f32;
                        expected += group.iter().map(of).sum::<f32>();
                    }
                    let total: Vec<f32> = total.into_data().try_to_vec().unwrap();
                    assert!(total.iter().all(|v| *v == expected), "group {number}");
                });
            }
        }
    });
}

#[test]
fn rank_with_a_finished_thread_does_not_block_others() {
    let (_cluster, lease) = lease(&["flex", "flex"], 2);
    let [first, second] = lease.devices() else {
        panic!("two devices were leased");
    };
    let devices = lease.devices().to_vec();
    let one = Tensor::<1>::full([2], 1.0, first);
    let sum = all_reduce(one, ReduceOperation::Sum, devices.clone()).resolve();
    let second = second.clone();
    let other = std::thread::spawn(move || {
        // One late op, and no later op that would flush it.
        std::thread::sleep(std::time::Duration::from_millis(200));
        let two = Tensor::<1>::full([2], 2.0, &second);
        drop(all_reduce(two, ReduceOperation::Sum, devices).resolve());
    });
    assert_eq!(sum.into_data().try_to_vec::<f32>().unwrap(), [3.0, 3.0]);
    other.join().unwrap();
}

#[test]
fn tensor_moves_between_devices_without_the_client() {
    for workers in [&["flex*2"][..], &["flex", "flex"]] {
        let (_cluster, lease) = lease(workers, 2);
        let [first, second] = lease.devices() else {
            panic!("two devices were leased");
        };
        let here = Tensor::<2>::random([1024, 2048], Distribution::Default, first);
        first.sync().unwrap();
        let before = lease.traffic();
        let there = here.clone().to_device(second);
        let doubled = there.clone() * 2.0;
        second.sync().unwrap();
        let after = lease.traffic();
        let bytes = after.bytes_up + after.bytes_down - before.bytes_up - before.bytes_down;
        assert!(bytes < 10 << 10, "{bytes} bytes went through the client");
        let here = data::into_data(here).unwrap();
        assert_eq!(here.bytes(), data::into_data(there).unwrap().bytes());
        let halved = (doubled / 2.0).to_device(first);
        assert_eq!(here.bytes(), data::into_data(halved).unwrap().bytes());
    }
}

#[test]
fn a_poisoned_tensor_moves_with_its_cause() {
    let (_cluster, lease) = lease(&["flex", "flex"], 2);
    let [first, second] = lease.devices() else {
        panic!("two devices were leased");
    };
    let poisoned = Tensor::<1>::zeros([1usize << 45], first).sum();
    let moved = poisoned.to_device(second);
    let error = moved.try_into_data().unwrap_err().to_string();
    assert!(error.contains("needs more memory"), "{error}");
    let worker = &lease.descriptions()[0].worker;
    assert!(error.contains(worker), "{error}");
}
