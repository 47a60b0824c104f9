//! The frames of a session in both directions, by track: replies are queued here, which
//! the connections' writers send.

use std::{
    mem::take,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use burn_backend::TensorData;
use bytes::Bytes;
use prost::Message as _;
use tensord_proto::{
    bulk::{INLINE_BYTES, chunks, shared},
    codec::encode_type,
    v1::{
        Closed, Error, Fault, Marked, RestorePoint, Synced, TensorValue, Value, Values,
        frame::Body, tensor_value, value,
    },
};
use tensord_transport::channel::{
    self, Channel, Connection, FrameParts, Next, Received, duplex::FrameError, resume::ResumeError,
};
use tokio::sync::Notify;

use crate::locks::lock;

/// Bytes of encoded work that a client may be ahead of the executor: some hundred
/// thousand ops, or the uploads of a few steps.
pub(super) const WINDOW_BYTES: u64 = 32 << 20;

/// Bytes of replies kept on a track until the client acknowledges them. Beyond this limit
/// the session pauses.
pub(super) const OUTBOX_BYTES: usize = 64 << 20;

/// Maximum bytes of a fault's reason in a reply.
const REASON_BYTES: usize = 16 << 10;

/// Maximum number of values in a frame, and the encoded bytes from which on the frame is
/// queued: about one write.
const VALUES_PER_FRAME: usize = 256;
const VALUE_BYTES: usize = 48 << 10;

/// One of the two channels of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Track {
    /// Carries ops and the replies to them.
    Ops,
    /// Carries bulk bytes. The client connects this track when there are any.
    Bulk,
}

/// The channels of a session's two tracks.
pub(super) struct Outbound {
    tracks: [TrackState; 2],
}

struct TrackState {
    wire: Mutex<Wire>,
    /// Held by the reader of the track's connection while it processes a frame.
    reader: Mutex<()>,
    /// Wakes the writer of the track's connection.
    writer_notify: Notify,
}

struct Wire {
    channel: Channel,
    /// Values batched for the next flush, and their encoded bytes.
    values: Vec<Value>,
    value_bytes: usize,
    /// Number of payloads queued so far.
    payloads: u64,
    /// Whether the last frame is queued. The connection ends once it is delivered.
    closing: bool,
}

impl TrackState {
    fn new(channel: Channel) -> Self {
        let wire = Wire {
            channel,
            values: Vec::new(),
            value_bytes: 0,
            payloads: 0,
            closing: false,
        };
        Self {
            wire: Mutex::new(wire),
            reader: Mutex::default(),
            writer_notify: Notify::default(),
        }
    }
}

impl Outbound {
    /// Creates the channels of a session that goes on from a mark.
    pub(super) fn restored(point: &RestorePoint) -> Self {
        let track = |received| {
            let now = Instant::now();
            let channel = Channel::restored(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES, received, now);
            TrackState::new(channel)
        };
        let ops = track((point.frames, point.bytes));
        let bulk = track((point.bulk_frames, point.bulk_bytes));
        Self {
            tracks: [ops, bulk],
        }
    }

    /// Creates the channels. `first` is queued on the track for ops.
    pub(super) fn new(first: Option<Body>) -> Self {
        let track = || {
            // The client always reads its replies, so it grants unlimited credit.
            let now = Instant::now();
            TrackState::new(Channel::new(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES, now))
        };
        let tracks = [track(), track()];
        let outbound = Self { tracks };
        if let Some(first) = first {
            outbound.wire(Track::Ops).channel.push(first);
        }
        outbound
    }

