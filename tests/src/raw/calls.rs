//! Calls that never end, and that answer to no message.

use tonic::{
    Response, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

use super::authorised;

/// The codec of a call whose messages are of no interest.
#[derive(Default)]
struct Nothing;

impl Codec for Nothing {
    type Encode = ();
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Nothing {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for Nothing {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(Some(()))
    }
}

/// Calls the method at `path` with `token`, and never ends the call's body. Returns what
/// the call is refused with, or `None` if it is answered.
///
/// # Panics
///
/// When `token` cannot be sent.
pub async fn open_call(
    channel: &Channel,
    path: &'static str,
    token: Option<&str>,
) -> Option<Status> {
    let request = authorised(tokio_stream::pending::<()>(), token);
    let mut client = Grpc::new(channel.clone());
    if let Err(e) = client.ready().await {
        return Some(Status::unavailable(e.to_string()));
    }
    let path = PathAndQuery::from_static(path);
    let answer = client.client_streaming(request, path, Nothing).await;
    answer.map(Response::into_inner).err()
}
