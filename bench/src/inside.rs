//! Benches that create networks run in parts, each in a [process](crate::part) inside a
//! network namespace in which it has all privileges.
//!
//! ```text
//! bench ─► unshare ─► this binary again: `part <bench> …` ─► namespaces, workers, …
//! ```
//!
//! Where the system has user namespaces, this takes no privileges. Where namespaces are not
//! available, the part uses a relay.

use std::process::{Command, Stdio};

use anyhow::Result;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    bench::Bench,
    context::Context,
    part::{self, Work},
};

/// Arguments of `unshare` that create a network namespace; those that need no privileges
/// come first.
const WAYS: [&[&str]; 2] = [&["--user", "--map-root-user", "--net"], &["--net"]];

/// A script that creates a link, limits its rate, and delays it if the system can.
const TRIAL: &str = "ip link add one type veth peer name two \
    && tc qdisc add dev one root tbf rate 1gbit burst 128kb latency 50ms \
    && { tc qdisc add dev two root netem delay 1ms && echo delay; true; }";

/// Network features of the system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Facts {
    /// Whether this process can create network namespaces and shape links.
    pub(crate) namespaces: bool,
    /// Whether these links can have a delay.
    pub(crate) delay: bool,
}

/// The way to a namespace in which networks can be created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inside {
    bench: Bench,
    way: Option<&'static [&'static str]>,
    facts: Facts,
}

impl Inside {
    /// Finds out which network features `bench` can use on this host.
    pub(crate) fn find(bench: Bench, context: &Context) -> Self {
        let found = WAYS.iter().find_map(|way| Some((*way, try_way(way)?)));
        if found.is_none() {
            let name = bench.name();
            let note = "this host has no network namespaces, or no `ip` and `tc`; a relay limits the links instead";
            context.progress.print(&format!("{name}: {note}"));
        }
        Self {
            bench,
            way: found.map(|(way, _)| way),
            facts: found.map(|(_, facts)| facts).unwrap_or_default(),
        }
    }

    /// Runs a part of the bench in its own process and returns the result.
    ///
    /// # Errors
    ///
    /// If the part fails.
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

/// Returns the features available in a namespace entered by `way`, or `None` if it cannot
/// be entered.
fn try_way(way: &[&str]) -> Option<Facts> {
    let mut command = Command::new("unshare");
    command.args(way).args(["--", "sh", "-c", TRIAL]);
    let tried = command.stdin(Stdio::null()).output().ok()?;
    tried.status.success().then(|| Facts {
        namespaces: true,
        delay: tried.stdout.starts_with(b"delay"),
    })
}
