//! Common parts of administrators' commands, each of which makes one call to a scheduler.

use std::time::Duration;

use tensord_proto::v1::admin_client::AdminClient;
use tensord_transport::{PoolUrl, Secret, control, dial::DialError};
use tokio::time::timeout;
use tonic::{
    Request, Response, Status,
    metadata::{MetadataValue, errors::InvalidMetadataValue},
    transport::Channel,
};

use crate::{config::AdminUrl, failure::Failure, grpc_status, state::StateDir};

/// How long the scheduler may take to reply, which it does after writing to its disk.
const DEADLINE: Duration = Duration::from_secs(10);

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
        "the scheduler at {address} did not answer within {DEADLINE:?}, so the change may or may not have been made; list the tokens or workers to find out"
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

/// Returns the URL with an admin token, from the user or the state directory.
pub(super) fn url(admin: AdminUrl) -> Result<PoolUrl, Failure> {
    match admin {
        AdminUrl::Given(url) => Ok(url),
        AdminUrl::FromState(state) => {
            let url = StateDir::admin_url(&state.path)?;
            Ok(url.ok_or(AdminError::NoScheduler(state.display_path))?)
        }
    }
}

/// Waits for a call to the scheduler at `url`, for at most [`DEADLINE`].
pub(super) async fn with_deadline<T>(
    url: &PoolUrl,
    call: impl Future<Output = Result<T, AdminError>>,
) -> Result<T, AdminError> {
    let address = || url.authority();
    let result = timeout(DEADLINE, call).await;
    result.unwrap_or_else(|_| Err(AdminError::Timeout { address: address() }))
}

/// Connects to the scheduler at `url`.
pub(super) async fn connect(url: &PoolUrl) -> Result<AdminClient<Channel>, AdminError> {
    let channel = control::connect(&url.host, url.port, &url.trust).await?;
    Ok(AdminClient::new(channel))
}

/// Creates a request that carries the token of `url`.
pub(super) fn with_token<T>(message: T, url: &PoolUrl) -> Result<Request<T>, AdminError> {
    let mut request = Request::new(message);
    let token = url.token.as_ref().map_or("", Secret::reveal);
    let mut value: MetadataValue<_> = format!("Bearer {token}").parse()?;
    value.set_sensitive(true);
    request.metadata_mut().insert("authorization", value);
    Ok(request)
}

/// Returns the reply of the scheduler at `url`, or its refusal as an error.
pub(super) fn into_reply<T>(
    url: &PoolUrl,
    result: Result<Response<T>, Status>,
) -> Result<T, AdminError> {
    result.map(Response::into_inner).map_err(|status| {
        let reason = match grpc_status::error(&status) {
            Some(error) => error.message,
            None => format!("{} ({})", status.message(), status.code()),
        };
        let address = url.authority();
        AdminError::Refused { address, reason }
    })
}
