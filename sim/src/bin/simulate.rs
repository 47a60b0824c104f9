//! Simulates sessions with many seeds, and names the first one that fails.

use std::{
    io::{IsTerminal, Write, stderr},
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use tensord_sim::{Faults, Report, check};

/// Runs random programs on sessions whose connections are cut and whose processes are killed, and
/// compares what they read with undisturbed runs.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  simulate --seeds 10000
  simulate --first 4711 --seeds 1     Run one seed again")]
struct Options {
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    seeds: u64,
    /// First seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    first: u64,
    /// Most connections that are cut in one run
    #[arg(long, value_name = "N", default_value_t = 12)]
    cuts: u32,
    /// Most processes that are killed in one run
    #[arg(long, value_name = "N", default_value_t = 6)]
    kills: u32,
}

/// Interval of the progress line.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let Options {
        seeds,
        first,
        cuts,
        kills,
    } = Options::parse();
    let faults = Faults { cuts, kills };
    let began = Instant::now();
    let mut shown = began;
    let mut total = Report::default();
    for (done, seed) in (first..).take(seeds as usize).enumerate() {
        let checked = catch_unwind(AssertUnwindSafe(|| check(seed, faults)));
        match checked.unwrap_or_else(|_| Err("it panicked".into())) {
            Ok(report) => total += report,
            Err(reason) => {
                eprintln!("\rerror: seed {seed}: {reason}");
                eprintln!(
                    "run it again with: simulate --first {seed} --seeds 1 --cuts {cuts} --kills {kills}"
                );
                return ExitCode::FAILURE;
            }
        }
        if stderr().is_terminal() && shown.elapsed() >= PROGRESS_INTERVAL {
            shown = Instant::now();
            eprint!("\r{} of {seeds} seeds", done + 1);
            // Only the progress is lost.
            let _ = stderr().flush();
        }
    }
    if stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
    let Report {
        cuts,
        kills,
        group_kills,
        snapshots,
        answers,
    } = total;
    println!(
        "{seeds} seeds agree: {answers} answers, {kills} processes killed ({group_kills} with several devices), {cuts} connections cut, {snapshots} snapshots kept, in {:.1} s",
        began.elapsed().as_secs_f64()
    );
    ExitCode::SUCCESS
}
