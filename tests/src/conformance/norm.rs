//! Normalisation, as functions and as modules.

use burn::module::Module;
use burn::nn::norm::NormalizationConfig;
use burn::nn::{
    BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig, LocalResponseNormConfig,
    RmsNormConfig,
};
use burn::tensor::module::{batch_norm, batch_norm_train, layer_norm};

use super::autodiff::{backward, fill, grad, grad_of, grad3, leaf, module, param_grads};
use super::case::Case;
use super::data::{floats, positive};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = functions();
    cases.extend(modules());
    cases.extend(batch());
    cases
}

fn functions() -> Vec<Case> {
    vec![
        Case::approx("norm.batch_norm", |d| {
            grad3(d, [4, 3, 5], [3], [3], |x, gamma, beta| {
                let device = x.device();
                let (mean, var) = (floats(&device, [3], 4), positive(&device, [3], 5));
                batch_norm(x, gamma, beta, mean, var, 1e-5)
            })
        }),
        Case::approx("norm.batch_norm_train", |d| {
            grad3(d, [4, 3, 5], [3], [3], |x, gamma, beta| {
                batch_norm_train(x, gamma, beta, 1e-5).output
            })
        }),
        Case::approx("norm.batch_norm_train/statistics", |d| {
            let (gamma, beta) = (floats(d, [3], 2), floats(d, [3], 3));
            let out = batch_norm_train(floats(d, [4, 3, 2, 5], 1), gamma, beta, 1e-5);
            (out.output, out.mean, out.variance)
        }),
        Case::approx("norm.layer_norm", |d| {
            grad3(d, [4, 3, 5], [5], [5], |x, gamma, beta| {
                layer_norm(x, gamma, Some(beta), 1e-5)
            })
        }),
        Case::approx("norm.layer_norm/inference", |d| {
            let (gamma, beta) = (floats(d, [33], 2), floats(d, [33], 3));
            let x = floats(d, [4, 33], 1);
            (
                layer_norm(x.clone(), gamma.clone(), Some(beta), 1e-5),
                layer_norm(x, gamma, None, 0.1),
            )
        }),
    ]
}

fn modules() -> Vec<Case> {
    vec![
        Case::approx("nn.layer_norm", |d| {
            module(
                d,
                |d| LayerNormConfig::new(6).init(d),
                [2, 3, 6],
                |m, x| m.forward(x),
            )
        }),
        Case::approx("nn.layer_norm/no_bias", |d| {
            let config = LayerNormConfig::new(5).with_bias(false).with_epsilon(1e-3);
            module(d, |d| config.init(d), [4, 5], |m, x| m.forward(x))
        }),
        Case::approx("nn.rms_norm", |d| {
            module(
                d,
                |d| RmsNormConfig::new(6).init(d),
                [2, 3, 6],
                |m, x| m.forward(x),
            )
        }),
        Case::approx("nn.group_norm", |d| {
            module(
                d,
                |d| GroupNormConfig::new(2, 6).init(d),
                [2, 6, 3, 4],
                |m, x| m.forward(x),
            )
        }),
        Case::approx("nn.group_norm/not_affine", |d| {
            let config = GroupNormConfig::new(3, 6).with_affine(false);
            module(d, |d| config.init(d), [2, 6, 5], |m, x| m.forward(x))
        }),
        Case::approx("nn.instance_norm", |d| {
            module(
                d,
                |d| InstanceNormConfig::new(3).init(d),
                [2, 3, 4, 5],
                |m, x| m.forward(x),
            )
        }),
        Case::approx("nn.local_response_norm", |d| {
            let norm = LocalResponseNormConfig::new(3).with_alpha(0.3).init();
            grad(d, [2, 5, 3, 2], |x| norm.forward(x))
        }),
        Case::approx("nn.normalization", |d| {
            let config = NormalizationConfig::Rms(RmsNormConfig::new(4));
            module(d, |d| config.clone().init(d), [3, 4], |m, x| m.forward(x))
        }),
    ]
}

fn batch() -> Vec<Case> {
    vec![
        // Two batches update the running statistics; the validating pass uses them.
        Case::approx("nn.batch_norm", |d| {
            let (a, b) = (leaf(d, [4, 3, 5], 1), leaf(d, [4, 3, 5], 2));
            let module = fill(BatchNormConfig::new(3).with_momentum(0.3).init(&a.device()));
            let first = module.forward(a.clone());
            let second = module.forward(b.clone());
            let grads = backward(&(first.clone() * second.clone()));
            let mut outputs = vec![grad_of(&a, &grads), grad_of(&b, &grads)];
            outputs.extend(param_grads(&module, &grads));
            let validating = module.valid().forward(floats(d, [2, 3, 5], 3));
            outputs.extend([first, second, validating].map(|y| y.into_data()));
            let statistics = [&module.running_mean, &module.running_var];
            outputs.extend(statistics.map(|running| running.value_sync().into_data()));
            outputs
        }),
        Case::approx("nn.batch_norm/image", |d| {
            module(
                d,
                |d| BatchNormConfig::new(3).init(d),
                [4, 3, 5, 2],
                |m, x| m.forward(x),
            )
        }),
        Case::approx("nn.batch_norm/frozen", |d| {
            let config = BatchNormConfig::new(3);
            grad(d, [4, 3, 5], |x| {
                fill(config.init(&x.device())).freeze().forward(x)
            })
        }),
    ]
}
