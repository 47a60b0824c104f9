//! What a server does when ten times as many requests arrive as it can answer.

use std::time::Duration;

use anyhow::Result;

use super::{CNN, Setup};
use crate::{context::Context, process::resident_bytes};

/// How many times as many requests arrive.
const FACTOR: f64 = 10.0;

/// How long the server has after that until it must answer all requests again.
const RECOVERY: Duration = Duration::from_secs(2);

/// What happens at ten times the load.
pub(super) struct Overload {
    /// The requests answered in time per second, relative to the most that the server answers.
    pub(super) goodput: f64,
    /// The requests refused per second.
    pub(super) refused_per_s: f64,
    /// The part of requests that were not sent, as all connections had one without an answer.
    pub(super) unsent: f64,
    /// By how much the server's process has grown at the end.
    pub(super) memory_mib: f64,
    /// Which part of half of what the server can answer it answers afterwards.
    pub(super) recovered: f64,
    pub(super) failed: usize,
}

impl Overload {
    /// Sends ten times what the server answers at `best`, and half of that afterwards.
    pub(super) fn measure(setup: &Setup, context: &Context, best: f64) -> Result<Self> {
        context.progress.update("serve: ten times the load");
        let memory = || resident_bytes(std::process::id()).map_or(0, |(now, _)| now);
        let before = memory();
        let seconds = context.full_or_quick(30.0, 0.5);
        let result = setup.load(CNN, 1, FACTOR * best, seconds)?;
        let grown = memory().saturating_sub(before);
        std::thread::sleep(RECOVERY);
        let rate = (best / 2.0).max(10.0);
        let after = setup.load(CNN, 1, rate, context.full_or_quick(3.0, 0.2))?;
        Ok(Self {
            goodput: result.per_s / best,
            refused_per_s: result.refused as f64 / seconds,
            unsent: result.unsent as f64 / (FACTOR * best * seconds),
            memory_mib: grown as f64 / f64::from(1 << 20),
            recovered: after.per_s / rate,
            failed: result.failed() + after.failed(),
        })
    }
}
