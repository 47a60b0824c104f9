//! Data-parallel training with Burn's own API, over several worker processes.
//!
//! These tests have a binary of their own, and let devices meet before each step, for the reasons
//! in `tensord_testkit::replicas`.

mod batch_norm;
mod failover;
mod mixed;
mod unreachable;

use std::sync::{Arc, Mutex};

use burn::{
    data::{
        dataloader::{DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::AdamConfig,
    tensor::{Device, Int, Tensor},
    train::{
        ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining,
        TrainOutput, TrainStep, logger::InMemoryMetricLogger, metric::LossMetric,
    },
};
use tensord_client::{LeaseRequest, LockstepBatcher};
use tensord_testkit::{
    cluster::Cluster,
    digits::{self, Digit, TRAIN},
    models::{Classifier, Mlp, ModelSize, Transformer},
    quiet::Quiet,
    replicas::{BATCH, MEAN, bits, replicas, training_lock, with_deadline},
};

const STEPS: usize = TRAIN / BATCH;

/// Returns the share of the test digits that `model` classifies correctly.
fn accuracy<M: Classifier>(model: &M, test: &[Digit], device: &Device) -> f32 {
    let (images, labels) = digits::batch(test, device);
    let guess = model.forward(images).argmax(1).squeeze_dim(1);
    guess.equal(labels).float().mean().into_scalar()
}

/// Each device's replica of a model at the beginning of each epoch.
#[derive(Debug)]
struct ReplicaRecorder {
    devices: Vec<Device>,
    steps: Vec<usize>,
    kept: Vec<Vec<Mlp>>,
}

impl ReplicaRecorder {
    fn new(devices: &[Device]) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            devices: devices.to_vec(),
            steps: vec![0; devices.len()],
            kept: vec![Vec::new(); devices.len()],
        }))
    }

    /// Records a step of `model` on `device`. Keeps a copy of the model at the first step
    /// of an epoch.
    fn step(&mut self, model: &Mlp, device: &Device) {
        let rank = self.devices.iter().position(|d| d == device).unwrap();
        if self.steps[rank].is_multiple_of(STEPS) {
            self.kept[rank].push(model.clone());
        }
        self.steps[rank] += 1;
    }
}

/// A model that is recorded in an album at each of its steps.
#[derive(Module, Debug)]
struct RecordedModel {
    mlp: Mlp,
}

#[derive(Clone, Debug)]
struct DigitBatch {
    images: Tensor<3>,
    labels: Tensor<1, Int>,
    recorder: Arc<Mutex<ReplicaRecorder>>,
}

