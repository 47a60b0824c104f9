//! What it costs that a session can go on in another process, and how long that takes.
//!
//! The same training runs with and without snapshots, in turns, beside tensors of a given size
//! that it keeps. Then its process is killed while it trains, and the time until its next loss is
//! measured: the worker notices, starts another process and restores the snapshot, and the client
//! sends the ops since then again.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use burn::tensor::{Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tensord_client::{Durability, Lease, LeaseRequest, Pool, PoolUrl};
use tensord_testkit::resource_usage::{processes_of_leases, signal_process};
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

/// How long a training is timed: several intervals between marks.
const TIMED: Duration = Duration::from_secs(12);

/// How long a training runs before its process is killed: long enough for a snapshot of the
/// largest state.
const BEFORE_KILL: Duration = Duration::from_secs(6);

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
    let url = || pool.url(TransportChoice::Auto).reveal();
    let mut rows = table(
        &["state", ""],
        &["median", "quartiles", "× without snapshots"],
    );
    let mut json = Vec::new();
    let states = context.full_or_quick(&STATES_MIB[..], &STATES_MIB[..1]);
    for &state_mib in states {
        let train = |is_durable| {
            wait_until_idle(&[pool.process_id()]);
            let (url, state_mib) = (url(), state_mib);
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
        let contenders = vec![
            Contender::new("off_ms", "a step, without snapshots", |_| train(false)),
            Contender::new("durable_ms", "a step, with snapshots", |_| train(true)),
            Contender::new("first_new_answer_ms", "from kill to next loss", |_| kill()),
        ];
        let found = context.race(&format!("durability {state_mib} MiB"), contenders)?;
        let ratio = found.ratio("durable_ms", "off_ms");
        for finding in found.iter() {
            let shown = (finding.key == "durable_ms").then(|| format_optional(ratio));
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
        let overhead = ratio.map(|ratio| round(ratio - 1.0));
        figures.insert("overhead".into(), json!(overhead));
        json.push(Value::from(figures));
    }
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
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
            let mut training = Training::start(url, *state_mib, Durability::Auto)?;
            let begun = Instant::now();
            let before = context.full_or_quick(BEFORE_KILL, Duration::from_secs(1));
            while begun.elapsed() < before {
                training.run(STEPS_PER_READ)?;
            }
            let killed = Instant::now();
            kill_process(*pool_process)?;
            training.run(1)?;
            Ok(killed.elapsed().as_secs_f64() * 1000.0)
        }
    }
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
