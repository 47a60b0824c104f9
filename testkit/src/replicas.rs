//! Data-parallel training of a model on several devices, with Burn's own API.
//!
//! All devices wait for each other before each step (`Barrier`). The server with which Burn
//! 0.22.1 gathers a step's gradients mixes up two steps if one device is paused at the end
//! of a backward pass while another completes its next forward pass; then all devices
//! deadlock. On small machines this happens every few hundred steps.
//!
//! The whole process has one such server, and every backward pass takes part in it. So
//! tests that use this module have a process to themselves, and only one of them trains at
//! a time.

use std::sync::{Barrier, Mutex, MutexGuard, PoisonError, mpsc};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams},
    tensor::{
        Device, Tensor,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
    },
};
use tensord_client::data;

use crate::{digits, host::COMPILE_DEADLINE, models::Classifier};

/// Batch size of a step, over all devices.
pub const BATCH: usize = 64;

/// Averages gradients.
pub const MEAN: DistributedConfig = DistributedConfig {
    all_reduce_op: ReduceOperation::Mean,
};

/// Locks out all other trainings, because Burn has one communication server per process.
pub fn training_lock() -> MutexGuard<'static, ()> {
    static TRAINING: Mutex<()> = Mutex::new(());
    TRAINING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `training` and returns its result. Burn's threads wait for each other without a
/// timeout, so a training that one of its threads has left would never end.
///
/// # Panics
///
/// If `training` panics or takes longer than [`COMPILE_DEADLINE`]: its devices may have to compile
/// kernels.
pub fn with_deadline<T: Send + 'static>(training: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(training()));
    let result = result.recv_timeout(COMPILE_DEADLINE);
    result.expect("a training that ends, and without a panic")
}

/// Returns the bits of all of a model's weights.
///
/// # Panics
///
/// If the weights cannot be read.
pub fn bits<M: Module>(model: &M) -> Vec<u32> {
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

/// Marks all float parameters of a model as shared by all devices, so that Burn reduces
/// their gradients.
pub struct MarkShared;

impl ModuleMapper for MarkShared {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
    }
}

/// One device's record of a training.
#[derive(Default)]
pub struct TrainingRecord {
    /// Loss of each step.
    pub losses: Vec<f32>,
    /// Bits of the weights after each epoch.
    pub weights: Vec<Vec<u32>>,
}

/// Whether there is another epoch: decided before each epoch, once for all ranks.
struct Epochs<F> {
    goes_on: F,
    /// Decisions so far, by the number of the epoch.
    decisions: Mutex<Vec<bool>>,
}

impl<F: Fn(usize) -> bool> Epochs<F> {
    fn has(&self, epoch: usize) -> bool {
        let mut decisions = self.decisions.lock().unwrap();
        if decisions.len() == epoch {
            decisions.push((self.goes_on)(epoch));
        }
        decisions[epoch]
    }
}

/// Trains a replica of `model` on `device`, on share `rank` of `ranks` of each batch. All
/// ranks wait for each other before each step.
fn replica<M: Classifier>(
    model: M,
    device: &Device,
    (rank, ranks): (usize, usize),
    epochs: &Epochs<impl Fn(usize) -> bool>,
    barrier: &Barrier,
) -> TrainingRecord {
    let mut model = model.fork(device);
    if ranks > 1 {
        model = model.map(&mut MarkShared);
    }
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let share = BATCH / ranks;
    let (train, _) = digits::split();
    let mut seen = TrainingRecord::default();
    for _ in (0..).take_while(|epoch| epochs.has(*epoch)) {
        for step in train.chunks(BATCH) {
            barrier.wait();
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

/// Trains a replica of `model` on each of `devices` for a number of epochs.
///
/// # Panics
///
/// If a rank panics or the training takes longer than [`with_deadline`] allows.
pub fn replicas<M: Classifier + 'static>(
    model: &M,
    devices: &[Device],
    epochs: usize,
) -> Vec<TrainingRecord> {
    replicas_while(model, devices, move |epoch| epoch < epochs)
}

/// Trains a replica of `model` on each of `devices` until `goes_on` returns `false`, which is
/// called once before each epoch, with its number from 0.
///
/// # Panics
///
/// If a rank panics or the training takes longer than [`with_deadline`] allows.
pub fn replicas_while<M: Classifier + 'static>(
    model: &M,
    devices: &[Device],
    goes_on: impl Fn(usize) -> bool + Send + Sync + 'static,
) -> Vec<TrainingRecord> {
    let epochs = Epochs {
        goes_on,
        decisions: Mutex::default(),
    };
    let model = model.clone();
    let devices: Vec<_> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let count = devices.len();
    let context = (count > 1).then(|| DistributedContext::init(devices.clone(), MEAN));
    let barrier = Barrier::new(count);
    let seen = with_deadline(move || {
        std::thread::scope(|scope| {
            let ranks = devices.iter().enumerate().map(|(rank, device)| {
                let (model, epochs, barrier) = (model.clone(), &epochs, &barrier);
                scope.spawn(move || replica(model, device, (rank, count), epochs, barrier))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    });
    drop(context);
    seen
}
