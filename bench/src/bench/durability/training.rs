//! The training that is measured, with tensors that it keeps.

use std::{
    collections::BTreeMap,
    sync::mpsc::{Receiver, channel},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use burn::tensor::{Device, Distribution, Tensor};
use tensord_client::{Durability, Lease, LeaseEvent, LeaseRequest, Pool, PoolUrl};

use super::{
    STEPS_PER_READ,
    turns::{MARK_INTERVAL, TurnFigures},
};
use crate::{
    data::{self, Upload},
    models::Model,
    pool::lease_as,
    stats::Summary,
    trainer::{BATCH, Batch, Trainer},
};

/// Elements of a tensor of 16 MiB.
const STATE_ELEMENTS: usize = 4 << 20;

/// Steps after which the training starts anew. Some units of the network get no gradient from noise, and
/// after some 830 steps the optimizer's first moments of these, which shrink to 0.9 of their value with
/// each step, are denormal numbers. With those a step takes a processor twice as long, so a turn would
/// depend on how far its training is.
const MAX_STEPS: usize = 500;

/// How long some snapshots may take to be kept.
const COMMIT_DEADLINE: Duration = Duration::from_secs(120);

/// How long the events of a lease may take to arrive after its next loss.
const EVENT_DEADLINE: Duration = Duration::from_secs(5);

/// A training, with tensors that it keeps.
pub(super) struct Training {
    trainer: Trainer,
    /// Number of steps that the trainer has taken.
    steps: usize,
    batches: std::iter::Cycle<std::vec::IntoIter<Batch>>,
    /// Kept, so that snapshots have them.
    state: Vec<Tensor<1>>,
    /// The one of them that changes next; `None` if they do not change.
    next: Option<usize>,
    pub(super) lease: Lease,
    /// Events of the lease, and when they came.
    events: Receiver<(Instant, LeaseEvent)>,
    _pool: Pool,
}

impl Training {
    /// Starts a training beside tensors of `state_mib`, which do not change if `is_constant`.
    pub(super) fn start(
        url: &str,
        state_mib: u64,
        durability: Durability,
        is_constant: bool,
    ) -> Result<Self> {
        let url: PoolUrl = url.parse().context("a pool URL")?;
        let (sender, events) = channel();
        let request = LeaseRequest::devices(1)
            .durable(durability)
            // An error means that the training is over.
            .on_event(move |event| drop(sender.send((Instant::now(), event))));
        let (pool, lease) = lease_as(url, request)?;
        let device: &Device = &lease.devices()[0];
        let tensors = (state_mib << 20) as usize / (4 * STATE_ELEMENTS);
        let state: Vec<_> = (0..tensors)
            .map(|_| Tensor::<1>::random([STATE_ELEMENTS], Distribution::Default, device))
            .collect();
        if let Some(last) = state.last() {
            // Waits until all are made.
            data::scalar(last.clone().slice(0..1))?;
        }
        // The first mark has none of the tensors. Wait until the next one is due.
        sleep(MARK_INTERVAL);
        let batches: Vec<_> = (0..8).map(|seed| Batch::noise(BATCH, seed)).collect();
        Ok(Self {
            trainer: trainer_on(device),
            steps: 0,
            batches: batches.into_iter().cycle(),
            state,
            next: (!is_constant).then_some(0),
            lease,
            events,
            _pool: pool,
        })
    }

    /// Takes steps, and reads the last loss. Before that, changes the next of the tensors.
    pub(super) fn run(&mut self, steps: usize) -> Result<()> {
        if let Some(next) = &mut self.next {
            let tensor = self.state.swap_remove(*next);
            self.state.push(tensor.neg());
            let last = self.state.len() - 1;
            self.state.swap(*next, last);
            *next = (*next + 1) % self.state.len();
        }
        self.start_anew_if_due(steps);
        self.steps += steps;
        self.trainer.steps(self.batches.by_ref().take(steps))?;
        Ok(())
    }

    /// Starts the training anew if it would have more than [`MAX_STEPS`] after `steps`. Returns whether it
    /// has done so.
    fn start_anew_if_due(&mut self, steps: usize) -> bool {
        let is_due = self.steps + steps > MAX_STEPS;
        if is_due {
            (self.trainer, self.steps) = (trainer_on(&self.lease.devices()[0]), 0);
        }
        is_due
    }

    /// Trains until `commits` more snapshots were kept.
    pub(super) fn run_until_commits(&mut self, commits: u64) -> Result<()> {
        let begun = Instant::now();
        let last = self.lease.durability_status().commits + commits;
        while self.lease.durability_status().commits < last {
            if begun.elapsed() > COMMIT_DEADLINE {
                bail!("fewer than {commits} snapshots were kept within {COMMIT_DEADLINE:?}");
            }
            self.run(1)?;
        }
        Ok(())
    }

    /// Trains for a while, and measures the time of a step, and what marks do.
    pub(super) fn timed(&mut self, duration: Duration, is_durable: bool) -> Result<TurnFigures> {
        let commits_before = self.lease.durability_status().commits;
        let begun = Instant::now();
        let mut reads = Vec::new();
        // The longest time between two reads, for each commit or interval.
        let mut longest = BTreeMap::<u64, f64>::new();
        let mut journal_bytes = 0;
        while begun.elapsed() < duration {
            let is_anew = self.start_anew_if_due(STEPS_PER_READ);
            let read_at = Instant::now();
            self.run(STEPS_PER_READ)?;
            let read_ms = read_at.elapsed().as_secs_f64() * 1000.0;
            reads.push(read_ms);
            let status = self.lease.durability_status();
            journal_bytes = journal_bytes.max(status.journal_bytes);
            // The first steps of a training take longer by themselves.
            if !is_anew {
                let interval = begun.elapsed().as_millis() / MARK_INTERVAL.as_millis();
                let interval = match is_durable {
                    true => status.commits,
                    false => interval as u64,
                };
                let longest = longest.entry(interval).or_default();
                *longest = longest.max(read_ms);
            }
        }
        let trained = begun.elapsed();
        let steps = (reads.len() * STEPS_PER_READ) as u32;
        let mut figures = TurnFigures::of(trained / steps);
        let median = Summary::of(&reads).context("there are reads")?.median;
        ensure!(
            !longest.is_empty(),
            "a turn is longer than the first steps of a training"
        );
        let stalls = longest.into_values().map(|read| read - median).collect();
        let commits = self.lease.durability_status().commits - commits_before;
        if commits > 0 {
            figures.add("interval_s", trained.as_secs_f64() / commits as f64);
            figures.add_p99("stall_p99_ms", stalls);
            figures.add("journal_mib", journal_bytes as f64 / f64::from(1 << 20));
        } else if !is_durable {
            figures.add_p99("off_stall_p99_ms", stalls);
        }
        Ok(figures)
    }

    /// Returns when the lease was to move after `since`, and when it ran again, if it has moved to another
    /// worker.
    pub(super) fn move_times(&self, since: Instant) -> Result<Option<(Instant, Instant)>> {
        let mut moving = None;
        loop {
            let (at, event) = self.events.recv_timeout(EVENT_DEADLINE)?;
            match event {
                _ if at < since => {}
                LeaseEvent::Waiting { .. } | LeaseEvent::Moving { .. } => {
                    moving.get_or_insert(at);
                }
                LeaseEvent::Running { .. } => return Ok(moving.map(|moving| (moving, at))),
                _ => {}
            }
        }
    }
}

fn trainer_on(device: &Device) -> Trainer {
    Trainer::new(Model::Mlp, device, Upload::Helper)
}
