//! What it costs that a session can go on in another process, and how long that takes.
//!
//! The same training runs without snapshots, with them, and with a snapshot store, in turns, beside
//! tensors of a given size that it keeps and changes; and beside tensors that do not change, which
//! snapshots share. Then its process is killed while it trains, and the time
//! until its next loss is measured: the worker notices, starts another process and restores the
//! snapshot, and the client sends the ops since then again. The same is measured when the worker is
//! killed, and another worker has the snapshot, and when it falls silent. When the worker is stopped, so that the lease moves, the
//! longest time between two losses is measured. When another tenant requests the training's device, which the
//! training's tenant has borrowed, the time until the other one has a first result is measured. The time of
//! restoring is compared with that in which a plain TLS socket carries as many bytes. A program with many tensors
//! shows how long a mark holds it up ([`marks`]). Some turns measure more on the way: [`MORE_FIGURES`].

mod marks;
mod training;
mod turns;

use std::{cell::RefCell, collections::BTreeMap, time::Instant};

use anyhow::Result;
use comfy_table::Table;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tensord_testkit::{
    administrator::Administrator,
    cluster::{Cluster, Process},
};
use tensord_transport::TransportChoice;

pub(super) use self::turns::{DurabilityTurn, turn};
use self::turns::{
    TurnFigures,
    WorkerEnd::{self, Killed, Silent, Stopped},
};
use crate::{
    bench::Bench,
    context::Context,
    peer::wait_until_idle,
    plain::Server,
    pool::LocalPool,
    race::Contender,
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::{self, Summary, round},
};

/// Sizes of the tensors that a session keeps, in MiB.
const STATES_MIB: [u64; 3] = [16, 256, 1024];

/// A worker keeps half of this for other workers' leases: two snapshots of the largest state.
const SNAPSHOT_MEMORY: &str = "5GiB";

/// What is measured when a worker is killed or falls silent, with a snapshot store, and when a worker is stopped.
const WORKER_KEY: &str = "worker_first_new_answer_ms";
const WORKER_LABEL: &str = "from kill of the worker to next loss";
const SILENT_KEY: &str = "silent_first_new_answer_ms";
const SILENT_LABEL: &str = "from silence of the worker to next loss";
const STORED_LABEL: &str = "a step, with snapshots in a directory, too";
const MOVE_LABEL: &str = "longest pause when the worker is stopped";

/// The baseline for restoring.
const TLS_KEY: &str = "tls_ms";
const TLS_LABEL: &str = "as many bytes as the state over TLS alone";

const RECLAIM_KEY: &str = "reclaim_ms";
const RECLAIM_LABEL: &str = "from the request of a borrowed device's owner to its first result";

/// What is measured beside tensors that do not change, and up to which size.
const CONSTANT_KEY: &str = "constant_ms";
const CONSTANT_LABEL: &str = "a step, with snapshots that share the state";
const MAX_CONSTANT_MIB: u64 = 256;

/// Reads of a program with many tensors, which have the size of the smallest state: key and label, and whether there
/// are snapshots.
const MANY_TENSORS: [(&str, &str, bool); 2] = [
    (
        "many_off_ms",
        "a read, 10,000 tensors, without snapshots",
        false,
    ),
    ("many_ms", "a read, 10,000 tensors, with snapshots", true),
];

/// Steps between two losses that are read.
const STEPS_PER_READ: usize = 10;

/// Measured on the way when a worker is killed.
const RESTORE_KEY: &str = "restore_ms";

/// What turns measure on the way: keys, and labels with units.
const MORE_FIGURES: [(&str, &str); 11] = [
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
    (
        "mark_stall_p99_ms",
        "longest read after a mark, 10,000 tensors, beyond the median, ms",
    ),
    (
        "off_mark_stall_p99_ms",
        "longest read in windows every 2 s, without snapshots, ms",
    ),
    ("journal_mib", "ops kept by the client at most, MiB"),
    ("detect_ms", "from kill of the worker to the event, ms"),
    (
        "silent_detect_ms",
        "from silence of the worker to the event, ms",
    ),
    (
        RESTORE_KEY,
        "from the event until another worker runs it, ms",
    ),
    ("redone_s", "of work since the last commit, at the kill, s"),
];

