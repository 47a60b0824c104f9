//! Why a session with a worker is over.

use tensord_proto::v1;

/// Why a session is over.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SessionError {
    /// The worker rejected the opening.
    #[error("rejected: {0}")]
    Rejected(v1::Error),
    /// The worker ended the session.
    #[error("closed: {0}")]
    Closed(v1::Error),
    /// The connection ended without an error from the worker.
    #[error("lost: {0}")]
    Lost(String),
    /// The worker broke a rule.
    #[error("the worker broke the protocol: {0}")]
    Protocol(String),
}

impl SessionError {
    /// Returns the worker's error, if it sent one.
    pub fn error(&self) -> Option<&v1::Error> {
        match self {
            Self::Rejected(error) | Self::Closed(error) => Some(error),
            Self::Lost(_) | Self::Protocol(_) => None,
        }
    }
}
