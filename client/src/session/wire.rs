//! Frames that a session sends and receives on the links of its tracks.

use std::{
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    codec::DeviceProfile,
    v1::{Error, ErrorCode, Opened, TensorValue, Value, frame::Body, tensor_value, value},
    version,
};
use tensord_transport::{
    LinkError, LinkSender,
    channel::{
        Broken, Connection, Ended, Endpoint, FrameParts, Look, Next, Received, duplex::FrameError,
    },
};
use tokio::{sync::Notify, time::timeout_at};

use super::{
    DriverWait, EAGER_OPS, Session, State, Track, direct_send::LentSender, pending_reads::Delivery,
};

/// How long a few ops wait for more: the resolution of the timer. The program does not
/// wait for these ops, as a read or the end of a series of all-reduces would have sent
/// them.
const BATCH_DELAY: Duration = Duration::from_millis(1);

/// [`BATCH_DELAY`] doubles up to this with each time that a few ops were sent since the last
/// urgent item: the worker is busy then, and a frame costs it more than an op.
const MAX_BATCH_DELAY: Duration = Duration::from_millis(4);

/// How long a closed session may take to send its last frames.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a connection ended.
pub(super) enum ConnectionEnd {
    /// The connection was lost; the session may continue on another.
    Lost(String),
    /// The session is over.
    Over(String),
    /// The worker broke this rule, so the session is over.
    BrokeRule(String),
}

/// Returns why a connection ended for which the pump returned `ended`.
pub(super) fn after_pump(ended: Ended<ConnectionEnd>) -> ConnectionEnd {
    match ended {
        Ended::Lost(reason) => ConnectionEnd::Lost(reason),
        // A track has one driver, so no connection of its replaces another.
        Ended::Replaced => ConnectionEnd::Lost("a later connection replaced this one".into()),
        Ended::Done => ConnectionEnd::Over("closed".into()),
        Ended::Over(end) => end,
    }
}

/// The session's end of a track.
pub(super) struct TrackEnd<'a> {
    pub(super) session: &'a Session,
    pub(super) track: Track,
}

impl Endpoint for TrackEnd<'_> {
    type Reason = ConnectionEnd;
    type Row = Vec<Delivery>;

    fn on_frame(
        &self,
        connection: Connection,
        frame: Bytes,
        row: &mut Self::Row,
    ) -> Result<(), Broken<ConnectionEnd>> {
        let counter = &self.session.counters.down;
        counter.fetch_add(frame.len() as u64, Ordering::Relaxed);
        self.session.receive(self.track, connection, frame, row)
    }

    fn on_row(&self, row: &mut Self::Row) {
        // In reverse: the thread that waits for the first value then finds the others there
        // once it is woken, and is woken once.
        row.drain(..).rev().for_each(Delivery::deliver);
    }

    fn on_link_error(&self, error: &LinkError) -> Option<ConnectionEnd> {
        // Another connection would bring the same frame again.
        let is_rule = matches!(error, LinkError::TooLarge(_));
        is_rule.then(|| ConnectionEnd::BrokeRule(error.to_string()))
    }

    fn next(&self, _: Connection, look: Look) -> Next {
        self.session.next_to_send(self.track, look)
    }

    fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts> {
        let mut state = self.session.lock();
        state.track(self.track).ping(connection, must)
    }

    fn wake(&self) -> &Notify {
        self.session.wake_of(self.track)
    }

    fn on_send(&self, _: &LinkSender, frames: &[FrameParts]) {
        self.session.count_up(frames);
    }

    /// Lends the sender to threads that read or sync.
    async fn wait(&self, sender: LinkSender, until: tokio::time::Instant) -> (LinkSender, bool) {
        let lent_sender = LentSender::new(self.session, self.track, sender);
        let woken = timeout_at(until, self.wake().notified()).await;
        (lent_sender.back(), woken.is_ok())
    }
}

