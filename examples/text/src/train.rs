//! The training loop. A *rank* is a device's part in it: a replica of the model, which trains
//! on a share of each batch.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::PathBuf,
    sync::{Arc, mpsc},
};

use anyhow::{Context, Result, anyhow};
use burn::{
    data::dataloader::batcher::Batcher,
    grad_clipping::GradientClippingConfig,
    lr_scheduler::noam::NoamLrSchedulerConfig,
    module::{Module, ModuleMapper, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamWConfig, GradientsAccumulator, GradientsParams},
    tensor::{
        Device, Tensor,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
    },
};
use tensord_client::{LockstepBatcher, data};

use crate::{
    checkpoint::{self, State},
    corpus::{Sentence, Tokenizer},
    model::{Batch, Classifier, WIDTH},
};

/// Backward passes of a step. Their gradients are added up.
const ACCUMULATED: usize = 2;

/// Sentences of a backward pass, which the ranks share equally.
pub(crate) const BATCH: usize = 32;

/// Steps in which the learning rate rises.
const WARMUP: usize = 30;

/// Steps whose losses are read at a time: a read waits for the device.
const UNREAD: usize = 10;

/// The seed of the weights; those of dropout come after it.
const SEED: u64 = 42;

/// What to do.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Steps in all, with those before a checkpoint.
    pub(crate) steps: usize,
    pub(crate) dropout: f64,
    /// Where checkpoints are.
    pub(crate) directory: Option<PathBuf>,
    /// Steps between two checkpoints.
    pub(crate) checkpoint_every: usize,
}

/// Makes the batches of a rank. With several ranks, each waits for the others here, before
/// each backward pass, as Burn 0.22.1 needs.
struct Sentences(Arc<Tokenizer>);

impl Batcher<Sentence, Batch> for Sentences {
    fn batch(&self, sentences: Vec<Sentence>, device: &Device) -> Batch {
        Batch::new(&sentences, &self.0, device)
    }
}

/// Has Burn average the gradients of all ranks in the next backward pass. Burn 0.22.1 forgets
/// the mark in each backward pass, and sets it again when the optimizer changes a weight. So
/// with accumulated gradients, weights must be marked before each pass.
struct MarkShared;

impl ModuleMapper for MarkShared {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
    }
}

/// Trains on `devices`, from the last checkpoint if there is one. Prints the loss of each
/// step, and returns the model.
pub(crate) fn train(
    sentences: &[Sentence],
    tokenizer: &Arc<Tokenizer>,
    devices: &[Device],
    options: &Options,
) -> Result<Classifier> {
    let state = start(tokenizer, options)?;
    let ranks = devices.len();
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    // Gradients are averaged as long as this exists.
    let _context = (ranks > 1).then(|| DistributedContext::init(devices.to_vec(), config));
    let batcher = LockstepBatcher::new(Sentences(tokenizer.clone()), ranks);
    let (sender, losses) = mpsc::sync_channel(UNREAD * ranks);
    let models: Vec<Result<Classifier>> = std::thread::scope(|scope| {
        let threads = devices.iter().enumerate().map(|(rank, device)| {
            let replica = Replica {
                state: state.clone(),
                device: device.clone(),
                rank,
                ranks,
                losses: sender.clone(),
            };
            let batcher = &batcher;
            scope.spawn(move || replica.run(sentences, batcher, options))
        });
        let threads: Vec<_> = threads.collect();
        drop(sender);
        print_losses(&losses, ranks);
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined
            .map(|result| result.unwrap_or_else(|panic| Err(anyhow!("{}", message(&*panic)))))
            .collect()
    });
    let models: Result<Vec<Classifier>> = models.into_iter().collect();
    models?.into_iter().next().context("there is no device")
}

/// Prints the mean of all ranks' losses of a step as soon as all have sent theirs, until the
/// ranks have ended.
fn print_losses(losses: &mpsc::Receiver<(usize, f32)>, ranks: usize) {
    let mut steps = BTreeMap::<usize, Vec<f32>>::new();
    for (step, loss) in losses {
        let seen = steps.entry(step).or_default();
        seen.push(loss);
        if seen.len() == ranks {
            println!(
                "step {step}  loss {}",
                seen.iter().sum::<f32>() / ranks as f32
            );
            steps.remove(&step);
        }
    }
}

/// Returns what the thread panicked with.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref().copied())
        .unwrap_or("a rank panicked")
}

