//! Activation functions, their gradients, and the modules that wrap them.

use burn::nn::activation::{
    ActivationConfig, CeluConfig, EluConfig, GLU, HardShrinkConfig, HardSigmoidConfig,
    HardtanhConfig, LeakyReluConfig, PReluConfig, RReluConfig, ShrinkConfig, SoftShrinkConfig,
    SoftplusConfig, SwiGluConfig, ThresholdConfig, ThresholdedReluConfig,
};
use burn::tensor::activation::*;
use burn::tensor::{Device, Tensor, TensorData};

use super::autodiff::{grad, grad2, module};
use super::case::{Case, Tolerance};
use super::data::floats;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = pointwise();
    cases.extend(along_an_axis());
    cases.extend(modules());
    cases
}

const SHAPE: [usize; 3] = [2, 4, 5];

/// The input is scaled so that it reaches beyond every threshold.
fn scaled(device: &Device, f: impl Fn(Tensor<3>) -> Tensor<3>) -> Vec<TensorData> {
    grad(device, SHAPE, |x| f(x * 2.5))
}

fn pointwise() -> Vec<Case> {
    vec![
        Case::approx("activation.relu", |d| scaled(d, relu)),
        Case::approx("activation.relu6", |d| scaled(d, |x| relu6(x * 2.0))),
        Case::approx("activation.leaky_relu", |d| {
            scaled(d, |x| leaky_relu(x, 0.03))
        }),
        Case::approx("activation.thresholded_relu", |d| {
            scaled(d, |x| thresholded_relu(x, 0.9))
        }),
        Case::approx("activation.threshold", |d| {
            scaled(d, |x| threshold(x, 0.3, -7.0))
        }),
        Case::approx("activation.prelu", |d| grad2(d, SHAPE, [4], prelu)),
        Case::approx("activation.prelu/shared", |d| grad2(d, SHAPE, [1], prelu)),
        Case::approx("activation.gelu", |d| scaled(d, gelu)).within(Tolerance::GELU),
        Case::approx("activation.gelu_approximate", |d| {
            scaled(d, gelu_approximate)
        }),
        Case::approx("activation.sigmoid", |d| scaled(d, sigmoid)),
        Case::approx("activation.hard_sigmoid", |d| {
            scaled(d, |x| hard_sigmoid(x, 0.2, 0.45))
        }),
        Case::approx("activation.log_sigmoid", |d| scaled(d, log_sigmoid)),
        Case::approx("activation.silu", |d| scaled(d, silu)),
        Case::approx("activation.mish", |d| scaled(d, mish)),
        Case::approx("activation.hard_swish", |d| scaled(d, hard_swish)),
        Case::approx("activation.tanh", |d| scaled(d, tanh)),
        Case::approx("activation.hardtanh", |d| {
            scaled(d, |x| hardtanh(x, -1.5, 2.0))
        }),
        Case::approx("activation.tanhshrink", |d| scaled(d, tanhshrink)),
        Case::approx("activation.elu", |d| scaled(d, |x| elu(x, 0.8))),
        Case::approx("activation.celu", |d| scaled(d, |x| celu(x, 1.3))),
        Case::approx("activation.selu", |d| scaled(d, selu)),
        Case::approx("activation.softplus", |d| scaled(d, |x| softplus(x, 1.5))),
        Case::approx("activation.softplus_with_threshold", |d| {
            scaled(d, |x| softplus_with_threshold(x, 2.0, 4.0))
        }),
        Case::approx("activation.softsign", |d| scaled(d, softsign)),
        Case::approx("activation.hard_shrink", |d| {
            scaled(d, |x| hard_shrink(x, 0.7))
        }),
        Case::approx("activation.soft_shrink", |d| {
            scaled(d, |x| soft_shrink(x, 0.7))
        }),
        Case::approx("activation.shrink", |d| scaled(d, |x| shrink(x, 0.7, 0.2))),
    ]
}

fn along_an_axis() -> Vec<Case> {
    vec![
        Case::approx("activation.softmax", |d| {
            [0, 1, 2].map(|dim| scaled(d, |x| softmax(x, dim)))
        }),
        Case::approx("activation.log_softmax", |d| {
            [0, 1, 2].map(|dim| scaled(d, |x| log_softmax(x, dim)))
        }),
        Case::approx("activation.softmin", |d| scaled(d, |x| softmin(x, 1))),
        Case::approx("activation.quiet_softmax", |d| {
            scaled(d, |x| quiet_softmax(x, 2))
        }),
        Case::approx("activation.glu", |d| scaled(d, |x| glu(x, 1))),
        Case::approx("activation.softmax/large_inputs", |d| {
            softmax(floats(d, [3, 7], 1) * 300.0, 1)
        }),
    ]
}

/// One wrapped activation, built from its configuration.
fn wrapped(name: &'static str, config: fn() -> ActivationConfig) -> Case {
    Case::approx(name, move |d| {
        module(d, |d| config().init(d), SHAPE, |m, x| m.forward(x * 2.5))
    })
}

fn modules() -> Vec<Case> {
    use ActivationConfig as A;
    vec![
        wrapped("nn.identity", || A::Identity),
        wrapped("nn.relu", || A::Relu),
        wrapped("nn.gelu", || A::Gelu).within(Tolerance::GELU),
        wrapped("nn.gelu/approximate", || A::GeluApproximate),
        wrapped("nn.prelu", || {
            A::PRelu(PReluConfig::new().with_num_parameters(4))
        }),
        wrapped("nn.leaky_relu", || {
            A::LeakyRelu(LeakyReluConfig::new().with_negative_slope(0.2))
        }),
        wrapped("nn.swiglu", || {
            A::SwiGlu(SwiGluConfig::new(5, 3).with_bias(true))
        }),
        wrapped("nn.selu", || A::Selu),
        wrapped("nn.sigmoid", || A::Sigmoid),
        wrapped("nn.tanh", || A::Tanh),
        wrapped("nn.hard_sigmoid", || {
            A::HardSigmoid(HardSigmoidConfig::new())
        }),
        wrapped("nn.hard_swish", || A::HardSwish),
        wrapped("nn.softplus", || {
            A::Softplus(SoftplusConfig::new().with_beta(0.7))
        }),
        wrapped("nn.softsign", || A::Softsign),
        wrapped("nn.elu", || A::Elu(EluConfig::new())),
        wrapped("nn.celu", || A::Celu(CeluConfig::new())),
        wrapped("nn.thresholded_relu", || {
            A::ThresholdedRelu(ThresholdedReluConfig::new())
        }),
        wrapped("nn.hard_shrink", || A::HardShrink(HardShrinkConfig::new())),
        wrapped("nn.soft_shrink", || A::SoftShrink(SoftShrinkConfig::new())),
        wrapped("nn.shrink", || A::Shrink(ShrinkConfig::new())),
        Case::approx("nn.hardtanh", |d| {
            scaled(d, |x| HardtanhConfig::new().init().forward(x))
        }),
        Case::approx("nn.threshold", |d| {
            scaled(d, |x| ThresholdConfig::new(0.1, 3.0).init().forward(x))
        }),
        Case::approx("nn.glu", |d| scaled(d, |x| GLU::new(1).forward(x))),
        // Outside training, the slope is fixed.
        Case::approx("nn.rrelu/validating", |d| {
            RReluConfig::new().init().forward(floats(d, SHAPE, 1))
        }),
    ]
}
