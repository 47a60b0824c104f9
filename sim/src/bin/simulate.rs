//! Simulates pools with many seeds, and names the first one that fails.

use std::{
    io::{IsTerminal, Write, stderr},
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use tensord_sim::{Faults, Report, check};

/// Runs random programs on a pool whose connections are cut and whose processes, workers and scheduler are
/// killed, and compares what they read with undisturbed runs.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  simulate --seeds 10000
  simulate --first 4711 --seeds 1 --trace     Run one seed again, and see what happens")]
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
    /// Most workers that are killed, or cut off from the scheduler, in one run
    #[arg(long, value_name = "N", default_value_t = 4)]
    losses: u32,
    /// Most restarts of the scheduler in one run
    #[arg(long, value_name = "N", default_value_t = 2)]
    restarts: u32,
    /// Most moves, suspensions and drained workers in one run
    #[arg(long, value_name = "N", default_value_t = 4)]
    moves: u32,
    /// Print what happens in the pool
    #[arg(long)]
    trace: bool,
}

/// Interval of the progress line.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let Options {
        seeds,
        first,
        cuts,
        kills,
        losses,
        restarts,
        moves,
        trace,
    } = Options::parse();
    let faults = Faults {
        cuts,
        kills,
        losses,
        restarts,
        moves,
    };
    let began = Instant::now();
    let mut shown = began;
    let mut total = Report::default();
    for (done, seed) in (first..).take(seeds as usize).enumerate() {
        let checked = catch_unwind(AssertUnwindSafe(|| check(seed, faults, trace)));
        match checked.unwrap_or_else(|_| Err("it panicked".into())) {
            Ok(report) => total += report,
            Err(reason) => {
                eprintln!("\rerror: seed {seed}: {reason}");
                eprintln!(
                    "run it again with: simulate --first {seed} --seeds 1 --cuts {cuts} --kills {kills} --losses {losses} --restarts {restarts} --moves {moves} --trace"
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
    print(seeds, &total, began.elapsed());
    ExitCode::SUCCESS
}

fn print(seeds: u64, total: &Report, took: Duration) {
    let Report {
        cuts,
        kills,
        group_kills,
        spread_kills,
        lost_workers,
        lost_parts,
        process_pairs,
        part_pairs,
        cut_off,
        restarts,
        moves,
        places,
        snapshots,
        answers,
    } = total;
    println!("{seeds} seeds agree, in {:.1} s", took.as_secs_f64());
    let figures = [
        ("answers compared", *answers),
        ("processes killed", (*kills).into()),
        ("  of a lease with several devices", (*group_kills).into()),
        ("  of a lease on several workers", (*spread_kills).into()),
        ("  two at once", (*process_pairs).into()),
        ("workers killed", (*lost_workers).into()),
        ("  that ran a part of the lease", (*lost_parts).into()),
        ("  two at once, each with a part", (*part_pairs).into()),
        (
            "workers of the lease cut off from the scheduler",
            (*cut_off).into(),
        ),
        ("restarts of the scheduler", (*restarts).into()),
        ("moves, suspensions and drains", (*moves).into()),
        ("connections cut", (*cuts).into()),
        ("times that a lease got its devices", *places),
        ("snapshots kept", (*snapshots).into()),
    ];
    for (name, count) in figures {
        println!("  {name:<48} {count:>9}");
    }
}
