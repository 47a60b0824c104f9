//! A program gives the same bits whenever it runs, in whatever process, and with any number of
//! threads. So a session that was lost can be computed again.

use burn::tensor::{Device, Int, Tensor, activation, module, ops::ConvOptions};
use tensord_client::LeaseRequest;
use tensord_testkit::{
    cluster::Cluster,
    models::{Cnn, Mlp, Transformer},
    training::losses,
};

/// Numbers of the sizes that they have in training, the same on each call.
fn numbers<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let count = shape.iter().product::<usize>() as i64;
    let flat = Tensor::<1, Int>::arange(0..count, device).float();
    (flat * 0.618).sin().reshape(shape)
}

/// Ops that share their work among threads, and the bits of what they return.
fn large_ops(device: &Device) -> Vec<Vec<u32>> {
    // More than Flex sums on one thread.
    let many = || numbers([2100, 2100], device);
    let [left, right] = [[600, 700], [700, 500]].map(|shape| numbers(shape, device));
    let batches = || numbers([6, 128, 96], device);
    let images = numbers([4, 16, 40, 40], device);
    let weight = numbers([24, 16, 3, 3], device);
    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let rows = Tensor::<1, Int>::arange(0..4000, device).remainder_scalar(50);
    let bits = |data: burn::tensor::TensorData| {
        let values = data.try_to_vec::<f32>().unwrap();
        values.iter().map(|value| value.to_bits()).collect()
    };
    vec![
        bits(many().sum().into_data()),
        bits(many().transpose().mean().into_data()),
        bits(many().sum_dim(0).into_data()),
        bits(left.matmul(right).into_data()),
        bits(batches().matmul(batches().swap_dims(1, 2)).into_data()),
        bits(module::conv2d(images, weight, None, options).into_data()),
        bits(activation::softmax(many(), 1).sum_dim(0).into_data()),
        bits(many().cumsum(0).sum_dim(1).into_data()),
        bits(
            Tensor::<2>::zeros([50, 64], device)
                .select_assign(
                    0,
                    rows,
                    numbers([4000, 64], device),
                    burn::tensor::IndexingUpdateOp::Add,
                )
                .into_data(),
        ),
    ]
}

fn trained(device: &Device) -> Vec<Vec<u32>> {
    const STEPS: usize = 20;
    let runs = [
        losses::<Mlp>(device, STEPS, |_| {}),
        losses::<Cnn>(device, STEPS, |_| {}),
        losses::<Transformer>(device, STEPS, |_| {}),
    ];
    let bits = |losses: Vec<f32>| losses.iter().map(|loss| loss.to_bits()).collect();
    runs.into_iter()
        .map(|losses| bits(losses.unwrap()))
        .collect()
}

#[test]
fn programs_give_the_same_bits_in_each_process_and_each_time() {
    let mut cluster = Cluster::start(&[]);
    for threads in ["1", "2", "5"] {
        cluster.add_worker_in("flex", &[], &[("RAYON_NUM_THREADS", threads)]);
    }
    cluster.wait_for_workers(3);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(3)).unwrap();
    let descriptions = lease.descriptions();
    let fingerprints = descriptions
        .iter()
        .map(|device| device.fingerprint.unwrap());
    let fingerprints: Vec<_> = fingerprints.collect();
    assert!(
        fingerprints
            .iter()
            .all(|one| one.is_exact && *one == fingerprints[0])
    );
    let first = &lease.devices()[0];
    let (ops, losses) = (large_ops(first), trained(first));
    for device in lease.devices() {
        for _ in 0..2 {
            for (index, (op, expected)) in large_ops(device).iter().zip(&ops).enumerate() {
                assert_eq!(op, expected, "op {index} on {device:?}");
            }
        }
        assert_eq!(trained(device), losses, "{device:?}");
    }
}
