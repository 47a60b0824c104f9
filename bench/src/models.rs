//! The three models that are trained, for images of 28×28.
//!
//! Their weights are fixed noise, the same on every device, so that losses can be compared
//! between peers to the last bit.

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{Device, Tensor, TensorData},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use tensord_testkit::models::{Classifier, Cnn, Mlp, ModelSize, Transformer};

use crate::data::{Upload, from_data};

/// Rows and columns of an image.
pub(crate) const SIDE: usize = ModelSize::MEDIUM.side;
/// Pixels of an image.
pub(crate) const PIXELS: usize = SIDE * SIDE;

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
            Model::Mlp => Self::Mlp(Mlp::new(&ModelSize::MEDIUM, device)),
            Model::Cnn => Self::Cnn(Cnn::new(&ModelSize::MEDIUM, device)),
            Model::Transformer => Self::Transformer(Transformer::new(&ModelSize::MEDIUM, device)),
        };
        let random = StdRng::seed_from_u64(7);
        network.map(&mut FixedNoise { device, random })
    }

    /// Maps `[batch, SIDE, SIDE]` images to `[batch, 10]` logits.
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