impl InferenceStep for RecordedModel {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        let logits = self.mlp.forward(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = loss.forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl TrainStep for RecordedModel {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let device = batch.images.device();
        batch.recorder.lock().unwrap().step(&self.mlp, &device);
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

struct DigitBatcher {
    recorder: Arc<Mutex<ReplicaRecorder>>,
}

impl Batcher<Digit, DigitBatch> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> DigitBatch {
        let (images, labels) = digits::batch(&items, device);
        DigitBatch {
            images,
            labels,
            recorder: self.recorder.clone(),
        }
    }
}

const EPOCHS: usize = 8;

/// Trains a model on `devices` with Burn's own strategy, records its replicas in `recorder`,
/// and returns the model.
fn train_with_burn(devices: &[Device], recorder: &Arc<Mutex<ReplicaRecorder>>) -> Mlp {
    let (train, test) = digits::split();
    let loader = |digits: Vec<Digit>, batch, ranks| {
        let batcher = DigitBatcher {
            recorder: recorder.clone(),
        };
        DataLoaderBuilder::new(LockstepBatcher::new(batcher, ranks))
            .batch_size(batch)
            .shuffle(42)
            .set_device(devices[0].clone())
            .build(InMemDataset::new(digits))
    };
    let count = test.len();
    let test = loader(test, count, 1); // Only the first device tests.
    let train = loader(train, BATCH / devices.len(), devices.len());
    devices[0].seed(42);
    let mlp = Mlp::new(&ModelSize::SMALL, &devices[0]).fork(&devices[0]);
    let learner = Learner::new(RecordedModel { mlp }, AdamConfig::new().init(), 1e-2);
    let strategy = ExecutionStrategy::ddp(devices.to_vec(), MEAN);
    // Nothing is written to the directory.
    let trained = SupervisedTraining::new("", train, test)
        .num_epochs(EPOCHS)
        .metrics((LossMetric::new(),))
        .renderer(Box::new(Quiet))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_application_logger(None)
        .with_training_strategy(strategy.into())
        .launch(learner);
    assert!(trained.error.is_none(), "{:?}", trained.error);
    trained.model.mlp
}

/// Trains on four devices of the given workers.
fn check_burn_strategy(workers: &[&str]) {
    let _alone = training_lock();
    let cluster = Cluster::start(workers);
    let lease = cluster.pool().lease(LeaseRequest::devices(4)).unwrap();
    let mut names: Vec<_> = lease.descriptions().into_iter().map(|d| d.worker).collect();
    names.dedup();
    assert_eq!(names.len(), workers.len(), "{names:?}");
    let autodiff = |device: &Device| device.clone().autodiff();
    let devices: Vec<_> = lease.devices().iter().map(autodiff).collect();
    let recorder = ReplicaRecorder::new(&devices);
    let shown = recorder.clone();
    let mlp = with_deadline(move || train_with_burn(&devices, &shown));

    let (_, test) = digits::split();
    let accuracy = accuracy(&mlp, &test, &lease.devices()[0]);
    assert!(accuracy >= 0.95, "{accuracy}");
    let recorder = recorder.lock().unwrap();
    assert_eq!(recorder.steps, [EPOCHS * STEPS; 4]);
    let mut before = Vec::new();
    for epoch in 0..EPOCHS {
        let first = bits(&recorder.kept[0][epoch]);
        assert_ne!(first, before, "epoch {epoch} taught nothing");
        for (rank, kept) in recorder.kept.iter().enumerate().skip(1) {
            assert!(bits(&kept[epoch]) == first, "rank {rank}, epoch {epoch}");
        }
        before = first;
    }
}

#[test]
fn burns_own_strategy_learns_on_four_devices_of_two_workers() {
    check_burn_strategy(&["flex*2", "flex*2"]);
}

#[test]
fn burns_own_strategy_learns_on_four_devices_of_four_workers() {
    check_burn_strategy(&["flex", "flex", "flex", "flex"]);
}

/// Checks that the losses are the same when one device takes a whole batch and when two or
/// four devices share the batch.
fn check_losses_for_all_device_counts<M: Classifier + 'static>() {
    let _alone = training_lock();
    let cluster = Cluster::start(&["flex*2", "flex*2"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(4)).unwrap();
    let devices = lease.devices();
    let first = devices[0].clone().autodiff();
    first.seed(42);
    let model = M::new(&ModelSize::SMALL, &first).fork(&first);
    let reference = replicas(&model, &devices[..1], 2).remove(0).losses;
    assert!(reference[reference.len() - 1] < 0.5 * reference[0]);
    // Two devices on different workers, then all four.
    for devices in [
        vec![devices[0].clone(), devices[2].clone()],
        devices.to_vec(),
    ] {
        let seen = replicas(&model, &devices, 2);
        let ranks = seen.len();
        for (step, &expected) in reference.iter().enumerate() {
            let loss = seen.iter().map(|seen| seen.losses[step]).sum::<f32>() / ranks as f32;
            assert!(
                (loss - expected).abs() <= 1e-4 * expected,
                "{ranks} devices, step {step}: {loss} instead of {expected}"
            );
        }
        for (rank, other) in seen.iter().enumerate().skip(1) {
            assert!(
                other.weights == seen[0].weights,
                "{ranks} devices, rank {rank}"
            );
        }
    }
}

#[test]
fn mlp_losses_do_not_depend_on_device_count() {
    check_losses_for_all_device_counts::<Mlp>();
}

#[test]
fn transformer_losses_do_not_depend_on_device_count() {
    check_losses_for_all_device_counts::<Transformer>();
}
