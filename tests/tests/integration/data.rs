//! Tensors from and to host memory, bypassing Burn's own encoding.

use burn::tensor::{Bool, DType, Device, Float, Int, Tensor, TensorData, s};
use tensord_client::{LeaseRequest, data};
use tensord_testkit::cluster::Cluster;

fn counted(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| i as f32).collect()
}

#[test]
fn every_kind_round_trips_as_in_burn() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let local = Device::flex();
    for device in [&lease.devices()[0], &local] {
        let floats = TensorData::new(counted(6), [2, 3]);
        let tensor: Tensor<2> = data::from_data(floats.clone(), device);
        assert_eq!(tensor.shape().as_slice(), [2, 3]);
        assert_eq!(tensor.to_data(), floats, "read by Burn");
        assert_eq!(data::into_data(tensor).unwrap(), floats, "read around it");

        // As in Burn, the default is the device's own integer type.
        let integers = TensorData::from([1i64, -2, 3]);
        let plain = Tensor::<1, Int>::from_data(integers.clone(), device);
        let tensor: Tensor<1, Int> = data::from_data(integers.clone(), device);
        assert_eq!(tensor.dtype(), plain.dtype());
        assert_eq!(data::into_data(tensor).unwrap(), plain.to_data());
        let tensor: Tensor<1, Int> = data::from_data(integers, (device, DType::I64));
        assert_eq!(tensor.dtype(), DType::I64);

        let bools = TensorData::from([true, false, true]);
        let tensor: Tensor<1, Bool> = data::from_data(bools, device);
        let flipped = data::into_data(tensor.bool_not()).unwrap();
        assert_eq!(flipped.try_to_vec::<bool>().unwrap(), [false, true, false]);

        let large = TensorData::new(counted(1 << 20), [1 << 20]);
        let tensor: Tensor<1> = data::from_data(large, device);
        let halves = data::into_data(tensor * 0.5).unwrap();
        let halves = halves.try_to_vec::<f32>().unwrap();
        assert!(halves.iter().enumerate().all(|(i, &h)| h == i as f32 * 0.5));
    }
}

#[test]
fn gradients_flow_through_staged_uploads() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone().autodiff();
    let weights = Tensor::<1>::from_data([1.0, 2.0], &device).require_grad();
    let input: Tensor<1> = data::from_data([3.0f32, 4.0], &device);
    let labels: Tensor<1, Int> = data::from_data([1, 0], &device);
    assert!(input.device().is_autodiff() && labels.device().is_autodiff());
    let loss = (weights.clone() * input).gather(0, labels).sum();
    assert_eq!(
        data::into_data(loss.clone())
            .unwrap()
            .try_to_vec::<f32>()
            .unwrap(),
        [11.0]
    );
    let gradients = loss.backward();
    let gradient = data::into_data(weights.grad(&gradients).unwrap()).unwrap();
    assert_eq!(gradient.try_to_vec::<f32>().unwrap(), [3.0, 4.0]);
}

#[test]
fn concurrent_reads_keep_their_order() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let mut sum: Tensor<1> = data::from_data([0.0f32], device);
    let mut reads = Vec::new();
    for step in 0..200 {
        sum = sum + data::from_data::<1, _>([step as f32], device);
        reads.push(data::into_data_async(sum.clone()));
    }
    let mut expected = 0.0;
    for (step, read) in reads.into_iter().enumerate() {
        expected += step as f32;
        let read = burn_std::future::block_on(read).unwrap();
        assert_eq!(read.try_to_vec::<f32>().unwrap(), [expected]);
    }
}

#[test]
fn concurrent_reads_get_their_own_values() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    // Several threads read more tensors than may wait at a time. Each tensor is changed or
    // dropped right after its read; the read must give the value at the time of the
    // request.
    let readers = (0..3).map(|reader| {
        let device = device.clone();
        std::thread::spawn(move || {
            let reads: Vec<_> = (0..400)
                .map(|n| {
                    let value = (1000 * reader + n) as f32;
                    let tensor: Tensor<1> = data::from_data([value], &device);
                    let read = data::into_data_async(tensor.clone());
                    let changed = tensor + 0.5;
                    (value, read, data::into_data_async(changed))
                })
                .collect();
            for (value, read, changed) in reads {
                let read = burn_std::future::block_on(read).unwrap();
                assert_eq!(read.try_to_vec::<f32>().unwrap(), [value]);
                let changed = burn_std::future::block_on(changed).unwrap();
                assert_eq!(changed.try_to_vec::<f32>().unwrap(), [value + 0.5]);
            }
        })
    });
    let readers: Vec<_> = readers.collect();
    readers
        .into_iter()
        .for_each(|reader| reader.join().unwrap());
}

#[test]
fn unawaited_read_is_sent_and_can_be_cancelled() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let tensor: Tensor<1> = data::from_data([1.0f32, 2.0], &device);
    let bad = tensor.clone().select(0, data::from_data([99], &device));
    drop(data::into_data_async(tensor.clone()));
    // Reads in one request, some of which fail.
    let reads = [&tensor, &bad, &tensor].map(|t| data::into_data_async(t.clone()));
    let [one, failed, two] = reads.map(burn_std::future::block_on);
    assert_eq!(one.unwrap(), two.unwrap());
    assert!(failed.unwrap_err().to_string().contains("Select"));
    // The reply arrives although nothing polls the read.
    let before = lease.traffic().tensor_bytes_down;
    let unpolled = data::into_data_async(tensor.clone());
    cluster.wait("the answer to a read", || {
        lease.traffic().tensor_bytes_down > before
    });
    drop(unpolled);
    let late = data::into_data_async(tensor.clone());
    drop(lease);
    // The read succeeds or fails at once.
    let _ = burn_std::future::block_on(late);
}

#[test]
fn failed_reads_name_the_cause() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let tensor: Tensor<1> = data::from_data([1.0f32, 2.0], &device);
    let bad = tensor.clone().select(0, data::from_data([99], &device));
    let error = data::into_data(bad).unwrap_err().to_string();
    assert!(
        error.contains("Select") && error.contains("worker-0"),
        "{error}"
    );
    assert!(data::into_data(tensor.clone()).is_ok());
    drop(lease);
    let error = data::into_data(tensor).unwrap_err().to_string();
    assert!(!error.is_empty(), "{error}");
}

#[test]
fn devices_of_a_lease_do_not_wait_for_each_other() {
    let cluster = Cluster::start(&["flex*2"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(2)).unwrap();
    // Together the uploads are large enough to be sent; one device's upload alone is not.
    let upload = || TensorData::new(counted(150_000), [150_000]);
    let begun = std::time::Instant::now();
    for _ in 0..4 {
        let tensors = lease
            .devices()
            .iter()
            .map(|d| data::from_data::<1, Float>(upload(), d));
        let reads: Vec<_> = tensors
            .map(|t| data::into_data_async(t.slice(s![1..2])))
            .collect();
        for read in reads {
            let read = burn_std::future::block_on(read).unwrap();
            assert_eq!(read.try_to_vec::<f32>().unwrap(), [1.0]);
        }
        let tensors = lease
            .devices()
            .iter()
            .map(|d| data::from_data::<1, Float>(upload(), d));
        drop(tensors.collect::<Vec<_>>());
    }
    // A check for stalled ops runs only every 5 s, so the rounds would take 20 s.
    let took = begun.elapsed().as_secs();
    assert!(took < 15, "{took} s: a device waited for another's ops");
}
