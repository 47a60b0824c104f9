//! What the processes of the bench do: train, and kill or stop what runs the training.

use std::{
    collections::BTreeMap,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensord_client::{Durability, LeaseRequest};
use tensord_testkit::resource_usage::{
    is_running, processes_of_leases, signal_process, snapshots_bytes,
};

use super::{RESTORE_KEY, STEPS_PER_READ, marks, training::Training};
use crate::{
    context::Context,
    data::scalar,
    pool::{durability_if, lease_as},
};

/// The shortest interval between two marks. A turn without snapshots is divided into such intervals.
pub(super) const MARK_INTERVAL: Duration = Duration::from_secs(2);

/// How long a training is timed: several intervals between marks.
const TIMED: Duration = Duration::from_secs(12);

/// How long a training runs before its process is killed: long enough for a snapshot of the
/// largest state.
const BEFORE_KILL: Duration = Duration::from_secs(6);

/// How long a lease runs before it is suspended for a request, by the scheduler's rules, and some time for the start.
const MIN_RUN_TIME: Duration = Duration::from_secs(12);

/// How long a worker may take to have a snapshot with all tensors.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(60);

/// How long the process of a lease may take to end after its worker.
const EXIT_DEADLINE: Duration = Duration::from_secs(5);

/// Snapshots after which the tensors that do not change are shared.
const UNTIL_SHARED: u64 = 2;

/// What a turn has measured.
#[derive(Default, Serialize, Deserialize)]
pub(in crate::bench) struct TurnFigures {
    /// The time of a step, of the recovery, or of the pause, in ms.
    pub(super) main_ms: f64,
    /// Some of [`MORE_FIGURES`](super::MORE_FIGURES), by key.
    pub(super) more: BTreeMap<String, f64>,
}

impl TurnFigures {
    pub(super) fn of(main: Duration) -> Self {
        Self {
            main_ms: main.as_secs_f64() * 1000.0,
            more: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, key: &str, figure: f64) {
        self.more.insert(key.into(), figure);
    }

    /// Adds the 99th percentile of the times for which the program was held up, in ms: with few of them, the longest.
    /// Adds nothing if there are none.
    pub(super) fn add_p99(&mut self, key: &str, mut stalls: Vec<f64>) {
        stalls.sort_by(f64::total_cmp);
        let at = (stalls.len() * 99).div_ceil(100).saturating_sub(1);
        if let Some(stall) = stalls.get(at) {
            self.add(key, *stall);
        }
    }
}

/// The work of a process.
#[derive(Serialize, Deserialize)]
pub(in crate::bench) enum DurabilityTurn {
    /// Trains, and is measured.
    Train {
        url: String,
        state_mib: u64,
        is_durable: bool,
        /// Whether the tensors beside it do not change.
        is_constant: bool,
    },
    /// Reads numbers of many tensors, and measures how long marks hold the program up.
    Marks { url: String, is_durable: bool },
    /// Trains, and kills the process of its lease, a child of `pool_process`.
    Kill {
        url: String,
        state_mib: u64,
        pool_process: u32,
    },
    /// Trains on a borrowed device until its owner, another tenant, requests it, and measures how long that takes.
    Reclaim {
        url: String,
        owner_url: String,
        state_mib: u64,
        worker: u32,
    },
    /// Trains, and ends the one of these worker processes that runs its lease.
    EndWorker {
        url: String,
        state_mib: u64,
        workers: Vec<u32>,
        how: WorkerEnd,
    },
}

/// What happens to a worker.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(in crate::bench) enum WorkerEnd {
    /// It is killed.
    Killed,
    /// It and the processes of its leases stop without closing connections, as when its host hangs.
    Silent,
    /// It is asked to end, and lets its lease move before.
    Stopped,
}

/// Takes a turn.
///
/// # Errors
///
/// If the pool fails.
pub(in crate::bench) fn turn(context: &Context, turn: &DurabilityTurn) -> Result<Value> {
    let figures = measure(context, turn)?;
    Ok(serde_json::to_value(figures)?)
}

fn measure(context: &Context, turn: &DurabilityTurn) -> Result<TurnFigures> {
    match turn {
        DurabilityTurn::Train {
            url,
            state_mib,
            is_durable,
            is_constant,
        } => {
            let durability = durability_if(*is_durable);
            let mut training = Training::start(url, *state_mib, durability, *is_constant)?;
            training.run(STEPS_PER_READ)?;
            if *is_constant && *is_durable {
                training.run_until_commits(UNTIL_SHARED)?;
            }
            let timed = context.full_or_quick(TIMED, Duration::from_millis(100));
            training.timed(timed, *is_durable)
        }
        DurabilityTurn::Marks { url, is_durable } => {
            let duration = context.full_or_quick(TIMED, Duration::from_secs(3));
            marks::measure(url, *is_durable, duration)
        }
        DurabilityTurn::Kill {
            url,
            state_mib,
            pool_process,
        } => {
            let kill = || kill_process(*pool_process);
            first_new_answer(context, url, *state_mib, &[*pool_process], kill)
        }
        DurabilityTurn::Reclaim {
            url,
            owner_url,
            state_mib,
            worker,
        } => reclaim(context, url, owner_url, *state_mib, *worker),
        DurabilityTurn::EndWorker {
            url,
            state_mib,
            workers,
            how,
        } => match how {
            WorkerEnd::Killed => {
                let kill = || kill_worker(workers);
                first_new_answer(context, url, *state_mib, workers, kill)
            }
            WorkerEnd::Silent => {
                let silence = || silence_worker(workers);
                let mut figures = first_new_answer(context, url, *state_mib, workers, silence)?;
                let detected = figures.more.remove("detect_ms");
                figures.more.clear();
                let detected = detected.map(|detected| ("silent_detect_ms".into(), detected));
                figures.more.extend(detected);
                Ok(figures)
            }
            WorkerEnd::Stopped => move_pause(context, url, *state_mib, workers),
        },
    }
}

/// Starts a training of which all `workers` have a snapshot with the tensors.
fn training_with_snapshot(
    context: &Context,
    url: &str,
    state_mib: u64,
    workers: &[u32],
) -> Result<Training> {
    let mut training = Training::start(url, state_mib, Durability::Auto, false)?;
    let begun = Instant::now();
    let before = context.full_or_quick(BEFORE_KILL, Duration::from_secs(1));
    let has_one = |id: &u32| snapshots_bytes(*id).iter().sum::<u64>() >= state_mib << 20;
    let are_kept = || workers.iter().all(has_one);
    while begun.elapsed() < before || !are_kept() {
        if begun.elapsed() > SNAPSHOT_DEADLINE {
            bail!("the workers {workers:?} have no snapshot after {SNAPSHOT_DEADLINE:?}");
        }
        training.run(STEPS_PER_READ)?;
    }
    Ok(training)
}

/// Trains on a borrowed device, and measures the time from its owner's request until the owner has read a first result.
fn reclaim(
    context: &Context,
    url: &str,
    owner_url: &str,
    state_mib: u64,
    worker: u32,
) -> Result<TurnFigures> {
    let begun = Instant::now();
    let mut training = training_with_snapshot(context, url, state_mib, &[worker])?;
    while begun.elapsed() < MIN_RUN_TIME {
        training.run(STEPS_PER_READ)?;
    }
    thread::scope(|scope| {
        let owner = scope.spawn(|| -> Result<Duration> {
            let requested = Instant::now();
            let (_pool, lease) = lease_as(owner_url.parse()?, LeaseRequest::devices(1))?;
            let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
            scalar(ones.sum())?;
            Ok(requested.elapsed())
        });
        // The training waits in a read until the owner has given the device back.
        while !owner.is_finished() {
            training.run(1)?;
        }
        let took = owner
            .join()
            .map_err(|_| anyhow!("the owner has panicked"))?;
        training.run(1)?;
        Ok(TurnFigures::of(took?))
    })
}

/// Trains, stops the worker, and returns the longest time between two losses until the worker has
/// exited. A loss is read at each step.
fn move_pause(
    context: &Context,
    url: &str,
    state_mib: u64,
    workers: &[u32],
) -> Result<TurnFigures> {
    let mut training = training_with_snapshot(context, url, state_mib, workers)?;
    let (worker, _) = worker_of_lease(workers)?;
    if !signal_process(worker, "TERM") {
        bail!("worker {worker} is gone");
    }
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    while is_running(worker) {
        training.run(1)?;
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    training.run(1)?;
    Ok(TurnFigures::of(longest))
}

/// Trains, calls `kill`, and measures the time until the next loss.
fn first_new_answer(
    context: &Context,
    url: &str,
    state_mib: u64,
    workers: &[u32],
    kill: impl FnOnce() -> Result<()>,
) -> Result<TurnFigures> {
    let mut training = training_with_snapshot(context, url, state_mib, workers)?;
    let since_commit = training.lease.durability_status().since_commit;
    let killed = Instant::now();
    kill()?;
    training.run(1)?;
    let mut figures = TurnFigures::of(killed.elapsed());
    // A process that is replaced where it was has no event before that it runs again.
    if let Some((moving, running)) = training.move_times(killed)? {
        let since_commit = since_commit.context("a training with a snapshot has a commit")?;
        figures.add("redone_s", since_commit.as_secs_f64());
        figures.add("detect_ms", (moving - killed).as_secs_f64() * 1000.0);
        figures.add(RESTORE_KEY, (running - moving).as_secs_f64() * 1000.0);
    }
    Ok(figures)
}

/// Returns the worker that runs the pool's only lease, and the lease's processes there.
fn worker_of_lease(workers: &[u32]) -> Result<(u32, Vec<u32>)> {
    let found = workers.iter().find_map(|worker| {
        let processes = processes_of_leases(*worker);
        (!processes.is_empty()).then_some((*worker, processes))
    });
    found.with_context(|| format!("none of the workers {workers:?} runs a lease"))
}

/// Kills the worker that runs the pool's only lease, and waits until the lease's process is gone,
/// which may still answer a moment later.
fn kill_worker(workers: &[u32]) -> Result<()> {
    let (worker, processes) = worker_of_lease(workers)?;
    if !signal_process(worker, "KILL") {
        bail!("worker {worker} is gone");
    }
    let until = Instant::now() + EXIT_DEADLINE;
    while processes.iter().any(|process| is_running(*process)) {
        if Instant::now() > until {
            bail!("the processes {processes:?} of worker {worker} have not ended");
        }
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Stops the worker that runs the pool's only lease, and the lease's processes there, as when their host hangs.
fn silence_worker(workers: &[u32]) -> Result<()> {
    let (worker, processes) = worker_of_lease(workers)?;
    for process in processes.into_iter().chain([worker]) {
        if !signal_process(process, "STOP") {
            bail!("process {process} of worker {worker} is gone");
        }
    }
    Ok(())
}

/// Kills the process of the pool's only lease.
fn kill_process(pool_process: u32) -> Result<()> {
    let process = match processes_of_leases(pool_process)[..] {
        [process] => process,
        ref others => bail!("{others:?} run leases, instead of one process"),
    };
    match signal_process(process, "KILL") {
        true => Ok(()),
        false => bail!("process {process} is gone"),
    }
}
