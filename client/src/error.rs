//! Errors of connecting and leasing. Ops fail with Burn's `ExecutionError`.

use prost::Message;
use tensord_proto::{
    text::{MESSAGE_CHARS, sanitize},
    v1,
};
use tensord_transport::{dial::DialError, url::UrlError};
use tonic::Status;

/// Why a pool could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The variable that holds the URL is not set.
    #[error(
        "TENSORD_URL is not set; export the line that `tensord up` or `tensord scheduler` prints"
    )]
    NoUrl,
    /// The URL is malformed.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// Nothing answers at the pool's address, or another service does.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The pool rejected the token, or the URL has none.
    #[error("the pool at {pool} did not accept the token: {reason}")]
    Token {
        /// The pool's address.
        pool: String,
        /// The reason that the call failed with.
        reason: String,
    },
    /// The pool has another version of the protocol.
    #[error("the pool at {pool} has an incompatible version: {reason}")]
    Version {
        /// The pool's address.
        pool: String,
        /// The reason that the call failed with.
        reason: String,
    },
    /// A call to the pool failed for another reason.
    #[error("the call to the pool at {pool} failed: {reason}")]
    CallFailed {
        /// The pool's address.
        pool: String,
        /// The reason that the call failed with.
        reason: String,
    },
    /// The operating system refused a thread or a socket.
    #[error("cannot start the client: {0}")]
    Runtime(#[from] std::io::Error),
}

impl ConnectError {
    /// The error for a failed call to the pool at `pool`.
    pub(crate) fn from_status(pool: &str, status: &Status) -> Self {
        let error = v1::Error::decode(status.details()).unwrap_or_default();
        let mut reason = error.message.clone();
        if reason.is_empty() {
            reason = format!(
                "{}: {}",
                status.code(),
                sanitize(status.message(), MESSAGE_CHARS)
            );
        }
        let pool = pool.to_owned();
        match error.code() {
            v1::ErrorCode::Token => Self::Token { pool, reason },
            v1::ErrorCode::Version => Self::Version { pool, reason },
            _ => Self::CallFailed { pool, reason },
        }
    }
}

/// Why a request did not get a usable lease.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The pool refused.
    #[error("the pool refused the lease: {reason}")]
    Refused {
        /// The kind of refusal.
        code: v1::ErrorCode,
        /// The pool's reason.
        reason: String,
    },
    /// No devices came free in time.
    #[error(
        "no lease was granted within {waited:?}; the request was at position {position} of the queue and was cancelled"
    )]
    TimedOut {
        /// How long the request waited.
        waited: std::time::Duration,
        /// Its last position in the queue, 1 being next; 0 if the pool sent none.
        position: u32,
    },
    /// A worker of the lease could not be reached.
    #[error("the lease was granted, but {worker} cannot be used: {reason}")]
    Worker {
        /// The worker's name.
        worker: String,
        /// Why this process cannot use the worker.
        reason: String,
    },
    /// The bridge that makes Burn devices of the leased ones could not start.
    #[error("cannot start the bridge to Burn: {reason}")]
    Bridge {
        /// Why the bridge could not start.
        reason: String,
    },
    /// The pool's client is shutting down.
    #[error("the connection to the pool is closed")]
    Closed,
}
