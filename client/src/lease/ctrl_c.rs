//! Ends leases on Ctrl+C instead of the process, for programs that want that.
//!
//! While there is such a lease, the first Ctrl+C only ends leases; the next one kills the
//! process. The decision is made in the signal handler itself, by one flag, so that the
//! next one works even if all threads of the program are stuck. When no such lease is left,
//! the flag is set again, and Ctrl+C kills the process, also one that has a handler of its own
//! or ignored the signal before.

use std::{
    io,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use signal_hook::{consts::SIGINT, flag};
use tokio::{
    runtime::Handle,
    signal::unix::{SignalKind, signal},
    task::AbortHandle,
};

/// Whether the next Ctrl+C kills the process.
static KILLS: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| Arc::new(true.into()));

/// The leases of the process that Ctrl+C ends.
static LEASES: Mutex<Leases> = Mutex::new(Leases {
    count: 0,
    is_installed: false,
});

struct Leases {
    count: usize,
    /// Whether the handler is installed. It is never removed.
    is_installed: bool,
}

impl Leases {
    fn lock() -> MutexGuard<'static, Self> {
        LEASES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a lease, and installs the handler if it is the first of the process.
    fn add(&mut self) -> io::Result<()> {
        if !self.is_installed {
            // In this order: the signal that sets the flag must not kill the process.
            flag::register_conditional_default(SIGINT, KILLS.clone())?;
            flag::register(SIGINT, KILLS.clone())?;
            self.is_installed = true;
        }
        self.count += 1;
        KILLS.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn remove(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            KILLS.store(true, Ordering::SeqCst);
        }
    }
}

/// Ends one lease on the first Ctrl+C; dropped with the lease.
pub(crate) struct CtrlC {
    task: AbortHandle,
}

impl CtrlC {
    /// Has `end` called on `runtime` when Ctrl+C is pressed.
    ///
    /// # Errors
    ///
    /// The system's error, if it has no handler for the signal.
    pub(super) fn start(runtime: &Handle, end: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let mut signals = {
            let _context = runtime.enter();
            signal(SignalKind::interrupt())?
        };
        Leases::lock().add()?;
        let ending = async move {
            // `None` if the runtime shuts down, and the lease with it.
            if signals.recv().await.is_some() {
                end();
            }
        };
        let task = runtime.spawn(ending).abort_handle();
        Ok(Self { task })
    }
}

impl Drop for CtrlC {
    fn drop(&mut self) {
        self.task.abort();
        Leases::lock().remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The signal itself is tested with processes, in `tests/`.
    #[tokio::test]
    async fn ctrl_c_kills_again_when_no_lease_is_left() {
        let kills = || KILLS.load(Ordering::SeqCst);
        assert!(kills());
        let start = || CtrlC::start(&Handle::current(), || ()).unwrap();
        let (first, second) = (start(), start());
        assert!(!kills());
        drop(first);
        assert!(!kills());
        drop(second);
        assert!(kills());
        let third = start();
        assert!(!kills());
        drop(third);
        assert!(kills());
    }
}
