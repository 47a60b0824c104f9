//! What it costs that a session can go on in another process, and how long that takes.
//!
//! The same training runs without snapshots, with them, and with a snapshot store, in turns, beside
//! tensors of a given size that it keeps. Then its process is killed while it trains, and the time
//! until its next loss is measured: the worker notices, starts another process and restores the
//! snapshot, and the client sends the ops since then again. The same is measured when the worker is killed, and another
//! worker has the snapshot. When the worker is stopped, so that the lease moves, the longest time
//! between two losses is measured.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use burn::tensor::{Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tensord_client::{Durability, Lease, LeaseRequest, Pool, PoolUrl};
use tensord_testkit::{
    cluster::{Cluster, Process},
    resource_usage::{is_running, processes_of_leases, signal_process, snapshots_bytes},
};
use tensord_transport::TransportChoice;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    models::Model,
    peer::wait_until_idle,
    pool::{LocalPool, lease_as},
    race::Contender,
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::round,
    trainer::{BATCH, Batch, Trainer},
};

/// Sizes of the tensors that a session keeps, in MiB.
const STATES_MIB: [u64; 3] = [16, 256, 1024];

/// Elements of a tensor of 16 MiB.
const STATE_ELEMENTS: usize = 4 << 20;

/// A worker keeps half of this for other workers' leases: two snapshots of the largest state.
const SNAPSHOT_MEMORY: &str = "5GiB";

/// How long a training is timed: several intervals between marks.
const TIMED: Duration = Duration::from_secs(12);

/// How long a training runs before its process is killed: long enough for a snapshot of the
/// largest state.
const BEFORE_KILL: Duration = Duration::from_secs(6);

/// How long a worker may take to have a snapshot with all tensors.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(60);

/// How long the process of a lease may take to end after its worker.
const EXIT_DEADLINE: Duration = Duration::from_secs(5);

/// What is measured when a worker is killed, with a snapshot store, and when a worker is stopped.
const WORKER_KEY: &str = "worker_first_new_answer_ms";
const WORKER_LABEL: &str = "from kill of the worker to next loss";
const STORED_LABEL: &str = "a step, with snapshots in a directory, too";
const MOVE_LABEL: &str = "longest pause when the worker is stopped";

/// Steps between two losses that are read.
const STEPS_PER_READ: usize = 10;

/// Runs the bench.
///
/// # Errors
///
/// If the pool fails, or a session does not go on.
pub(super) fn run(context: &Context) -> Result<Report> {
    // One device, which has all of the worker's memory for snapshots.
    let pool = LocalPool::start("flex")?;
    let storing_pool = LocalPool::start_with_store("flex")?;
    let url_of = |pool: &LocalPool| pool.url(TransportChoice::Auto).reveal();
    let url = || url_of(&pool);
    let mut rows = table(
        &["state", ""],
        &["median", "quartiles", "× without snapshots"],
    );
    let mut json = Vec::new();
    for &state_mib in context.full_or_quick(&STATES_MIB[..], &STATES_MIB[..1]) {
        let train = |pool: &LocalPool, is_durable| {
            wait_until_idle(&[pool.process_id()]);
            let url = url_of(pool);
            let turn = DurabilityTurn::Train {
                url,
                state_mib,
                is_durable,
            };
            context.turn::<f64>(Bench::Durability, &turn)
        };
        let kill = || {
            let turn = DurabilityTurn::Kill {
                url: url(),
                state_mib,
                pool_process: pool.process_id(),
            };
            context.turn::<f64>(Bench::Durability, &turn)
        };
        let end_worker = |is_killed| {
            // Each time another pool, as a worker is gone afterwards.
            let cluster = two_workers();
            let turn = DurabilityTurn::EndWorker {
                url: cluster.client_url().to_owned(),
                state_mib,
                workers: cluster.workers.iter().map(Process::id).collect(),
                is_killed,
            };
            context.turn::<f64>(Bench::Durability, &turn)
        };
        let contenders = vec![
            Contender::new("off_ms", "a step, without snapshots", |_| {
                train(&pool, false)
            }),
            Contender::new("durable_ms", "a step, with snapshots", |_| {
                train(&pool, true)
            }),
            Contender::new("stored_ms", STORED_LABEL, |_| train(&storing_pool, true)),
            Contender::new("first_new_answer_ms", "from kill to next loss", |_| kill()),
            Contender::new(WORKER_KEY, WORKER_LABEL, |_| end_worker(true)),
            Contender::new("move_pause_ms", MOVE_LABEL, |_| end_worker(false)),
        ];
        let found = context.race(&format!("durability {state_mib} MiB"), contenders)?;
        let ratio = |key: &str| found.ratio(key, "off_ms");
        for finding in found.iter() {
            let is_training = ["durable_ms", "stored_ms"].contains(&finding.key.as_str());
            let shown = is_training.then(|| format_optional(ratio(&finding.key)));
            rows.add_row([
                format!("{state_mib} MiB"),
                format!("{}, ms", finding.label),
                format_number(finding.summary.median),
                format_quartiles(&finding.summary),
                shown.unwrap_or_default(),
            ]);
        }
        let mut figures: Map<_, _> = found.to_json();
        figures.insert("state_mib".into(), json!(state_mib));
        for (name, key) in [("overhead", "durable_ms"), ("stored_overhead", "stored_ms")] {
            let overhead = json!(ratio(key).map(|ratio| round(ratio - 1.0)));
            figures.insert(name.into(), overhead);
        }
        json.push(Value::from(figures));
    }
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// Starts a pool of two workers, each with memory for the other's snapshots.
fn two_workers() -> Cluster {
    let mut cluster = Cluster::start(&[]);
    for _ in 0..2 {
        cluster.add_worker_with("flex", &["--snapshot-memory", SNAPSHOT_MEMORY]);
    }
    cluster.wait_for_workers(2);
    cluster
}

/// The work of a process.
#[derive(Serialize, Deserialize)]
pub(super) enum DurabilityTurn {
    /// Trains, and is measured.
    Train {
        url: String,
        state_mib: u64,
        is_durable: bool,
    },
    /// Trains, and kills the process of its lease, a child of `pool_process`.
    Kill {
        url: String,
        state_mib: u64,
        pool_process: u32,
    },
    /// Trains, and kills or stops the one of these worker processes that runs its lease.
    EndWorker {
        url: String,
        state_mib: u64,
        workers: Vec<u32>,
        is_killed: bool,
    },
}

/// Takes a turn. Returns the time of a step or of the recovery, in ms.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn turn(context: &Context, turn: &DurabilityTurn) -> Result<f64> {
    match turn {
        DurabilityTurn::Train {
            url,
            state_mib,
            is_durable,
        } => {
            let durability = match is_durable {
                true => Durability::Auto,
                false => Durability::Off,
            };
            let mut training = Training::start(url, *state_mib, durability)?;
            training.run(STEPS_PER_READ)?;
            let begun = Instant::now();
            let timed = context.full_or_quick(TIMED, Duration::from_millis(100));
            let mut steps = 0;
            while begun.elapsed() < timed {
                training.run(STEPS_PER_READ)?;
                steps += STEPS_PER_READ;
            }
            Ok(begun.elapsed().as_secs_f64() * 1000.0 / steps as f64)
        }
        DurabilityTurn::Kill {
            url,
            state_mib,
            pool_process,
        } => {
            let kill = || kill_process(*pool_process);
            first_new_answer_ms(context, url, *state_mib, &[*pool_process], kill)
        }
        DurabilityTurn::EndWorker {
            url,
            state_mib,
            workers,
            is_killed: true,
        } => {
            let kill = || kill_worker(workers);
            first_new_answer_ms(context, url, *state_mib, workers, kill)
        }
        DurabilityTurn::EndWorker {
            url,
            state_mib,
            workers,
            is_killed: false,
        } => move_pause_ms(context, url, *state_mib, workers),
    }
}

