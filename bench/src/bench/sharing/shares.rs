//! The parts of a device's time that two busy programs have.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    SHARES, Shared,
    program::{Program, Step},
};
use crate::{context::Context, pool::LocalPool, stats::round};

/// From the start of the second program to the first account: the first second, which does not count,
/// and a heartbeat, by which an account may be late.
const BEFORE_WINDOWS: Duration = Duration::from_secs(2);

/// Accounts at both ends of a window are this many apart.
const SPANS_IN_WINDOW: usize = 6;

/// What two busy programs have had of a device.
pub(super) struct SharingResult {
    /// The parts in the window in which they differ most from the shares.
    pub(super) worst_parts: [f64; 2],
    /// By how much they differ.
    pub(super) error: f64,
    windows: usize,
    window_s: f64,
    /// The part of the time in which the device worked for one of them.
    busy: f64,
}

impl SharingResult {
    pub(super) fn to_json(&self) -> Value {
        json!({
            "worst_parts": self.worst_parts.map(|part| (part * 1e4).round() / 1e4),
            "windows": self.windows,
            "window_s": self.window_s,
            "device_busy": round(self.busy),
        })
    }
}

/// Measures the parts of a device's time that two busy programs have.
///
/// # Errors
///
/// If a program fails, or the device has not worked.
pub(super) fn measure_shares(context: &Context, step: Step) -> Result<SharingResult> {
    context.progress.update("sharing: two busy programs start");
    let shared = Shared::start(context, step)?;
    let [smaller, larger] = SHARES;
    let programs = [
        shared.background(smaller, Program::Busy)?,
        shared.background(larger, Program::Busy)?,
    ];
    sleep(BEFORE_WINDOWS);
    let span = context.full_or_quick(Duration::from_secs(10), Duration::from_millis(500));
    let spans = SPANS_IN_WINDOW + context.runs - 1;
    let begun = Instant::now();
    let mut accounts = vec![busy_seconds(&shared.pool)?];
    for done in 1..=spans {
        let text = format!("sharing: two busy programs: {done}/{spans}");
        context.progress.update(&text);
        sleep((span * done as u32).saturating_sub(begun.elapsed()));
        accounts.push(busy_seconds(&shared.pool)?);
    }
    let elapsed = begun.elapsed().as_secs_f64();
    for program in programs {
        program.ensure_running()?;
    }
    let windows = accounts.windows(SPANS_IN_WINDOW + 1);
    let parts = windows.map(|window| parts_of(&window[0], &window[SPANS_IN_WINDOW]));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let worst = parts
        .iter()
        .max_by(|a, b| error_of(a).total_cmp(&error_of(b)));
    let worst_parts = *worst.context("there is a window")?;
    let sum = |account: &[f64; 2]| account.iter().sum::<f64>();
    Ok(SharingResult {
        worst_parts,
        error: error_of(&worst_parts),
        windows: parts.len(),
        window_s: (span * SPANS_IN_WINDOW as u32).as_secs_f64(),
        busy: (sum(&accounts[spans]) - sum(&accounts[0])) / elapsed,
    })
}

/// Returns the parts of the time that leases have had a device between two accounts.
fn parts_of(before: &[f64; 2], after: &[f64; 2]) -> Result<[f64; 2]> {
    let used = [after[0] - before[0], after[1] - before[1]];
    let sum = used[0] + used[1];
    ensure!(sum > 0.0, "the device has not worked for any lease");
    Ok(used.map(|used| used / sum))
}

/// Returns the largest difference of a part from its share.
fn error_of(parts: &[f64; 2]) -> f64 {
    let errors = parts.iter().zip(SHARES);
    let errors = errors.map(|(part, share)| (part - share).abs());
    errors.fold(0.0, f64::max)
}

/// Returns the seconds that the device has worked for each of the two leases with [`SHARES`].
fn busy_seconds(pool: &LocalPool) -> Result<[f64; 2]> {
    let sums = pool.administer(&["usage", "--by", "lease"])?;
    let rows = sums["rows"].as_array().context("usage has rows")?;
    let number = |row: &Value, field: &str| row[field].as_f64().context("usage has numbers");
    let leases = rows
        .iter()
        .map(|row| Ok((number(row, "device_seconds")?, number(row, "busy_seconds")?)));
    let mut leases = leases.collect::<Result<Vec<_>>>()?;
    // A second counts by the share, so the larger share has more of them.
    leases.sort_by(|a, b| a.0.total_cmp(&b.0));
    match leases[..] {
        [(_, smaller), (_, larger)] => Ok([smaller, larger]),
        _ => bail!("usage is of {} leases, instead of two", leases.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_the_largest_difference_of_a_part() {
        let check = |before: [f64; 2], after: [f64; 2], expected: f64| {
            let parts = parts_of(&before, &after).unwrap();
            let error = error_of(&parts);
            assert!((error - expected).abs() < 1e-9, "{parts:?}: {error}");
        };
        check([1.0, 7.0], [16.0, 52.0], 0.0);
        check([0.0, 0.0], [3.0, 7.0], 0.05);
        check([0.0, 5.0], [1.0, 5.0], 0.75);
        assert!(parts_of(&[1.0, 2.0], &[1.0, 2.0]).is_err());
    }
}
