//! Processes that were started ahead, so that a lease need not wait for one.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tracing::warn;

use super::process::{Process, ProcessError, Spawner};
use crate::locks::lock;

/// Interval of the checks for spare processes that have died.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause after a spare process could not be started.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The spare processes of a worker.
pub(super) struct Spares {
    spawner: Spawner,
    /// Number of processes to keep ready.
    count: usize,
    ready: Mutex<Vec<Process>>,
    taken: Notify,
}

impl Spares {
    pub(super) fn new(spawner: Spawner, count: usize) -> Self {
        Self {
            spawner,
            count,
            ready: Mutex::default(),
            taken: Notify::new(),
        }
    }

    /// Takes a spare process, or starts one if there is none.
    pub(super) async fn take(&self) -> Result<Process, ProcessError> {
        let spare = self.take_ready();
        self.taken.notify_one();
        match spare {
            Some(process) => Ok(process),
            None => Process::start(&self.spawner).await,
        }
    }

    fn take_ready(&self) -> Option<Process> {
        let mut ready = self.alive();
        ready.pop()
    }

    /// Drops the spares that have died.
    fn alive(&self) -> MutexGuard<'_, Vec<Process>> {
        let mut ready = lock(&self.ready);
        ready.retain_mut(|process| !process.has_exited());
        ready
    }

    /// Keeps the number of spares up.
    pub(super) async fn refill(&self) {
        let mut is_failing = false;
        loop {
            while self.alive().len() < self.count {
                match Process::start(&self.spawner).await {
                    Ok(process) => {
                        is_failing = false;
                        lock(&self.ready).push(process);
                    }
                    Err(e) => {
                        if !std::mem::replace(&mut is_failing, true) {
                            warn!(
                                "cannot start processes for leases ahead, and will try again: {e}"
                            );
                        }
                        sleep(RETRY_DELAY).await;
                    }
                }
            }
            // A timeout leads to the same check.
            let _ = timeout(CHECK_INTERVAL, self.taken.notified()).await;
        }
    }
}
