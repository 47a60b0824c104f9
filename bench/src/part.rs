//! Processes that measure for another process: this binary again, started by a hidden
//! command.
//!
//! A program usually has one backend. Burn keeps a thread for each remote device that a
//! process ever had. The thread spins after each batch of ops, and later wakes some
//! thousand times a second as long as the process lives. So a process that has connected to
//! a peer disturbs all of its later measurements. Therefore
//!
//! - the process that a user starts connects to no peer: each bench is a process,
//! - where microseconds count, each *turn* of a contender is also a process, which starts
//!   once the peers' servers are idle,
//! - and a bench that creates networks has a process for each network, in a namespace
//!   ([`namespace_entry`](crate::namespace_entry)).

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use tempfile::TempDir;
use tensord_testkit::{cluster::Process, resource_usage::is_running};

use crate::{
    bench::Bench,
    context::Context,
    namespace_entry::NetworkFeatures,
    network,
    pool::{is_durable, set_durable},
    process::{announce, has_proc, read_announcement_within},
    progress::{Progress, Update},
    trainer::{fresh_seeds, start_seeds_at},
};

/// The work of the process.
#[derive(Serialize, Deserialize)]
pub(crate) enum Work {
    /// The whole bench.
    Bench,
    /// A part of the bench, in the bench's own format.
    Part(Value),
}

impl Work {
    /// How long the process may be silent: longer than any sample takes. The limit of a
    /// part is shorter, so a bench detects a hanging part before the bench itself counts as
    /// hanging.
    const fn silence_timeout(&self) -> Duration {
        match self {
            Self::Bench => Duration::from_secs(240),
            Self::Part(_) => Duration::from_secs(180),
        }
    }

    /// Number of seeds reserved for the batches of the process, more than it uses. Parts
    /// take theirs from those of their bench, in the order in which they start.
    const fn seeds(&self) -> usize {
        match self {
            Self::Bench => 1 << 40,
            Self::Part(_) => 1 << 20,
        }
    }
}

/// The task of the process. It may contain URLs, which are secrets, so it is passed in a
/// file that only this user can read.
#[derive(Serialize, Deserialize)]
struct Task {
    work: Work,
    runs: usize,
    quick: bool,
    /// See [`Context::only`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    only: Vec<String>,
    facts: NetworkFeatures,
    first_seed: u64,
    /// See [`set_durable`].
    is_durable: bool,
}

/// A message from the process.
#[derive(Debug, Serialize, Deserialize)]
enum PartMessage {
    Doing(String),
    Note(String),
    Done(Value),
    Failed(String),
}

/// Runs `work` of `bench` in a process of its own and returns the result. The process is
/// started through the command `launcher`, where it has `facts`.
///
/// # Errors
///
/// If the process fails, or is silent for too long.
pub(crate) fn run<T: DeserializeOwned>(
    context: &Context,
    bench: Bench,
    work: Work,
    launcher: &[&str],
    facts: NetworkFeatures,
) -> Result<T> {
    let own = std::env::current_exe().context("cannot find the path of this binary")?;
    run_of(&own, context, bench, work, launcher, facts)
}

/// Like [`run`], with another build of this binary, which accepts the same tasks.
///
/// # Errors
///
/// If the process fails, or is silent for too long.
pub(crate) fn run_of<T: DeserializeOwned>(
    binary: &Path,
    context: &Context,
    bench: Bench,
    work: Work,
    launcher: &[&str],
    facts: NetworkFeatures,
) -> Result<T> {
    let silence_timeout = work.silence_timeout();
    let part = PartProcess::start(binary, context, bench, work, launcher, facts)?;
    loop {
        match read_announcement_within(&part.process, silence_timeout)? {
            PartMessage::Doing(what) => context.progress.update(&what),
            PartMessage::Note(text) => context.progress.print(&text),
            PartMessage::Done(found) => return Ok(serde_json::from_value(found)?),
            PartMessage::Failed(why) => bail!("{why}"),
        }
    }
}

/// Starts a turn of `bench` that runs until the handle is dropped, and waits until the turn
/// announces that it has started.
///
/// # Errors
///
/// If the turn ends, or is silent for too long.
pub(crate) fn background(
    context: &Context,
    bench: Bench,
    turn: &impl Serialize,
) -> Result<PartProcess> {
    let work = Work::Part(serde_json::to_value(turn)?);
    let silence_timeout = work.silence_timeout();
    let own = std::env::current_exe().context("cannot find the path of this binary")?;
    let part = PartProcess::start(&own, context, bench, work, &[], NetworkFeatures::default())?;
    match read_announcement_within(&part.process, silence_timeout)? {
        PartMessage::Doing(_) | PartMessage::Note(_) => Ok(part),
        PartMessage::Done(found) => bail!("the process ended immediately: {found}"),
        PartMessage::Failed(why) => bail!("{why}"),
    }
}

