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
const UNSHARE_ARGS: [&[&str]; 2] = [&["--user", "--map-root-user", "--net"], &["--net"]];

/// A script that creates a link, limits its rate, and delays it if the system can.
const PROBE_SCRIPT: &str = "ip link add one type veth peer name two \
    && tc qdisc add dev one root tbf rate 1gbit burst 128kb latency 50ms \
    && { tc qdisc add dev two root netem delay 1ms && echo delay; true; }";

/// Network features of the system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetworkFeatures {
    /// Whether this process can create network namespaces and shape links.
    pub(crate) namespaces: bool,
    /// Whether these links can have a delay.
    pub(crate) delay: bool,
}

/// The way to a namespace in which networks can be created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamespaceEntry {
    bench: Bench,
    unshare_args: Option<&'static [&'static str]>,
    facts: NetworkFeatures,
}

impl NamespaceEntry {
    /// Finds out which network features `bench` can use on this host.
    pub(crate) fn find(bench: Bench, context: &Context) -> Self {
        let found = UNSHARE_ARGS
            .iter()
            .find_map(|unshare_args| Some((*unshare_args, probe_features(unshare_args)?)));
        if found.is_none() {
            let name = bench.name();
            let note = "this host has no network namespaces, or no `ip` and `tc`; a relay limits the links instead";
            context.progress.print(&format!("{name}: {note}"));
        }
        Self {
            bench,
            unshare_args: found.map(|(unshare_args, _)| unshare_args),
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
        let launcher = self
            .unshare_args
            .map(|unshare_args| [&["unshare"], unshare_args].concat());
        let launcher = launcher.unwrap_or_default();
        part::run(context, self.bench, work, &launcher, self.facts)
    }
}

/// Returns the features available in a namespace entered by `unshare_args`, or `None` if it cannot
/// be entered.
fn probe_features(unshare_args: &[&str]) -> Option<NetworkFeatures> {
    let mut command = Command::new("unshare");
    command
        .args(unshare_args)
        .args(["--", "sh", "-c", PROBE_SCRIPT]);
    let tried = command.stdin(Stdio::null()).output().ok()?;
    tried.status.success().then(|| NetworkFeatures {
        namespaces: true,
        delay: tried.stdout.starts_with(b"delay"),
    })
}
