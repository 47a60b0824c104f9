//! A stream to the scheduler, and single calls.

use tensord_proto::v1::{
    ClientMessage, PoolMessage, StatusReply, StatusRequest, client_message, pool_client::PoolClient,
};
use tensord_transport::{PoolUrl, control};
use tokio::sync::mpsc::{self, error::SendTimeoutError};
use tonic::{Request, Streaming, metadata::MetadataValue, transport::Channel};

use super::SILENCE;
use crate::error::ConnectError;

/// A stream to the scheduler.
pub(super) struct ControlStream {
    pub(super) outbound: mpsc::Sender<ClientMessage>,
    pub(super) inbound: Streaming<PoolMessage>,
    /// Whether the scheduler replies to questions why something waits.
    pub(super) explains_waits: bool,
}

impl ControlStream {
    /// Queues a message to the scheduler, and waits while the queue is full. Returns
    /// [`StreamEnd::Lost`] if the stream has ended, or the queue stays full for [`SILENCE`].
    pub(super) async fn send(&self, body: client_message::Body) -> Result<(), StreamEnd> {
        match self.outbound.send_timeout(message(body), SILENCE).await {
            Ok(()) => Ok(()),
            Err(SendTimeoutError::Closed(_)) => {
                Err(StreamEnd::Lost("the stream to the pool ended".into()))
            }
            Err(SendTimeoutError::Timeout(_)) => Err(StreamEnd::Lost(format!(
                "the pool took no message for {SILENCE:?}"
            ))),
        }
    }
}

/// Why a stream is no longer used.
pub(super) enum StreamEnd {
    Lost(String),
    Left,
}

/// Finishes the stream and waits until the scheduler ends it too, so that the scheduler
/// receives all messages sent before.
pub(super) async fn leave(stream: ControlStream) {
    drop(stream.outbound);
    let mut inbound = stream.inbound;
    while let Ok(Some(_)) = inbound.message().await {}
}

pub(super) async fn connect(url: &PoolUrl) -> Result<PoolClient<Channel>, ConnectError> {
    let channel = control::connect(&url.host, url.port, &url.trust).await?;
    Ok(PoolClient::new(channel))
}

pub(super) fn authorised<T>(body: T, url: &PoolUrl) -> Result<Request<T>, ConnectError> {
    let token = url.token.as_ref().map_or("", |token| token.reveal());
    let bearer = MetadataValue::try_from(format!("Bearer {token}"));
    let mut bearer = bearer.map_err(|_| ConnectError::Token {
        pool: url.authority(),
        reason: "the token contains characters that a token cannot have".into(),
    })?;
    bearer.set_sensitive(true);
    let mut request = Request::new(body);
    request.metadata_mut().insert("authorization", bearer);
    Ok(request)
}

/// Requests the status of the pool at `url`.
pub(crate) async fn status(url: &PoolUrl) -> Result<StatusReply, ConnectError> {
    let mut client = connect(url).await?;
    let reply = client.status(authorised(StatusRequest {}, url)?).await;
    let reply = reply.map_err(|status| ConnectError::from_status(&url.authority(), &status))?;
    Ok(reply.into_inner())
}

pub(super) fn message(body: client_message::Body) -> ClientMessage {
    ClientMessage { body: Some(body) }
}
