//! A data-parallel training run, as in Burn's own strategy: a thread for each device, and
//! gradients that Burn reduces during the backward pass.
//!
//! Burn's strategy does not expose the losses and weights of devices other than the first;
//! this one does.

use std::{
    sync::{
        Arc, Barrier,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Device, Tensor, distributed::DistributedContext},
};
use tensord_testkit::replicas::{MEAN, MarkShared};

use crate::{
    data::{PendingRead, ReadStart, Upload, into_data, start_read},
    models::{Model, Network},
    stats::Summary,
    trainer::{Batch, Trainer},
};

/// Time limit of a run; the longest ones here take about a minute.
const DEADLINE: Duration = Duration::from_secs(600);

/// The model, batch and length of a training.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainingPlan {
    pub(super) model: Model,
    /// Images in a batch, over all devices.
    pub(super) batch: usize,
    /// Batches of an epoch, the same in each epoch.
    pub(super) steps: usize,
    pub(super) epochs: usize,
}

/// The result of a training.
#[derive(Debug, Clone)]
pub(super) struct Trained {
    /// Loss of each step, the mean over all devices.
    pub(super) losses: Vec<f64>,
    /// Whether after each epoch all devices had the same weights.
    pub(super) weights_identical: bool,
    epochs: Vec<Duration>,
}

/// The result of a training on one device.
struct RankResult {
    losses: Vec<f32>,
    epochs: Vec<Epoch>,
}

struct Epoch {
    begun: Instant,
    ended: Instant,
    weights: Vec<u8>,
}

impl Trained {
    /// Returns the steps per second of all epochs but the first, which warms up.
    pub(super) fn steps_per_s(&self, plan: &TrainingPlan) -> Option<Summary> {
        let epochs = self.epochs.iter().skip(1);
        let rates = epochs.map(|took| plan.steps as f64 / took.as_secs_f64());
        Summary::of(&rates.collect::<Vec<_>>())
    }
}

/// Trains on all of `devices` at the same time.
///
/// # Errors
///
/// If a device fails.
pub(super) fn train(plan: &TrainingPlan, devices: &[Device]) -> Result<Trained> {
    let devices: Vec<Device> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let world = devices.len();
    let _context = (world > 1).then(|| context(&devices));
    let network = Network::new(plan.model, &devices[0]);
    let batches = (0..plan.steps as u64).map(|seed| Batch::noise(plan.batch, seed));
    let batches: Arc<[Batch]> = batches.collect();
    // Burn 0.22.1 mixes up two steps and hangs when a device begins a step before another
    // has ended the previous one.
    let barrier = Arc::new(Barrier::new(world));
    let (result_sender, results) = channel();
    for (rank, device) in devices.into_iter().enumerate() {
        let (network, batches, result_sender) =
            (network.clone(), batches.clone(), result_sender.clone());
        let barrier = barrier.clone();
        let epochs = plan.epochs;
        thread::spawn(move || {
            let shards = batches.iter().map(|batch| batch.shard(rank, world));
            let shards = shards.collect::<Result<Vec<_>>>();
            let rank_result = shards.and_then(|shards| {
                let network = fork(network, &device, world);
                train_rank(network, &device, &shards, epochs, &barrier)
            });
            // The receiver is gone once another rank has failed.
            let _ = result_sender.send(rank_result.with_context(|| format!("rank {rank}")));
        });
    }
    drop(result_sender);
    let until = Instant::now() + DEADLINE;
    let mut ranks = Vec::new();
    while ranks.len() < world {
        // Ranks wait for each other: a failed rank leaves the others hanging.
        let left = until.saturating_duration_since(Instant::now());
        match results.recv_timeout(left) {
            Ok(rank_result) => ranks.push(rank_result?),
            Err(RecvTimeoutError::Timeout) => bail!("the training did not end within {DEADLINE:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("a rank panicked"),
        }
    }
    combine_ranks(&ranks)
}

/// Creates the context that Burn needs to reduce gradients. A process can have one at a
/// time.
pub(super) fn context(devices: &[Device]) -> DistributedContext {
    DistributedContext::init(devices.to_vec(), MEAN)
}

/// Moves `network` to `device`, and marks its gradients for reduction if there are other
/// devices.
pub(super) fn fork<M: Module>(network: M, device: &Device, world: usize) -> M {
    let network = network.fork(device);
    match world {
        1 => network,
        _ => network.map(&mut MarkShared),
    }
}

fn train_rank(
    network: Network,
    device: &Device,
    shards: &[Batch],
    epochs: usize,
    barrier: &Barrier,
) -> Result<RankResult> {
    let mut trainer = Trainer::with_network(network, device, Upload::Helper);
    let mut rank_result = RankResult {
        losses: Vec::new(),
        epochs: Vec::new(),
    };
    for _ in 0..epochs {
        let begun = Instant::now();
        let mut pending_read: Option<PendingRead> = None;
        for shard in shards {
            barrier.wait();
            let read = start_read(trainer.step(shard.clone())?, ReadStart::Call);
            if let Some(before) = pending_read.replace(read) {
                rank_result.losses.push(before.scalar()?);
            }
        }
        rank_result.losses.push(
            pending_read
                .context("the training ran no steps")?
                .scalar()?,
        );
        let ended = Instant::now();
        rank_result.epochs.push(Epoch {
            begun,
            ended,
            weights: weights(trainer.network()?)?,
        });
    }
    Ok(rank_result)
}

/// Returns the bytes of all weights.
fn weights(network: &Network) -> Result<Vec<u8>> {
    struct Reader(Result<Vec<u8>>);

    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Ok(bytes) = &mut self.0 {
                match into_data(param.val().inner(), Upload::Helper) {
                    Ok(data) => bytes.extend(data.as_bytes()),
                    Err(error) => self.0 = Err(error),
                }
            }
        }
    }

    let mut reader = Reader(Ok(Vec::new()));
    network.visit(&mut reader);
    reader.0
}

