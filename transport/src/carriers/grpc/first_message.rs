//! A limit on the length of an unadmitted peer's first message.
//!
//! A gRPC message begins with its length, and tonic reserves that much memory at once.
//! tonic has one limit for the whole server, which must allow bulk bytes, so the first
//! few bytes of an unadmitted peer could make it reserve 4 MiB. Therefore this module
//! reads the length of a call's first message before tonic does. The receiver of the call
//! reads no other message until its peer is admitted.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::{
    Status,
    body::Body,
    codegen::{Service, http::Request},
    server::NamedService,
};

use super::PACKET_OVERHEAD;
use crate::{allowance::Allowance, carriers::FIRST_FRAME_BYTES, connection::PeerHandle};

/// Size of the header of each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Largest first message of a peer that is not admitted.
const MAX_FIRST_MESSAGE_BYTES: usize = FIRST_FRAME_BYTES + PACKET_OVERHEAD;

/// A service whose callers must begin with a small message, unless they are admitted.
#[derive(Debug, Clone)]
pub(super) struct FirstMessageLimit<S>(pub(super) S);

impl<S: NamedService> NamedService for FirstMessageLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for FirstMessageLimit<S>
where
    S: Service<Request<Body>, Error = Infallible>,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let peer_handle = request.extensions().get::<PeerHandle>();
        let allowance = peer_handle.map(PeerHandle::allowance);
        self.0.call(request.map(|body| match allowance {
            Some(allowance) => Body::new(CheckedBody {
                body,
                allowance,
                prefix: MessagePrefix::default(),
            }),
            None => body,
        }))
    }
}

/// The body of a call. The length of its first message is checked unless the peer is
/// admitted.
struct CheckedBody {
    body: Body,
    allowance: Arc<Allowance>,
    prefix: MessagePrefix,
}

impl http_body::Body for CheckedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && !self.allowance.is_lifted()
            && let Err(size) = self.prefix.inspect(data)
        {
            let refusal = format!(
                "the first message has {size} bytes; the limit is {MAX_FIRST_MESSAGE_BYTES}"
            );
            return Poll::Ready(Some(Err(Status::out_of_range(refusal))));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The header of the first message, as far as it has arrived.
#[derive(Debug, Default)]
struct MessagePrefix(Vec<u8>);

impl MessagePrefix {
    /// Reads the next bytes of the body. The error is the length of a message that is too
    /// large.
    fn inspect(&mut self, data: &[u8]) -> Result<(), usize> {
        let missing = PREFIX_BYTES - self.0.len();
        self.0.extend_from_slice(&data[..data.len().min(missing)]);
        let [_compressed, length @ ..] = &self.0[..] else {
            return Ok(());
        };
        match <[u8; 4]>::try_from(length).map(u32::from_be_bytes) {
            Ok(size) if size as usize > MAX_FIRST_MESSAGE_BYTES => Err(size as usize),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(size: usize) -> Vec<u8> {
        let mut message = vec![0];
        message.extend((size as u32).to_be_bytes());
        message.extend([0xff; 20]);
        message
    }

    #[test]
    fn length_prefix_is_parsed_from_any_chunks() {
        let cases = [
            (0, None),
            (MAX_FIRST_MESSAGE_BYTES, None),
            (
                MAX_FIRST_MESSAGE_BYTES + 1,
                Some(MAX_FIRST_MESSAGE_BYTES + 1),
            ),
            (4 << 20, Some(4 << 20)),
        ];
        for (size, refused) in cases {
            for step in [1, 2, 4, 5, 6, 25] {
                let mut prefix = MessagePrefix::default();
                let message = message(size);
                let found = message
                    .chunks(step)
                    .find_map(|part| prefix.inspect(part).err());
                assert_eq!(found, refused, "by {step}");
            }
        }
    }
}
