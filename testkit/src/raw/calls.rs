//! gRPC calls whose request stream never ends and never carries a message.

use tonic::{
    Response, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

use super::authorised;

/// A codec for calls whose messages are ignored.
#[derive(Default)]
struct EmptyCodec;

impl Codec for EmptyCodec {
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

impl Encoder for EmptyCodec {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for EmptyCodec {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(Some(()))
    }
}

/// Calls the method at `path` with `token` and never ends the request stream. Returns the
/// status of a refusal, or `None` if the call is answered.
///
/// # Panics
///
/// If `token` does not fit a header.
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
    let answer = client.client_streaming(request, path, EmptyCodec).await;
    answer.map(Response::into_inner).err()
}
