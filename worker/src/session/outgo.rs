//! Answers of a session into frames, and what the connection's writer takes.

use std::sync::Arc;

use burn_backend::TensorData;
use bytes::Bytes;
use tensord_proto::{
    CHUNK_BYTES,
    codec::encode_type,
    v1::{Chunk, Fault, FaultKind, Synced, TensorValue, Value, frame::Body, value},
};

use super::{Reply, Session, lock};

/// Values up to this size go in the frame that announces them.
const INLINE_BYTES: usize = 16 << 10;

/// What the writer finds when it asks for the next frame.
pub(crate) enum Outgoing {
    /// The parts of a frame.
    Frame([Bytes; 3]),
    /// Nothing now; the peer was not told everything, though.
    News,
    /// Nothing at all.
    Nothing,
    /// The session ended and everything was said and confirmed.
    Done,
    /// A later connection took over.
    Replaced,
}

impl Session {
    pub(super) fn reply(self: &Arc<Self>, reply: Reply) {
        match reply {
            Reply::Value { request, result } => self.say_value(request, result),
            Reply::Synced { request, fault } => {
                let fault = fault.map(|fault| Fault::clone(&fault));
                self.say([Body::Synced(Synced {
                    request_id: request,
                    fault,
                })]);
            }
            Reply::Later {
                request,
                read,
                about,
            } => {
                let session = self.clone();
                // Ends with the device's answer; the session may be gone by then.
                self.site.runtime.spawn(async move {
                    let read = read.await;
                    let result = read.map_err(|e| about.fault(FaultKind::Backend, e.reason()));
                    session.say_value(request, result);
                });
            }
        }
    }

    fn say_value(&self, request_id: u64, result: Result<TensorData, Arc<Fault>>) {
        match result {
            Ok(data) => self.say(value_bodies(request_id, data)),
            Err(fault) => {
                let result = Some(value::Result::Fault(Fault::clone(&fault)));
                self.say([Body::Value(Value { request_id, result })]);
            }
        }
    }

    fn say(&self, bodies: impl IntoIterator<Item = Body>) {
        let mut wire = lock(&self.wire);
        bodies.into_iter().for_each(|body| wire.duplex.push(body));
        self.news.notify_one();
    }

    /// What `connection`'s writer is to send next.
    pub(crate) fn next_to_send(&self, connection: u64) -> Outgoing {
        let mut wire = lock(&self.wire);
        if wire.connection != connection {
            return Outgoing::Replaced;
        }
        if let Some(parts) = wire.duplex.next_to_send() {
            return Outgoing::Frame(parts);
        }
        if wire.closing && wire.duplex.outbox().is_empty() {
            return Outgoing::Done;
        }
        match wire.duplex.inbox() {
            inbox if inbox.is_telling_due() => Outgoing::Frame(beat(&mut wire.duplex)),
            inbox if inbox.has_news() => Outgoing::News,
            _ => Outgoing::Nothing,
        }
    }

    /// A frame that says only how far this side got.
    pub(crate) fn beat(&self) -> [Bytes; 3] {
        beat(&mut lock(&self.wire).duplex)
    }

    /// Ends when there may be something to send.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }
}

fn beat(duplex: &mut tensord_transport::duplex::Duplex) -> [Bytes; 3] {
    [duplex.beat(), Bytes::new(), Bytes::new()]
}

/// A value in one frame, or announced in one and followed by chunks that share
/// its memory.
fn value_bodies(request_id: u64, data: TensorData) -> Vec<Body> {
    let kind = encode_type(data.shape(), data.dtype());
    let bytes = Bytes::from_owner(Owned(data.into_bytes()));
    let inline = if bytes.len() <= INLINE_BYTES {
        bytes.clone()
    } else {
        Bytes::new()
    };
    let tensor = TensorValue {
        r#type: Some(kind),
        size_bytes: bytes.len() as u64,
        bytes: inline.clone(),
    };
    let result = Some(value::Result::Tensor(tensor));
    let mut bodies = vec![Body::Value(Value { request_id, result })];
    if inline.len() < bytes.len() {
        let starts = (0..bytes.len()).step_by(CHUNK_BYTES);
        bodies.extend(starts.map(|start| {
            let end = bytes.len().min(start + CHUNK_BYTES);
            Body::ValueChunk(Chunk {
                bytes: bytes.slice(start..end),
            })
        }));
    }
    bodies
}

/// Lets a tensor's bytes be shared as [`Bytes`].
struct Owned(burn_backend::Bytes);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_values_go_in_one_frame_and_large_ones_in_chunks() {
        let bodies = value_bodies(1, TensorData::from([1.0f32, 2.0]));
        assert_eq!(bodies.len(), 1);
        let large = TensorData::new(vec![7u8; 2 * CHUNK_BYTES + 5], [2 * CHUNK_BYTES + 5]);
        let sizes: Vec<usize> = value_bodies(1, large)
            .iter()
            .filter_map(|body| match body {
                Body::ValueChunk(chunk) => Some(chunk.bytes.len()),
                _ => None,
            })
            .collect();
        assert_eq!(sizes, [CHUNK_BYTES, CHUNK_BYTES, 5]);
    }
}
