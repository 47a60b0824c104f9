//! What every bench is given: how often to measure, and whom.

use std::cell::OnceCell;

use anyhow::{Context as _, Result};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::{
    bench::Bench,
    inside::Facts,
    part::{self, Work},
    peer::{Peers, Servers},
    progress::Progress,
    race::{Contender, Results, race},
};

/// Options, and peers that start when first asked for.
pub(crate) struct Context {
    /// Times that each contender is measured.
    pub(crate) runs: usize,
    /// Whether sizes are cut down to see no more than that everything runs.
    pub(crate) quick: bool,
    /// Says what is going on.
    pub(crate) progress: Progress,
    peers: OnceCell<Peers>,
    /// After the peers, which end their sessions with them.
    servers: OnceCell<Servers>,
    /// After the peers, which use it until they are gone.
    runtime: Runtime,
}

impl Context {
    /// Starts nothing yet.
    ///
    /// # Errors
    ///
    /// When the system gives no threads.
    pub(crate) fn new(runs: usize, quick: bool) -> Result<Self> {
        Self::with_progress(runs, quick, Progress::new())
    }

    /// Starts nothing yet, and has `progress` say what is going on.
    ///
    /// # Errors
    ///
    /// When the system gives no threads.
    pub(crate) fn with_progress(runs: usize, quick: bool, progress: Progress) -> Result<Self> {
        Ok(Self {
            runs,
            quick,
            progress,
            peers: OnceCell::new(),
            servers: OnceCell::new(),
            runtime: runtime()?,
        })
    }

    /// The processes behind all peers.
    ///
    /// # Errors
    ///
    /// When one does not start.
    pub(crate) fn servers(&self) -> Result<&Servers> {
        if self.servers.get().is_none() {
            self.progress.update("starting the peers");
            // Nobody else can have set it in between: this is no `Sync`.
            let _ = self.servers.set(Servers::start()?);
        }
        self.servers.get().context("the peers did not start")
    }

    /// All peers, connected from this process, where they are until it ends.
    ///
    /// # Errors
    ///
    /// When one does not start or answer.
    pub(crate) fn peers(&self) -> Result<&Peers> {
        if self.peers.get().is_none() {
            let peers = Peers::connect(self.servers()?, &self.runtime)?;
            let _ = self.peers.set(peers);
        }
        self.peers.get().context("the peers are not connected")
    }

    /// Has a contender of `bench` take a turn in a process of its own, once the servers
    /// are at rest. `turn` says what it is to do.
    ///
    /// # Errors
    ///
    /// When it fails.
    pub(crate) fn turn<T: DeserializeOwned>(
        &self,
        bench: Bench,
        turn: &impl Serialize,
    ) -> Result<T> {
        if let Some(servers) = self.servers.get() {
            servers.rest();
        }
        let work = Work::Part(serde_json::to_value(turn)?);
        part::run(self, bench, work, &[], Facts::default())
    }

    /// For links and sockets of the benches' own.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// `full`, or `quick` when sizes are cut down.
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Measures the contenders in turn.
    ///
    /// # Errors
    ///
    /// The first error of a contender.
    pub(crate) fn race(&self, title: &str, contenders: Vec<Contender<'_>>) -> Result<Results> {
        race(title, contenders, self.runs, &self.progress)
    }
}

/// A runtime for sockets; the tensors' own work happens elsewhere.
///
/// # Errors
///
/// When the system gives no threads.
pub(crate) fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.context("no threads for sockets")
}

/// What the figures were measured on.
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
