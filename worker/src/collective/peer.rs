//! Another worker of the lease, and the link to it: the frames to send, and the state that
//! outlives a connection.
//!
//! A source of frames is queued here, and the link requests one frame from it whenever it
//! can send one. So nothing is encoded before it can be sent, and groups and transfers take
//! turns frame by frame.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    bulk::chunks,
    codec::encode_type,
    ids::WorkerId,
    v1::{self, LeaseShare, frame::Body},
};
use tensord_transport::{
    duplex::{Duplex, FrameError},
    resume::ResumeError,
};
use tokio::sync::Notify;

use super::{
    group::Group,
    meter::{Egress, Meter},
    transfer::{Capability, Value},
};
use crate::locks::lock;

/// Bytes of credit for the other worker. Frames are consumed at once, so the credit only
/// has to cover the path: 10 Gbit/s for 25 ms.
const WINDOW_BYTES: u64 = 32 << 20;

/// Most bytes kept for retransmission until the other worker has acknowledged them.
const OUTBOX_BYTES: usize = 32 << 20;

/// Another worker of the lease.
pub(crate) struct Peer {
    pub(crate) worker: WorkerId,
    /// The worker's first share of the lease, with its address and certificate.
    pub(crate) share: LeaseShare,
    /// Number of this worker's links in the lease, including this one.
    links: usize,
    wire: Mutex<Wire>,
    /// Wakes the writer.
    pub(crate) wake_writer: Notify,
    wanted: AtomicBool,
}

struct Wire {
    duplex: Duplex,
    /// Number of connections so far; only the latest may use the wire.
    connection: u64,
    /// Since when a connection is wanted but missing.
    missing: Option<Instant>,
    sources: VecDeque<FrameSource>,
    /// The rule that the other worker broke, as a message. The worker is then refused new
    /// connections.
    offence: Option<Arc<str>>,
    meter: Meter,
    /// Whether frames are in flight.
    is_busy: bool,
    /// Measures all links of the lease together.
    egress: Arc<Mutex<Egress>>,
    /// By how many bytes the other worker is ahead of the others in the current exchange;
    /// `None` if it is sent nothing in that exchange.
    lead_bytes: Option<i64>,
    /// When the last frame of the other worker was received.
    last_received: Option<Instant>,
}

/// A source of frames to send.
pub(crate) enum FrameSource {
    /// One frame.
    Once(Body),
    /// A group, and the index of this peer in it.
    Group(Arc<Group>, usize),
    /// The rest of a value that the peer has fetched. The first chunk carries the type.
    Value(Capability, Option<v1::TensorType>, VecDeque<Bytes>),
}

/// The result of requesting the next frame to send.
pub(crate) enum NextFrame {
    Frame([Bytes; 3]),
    /// No frame to send, but an acknowledgement or credit is pending.
    PendingAck,
    Nothing,
    /// A later connection has replaced this one.
    Replaced,
}

impl Peer {
    pub(crate) fn new(share: LeaseShare, links: usize, egress: Arc<Mutex<Egress>>) -> Self {
        Self {
            worker: WorkerId(share.worker_id),
            share,
            links,
            wire: Mutex::new(Wire {
                duplex: Duplex::new(OUTBOX_BYTES, WINDOW_BYTES, WINDOW_BYTES),
                connection: 0,
                missing: None,
                sources: VecDeque::new(),
                offence: None,
                meter: Meter::default(),
                is_busy: false,
                egress,
                lead_bytes: Some(0),
                last_received: None,
            }),
            wake_writer: Notify::new(),
            wanted: AtomicBool::new(false),
        }
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        lock(&self.wire)
    }

    /// Records that a link is wanted. Returns true on the first call.
    pub(crate) fn want(&self) -> bool {
        if self.wanted.swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut wire = self.wire();
        if wire.connection == 0 {
            wire.missing = Some(Instant::now());
        }
        true
    }

    /// Returns since when the link is missing although one is wanted.
    pub(crate) fn missing(&self) -> Option<Instant> {
        self.wire().missing
    }

