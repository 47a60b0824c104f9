//! A training whose losses are compared step by step between devices, and the weights and
//! numbers that make trainings comparable.

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Int, Tensor, TensorData},
};

use crate::models::{CLASSES, Classifier, ModelSize};

const BATCH: usize = 16;
const SIDE: usize = ModelSize::SMALL.side;

/// Returns `count` pseudo-random numbers from -1 to 1, the same on every machine.
pub fn noise(count: usize, salt: usize) -> Vec<f32> {
    let at = |i: usize| ((i + 1) * 7919 + salt * 104_729) % 9973;
    (0..count)
        .map(|i| at(i) as f32 / 9973.0 * 2.0 - 1.0)
        .collect()
}

/// Replaces every weight by fixed noise.
struct FixWeights<'a>(&'a Device, usize);

/// Replaces every weight of `model` by noise that is the same on every machine, on `device`.
/// Weights that are frozen stay so.
pub fn with_fixed_weights<M: Module>(model: M, device: &Device) -> M {
    model.map(&mut FixWeights(device, 0))
}

impl ModuleMapper for FixWeights<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let (shape, is_trained) = (tensor.shape(), tensor.is_require_grad());
        self.1 += 1;
        let scale = 0.3;
        let values = noise(shape.num_elements(), self.1)
            .into_iter()
            .map(|v| v * scale)
            .collect();
        let data = TensorData::new::<f32, _>(values, shape);
        let tensor = Tensor::from_data(data, self.0).set_require_grad(is_trained);
        Param::from_mapped_value(id, tensor, mapper)
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
    losses_while::<M>(device, |step| {
        let goes_on = step < steps;
        if goes_on {
            between(step);
        }
        goes_on
    })
}

/// Like [`losses`], until `goes_on` returns `false`, which is called before each step with its number from 0.
///
/// # Errors
///
/// The message of the first failed read of a loss.
pub fn losses_while<M: Classifier>(
    device: &Device,
    mut goes_on: impl FnMut(usize) -> bool,
) -> Result<Vec<f32>, String> {
    let device = device.clone().autodiff();
    let mut model = with_fixed_weights(M::new(&ModelSize::SMALL, &device), &device);
    let mut optimizer = AdamConfig::new().init();
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut losses = Vec::new();
    for step in (0..).take_while(|step| goes_on(*step)) {
        let images = TensorData::new(noise(BATCH * SIDE * SIDE, step), [BATCH, SIDE, SIDE]);
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
