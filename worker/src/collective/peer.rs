//! Another worker of the lease, and the link to it: what is to be said to it, and
//! what survives a connection.
//!
//! Whoever has something to say puts itself into a queue here and is asked for a
//! frame when the link can take one. So nothing is encoded that cannot be sent,
//! and groups and transfers take turns frame by frame.

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

/// Bytes that the other worker may send ahead; they are taken in at once, so this
/// only has to cover the way: 10 Gbit/s over 25 ms.
const WINDOW_BYTES: u64 = 32 << 20;

/// Bytes kept for a worker that has not confirmed them.
const OUTBOX_BYTES: usize = 32 << 20;

/// Another worker of the lease.
pub(crate) struct Peer {
    pub(crate) worker: WorkerId,
    /// Where it is.
    pub(crate) share: LeaseShare,
    /// Links of the lease, with this one.
    links: usize,
    wire: Mutex<Wire>,
    /// Wakes the writer.
    pub(crate) wake_writer: Notify,
    wanted: AtomicBool,
}

struct Wire {
    duplex: Duplex,
    /// Counts connections; only the latest may touch the wire.
    connection: u64,
    /// Since when there is none, and somebody wants one.
    missing: Option<Instant>,
    sources: VecDeque<FrameSource>,
    /// The rule that the other worker broke, in words: it gets no connection any more.
    offence: Option<Arc<str>>,
    meter: Meter,
    /// Something was sent that is not confirmed.
    is_busy: bool,
    /// Of all links of the lease.
    egress: Arc<Mutex<Egress>>,
    /// Bytes that the other worker is ahead of others in what is sent to it, if they are
    /// sent something.
    lead_bytes: Option<i64>,
    /// When the other worker was last heard of.
    last_received: Option<Instant>,
}

/// Somebody with something to say.
pub(crate) enum FrameSource {
    /// One frame.
    Once(Body),
    /// A group, to its worker of this number.
    Group(Arc<Group>, usize),
    /// A value that was fetched: what is left of it.
    Value(Capability, Option<v1::TensorType>, VecDeque<Bytes>),
}

/// What the writer finds when it asks for the next frame.
pub(crate) enum NextFrame {
    Frame([Bytes; 3]),
    /// Nothing now; the peer was not told everything, though.
    PendingAck,
    Nothing,
    /// A later connection took over.
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

    /// Notes that a link is wanted. True: for the first time.
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

    /// Since when there is no link, though one is wanted.
    pub(crate) fn missing(&self) -> Option<Instant> {
        self.wire().missing
    }

    /// Lets `source` speak when it is its turn.
    pub(crate) fn add_source(&self, source: FrameSource) {
        let mut wire = self.wire();
        if wire.offence.is_none() {
            wire.sources.push_back(source);
            self.wake_writer.notify_one();
        }
    }

    /// The other worker broke a rule. False: it has before.
    pub(crate) fn offend(&self, offence: Arc<str>) -> bool {
        let mut wire = self.wire();
        if wire.offence.is_some() {
            return false;
        }
        wire.offence = Some(offence);
        wire.sources.clear();
        true
    }

    /// The rule that the other worker broke, in words.
    pub(crate) fn offence(&self) -> Option<Arc<str>> {
        self.wire().offence.clone()
    }

    /// What this side received and grants, for the other to go on from there.
    pub(crate) fn acknowledge(&self) -> (u64, u64) {
        self.wire().duplex.inbox().acknowledge()
    }

    /// A connection takes over, on which the other side says that it received
    /// everything up to `received`. Returns the connection's number, and what this
    /// side received and grants.
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

    /// The connection is gone, unless a later one took over.
    pub(crate) fn detach(&self, connection: u64) {
        let mut wire = self.wire();
        if wire.connection == connection {
            wire.missing = Some(Instant::now());
            wire.pause();
        }
    }

    /// Takes a frame off `connection`. `None`: a later one took over.
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
        // What comes has its place already: nothing waits here.
        if let Some((_, bytes)) = &received {
            wire.duplex.inbox().consume(*bytes);
        }
        // An ack or credit may let the writer go on.
        self.wake_writer.notify_one();
        Ok(Some(received.map(|(body, _)| body)))
    }

    /// What to send next.
    pub(crate) fn next_to_send(&self, connection: u64) -> NextFrame {
        let mut wire = self.wire();
        if wire.connection != connection {
            return NextFrame::Replaced;
        }
        loop {
            if let Some(parts) = wire.duplex.next_to_send() {
                return NextFrame::Frame(parts);
            }
            // What is there and may not be sent waits for credit.
            if wire.duplex.outbox().is_full() || wire.duplex.outbox().has_unsent() {
                break;
            }
            // More is asked for when some of it is confirmed.
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

    /// The other side took this long to answer.
    pub(crate) fn answered(&self, after: Duration) {
        self.wire().meter.answered(after);
    }

    /// Bytes to which a connection's flight is to be bounded, if it is.
    pub(crate) fn flight_bytes(&self) -> Option<usize> {
        let wire = self.wire();
        match wire.lead_bytes {
            Some(lead_bytes) => wire.meter.flight_bytes(self.links, lead_bytes),
            None => wire.meter.flight_bytes(1, 0),
        }
    }

    /// The least time in which the other worker was seen to answer.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.wire().meter.round_trip()
    }

    /// Whether nothing was heard of the other worker for a `time`.
    pub(crate) fn is_silent(&self, now: Instant, time: Duration) -> bool {
        let last_received = self.wire().last_received;
        last_received
            .is_none_or(|last_received| now.saturating_duration_since(last_received) >= time)
    }

    /// Bytes that fill the link for a round trip, once that is known.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.wire().meter.bucket_bytes()
    }

    /// A frame that says only how far this side got, if `connection` is the latest: what
    /// another tells counts as told.
    pub(crate) fn beat(&self, connection: u64) -> Option<[Bytes; 3]> {
        let mut wire = self.wire();
        (wire.connection == connection).then(|| beat(&mut wire.duplex))
    }
}

impl Wire {
    /// Nothing is sent until there is another connection.
    fn pause(&mut self) {
        self.meter.pause();
        if std::mem::take(&mut self.is_busy) {
            lock(&self.egress).pause();
        }
    }

    /// Notes what was confirmed, or begun, since so many bytes were kept.
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

    /// Queues the next frame of `source`, which goes to the end if it has more.
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
    /// Sends a value that was fetched.
    pub(crate) fn value(capability: Capability, value: Value) -> Self {
        let kind = encode_type(&value.shape, value.dtype);
        let chunks = chunks(value.bytes).map(|chunk| chunk.bytes).collect();
        Self::Value(capability, Some(kind), chunks)
    }
}

fn beat(duplex: &mut Duplex) -> [Bytes; 3] {
    [duplex.beat(), Bytes::new(), Bytes::new()]
}
