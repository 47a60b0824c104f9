//! Why a listener could not start.

use std::{fmt, net::SocketAddr};

/// Why a listener could not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {reason}")]
pub struct BindError {
    action: String,
    reason: String,
}

impl BindError {
    pub(crate) fn listen(protocol: &str, address: SocketAddr, reason: impl fmt::Display) -> Self {
        Self {
            action: format!("listen on {address} ({protocol})"),
            reason: format!(
                "{reason}; choose another address, or find the process that uses this one"
            ),
        }
    }

    pub(crate) fn new(action: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self {
            action: action.to_string(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn identity(reason: impl fmt::Display) -> Self {
        Self::new("use this certificate and key for TLS", reason)
    }
}
