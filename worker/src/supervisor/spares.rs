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

use super::{
    process::{EXIT_TIMEOUT, Process, ProcessError, Spawner},
    table::END_TIMEOUT,
};
use crate::locks::lock;

/// Interval of the checks for spare processes that have died.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause after a spare process could not be started.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// How long a worker that stops waits for the processes of leases to exit. They are killed by then; one that a
/// driver holds in the kernel may exit later, and leaves its control group behind.
const EXIT_DEADLINE: Duration = END_TIMEOUT.saturating_add(EXIT_TIMEOUT);

/// The spare processes of a worker.
pub(super) struct Spares {
    spawner: Spawner,
    spares: Mutex<State>,
    taken: Notify,
}

struct State {
    /// Number of processes to keep ready.
    count: usize,
    ready: Vec<Process>,
}

impl Spares {
    pub(super) fn new(spawner: Spawner, count: usize) -> Self {
        Self {
            spawner,
            spares: Mutex::new(State {
                count,
                ready: Vec::new(),
            }),
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
        self.alive().ready.pop()
    }

    /// Drops the spares that have died.
    fn alive(&self) -> MutexGuard<'_, State> {
        let mut spares = lock(&self.spares);
        spares.ready.retain_mut(|process| !process.has_exited());
        spares
    }

    /// Returns whether there are fewer spares than there are to be.
    fn is_short(&self) -> bool {
        let spares = self.alive();
        spares.ready.len() < spares.count
    }

    /// Ends the spares, and starts no more of them. Waits for [`EXIT_DEADLINE`] at most until all processes
    /// have exited. The caller has ended the leases, and thereby their processes.
    pub(super) async fn close(&self) {
        {
            let mut spares = lock(&self.spares);
            spares.count = 0;
            spares.ready.clear();
        }
        if timeout(EXIT_DEADLINE, self.spawner.wait_for_exits())
            .await
            .is_err()
        {
            warn!("processes of leases have not exited within {EXIT_DEADLINE:?}");
        }
    }

    /// Keeps the number of spares up.
    pub(super) async fn refill(&self) {
        let mut is_failing = false;
        loop {
            while self.is_short() {
                match Process::start(&self.spawner).await {
                    Ok(process) => {
                        is_failing = false;
                        let mut spares = lock(&self.spares);
                        // The worker may have begun to stop.
                        if spares.ready.len() < spares.count {
                            spares.ready.push(process);
                        }
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
