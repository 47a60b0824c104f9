//! Small models whose training is compared step by step between devices.

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{
        Linear, LinearConfig, Relu,
        conv::{Conv2d, Conv2dConfig},
        loss::CrossEntropyLossConfig,
        pool::{MaxPool2d, MaxPool2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Int, Tensor, TensorData},
};

const BATCH: usize = 16;
const CLASSES: usize = 10;

/// A model that classifies 8×8 images.
pub trait Classifier: Module + Clone {
    /// Builds the model on `device`.
    fn new(device: &Device) -> Self;
    /// Maps `[batch, 8, 8]` images to `[batch, 10]` logits.
    fn forward(&self, images: Tensor<3>) -> Tensor<2>;
}

/// Three linear layers.
#[derive(Module, Debug)]
pub struct Mlp {
    first: Linear,
    second: Linear,
    last: Linear,
    relu: Relu,
}

impl Classifier for Mlp {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(64, 64).init(device),
            second: LinearConfig::new(64, 32).init(device),
            last: LinearConfig::new(32, CLASSES).init(device),
            relu: Relu::new(),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = self.relu.forward(self.first.forward(images.flatten(1, 2)));
        self.last.forward(self.relu.forward(self.second.forward(x)))
    }
}

/// Two convolutions, a pooling layer and a linear layer.
#[derive(Module, Debug)]
pub struct Cnn {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    last: Linear,
    relu: Relu,
}

impl Classifier for Cnn {
    fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            second: Conv2dConfig::new([4, 8], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            last: LinearConfig::new(8 * 2 * 2, CLASSES).init(device),
            relu: Relu::new(),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = self
            .relu
            .forward(self.first.forward(images.unsqueeze_dim(1)));
        let x = self.pool.forward(self.relu.forward(self.second.forward(x)));
        self.last.forward(x.flatten(1, 3))
    }
}

/// One layer of self-attention over the image's eight rows.
#[derive(Module, Debug)]
pub struct Transformer {
    embed: Linear,
    encoder: TransformerEncoder,
    last: Linear,
}

impl Classifier for Transformer {
    fn new(device: &Device) -> Self {
        Self {
            embed: LinearConfig::new(8, 16).init(device),
            encoder: TransformerEncoderConfig::new(16, 32, 2, 1)
                .with_dropout(0.0)
                .init(device),
            last: LinearConfig::new(8 * 16, CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let rows = TransformerEncoderInput::new(self.embed.forward(images));
        self.last.forward(self.encoder.forward(rows).flatten(1, 2))
    }
}

/// Returns `count` pseudo-random numbers from -1 to 1, the same on every machine.
fn noise(count: usize, salt: usize) -> Vec<f32> {
    let at = |i: usize| ((i + 1) * 7919 + salt * 104_729) % 9973;
    (0..count)
        .map(|i| at(i) as f32 / 9973.0 * 2.0 - 1.0)
        .collect()
}

/// Replaces every weight by fixed noise.
struct FixWeights<'a>(&'a Device, usize);

impl ModuleMapper for FixWeights<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.shape();
        self.1 += 1;
        let scale = 0.3;
        let values = noise(shape.num_elements(), self.1)
            .into_iter()
            .map(|v| v * scale)
            .collect();
        let data = TensorData::new::<f32, _>(values, shape);
        Param::from_mapped_value(id, Tensor::from_data(data, self.0).require_grad(), mapper)
    }
}

/// Trains for `steps` steps on `device` from fixed weights and batches, and returns the
/// losses. Calls `between` with the number of each step before the step.
///
/// # Errors
///
/// The message of the first failed read of a loss.
pub fn losses<M: Classifier>(
    device: &Device,
    steps: usize,
    mut between: impl FnMut(usize),
) -> Result<Vec<f32>, String> {
    let device = device.clone().autodiff();
    let mut model = M::new(&device).map(&mut FixWeights(&device, 0));
    let mut optimizer = AdamConfig::new().init();
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut losses = Vec::new();
    for step in 0..steps {
        between(step);
        let images = TensorData::new(noise(BATCH * 64, step), [BATCH, 8, 8]);
        let labels: Vec<i64> = (0..BATCH)
            .map(|i| ((i * 7 + step) % CLASSES) as i64)
            .collect();
        let images = Tensor::<3>::from_data(images, &device);
        let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [BATCH]), &device);
        let value = loss.forward(model.forward(images), labels);
        let gradients = GradientsParams::from_grads(value.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
        let value = value.try_into_data().map_err(|e| e.to_string())?;
        losses.push(value.try_to_vec::<f32>().map_err(|e| e.to_string())?[0]);
    }
    Ok(losses)
}
