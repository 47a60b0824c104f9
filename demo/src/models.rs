//! The three networks the demo can train.
//!
//! They are ordinary Burn modules and do not depend on where their device is. Each is
//! small, since the demo shows a pool at work and does not aim for a record accuracy. Each
//! has layers that users have in their own models, so that training it exercises matrix
//! products, convolutions and attention.

use burn::module::{Initializer, Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

use crate::data::{CLASSES, DigitBatch, PIXELS, SIDE};

/// The network to train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// Two hidden layers of 128 and 64 units.
    #[default]
    Mlp,
    /// Two convolutions, a pooling layer and a linear layer.
    Cnn,
    /// A layer of self-attention over the eight rows of the image.
    Transformer,
}

impl Model {
    /// Returns the name on the command line and in the result.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Cnn => "cnn",
            Self::Transformer => "transformer",
        }
    }

    /// Returns Adam's initial learning rate, which falls to 0 along a cosine.
    pub(crate) const fn learning_rate(self) -> f64 {
        match self {
            Self::Mlp | Self::Cnn => 8e-3,
            Self::Transformer => 6e-3,
        }
    }
}

/// A network to train: takes images of shape `[batch, SIDE, SIDE]`, returns one logit per
/// class.
///
/// This is an enum rather than a type parameter, so that the training code is compiled
/// once.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a program has only one value of this type"
)]
pub(crate) enum Network {
    /// [`Model::Mlp`].
    Mlp(Mlp),
    /// [`Model::Cnn`].
    Cnn(Cnn),
    /// [`Model::Transformer`].
    Transformer(Transformer),
}

impl Network {
    /// Creates the network for `model`, with random weights drawn on `device`.
    pub(crate) fn new(model: Model, device: &Device) -> Self {
        match model {
            Model::Mlp => Self::Mlp(Mlp::new(device)),
            Model::Cnn => Self::Cnn(Cnn::new(device)),
            Model::Transformer => Self::Transformer(Transformer::new(device)),
        }
    }

    /// Returns logits of shape `[batch, CLASSES]`.
    pub(crate) fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        match self {
            Self::Mlp(mlp) => mlp.forward(images),
            Self::Cnn(cnn) => cnn.forward(images),
            Self::Transformer(transformer) => transformer.forward(images),
        }
    }

    fn classify(&self, batch: DigitBatch) -> ClassificationOutput {
        let logits = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl TrainStep for Network {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Network {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// A multi-layer perceptron over the 64 pixels.
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
        let x = images.flatten(1, 2);
        let x = relu(self.hidden_1.forward(x));
        let x = relu(self.hidden_2.forward(x));
        self.output.forward(x)
    }
}

/// A convolutional network. It has no batch norm, whose running statistics would need
/// another sync when several devices train.
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
        let x = images.unsqueeze_dim::<4>(1);
        let x = relu(self.conv_1.forward(x));
        let x = relu(self.conv_2.forward(x));
        let x = self.pool.forward(x);
        self.output.forward(x.flatten(1, 3))
    }
}

/// A transformer over the rows of an image: each row of pixels is a token.
#[derive(Module, Debug)]
pub(crate) struct Transformer {
    embed: Linear,
    /// Position embeddings of the rows, of shape `[1, SIDE, WIDTH]`.
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Transformer {
    /// The number of elements of a token after it is embedded.
    const WIDTH: usize = 32;

    fn new(device: &Device) -> Self {
        let positions = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        };
        Self {
            embed: LinearConfig::new(SIDE, Self::WIDTH).init(device),
            positions: positions.init([1, SIDE, Self::WIDTH], device),
            encoder: TransformerEncoderConfig::new(Self::WIDTH, 2 * Self::WIDTH, 4, 1)
                .with_dropout(0.0)
                .init(device),
            output: LinearConfig::new(SIDE * Self::WIDTH, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let tokens = self.embed.forward(images) + self.positions.val();
        let tokens = self.encoder.forward(TransformerEncoderInput::new(tokens));
        // The tokens are concatenated, not averaged: the mean loses the positions of
        // strokes, which costs 2 % accuracy.
        self.output.forward(tokens.flatten(1, 2))
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_model_returns_a_logit_a_class() {
        let device = Device::flex();
        for &model in Model::value_variants() {
            let network = Network::new(model, &device);
            let logits = network.forward(Tensor::ones([5, SIDE, SIDE], &device));
            assert_eq!(logits.dims(), [5, CLASSES], "{model:?}");
        }
    }

    #[test]
    fn every_parameter_gets_a_gradient() {
        let device = Device::flex().autodiff();
        for &model in Model::value_variants() {
            let network = Network::new(model, &device);
            let batch = DigitBatch {
                images: Tensor::ones([2, SIDE, SIDE], &device),
                labels: Tensor::zeros([2], &device),
            };
            let output = TrainStep::step(&network, batch);
            let params = burn::module::list_param_ids(&network).len();
            assert_eq!(output.grads.len(), params, "{model:?}");
        }
    }

    #[test]
    fn the_command_line_uses_the_names() {
        for &model in Model::value_variants() {
            let value = model.to_possible_value().expect("no model is hidden");
            assert_eq!(value.get_name(), model.name());
        }
    }
}
