//! Data-parallel training by Burn's own means, over several worker processes.
//!
//! Devices meet before each step (`Barrier`): the server with which Burn 0.22.1
//! gathers a step's gradients mixes up two steps when one device is paused at the
//! end of a backward pass while another is through its next forward pass, and then
//! all wait for ever. Small machines do that every few hundred steps.
//!
//! A binary of its own: that server is one for the whole process, and any backward
//! pass of another test would take part.

use std::{
    sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use burn::{
    data::{
        dataloader::{DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams},
    tensor::{
        Device, Int, Tensor,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
    },
    train::{
        ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining,
        TrainOutput, TrainStep, logger::InMemoryMetricLogger, metric::LossMetric,
    },
};
use tensord_client::{LeaseRequest, data};
use tensord_tests::{
    cluster::Cluster,
    digits::{self, Digit, TRAIN},
    quiet::Quiet,
    training::{Classifier, Mlp, Transformer},
};

/// Digits a step, those of all devices.
const BATCH: usize = 64;
const STEPS: usize = TRAIN / BATCH;
const MEAN: DistributedConfig = DistributedConfig {
    all_reduce_op: ReduceOperation::Mean,
};

/// Burn has one communication server a process, so one test at a time trains.
fn alone() -> MutexGuard<'static, ()> {
    static TRAINING: Mutex<()> = Mutex::new(());
    TRAINING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `training` returns. Burn's threads wait for each other without a
/// deadline, so a training that one of them has left would not end.
fn in_time<T: Send + 'static>(training: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(training()));
    let result = result.recv_timeout(Duration::from_secs(120));
    result.expect("a training that ends, and without a panic")
}

/// The bits of all of a model's weights.
fn bits<M: Module>(model: &M) -> Vec<u32> {
    struct Bits(Vec<u32>);

    impl ModuleVisitor for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = data::into_data(param.val()).unwrap();
            let values = values.try_to_vec::<f32>().unwrap();
            self.0.extend(values.into_iter().map(f32::to_bits));
        }
    }

    let mut bits = Bits(Vec::new());
    model.visit(&mut bits);
    bits.0
}

/// The share of the test's digits that `model` gets right.
fn accuracy<M: Classifier>(model: &M, test: &[Digit], device: &Device) -> f32 {
    let (images, labels) = digits::batch(test, device);
    let guess = model.forward(images).argmax(1).squeeze_dim(1);
    guess.equal(labels).float().mean().into_scalar()
}

/// The replicas of a model as each device has them at the beginning of each epoch.
#[derive(Debug)]
struct Album {
    devices: Vec<Device>,
    steps: Vec<usize>,
    kept: Vec<Vec<Mlp>>,
}

impl Album {
    fn new(devices: &[Device]) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            devices: devices.to_vec(),
            steps: vec![0; devices.len()],
            kept: vec![Vec::new(); devices.len()],
        }))
    }

    /// Takes note of a step of `model` on `device`.
    fn step(&mut self, model: &Mlp, device: &Device) {
        let rank = self.devices.iter().position(|d| d == device).unwrap();
        if self.steps[rank].is_multiple_of(STEPS) {
            self.kept[rank].push(model.clone());
        }
        self.steps[rank] += 1;
    }
}

/// A model that shows itself to an album at each of its steps.
#[derive(Module, Debug)]
struct Shown {
    mlp: Mlp,
}

#[derive(Clone, Debug)]
struct DigitBatch {
    images: Tensor<3>,
    labels: Tensor<1, Int>,
    album: Arc<Mutex<Album>>,
}

impl InferenceStep for Shown {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        let logits = self.mlp.forward(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = loss.forward(logits.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, logits, batch.labels)
    }
}

impl TrainStep for Shown {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let device = batch.images.device();
        batch.album.lock().unwrap().step(&self.mlp, &device);
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

struct DigitBatcher {
    album: Arc<Mutex<Album>>,
    together: Barrier,
}

impl Batcher<Digit, DigitBatch> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> DigitBatch {
        self.together.wait();
        let (images, labels) = digits::batch(&items, device);
        DigitBatch {
            images,
            labels,
            album: self.album.clone(),
        }
    }
}

const EPOCHS: usize = 8;

