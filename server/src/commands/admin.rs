//! Common parts of administrators' commands, each of which makes one call to a scheduler.

pub(crate) mod error;

use std::time::Duration;

use tensord_proto::v1::admin_client::AdminClient;
use tensord_transport::{PoolUrl, Secret, control};
use tokio::time::timeout;
use tonic::{Request, Response, Status, metadata::MetadataValue, transport::Channel};

use self::error::AdminError;
use crate::{config::AdminUrl, failure::Failure, grpc_status, state::StateDir};

/// Time limit for a call, including connecting. The scheduler replies to a change only once
/// the change is on disk.
const DEADLINE: Duration = Duration::from_secs(10);

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