/// Starts a training of which all `workers` have a snapshot with the tensors.
fn training_with_snapshot(
    context: &Context,
    url: &str,
    state_mib: u64,
    workers: &[u32],
) -> Result<Training> {
    let mut training = Training::start(url, state_mib, Durability::Auto)?;
    let begun = Instant::now();
    let before = context.full_or_quick(BEFORE_KILL, Duration::from_secs(1));
    let is_whole = |bytes: &u64| *bytes >= state_mib << 20;
    let has_one = |id: &u32| snapshots_bytes(*id).iter().any(is_whole);
    let are_kept = || workers.iter().all(has_one);
    while begun.elapsed() < before || !are_kept() {
        if begun.elapsed() > SNAPSHOT_DEADLINE {
            bail!("the workers {workers:?} have no snapshot after {SNAPSHOT_DEADLINE:?}");
        }
        training.run(STEPS_PER_READ)?;
    }
    Ok(training)
}

/// Trains, stops the worker, and returns the longest time between two losses until the worker has
/// exited, in ms. A loss is read at each step.
fn move_pause_ms(context: &Context, url: &str, state_mib: u64, workers: &[u32]) -> Result<f64> {
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
    Ok(longest.as_secs_f64() * 1000.0)
}

/// Trains, calls `kill`, and returns the time until the next loss, in ms.
fn first_new_answer_ms(
    context: &Context,
    url: &str,
    state_mib: u64,
    workers: &[u32],
    kill: impl FnOnce() -> Result<()>,
) -> Result<f64> {
    let mut training = training_with_snapshot(context, url, state_mib, workers)?;
    let killed = Instant::now();
    kill()?;
    training.run(1)?;
    Ok(killed.elapsed().as_secs_f64() * 1000.0)
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

/// A training, with tensors that it keeps.
struct Training {
    trainer: Trainer,
    batches: std::iter::Cycle<std::vec::IntoIter<Batch>>,
    /// Kept, so that snapshots have them.
    _state: Vec<Tensor<1>>,
    _lease: Lease,
    _pool: Pool,
}

impl Training {
    fn start(url: &str, state_mib: u64, durability: Durability) -> Result<Self> {
        let url: PoolUrl = url.parse().context("a pool URL")?;
        let request = LeaseRequest::devices(1).durable(durability);
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
        sleep(Duration::from_secs(2));
        let batches: Vec<_> = (0..8).map(|seed| Batch::noise(BATCH, seed)).collect();
        Ok(Self {
            trainer: Trainer::new(Model::Mlp, device, Upload::Helper),
            batches: batches.into_iter().cycle(),
            _state: state,
            _lease: lease,
            _pool: pool,
        })
    }

    /// Takes steps, and reads the last loss.
    fn run(&mut self, steps: usize) -> Result<()> {
        self.trainer.steps(self.batches.by_ref().take(steps))?;
        Ok(())
    }
}
