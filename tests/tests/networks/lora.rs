//! Fine-tuning by low-rank adapters (LoRA) on weights that stay as they are.

use burn::{
    module::{Lora, Module},
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer},
    tensor::{Device, Tensor, Tolerance, activation::relu},
};
use tensord_client::data;
use tensord_testkit::{
    digits::{self, Digit},
    replicas::bits,
    training::with_fixed_weights,
};

use super::{on_both, read};

const BATCH: usize = 32;
const STEPS: usize = 40;

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        self.output
            .forward(relu(self.hidden.forward(images.flatten(1, 2))))
    }

    /// The bits of the weights without their adapters, and of the biases.
    fn base(&self) -> Vec<u32> {
        let layers = [&self.hidden, &self.output];
        let tensors = layers.map(|layer| {
            let bias = layer.bias.as_ref().expect("it has a bias").base();
            [layer.weight.base().flatten(0, 1), bias]
        });
        let values = tensors.into_iter().flatten().flat_map(|tensor| {
            let values = data::into_data(tensor).unwrap();
            values.try_to_vec::<f32>().unwrap()
        });
        values.map(f32::to_bits).collect()
    }
}

/// Trains on the digits as they are, or on their negatives. Returns the losses.
fn train(model: &mut Mlp, optimizer: &mut ModuleOptimizer, negative: bool) -> Vec<f32> {
    let device = &model.hidden.weight.device();
    let (train, _) = digits::split();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let step = |digits: &[Digit]| {
        let (images, labels) = digits::batch(digits, device);
        let images = if negative { 1.0 - images } else { images };
        let loss = cross_entropy.forward(model.forward(images), labels);
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        *model = optimizer.step(1e-2, model.clone(), gradients);
        read(loss)
    };
    train.chunks(BATCH).take(STEPS).map(step).collect()
}

/// Returns a model that was trained on local Flex, with new adapters. Their random factors
/// are drawn here, once for both runs.
fn adapted() -> Mlp {
    let device = Device::flex().autodiff();
    let model = Mlp {
        hidden: LinearConfig::new(64, 32).init(&device),
        output: LinearConfig::new(32, 10).init(&device),
    };
    let mut model = with_fixed_weights(model, &device);
    train(&mut model, &mut AdamConfig::new().init(), false);
    model.apply_lora(Lora::new(4, 8.0))
}

/// Trains the adapters of `model` on negatives, and checks that nothing else changes.
/// Returns the losses.
fn fine_tune(model: Mlp, device: &Device) -> Vec<f32> {
    let mut model = model.fork(device);
    let (base, before) = (model.base(), bits(&model));
    let losses = train(&mut model, &mut AdamConfig::new().init(), true);
    assert!(model.base() == base, "frozen weights changed");
    assert!(bits(&model) != before, "the adapters did not change");

    // Merged into the weights, the adapters compute the same.
    let (_, test) = digits::split();
    let (images, _) = digits::batch(&test, device);
    let images = images.without_autodiff();
    let adapted = model.valid();
    let logits = |model: &Mlp| data::into_data(model.forward(images.clone())).unwrap();
    let expected = logits(&adapted);
    let merged = adapted.materialize();
    assert!(merged.hidden.weight.adapter().is_none());
    logits(&merged).assert_approx_eq::<f32>(&expected, Tolerance::default());
    losses
}

#[test]
fn lora_trains_the_adapters_alone() {
    let model = adapted();
    let losses = on_both(|device| fine_tune(model.clone(), device));
    let (first, last) = (losses[0], losses[STEPS - 1]);
    assert!(last < 0.5 * first, "the adapters learn little: {losses:?}");
}

#[test]
fn a_module_without_grad_gets_no_gradients() {
    on_both(|device| {
        let model = adapted().materialize().fork(device).unfreeze();
        let (train, _) = digits::split();
        let (images, _) = digits::batch(&train[..BATCH], device);
        let count = |model: &Mlp| {
            let loss = model.forward(images.clone()).square().mean();
            GradientsParams::from_grads(loss.backward(), model).len() as f32
        };
        let all = count(&model);
        let rest = count(&Mlp {
            hidden: model.hidden.no_grad(),
            output: model.output,
        });
        assert_eq!([all, rest], [4.0, 2.0]);
        vec![all, rest]
    });
}