    fn wire(&self, track: Track) -> MutexGuard<'_, Wire> {
        lock(&self.tracks[track as usize].wire)
    }

    /// Locks out the readers of other connections of a track.
    pub(super) fn lock_reader(&self, track: Track) -> MutexGuard<'_, ()> {
        lock(&self.tracks[track as usize].reader)
    }

    /// Returns the [`Notify`] that wakes the writer of a track.
    pub(super) fn writer_notify(&self, track: Track) -> &Notify {
        &self.tracks[track as usize].writer_notify
    }

    /// Wakes the writer of the track for ops, which sends the queued frames.
    pub(super) fn wake_writer(&self) {
        self.writer_notify(Track::Ops).notify_one();
    }

    /// Makes a new connection the latest of a track. The client has received the frames up
    /// to number `received`. Fails if `received` contradicts what was sent or acknowledged.
    pub(super) fn attach(
        &self,
        track: Track,
        received: u64,
    ) -> Result<channel::Attached, ResumeError> {
        // Waits until the previous connection's reader has finished its current frame.
        let _reader = self.lock_reader(track);
        let attached = self.wire(track).channel.attach(received, u64::MAX)?;
        self.writer_notify(track).notify_one();
        Ok(attached)
    }

    /// Records that `connection` of a track has ended, unless a later one has replaced it.
    pub(super) fn detach(&self, track: Track, connection: Connection) {
        let mut wire = self.wire(track);
        wire.channel.detach(connection, Instant::now());
    }

    /// Returns since when the track for ops has no connection, or `None` if it has one.
    pub(super) fn detached(&self) -> Option<Instant> {
        self.wire(Track::Ops).channel.detached()
    }

    /// Accepts a frame from `connection`. Returns what was received, and whether the frame's
    /// acknowledgement made room in an outbox that was full.
    pub(super) fn receive(
        &self,
        track: Track,
        connection: Connection,
        frame: Bytes,
    ) -> Result<(Received, bool), FrameError> {
        let mut wire = self.wire(track);
        let was_full = wire.channel.outbox().is_full();
        let received = wire.channel.receive(connection, frame, Instant::now())?;
        Ok((received, was_full && !wire.channel.outbox().is_full()))
    }

    /// Returns `bytes` of credit to the client.
    pub(super) fn consumed(&self, track: Track, bytes: usize) {
        let mut wire = self.wire(track);
        wire.channel.inbox().consume(bytes);
        if wire.channel.inbox().is_ack_due() {
            self.writer_notify(track).notify_one();
        }
    }

    /// Returns whether the outbox of a track is full.
    pub(super) fn is_full(&self) -> bool {
        let is_full = |track| self.wire(track).channel.outbox().is_full();
        is_full(Track::Ops) || is_full(Track::Bulk)
    }

    /// Returns whether the client has confirmed all that was queued.
    #[cfg(target_os = "linux")]
    pub(super) fn is_empty(&self) -> bool {
        let is_empty = |track| {
            let wire = self.wire(track);
            wire.values.is_empty() && wire.channel.outbox().is_empty()
        };
        is_empty(Track::Ops) && is_empty(Track::Bulk)
    }

    /// Queues the reply to a read. It is sent once the writer is
    /// [woken](Self::wake_writer).
    pub(super) fn queue_value(&self, request_id: u64, result: Result<TensorData, Arc<Fault>>) {
        let result = match result {
            Ok(data) => value::Result::Tensor(self.tensor_value(data)),
            Err(fault) => value::Result::Fault(fault.bounded(REASON_BYTES)),
        };
        let result = Some(result);
        self.wire(Track::Ops)
            .queue_value(Value { request_id, result });
    }

    /// Queues the reply to a sync.
    pub(super) fn queue_synced(&self, request_id: u64, fault: Option<Arc<Fault>>) {
        let fault = fault.map(|fault| fault.bounded(REASON_BYTES));
        let synced = Body::Synced(Synced { request_id, fault });
        self.wire(Track::Ops).queue(synced);
    }

    /// Queues the reply to a mark.
    pub(super) fn queue_marked(&self, marked: Marked) {
        self.wire(Track::Ops).queue(Body::Marked(marked));
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

    /// Queues `Closed` and lets the connections end.
    pub(super) fn close(&self, error: Error) {
        let closed = Body::Closed(Closed { error: Some(error) });
        self.wire(Track::Ops).queue(closed);
        // The client no longer waits for values. Dropping them frees the device memory
        // that they hold.
        self.wire(Track::Bulk).channel.abandon();
        for track in [Track::Bulk, Track::Ops] {
            self.wire(track).closing = true;
            self.writer_notify(track).notify_one();
        }
    }

    /// Returns whether `Closed` is queued.
    pub(super) fn is_closing(&self) -> bool {
        self.wire(Track::Ops).closing
    }

    /// Returns what the writer of `connection` is to do next.
    pub(super) fn next_to_send(&self, track: Track, connection: Connection) -> Next {
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
    pub(super) fn ping(
        &self,
        track: Track,
        connection: Connection,
        must: bool,
    ) -> Option<FrameParts> {
        self.wire(track).channel.ping(connection, must)
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

    fn queue(&mut self, body: Body) {
        if !self.closing {
            self.flush_values();
            self.channel.push(body);
        }
    }
}