/// A process that measures. It ends when this handle is dropped.
pub(crate) struct PartProcess {
    process: Process,
    _dir: TempDir,
}

impl PartProcess {
    /// Checks that the process has not ended, where `/proc` is available.
    ///
    /// # Errors
    ///
    /// If it has, with its log.
    pub(crate) fn ensure_running(&self) -> Result<()> {
        let has_ended = has_proc() && !is_running(self.process.id());
        ensure!(!has_ended, "a process ended early: {}", self.process.log());
        Ok(())
    }

    fn start(
        binary: &Path,
        context: &Context,
        bench: Bench,
        work: Work,
        launcher: &[&str],
        facts: NetworkFeatures,
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let seeds = work.seeds();
        let task = Task {
            work,
            runs: context.runs,
            quick: context.quick,
            only: context.only.clone(),
            facts,
            first_seed: fresh_seeds(seeds).start,
            is_durable: is_durable(),
        };
        // Only this user can read files in the directory.
        let file = dir.path().join("task");
        std::fs::write(&file, serde_json::to_vec(&task)?)?;
        let mut command = match launcher {
            [] => Command::new(binary),
            [program, args @ ..] => {
                let mut command = Command::new(program);
                command.args(args).arg(binary);
                command
            }
        };
        command.args(["part", bench.name()]).arg(file);
        let process = Process::spawn(command, dir.path().join("log"));
        Ok(Self { process, _dir: dir })
    }
}

/// Runs in the process: does the task in the file at `task` and announces the result.
///
/// # Errors
///
/// If the result cannot be announced.
pub(crate) fn serve(bench: Bench, task: &Path) -> Result<()> {
    let message = match run_task(bench, task).with_context(|| bench.name()) {
        Ok(found) => PartMessage::Done(found),
        Err(error) => PartMessage::Failed(format!("{error:#}")),
    };
    announce(&message)
}

fn run_task(bench: Bench, task: &Path) -> Result<Value> {
    let task: Task = serde_json::from_slice(&std::fs::read(task)?)?;
    start_seeds_at(task.first_seed);
    set_durable(task.is_durable);
    let sending = Progress::reporting_to(|update| {
        let message = match update {
            Update::Doing(what) => PartMessage::Doing(what.to_owned()),
            Update::Note(text) => PartMessage::Note(text.to_owned()),
        };
        // Once the parent has ended this panics, which also ends all processes started
        // here.
        announce(&message).expect("a line of text is JSON");
    });
    let context = Context::with_progress(task.runs, task.quick, task.only, sending)?;
    if task.facts.namespaces {
        network::set_up_namespace()?;
    }
    match task.work {
        Work::Bench => {
            let report = bench.run(&context)?;
            context.ensure_chosen()?;
            Ok(serde_json::to_value(report)?)
        }
        Work::Part(part) => bench.part(&context, task.facts, part),
    }
}

/// Calls `measure` once to warm up, and returns the result of a second call.
///
/// # Errors
///
/// The first error of `measure`.
pub(crate) fn after_warmup<T>(measure: impl FnMut() -> Result<T>) -> Result<T> {
    after_warmups(1, measure)
}

/// Calls `measure` `times` times to warm up, and returns the result of one more call.
///
/// # Errors
///
/// The first error of `measure`.
pub(crate) fn after_warmups<T>(times: usize, mut measure: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..times {
        measure()?;
    }
    measure()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn task_format_is_compatible_with_earlier_builds() {
        let task = |work| Task {
            work,
            runs: 1,
            quick: true,
            only: Vec::new(),
            facts: NetworkFeatures::default(),
            first_seed: 7,
            is_durable: true,
        };
        let expected = |work: Value| {
            json!({
                "work": work,
                "runs": 1,
                "quick": true,
                "facts": { "namespaces": false, "delay": false },
                "first_seed": 7,
                // Builds that do not know a field ignore it.
                "is_durable": true,
            })
        };
        let written = |work| serde_json::to_value(task(work)).unwrap();
        assert_eq!(written(Work::Bench), expected(json!("Bench")));
        let part = json!({ "One": "Local" });
        let whole = expected(json!({ "Part": part }));
        assert_eq!(written(Work::Part(part)), whole);
    }

    #[test]
    fn messages_of_earlier_builds_are_parsed() {
        let message = |text: &str| serde_json::from_str::<PartMessage>(text).unwrap();
        assert!(matches!(message(r#"{"Doing":"a"}"#), PartMessage::Doing(what) if what == "a"));
        assert!(matches!(message(r#"{"Note":"a"}"#), PartMessage::Note(text) if text == "a"));
        assert!(matches!(message(r#"{"Done":1.5}"#), PartMessage::Done(found) if found == 1.5));
        assert!(matches!(message(r#"{"Failed":"a"}"#), PartMessage::Failed(why) if why == "a"));
    }
}