    /// Queues `source`, unless the other worker broke a rule.
    pub(crate) fn add_source(&self, source: FrameSource) {
        let mut wire = self.wire();
        if wire.offence.is_none() {
            wire.sources.push_back(source);
            self.wake_writer.notify_one();
        }
    }

    /// Records the rule that the other worker broke. Returns false if an earlier one is
    /// recorded.
    pub(crate) fn offend(&self, offence: Arc<str>) -> bool {
        let mut wire = self.wire();
        if wire.offence.is_some() {
            return false;
        }
        wire.offence = Some(offence);
        wire.sources.clear();
        true
    }

    /// Returns the rule that the other worker broke, as a message.
    pub(crate) fn offence(&self) -> Option<Arc<str>> {
        self.wire().offence.clone()
    }

    /// Returns the number of the last frame received and the total credit granted, so that
    /// the other side can resume from there.
    pub(crate) fn acknowledge(&self) -> (u64, u64) {
        self.wire().duplex.inbox().acknowledge()
    }

    /// Attaches a new connection, on which the other side reports that it received all
    /// frames up to `received` and grants `credit` bytes in all. Returns the number of the
    /// connection, the last frame received here, and the total credit granted here.
    pub(crate) fn attach(
        &self,
        received: u64,
        credit: u64,
    ) -> Result<(u64, u64, u64), ResumeError> {
        let mut wire = self.wire();
        let before = wire.duplex.outbox().kept_bytes();
        wire.duplex.rewind(received, credit)?;
        wire.settle(before);
        wire.connection += 1;
        wire.missing = None;
        self.wake_writer.notify_one();
        let (received, credit) = wire.duplex.inbox().acknowledge();
        Ok((wire.connection, received, credit))
    }

    /// Records that `connection` was lost. Does nothing if a later one has replaced it.
    pub(crate) fn detach(&self, connection: u64) {
        let mut wire = self.wire();
        if wire.connection == connection {
            wire.missing = Some(Instant::now());
            wire.pause();
        }
    }

    /// Processes a frame received on `connection`. Returns `Ok(None)` if a later connection
    /// has replaced this one, and `Ok(Some(None))` if the frame has no body to handle.
    pub(crate) fn receive(
        &self,
        connection: u64,
        frame: Bytes,
    ) -> Result<Option<Option<Body>>, FrameError> {
        let mut wire = self.wire();
        if wire.connection != connection {
            return Ok(None);
        }
        wire.last_received = Some(Instant::now());
        let before = wire.duplex.outbox().kept_bytes();
        let received = wire.duplex.receive(frame)?;
        wire.settle(before);
        // The frame is handled at once, so its bytes are consumed here.
        if let Some((_, bytes)) = &received {
            wire.duplex.inbox().consume(*bytes);
        }
        // An acknowledgement or credit may unblock the writer.
        self.wake_writer.notify_one();
        Ok(Some(received.map(|(body, _)| body)))
    }

    /// Returns what to send next on `connection`.
    pub(crate) fn next_to_send(&self, connection: u64) -> NextFrame {
        let mut wire = self.wire();
        if wire.connection != connection {
            return NextFrame::Replaced;
        }
        loop {
            if let Some(parts) = wire.duplex.next_to_send() {
                return NextFrame::Frame(parts);
            }
            // Frames that are encoded but not sent wait for credit.
            if wire.duplex.outbox().is_full() || wire.duplex.outbox().has_unsent() {
                break;
            }
            // More frames are requested once some of these bytes are acknowledged.
            let first_flight = wire.meter.first_flight_bytes(self.links);
            if first_flight.is_some_and(|most| wire.duplex.outbox().kept_bytes() >= most) {
                break;
            }
            match wire.sources.pop_front() {
                Some(source) => wire.enqueue(source),
                None => break,
            }
        }
        match wire.duplex.inbox() {
            inbox if inbox.is_ack_due() => NextFrame::Frame(beat(&mut wire.duplex)),
            inbox if inbox.has_pending_ack() => NextFrame::PendingAck,
            _ => NextFrame::Nothing,
        }
    }