/// Combines the results of all devices.
fn combine_ranks(ranks: &[RankResult]) -> Result<Trained> {
    let first = ranks.first().context("the lease has no devices")?;
    let losses = (0..first.losses.len()).map(|step| {
        let sum: f64 = ranks.iter().map(|rank| f64::from(rank.losses[step])).sum();
        let loss = sum / ranks.len() as f64;
        ensure!(loss.is_finite(), "the loss of step {step} is {loss}");
        Ok(loss)
    });
    let epochs = (0..first.epochs.len()).map(|epoch| {
        let all = ranks.iter().map(|rank| &rank.epochs[epoch]);
        let begun = all.clone().map(|epoch| epoch.begun).min();
        let ended = all.map(|epoch| epoch.ended).max();
        let (begun, ended) = begun
            .zip(ended)
            .ok_or_else(|| anyhow!("the training returned no epochs"))?;
        Ok(ended - begun)
    });
    let alike = |rank: &RankResult| {
        let mut pairs = rank.epochs.iter().zip(&first.epochs);
        pairs.all(|(a, b)| a.weights == b.weights && !a.weights.is_empty())
    };
    Ok(Trained {
        losses: losses.collect::<Result<_>>()?,
        epochs: epochs.collect::<Result<_>>()?,
        weights_identical: ranks.iter().all(alike),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_decreases_on_one_device() {
        let plan = TrainingPlan {
            model: Model::Mlp,
            batch: 8,
            steps: 2,
            epochs: 3,
        };
        let trained = train(&plan, &[Device::flex()]).unwrap();
        assert_eq!(trained.losses.len(), 6);
        assert!(trained.losses[5] < trained.losses[0], "{trained:?}");
        assert!(trained.weights_identical);
        assert!(trained.steps_per_s(&plan).is_some());
    }

    #[test]
    fn differing_weight_is_detected() {
        let rank_result = |weight: u8, loss: f32| RankResult {
            losses: vec![loss],
            epochs: vec![Epoch {
                begun: Instant::now(),
                ended: Instant::now(),
                weights: vec![weight],
            }],
        };
        let same = combine_ranks(&[rank_result(1, 1.0), rank_result(1, 2.0)]).unwrap();
        assert!(same.weights_identical);
        assert_eq!(same.losses, [1.5]);
        let other = combine_ranks(&[rank_result(1, 1.0), rank_result(2, 1.0)]).unwrap();
        assert!(!other.weights_identical);
        assert!(combine_ranks(&[rank_result(1, f32::NAN)]).is_err());
    }
}
