//! Optimisers: the losses and parameters of a small network over a few steps.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsAccumulator,
    GradientsParams, LBFGSConfig, LambConfig, LionConfig, ModuleOptimizer, MuonConfig,
    RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor, TensorData, activation::tanh};

use super::autodiff::{fill, parameters};
use super::case::{Case, Tolerance};
use super::data::floats;

/// Training steps: enough for every optimiser to create its state and use it.
const STEPS: usize = 3;

#[derive(Module, Debug)]
struct Network {
    inner: Linear,
    outer: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        fill(Self {
            inner: LinearConfig::new(3, 6).init(device),
            outer: LinearConfig::new(6, 2).init(device),
        })
    }

    /// Returns the loss on a batch whose data depend only on its number.
    fn loss(&self, device: &Device, batch: u32) -> Tensor<1> {
        let x = floats::<2>(device, [8, 3], batch);
        let y = floats(device, [8, 2], batch + 50);
        let predicted = self.outer.forward(tanh(self.inner.forward(x)));
        MseLoss::new().forward(predicted, y, Reduction::Mean)
    }
}

/// Returns the losses and the final parameters of a short training.
fn train(device: &Device, mut optimizer: ModuleOptimizer) -> Vec<TensorData> {
    let device = device.clone().autodiff();
    let mut network = Network::new(&device);
    let mut outputs = Vec::new();
    for _ in 0..STEPS {
        let loss = network.loss(&device, 1);
        let grads = GradientsParams::from_grads(loss.backward(), &network);
        network = optimizer.step(0.02, network, grads);
        outputs.push(loss.into_data());
    }
    outputs.extend(parameters(&network));
    outputs
}

fn trained(name: &'static str, optimizer: fn() -> ModuleOptimizer) -> Case {
    Case::approx(name, move |d| train(d, optimizer()))
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        trained("optim.sgd", || SgdConfig::new().init()),
        trained("optim.sgd/momentum_decay", || {
            let momentum = MomentumConfig::new().with_nesterov(true);
            let config = SgdConfig::new().with_momentum(Some(momentum));
            config
                .with_weight_decay(Some(WeightDecayConfig::new(0.01)))
                .init()
        }),
        trained("optim.sgd/clip_norm", || {
            let clipping = GradientClippingConfig::Norm(0.3);
            SgdConfig::new()
                .with_gradient_clipping(Some(clipping))
                .init()
        }),
        trained("optim.adam", || AdamConfig::new().init()),
        trained("optim.adam/amsgrad_clip_value", || {
            let clipping = GradientClippingConfig::Value(0.05);
            AdamConfig::new()
                .with_amsgrad(true)
                .with_grad_clipping(Some(clipping))
                .init()
        }),
        trained("optim.adam_w", || {
            AdamWConfig::new().with_weight_decay(0.1).init()
        }),
        trained("optim.adam_w/cautious", || {
            AdamWConfig::new().with_cautious_weight_decay(true).init()
        }),
        trained("optim.ada_grad", || {
            AdaGradConfig::new().with_lr_decay(0.1).init()
        }),
        trained("optim.rms_prop", || RmsPropConfig::new().init()),
        trained("optim.rms_prop/centered", || {
            RmsPropConfig::new().with_centered(true).init()
        }),
        trained("optim.adan", || AdanConfig::new().init()),
        trained("optim.lamb", || {
            LambConfig::new().with_weight_decay(0.01).init()
        }),
        trained("optim.lion", || LionConfig::new().init()),
        trained("optim.adafactor", || AdafactorConfig::new().init()),
        Case::approx("optim.muon", muon).within(Tolerance::Relative(0.02)),
        Case::approx("optim.lbfgs", lbfgs),
        Case::approx("optim.gradients_accumulator", accumulate),
    ]
}

/// Muon takes matrices only, so the biases are left out.
fn muon(device: &Device) -> Vec<TensorData> {
    let device = device.clone().autodiff();
    let mut layer = fill(LinearConfig::new(3, 5).with_bias(false).init(&device));
    let mut optimizer = MuonConfig::new().init();
    for batch in 0..STEPS as u32 {
        let loss = layer
            .forward(floats::<2>(&device, [4, 3], batch))
            .square()
            .mean();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        layer = optimizer.step(0.02, layer, grads);
    }
    parameters(&layer)
}

fn lbfgs(device: &Device) -> Vec<TensorData> {
    let device = device.clone().autodiff();
    let mut optimizer = LBFGSConfig::new().with_max_iter(3).init();
    let (network, _) = optimizer.step(0.1, Network::new(&device), |network: Network| {
        let loss = network.loss(&device, 1);
        let grads = GradientsParams::from_grads(loss.backward(), &network);
        (loss.into_scalar::<f64>(), grads)
    });
    parameters(&network)
}

/// Accumulates the gradients of two batches for one step.
fn accumulate(device: &Device) -> Vec<TensorData> {
    let device = device.clone().autodiff();
    let network = Network::new(&device);
    let mut accumulator = GradientsAccumulator::new();
    for batch in 1..3 {
        let grads = network.loss(&device, batch).backward();
        accumulator.accumulate(&network, GradientsParams::from_grads(grads, &network));
    }
    let grads = accumulator.grads();
    parameters(&SgdConfig::new().init().step(0.1, network, grads))
}
