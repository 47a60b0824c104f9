//! Training and prediction. Results are read one group of batches late: while the program waits
//! for them, the pool has the next group to compute.

use std::{mem, sync::Arc};

use anyhow::Result;
use burn::{
    module::Module,
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor, TensorData},
};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use tensord_client::data;

use crate::{
    encoder::{Encoder, Scale},
    loader::{Loader, READY, Times, in_order, shuffled},
    model::Model,
    table::Checked,
};

/// Rows of a training step.
const BATCH: usize = 1024;

/// Rows of which predictions are made at a time.
const PREDICTED: usize = 8192;

/// Steps whose losses are read at a time. As many batches can be ready, so that the thread that
/// makes them has work while the training waits for losses.
const UNREAD: usize = READY;

const LEARNING_RATE: f64 = 2e-3;

/// The seed of the weights and of the rows' order.
const SEED: u64 = 42;

/// How to train.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Passes over the table.
    pub(crate) epochs: usize,
    /// Whether a thread makes batches ahead.
    pub(crate) load_ahead: bool,
}

/// A model with what its inputs and outputs mean.
pub(crate) struct Trained {
    model: Model,
    encoder: Arc<Encoder>,
    target: Scale,
}

/// Inputs and the numbers to predict, scaled.
type Batch = (TensorData, TensorData);

/// Trains a model that predicts `targets`, one of each row of `table`. Prints the mean loss of
/// each pass, and returns what loading took.
pub(crate) fn train(
    table: Arc<Checked>,
    targets: Vec<f32>,
    options: Options,
    device: &Device,
) -> Result<(Trained, Times)> {
    let device = device.clone().autodiff();
    let encoder = Arc::new(Encoder::of(&table));
    let target = Scale::of(&targets);
    let targets: Vec<f32> = targets.iter().map(|number| target.apply(*number)).collect();
    let mut model = initial(encoder.width()).fork(&device);
    let mut optimizer = AdamConfig::new().init();
    let steps = table.rows.div_ceil(BATCH);
    let mut losses = Losses::new(steps);
    let mut batches = loader(table, targets, encoder.clone(), options)?;
    for (inputs, targets) in &mut batches {
        let inputs: Tensor<2> = data::from_data(inputs, &device);
        let targets: Tensor<1> = data::from_data(targets, &device);
        let loss = (model.forward(inputs) - targets).square().mean();
        losses.add(loss.clone().detach().inner())?;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    losses.finish()?;
    let trained = Trained {
        model: model.valid(),
        encoder,
        target,
    };
    Ok((trained, batches.finish()?))
}

/// A new model. Its weights are made in this process, so that they are the same for all kinds of
/// devices.
fn initial(inputs: usize) -> Model {
    let device = Device::flex().autodiff();
    device.seed(SEED);
    let model = Model::new(inputs, &device);
    model.draw_weights();
    model
}

/// Makes the batches of a training.
fn loader(
    table: Arc<Checked>,
    targets: Vec<f32>,
    encoder: Arc<Encoder>,
    options: Options,
) -> Result<Loader<Batch>> {
    let mut random = StdRng::seed_from_u64(SEED);
    let shuffle = move |order: &mut [usize]| order.shuffle(&mut random);
    let batches = shuffled(table.rows, BATCH, options.epochs, shuffle);
    let batches = batches.map(move |rows| {
        let chosen: Vec<f32> = rows.iter().map(|row| targets[*row]).collect();
        let count = chosen.len();
        (
            encoder.encode(&table, &rows),
            TensorData::new(chosen, [count]),
        )
    });
    match options.load_ahead {
        true => Loader::ahead(batches),
        false => Ok(Loader::inline(batches)),
    }
}

/// Reads the losses of steps, [`UNREAD`] at a time, and prints their means.
struct Losses {
    /// Steps of a pass.
    steps: usize,
    unread: Vec<Tensor<1>>,
    /// The read of the group before.
    reading: Option<Reading>,
    pass: Vec<f32>,
    passes: usize,
}

type Reading = std::pin::Pin<
    Box<dyn Future<Output = Result<TensorData, burn::backend::ExecutionError>> + Send>,
>;

impl Losses {
    fn new(steps: usize) -> Self {
        Self {
            steps,
            unread: Vec::new(),
            reading: None,
            pass: Vec::new(),
            passes: 0,
        }
    }

    fn add(&mut self, loss: Tensor<1>) -> Result<()> {
        self.unread.push(loss);
        if self.unread.len() < UNREAD {
            return Ok(());
        }
        self.read()
    }

    /// Starts to read the losses that are not read yet, then waits for those of the group before.
    fn read(&mut self) -> Result<()> {
        let unread = mem::take(&mut self.unread);
        let next = (!unread.is_empty())
            .then(|| Box::pin(data::into_data_async(Tensor::cat(unread, 0))) as Reading);
        let Some(reading) = mem::replace(&mut self.reading, next) else {
            return Ok(());
        };
        for loss in pollster::block_on(reading)?.try_to_vec::<f32>()? {
            self.pass.push(loss);
            if self.pass.len() == self.steps {
                self.passes += 1;
                let mean = self.pass.drain(..).sum::<f32>() / self.steps as f32;
                println!("pass {}  loss {mean:.5}", self.passes);
            }
        }
        Ok(())
    }

    /// Reads what is left.
    fn finish(mut self) -> Result<()> {
        self.read()?;
        self.read()
    }
}

impl Trained {
    /// Returns a prediction for each row of `table`.
    pub(crate) fn predict(&self, table: Arc<Checked>, device: &Device) -> Result<Vec<f32>> {
        let (rows, encoder) = (table.rows, self.encoder.clone());
        let batches = in_order(rows, PREDICTED).map(move |rows| encoder.encode(&table, &rows));
        let mut predictions = Vec::with_capacity(rows);
        let mut batches = Loader::ahead(batches)?;
        let mut reading: Option<Reading> = None;
        loop {
            let next = batches.next().map(|inputs| {
                let predicted = self.model.forward(data::from_data(inputs, device));
                Box::pin(data::into_data_async(predicted)) as Reading
            });
            let is_last = next.is_none();
            if let Some(reading) = mem::replace(&mut reading, next) {
                predictions.extend(pollster::block_on(reading)?.try_to_vec::<f32>()?);
            }
            if is_last {
                break;
            }
        }
        batches.finish()?;
        Ok(predictions
            .into_iter()
            .map(|p| self.target.undo(p))
            .collect())
    }
}
