//! Leases that the scheduler's engine can place in a second in a large pool, and how long it takes for an
//! event.
//!
//! The engine alone, in a process of its own: what the network and the tokens cost is not in it. Each turn
//! is a pool of the same size; `load.rs` has what happens in it.

mod load;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::load::{Load, Sizes};
use crate::{
    bench::Bench,
    context::Context,
    process::resident_bytes,
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::{Summary, quantile, round},
};

/// A pool and its load, in a process of its own.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct SchedulerTurn {
    sizes: Sizes,
    /// Number of leases that end while the engine is measured.
    steps: u64,
}

/// What one turn has measured.
#[derive(Debug, Serialize, Deserialize)]
struct Measured {
    /// Leases granted in a second of the engine's time, all events included.
    placements_per_s: f64,
    /// The 99th percentile of the times of all events, in milliseconds.
    p99_ms: f64,
    /// The longest time of an event, in milliseconds.
    max_ms: f64,
    /// Resident memory for each lease, in bytes, where `/proc` is available.
    bytes_per_lease: Option<f64>,
}

/// How many times smaller than the plain pool the pools with rules are. The two sizes show how much longer events take
/// in a larger pool.
const RULES_DIVISORS: [usize; 2] = [1, 4];

/// Of so many leases that end in the plain pool, one ends in a pool with rules.
const STEPS_DIVISOR: u64 = 20;

/// The medians of a pool's turns.
struct Figures {
    sizes: Sizes,
    placements: Summary,
    p99: Summary,
    max: Summary,
    bytes: Option<f64>,
}

impl Figures {
    fn of(sizes: Sizes, turns: &[Measured]) -> Result<Self> {
        let summary = |value: fn(&Measured) -> f64| {
            let values: Vec<_> = turns.iter().map(value).collect();
            Summary::of(&values).context("the benchmark returned no figures")
        };
        let bytes: Vec<_> = turns
            .iter()
            .filter_map(|turn| turn.bytes_per_lease)
            .collect();
        Ok(Self {
            sizes,
            placements: summary(|turn| turn.placements_per_s)?,
            p99: summary(|turn| turn.p99_ms)?,
            max: summary(|turn| turn.max_ms)?,
            bytes: Summary::of(&bytes).map(|bytes| bytes.median),
        })
    }

    fn json(&self) -> Map<String, Value> {
        let figures = json!({
            "placements_per_s": round(self.placements.median),
            "p99_ms": round(self.p99.median),
            "max_ms": round(self.max.median),
            "workers": self.sizes.workers,
            "leases": self.sizes.leases,
            "waiting": self.sizes.waiting,
            "bytes_per_lease": self.bytes.map(round),
        });
        match figures {
            Value::Object(figures) => figures,
            _ => Map::new(),
        }
    }

    fn row(&self) -> [String; 9] {
        let rules = if self.sizes.has_rules { "yes" } else { "no" };
        [
            self.sizes.workers.to_string(),
            self.sizes.leases.to_string(),
            self.sizes.waiting.to_string(),
            rules.into(),
            format_number(self.placements.median),
            format_quartiles(&self.placements),
            format_number(self.p99.median),
            format_number(self.max.median),
            format_optional(self.bytes),
        ]
    }
}

/// Runs the bench.
///
/// # Errors
///
/// If a process fails, or a pool is not as large as it should be.
pub(super) fn run(context: &Context) -> Result<Report> {
    // The smallest pool must have devices of both kinds.
    let (workers, leases, waiting) = context.full_or_quick((1000, 10_000, 10_000), (32, 320, 320));
    let steps = context.full_or_quick(20_000, 200);
    let pool = |divisor: usize, has_rules| SchedulerTurn {
        sizes: Sizes {
            workers: workers / divisor,
            leases: leases / divisor,
            waiting: waiting / divisor,
            has_rules,
        },
        steps: if has_rules {
            steps / STEPS_DIVISOR
        } else {
            steps
        },
    };
    let [large, small] = RULES_DIVISORS.map(|divisor| pool(divisor, true));
    let pools = [pool(1, false), large, small];
    let mut turns = pools.map(|_| Vec::new());
    for run in 0..context.runs {
        context
            .progress
            .update(&format!("scheduler: run {} of {}", run + 1, context.runs));
        for (pool, turns) in pools.iter().zip(&mut turns) {
            turns.push(context.turn::<Measured>(Bench::Scheduler, pool)?);
        }
    }
    let columns = [
        "placements/s",
        "quartiles",
        "p99 ms",
        "max ms",
        "bytes/lease",
    ];
    let mut rows = table(&["workers", "leases", "waiting", "rules"], &columns);
    let mut figures = Vec::new();
    for (pool, turns) in pools.iter().zip(&turns) {
        let found = Figures::of(pool.sizes, turns)?;
        rows.add_row(found.row());
        figures.push(found.json());
    }
    let [mut json, rules, rules_small] = <[_; 3]>::try_from(figures).unwrap_or_default();
    json.insert("rules".into(), rules.into());
    json.insert("rules_small".into(), rules_small.into());
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// Measures one pool, in a process of its own.
///
/// # Errors
///
/// If the pool has fewer leases or requests than it should have.
pub(super) fn turn(turn: &SchedulerTurn) -> Result<Value> {
    let SchedulerTurn { sizes, steps } = *turn;
    let resident = || resident_bytes(std::process::id()).map(|(now, _)| now);
    let mut before = None;
    let mut load = Load::new(sizes, || before = resident());
    let after = resident();
    load.queue_requests();
    let counts = load.counts();
    let is_as_large = match sizes.has_rules {
        // Some of the requests are for shares of devices, and do not wait.
        true => counts.0 + counts.1 == sizes.leases + sizes.waiting,
        false => counts == (sizes.leases, sizes.waiting),
    };
    ensure!(
        is_as_large,
        "the pool has {} leases and {} requests that wait, of {sizes:?}",
        counts.0,
        counts.1
    );
    for step in 0..steps {
        load.step(step);
    }
    let engine_time = load.engine_time().as_secs_f64();
    let mut times = load.event_times;
    times.sort_by(f64::total_cmp);
    let bytes = after.zip(before);
    let bytes = bytes.map(|(after, before)| after.saturating_sub(before) as f64);
    Ok(serde_json::to_value(Measured {
        placements_per_s: load.granted as f64 / engine_time,
        p99_ms: quantile(&times, 0.99) * 1e3,
        max_ms: times.last().copied().unwrap_or_default() * 1e3,
        bytes_per_lease: bytes.map(|bytes| bytes / sizes.leases as f64),
    })?)
}