/// Runs the bench.
///
/// # Errors
///
/// If the pool fails, or a session does not go on.
pub(super) fn run(context: &Context) -> Result<Report> {
    let pools = Pools::start()?;
    let mut rows = table(
        &["state", ""],
        &["median", "quartiles", "× without snapshots"],
    );
    let mut json = Vec::new();
    for &state_mib in context.full_or_quick(&STATES_MIB[..], &STATES_MIB[..1]) {
        json.push(pools.measure(context, state_mib, &mut rows)?);
    }
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// The pools in which trainings run, and the server of plain sockets with which restoring is compared.
struct Pools {
    /// With one device, which has all of the worker's memory for snapshots.
    plain: LocalPool,
    /// With a snapshot store.
    storing: LocalPool,
    sockets: Server,
    /// The directory of the server of plain sockets.
    _dir: TempDir,
}

impl Pools {
    fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        Ok(Self {
            plain: LocalPool::start("flex")?,
            storing: LocalPool::start_with_store("flex")?,
            sockets: Server::start(&dir)?,
            _dir: dir,
        })
    }

    /// Measures everything beside a state of `state_mib`. Adds rows to the table, and returns the JSON.
    fn measure(&self, context: &Context, state_mib: u64, rows: &mut Table) -> Result<Value> {
        let samples = RefCell::new(BTreeMap::new());
        let contenders = self.contenders(context, state_mib, &samples);
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
        for (key, label, summary) in more_figures(&samples.borrow()) {
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
        let restored = samples
            .borrow()
            .get(RESTORE_KEY)
            .and_then(|it| Summary::of(it));
        if let (Some(tls_ms), Some(restored)) = (found.median(TLS_KEY), restored) {
            let speed = stats::ratio(tls_ms, restored.median);
            rows.add_row([
                format!("{state_mib} MiB"),
                "speed of restoring, × TLS alone".into(),
                format_optional(speed),
                String::new(),
                String::new(),
            ]);
            figures.insert("restore_speed_ratio".into(), json!(speed.map(round)));
        }
        Ok(figures.into())
    }

    /// Returns what is measured beside a state of `state_mib`. Each adds its [`MORE_FIGURES`] to `samples`.
    fn contenders<'a>(
        &'a self,
        context: &'a Context,
        state_mib: u64,
        samples: &'a RefCell<Samples>,
    ) -> Vec<Contender<'a>> {
        let beside = Beside {
            pools: self,
            context,
            state_mib,
            samples,
        };
        let mut contenders = beside.trainings();
        contenders.extend(beside.losses());
        // A lease is not suspended before it has run for a while.
        if context.full_or_quick(true, false) {
            contenders.push(beside.contender(RECLAIM_KEY, RECLAIM_LABEL, move || {
                reclaim(context, state_mib)
            }));
        }
        if state_mib == STATES_MIB[0] {
            contenders.extend(beside.many_tensors());
        }
        // Beside a larger state, it takes minutes until the first two snapshots are kept.
        if state_mib <= MAX_CONSTANT_MIB {
            contenders.push(beside.constant());
        }
        contenders
    }
}

/// What is measured beside a state.
#[derive(Clone, Copy)]
struct Beside<'a> {
    pools: &'a Pools,
    context: &'a Context,
    state_mib: u64,
    samples: &'a RefCell<Samples>,
}

