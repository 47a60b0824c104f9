//! `tensord status`: requests a pool's status from its scheduler, and formats the reply.
//!
//! [`fetch`] makes the request; [`table()`] and [`json()`] depend on the reply alone.

mod json;
mod table;

use std::time::Duration;

use tensord_proto::v1::{StatusReply, StatusRequest, pool_client::PoolClient};
use tensord_transport::{PoolUrl, control, dial::DialError};
use tokio::time::timeout;
use tonic::{
    Request, Status,
    metadata::{MetadataValue, errors::InvalidMetadataValue},
};

pub(crate) use json::json;
pub(crate) use table::table;

use crate::grpc_status;

/// How long the scheduler may take to reply.
const DEADLINE: Duration = Duration::from_secs(5);

/// Why the pool's status could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatusError {
    /// The scheduler cannot be reached.
    #[error("cannot reach the pool: {0}")]
    Dial(#[from] DialError),
    /// The scheduler refused the request.
    #[error("the scheduler at {address} refused the call: {reason}")]
    Refused {
        /// The scheduler's address.
        address: String,
        /// The scheduler's reason.
        reason: String,
    },
    /// The scheduler did not reply in time.
    #[error(
        "the scheduler at {address} did not answer within {DEADLINE:?}; check the address and the firewalls between the hosts"
    )]
    Timeout {
        /// The scheduler's address.
        address: String,
    },
    /// The token has characters that a header cannot carry.
    #[error(
        "the token in the pool URL contains characters that a token cannot have; copy the URL again"
    )]
    Token(#[from] InvalidMetadataValue),
}

/// Fetches the status of the pool at `url`.
pub(crate) async fn fetch(url: &PoolUrl) -> Result<StatusReply, StatusError> {
    let address = || url.authority();
    match timeout(DEADLINE, request_status(url)).await {
        Ok(reply) => reply,
        Err(_) => Err(StatusError::Timeout { address: address() }),
    }
}

async fn request_status(url: &PoolUrl) -> Result<StatusReply, StatusError> {
    let channel = control::connect(&url.host, url.port, &url.trust).await?;
    let mut request = Request::new(StatusRequest {});
    if let Some(token) = &url.token {
        let mut value: MetadataValue<_> = format!("Bearer {}", token.reveal()).parse()?;
        value.set_sensitive(true);
        request.metadata_mut().insert("authorization", value);
    }
    match PoolClient::new(channel).status(request).await {
        Ok(reply) => Ok(reply.into_inner()),
        Err(status) => Err(StatusError::Refused {
            address: url.authority(),
            reason: reason(&status),
        }),
    }
}

fn reason(status: &Status) -> String {
    match grpc_status::error(status) {
        Some(error) => error.message,
        None => format!("{} ({})", status.message(), status.code()),
    }
}

#[cfg(test)]
mod tests;
