//! Frames that a session sends and receives on the links of its tracks.

use std::sync::{PoisonError, atomic::Ordering};

use bytes::Bytes;
use tensord_proto::{
    codec::DeviceProfile,
    v1::{Error, ErrorCode, Opened, TensorValue, Value, frame::Body, tensor_value, value},
    version,
};
use tokio::sync::Notify;

use super::{DriverWait, EAGER_OPS, Session, State, Track, pending_reads::Delivery};

/// Why a connection ended.
pub(super) enum ConnectionEnd {
    /// The connection was lost; the session may continue on another.
    Lost(String),
    /// The session is over.
    Over(String),
    /// The worker broke this rule, so the session is over.
    BrokeRule(String),
}

/// What there is to send on a track.
pub(super) enum NextFrames {
    Frames(Vec<[Bytes; 3]>),
    /// A few ops that may wait for more; has the number of times that few ops were sent
    /// since the last urgent item.
    Few(u32),
    /// Nothing now, but an ack is pending.
    PendingAck,
    Nothing,
    /// The session is over and everything was sent.
    Goodbye,
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

    pub(super) fn opened(&self, track: Track, opened: Opened) -> Result<(), String> {
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
        let duplex = state.track(track);
        let rewound = duplex.rewind(opened.received, opened.credit_bytes);
        rewound.map_err(|e| e.to_string())?;
        drop(state);
        self.room.notify_all();
        Ok(())
    }

    /// Returns the next frames to send. A `patient` caller gets no frames for a few ops that
    /// are not urgent. `rested`: the driver is about to wait until it is woken.
    pub(super) fn next_to_send(&self, track: Track, patient: bool, rested: bool) -> NextFrames {
        let mut state = self.lock();
        let frames = state.track(track).next_frames();
        if !frames.is_empty() {
            return NextFrames::Frames(frames);
        }
        let mut few = false;
        if track == Track::Ops {
            few = patient && state.has_only_few_ops();
            if !few && !state.op_buffer.is_empty() && !state.duplex.outbox().is_full() {
                drop(state);
                self.encode();
                return self.next_to_send(track, patient, rested);
            }
        }
        if state.end.is_some() {
            return NextFrames::Goodbye;
        }
        if few {
            state.driver = DriverWait::ForMoreOps;
            return NextFrames::Few(state.small_batches);
        }
        let duplex = state.track(track);
        let (due, ack) = (
            duplex.inbox().is_ack_due(),
            duplex.inbox().has_pending_ack(),
        );
        if due {
            return NextFrames::Frames(vec![[duplex.beat(), Bytes::new(), Bytes::new()]]);
        }
        if track == Track::Ops {
            state.driver = match rested && !ack {
                true => DriverWait::ForFramesOrAcks,
                false => DriverWait::ForFrames,
            };
        }
        match ack {
            true => NextFrames::PendingAck,
            false => NextFrames::Nothing,
        }
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
        bodies.into_iter().for_each(|body| state.duplex.push(body));
    }

    /// Returns whether an ack for the worker is pending.
    pub(super) fn has_pending_ack(&self, track: Track) -> bool {
        self.lock().track(track).inbox().has_pending_ack()
    }

    pub(super) fn beat(&self, track: Track) -> [Bytes; 3] {
        let beat = self.lock().track(track).beat();
        [beat, Bytes::new(), Bytes::new()]
    }

    /// Processes a frame from the worker, and adds the replies it completes to `deliveries`.
    pub(super) fn receive(
        &self,
        track: Track,
        frame: Bytes,
        deliveries: &mut Vec<Delivery>,
    ) -> Result<(), ConnectionEnd> {
        let mut state = self.lock();
        let duplex = state.track(track);
        let was_full = duplex.outbox().is_full();
        let received = duplex.receive(frame).map_err(|e| match e.is_loss() {
            true => ConnectionEnd::Lost(e.to_string()),
            false => ConnectionEnd::BrokeRule(e.to_string()),
        })?;
        let freed = was_full && !duplex.outbox().is_full();
        if freed {
            self.room.notify_all();
        }
        if let Some((_, bytes)) = &received {
            duplex.inbox().consume(*bytes);
        }
        // The frame may have freed room or granted credit, or an ack may be due.
        let due = freed || duplex.outbox().has_unsent() || duplex.inbox().is_ack_due();
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
            Some((body, _)) => self.take(&mut state, track, body, deliveries),
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
