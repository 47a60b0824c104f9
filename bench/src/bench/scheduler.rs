//! Leases that the scheduler's engine can place in a second in a large pool, and how long it takes for an
//! event.
//!
//! The engine alone, in a process of its own: what the network and the tokens cost is not in it. Each turn
//! is a pool of the same size; `load.rs` has what happens in it.

mod load;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

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

/// Runs the bench.
///
/// # Errors
///
/// If a process fails, or a pool is not as large as it should be.
pub(super) fn run(context: &Context) -> Result<Report> {
    let (workers, leases, waiting) = context.full_or_quick((1000, 10_000, 10_000), (10, 100, 100));
    let turn = SchedulerTurn {
        sizes: Sizes {
            workers,
            leases,
            waiting,
        },
        steps: context.full_or_quick(20_000, 200),
    };
    let mut turns = Vec::new();
    for run in 0..context.runs {
        context
            .progress
            .update(&format!("scheduler: run {} of {}", run + 1, context.runs));
        turns.push(context.turn::<Measured>(Bench::Scheduler, &turn)?);
    }
    let summary = |value: fn(&Measured) -> f64| {
        let values: Vec<_> = turns.iter().map(value).collect();
        Summary::of(&values).context("the benchmark returned no figures")
    };
    let placements = summary(|turn| turn.placements_per_s)?;
    let (p99, max) = (summary(|turn| turn.p99_ms)?, summary(|turn| turn.max_ms)?);
    let bytes: Vec<_> = turns
        .iter()
        .filter_map(|turn| turn.bytes_per_lease)
        .collect();
    let bytes = Summary::of(&bytes).map(|bytes| bytes.median);
    let columns = [
        "placements/s",
        "quartiles",
        "p99 ms",
        "max ms",
        "bytes/lease",
    ];
    let mut rows = table(&["workers", "leases", "waiting"], &columns);
    rows.add_row([
        workers.to_string(),
        leases.to_string(),
        waiting.to_string(),
        format_number(placements.median),
        format_quartiles(&placements),
        format_number(p99.median),
        format_number(max.median),
        format_optional(bytes),
    ]);
    Ok(Report {
        json: json!({
            "placements_per_s": round(placements.median),
            "p99_ms": round(p99.median),
            "max_ms": round(max.median),
            "workers": workers,
            "leases": leases,
            "waiting": waiting,
            "bytes_per_lease": bytes.map(round),
        }),
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
    ensure!(
        counts == (sizes.leases, sizes.waiting),
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
