//! Compares this build with an earlier one: the gate for changes that must not make tensord
//! slower.
//!
//! A build is its two binaries, `tensord` and `tensord-bench`. The builds never
//! communicate: a client of one build measures a pool of the same build, and both pools run
//! throughout. In every round both builds do each [job](jobs), one right after the other,
//! and the order changes from round to round, so that noise affects both alike. A job is a
//! process of the build's own `tensord-bench`, started by the hidden command `part`. The
//! command's input and output ([`part`](crate::part)) and the turns in `jobs` are therefore
//! an interface between builds, and must stay compatible with the earliest build in use.
//!
//! [`verdict`] compares the samples.

mod jobs;
mod verdict;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use self::{jobs::Job, verdict::Comparison};
use crate::{
    bench::Bench,
    cli::Cli,
    context::{Context, machine},
    namespace_entry::NetworkFeatures,
    part::{Work, run_of},
    peer::wait_until_idle,
    pool::{LocalPool, set_durable},
    process::tensord_path,
    progress::Progress,
};

/// Benches that can be compared: those whose figures are of tensord alone, and that take
/// seconds.
pub(crate) const COMPARABLE: [Bench; 6] = [
    Bench::Ops,
    Bench::Wire,
    Bench::Step,
    Bench::Read,
    Bench::Bulk,
    Bench::Attach,
];

/// Exit code for a build that is slower; a run that failed has another code.
const EXIT_WORSE: u8 = 2;

/// Devices of a pool, as in the benches themselves: one for each turn, and some more,
/// because a dropped lease may take a moment to end.
const DEVICES: &str = "flex*4";

/// Compares this build with the one in `dir`.
///
/// # Errors
///
/// If a build is missing, a pool does not start, or a job fails.
pub(crate) fn run(cli: &Cli, dir: &Path) -> Result<ExitCode> {
    // The earlier build may take no snapshots.
    set_durable(false);
    let theirs = [binary(dir, "tensord")?, binary(dir, "tensord-bench")?];
    let jobs = jobs::jobs(&cli.comparable_benches()?, cli.quick);
    let rounds = cli.runs();
    let steps = jobs.iter().map(|job| 2 * job.rounds(rounds).count() as u64);
    let progress = Progress::counting(steps.sum());
    // A job that is a whole bench measures once, after a round to warm up.
    let context = Context::with_progress(1, cli.quick, Vec::new(), progress)?;
    let own = std::env::current_exe().context("cannot find the path of this binary")?;
    let builds = [
        Build::start("this", own, &tensord_path()?)?,
        Build::start("earlier", theirs[1].clone(), &theirs[0])?,
    ];
    let samples = race(&context, &builds, &jobs, rounds)?;
    let comparison = Comparison::of(&jobs, samples, cli.tolerance / 100.0)?;
    context.progress.print(&comparison.table());
    drop(builds);
    drop(context);
    if cli.json {
        let mut json = comparison.to_json();
        json["machine"] = machine();
        json["rounds"] = rounds.into();
        println!("{json}");
    }
    Ok(match comparison.is_worse() {
        true => ExitCode::from(EXIT_WORSE),
        false => ExitCode::SUCCESS,
    })
}

/// A build and its pool.
struct Build {
    name: &'static str,
    bench: PathBuf,
    pool: LocalPool,
}

impl Build {
    fn start(name: &'static str, bench: PathBuf, tensord: &Path) -> Result<Self> {
        let pool = LocalPool::start_binary(tensord, DEVICES);
        let pool = pool.with_context(|| format!("the pool of the {name} build"))?;
        Ok(Self { name, bench, pool })
    }

    /// Does `job` and returns its figures, in order.
    fn measure(&self, context: &Context, job: &Job) -> Result<Vec<f64>> {
        let work = match &job.turn {
            Some(turn) => Work::Part(turn.task(|transport| self.pool.url(transport).reveal())),
            None => Work::Bench,
        };
        let found: Value = run_of(
            &self.bench,
            context,
            job.bench,
            work,
            &[],
            NetworkFeatures::default(),
        )?;
        let figure = |figure: &jobs::Figure| {
            let value = found.pointer(&figure.pointer).and_then(Value::as_f64);
            value.with_context(|| format!("the result has no figure {}", figure.name))
        };
        job.figures.iter().map(figure).collect()
    }
}

/// Runs all rounds and returns the samples of each figure, job after job: those of this
/// build, then those of the earlier one.
fn race(
    context: &Context,
    builds: &[Build; 2],
    jobs: &[Job],
    rounds: usize,
) -> Result<Vec<[Vec<f64>; 2]>> {
    let mut samples: Vec<Vec<[Vec<f64>; 2]>> = jobs
        .iter()
        .map(|job| vec![Default::default(); job.figures.len()])
        .collect();
    let pools: Vec<_> = builds.iter().map(|b| b.pool.process_id()).collect();
    for round in 0..=rounds {
        for (job, samples) in jobs.iter().zip(&mut samples) {
            if !job.rounds(rounds).contains(&round) {
                continue;
            }
            for side in build_order(round) {
                let build = &builds[side];
                let title = format!("{}, round {round}/{rounds}, {}", job.title, build.name);
                context.progress.update(&title);
                wait_until_idle(&pools);
                let found = build.measure(context, job).with_context(|| title.clone())?;
                context.progress.step();
                if round > 0 {
                    let all = samples.iter_mut().zip(found);
                    all.for_each(|(samples, value)| samples[side].push(value));
                }
            }
        }
    }
    Ok(samples.into_iter().flatten().collect())
}

/// Returns the order of the builds in a round.
fn build_order(round: usize) -> [usize; 2] {
    match round % 2 {
        0 => [0, 1],
        _ => [1, 0],
    }
}

/// Returns the path of a binary of the build in `dir`.
fn binary(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    ensure!(
        path.is_file(),
        "{} does not exist; --against needs the folder with both binaries of a build",
        path.display()
    );
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_build_goes_first_equally_often() {
        assert_eq!((build_order(1), build_order(2)), ([1, 0], [0, 1]));
    }

    #[test]
    fn missing_build_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = binary(dir.path(), "tensord").unwrap_err().to_string();
        assert!(
            error.contains("tensord") && error.contains("--against"),
            "{error}"
        );
        std::fs::write(dir.path().join("tensord"), "").unwrap();
        assert_eq!(binary(dir.path(), "tensord").is_ok(), cfg!(not(windows)));
    }
}
