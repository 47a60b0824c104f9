//! Steps of a denoising diffusion model: a small U-Net that is to find the noise in an image.

use std::f32::consts::PI;

use burn::{
    module::Module,
    nn::{
        GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig},
        loss::{MseLoss, Reduction},
    },
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor, TensorData, activation::silu},
};
use tensord_testkit::{
    digits,
    training::{noise, with_fixed_weights},
};

use super::{on_both, read};

const BATCH: usize = 16;
const SIDE: usize = 8;
const CHANNELS: usize = 8;
/// Numbers by which a time is given to the network.
const TIME: usize = 16;
/// Times of the schedule, from hardly any noise to hardly anything else.
const TIMES: usize = 100;
const STEPS: usize = 40;

/// A convolution that keeps the image's size, normalized in groups of channels.
#[derive(Module, Debug)]
struct Block {
    conv: Conv2d,
    norm: GroupNorm,
}

impl Block {
    fn new([inputs, outputs]: [usize; 2], stride: usize, device: &Device) -> Self {
        let conv = Conv2dConfig::new([inputs, outputs], [3, 3])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
        Self {
            conv: conv.init(device),
            norm: GroupNormConfig::new(2, outputs).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<4> {
        silu(self.norm.forward(self.conv.forward(images)))
    }
}

/// Halves the image, adds the time, doubles it, and sees the whole image again.
#[derive(Module, Debug)]
struct UNet {
    first: Block,
    down: Block,
    time: Linear,
    middle: Block,
    up: ConvTranspose2d,
    last: Block,
    output: Conv2d,
}

impl UNet {
    fn new(device: &Device) -> Self {
        let wide = 2 * CHANNELS;
        Self {
            first: Block::new([1, CHANNELS], 1, device),
            down: Block::new([CHANNELS, wide], 2, device),
            time: LinearConfig::new(TIME, wide).init(device),
            middle: Block::new([wide, wide], 1, device),
            up: ConvTranspose2dConfig::new([wide, CHANNELS], [2, 2])
                .with_stride([2, 2])
                .init(device),
            last: Block::new([2 * CHANNELS, CHANNELS], 1, device),
            output: Conv2dConfig::new([CHANNELS, 1], [1, 1]).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>, times: Tensor<1>) -> Tensor<4> {
        let whole = self.first.forward(images);
        let time = silu(self.time.forward(embedding(times)));
        let time = time.unsqueeze_dims::<4>(&[2, 3]);
        let half = self.middle.forward(self.down.forward(whole.clone()) + time);
        let seen = Tensor::cat(vec![self.up.forward(half), whole], 1);
        self.output.forward(self.last.forward(seen))
    }
}

/// Sines and cosines of `times` at [`TIME`] / 2 frequencies.
fn embedding(times: Tensor<1>) -> Tensor<2> {
    let half = TIME / 2;
    let frequency = |i: usize| (-(TIMES as f32).ln() * i as f32 / half as f32).exp();
    let frequencies: Vec<f32> = (0..half).map(frequency).collect();
    let frequencies = Tensor::<1>::from_floats(&frequencies[..], &times.device());
    let angles = times.unsqueeze_dim::<2>(1) * frequencies.unsqueeze::<2>();
    Tensor::cat(vec![angles.clone().sin(), angles.cos()], 1)
}

/// What is left of the image at each time: the products of 1 - beta, where beta rises
/// linearly.
fn schedule() -> Vec<f32> {
    let beta = |time: usize| 1e-3 + 0.1 * time as f32 / TIMES as f32;
    let products = (0..TIMES).scan(1.0, |product, time| {
        *product *= 1.0 - beta(time);
        Some(*product)
    });
    products.collect()
}

/// Numbers that are distributed normally (Box and Muller's method).
fn normal(count: usize, salt: usize) -> Vec<f32> {
    let uniform = noise(2 * count, salt);
    let pair = |pair: &[f32]| {
        let distance = (-2.0 * (pair[0].abs().max(1e-6)).ln()).sqrt();
        distance * (PI * pair[1]).cos()
    };
    uniform.chunks(2).map(pair).collect()
}

fn losses(device: &Device) -> Vec<f32> {
    let (digits, _) = digits::split();
    let mut model = with_fixed_weights(UNet::new(device), device);
    let mut optimizer = AdamConfig::new().init();
    let schedule = schedule();
    let shape = [BATCH, 1, SIDE, SIDE];
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (images, _) = digits::batch(&digits[step * BATCH..][..BATCH], device);
        let images = images.unsqueeze_dim::<4>(1) * 2.0 - 1.0;
        let times: Vec<usize> = (0..BATCH).map(|i| (i * 37 + step * 11) % TIMES).collect();
        let kept: Vec<f32> = times.iter().map(|&time| schedule[time]).collect();
        let kept = Tensor::<1>::from_floats(&kept[..], device).unsqueeze_dims::<4>(&[1, 2, 3]);
        let times: Vec<f32> = times.iter().map(|&time| time as f32).collect();
        let times = Tensor::<1>::from_floats(&times[..], device);
        let added = TensorData::new(normal(BATCH * SIDE * SIDE, step), shape);
        let added = Tensor::<4>::from_data(added, device);

        let lost = kept.clone().neg() + 1.0;
        let noisy = images * kept.sqrt() + added.clone() * lost.sqrt();
        let found = model.forward(noisy, times);
        let loss = MseLoss::new().forward(found, added, Reduction::Mean);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
        losses.push(read(loss));
    }
    losses
}

#[test]
fn a_diffusion_model_learns_to_find_the_noise() {
    let losses = on_both(losses);
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (first, last) = (mean(&losses[..5]), mean(&losses[STEPS - 5..]));
    assert!(last < 0.7 * first, "{first} at first, {last} at last");
}
