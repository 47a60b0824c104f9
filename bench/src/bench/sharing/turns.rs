//! What a turn costs while nobody else wants the device.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{
    Shared,
    program::{Program, Step},
};
use crate::{
    context::Context,
    race::{Contender, Results},
    stats::Summary,
};

/// A step so small that the cost of a turn would show.
const SMALL_STEP: Step = Step {
    rows: 8,
    products: 1,
};

/// The pause before a step of a program that must ask for its turn: a process returns its turn when it
/// has had no work for 2 ms.
const PAUSE: Duration = Duration::from_millis(5);

/// Measures small steps, in µs, with the whole device, which has no turns, and with a share of 0.25 while
/// the lease with the other 0.75 has no work; without a pause, and each after [`PAUSE`].
pub(super) fn measure_turns(context: &Context) -> Result<Results> {
    let count = context.full_or_quick(2000, 20);
    let paused = Program::PausedSteps(context.full_or_quick(400, 20), PAUSE);
    let programs = [
        (["whole_us", "share_us"], "in a row", Program::Steps(count)),
        (
            ["paused_whole_us", "paused_share_us"],
            "after a pause",
            paused,
        ),
    ];
    let mut contenders = Vec::new();
    for ([whole, share], when, program) in programs {
        let label = format!("small step {when}, whole device, µs");
        contenders.push(Contender::new(whole, label, move |_| {
            median_us(Shared::start(context, SMALL_STEP)?.measure(None, program)?)
        }));
        let label = format!("small step {when}, a share of 0.25, 0.75 idle, µs");
        contenders.push(Contender::new(share, label, move |_| {
            median_us(Shared::start(context, SMALL_STEP)?.measure_beside_idle(program)?)
        }));
    }
    context.race("sharing, turns", contenders)
}

/// Returns the median of times in ms, in µs.
fn median_us(times: Vec<f64>) -> Result<f64> {
    let summary = Summary::of(&times).context("a program takes steps")?;
    Ok(summary.median * 1000.0)
}
