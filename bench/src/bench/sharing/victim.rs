//! The steps of a victim beside a neighbour that queues ten times as much work, alone, and without a pool.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{
    Shared,
    program::{Program, SharingTurn, Step},
};
use crate::{
    bench::Bench,
    context::Context,
    stats::{Summary, quantile, ratio, round},
};

/// The share of the victim and that of its neighbour.
const VICTIM_SHARE: f64 = 0.5;

/// How long a process has the turn of the device at least: `MIN_TURN` of the worker.
const MIN_TURN_MS: f64 = 5.0;

/// What has been measured of a victim, over all runs.
pub(super) struct VictimResult {
    local: Summary,
    local_p99: Summary,
    alone: Summary,
    alone_p99: Summary,
    beside: Summary,
    beside_p99: Summary,
    /// A turn of the neighbour.
    turn: Summary,
    pub(super) ratio: Summary,
    /// The same, in proportion to the 99th percentile alone.
    pub(super) to_p99: Summary,
    /// The 99th percentile without a pool, in proportion to the median.
    pub(super) local_ratio: Summary,
    products: usize,
}

impl VictimResult {
    /// Returns the labels and summaries of the times.
    pub(super) fn rows(&self) -> [(&'static str, &Summary); 7] {
        [
            ("without a pool, on local Flex, ms", &self.local),
            ("without a pool, p99, ms", &self.local_p99),
            ("victim alone, ms", &self.alone),
            ("victim alone, p99, ms", &self.alone_p99),
            ("victim beside a neighbour, both 0.5, ms", &self.beside),
            ("victim beside a neighbour, p99, ms", &self.beside_p99),
            ("a turn of the neighbour, ms", &self.turn),
        ]
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "local_ms": round(self.local.median),
            "local_p99_ms": round(self.local_p99.median),
            "local_p99_ratio": round(self.local_ratio.median),
            "alone_ms": round(self.alone.median),
            "alone_p99_ms": round(self.alone_p99.median),
            "beside_ms": round(self.beside.median),
            "beside_p99_ms": round(self.beside_p99.median),
            "turn_ms": round(self.turn.median),
            "ratio_quartiles": [round(self.ratio.q1), round(self.ratio.q3)],
            "ratio_to_p99_alone": round(self.to_p99.median),
            "products": self.products,
        })
    }
}

/// One run of a victim: the median and the 99th percentile of its steps, in ms.
#[derive(Debug, Clone, Copy)]
struct StepTimes {
    median: f64,
    p99: f64,
}

impl StepTimes {
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Self {
            median: quantile(&times, 0.5),
            p99: quantile(&times, 0.99),
        }
    }
}

/// One run: the steps without a pool, those of the victim alone, and those beside a neighbour.
#[derive(Clone, Copy)]
struct Run {
    local: StepTimes,
    alone: StepTimes,
    beside: StepTimes,
}

impl Run {
    /// Measures all three; each run begins with another one.
    fn measure(context: &Context, step: Step, run: usize) -> Result<Self> {
        let measures = [victim_local, victim_alone, victim_beside];
        let mut times = [None; 3];
        for at in 0..measures.len() {
            let at = (at + run) % measures.len();
            times[at] = Some(measures[at](context, step)?);
        }
        let [local, alone, beside] = times.map(|it| it.expect("each has been measured"));
        Ok(Self {
            local,
            alone,
            beside,
        })
    }

    /// Returns a turn of the neighbour, in ms.
    fn turn_ms(&self, step: Step) -> f64 {
        MIN_TURN_MS + self.alone.median / step.products as f64
    }

    /// Returns the 99th percentile beside a neighbour, without a turn of it, in proportion to what is due if a step
    /// takes `alone_ms` alone.
    fn ratio_to(&self, step: Step, alone_ms: f64) -> Result<f64> {
        let waited = self.beside.p99 - self.turn_ms(step);
        ratio(waited, alone_ms / VICTIM_SHARE).context("a step takes time")
    }
}

/// Measures the steps of a victim alone and beside a neighbour, and the same steps without a pool.
///
/// # Errors
///
/// If a program fails.
pub(super) fn measure_victims(context: &Context, step: Step) -> Result<VictimResult> {
    let mut runs = Vec::with_capacity(context.runs);
    for run in 0..context.runs {
        let text = format!("sharing, a victim: run {} of {}", run + 1, context.runs);
        context.progress.update(&text);
        runs.push(Run::measure(context, step, run)?);
    }
    let summary = |value: &dyn Fn(&Run) -> Result<f64>| {
        let values = runs.iter().map(value).collect::<Result<Vec<_>>>()?;
        Summary::of(&values).context("there are runs")
    };
    Ok(VictimResult {
        local: summary(&|run| Ok(run.local.median))?,
        local_p99: summary(&|run| Ok(run.local.p99))?,
        alone: summary(&|run| Ok(run.alone.median))?,
        alone_p99: summary(&|run| Ok(run.alone.p99))?,
        beside: summary(&|run| Ok(run.beside.median))?,
        beside_p99: summary(&|run| Ok(run.beside.p99))?,
        turn: summary(&|run| Ok(run.turn_ms(step)))?,
        ratio: summary(&|run| run.ratio_to(step, run.alone.median))?,
        to_p99: summary(&|run| run.ratio_to(step, run.alone.p99))?,
        local_ratio: summary(&|run| {
            ratio(run.local.p99, run.local.median).context("a step takes time")
        })?,
        products: step.products,
    })
}

fn victim_steps(context: &Context) -> Program {
    Program::Steps(context.full_or_quick(200, 5))
}

fn victim_local(context: &Context, step: Step) -> Result<StepTimes> {
    let turn = SharingTurn {
        url: None,
        share: None,
        step,
        program: victim_steps(context),
    };
    Ok(StepTimes::of(context.turn(Bench::Sharing, &turn)?))
}

fn victim_alone(context: &Context, step: Step) -> Result<StepTimes> {
    let shared = Shared::start(context, step)?;
    Ok(StepTimes::of(shared.measure(None, victim_steps(context))?))
}

fn victim_beside(context: &Context, step: Step) -> Result<StepTimes> {
    let shared = Shared::start(context, step)?;
    let neighbour = shared.background(1.0 - VICTIM_SHARE, Program::Busy)?;
    let times = shared.measure(Some(VICTIM_SHARE), victim_steps(context))?;
    neighbour.ensure_running()?;
    Ok(StepTimes::of(times))
}
