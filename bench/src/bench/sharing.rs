//! How exactly leases share the time of a device, what the device does while one of them has no work,
//! and how long a step takes beside a neighbour that queues ten times as much work.
//!
//! A pool has one Flex device, and each program is a process with a lease. A step is a chain of matrix
//! products ([`Step`]), of some ms each, with a read at its end; it takes more than 50 ms on a device
//! of its own. A program that is busy always has ten steps queued. Each sample has a pool of its own, as
//! the lease of a killed program ends only after a while. All shares are of the device's time, of which
//! the pool's tenants know nothing. The figures:
//!
//! - `share_error`: two busy programs have shares of 0.25 and 0.75. From the second after both have
//!   begun, the time that the device has worked for each is read from the pool's account
//!   (`tensord usage --by lease`) every 10 s. In each window of 60 s, a lease's part is its time in
//!   proportion to the time of both. The figure is the largest difference of a part from the share,
//!   over all windows. There are as many windows as runs, each 10 s after the one before.
//! - `work_conserving`: the steps per second of a busy program with a share of 0.25, while the lease with
//!   the other 0.75 has no work, in proportion to those of the same program with the whole device:
//!   the ratio of the medians.
//! - `victim_p99_ratio`: a victim with a share of 0.5 takes one step after the other beside a busy program
//!   with the other 0.5. The figure is (P − T) / (M / 0.5), where P is the 99th percentile of the
//!   victim's steps, M is the median of its steps on a device of its own, and T is a turn of the
//!   neighbour, which ends with the first product that is done after `MIN_TURN_MS`: `MIN_TURN_MS` + M
//!   / (products of a step). Both kinds of steps are measured in each run, one after the other, and the
//!   figure is the median over the runs. `ratio_to_p99_alone` is (P − T) divided by (the 99th percentile
//!   alone / 0.5), with the same T: where the programs run on the worker's cores, steps alone vary by more than the
//!   target allows. `local_p99_ratio` shows how much of that is the machine's: the 99th percentile divided by the
//!   median, of the same steps on Flex in a process without a pool.
//! - `turns`: the time of a small step with a share whose neighbour has no work, and with the whole device.
//!   The difference is the cost of a turn that nobody else wants ([`turns`]).

mod program;
mod shares;
mod turns;
mod victim;

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tensord_transport::TransportChoice;

pub(super) use self::program::SharingTurn;
use self::{
    program::{Program, Step},
    shares::measure_shares,
    turns::measure_turns,
    victim::measure_victims,
};
use crate::{
    bench::Bench,
    context::Context,
    part::{self, PartProcess},
    peer::wait_until_idle,
    pool::LocalPool,
    race::{Contender, Results},
    report::{Report, add_results, format_number, format_quartiles, table},
    stats::{Summary, round},
};

/// The shares of the two busy programs, the smaller one first.
const SHARES: [f64; 2] = [0.25, 0.75];

/// The time for which a probe chooses a step: the target is for steps of at least 50 ms, and a probe may be slower
/// than the steps that are measured.
const STEP_MS: f64 = 75.0;

