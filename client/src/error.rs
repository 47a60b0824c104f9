//! Errors of connecting and leasing. Errors of ops are Burn's `ExecutionError`.

use prost::Message;
use tensord_proto::{
    text::{MESSAGE_CHARS, foreign},
    v1,
};
use tensord_transport::{dial::DialError, url::UrlError};
use tonic::Status;

/// Why a pool could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The variable that holds the URL is not set.
    #[error(
        "TENSORD_URL is not set; `tensord up` and `tensord scheduler` print it, ready to paste"
    )]
    NoUrl,
    /// The URL is malformed.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// Nothing answers, or somebody else does.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The pool does not know the token, or the URL has none.
    #[error("the pool at {pool} did not accept the token: {reason}")]
    Token {
        /// Where.
        pool: String,
        /// What it said.
        reason: String,
    },
    /// The pool speaks another version.
    #[error("the pool at {pool} is of another version: {reason}")]
    Version {
        /// Where.
        pool: String,
        /// What it said.
        reason: String,
    },
    /// The pool answered something else.
    #[error("the pool at {pool} broke off: {reason}")]
    Broken {
        /// Where.
        pool: String,
        /// What it said.
        reason: String,
    },
    /// The system gave no thread or socket.
    #[error("cannot start the client: {0}")]
    Runtime(#[from] std::io::Error),
}

impl ConnectError {
    /// What a failed call to the pool at `pool` means.
    pub(crate) fn from_status(pool: &str, status: &Status) -> Self {
        let error = v1::Error::decode(status.details()).unwrap_or_default();
        let mut reason = error.message.clone();
        if reason.is_empty() {
            reason = format!(
                "{}: {}",
                status.code(),
                foreign(status.message(), MESSAGE_CHARS)
            );
        }
        let pool = pool.to_owned();
        match error.code() {
            v1::ErrorCode::Token => Self::Token { pool, reason },
            v1::ErrorCode::Version => Self::Version { pool, reason },
            _ => Self::Broken { pool, reason },
        }
    }
}

/// Why a lease was not had.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The pool refused.
    #[error("the pool refused the lease: {reason}")]
    Refused {
        /// The kind of refusal.
        code: v1::ErrorCode,
        /// What it said.
        reason: String,
    },
    /// No devices came free in time.
    #[error(
        "no lease within {waited:?}; the request stood at position {position} and was cancelled"
    )]
    TimedOut {
        /// How long it waited.
        waited: std::time::Duration,
        /// Where it stood, 1 being next; 0 if the pool did not say.
        position: u32,
    },
    /// A worker of the lease could not be reached.
    #[error("the lease was granted, but {worker} cannot be used: {reason}")]
    Worker {
        /// Which.
        worker: String,
        /// Why.
        reason: String,
    },
    /// Burn devices could not be made of it.
    #[error("cannot start the bridge to Burn: {reason}")]
    Bridge {
        /// Why.
        reason: String,
    },
    /// The pool's client is shutting down.
    #[error("the connection to the pool is closed")]
    Closed,
}
