//! What it costs that a session can go on in another process, and how long that takes.
//!
//! The same training runs without snapshots, with them, and with a snapshot store, in turns, beside
//! tensors of a given size that it keeps and changes; and beside tensors that do not change, which
//! snapshots share. Then its process is killed while it trains, and the time
//! until its next loss is measured: the worker notices, starts another process and restores the
//! snapshot, and the client sends the ops since then again. The same is measured when the worker is
//! killed, and another worker has the snapshot. When the worker is stopped, so that the lease moves, the
//! longest time between two losses is measured. Some turns measure more on the way: [`MORE_FIGURES`].

mod training;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tensord_client::Durability;
use tensord_testkit::{
    cluster::{Cluster, Process},
    resource_usage::{is_running, processes_of_leases, signal_process, snapshots_bytes},
};
use tensord_transport::TransportChoice;

use self::training::Training;
use crate::{
    bench::Bench,
    context::Context,
    peer::wait_until_idle,
    pool::LocalPool,
    race::Contender,
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::{Summary, round},
};

/// Sizes of the tensors that a session keeps, in MiB.
const STATES_MIB: [u64; 3] = [16, 256, 1024];

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

/// What is measured beside tensors that do not change, and up to which size.
const CONSTANT_KEY: &str = "constant_ms";
const CONSTANT_LABEL: &str = "a step, with snapshots that share the state";
const MAX_CONSTANT_MIB: u64 = 256;

/// Snapshots after which the tensors that do not change are shared.
const UNTIL_SHARED: u64 = 2;

/// Steps between two losses that are read.
const STEPS_PER_READ: usize = 10;

/// What turns measure on the way: keys, and labels with units.
const MORE_FIGURES: [(&str, &str); 8] = [
    ("interval_s", "from one commit to the next, s"),
    (
        "constant_interval_s",
        "the same, if they share the state, s",
    ),
    // With few marks in a turn, the longest.
    (
        "stall_p99_ms",
        "longest read between commits, beyond the median, ms",
    ),
    (
        "off_stall_p99_ms",
        "longest read in 2 s without snapshots, beyond the median, ms",
    ),
    ("journal_mib", "ops kept by the client at most, MiB"),
    ("detect_ms", "from kill of the worker to the event, ms"),
    (
        "restore_ms",
        "from the event until another worker runs it, ms",
    ),
    ("redone_s", "of work since the last commit, at the kill, s"),
];

/// What a turn has measured.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct TurnFigures {
    /// The time of a step, of the recovery, or of the pause, in ms.
    main_ms: f64,
    /// Some of [`MORE_FIGURES`], by key.
    more: BTreeMap<String, f64>,
}

impl TurnFigures {
    fn of(main: Duration) -> Self {
        Self {
            main_ms: main.as_secs_f64() * 1000.0,
            more: BTreeMap::new(),
        }
    }

    fn add(&mut self, key: &str, figure: f64) {
        self.more.insert(key.into(), figure);
    }
}

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
        let take = |turn: &DurabilityTurn| context.turn::<TurnFigures>(Bench::Durability, turn);
        let train_beside = |pool: &LocalPool, is_durable, is_constant| {
            wait_until_idle(&[pool.process_id()]);
            let url = url_of(pool);
            let turn = DurabilityTurn::Train {
                url,
                state_mib,
                is_durable,
                is_constant,
            };
            take(&turn)
        };
        let train = |pool: &LocalPool, is_durable| train_beside(pool, is_durable, false);
        let kill = || {
            let turn = DurabilityTurn::Kill {
                url: url(),
                state_mib,
                pool_process: pool.process_id(),
            };
            take(&turn)
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
            take(&turn)
        };
        let samples = RefCell::new(BTreeMap::<String, Vec<f64>>::new());
        let keep_more = |run: usize, figures: TurnFigures| {
            for (key, figure) in figures.more {
                // The first round warms up.
                if run > 0 {
                    samples.borrow_mut().entry(key).or_default().push(figure);
                }
            }
            figures.main_ms
        };
        let mut contenders = vec![
            Contender::new("off_ms", "a step, without snapshots", |run| {
                Ok(keep_more(run, train(&pool, false)?))
            }),
            Contender::new("durable_ms", "a step, with snapshots", |run| {
                Ok(keep_more(run, train(&pool, true)?))
            }),
            // Its other figures are those of another interval.
            Contender::new("stored_ms", STORED_LABEL, |_| {
                Ok(train(&storing_pool, true)?.main_ms)
            }),
            Contender::new("first_new_answer_ms", "from kill to next loss", |run| {
                Ok(keep_more(run, kill()?))
            }),
            Contender::new(WORKER_KEY, WORKER_LABEL, |run| {
                Ok(keep_more(run, end_worker(true)?))
            }),
            Contender::new("move_pause_ms", MOVE_LABEL, |run| {
                Ok(keep_more(run, end_worker(false)?))
            }),
        ];
        // Beside a larger state, it takes minutes until the first two snapshots are kept.
        if state_mib <= MAX_CONSTANT_MIB {
            contenders.push(Contender::new(CONSTANT_KEY, CONSTANT_LABEL, |run| {
                let mut figures = train_beside(&pool, true, true)?;
                let interval = figures.more.remove("interval_s");
                figures.more.clear();
                let interval = interval.map(|interval| ("constant_interval_s".into(), interval));
                figures.more.extend(interval);
                Ok(keep_more(run, figures))
            }));
        }
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
        for (key, label, summary) in more_figures(&samples.into_inner()) {
            rows.add_row([
                format!("{state_mib} MiB"),
                label.into(),
                format_number(summary.median),
                format_quartiles(&summary),
                String::new(),
            ]);
            figures.insert(key.into(), json!(round(summary.median)));
        }
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

/// Returns those of [`MORE_FIGURES`] of which there are samples: key, label and summary of each.
fn more_figures(
    samples: &BTreeMap<String, Vec<f64>>,
) -> impl Iterator<Item = (&'static str, &'static str, Summary)> {
    MORE_FIGURES.into_iter().filter_map(|(key, label)| {
        let summary = Summary::of(samples.get(key)?)?;
        Some((key, label, summary))
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
        /// Whether the tensors beside it do not change.
        is_constant: bool,
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

/// Takes a turn.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn turn(context: &Context, turn: &DurabilityTurn) -> Result<Value> {
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
            let durability = match is_durable {
                true => Durability::Auto,
                false => Durability::Off,
            };
            let mut training = Training::start(url, *state_mib, durability, *is_constant)?;
            training.run(STEPS_PER_READ)?;
            if *is_constant && *is_durable {
                training.run_until_commits(UNTIL_SHARED)?;
            }
            let timed = context.full_or_quick(TIMED, Duration::from_millis(100));
            training.timed(timed, *is_durable)
        }
        DurabilityTurn::Kill {
            url,
            state_mib,
            pool_process,
        } => {
            let kill = || kill_process(*pool_process);
            first_new_answer(context, url, *state_mib, &[*pool_process], kill)
        }
        DurabilityTurn::EndWorker {
            url,
            state_mib,
            workers,
            is_killed: true,
        } => {
            let kill = || kill_worker(workers);
            first_new_answer(context, url, *state_mib, workers, kill)
        }
        DurabilityTurn::EndWorker {
            url,
            state_mib,
            workers,
            is_killed: false,
        } => move_pause(context, url, *state_mib, workers),
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
        figures.add("restore_ms", (running - moving).as_secs_f64() * 1000.0);
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
