//! Benches that make networks run part by part, each in a process of its own, inside
//! a network namespace where it may do as it likes.
//!
//! ```text
//! bench ─► unshare ─► this binary again: `inside <bench> --part …` ─► namespaces, workers, …
//! ```
//!
//! Where the system has user namespaces this takes no privileges. Where it has no
//! namespaces for us, the part makes do with a relay.
//!
//! Burn keeps a thread for each remote device that a process has used, which wakes
//! some thousand times a second for as long as the process lives. A part has but few
//! devices, so those of one do not disturb the next.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use tensord_tests::cluster::Process;

use crate::{
    bench::Bench,
    context::Context,
    network,
    process::{announce, announced_within},
    progress::Progress,
};

/// How long the process may be silent: longer than any sample takes.
const SILENCE: Duration = Duration::from_secs(180);

/// Ways into a network namespace, the one without privileges first.
const WAYS: [&[&str]; 2] = [&["--user", "--map-root-user", "--net"], &["--net"]];

/// Makes a link, limits it, and delays it if the system can.
const TRIAL: &str = "ip link add one type veth peer name two \
    && tc qdisc add dev one root tbf rate 1gbit burst 128kb latency 50ms \
    && { tc qdisc add dev two root netem delay 1ms && echo delay; true; }";

/// What the system allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// This process may make network namespaces and shape links.
    pub(crate) namespaces: bool,
    /// Such links can have a delay.
    pub(crate) delay: bool,
}

/// What the process tells.
#[derive(Debug, Serialize, Deserialize)]
enum Told {
    Doing(String),
    Done(Value),
    Failed(String),
}

/// How to get to where networks can be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inside {
    bench: Bench,
    way: Option<&'static [&'static str]>,
    facts: Facts,
}

impl Inside {
    /// Finds out what `bench` can have here.
    pub(crate) fn find(bench: Bench, context: &Context) -> Self {
        let found = WAYS.iter().find_map(|way| Some((*way, try_way(way)?)));
        if found.is_none() {
            let name = bench.name();
            let note = "no network namespaces here, or no `ip` and `tc`: a relay shapes the links";
            context.progress.print(&format!("{name}: {note}"));
        }
        Self {
            bench,
            way: found.map(|(way, _)| way),
            facts: found.map(|(_, facts)| facts).unwrap_or_default(),
        }
    }

    /// Measures a part of the bench.
    ///
    /// # Errors
    ///
    /// When that fails.
    pub(crate) fn run<T: DeserializeOwned>(
        &self,
        context: &Context,
        part: &impl Serialize,
    ) -> Result<T> {
        let dir = tempfile::tempdir()?;
        let process = Process::spawn(self.command(context, part)?, dir.path().join("log"));
        loop {
            match announced_within(&process, SILENCE)? {
                Told::Doing(what) => context.progress.tell(&what),
                Told::Done(found) => return Ok(serde_json::from_value(found)?),
                Told::Failed(why) => bail!("{why}"),
            }
        }
    }

    fn command(&self, context: &Context, part: &impl Serialize) -> Result<Command> {
        let own = std::env::current_exe().context("cannot find this binary")?;
        let mut command = match self.way {
            Some(way) => {
                let mut command = Command::new("unshare");
                command.args(way).arg(own);
                command
            }
            None => Command::new(own),
        };
        command.args(["inside", self.bench.name()]);
        command.args(["--part", &serde_json::to_string(part)?]);
        command.args(["--runs", &context.runs.to_string()]);
        let flags = [
            ("--quick", context.quick),
            ("--namespaces", self.facts.namespaces),
            ("--delay", self.facts.delay),
        ];
        for (flag, set) in flags {
            command.args(set.then_some(flag));
        }
        Ok(command)
    }
}

/// What can be done in a namespace that is entered by `way`, if it can be.
fn try_way(way: &[&str]) -> Option<Facts> {
    let mut command = Command::new("unshare");
    command.args(way).args(["--", "sh", "-c", TRIAL]);
    let tried = command.stdin(Stdio::null()).output().ok()?;
    tried.status.success().then(|| Facts {
        namespaces: true,
        delay: tried.stdout.starts_with(b"delay"),
    })
}

/// The process: measures, and tells.
///
/// # Errors
///
/// When it cannot tell.
pub(crate) fn serve(
    bench: Bench,
    part: &str,
    runs: usize,
    quick: bool,
    facts: Facts,
) -> Result<()> {
    let telling = Progress::telling(|what| {
        // Once the parent has ended this panics, and so ends all that was started.
        announce(&Told::Doing(what.to_owned())).expect("a line of text is JSON");
    });
    let context = Context::with_progress(runs, quick, telling)?;
    let measure = || {
        if facts.namespaces {
            network::move_in()?;
        }
        bench.measure(&context, facts, part)
    };
    let told = match measure().with_context(|| bench.name()) {
        Ok(found) => Told::Done(found),
        Err(error) => Told::Failed(format!("{error:#}")),
    };
    announce(&told)
}
