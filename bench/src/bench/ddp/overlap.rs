//! The share of the communication that is hidden behind the backward pass.
//!
//! Two workers with a slow link between them take the same step in three ways: each
//! gradient is reduced as soon as it is computed, as Burn does; no gradient is reduced; and
//! all gradients are reduced after the whole backward pass has finished. With the times
//! `a`, `b` and `c`, communication takes `c - b`, of which `c - a` is hidden. Every way
//! ends with an optimizer step and a sync, so that no work carries over to the next step.
//!
//! The network has many equal layers, and the batch is chosen such that a step takes over
//! twice as long as its communication. So there is enough computation to hide all
//! communication but that of the last gradients.

mod rank;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use burn::{module::Module, tensor::Device};
use comfy_table::Table;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::rank::{DeepNetwork, Mode, Rank, RankTurn};
use super::{threads, train};
use crate::{
    context::Context,
    fleet::Fleet,
    namespace_entry::NetworkFeatures,
    network::{Network, Shape},
    race::Contender,
    report::{format_number, format_optional},
    stats::{ratio, round},
};

const WORLD: usize = 2;

const SHAPE: Shape = Shape {
    rate_mbit: 250,
    latency: Duration::ZERO,
};

const LAYERS: usize = 16;

/// Target ratio of the time of a step to the time of its communication.
const STEP_TO_COMMUNICATION: f64 = 2.25;

/// Rows of the batch with which the time of a step is first estimated, the number of
/// corrections, and the bounds of the chosen batch.
const TRIAL_BATCH: usize = 256;
const CORRECTIONS: usize = 3;
const BATCHES: [usize; 2] = [64, 16 << 10];

/// The result.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct OverlapResult {
    network: String,
    batch: usize,
    gradient_mib: f64,
    overlapped_ms: f64,
    silent_ms: f64,
    afterwards_ms: f64,
    hidden_share: Option<f64>,
}

/// Measures the overlap.
///
/// # Errors
///
/// If a worker or the network fails.
pub(super) fn measure(context: &Context, facts: NetworkFeatures) -> Result<OverlapResult> {
    context.progress.update("ddp overlap: starting workers");
    let dir = tempfile::tempdir()?;
    let network = Network::shaped(facts, WORLD, SHAPE, &dir)?;
    let fleet = Fleet::start(&network, WORLD, Some(threads()))?;
    let devices: Vec<Device> = fleet
        .devices()
        .iter()
        .map(|d| d.clone().autodiff())
        .collect();
    let _context = train::context(&devices);
    let deep = DeepNetwork::new(&devices[0], context.full_or_quick(LAYERS, 2));
    let gradient_bytes = deep.num_params() * 4;
    let ranks: Vec<Rank> = (0..WORLD)
        .map(|rank| Rank::start(deep.clone(), rank, &devices))
        .collect();
    let batch = calibrate(&ranks, gradient_bytes)?;
    let contender = |key: &str, label: &str, mode| {
        let ranks = &ranks;
        Contender::new(key, label, move |_| {
            let took = step(ranks, RankTurn { mode, batch })?;
            Ok(took.as_secs_f64() * 1000.0)
        })
    };
    let contenders = vec![
        contender("overlapped", "overlapped", Mode::Overlapped),
        contender("silent", "no communication", Mode::Never),
        contender("afterwards", "afterwards", Mode::Afterwards),
    ];
    let found = context.race("ddp overlap", contenders)?;
    let ms = |key: &str| {
        found
            .median(key)
            .context("the benchmark returned no figures")
    };
    let [a, b, c] = [ms("overlapped")?, ms("silent")?, ms("afterwards")?];
    Ok(OverlapResult {
        network: network.kind().into(),
        batch,
        gradient_mib: gradient_bytes as f64 / f64::from(1 << 20),
        overlapped_ms: a,
        silent_ms: b,
        afterwards_ms: c,
        hidden_share: ratio(c - a, c - b),
    })
}

/// Returns the batch with which a step takes the target time.
fn calibrate(ranks: &[Rank], gradient_bytes: usize) -> Result<usize> {
    let world = WORLD as f64;
    let moved = 2.0 * (world - 1.0) / world * gradient_bytes as f64;
    let target = STEP_TO_COMMUNICATION * moved / SHAPE.bytes_per_second();
    let mut batch = TRIAL_BATCH;
    // The first step warms up. The time of a step is not quite proportional to its rows.
    for _ in 0..=CORRECTIONS {
        let mode = Mode::Never;
        let took = step(ranks, RankTurn { mode, batch })?.as_secs_f64();
        batch = (batch as f64 * target / took) as usize;
        batch = batch.clamp(BATCHES[0], BATCHES[1]);
    }
    Ok(batch)
}

/// Runs a step on all ranks and returns its time.
fn step(ranks: &[Rank], turn: RankTurn) -> Result<Duration> {
    let begun = Instant::now();
    for rank in ranks {
        rank.begin(turn)?;
    }
    for rank in ranks {
        rank.end()?;
    }
    Ok(begun.elapsed())
}

impl OverlapResult {
    /// Adds the result to a report.
    pub(super) fn report(&self, rows: &mut Table, json: &mut Map<String, Value>) {
        let ways = [
            ("overlapped", self.overlapped_ms),
            ("no communication", self.silent_ms),
            ("afterwards", self.afterwards_ms),
        ];
        for (way, ms) in ways {
            let (name, steps) = (format!("deep, {way}"), format_number(1000.0 / ms));
            rows.add_row([name, WORLD.to_string(), steps]);
        }
        let hidden = format_optional(self.hidden_share);
        rows.add_row([format!("deep, share hidden: {hidden}")]);
        json.insert("hidden_share".into(), json!(self.hidden_share.map(round)));
        json.insert(
            "overlap".into(),
            json!({
                "network": self.network,
                "rate_mbit": SHAPE.rate_mbit,
                "batch": self.batch,
                "gradient_mib": round(self.gradient_mib),
                "overlapped_ms": round(self.overlapped_ms),
                "silent_ms": round(self.silent_ms),
                "afterwards_ms": round(self.afterwards_ms),
            }),
        );
    }
}
