//! Answers of a session into frames, and what the connection's writer takes.

use std::sync::Arc;

use burn_backend::TensorData;
use bytes::Bytes;
use tensord_proto::{
    bulk::Bulk,
    codec::encode_type,
    v1::{Fault, FaultKind, Synced, TensorValue, Value, frame::Body, value},
};

use super::{Reply, Session, lock};

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
fn value_bodies(request_id: u64, data: TensorData) -> impl Iterator<Item = Body> {
    let kind = encode_type(data.shape(), data.dtype());
    let bulk = Bulk::new(data.into_bytes());
    let tensor = TensorValue {
        r#type: Some(kind),
        size_bytes: bulk.size_bytes,
        bytes: bulk.inline.clone(),
    };
    let result = Some(value::Result::Tensor(tensor));
    let announcement = Body::Value(Value { request_id, result });
    std::iter::once(announcement).chain(bulk.chunks().map(Body::ValueChunk))
}
