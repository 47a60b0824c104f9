//! Ctrl+C and SIGTERM: the first requests an orderly stop, the second ends the process
//! immediately.

use std::io;

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinSet,
};
use tracing::info;

/// The exit code after a second signal: the one that shells report for SIGINT.
const INTERRUPTED: i32 = 130;

/// Watcher of signals. Dropping it ends the watch, but the signal handlers stay installed, so
/// later signals have no effect.
pub(crate) struct Shutdown {
    requested: watch::Receiver<bool>,
    _watching: JoinSet<()>,
}

impl Shutdown {
    /// Starts to catch signals.
    ///
    /// # Errors
    ///
    /// If the system does not allow a signal handler.
    pub(crate) fn listen() -> io::Result<Self> {
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        let (request, requested) = watch::channel(false);
        let mut watching = JoinSet::new();
        watching.spawn(watch(interrupt, terminate, request));
        Ok(Self {
            requested,
            _watching: watching,
        })
    }

    /// Waits until a signal requests a stop.
    pub(crate) async fn requested(&mut self) {
        if self
            .requested
            .wait_for(|requested| *requested)
            .await
            .is_err()
        {
            // The watching task is gone, so no request can come.
            std::future::pending().await
        }
    }
}

async fn watch(mut interrupt: Signal, mut terminate: Signal, request: watch::Sender<bool>) {
    let mut either = async || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    either().await;
    info!("stopping; send the signal again to stop immediately");
    request.send_replace(true);
    either().await;
    std::process::exit(INTERRUPTED);
}
