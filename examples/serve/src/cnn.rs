//! The model: two convolutions and two linear layers.

use burn::{
    nn::{
        Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        pool::{MaxPool2d, MaxPool2dConfig},
    },
    prelude::*,
    tensor::activation::{relu, softmax},
};

#[derive(Module, Debug)]
pub(crate) struct Cnn {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    hidden: Linear,
    output: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        let convolution = |channels| {
            Conv2dConfig::new(channels, [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            first: convolution([1, 16]),
            second: convolution([16, 32]),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            hidden: LinearConfig::new(32 * 2 * 2, 64).init(device),
            output: LinearConfig::new(64, 10).init(device),
        }
    }

    /// Maps images of 8 x 8 pixels from 0 to 1 to ten logits each.
    pub(crate) fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = self
            .pool
            .forward(relu(self.first.forward(images.unsqueeze_dim(1))));
        let x = self.pool.forward(relu(self.second.forward(x)));
        let x = relu(self.hidden.forward(x.flatten(1, 3)));
        self.output.forward(x)
    }

    /// Maps images to the probability of each digit.
    pub(crate) fn probabilities(&self, images: Tensor<3>) -> Tensor<2> {
        softmax(self.forward(images), 1)
    }
}