/// Makes a new model, or loads the last checkpoint. The weights are made in this process, so
/// they are the same for all kinds of devices.
fn start(tokenizer: &Tokenizer, options: &Options) -> Result<State> {
    let device = Device::flex().autodiff();
    device.seed(SEED);
    let clipping = GradientClippingConfig::Norm(1.0);
    let optimizer = AdamWConfig::new().with_grad_clipping(Some(clipping));
    let schedule = NoamLrSchedulerConfig::new(0.3)
        .with_warmup_steps(WARMUP)
        .with_model_size(WIDTH)
        .init();
    let state = State {
        steps: 0,
        model: Classifier::new(tokenizer, options.dropout, &device),
        optimizer: optimizer.init(),
        schedule: schedule.map_err(|e| anyhow!("the schedule: {e}"))?,
    };
    let Some(directory) = &options.directory else {
        return Ok(state);
    };
    match checkpoint::last(directory)? {
        None => Ok(state),
        Some((steps, path)) => {
            println!("goes on from {}", path.display());
            checkpoint::load(state, steps, &path)
        }
    }
}

/// A rank of the training.
struct Replica {
    state: State,
    device: Device,
    rank: usize,
    ranks: usize,
    /// Takes the number and the loss of each step.
    losses: mpsc::SyncSender<(usize, f32)>,
}

impl Replica {
    fn run(
        mut self,
        sentences: &[Sentence],
        batcher: &LockstepBatcher<Sentences>,
        options: &Options,
    ) -> Result<Classifier> {
        self.state.model = self.state.model.fork(&self.device);
        let mut unread = Vec::new();
        while self.state.steps < options.steps {
            unread.push(self.step(sentences, batcher));
            self.state.steps += 1;
            let steps = self.state.steps;
            let is_last = steps == options.steps;
            // All ranks have the same weights, so the first one's are enough.
            if self.rank == 0
                && (is_last || steps.is_multiple_of(options.checkpoint_every))
                && let Some(directory) = &options.directory
            {
                checkpoint::save(&self.state, directory)?;
            }
            if is_last || unread.len() == UNREAD {
                let first = steps - unread.len();
                let losses = data::into_data(Tensor::cat(std::mem::take(&mut unread), 0))?;
                for (step, loss) in (first + 1..).zip(losses.try_to_vec()?) {
                    self.losses.send((step, loss))?;
                }
            }
        }
        Ok(self.state.model)
    }

    /// Takes a step of [`ACCUMULATED`] backward passes. Returns its loss, on the device.
    fn step(&mut self, sentences: &[Sentence], batcher: &LockstepBatcher<Sentences>) -> Tensor<1> {
        let State {
            model,
            optimizer,
            schedule,
            steps,
        } = &mut self.state;
        let cross_entropy = CrossEntropyLossConfig::new().init(&self.device);
        let mut gradients = GradientsAccumulator::new();
        let mut sum = None;
        for pass in *steps * ACCUMULATED..(*steps + 1) * ACCUMULATED {
            let share = share(pass, sentences.len(), (self.rank, self.ranks));
            let batch = batcher.batch(sentences[share].to_vec(), &self.device);
            // What dropout drops depends on the pass and the rank only. So a training that
            // goes on from a checkpoint drops the same as one that was not interrupted.
            self.device
                .seed(SEED + (1 + pass * self.ranks + self.rank) as u64);
            if self.ranks > 1 {
                *model = model.clone().map(&mut MarkShared);
            }
            let loss = cross_entropy.forward(model.forward(&batch), batch.topics.clone());
            let loss = loss / ACCUMULATED as f32;
            let detached = loss.clone().detach();
            let new = GradientsParams::from_grads(loss.backward(), model);
            gradients.accumulate(model, new);
            sum = Some(match sum {
                None => detached,
                Some(sum) => sum + detached,
            });
        }
        *model = optimizer.step(schedule.step(), model.clone(), gradients.grads());
        sum.expect("a step has a pass").inner()
    }
}

/// Returns which of `count` sentences a rank takes in a backward pass. After the last whole
/// batch it begins again.
fn share(pass: usize, count: usize, (rank, ranks): (usize, usize)) -> Range<usize> {
    let size = BATCH / ranks;
    let begin = pass % (count / BATCH) * BATCH + rank * size;
    begin..begin + size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_each_batch_and_batches_begin_again() {
        for ranks in [1, 2, 4] {
            for (pass, begin) in [(0, 0), (1, 32), (2, 64), (3, 0), (7, 32)] {
                let all = (0..ranks).flat_map(|rank| share(pass, 100, (rank, ranks)));
                let expected: Vec<_> = (begin..begin + BATCH).collect();
                assert_eq!(
                    all.collect::<Vec<_>>(),
                    expected,
                    "{ranks} ranks, pass {pass}"
                );
            }
        }
    }
}