impl<'a> Beside<'a> {
    /// Returns a contender whose turns also add their [`MORE_FIGURES`] to the samples.
    fn contender(
        self,
        key: &str,
        label: &str,
        mut turn: impl FnMut() -> Result<TurnFigures> + 'a,
    ) -> Contender<'a> {
        Contender::new(key, label, move |run| {
            let figures = turn()?;
            // The first round warms up.
            if run > 0 {
                let mut samples = self.samples.borrow_mut();
                for (key, figure) in figures.more {
                    samples.entry(key).or_default().push(figure);
                }
            }
            Ok(figures.main_ms)
        })
    }

    /// Returns the same training without snapshots, with them, and with a store.
    fn trainings(self) -> Vec<Contender<'a>> {
        let train = move |pool, is_durable| {
            train_beside(self.context, pool, self.state_mib, is_durable, false)
        };
        let Pools { plain, storing, .. } = self.pools;
        vec![
            self.contender("off_ms", "a step, without snapshots", move || {
                train(plain, false)
            }),
            self.contender("durable_ms", "a step, with snapshots", move || {
                train(plain, true)
            }),
            // Its other figures are those of another interval.
            Contender::new("stored_ms", STORED_LABEL, move |_| {
                Ok(train(storing, true)?.main_ms)
            }),
        ]
    }

    /// Returns trainings whose process or worker is lost or stopped, and what TLS alone carries, with which restoring
    /// is compared.
    fn losses(self) -> Vec<Contender<'a>> {
        let end = move |key, label, how| {
            self.contender(key, label, move || {
                end_worker(self.context, self.state_mib, how)
            })
        };
        vec![
            self.contender("first_new_answer_ms", "from kill to next loss", move || {
                kill(self.context, &self.pools.plain, self.state_mib)
            }),
            end(WORKER_KEY, WORKER_LABEL, Killed),
            Contender::new(TLS_KEY, TLS_LABEL, move |_| self.send_by_tls()),
            end(SILENT_KEY, SILENT_LABEL, Silent),
            end("move_pause_ms", MOVE_LABEL, Stopped),
        ]
    }

    /// Returns the time in ms in which a plain TLS socket carries as many bytes as the state has.
    fn send_by_tls(self) -> Result<f64> {
        wait_until_idle(&[
            self.pools.plain.process_id(),
            self.pools.storing.process_id(),
        ]);
        let payload = vec![7; (self.state_mib << 20) as usize];
        let mut socket = self.pools.sockets.tls(self.context.runtime())?;
        let begun = Instant::now();
        socket.upload(&payload)?;
        Ok(begun.elapsed().as_secs_f64() * 1000.0)
    }

    /// Returns a program with many tensors, without snapshots and with them.
    fn many_tensors(self) -> impl Iterator<Item = Contender<'a>> {
        MANY_TENSORS
            .into_iter()
            .map(move |(key, label, is_durable)| {
                self.contender(key, label, move || {
                    let turn = DurabilityTurn::Marks {
                        url: url_of(&self.pools.plain),
                        is_durable,
                    };
                    self.context.turn(Bench::Durability, &turn)
                })
            })
    }

    /// Returns a training beside tensors that do not change.
    fn constant(self) -> Contender<'a> {
        self.contender(CONSTANT_KEY, CONSTANT_LABEL, move || {
            let (pool, state_mib) = (&self.pools.plain, self.state_mib);
            let mut figures = train_beside(self.context, pool, state_mib, true, true)?;
            let interval = figures.more.remove("interval_s");
            figures.more.clear();
            let interval = interval.map(|interval| ("constant_interval_s".into(), interval));
            figures.more.extend(interval);
            Ok(figures)
        })
    }
}

/// The values of each of [`MORE_FIGURES`] so far, by key.
type Samples = BTreeMap<String, Vec<f64>>;

fn train_beside(
    context: &Context,
    pool: &LocalPool,
    state_mib: u64,
    is_durable: bool,
    is_constant: bool,
) -> Result<TurnFigures> {
    wait_until_idle(&[pool.process_id()]);
    let turn = DurabilityTurn::Train {
        url: url_of(pool),
        state_mib,
        is_durable,
        is_constant,
    };
    context.turn(Bench::Durability, &turn)
}

fn kill(context: &Context, pool: &LocalPool, state_mib: u64) -> Result<TurnFigures> {
    let turn = DurabilityTurn::Kill {
        url: url_of(pool),
        state_mib,
        pool_process: pool.process_id(),
    };
    context.turn(Bench::Durability, &turn)
}

/// Ends the worker of a training. Each time in another pool, as a worker is gone afterwards.
fn end_worker(context: &Context, state_mib: u64, how: WorkerEnd) -> Result<TurnFigures> {
    let cluster = start_workers(2);
    let turn = DurabilityTurn::EndWorker {
        url: cluster.client_url().to_owned(),
        state_mib,
        workers: cluster.workers.iter().map(Process::id).collect(),
        how,
    };
    context.turn(Bench::Durability, &turn)
}

/// Has the owner of a borrowed device request it. Each time in a pool with tenants of its own.
fn reclaim(context: &Context, state_mib: u64) -> Result<TurnFigures> {
    let cluster = start_workers(1);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "owner", "--guarantee", "flex=1"]);
    let turn = DurabilityTurn::Reclaim {
        url: cluster.client_url().to_owned(),
        owner_url: administrator.create_token(&["--tenant", "owner"]),
        state_mib,
        worker: cluster.workers[0].id(),
    };
    context.turn(Bench::Durability, &turn)
}

fn url_of(pool: &LocalPool) -> String {
    pool.url(TransportChoice::Auto).reveal()
}

/// Returns those of [`MORE_FIGURES`] of which there are samples: key, label and summary of each.
fn more_figures(samples: &Samples) -> impl Iterator<Item = (&'static str, &'static str, Summary)> {
    MORE_FIGURES.into_iter().filter_map(|(key, label)| {
        let summary = Summary::of(samples.get(key)?)?;
        Some((key, label, summary))
    })
}

/// Starts a pool of workers, each with memory for the snapshots of another one.
fn start_workers(count: usize) -> Cluster {
    let mut cluster = Cluster::start(&[]);
    for _ in 0..count {
        cluster.add_worker_with("flex", &["--snapshot-memory", SNAPSHOT_MEMORY]);
    }
    cluster.wait_for_workers(count);
    cluster
}
