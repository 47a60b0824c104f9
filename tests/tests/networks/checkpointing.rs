//! Gradient checkpointing: the backward pass computes activations again instead of keeping
//! them.

use burn::{
    module::{Module, Param},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor, activation::gelu},
};
use tensord_client::{LeaseRequest, data};
use tensord_testkit::{cluster::Cluster, replicas::bits};

use super::{numbers, on_both, read};

const LAYERS: usize = 8;
const WIDTH: usize = 32;
/// Rows for which an activation takes 1 MiB.
const ROWS: usize = 8192;

/// Layers of a product and of ops that are cheap to compute again.
#[derive(Module, Debug)]
struct Network {
    weights: Vec<Param<Tensor<2>>>,
}

impl Network {
    fn new(device: &Device) -> Self {
        let weight = |salt| Param::from_tensor(numbers([WIDTH, WIDTH], salt, device) * 0.4);
        Self {
            weights: (0..LAYERS).map(weight).collect(),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.weights.iter().fold(input, |x, weight| {
            let x = x.matmul(weight.val());
            (gelu(x) * 1.5).tanh().exp().sqrt() - 1.0
        })
    }
}

/// Trains for three steps on `rows` rows. Returns the losses and the weights' sums of squares.
fn train(rows: usize, device: &Device) -> Vec<f32> {
    let mut network = Network::new(device);
    let mut optimizer = SgdConfig::new().init();
    let mut results = Vec::new();
    for step in 0..3 {
        let loss = network.forward(numbers([rows, WIDTH], step, device));
        let loss = loss.square().mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &network);
        assert_eq!(gradients.len(), LAYERS);
        network = optimizer.step(0.1, network, gradients);
        results.push(read(loss));
    }
    results.extend(bits(&network).into_iter().map(f32::from_bits));
    results
}

#[test]
fn checkpointing_changes_no_bit_of_a_training() {
    let kept = on_both(|device| train(64, device));
    let computed_again = on_both(|device| {
        let device = device.clone().gradient_checkpointing();
        train(64, &device)
    });
    assert!(kept[2] < kept[0], "the network learns nothing: {kept:?}");
    assert_eq!(computed_again, kept);
}

/// Returns the gradient of the first layer for [`ROWS`] rows.
///
/// # Errors
///
/// The message of the read.
fn first_gradient(device: &Device) -> Result<Vec<f32>, String> {
    let network = Network::new(device);
    let loss = network.forward(numbers([ROWS, WIDTH], 0, device)).mean();
    let gradients = loss.backward();
    let gradient = network.weights[0].val().grad(&gradients).unwrap();
    let gradient = data::into_data(gradient).map_err(|e| e.to_string())?;
    Ok(gradient.try_to_vec().unwrap())
}

/// A backward pass that needs more memory than the device has fits with checkpointing.
#[test]
fn checkpointing_saves_memory_on_the_device() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--memory", "32MiB"]);
    cluster.wait_for_workers(1);
    let pool = cluster.pool();
    let on_device = |prepare: fn(Device) -> Device| {
        let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
        first_gradient(&prepare(lease.devices()[0].clone().autodiff()))
    };
    let refused = on_device(|device| device).unwrap_err();
    assert!(refused.contains("requested"), "{refused}");
    let gradient = on_device(Device::gradient_checkpointing);
    let expected = first_gradient(&Device::flex().autodiff());
    assert_eq!(gradient, expected);
}