impl Session {
    pub(super) fn is_over(&self) -> bool {
        self.lock().end.is_some()
    }

    pub(super) fn wake_of(&self, track: Track) -> &Notify {
        match track {
            Track::Ops => &self.wake,
            Track::Bulk => &self.wake_bulk,
        }
    }

    pub(super) fn received(&self, track: Track) -> u64 {
        self.lock().track(track).inbox().received()
    }

    /// Returns when a frame was last received on a track, or when the track was made.
    pub(super) fn last_received(&self, track: Track) -> Instant {
        self.lock().track(track).last_received()
    }

    /// Makes a connection, on which the worker sent `opened`, the latest of a track.
    pub(super) fn opened(&self, track: Track, opened: Opened) -> Result<Connection, String> {
        let ours = version::hello();
        let protocol = version::negotiate(&ours, &opened.hello.unwrap_or_default());
        let protocol = protocol.map_err(|e| e.message)?;
        if opened.protocol != protocol {
            let chosen = opened.protocol;
            return Err(format!(
                "the worker chose protocol {chosen} instead of {protocol}"
            ));
        }
        let profile = opened.settings.unwrap_or_default();
        let profile = DeviceProfile::decode(&profile.encoded).map_err(|e| e.to_string())?;
        let mut state = self.lock();
        state.profile = Some(profile);
        state.upload_cache.set_budget(opened.kept_bytes);
        let channel = state.track(track);
        let attached = channel.attach(opened.received, opened.credit_bytes);
        let attached = attached.map_err(|e| e.to_string())?;
        drop(state);
        self.room.notify_all();
        Ok(attached.connection)
    }

    /// Returns what to send next on a track.
    pub(super) fn next_to_send(&self, track: Track, look: Look) -> Next {
        let mut state = self.lock();
        let frames = state.track(track).next_frames();
        if !frames.is_empty() {
            return Next::Frames(frames);
        }
        let mut few = false;
        if track == Track::Ops {
            few = look.patient && state.has_only_few_ops();
            if !few && !state.op_buffer.is_empty() && !state.channel.outbox().is_full() {
                drop(state);
                self.encode();
                return self.next_to_send(track, look);
            }
        }
        if state.end.is_some() {
            return Next::Linger(CLOSE_TIMEOUT);
        }
        if few {
            state.driver = DriverWait::ForMoreOps;
            return Next::Later(
                MAX_BATCH_DELAY.min(BATCH_DELAY * (1 << state.small_batches.min(8))),
            );
        }
        let next = state.track(track).acknowledgement();
        if track == Track::Ops && !matches!(next, Next::Frames(_)) {
            state.driver = match look.rested && next == Next::Nothing {
                true => DriverWait::ForFramesOrAcks,
                false => DriverWait::ForFrames,
            };
        }
        next
    }

    /// Encodes the recorded items into frames.
    fn encode(&self) {
        // The owner of the sender locks the encoder before the state, so items that are
        // recorded meanwhile are encoded after these.
        let mut op_encoder = self
            .op_encoder
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        match std::mem::take(&mut state.urgent) {
            true => state.small_batches = 0,
            false if state.op_buffer.len() < EAGER_OPS => state.small_batches += 1,
            false => {}
        }
        op_encoder.take(&mut state.op_buffer);
        drop(state);
        self.room.notify_all();
        let bodies = op_encoder.encode();
        let mut state = self.lock();
        bodies.into_iter().for_each(|body| state.channel.push(body));
    }

