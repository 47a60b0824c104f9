//! Trains a network on the digits with Burn's own training stack.
//!
//! This is an ordinary Burn program, except that the caller passes the devices in. They may
//! be local or in a pool; the code here is the same for both.
//!
//! Several devices train data-parallel, by Burn's own strategy: each has a replica of the
//! network and its own part of the training set, and the gradients of each step are
//! averaged over all devices. The digits of a step are divided among the devices, so that
//! the size of a step and the number of steps in an epoch do not depend on the number of
//! devices.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::optim::AdamConfig;
use burn::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn::tensor::{Device, TensorReadError};
use burn::train::logger::{FileMetricLogger, InMemoryMetricLogger};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ExecutionStrategy, Interrupter, Learner, LearningResult, SupervisedTraining, TrainingError,
};

use crate::data::{Digit, DigitBatcher, Digits};
use crate::lockstep::{Lockstep, LockstepLoader};
use crate::losses::Losses;
use crate::models::{Model, Network};
use crate::outcome::Outcome;
use crate::progress::{History, Monitor, Record, View};

/// Digits in a step, over all devices.
pub const BATCH_SIZE: usize = 64;

/// The numbers of devices that divide a step, and the training set, evenly.
pub const DEVICE_COUNTS: [u32; 5] = [1, 2, 4, 8, 16];

/// The settings of a training run.
pub struct TrainOptions {
    /// The network.
    pub model: Model,
    /// The devices to train on together. The test uses the first device's replica.
    pub devices: Vec<Device>,
    /// The number of passes over the training set, at least 1.
    pub epochs: usize,
    /// Digits in a step, at least 1; each device gets an equal share.
    pub batch_size: usize,
    /// The seed of the data split, the initial weights and the order of the batches.
    pub seed: u64,
    /// The directory for checkpoints and metric logs; none are written if `None`.
    pub artifacts: Option<PathBuf>,
    /// How to show the progress.
    pub view: View,
    /// Receives the losses while the training runs.
    pub losses: Losses,
    /// Stops the training after the current step, for example on Ctrl+C. The caller keeps a
    /// clone to request the stop.
    pub interrupter: Interrupter,
}

impl TrainOptions {
    /// Returns the demo's default options.
    pub fn new(model: Model, devices: Vec<Device>) -> Self {
        Self {
            model,
            devices,
            epochs: 12,
            batch_size: BATCH_SIZE,
            seed: 42,
            artifacts: None,
            view: View::detect(),
            losses: Losses::default(),
            interrupter: Interrupter::new(),
        }
    }
}

