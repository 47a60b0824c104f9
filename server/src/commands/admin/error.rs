//! Why an administrator's call failed.

use std::time::Duration;

use tensord_proto::ids::LeaseId;
use tensord_transport::dial::DialError;
use tonic::metadata::errors::InvalidMetadataValue;

use super::DEADLINE;

/// Why an administrator's call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    /// No URL is given, and no scheduler has run on this host's state.
    #[error(
        "no scheduler has used the state directory {0}; run this command on the scheduler's host, name the scheduler's state directory with --state, or give a URL with an admin token in TENSORD_URL or with --url"
    )]
    NoScheduler(String),
    /// The scheduler cannot be reached.
    #[error("cannot reach the pool: {0}")]
    Dial(#[from] DialError),
    /// The scheduler refused the call.
    #[error("the scheduler at {address} refused the call: {reason}")]
    Refused {
        /// The scheduler's address.
        address: String,
        /// The scheduler's reason.
        reason: String,
    },
    /// The scheduler did not reply in time.
    #[error(
        "the scheduler at {address} did not answer within {DEADLINE:?}, so the change may or may not have been made; list the tokens, workers, tenants or leases to find out"
    )]
    Timeout {
        /// The scheduler's address.
        address: String,
    },
    /// A worker that is drained still has leases when the wait is over.
    #[error(
        "worker {name} still has leases after {} s ({leases}); `tensord lease list` shows why they stay, and draining goes on", wait.as_secs()
    )]
    NotDrained {
        /// The worker's name.
        name: String,
        /// The number of its leases.
        leases: usize,
        /// How long the command has waited.
        wait: Duration,
    },
    /// There is no such lease or request.
    #[error(
        "the pool has no lease or request {0}; it may be over, or a new request of its program; `tensord queue` and `tensord lease list` show what there is"
    )]
    NothingWithId(LeaseId),
    /// The token has characters that a header cannot carry.
    #[error(
        "the token in the pool URL contains characters that a token cannot have; copy the URL again"
    )]
    Token(#[from] InvalidMetadataValue),
}
