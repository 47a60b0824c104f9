//! Another worker of the lease, and the link to it: the frames to send, and the state that
//! outlives a connection.
//!
//! A source of frames is queued here, and the link requests one frame from it whenever it
//! can send one. So nothing is encoded before it can be sent, and groups and transfers take
//! turns frame by frame.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    bulk::chunks,
    codec::encode_type,
    ids::WorkerId,
    v1::{self, Fault, LeaseShare, frame::Body},
};
use tensord_transport::channel::{
    Attached, Channel, Connection, FrameParts, Next, Received, duplex::FrameError,
    resume::ResumeError,
};
use tokio::sync::Notify;

use super::{
    group::Group,
    meter::{Egress, Meter},
    transfer::{Capability, Value},
};
use crate::locks::lock;

/// Bytes of credit for the other worker. Frames are consumed at once, so the credit only has
/// to cover the bandwidth-delay product of the path: 10 Gbit/s for 25 ms.
const WINDOW_BYTES: u64 = 32 << 20;

/// Maximum number of bytes kept for retransmission until the other worker has acknowledged
/// them.
const OUTBOX_BYTES: usize = 32 << 20;

/// Number of batches of frames between updates of the in-flight limit.
const FRAMES_PER_LIMIT: usize = 2;

/// Another worker of the lease.
pub(crate) struct Peer {
    pub(crate) worker: WorkerId,
    /// The worker's first share of the lease, with its address and certificate.
    pub(crate) share: LeaseShare,
    /// Number of this worker's links in the lease, including this one.
    links: usize,
    /// Locked while a received frame is handled.
    reader: Mutex<()>,
    link_state: Mutex<LinkState>,
    /// Wakes the writer.
    pub(crate) writer_notify: Notify,
}

struct LinkState {
    channel: Channel,
    /// Since when a connection is wanted.
    link_requested: Option<Instant>,
    /// Since when this worker, if it is the one that dials, has not reached the other one.
    unreached_since: Option<Instant>,
    /// The latest connection that sent its first frame, a ping, with which the other side
    /// measures the round trip.
    greeted: Option<Connection>,
    /// When that ping was taken, until a frame is received after it.
    greeted_at: Option<Instant>,
    sources: VecDeque<FrameSource>,
    /// The rule that the other worker broke, as a message. The worker is then refused new
    /// connections.
    violation: Option<Arc<str>>,
    meter: Meter,
    /// Whether frames are in flight.
    is_busy: bool,
    /// Measures all links of the lease together.
    egress: Arc<Mutex<Egress>>,
    /// How many bytes more than the others this peer was sent in the current exchange; `None`
    /// in a ring, where the others are sent nothing.
    lead_bytes: Option<i64>,
    /// Number of batches of frames sent, and the in-flight limit that was last set.
    sends: usize,
    flight_limit: Option<usize>,
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

impl Peer {
    pub(crate) fn new(share: LeaseShare, links: usize, egress: Arc<Mutex<Egress>>) -> Self {
        Self {
            worker: WorkerId(share.worker_id),
            share,
            links,
            reader: Mutex::new(()),
            link_state: Mutex::new(LinkState {
                channel: Channel::new(OUTBOX_BYTES, WINDOW_BYTES, WINDOW_BYTES, Instant::now()),
                link_requested: None,
                unreached_since: None,
                greeted: None,
                greeted_at: None,
                sources: VecDeque::new(),
                violation: None,
                meter: Meter::default(),
                is_busy: false,
                egress,
                lead_bytes: Some(0),
                sends: 0,
                flight_limit: None,
            }),
            writer_notify: Notify::new(),
        }
    }

    fn link_state(&self) -> MutexGuard<'_, LinkState> {
        lock(&self.link_state)
    }

