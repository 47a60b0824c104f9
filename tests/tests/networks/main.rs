//! What Burn users train beside classifiers of images, each on a leased device and on Flex in
//! this process.
//!
//! Both runs begin with the same weights and have the same numbers, so their losses must be
//! equal bit for bit: the worker executes the ops with Flex, too. Numbers that a program would
//! draw on its device come from this process instead, as a leased device draws others than
//! Flex does for the same seed.

mod checkpointing;
mod diffusion;
mod gan;
mod half_precision;
mod lora;
mod recurrent;

use burn::tensor::{Device, Tensor, TensorData};
use tensord_client::LeaseRequest;
use tensord_testkit::{cluster::Cluster, training::noise};

/// Runs `program` on a leased device and on local Flex, and checks that what it returns,
/// usually losses, has the same bits. Returns that.
fn on_both(program: impl Fn(&Device) -> Vec<f32>) -> Vec<f32> {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let ours = program(&lease.devices()[0].clone().autodiff());
    let reference = program(&Device::flex().autodiff());
    let bits = |numbers: &[f32]| numbers.iter().map(|n| n.to_bits()).collect::<Vec<_>>();
    assert!(!ours.is_empty());
    assert_eq!(bits(&ours), bits(&reference), "{ours:?} and {reference:?}");
    ours
}

/// Reads a loss.
fn read(loss: Tensor<1>) -> f32 {
    loss.try_into_scalar().unwrap()
}

/// Returns a tensor of numbers from -1 to 1 that depend on `salt` only.
fn numbers<const D: usize>(shape: [usize; D], salt: usize, device: &Device) -> Tensor<D> {
    let values = noise(shape.iter().product(), salt);
    Tensor::from_data(TensorData::new(values, shape), device)
}
