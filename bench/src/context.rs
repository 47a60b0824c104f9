//! The context of every bench: its options and the peers that it measures.

use std::cell::{Cell, OnceCell, RefCell};

use anyhow::{Context as _, Result, ensure};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::{
    bench::Bench,
    namespace_entry::NetworkFeatures,
    part::{self, Work},
    peer::{Peers, Servers},
    progress::Progress,
    race::{Contender, Results, race},
};

/// Options, and peers that start when they are first used.
pub(crate) struct Context {
    /// Number of measurements of each contender.
    pub(crate) runs: usize,
    /// Whether sizes are reduced to check only that everything runs.
    pub(crate) quick: bool,
    /// Only contenders are measured whose title and key contain one of these texts; all if there are none.
    pub(crate) only: Vec<String>,
    /// The title and key of each contender that was not measured, and the number of those that were.
    skipped: RefCell<Vec<String>>,
    measured: Cell<usize>,
    /// Shows what is being measured.
    pub(crate) progress: Progress,
    peers: OnceCell<Peers>,
    /// Dropped after the peers, which need it to end their sessions.
    servers: OnceCell<Servers>,
    /// Dropped after the peers, which use it until they are dropped.
    runtime: Runtime,
}

impl Context {
    /// Creates a context. Starts no process.
    ///
    /// # Errors
    ///
    /// If the runtime cannot start its threads.
    pub(crate) fn new(runs: usize, quick: bool, only: Vec<String>) -> Result<Self> {
        Self::with_progress(runs, quick, only, Progress::new())
    }

    /// Creates a context that reports to `progress`. Starts no process.
    ///
    /// # Errors
    ///
    /// If the runtime cannot start its threads.
    pub(crate) fn with_progress(
        runs: usize,
        quick: bool,
        only: Vec<String>,
        progress: Progress,
    ) -> Result<Self> {
        Ok(Self {
            runs,
            quick,
            only,
            skipped: RefCell::default(),
            measured: Cell::default(),
            progress,
            peers: OnceCell::new(),
            servers: OnceCell::new(),
            runtime: runtime()?,
        })
    }

    /// Returns the processes of all peers. Starts them on the first call.
    ///
    /// # Errors
    ///
    /// If a process does not start.
    pub(crate) fn servers(&self) -> Result<&Servers> {
        if self.servers.get().is_none() {
            self.progress.update("starting the peers");
            // Nobody else can have set it in between: this type is not `Sync`.
            let _ = self.servers.set(Servers::start()?);
        }
        self.servers.get().context("the peers did not start")
    }

    /// Returns all peers, connected from this process until it ends.
    ///
    /// # Errors
    ///
    /// If a peer does not start or respond.
    pub(crate) fn peers(&self) -> Result<&Peers> {
        if self.peers.get().is_none() {
            let peers = Peers::connect(self.servers()?, &self.runtime)?;
            let _ = self.peers.set(peers);
        }
        self.peers.get().context("the peers are not connected")
    }

    /// Runs one turn of a contender of `bench` in a process of its own, once the servers
    /// are idle.
    ///
    /// # Errors
    ///
    /// If the turn fails.
    pub(crate) fn turn<T: DeserializeOwned>(
        &self,
        bench: Bench,
        turn: &impl Serialize,
    ) -> Result<T> {
        if let Some(servers) = self.servers.get() {
            servers.wait_until_idle();
        }
        let work = Work::Part(serde_json::to_value(turn)?);
        part::run(self, bench, work, &[], NetworkFeatures::default())
    }

    /// Returns the runtime for the benches' own links and sockets.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Returns `full`, or `quick` if sizes are reduced.
    pub(crate) fn full_or_quick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Measures in turn the contenders that `--only` chooses.
    ///
    /// # Errors
    ///
    /// The first error of a contender.
    pub(crate) fn race(&self, title: &str, mut contenders: Vec<Contender<'_>>) -> Result<Results> {
        contenders.retain(|contender| {
            let name = format!("{title}: {}", contender.key());
            let is_chosen =
                self.only.is_empty() || self.only.iter().any(|text| name.contains(text));
            if !is_chosen {
                self.skipped.borrow_mut().push(name);
            }
            is_chosen
        });
        self.measured.set(self.measured.get() + contenders.len());
        race(title, contenders, self.runs, &self.progress)
    }

    /// Checks that a contender was measured, if not all were to be.
    ///
    /// # Errors
    ///
    /// If none was, with the names of all.
    pub(crate) fn ensure_chosen(&self) -> Result<()> {
        ensure!(
            self.only.is_empty() || self.measured.get() > 0,
            "--only {:?} chooses none of the contenders, which are {}",
            self.only,
            self.skipped.borrow().join(", ")
        );
        Ok(())
    }
}

/// Starts a runtime for sockets. Tensor ops run elsewhere.
///
/// # Errors
///
/// If the runtime cannot start its threads.
pub(crate) fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.context("cannot start threads for sockets")
}

/// Describes the machine and the build of the measurement.
pub(crate) fn machine() -> Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let profile = if cfg!(debug_assertions) {
        "dev"
    } else {
        "release"
    };
    json!({
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
        "cores": cores,
        "profile": profile,
        "burn": "0.22.1",
        "tensord": env!("CARGO_PKG_VERSION"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts which of three contenders are measured.
    #[track_caller]
    fn check(only: &[&str], expected: &[&str]) {
        let only = only.iter().map(|text| (*text).to_owned()).collect();
        let context = Context::with_progress(1, true, only, Progress::hidden()).unwrap();
        let contenders = ["off_ms", "on_ms", "many_off_ms"];
        let contenders = contenders.map(|key| Contender::new(key, key, |_| Ok(1.0)));
        let found = context.race("bench 16 MiB", contenders.into()).unwrap();
        let keys: Vec<_> = found.iter().map(|it| it.key.as_str()).collect();
        assert_eq!(keys, expected);
        assert_eq!(context.ensure_chosen().is_err(), expected.is_empty());
    }

    #[test]
    fn contenders_are_chosen_by_title_and_key() {
        check(&[], &["off_ms", "on_ms", "many_off_ms"]);
        check(&["on_ms"], &["on_ms"]);
        check(&["off_ms"], &["off_ms", "many_off_ms"]);
        check(&["16 MiB: off_ms", "on_"], &["off_ms", "on_ms"]);
        check(&["256 MiB"], &[]);
    }
}
