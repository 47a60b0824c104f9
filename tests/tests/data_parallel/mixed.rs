//! Devices of several kinds in one training.

use burn::{
    module::Module as _,
    tensor::{
        Tensor,
        distributed::{ReduceOperation, all_reduce},
    },
};
use tensord_client::LeaseRequest;
use tensord_testkit::{
    host,
    models::{Classifier, Mlp, ModelSize},
    replicas::{replicas, training_lock},
};

#[test]
fn devices_of_two_kinds_train_together() {
    let _alone = training_lock();
    for kind in host::kinds() {
        let mut cluster = host::cluster(&[]);
        // A rank waits for the other one while that compiles its kernels.
        let seconds = host::COMPILE_DEADLINE.as_secs().to_string();
        for devices in ["flex", kind] {
            cluster.add_worker_with(devices, &["--collective-timeout", &seconds]);
        }
        cluster.wait_for_workers(2);
        let lease = cluster.pool().lease(LeaseRequest::devices(2)).unwrap();
        let devices = lease.devices();

        // Both devices must get the same bits of sums that depend on the order of addition.
        let values: Vec<f32> = (0..5000).map(|i| 1e6 / (i as f32 + 0.7)).collect();
        let reduced = devices.iter().zip([1.0, 1.3]).map(|(device, factor)| {
            let scaled = Tensor::<1>::from_floats(&values[..], device) * factor;
            all_reduce(scaled, ReduceOperation::Mean, devices.to_vec()).resolve()
        });
        let reduced: Vec<Tensor<1>> = reduced.collect();
        let bits = reduced.into_iter().map(|tensor| {
            let values = tensor.into_data().try_to_vec::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        let bits: Vec<_> = bits.collect();
        assert!(bits[0] == bits[1], "{kind}");

        // The devices' own arithmetic may differ on the same gradients.
        let first = devices[0].clone().autodiff();
        first.seed(42);
        let model = Mlp::new(&ModelSize::SMALL, &first).fork(&first);
        let seen = replicas(&model, devices, 1);
        let weights = |rank: usize| {
            seen[rank].weights[0]
                .iter()
                .map(|bits| f32::from_bits(*bits))
        };
        for (i, (ours, theirs)) in weights(0).zip(weights(1)).enumerate() {
            let apart = (ours - theirs).abs();
            assert!(
                apart <= 1e-4 * ours.abs().max(theirs.abs()).max(1e-3),
                "{kind}, weight {i}: {ours} and {theirs}"
            );
        }
    }
}
