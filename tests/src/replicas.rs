//! Replicas of a model, trained by several devices together with Burn's own means.
//!
//! Devices meet before each step (`Barrier`): the server with which Burn 0.22.1
//! gathers a step's gradients mixes up two steps when one device is paused at the
//! end of a backward pass while another is through its next forward pass, and then
//! all wait for ever. Small machines do that every few hundred steps.
//!
//! That server is one for the whole process, and any backward pass takes part: tests
//! that use this have a process to themselves, and one at a time trains.

use std::{
    sync::{Barrier, Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

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

use crate::{digits, training::Classifier};

/// Digits a step, those of all devices.
pub const BATCH: usize = 64;

/// Gradients are averaged.
pub const MEAN: DistributedConfig = DistributedConfig {
    all_reduce_op: ReduceOperation::Mean,
};

/// Burn has one communication server a process, so one test at a time trains.
pub fn alone() -> MutexGuard<'static, ()> {
    static TRAINING: Mutex<()> = Mutex::new(());
    TRAINING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `training` returns. Burn's threads wait for each other without a
/// deadline, so a training that one of them has left would not end.
///
/// # Panics
///
/// When it does, or does not end.
pub fn in_time<T: Send + 'static>(training: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(training()));
    let result = result.recv_timeout(Duration::from_secs(120));
    result.expect("a training that ends, and without a panic")
}

/// The bits of all of a model's weights.
///
/// # Panics
///
/// When they cannot be read.
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
pub struct Seen {
    /// By step.
    pub losses: Vec<f32>,
    /// Their bits, by epoch.
    pub weights: Vec<Vec<u32>>,
}

/// Trains `model`'s replica on `device`, on the share of each step's digits that
/// is the `rank`th of `ranks`. All of them meet before each step.
fn replica<M: Classifier>(
    model: M,
    device: &Device,
    (rank, ranks): (usize, usize),
    epochs: usize,
    together: &Barrier,
) -> Seen {
    let mut model = model.fork(device);
    if ranks > 1 {
        model = model.map(&mut Shared);
    }
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let share = BATCH / ranks;
    let (train, _) = digits::split();
    let mut seen = Seen::default();
    for _ in 0..epochs {
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
///
/// # Panics
///
/// When a rank does, or the training does not end.
pub fn replicas<M: Classifier + 'static>(
    model: &M,
    devices: &[Device],
    epochs: usize,
) -> Vec<Seen> {
    let model = model.clone();
    let devices: Vec<_> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let count = devices.len();
    let context = (count > 1).then(|| DistributedContext::init(devices.clone(), MEAN));
    let together = Barrier::new(count);
    let seen = in_time(move || {
        std::thread::scope(|scope| {
            let ranks = devices.iter().enumerate().map(|(rank, device)| {
                let (model, together) = (model.clone(), &together);
                scope.spawn(move || replica(model, device, (rank, count), epochs, together))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    });
    drop(context);
    seen
}