/// Why a training run gave no result.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// An option has a value that cannot work.
    #[error("cannot train: {0}")]
    Options(&'static str),
    /// The devices cannot share the work evenly.
    #[error(
        "cannot train: the {batch_size} digits of a step do not divide evenly among {devices} devices"
    )]
    UnevenSplit {
        /// Digits in a step.
        batch_size: usize,
        /// The number of devices.
        devices: usize,
    },
    /// The directory for the artifacts cannot be created.
    #[error("cannot create the artifact directory {}", path.display())]
    Artifacts {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A device failed, or a checkpoint could not be written.
    #[error("the training stopped: {0}")]
    Training(Arc<TrainingError>),
    /// As [`Training`](Self::Training), but with several devices, where Burn panics.
    #[error("the training stopped: {0}")]
    Panicked(String),
    /// The trained model could not be tested.
    #[error("the trained model could not be tested: {0}")]
    Test(#[from] TensorReadError),
}

/// Trains the network, tests it on digits outside the training set, and returns the result.
pub fn train(options: &TrainOptions) -> Result<Outcome, TrainError> {
    options.check()?;
    options.create_artifacts()?;
    let digits = Digits::split(options.seed);
    let history = History::default();
    let learner = learner(options, digits.train.len());
    let training = training(options, &digits, history.clone());

    let start = Instant::now();
    let LearningResult {
        model,
        renderer,
        interrupted,
        error,
    } = catch_unwind(AssertUnwindSafe(|| training.launch(learner)))
        .map_err(|payload| TrainError::Panicked(panic_message(payload.as_ref())))?;
    let seconds = start.elapsed().as_secs_f64();
    drop(renderer); // Restores the terminal.
    if let Some(error) = error {
        return Err(TrainError::Training(error));
    }

    let Record { epochs, steps } = history.take();
    Ok(Outcome {
        model: options.model,
        devices: options.devices.len(),
        workers: Vec::new(),
        is_exact: false,
        steps,
        test_accuracy: accuracy(&model, digits.test, &options.devices[0].clone().inner())?,
        seconds,
        bytes_up: 0,
        bytes_down: 0,
        epochs,
        interrupted: interrupted.is_some(),
        chaos: None,
    })
}

impl TrainOptions {
    fn check(&self) -> Result<(), TrainError> {
        match self {
            Self { epochs: 0, .. } => Err(TrainError::Options("the number of epochs is 0")),
            Self { batch_size: 0, .. } => Err(TrainError::Options("the batch size is 0")),
            Self { devices, .. } if devices.is_empty() => {
                Err(TrainError::Options("the list of devices is empty"))
            }
            Self {
                batch_size,
                devices,
                ..
            } if !batch_size.is_multiple_of(devices.len()) => Err(TrainError::UnevenSplit {
                batch_size: *batch_size,
                devices: devices.len(),
            }),
            _ => Ok(()),
        }
    }

    /// Creates the directory for artifacts. Burn ignores a directory that it cannot create,
    /// and panics later when it writes there.
    fn create_artifacts(&self) -> Result<(), TrainError> {
        self.artifacts.as_ref().map_or(Ok(()), |path| {
            std::fs::create_dir_all(path).map_err(|source| TrainError::Artifacts {
                path: path.clone(),
                source,
            })
        })
    }

    /// Returns Burn's strategy: single-device, or data-parallel with averaged gradients.
    fn strategy(&self) -> ExecutionStrategy {
        let mut devices: Vec<_> = self.devices.iter().map(|d| d.clone().autodiff()).collect();
        match devices.len() {
            1 => ExecutionStrategy::single(devices.remove(0)),
            _ => ExecutionStrategy::ddp(
                devices,
                DistributedConfig {
                    all_reduce_op: ReduceOperation::Mean,
                },
            ),
        }
    }
}

/// Creates the network with its initial weights, its optimiser and its learning rate
/// schedule, for a training set of `digits` digits.
fn learner(options: &TrainOptions, digits: usize) -> Learner<Network> {
    let device = options.devices[0].clone().autodiff();
    device.seed(options.seed);
    // Burn initialises a weight when it is first used. `fork` initialises them all here, in
    // a fixed order and on one device, from which Burn copies the other replicas.
    let network = Network::new(options.model, &device).fork(&device);
    let steps = options.epochs * digits.div_ceil(options.batch_size);
    let rate = CosineAnnealingLrSchedulerConfig::new(options.model.learning_rate(), steps)
        .init()
        .expect("the learning rate and the number of steps are positive");
    Learner::new(network, AdamConfig::new().init(), rate)
}

/// Sets up the training: data loaders, metrics, files and progress display.
fn training(
    options: &TrainOptions,
    digits: &Digits,
    history: History,
) -> SupervisedTraining<Network> {
    let interrupter = Interrupter::new();
    let lockstep = Lockstep::new(
        options.devices.len(),
        options.interrupter.clone(),
        interrupter.clone(),
    );
    let train = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(options.batch_size / options.devices.len())
        .shuffle(options.seed)
        .set_device(options.devices[0].clone())
        .build(InMemDataset::new(digits.train.clone()));
    // The test set is one batch, so an epoch's test takes one forward pass and two reads.
    let test = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(digits.test.len())
        .set_device(options.devices[0].clone())
        .build(InMemDataset::new(digits.test.clone()));
    let monitor = Monitor::new(
        options.view,
        options.devices.len(),
        history,
        options.losses.clone(),
        options.interrupter.clone(),
    );

    let directory = options.artifacts.clone().unwrap_or_default();
    let training =
        SupervisedTraining::new(&directory, LockstepLoader::wrap(train, &lockstep), test)
            .num_epochs(options.epochs)
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .with_training_strategy(options.strategy().into())
            .with_interrupter(interrupter)
            .renderer(Box::new(monitor))
            // Otherwise Burn installs a log subscriber and a panic hook; the caller has its
            // own.
            .with_application_logger(None);
    match &options.artifacts {
        Some(directory) => training
            .with_metric_logger(FileMetricLogger::new(directory))
            .with_default_checkpointers(),
        None => training.with_metric_logger(InMemoryMetricLogger::new()),
    }
}

/// Returns a panic's message.
fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).into());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".into())
}

