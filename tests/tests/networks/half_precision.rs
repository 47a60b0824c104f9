//! Mixed precision: weights in `f32`, and matrix products in `f16` or `bf16`.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams},
    tensor::{DType, Device, FloatDType, Tensor, activation::relu},
};
use tensord_client::LeaseRequest;
use tensord_testkit::{digits, host, training::with_fixed_weights};

use super::{numbers, on_both, read};

const BATCH: usize = 32;
const STEPS: usize = 30;
/// Small gradients are zero in `f16`, so they are computed of a larger loss.
const LOSS_SCALE: f32 = 128.0;

/// Two layers whose products are computed in `f16` or `bf16`.
#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

/// Computes a layer in `dtype`; its weights stay `f32`, and so do their gradients.
fn forward_in(dtype: FloatDType, layer: &Linear, input: Tensor<2>) -> Tensor<2> {
    let bias = layer.bias.as_ref().expect("it has a bias").val();
    input.matmul(layer.weight.val().cast(dtype)) + bias.cast(dtype).unsqueeze()
}

fn losses(dtype: FloatDType, device: &Device) -> Vec<f32> {
    assert!(device.supports_dtype(dtype), "{device:?} lacks {dtype:?}");
    let model = Mlp {
        hidden: LinearConfig::new(64, 32).init(device),
        output: LinearConfig::new(32, 10).init(device),
    };
    let mut model = with_fixed_weights(model, device);
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let (digits, _) = digits::split();
    let step = |digits: &[digits::Digit]| {
        let (images, labels) = digits::batch(digits, device);
        let input = images.flatten::<2>(1, 2).cast(dtype);
        let hidden = relu(forward_in(dtype, &model.hidden, input));
        let logits = forward_in(dtype, &model.output, hidden);
        assert_eq!(logits.dtype(), DType::from(dtype));
        let loss = cross_entropy.forward(logits.cast(FloatDType::F32), labels);
        let gradients = (loss.clone() * LOSS_SCALE).backward();
        let gradient = model.hidden.weight.val().grad(&gradients).unwrap();
        assert_eq!(gradient.dtype(), DType::F32);
        // Adam divides by the size of the gradients, so their scale needs no correction.
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-2, model.clone(), gradients);
        read(loss)
    };
    digits.chunks(BATCH).take(STEPS).map(step).collect()
}

fn check(dtype: FloatDType) {
    let losses = on_both(|device| losses(dtype, device));
    let (first, last) = (losses[0], losses[STEPS - 1]);
    assert!(last < 0.6 * first, "the model learns little: {losses:?}");
}

#[test]
fn mixed_precision_with_f16_trains() {
    check(FloatDType::F16);
}

#[test]
fn mixed_precision_with_bf16_trains() {
    check(FloatDType::BF16);
}

/// The casts and the product of a layer, on each kind of GPU that this host has, in the types
/// that the device supports. Of the other types the program gets an error, and no wrong number.
#[test]
fn gpus_compute_in_types_that_they_support_and_refuse_others() {
    for kind in host::kinds() {
        let cluster = host::cluster(&[kind]);
        let lease = cluster.pool().lease(LeaseRequest::devices(1).kind(kind));
        let lease = lease.unwrap();
        for (dtype, digits) in [(FloatDType::F16, 11), (FloatDType::BF16, 8)] {
            let product = |device: &Device| {
                let left = numbers([16, 24], 1, device).cast(dtype);
                let right = numbers([24, 8], 2, device).cast(dtype);
                left.matmul(right).cast(FloatDType::F32).try_into_data()
            };
            let device = &lease.devices()[0];
            let is_supported = device.supports_dtype(dtype);
            println!("{kind}: {dtype:?} supported: {is_supported}");
            if !is_supported {
                let error = product(device).expect_err("the device lacks the type");
                let error = error.to_string();
                let name = DType::from(dtype).name();
                assert!(error.contains(&format!("has no {name}")), "{error}");
                continue;
            }
            let (result, expected) = (product(device), product(&Device::flex()));
            // Each factor is rounded to as many binary digits, and so is each product or,
            // on some devices, only their sum.
            let bound = 24.0 * 4.0 / f32::powi(2.0, digits);
            let values = |data: burn::tensor::TensorData| data.try_to_vec::<f32>().unwrap();
            let pairs = values(result.unwrap())
                .into_iter()
                .zip(values(expected.unwrap()));
            for (ours, theirs) in pairs {
                assert!((ours - theirs).abs() < bound, "{kind}: {ours} and {theirs}");
            }
        }
    }
}
