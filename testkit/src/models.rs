//! The models that tests and benchmarks train: ordinary Burn modules that classify square
//! images.

use burn::{
    module::{Initializer, Module, Param},
    nn::{
        Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        pool::{MaxPool2d, MaxPool2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Device, Tensor, activation::relu},
};

/// Number of classes of images.
pub const CLASSES: usize = 10;

/// The sizes of a model's layers.
#[derive(Debug, Clone, Copy)]
pub struct ModelSize {
    /// Rows and columns of an image.
    pub side: usize,
    /// Units of the hidden layers of [`Mlp`].
    pub hidden: [usize; 2],
    /// Channels of the convolutions of [`Cnn`].
    pub channels: [usize; 2],
    /// Size of a token of [`Transformer`].
    pub width: usize,
    /// Attention heads of [`Transformer`].
    pub heads: usize,
}

impl ModelSize {
    /// For images of 8×8 pixels; a step takes a few milliseconds on a CPU.
    pub const SMALL: Self = Self {
        side: 8,
        hidden: [64, 32],
        channels: [4, 8],
        width: 16,
        heads: 2,
    };

    /// For images of 28×28 pixels, as those of MNIST.
    pub const MEDIUM: Self = Self {
        side: 28,
        hidden: [128, 64],
        channels: [8, 16],
        width: 32,
        heads: 4,
    };
}

/// A model that classifies square images.
pub trait Classifier: Module + Clone {
    /// Creates the model on `device`.
    fn new(size: &ModelSize, device: &Device) -> Self;
    /// Maps `[batch, side, side]` images to `[batch, CLASSES]` logits.
    fn forward(&self, images: Tensor<3>) -> Tensor<2>;
}

/// Three linear layers.
#[derive(Module, Debug)]
pub struct Mlp {
    hidden_1: Linear,
    hidden_2: Linear,
    output: Linear,
}

impl Classifier for Mlp {
    fn new(size: &ModelSize, device: &Device) -> Self {
        let [first, second] = size.hidden;
        Self {
            hidden_1: LinearConfig::new(size.side * size.side, first).init(device),
            hidden_2: LinearConfig::new(first, second).init(device),
            output: LinearConfig::new(second, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = relu(self.hidden_1.forward(images.flatten(1, 2)));
        self.output.forward(relu(self.hidden_2.forward(x)))
    }
}

/// Two convolutions, a pooling layer and a linear layer.
#[derive(Module, Debug)]
pub struct Cnn {
    conv_1: Conv2d,
    conv_2: Conv2d,
    pool: MaxPool2d,
    output: Linear,
}

impl Classifier for Cnn {
    fn new(size: &ModelSize, device: &Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        let [first, second] = size.channels;
        Self {
            conv_1: conv([1, first]),
            conv_2: conv([first, second]),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            output: LinearConfig::new(second * size.side * size.side / 4, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = relu(self.conv_1.forward(images.unsqueeze_dim::<4>(1)));
        let x = self.pool.forward(relu(self.conv_2.forward(x)));
        self.output.forward(x.flatten(1, 3))
    }
}

/// One layer of self-attention over the rows of an image.
#[derive(Module, Debug)]
pub struct Transformer {
    embed: Linear,
    /// Positional encoding of the rows, of shape `[1, side, width]`.
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Classifier for Transformer {
    fn new(size: &ModelSize, device: &Device) -> Self {
        let &ModelSize {
            side, width, heads, ..
        } = size;
        Self {
            embed: LinearConfig::new(side, width).init(device),
            positions: Initializer::Zeros.init([1, side, width], device),
            encoder: TransformerEncoderConfig::new(width, 2 * width, heads, 1)
                .with_dropout(0.0)
                .init(device),
            output: LinearConfig::new(side * width, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let tokens = self.embed.forward(images) + self.positions.val();
        let tokens = self.encoder.forward(TransformerEncoderInput::new(tokens));
        self.output.forward(tokens.flatten(1, 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn returns_a_logit_a_class<M: Classifier>() {
        let device = Device::flex();
        for size in [ModelSize::SMALL, ModelSize::MEDIUM] {
            let images = Tensor::ones([3, size.side, size.side], &device);
            let logits = M::new(&size, &device).forward(images);
            assert_eq!(logits.dims(), [3, CLASSES], "{size:?}");
        }
    }

    #[test]
    fn models_return_one_logit_per_class() {
        returns_a_logit_a_class::<Mlp>();
        returns_a_logit_a_class::<Cnn>();
        returns_a_logit_a_class::<Transformer>();
    }
}