/// Runs the bench.
///
/// # Errors
///
/// If the pool or a program fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let step = probe_step(context)?;
    let sharing = measure_shares(context, step)?;
    let conserving = measure_conserving(context, step)?;
    let victims = measure_victims(context, step)?;
    let turns = measure_turns(context)?;
    let conserved = conserving.ratio("idle_per_s", "whole_per_s");
    let conserved = conserved.context("the device has taken no steps")?;

    let mut shares = table(&["parts of the device's time"], &["share", "part", "error"]);
    for (share, part) in SHARES.iter().zip(sharing.worst_parts) {
        shares.add_row([
            "both always have work, worst window".to_owned(),
            share.to_string(),
            format!("{part:.4}"),
            format!("{:.4}", (part - share).abs()),
        ]);
    }
    let mut steps = table(&["steps"], &["median", "quartiles"]);
    add_results(&mut steps, &[], &conserving);
    for (label, summary) in victims.rows() {
        steps.add_row([
            label.to_owned(),
            format_number(summary.median),
            format_quartiles(summary),
        ]);
    }
    add_results(&mut steps, &[], &turns);
    let figures = [
        format!("largest error of a share: {}", round(sharing.error)),
        format!("speed while the other lease is idle: {}", round(conserved)),
        format!(
            "victim's p99, of what is due: {}; relative to its p99 alone: {}",
            round(victims.ratio.median),
            round(victims.to_p99.median)
        ),
        format!(
            "p99 of the same steps without a pool, of their median: {}",
            round(victims.local_ratio.median)
        ),
    ];
    let mut json = Map::new();
    json.insert("share_error".into(), json!(round(sharing.error)));
    json.insert(
        "victim_p99_ratio".into(),
        json!(round(victims.ratio.median)),
    );
    json.insert("work_conserving".into(), json!(round(conserved)));
    json.insert("shares".into(), sharing.to_json());
    json.insert("conserving".into(), conserving.to_json().into());
    json.insert("victim".into(), victims.to_json());
    json.insert("turns".into(), turns.to_json().into());
    Ok(Report {
        json: json.into(),
        table: format!("{shares}\n\n{steps}\n\n{}", figures.join("\n")),
    })
}

/// Takes a turn.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn turn(context: &Context, turn: &SharingTurn) -> Result<Value> {
    program::run(context, turn)
}

/// A pool whose only device the programs share.
struct Shared<'a> {
    context: &'a Context,
    pool: LocalPool,
    step: Step,
}

impl<'a> Shared<'a> {
    fn start(context: &'a Context, step: Step) -> Result<Self> {
        let pool = LocalPool::start("flex")?;
        wait_until_idle(&[pool.process_id()]);
        Ok(Self {
            context,
            pool,
            step,
        })
    }

    fn turn(&self, share: Option<f64>, program: Program) -> SharingTurn {
        SharingTurn {
            url: Some(self.pool.url(TransportChoice::Auto).reveal()),
            share,
            step: self.step,
            program,
        }
    }

    /// Starts a program that runs until the handle is dropped.
    fn background(&self, share: f64, program: Program) -> Result<PartProcess> {
        let turn = self.turn(Some(share), program);
        part::background(self.context, Bench::Sharing, &turn)
    }

    /// Runs a program with the smaller share until it returns what it has measured, while the lease with
    /// the other share has no work.
    fn measure_beside_idle<T: DeserializeOwned>(&self, program: Program) -> Result<T> {
        let [share, other] = SHARES;
        let idle = self.background(other, Program::Idle)?;
        let found = self.measure(Some(share), program)?;
        idle.ensure_running()?;
        Ok(found)
    }

    /// Runs a program until it returns what it has measured.
    fn measure<T: DeserializeOwned>(&self, share: Option<f64>, program: Program) -> Result<T> {
        let turn = self.turn(share, program);
        self.context.turn(Bench::Sharing, &turn)
    }
}

/// Returns a step that takes about [`STEP_MS`] on a device of its own.
fn probe_step(context: &Context) -> Result<Step> {
    context.progress.update("sharing: the time of a product");
    let probed = Step {
        rows: context.full_or_quick(512, 128),
        products: 10,
    };
    let steps = Program::Steps(context.full_or_quick(50, 5));
    let times: Vec<f64> = Shared::start(context, probed)?.measure(None, steps)?;
    let summary = Summary::of(&times).context("a probe has steps")?;
    let product_ms = summary.median / probed.products as f64;
    let products = context.full_or_quick((STEP_MS / product_ms).ceil() as usize, probed.products);
    Ok(Step { products, ..probed })
}

/// Measures a busy program that has the whole device, and one beside a lease without work.
fn measure_conserving(context: &Context, step: Step) -> Result<Results> {
    let duration = context.full_or_quick(Duration::from_secs(5), Duration::from_millis(300));
    let program = Program::Throughput(duration);
    let whole = Contender::new("whole_per_s", "whole device, steps/s", |_| {
        Shared::start(context, step)?.measure(None, program)
    });
    let idle = Contender::new("idle_per_s", "a share of 0.25, 0.75 idle, steps/s", |_| {
        Shared::start(context, step)?.measure_beside_idle(program)
    });
    context.race("sharing, one idle", vec![whole, idle])
}
