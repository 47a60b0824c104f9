//! One rank of a step with or without communication: a thread with a replica of a deep
//! network.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{
        Device, Distribution, Tensor,
        activation::relu,
        distributed::{ReduceOperation, all_reduce},
    },
};

use crate::bench::ddp::train::fork;

const WIDTH: usize = 512;
/// Features of the input. Few, because the gradient that is reduced last cannot be hidden.
const INPUT: usize = 64;

const LEARNING_RATE: f64 = 1e-3;

/// Time limit of a step.
const DEADLINE: Duration = Duration::from_secs(120);

/// The time at which gradients are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Overlapped,
    Never,
    Afterwards,
}

/// A step to take.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankTurn {
    pub(super) mode: Mode,
    pub(super) batch: usize,
}

/// A device's thread.
pub(super) struct Rank {
    turn_sender: SyncSender<RankTurn>,
    done: Receiver<Result<()>>,
}

impl Rank {
    /// Starts the thread of device `rank` of `devices`, with a replica of `deep`.
    pub(super) fn start(deep: DeepNetwork, rank: usize, devices: &[Device]) -> Self {
        let (turn_sender, turn_receiver) = sync_channel::<RankTurn>(1);
        let (result_sender, done) = sync_channel(1);
        let (device, devices) = (devices[rank].clone(), devices.to_vec());
        thread::spawn(move || {
            let mut replica = Replica::new(&deep, device, devices);
            drop(deep);
            // Ends when the handle is dropped.
            for turn in turn_receiver {
                if result_sender.send(replica.step(turn)).is_err() {
                    return;
                }
            }
        });
        Self { turn_sender, done }
    }

    /// Starts a step.
    ///
    /// # Errors
    ///
    /// If the thread has ended.
    pub(super) fn begin(&self, turn: RankTurn) -> Result<()> {
        self.turn_sender.send(turn).context("a rank has ended")
    }

    /// Waits until the step is done.
    ///
    /// # Errors
    ///
    /// If the step fails.
    pub(super) fn end(&self) -> Result<()> {
        self.done
            .recv_timeout(DEADLINE)
            .context("a rank did not answer in time")?
    }
}

/// The network on one device.
struct Replica {
    /// The replica whose gradients Burn reduces.
    distributed_network: Option<DeepNetwork>,
    local_network: Option<DeepNetwork>,
    input: Option<Tensor<2>>,
    optimizer: ModuleOptimizer,
    device: Device,
    devices: Vec<Device>,
}

impl Replica {
    fn new(deep: &DeepNetwork, device: Device, devices: Vec<Device>) -> Self {
        Self {
            distributed_network: Some(fork(deep.clone(), &device, devices.len())),
            local_network: Some(fork(deep.clone(), &device, 1)),
            input: None,
            optimizer: SgdConfig::new().init(),
            device,
            devices,
        }
    }

    fn step(&mut self, turn: RankTurn) -> Result<()> {
        let input = self.input(turn.batch);
        let network = match turn.mode {
            Mode::Overlapped => &mut self.distributed_network,
            Mode::Never | Mode::Afterwards => &mut self.local_network,
        };
        let deep = network.take().context("a step failed before")?;
        let loss = deep.forward(input).powi_scalar(2).mean();
        let mut gradients = GradientsParams::from_grads(loss.backward(), &deep);
        if turn.mode == Mode::Afterwards {
            self.device.sync().context("cannot sync")?;
            let devices = self.devices.clone();
            deep.visit(&mut Reduce {
                gradients: &mut gradients,
                devices,
            });
        }
        *network = Some(self.optimizer.step(LEARNING_RATE, deep, gradients));
        self.device.sync().context("cannot sync")
    }

    /// Returns the input of `batch` rows, which is created once.
    fn input(&mut self, batch: usize) -> Tensor<2> {
        let known = self.input.take().filter(|input| input.dims()[0] == batch);
        let make = || Tensor::random([batch, INPUT], Distribution::Default, &self.device);
        self.input.insert(known.unwrap_or_else(make)).clone()
    }
}

/// Reduces the gradient of every weight.
struct Reduce<'a> {
    gradients: &'a mut GradientsParams,
    devices: Vec<Device>,
}

impl ModuleVisitor for Reduce<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let reduced = all_reduce(gradient, ReduceOperation::Mean, self.devices.clone());
            self.gradients.register(param.id, reduced.resolve());
        }
    }
}

/// A network of many layers of the same size.
#[derive(Module, Debug)]
pub(super) struct DeepNetwork {
    first: Linear,
    layers: Vec<Linear>,
}

impl DeepNetwork {
    /// Creates a network of an input layer and `layers` equal layers.
    pub(super) fn new(device: &Device, layers: usize) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            first: LinearConfig::new(INPUT, WIDTH).init(device),
            layers: (0..layers).map(layer).collect(),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(input));
        let next = |x, layer: &Linear| relu(layer.forward(x));
        self.layers.iter().fold(x, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_can_step_alone() {
        let device = Device::flex().autodiff();
        let deep = DeepNetwork::new(&device, 1);
        let mut replica = Replica::new(&deep, device.clone(), vec![device]);
        for batch in [2, 2, 3] {
            let turn = RankTurn {
                mode: Mode::Never,
                batch,
            };
            replica.step(turn).unwrap();
            assert_eq!(replica.input(batch).dims(), [batch, INPUT]);
        }
    }
}
