//! Turns the replies of a session into frames, which the connection's writer sends.

use std::{mem::take, sync::Arc};

use burn_backend::TensorData;
use prost::Message as _;
use tensord_proto::{
    bulk::{INLINE_BYTES, chunks, shared},
    codec::encode_type,
    v1::{Fault, FaultKind, Synced, TensorValue, Value, Values, frame::Body, tensor_value, value},
};
use tensord_transport::channel::{Connection, FrameParts, Next};
use tokio::sync::Notify;

use super::{Reply, Session, Track, Wire, lock};

/// Maximum bytes of a fault's reason in a reply.
const REASON_BYTES: usize = 16 << 10;

/// Maximum number of values in a frame, and the encoded bytes from which on the frame is
/// queued: about one write.
const VALUES_PER_FRAME: usize = 256;
const VALUE_BYTES: usize = 48 << 10;

impl Session {
    /// Queues a reply. It is sent once the writer is [woken](Self::wake_writer).
    pub(super) fn reply(self: &Arc<Self>, reply: Reply) {
        match reply {
            Reply::Value { request, result } => self.queue_value(request, result),
            Reply::Synced { request, fault } => {
                let fault = fault.map(|fault| fault.bounded(REASON_BYTES));
                self.queue(Body::Synced(Synced {
                    request_id: request,
                    fault,
                }));
            }
            Reply::InFlight {
                request,
                bytes,
                read,
                context,
            } => {
                lock(&self.work_queue).reads_in_flight.begin(bytes);
                let session = self.clone();
                // Ends when the device has read the value. The session may have ended by
                // then.
                self.device_context.runtime.spawn(async move {
                    let read = session.with_op_timeout(read).await;
                    let result = read.map_err(|e| context.fault(FaultKind::Backend, e.reason()));
                    if !session.has_ended() {
                        session.queue_value(request, result);
                        session.wake_writer();
                    }
                    lock(&session.work_queue).reads_in_flight.end(bytes);
                    session.unblock();
                });
            }
        }
    }

    fn queue_value(&self, request_id: u64, result: Result<TensorData, Arc<Fault>>) {
        let result = match result {
            Ok(data) => value::Result::Tensor(self.tensor_value(data)),
            Err(fault) => value::Result::Fault(fault.bounded(REASON_BYTES)),
        };
        let result = Some(result);
        self.wire(Track::Ops)
            .queue_value(Value { request_id, result });
    }

    /// Encodes a tensor's value. The bytes of a large value are queued on the bulk track,
    /// in chunks that share the tensor's memory.
    fn tensor_value(&self, data: TensorData) -> TensorValue {
        let kind = encode_type(data.shape(), data.dtype());
        let bytes = shared(data.into_bytes());
        let content = match bytes.len() {
            0..=INLINE_BYTES => tensor_value::Content::Bytes(bytes),
            _ => {
                let mut wire = self.wire(Track::Bulk);
                let number = wire.payloads;
                wire.payloads += 1;
                if !wire.closing {
                    chunks(bytes).for_each(|chunk| wire.channel.push(Body::Chunk(chunk)));
                }
                self.writer_notify(Track::Bulk).notify_one();
                tensor_value::Content::Payload(number)
            }
        };
        TensorValue {
            r#type: Some(kind),
            content: Some(content),
        }
    }

    fn queue(&self, body: Body) {
        self.wire(Track::Ops).queue(body);
    }

    /// Wakes the writer of the track for ops, which sends the queued frames.
    pub(super) fn wake_writer(&self) {
        self.writer_notify(Track::Ops).notify_one();
    }

    /// Returns what the writer of `connection` is to do next.
    pub(crate) fn next_to_send(&self, track: Track, connection: Connection) -> Next {
        let mut wire = self.wire(track);
        if !wire.channel.is_latest(connection) {
            return Next::Replaced;
        }
        wire.flush_values();
        let frames = wire.channel.next_frames();
        if !frames.is_empty() {
            return Next::Frames(frames);
        }
        // The client no longer waits for values, so the bulk track ends unacknowledged.
        if wire.closing && (track == Track::Bulk || wire.channel.outbox().is_empty()) {
            return Next::Done;
        }
        wire.channel.acknowledgement()
    }

    /// Returns the ping of a track's channel; see [`Channel::ping`].
    ///
    /// [`Channel::ping`]: tensord_transport::channel::Channel::ping
    pub(crate) fn ping(
        &self,
        track: Track,
        connection: Connection,
        must: bool,
    ) -> Option<FrameParts> {
        self.wire(track).channel.ping(connection, must)
    }

    /// Returns what wakes the writer of a track.
    pub(crate) fn writer_notify(&self, track: Track) -> &Notify {
        &self.writer_notify[track as usize]
    }
}

impl Wire {
    /// Batches a value with later ones until the next flush.
    fn queue_value(&mut self, value: Value) {
        if self.closing {
            return;
        }
        self.value_bytes += value.encoded_len();
        self.values.push(value);
        if self.values.len() >= VALUES_PER_FRAME || self.value_bytes >= VALUE_BYTES {
            self.flush_values();
        }
    }

    fn flush_values(&mut self) {
        self.value_bytes = 0;
        if !self.values.is_empty() {
            let values = take(&mut self.values);
            self.channel.push(Body::Values(Values { values }));
        }
    }

    pub(super) fn queue(&mut self, body: Body) {
        if !self.closing {
            self.flush_values();
            self.channel.push(body);
        }
    }
}