/// A model trained on `devices` with Burn's own strategy, which shows its
/// replicas to `album`.
fn train_with_burn(devices: &[Device], album: &Arc<Mutex<Album>>) -> Mlp {
    let (train, test) = digits::split();
    let loader = |digits: Vec<Digit>, batch, meeting| {
        let batcher = DigitBatcher {
            album: album.clone(),
            together: Barrier::new(meeting),
        };
        DataLoaderBuilder::new(batcher)
            .batch_size(batch)
            .shuffle(42)
            .set_device(devices[0].clone())
            .build(InMemDataset::new(digits))
    };
    let count = test.len();
    let test = loader(test, count, 1); // By the first device alone.
    let train = loader(train, BATCH / devices.len(), devices.len());
    devices[0].seed(42);
    let mlp = Mlp::new(&devices[0]).fork(&devices[0]);
    let learner = Learner::new(Shown { mlp }, AdamConfig::new().init(), 1e-2);
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
fn burns_own_strategy_on(workers: &[&str]) {
    let _alone = alone();
    let cluster = Cluster::start(workers);
    let lease = cluster.pool().lease(LeaseRequest::devices(4)).unwrap();
    let mut names: Vec<_> = lease.descriptions().into_iter().map(|d| d.worker).collect();
    names.dedup();
    assert_eq!(names.len(), workers.len(), "{names:?}");
    let autodiff = |device: &Device| device.clone().autodiff();
    let devices: Vec<_> = lease.devices().iter().map(autodiff).collect();
    let album = Album::new(&devices);
    let shown = album.clone();
    let mlp = in_time(move || train_with_burn(&devices, &shown));

    let (_, test) = digits::split();
    let accuracy = accuracy(&mlp, &test, &lease.devices()[0]);
    assert!(accuracy >= 0.95, "{accuracy}");
    let album = album.lock().unwrap();
    assert_eq!(album.steps, [EPOCHS * STEPS; 4]);
    let mut before = Vec::new();
    for epoch in 0..EPOCHS {
        let first = bits(&album.kept[0][epoch]);
        assert_ne!(first, before, "epoch {epoch} taught nothing");
        for (rank, kept) in album.kept.iter().enumerate().skip(1) {
            assert!(bits(&kept[epoch]) == first, "rank {rank}, epoch {epoch}");
        }
        before = first;
    }
}

#[test]
fn burns_own_strategy_learns_on_four_devices_of_two_workers() {
    burns_own_strategy_on(&["flex*2", "flex*2"]);
}

#[test]
fn burns_own_strategy_learns_on_four_devices_of_four_workers() {
    burns_own_strategy_on(&["flex", "flex", "flex", "flex"]);
}

/// Marks the weights whose gradients are to be averaged.
struct Shared;

impl ModuleMapper for Shared {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
    }
}

/// What a device saw of a training: its loss in each step, and its weights
/// after each epoch.
#[derive(Default)]
struct Seen {
    losses: Vec<f32>,
    weights: Vec<Vec<u32>>,
}

/// Trains `model`'s replica on `device`, on the share of each step's digits that
/// is the `rank`th of `ranks`. All of them meet before each step.
fn replica<M: Classifier>(
    model: M,
    device: &Device,
    (rank, ranks): (usize, usize),
    together: &Barrier,
) -> Seen {
    const EPOCHS: usize = 2;
    let mut model = model.fork(device);
    if ranks > 1 {
        model = model.map(&mut Shared);
    }
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let share = BATCH / ranks;
    let (train, _) = digits::split();
    let mut seen = Seen::default();
    for _ in 0..EPOCHS {
        for step in train.chunks(BATCH) {
            together.wait();
            let (images, labels) = digits::batch(&step[rank * share..][..share], device);
            let loss = cross_entropy.forward(model.forward(images), labels);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(5e-3, model, gradients);
            seen.losses.push(loss.into_scalar());
        }
        seen.weights.push(bits(&model));
    }
    seen
}

/// Trains a replica of `model` on each of `devices`.
fn replicas<M: Classifier + 'static>(model: &M, devices: &[Device]) -> Vec<Seen> {
    let model = model.clone();
    let devices: Vec<_> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let count = devices.len();
    let context = (count > 1).then(|| DistributedContext::init(devices.clone(), MEAN));
    let together = Barrier::new(count);
    let seen = in_time(move || {
        std::thread::scope(|scope| {
            let ranks = devices.iter().enumerate().map(|(rank, device)| {
                let (model, together) = (model.clone(), &together);
                scope.spawn(move || replica(model, device, (rank, count), together))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    });
    drop(context);
    seen
}

/// The same digits a step on one device, and divided among two and four.
fn the_curve_does_not_depend_on_the_number_of_devices<M: Classifier + 'static>() {
    let _alone = alone();
    let cluster = Cluster::start(&["flex*2", "flex*2"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(4)).unwrap();
    let devices = lease.devices();
    let first = devices[0].clone().autodiff();
    first.seed(42);
    let model = M::new(&first).fork(&first);
    let reference = replicas(&model, &devices[..1]).remove(0).losses;
    assert!(reference[reference.len() - 1] < 0.5 * reference[0]);
    // Two devices on different workers, then all four.
    for devices in [
        vec![devices[0].clone(), devices[2].clone()],
        devices.to_vec(),
    ] {
        let seen = replicas(&model, &devices);
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
fn the_curve_of_an_mlp_does_not_depend_on_the_number_of_devices() {
    the_curve_does_not_depend_on_the_number_of_devices::<Mlp>();
}

#[test]
fn the_curve_of_a_transformer_does_not_depend_on_the_number_of_devices() {
    the_curve_does_not_depend_on_the_number_of_devices::<Transformer>();
}
