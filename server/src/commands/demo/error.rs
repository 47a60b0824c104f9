//! Why the demo failed.

use std::{io, path::PathBuf};

use tensord_client::{ConnectError, LeaseError};
use tensord_demo::TrainError;

use super::JOIN_DEADLINE;

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    /// The demo's own pool could not be started.
    #[error("cannot start the demo's own pool: {0}")]
    Start(#[from] io::Error),
    /// The workers of the demo's own pool did not join in time.
    #[error(
        "the demo's workers did not join within {JOIN_DEADLINE:?}; run the demo again with --log info to see why"
    )]
    JoinTimeout,
    /// The pool cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The pool gave no lease.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The lease ended during the training; holds the reason.
    #[error("the training stopped: {0}")]
    Lost(String),
    /// The training failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The losses and kills could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Curve {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No worker was killed.
    #[error("the training ended before a worker was killed; train for more --epochs")]
    NoKill,
    /// Something that must happen before the next kill did not happen.
    #[error("cannot go on killing workers: {0}")]
    Chaos(String),
    /// A step of a training whose workers were killed had another loss than without kills.
    #[error(
        "the loss of step {0} is not that of the training without kills, which is a bug in tensord; please report it"
    )]
    Differs(usize),
}
