//! Benches that make networks run part by part, each in a [process](crate::part) inside a
//! network namespace where it may do as it likes.
//!
//! ```text
//! bench ─► unshare ─► this binary again: `part <bench> …` ─► namespaces, workers, …
//! ```
//!
//! Where the system has user namespaces this takes no privileges. Where it has no
//! namespaces for us, the part makes do with a relay.

use std::process::{Command, Stdio};

use anyhow::Result;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    bench::Bench,
    context::Context,
    part::{self, Work},
};

/// Ways into a network namespace, the one without privileges first.
const WAYS: [&[&str]; 2] = [&["--user", "--map-root-user", "--net"], &["--net"]];

/// Makes a link, limits it, and delays it if the system can.
const TRIAL: &str = "ip link add one type veth peer name two \
    && tc qdisc add dev one root tbf rate 1gbit burst 128kb latency 50ms \
    && { tc qdisc add dev two root netem delay 1ms && echo delay; true; }";

/// What the system allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Facts {
    /// This process may make network namespaces and shape links.
    pub(crate) namespaces: bool,
    /// Such links can have a delay.
    pub(crate) delay: bool,
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
        let work = Work::Part(serde_json::to_value(part)?);
        let entrance = self.way.map(|way| [&["unshare"], way].concat());
        let entrance = entrance.unwrap_or_default();
        part::run(context, self.bench, work, &entrance, self.facts)
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
