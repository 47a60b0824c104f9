//! The three models that are trained: ordinary Burn modules on images of 28×28.
//!
//! Their weights are fixed noise, the same on every device, so that losses can be compared
//! between peers to the last bit.

use burn::{
    module::{Initializer, Module, ModuleMapper, Param},
    nn::{
        Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        pool::{MaxPool2d, MaxPool2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Device, Tensor, TensorData, activation::relu},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

use crate::data::{Upload, from_data};

/// Rows and columns of an image.
pub(crate) const SIDE: usize = 28;
/// Pixels of an image.
pub(crate) const PIXELS: usize = SIDE * SIDE;
/// Classes of images.
pub(crate) const CLASSES: usize = 10;
/// Size of a token in the transformer.
const WIDTH: usize = 32;

/// A model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Model {
    /// Three linear layers.
    Mlp,
    /// Two convolutions, a pooling layer and a linear layer.
    Cnn,
    /// One layer of self-attention over the rows of an image.
    Transformer,
}

impl Model {
    /// All models.
    pub(crate) const ALL: [Self; 3] = [Self::Mlp, Self::Cnn, Self::Transformer];

    /// Returns the model's name in tables and JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Cnn => "cnn",
            Self::Transformer => "transformer",
        }
    }
}

/// A model with its weights.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a program has few of these")]
pub(crate) enum Network {
    /// [`Model::Mlp`].
    Mlp(Mlp),
    /// [`Model::Cnn`].
    Cnn(Cnn),
    /// [`Model::Transformer`].
    Transformer(Transformer),
}

impl Network {
    /// Builds `model` on `device`, which must support autodiff.
    pub(crate) fn new(model: Model, device: &Device) -> Self {
        let network = match model {
            Model::Mlp => Self::Mlp(Mlp::new(device)),
            Model::Cnn => Self::Cnn(Cnn::new(device)),
            Model::Transformer => Self::Transformer(Transformer::new(device)),
        };
        let random = StdRng::seed_from_u64(7);
        network.map(&mut FixedNoise { device, random })
    }

    /// Maps `[batch, SIDE, SIDE]` images to `[batch, CLASSES]` logits.
    pub(crate) fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        match self {
            Self::Mlp(mlp) => mlp.forward(images),
            Self::Cnn(cnn) => cnn.forward(images),
            Self::Transformer(transformer) => transformer.forward(images),
        }
    }
}

/// Replaces every weight by noise that is the same on every device.
struct FixedNoise<'a> {
    device: &'a Device,
    random: StdRng,
}

impl ModuleMapper for FixedNoise<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.shape();
        let noise = (&mut self.random).random_iter::<f32>();
        let values: Vec<f32> = noise
            .take(shape.num_elements())
            .map(|v| 0.1 * v - 0.05)
            .collect();
        let data = TensorData::new(values, shape);
        let weights = from_data(data, self.device, Upload::Plain).require_grad();
        Param::from_mapped_value(id, weights, mapper)
    }
}

/// See [`Model::Mlp`].
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    hidden_1: Linear,
    hidden_2: Linear,
    output: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self {
            hidden_1: LinearConfig::new(PIXELS, 128).init(device),
            hidden_2: LinearConfig::new(128, 64).init(device),
            output: LinearConfig::new(64, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = relu(self.hidden_1.forward(images.flatten(1, 2)));
        self.output.forward(relu(self.hidden_2.forward(x)))
    }
}

/// See [`Model::Cnn`].
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv_1: Conv2d,
    conv_2: Conv2d,
    pool: MaxPool2d,
    output: Linear,
}

impl Cnn {
    fn new(device: &Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            conv_1: conv([1, 8]),
            conv_2: conv([8, 16]),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            output: LinearConfig::new(16 * PIXELS / 4, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = relu(self.conv_1.forward(images.unsqueeze_dim::<4>(1)));
        let x = self.pool.forward(relu(self.conv_2.forward(x)));
        self.output.forward(x.flatten(1, 3))
    }
}

/// See [`Model::Transformer`].
#[derive(Module, Debug)]
pub(crate) struct Transformer {
    embed: Linear,
    /// Positional encoding of the rows, of shape `[1, SIDE, WIDTH]`.
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Transformer {
    fn new(device: &Device) -> Self {
        Self {
            embed: LinearConfig::new(SIDE, WIDTH).init(device),
            positions: Initializer::Zeros.init([1, SIDE, WIDTH], device),
            encoder: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 1)
                .with_dropout(0.0)
                .init(device),
            output: LinearConfig::new(SIDE * WIDTH, CLASSES).init(device),
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

    #[test]
    fn models_return_one_logit_per_class() {
        let device = Device::flex().autodiff();
        for model in Model::ALL {
            let network = Network::new(model, &device);
            let logits = network.forward(Tensor::ones([3, SIDE, SIDE], &device));
            assert_eq!(logits.dims(), [3, CLASSES], "{model:?}");
        }
    }
}