    /// Processes a frame from the worker, and adds the replies it completes to `deliveries`.
    pub(super) fn receive(
        &self,
        track: Track,
        connection: Connection,
        frame: Bytes,
        deliveries: &mut Vec<Delivery>,
    ) -> Result<(), Broken<ConnectionEnd>> {
        let mut state = self.lock();
        let channel = state.track(track);
        let was_full = channel.outbox().is_full();
        let received = channel.receive(connection, frame, Instant::now());
        let received = match received.map_err(|e| broken(&e))? {
            Received::New(body, bytes) => {
                channel.inbox().consume(bytes);
                Some(body)
            }
            Received::Nothing => None,
            Received::Replaced => return Err(Broken::Replaced),
        };
        let freed = was_full && !channel.outbox().is_full();
        if freed {
            self.room.notify_all();
        }
        // The frame may have freed room or granted credit, or an ack may be due.
        let due = freed || channel.outbox().has_unsent() || channel.inbox().is_ack_due();
        match track {
            Track::Ops => {
                let wanted = due || state.driver == DriverWait::ForFramesOrAcks;
                if wanted && state.take_driver_wait() {
                    self.wake.notify_one();
                }
            }
            Track::Bulk => self.wake_bulk.notify_one(),
        }
        match received {
            Some(body) => self
                .take(&mut state, track, body, deliveries)
                .map_err(|end| Broken::Over(end, Duration::ZERO)),
            None => Ok(()),
        }
    }

    fn take(
        &self,
        state: &mut State,
        track: Track,
        body: Body,
        deliveries: &mut Vec<Delivery>,
    ) -> Result<(), ConnectionEnd> {
        match (track, body) {
            (_, Body::Ping(_)) => {}
            (_, Body::Closed(closed)) => {
                return Err(closed_by(closed.error.unwrap_or_default()));
            }
            // A session that has ended has no pending requests.
            _ if state.end.is_some() => {}
            (Track::Bulk, Body::Chunk(chunk)) => {
                self.count_down(chunk.bytes.len());
                deliveries.extend(
                    state
                        .pending_reads
                        .chunk(&chunk)
                        .map_err(ConnectionEnd::BrokeRule)?,
                );
            }
            (Track::Ops, Body::Values(values)) => {
                for value in values.values {
                    self.count_down(inline_bytes(&value));
                    deliveries.extend(
                        state
                            .pending_reads
                            .value(value)
                            .map_err(ConnectionEnd::BrokeRule)?,
                    );
                }
            }
            (Track::Ops, Body::Synced(synced)) => {
                deliveries.push(state.synced(synced).map_err(ConnectionEnd::BrokeRule)?);
            }
            (Track::Ops, Body::Held(held)) => {
                let listed = state.upload_cache.set_held(&held.hashes);
                listed.map_err(ConnectionEnd::BrokeRule)?;
            }
            _ => {
                let rule = format!("the frame is one that workers do not send on track {track:?}");
                return Err(ConnectionEnd::BrokeRule(rule));
            }
        }
        Ok(())
    }

    /// Counts the bytes of `frames` as sent.
    pub(super) fn count_up(&self, frames: &[[Bytes; 3]]) {
        let bytes: usize = frames.as_flattened().iter().map(Bytes::len).sum();
        let counter = &self.counters.up;
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count_down(&self, bytes: usize) {
        let counter = &self.counters.tensors_down;
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Returns the number of tensor bytes within `value`.
fn inline_bytes(value: &Value) -> usize {
    match &value.result {
        Some(value::Result::Tensor(TensorValue {
            content: Some(tensor_value::Content::Bytes(bytes)),
            ..
        })) => bytes.len(),
        _ => 0,
    }
}

fn closed_by(error: Error) -> ConnectionEnd {
    match error.code() {
        ErrorCode::Unspecified => ConnectionEnd::Over("closed".into()),
        _ => ConnectionEnd::Over(format!("the worker ended the session: {error}")),
    }
}

/// Returns how a frame that was refused with `error` ends the connection.
fn broken(error: &FrameError) -> Broken<ConnectionEnd> {
    match error.is_loss() {
        true => Broken::Loss(error.to_string()),
        false => Broken::Over(ConnectionEnd::BrokeRule(error.to_string()), Duration::ZERO),
    }
}
