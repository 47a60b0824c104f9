//! The steps of a victim beside a neighbour that queues ten times as much work.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{
    Shared,
    program::{Program, Step},
};
use crate::{
    context::Context,
    stats::{Summary, quantile, ratio, round},
};

/// The share of the victim and that of its neighbour.
const VICTIM_SHARE: f64 = 0.5;

/// How long a process has the turn of the device at least: `MIN_TURN` of the worker.
const MIN_TURN_MS: f64 = 5.0;

/// What has been measured of a victim, over all runs.
pub(super) struct VictimResult {
    alone: Summary,
    alone_p99: Summary,
    beside: Summary,
    beside_p99: Summary,
    /// A turn of the neighbour.
    turn: Summary,
    pub(super) ratio: Summary,
    /// The same, in proportion to the 99th percentile alone.
    pub(super) to_p99: Summary,
    products: usize,
}

impl VictimResult {
    /// Returns the labels and summaries of the times.
    pub(super) fn rows(&self) -> [(&'static str, &Summary); 5] {
        [
            ("victim alone, ms", &self.alone),
            ("victim alone, p99, ms", &self.alone_p99),
            ("victim beside a neighbour, both 0.5, ms", &self.beside),
            ("victim beside a neighbour, p99, ms", &self.beside_p99),
            ("a turn of the neighbour, ms", &self.turn),
        ]
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
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

/// Measures the steps of a victim alone and beside a neighbour.
///
/// # Errors
///
/// If a program fails.
pub(super) fn measure_victims(context: &Context, step: Step) -> Result<VictimResult> {
    let mut runs = Vec::with_capacity(context.runs);
    for run in 0..context.runs {
        let text = format!("sharing, a victim: run {} of {}", run + 1, context.runs);
        context.progress.update(&text);
        // The order changes from run to run.
        runs.push(if run % 2 == 0 {
            let alone = victim_alone(context, step)?;
            (alone, victim_beside(context, step)?)
        } else {
            let beside = victim_beside(context, step)?;
            (victim_alone(context, step)?, beside)
        });
    }
    let turn_ms = |alone: StepTimes| MIN_TURN_MS + alone.median / step.products as f64;
    let ratios = |alone_ms: &dyn Fn(StepTimes) -> f64| {
        let ratios = runs.iter().map(|&(alone, beside)| {
            let due = alone_ms(alone) / VICTIM_SHARE;
            ratio(beside.p99 - turn_ms(alone), due).context("a step takes time")
        });
        let ratios = ratios.collect::<Result<Vec<_>>>()?;
        Summary::of(&ratios).context("there are runs")
    };
    let summary = |value: &dyn Fn(StepTimes, StepTimes) -> f64| {
        let values: Vec<_> = runs
            .iter()
            .map(|&(alone, beside)| value(alone, beside))
            .collect();
        Summary::of(&values).context("there are runs")
    };
    Ok(VictimResult {
        alone: summary(&|alone, _| alone.median)?,
        alone_p99: summary(&|alone, _| alone.p99)?,
        beside: summary(&|_, beside| beside.median)?,
        beside_p99: summary(&|_, beside| beside.p99)?,
        turn: summary(&|alone, _| turn_ms(alone))?,
        ratio: ratios(&|alone| alone.median)?,
        to_p99: ratios(&|alone| alone.p99)?,
        products: step.products,
    })
}

fn victim_steps(context: &Context) -> Program {
    Program::Steps(context.full_or_quick(200, 5))
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
