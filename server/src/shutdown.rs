//! Ctrl+C and SIGTERM: the first asks for an orderly end, the second for an
//! immediate one.

use std::io;

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinSet,
};
use tracing::info;

/// The exit code after a second signal, as if the first had not been handled.
const INTERRUPTED: i32 = 130;

/// Waits for signals. Dropping it stops waiting, but signals stay caught.
pub(crate) struct Shutdown {
    requested: watch::Receiver<bool>,
    _watching: JoinSet<()>,
}

impl Shutdown {
    /// Catches signals from here on.
    ///
    /// # Errors
    ///
    /// When the system does not let us.
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

    /// Waits until the process is asked to end.
    pub(crate) async fn requested(&mut self) {
        if self
            .requested
            .wait_for(|requested| *requested)
            .await
            .is_err()
        {
            // Nobody watches any more; nobody will ask.
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
    info!("stopping; once more to stop at once");
    request.send_replace(true);
    either().await;
    std::process::exit(INTERRUPTED);
}