/// Returns the share of `digits` that `network` classifies correctly, from 0 to 1. Runs on
/// `device`.
fn accuracy(
    network: &Network,
    digits: Vec<Digit>,
    device: &Device,
) -> Result<f64, TensorReadError> {
    let count = digits.len() as f64;
    let batch = DigitBatcher.batch(digits, device);
    let predicted = network.forward(batch.images).argmax(1).squeeze_dim(1);
    let right = predicted.equal(batch.labels).int().sum();
    Ok(right.try_into_scalar::<i64>()? as f64 / count)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    fn options(model: Model) -> TrainOptions {
        TrainOptions {
            epochs: 2,
            view: View::Quiet,
            ..TrainOptions::new(model, vec![Device::flex()])
        }
    }

    #[test]
    fn every_model_learns_in_two_epochs() {
        for &model in Model::value_variants() {
            let outcome = train(&options(model)).unwrap();
            let [first, last] = outcome.epochs.as_slice() else {
                panic!("{model:?}: {:?}", outcome.epochs);
            };
            assert!(
                last.loss < 0.5 * first.loss,
                "{model:?}: {first:?} {last:?}"
            );
            assert!(outcome.test_accuracy > 0.8, "{model:?}: {outcome:?}");
            // The last epoch's test used the same weights and the same digits.
            assert!((100.0 * outcome.test_accuracy - last.test_accuracy).abs() < 1e-6);
            assert_eq!(outcome.steps, 2 * 22, "{model:?}");
            assert!(!outcome.interrupted);
        }
    }

    #[test]
    fn a_stop_ends_the_training_before_the_next_step() {
        let options = options(Model::Mlp);
        options.interrupter.stop(Some("the test requested a stop"));
        let outcome = train(&options).unwrap();
        assert!(outcome.interrupted);
        assert_eq!((outcome.steps, outcome.epochs.len()), (0, 0));
    }

    #[test]
    fn artifacts_hold_a_checkpoint_and_the_metrics() {
        let directory =
            std::env::temp_dir().join(format!("tensord-demo-test-{}", std::process::id()));
        let mut options = options(Model::Mlp);
        options.artifacts = Some(directory.clone());
        train(&options).unwrap();
        for file in ["checkpoint/model-2.bpk", "train/epoch-1/Loss.log"] {
            assert!(directory.join(file).is_file(), "{file}");
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn bad_options_are_refused_before_any_work() {
        let bad: [fn(&mut TrainOptions); 5] = [
            |options| options.epochs = 0,
            |options| options.batch_size = 0,
            |options| options.devices.clear(),
            |options| options.devices = vec![Device::flex(); 3],
            |options| options.artifacts = Some("Cargo.toml/below/a/file".into()),
        ];
        for spoil in bad {
            let mut options = options(Model::Mlp);
            spoil(&mut options);
            assert!(train(&options).is_err());
        }
    }

    #[test]
    fn every_device_count_gives_each_the_same_batches() {
        let digits = Digits::split(0).train.len();
        for count in DEVICE_COUNTS.map(|count| count as usize) {
            let share = BATCH_SIZE / count;
            assert_eq!(share * count, BATCH_SIZE, "{count}");
            assert!(digits.is_multiple_of(count * share), "{count}");
        }
    }
}