    /// Keeps frames of other connections from being received. A frame is received and handled under this lock, so that
    /// a later connection's frames are handled after it. It is locked before all locks of the cohort.
    pub(crate) fn lock_reader(&self) -> MutexGuard<'_, ()> {
        lock(&self.reader)
    }

    /// Records that a link is wanted. Returns true on the first call.
    pub(crate) fn request_link(&self) -> bool {
        let mut link_state = self.link_state();
        let is_first = link_state.link_requested.is_none();
        link_state.link_requested.get_or_insert_with(Instant::now);
        is_first
    }

    /// Returns whether a link is wanted.
    #[cfg(all(feature = "testing", target_os = "linux"))]
    pub(crate) fn is_link_requested(&self) -> bool {
        self.link_state().link_requested.is_some()
    }

    /// Returns since when a requested link has had no connection. `None` if the link has one,
    /// or was not requested.
    pub(crate) fn disconnected_since(&self) -> Option<Instant> {
        let link_state = self.link_state();
        Some(
            link_state
                .channel
                .detached()?
                .max(link_state.link_requested?),
        )
    }

    /// Records an attempt to dial the other worker, and whether that has accepted a link. It may refuse it later, as
    /// when it has no session of the lease yet.
    pub(crate) fn record_dial(&self, is_reached: bool) {
        let mut link_state = self.link_state();
        match is_reached {
            true => link_state.unreached_since = None,
            false => {
                let since = &mut link_state.unreached_since;
                since.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Returns since when this worker has tried to reach the other one in vain.
    pub(crate) fn unreached_since(&self) -> Option<Instant> {
        self.link_state().unreached_since
    }

    /// Queues `source`, unless the other worker broke a rule.
    pub(crate) fn add_source(&self, source: FrameSource) {
        let mut link_state = self.link_state();
        if link_state.violation.is_none() {
            link_state.sources.push_back(source);
            self.writer_notify.notify_one();
        }
    }

    /// Records the rule that the other worker broke. Returns false if an earlier one is
    /// recorded.
    pub(crate) fn record_violation(&self, violation: Arc<str>) -> bool {
        let mut link_state = self.link_state();
        if link_state.violation.is_some() {
            return false;
        }
        link_state.violation = Some(violation);
        link_state.sources.clear();
        true
    }

    /// Returns the rule that the other worker broke, as a message.
    pub(crate) fn violation(&self) -> Option<Arc<str>> {
        self.link_state().violation.clone()
    }

    /// Returns the number of the last frame received and the total credit granted, so that
    /// the other side can resume from there.
    pub(crate) fn acknowledge(&self) -> (u64, u64) {
        self.link_state().channel.inbox().acknowledge()
    }

    /// Attaches a new connection, on which the other side reports that it received all
    /// frames up to `received` and grants `credit` bytes in all. Waits until the frame that
    /// an earlier connection has received is handled.
    pub(crate) fn attach(&self, received: u64, credit: u64) -> Result<Attached, ResumeError> {
        let _reader = self.lock_reader();
        let mut link_state = self.link_state();
        let before = link_state.channel.outbox().unacked_bytes();
        let attached = link_state.channel.attach(received, credit)?;
        link_state.update_meters(before);
        self.writer_notify.notify_one();
        Ok(attached)
    }

    /// Records that `connection` was lost. Does nothing if a later one has replaced it.
    pub(crate) fn detach(&self, connection: Connection) {
        let mut link_state = self.link_state();
        if link_state.channel.detach(connection, Instant::now()) {
            link_state.pause();
        }
    }

    /// Processes a frame received on `connection`. The caller has [locked the reader](Self::lock_reader).
    pub(crate) fn receive(
        &self,
        connection: Connection,
        frame: Bytes,
    ) -> Result<Received, FrameError> {
        let now = Instant::now();
        let mut link_state = self.link_state();
        let before = link_state.channel.outbox().unacked_bytes();
        let received = link_state.channel.receive(connection, frame, now)?;
        link_state.update_meters(before);
        match &received {
            // The frame is handled at once, so its bytes are consumed here.
            Received::New(_, bytes) => link_state.channel.inbox().consume(*bytes),
            Received::Nothing => {}
            Received::Replaced => return Ok(received),
        }
        if let Some(greeted_at) = link_state.greeted_at.take() {
            // The other side began to write when it received the first frame of this side.
            link_state
                .meter
                .record_round_trip(now.saturating_duration_since(greeted_at));
        }
        // An acknowledgement or credit may unblock the writer.
        self.writer_notify.notify_one();
        Ok(received)
    }

    /// Returns what the writer of `connection` is to do next.
    pub(crate) fn next_to_send(&self, connection: Connection) -> Next {
        let mut link_state = self.link_state();
        if !link_state.channel.is_latest(connection) {
            return Next::Replaced;
        }
        if link_state.greeted.replace(connection) != Some(connection) {
            link_state.greeted_at = Some(Instant::now());
            link_state.flight_limit = None;
            let ping = link_state.channel.ping(connection, true);
            return Next::Frames(ping.into_iter().collect());
        }
        loop {
            if let Some(parts) = link_state.channel.next_frame() {
                return Next::Frames(vec![parts]);
            }
            // Frames that are encoded but not sent wait for credit.
            if link_state.channel.outbox().is_full() || link_state.channel.outbox().has_unsent() {
                break;
            }
            // More frames are requested once some of these bytes are acknowledged.
            let initial_flight = link_state.meter.initial_flight_bytes(self.links);
            if initial_flight
                .is_some_and(|most| link_state.channel.outbox().unacked_bytes() >= most)
            {
                break;
            }
            match link_state.sources.pop_front() {
                Some(source) => link_state.enqueue(source),
                None => break,
            }
        }
        link_state.channel.acknowledgement()
    }

    /// Records a round trip: the other side replied `after` this time.
    pub(crate) fn record_round_trip(&self, after: Duration) {
        self.link_state().meter.record_round_trip(after);
    }

    /// Counts a batch of frames that is about to be sent. Returns the new in-flight limit for
    /// the connection in bytes, or `None` if the current limit stays.
    pub(crate) fn new_flight_limit(&self) -> Option<usize> {
        let mut link_state = self.link_state();
        link_state.sends = link_state.sends.wrapping_add(1);
        if !link_state.sends.is_multiple_of(FRAMES_PER_LIMIT) {
            return None;
        }
        let limit = match link_state.lead_bytes {
            Some(lead_bytes) => link_state.meter.flight_bytes(self.links, lead_bytes),
            None => link_state.meter.flight_bytes(1, 0),
        };
        // If there is no limit now, the connection keeps the one set before, or the kernel's.
        let limit = Some(limit?);
        let before = std::mem::replace(&mut link_state.flight_limit, limit);
        limit.filter(|_| before != limit)
    }

    /// Returns the shortest round trip measured.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.link_state().meter.round_trip()
    }

    /// Returns whether nothing was received from the other worker for `time`, or it was never
    /// connected.
    pub(crate) fn is_silent(&self, now: Instant, time: Duration) -> bool {
        let link_state = self.link_state();
        let last_received = link_state.channel.last_received();
        !link_state.channel.was_attached() || now.saturating_duration_since(last_received) >= time
    }

    /// Returns the bytes that fill the link for one round trip, once its rate and round
    /// trip are known.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.link_state().meter.bucket_bytes()
    }

    /// Returns the ping of the channel; see [`Channel::ping`].
    pub(crate) fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts> {
        self.link_state().channel.ping(connection, must)
    }
}

