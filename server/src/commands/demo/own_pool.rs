//! The demo's own pool: a scheduler in this process, and worker processes.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tensord_client::PoolUrl;

use super::error::DemoError;
use crate::{
    audit,
    config::{SchedulerConfig, StatePath},
    failure::Failure,
    local::LocalPool,
    scheduler::LEASE_TOKEN_LIFE,
};

/// A pool for one run of the demo. Dropping it kills the workers, stops the scheduler and
/// removes the state directory.
pub(super) struct OwnPool {
    pub(super) url: PoolUrl,
    workers: Workers,
    scheduler: OwnScheduler,
}

/// The scheduler of the demo's own pool, and its state directory.
pub(super) struct OwnScheduler {
    _pool: LocalPool,
    _state: TempDir,
}

/// The worker processes of the demo's own pool. Dropping them kills them.
pub(super) struct Workers {
    url: PoolUrl,
    /// What they log.
    log: &'static str,
    /// The devices of each, as on the command line.
    devices: String,
    running: BTreeMap<String, Child>,
    /// Number of workers started so far.
    started: usize,
}

impl OwnPool {
    /// Starts a pool of `count` workers with at least `devices` devices, the same number on each
    /// worker. The workers log what passes the filter `log`.
    pub(super) async fn start(
        count: u32,
        devices: u32,
        kind: Option<&str>,
        log: &'static str,
    ) -> Result<Self, Failure> {
        let state = tempfile::tempdir().map_err(DemoError::Start)?;
        let path: PathBuf = state.path().join("state");
        let display_path = path.display().to_string();
        let audit = audit::Settings {
            directory: path.clone(),
            file_bytes: 0,
            files: 1,
        };
        let config = SchedulerConfig {
            state: StatePath { path, display_path },
            listen: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            host_name: None,
            // The log is turned off: only the demo connects, and the state directory is
            // temporary.
            audit,
            lease_token_life: LEASE_TOKEN_LIFE,
            half_life: Duration::ZERO,
            reserve_after: Duration::from_secs(600),
            idle_timeout: Duration::ZERO,
        };
        let pool = LocalPool::start(&config).await?;
        let made = "the tokens of a new pool are valid";
        let url = pool.urls.programs.clone().expect(made);
        let kind = kind.unwrap_or("flex");
        let mut workers = Workers {
            url: pool.urls.own_worker.clone(),
            log,
            devices: format!("{kind}*{}", devices.div_ceil(count)),
            running: BTreeMap::new(),
            started: 0,
        };
        for _ in 0..count {
            workers.start_next().map_err(DemoError::Start)?;
        }
        Ok(Self {
            url,
            workers,
            scheduler: OwnScheduler {
                _pool: pool,
                _state: state,
            },
        })
    }

    /// Separates the workers from the scheduler, which they need.
    pub(super) fn split(self) -> (Workers, OwnScheduler) {
        (self.workers, self.scheduler)
    }
}

impl Workers {
    /// Returns the number of running workers.
    pub(super) fn count(&self) -> usize {
        self.running.len()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.running.keys().cloned().collect()
    }

    /// Starts one more worker.
    pub(super) fn start_next(&mut self) -> io::Result<()> {
        self.started += 1;
        let name = format!("demo-{}", self.started);
        let worker = start_worker(&self.url, &name, &self.devices, self.log)?;
        self.running.insert(name, worker);
        Ok(())
    }

    /// Kills a worker, which gets no time to do anything.
    pub(super) fn kill(&mut self, name: &str) {
        if let Some(worker) = self.running.remove(name) {
            end(worker);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        std::mem::take(&mut self.running)
            .into_values()
            .for_each(end);
    }
}

fn end(mut worker: Child) {
    // Both fail if the process has already exited.
    let _ = worker.kill();
    let _ = worker.wait();
}

/// Starts a worker process. Its URL goes through the environment, as every user of
/// the host can see a process's arguments.
fn start_worker(url: &PoolUrl, name: &str, devices: &str, log: &str) -> io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(["worker", "--listen", "127.0.0.1:0"])
        .args(["--devices", devices])
        .args(["--name", name])
        .env("TENSORD_URL", url.reveal())
        .env("TENSORD_LOG", log)
        .env_remove("TENSORD_CONFIG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
}
