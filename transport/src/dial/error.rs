//! Why a process could not be reached.

use std::{fmt, time::Duration};

use crate::tls::{Trust, TrustError};

/// Why a process could not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// Nothing answers at the address.
    #[error(
        "nothing answers at {address} ({reason}); check the address and that tensord runs there"
    )]
    Unreachable {
        /// The address.
        address: String,
        /// The underlying error.
        reason: String,
    },
    /// The process at the address shows an unexpected certificate.
    #[error(
        "{address} presented a certificate that does not match {expected}; copy a new URL from the host, or check whether another host intercepts the connection"
    )]
    Certificate {
        /// The address.
        address: String,
        /// The certificate that was expected.
        expected: String,
    },
    /// The trust settings of this side are unusable.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// No answer within the deadline.
    #[error(
        "{address} did not answer within {deadline:?}; check the address, and firewalls on the way"
    )]
    Deadline {
        /// The address.
        address: String,
        /// The deadline.
        deadline: Duration,
    },
}

impl DialError {
    /// Returns whether another attempt with the same settings would end the same way.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Certificate { .. } | Self::Trust(_))
    }

    pub(crate) fn unreachable(address: impl fmt::Display, reason: &dyn std::error::Error) -> Self {
        let mut text = reason.to_string();
        let mut cause = reason.source();
        while let Some(error) = cause {
            // tonic and hyper repeat the text of the inner error in the outer one.
            let inner = error.to_string();
            if !text.contains(&inner) {
                text = format!("{text}: {inner}");
            }
            cause = error.source();
        }
        Self::Unreachable {
            address: address.to_string(),
            reason: text,
        }
    }

    pub(crate) fn certificate(address: impl fmt::Display, trust: &Trust) -> Self {
        let expected = match trust {
            Trust::Pin(pin) => format!("ca={pin}"),
            Trust::CaFile(path) => format!("ca-file={}", path.display()),
            Trust::System => "the authorities this system trusts".into(),
        };
        Self::Certificate {
            address: address.to_string(),
            expected,
        }
    }
}