impl LinkState {
    /// Pauses the measurements, as nothing is sent until the next connection.
    fn pause(&mut self) {
        self.meter.pause();
        if std::mem::take(&mut self.is_busy) {
            lock(&self.egress).pause();
        }
    }

    /// Updates the measurements after a change of the outbox, which had `before`
    /// unacknowledged bytes: with the bytes acknowledged since, or the start of a busy period.
    fn update_meters(&mut self, before: usize) {
        let (now, after) = (Instant::now(), self.channel.outbox().unacked_bytes());
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
        let before = self.channel.outbox().unacked_bytes();
        match source {
            FrameSource::Once(body) => self.channel.push(body),
            FrameSource::Group(group, worker_index) => {
                let (body, more, lead_bytes) = group.next(worker_index);
                self.lead_bytes = lead_bytes;
                if let Some(body) = body {
                    self.channel.push(body);
                }
                if more {
                    self.sources
                        .push_back(FrameSource::Group(group, worker_index));
                }
            }
            FrameSource::Value(capability, kind, mut chunks) => {
                self.channel.push(Body::Fetched(v1::Fetched {
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
        self.update_meters(before);
    }
}

impl FrameSource {
    /// Returns the source that requests the value which `from` offers to `to`.
    pub(crate) fn fetch(capability: Capability, from: u32, to: u32) -> Self {
        let capability = capability.to_vec().into();
        Self::Once(Body::Fetch(v1::Fetch {
            capability,
            from,
            to,
        }))
    }

    /// Returns the source that sends a fetched value, or the fault that it has instead.
    pub(crate) fn fetched(capability: Capability, value: Result<Value, Arc<Fault>>) -> Self {
        match value {
            Ok(value) => {
                let kind = encode_type(&value.shape, value.dtype);
                let chunks = chunks(value.bytes).map(|chunk| chunk.bytes).collect();
                Self::Value(capability, Some(kind), chunks)
            }
            Err(fault) => Self::Once(Body::Fetched(v1::Fetched {
                capability: capability.to_vec().into(),
                fault: Some(Fault::clone(&fault)),
                ..v1::Fetched::default()
            })),
        }
    }
}
