//! Why a gateway did not start, or stopped by itself.

use std::{io, net::SocketAddr};

use tensord_client::{ConnectError, LeaseError};

/// Why a gateway did not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GatewayError {
    /// The address is in use, or not an address of this host.
    #[error("cannot listen on {listen}: {source}; choose another address with --listen")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The pool cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The pool gave no lease.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The lease ended while the gateway ran.
    #[error("the gateway's lease ended: {0}; start the gateway again to get a new lease")]
    LeaseEnded(String),
    /// The server of the bridge ended.
    #[error("the server for Burn programs ended: {0}")]
    Serve(String),
}
