//! Errors of connecting and leasing. Ops fail with Burn's `ExecutionError`.

use prost::Message;
use tensord_proto::{
    text::{MESSAGE_CHARS, sanitize},
    v1,
};
use tensord_transport::{dial::DialError, url::UrlError};
use tonic::Status;

/// Why a pool could not be reached.
///
/// ```no_run
/// use tensord_client::{ConnectError, Pool};
///
/// match Pool::connect_env() {
///     Ok(pool) => println!("connected to {pool:?}"),
///     Err(ConnectError::Token { .. }) => eprintln!("get a new token from the pool's owner"),
///     Err(error) => eprintln!("{error}"), // Names what to check.
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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
        // `Display` cleans the pool's text.
        let mut reason = error.to_string();
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
///
/// ```no_run
/// # use std::time::Duration;
/// use tensord_client::{LeaseError, LeaseRequest, Pool, RefusalKind};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = Pool::connect_env()?;
/// let request = LeaseRequest::devices(8).timeout(Duration::from_secs(60));
/// match pool.lease(request) {
///     Ok(lease) => println!("{} devices", lease.devices().len()),
///     Err(LeaseError::TimedOut { position, .. }) => println!("still at position {position}"),
///     Err(LeaseError::Refused { kind: RefusalKind::Unsatisfiable, reason }) => {
///         println!("this pool never has so many: {reason}");
///     }
///     Err(error) => return Err(error.into()),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The pool refused.
    #[error("the pool refused the lease: {reason}")]
    Refused {
        /// The kind of refusal.
        kind: RefusalKind,
        /// The pool's reason.
        reason: String,
    },
    /// The program requests a [share](crate::LeaseRequest::share) that no device has.
    #[error("a share of {part} is not possible: {reason}")]
    Share {
        /// The part of a device that the program requests.
        part: f64,
        /// The rule that it breaks.
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
    /// The thread that calls the program's callback for events could not start.
    #[error("cannot start the thread for the lease's events: {reason}")]
    Events {
        /// The system's reason.
        reason: String,
    },
    /// The pool's client is shutting down.
    #[error("the connection to the pool is closed")]
    Closed,
}

impl LeaseError {
    /// Returns the error for a request that the pool refused with `error`.
    pub(crate) fn refused(error: v1::Error) -> Self {
        let kind = match error.code() {
            v1::ErrorCode::Unsatisfiable => RefusalKind::Unsatisfiable,
            v1::ErrorCode::Limit => RefusalKind::Limit,
            v1::ErrorCode::Token => RefusalKind::Token,
            v1::ErrorCode::Draining => RefusalKind::ShuttingDown,
            _ => RefusalKind::Other,
        };
        // `Display` cleans the pool's text.
        let reason = error.to_string();
        Self::Refused { kind, reason }
    }
}

/// Why a lease was not suspended, resumed or moved.
///
/// ```no_run
/// use tensord_client::{LeaseRequest, Pool, StandingError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
/// match lease.suspend() {
///     Ok(()) => println!("others can use the device"),
///     Err(StandingError::Refused { reason }) => println!("not now: {reason}"),
///     Err(error) => return Err(error.into()),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StandingError {
    /// The pool refused.
    #[error("{reason}")]
    Refused {
        /// The pool's reason.
        reason: String,
    },
    /// There is no connection to the pool at present.
    #[error("there is no connection to the pool at present; try again")]
    Disconnected,
    /// The connection to the pool was lost before the pool replied. Whether the lease was suspended,
    /// resumed or moved is not known.
    #[error("the pool did not reply; whether it has changed the lease is not known")]
    ConnectionLost,
    /// The pool's client is shutting down.
    #[error("the connection to the pool is closed")]
    Closed,
}

impl StandingError {
    /// Returns the error for a request that the pool refused with `error`.
    pub(crate) fn refused(error: v1::Error) -> Self {
        let reason = sanitize(&error.message, MESSAGE_CHARS).to_string();
        Self::Refused { reason }
    }
}

/// Why a pool refused a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalKind {
    /// The pool does not have such devices, not even when it is idle.
    Unsatisfiable,
    /// The pool's queue is full, or another of its limits is reached.
    Limit,
    /// The token no longer gives the right to lease.
    Token,
    /// The pool is shutting down.
    ShuttingDown,
    /// Any other kind; the text of the error has the reason.
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_keep_their_kind_and_reason() {
        for (code, expected) in [
            (v1::ErrorCode::Unsatisfiable, RefusalKind::Unsatisfiable),
            (v1::ErrorCode::Limit, RefusalKind::Limit),
            (v1::ErrorCode::Token, RefusalKind::Token),
            (v1::ErrorCode::Draining, RefusalKind::ShuttingDown),
            (v1::ErrorCode::Internal, RefusalKind::Other),
        ] {
            let error = LeaseError::refused(v1::Error::new(code, "3 devices requested"));
            let LeaseError::Refused { kind, reason } = error else {
                panic!("not a refusal: {error}");
            };
            assert_eq!((kind, reason.as_str()), (expected, "3 devices requested"));
        }
    }
}