    /// Records a round trip: the other side replied `after` this time.
    pub(crate) fn answered(&self, after: Duration) {
        self.wire().meter.answered(after);
    }

    /// Returns the in-flight limit for the connection in bytes, or `None` to leave it to
    /// the kernel.
    pub(crate) fn flight_bytes(&self) -> Option<usize> {
        let wire = self.wire();
        match wire.lead_bytes {
            Some(lead_bytes) => wire.meter.flight_bytes(self.links, lead_bytes),
            None => wire.meter.flight_bytes(1, 0),
        }
    }

    /// Returns the shortest round trip measured.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.wire().meter.round_trip()
    }

    /// Returns whether nothing was received from the other worker for `time`.
    pub(crate) fn is_silent(&self, now: Instant, time: Duration) -> bool {
        let last_received = self.wire().last_received;
        last_received
            .is_none_or(|last_received| now.saturating_duration_since(last_received) >= time)
    }

    /// Returns the bytes that fill the link for one round trip, once its rate and round
    /// trip are known.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.wire().meter.bucket_bytes()
    }

    /// Returns a frame that carries only the acknowledgement and credit, if `connection` is
    /// the latest. A frame handed out counts as sent, so a replaced connection must not
    /// take one.
    pub(crate) fn beat(&self, connection: u64) -> Option<[Bytes; 3]> {
        let mut wire = self.wire();
        (wire.connection == connection).then(|| beat(&mut wire.duplex))
    }
}

impl Wire {
    /// Pauses the measurements, as nothing is sent until the next connection.
    fn pause(&mut self) {
        self.meter.pause();
        if std::mem::take(&mut self.is_busy) {
            lock(&self.egress).pause();
        }
    }

    /// Updates the measurements after the outbox held `before` bytes: with the bytes
    /// acknowledged since, or the start of a busy period.
    fn settle(&mut self, before: usize) {
        let (now, after) = (Instant::now(), self.duplex.outbox().kept_bytes());
        if after > before {
            self.meter.sent(now);
            if !std::mem::replace(&mut self.is_busy, true) {
                lock(&self.egress).sent(now);
            }
        } else if after < before {
            let (bytes, is_idle) = ((before - after) as u64, after == 0);
            self.meter.confirmed(bytes, is_idle, now);
            let ends = is_idle && std::mem::take(&mut self.is_busy);
            lock(&self.egress).confirmed(bytes, ends, now);
        }
    }

    /// Encodes the next frame of `source`, and queues the source again if it has more.
    fn enqueue(&mut self, source: FrameSource) {
        let before = self.duplex.outbox().kept_bytes();
        match source {
            FrameSource::Once(body) => self.duplex.push(body),
            FrameSource::Group(group, worker_index) => {
                let (body, more, lead_bytes) = group.next(worker_index);
                self.lead_bytes = lead_bytes;
                if let Some(body) = body {
                    self.duplex.push(body);
                }
                if more {
                    self.sources
                        .push_back(FrameSource::Group(group, worker_index));
                }
            }
            FrameSource::Value(capability, kind, mut chunks) => {
                self.duplex.push(Body::Fetched(v1::Fetched {
                    capability: capability.to_vec().into(),
                    r#type: kind,
                    fault: None,
                    bytes: chunks.pop_front().unwrap_or_default(),
                }));
                if !chunks.is_empty() {
                    self.sources
                        .push_back(FrameSource::Value(capability, None, chunks));
                }
            }
        }
        self.settle(before);
    }
}

impl FrameSource {
    /// Returns the source that sends a fetched value.
    pub(crate) fn value(capability: Capability, value: Value) -> Self {
        let kind = encode_type(&value.shape, value.dtype);
        let chunks = chunks(value.bytes).map(|chunk| chunk.bytes).collect();
        Self::Value(capability, Some(kind), chunks)
    }
}

fn beat(duplex: &mut Duplex) -> [Bytes; 3] {
    [duplex.beat(), Bytes::new(), Bytes::new()]
}
