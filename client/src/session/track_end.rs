//! A session as its connections see it: how one begins, and the session's [`Endpoint`] of a
//! track, which the pump of the track's channel uses.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    v1::{Open, Opened},
    version,
};
use tensord_session::{ConnectionEnd, Delivery, Track, accepted_profile, broken};
use tensord_transport::{
    LinkError, LinkSender,
    channel::{Broken, Connection, Endpoint, FrameParts, Look, Next},
};
use tokio::{sync::Notify, time::timeout_at};

use super::{Session, SessionAccess};

/// The session's [`Endpoint`] of a track.
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
        self.session
            .receive(self.track, connection, frame, Instant::now(), row)
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
        self.session.next_to_send(self.track, look, Instant::now())
    }

    fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts> {
        self.session.ping(self.track, connection, must)
    }

    fn wake(&self) -> &Notify {
        self.session.wake_of(self.track)
    }

    fn on_send(&self, _: &LinkSender, frames: &[FrameParts]) {
        self.session.counters.add_sent(frames);
    }

    /// Lends the sender to threads that read or sync.
    async fn wait(&self, sender: LinkSender, until: tokio::time::Instant) -> (LinkSender, bool) {
        let lent_sender = self.session.sender_slot.lend(self.track, sender);
        let woken = timeout_at(until, self.wake().notified()).await;
        (lent_sender.back(), woken.is_ok())
    }
}

impl Session {
    /// Returns the first message of a new connection for a track.
    pub(super) fn open(&self, track: Track, resume: bool, access: &SessionAccess) -> Open {
        let mut state = self.lock();
        let restore = match track {
            Track::Ops => state.opening_points(),
            Track::Bulk => state.restore_points(),
        };
        Open {
            hello: Some(version::hello()),
            session_id: self.id.0,
            lease_token: access.lease_token.clone(),
            device_index: access.device_index,
            resume: resume || track == Track::Bulk,
            received: state.track(track).inbox().received(),
            seed: access.seed,
            bulk: track == Track::Bulk,
            cohort: self.cohort_member.cohort.id,
            epoch: state.epoch(),
            restore,
            snapshot_key: match state.may_be_durable() {
                true => self.snapshot_key.to_vec().into(),
                false => Bytes::new(),
            },
        }
    }

    /// Returns whether the session can go on in another process, if that has the snapshot of its restore point.
    pub(crate) fn can_be_restored(&self) -> bool {
        !self.lock().restore_points().is_empty()
    }

    /// Attaches a new connection, on which the worker sent `opened`, to a track.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub(super) fn opened(
        &self,
        track: Track,
        opened: &Opened,
    ) -> Result<Connection, ConnectionEnd> {
        let profile = accepted_profile(opened).map_err(ConnectionEnd::Over)?;
        let mut state = self.lock();
        if track == Track::Bulk && opened.epoch != state.epoch() {
            return Err(ConnectionEnd::Lost(
                "the process was replaced while the bulk track connected".into(),
            ));
        }
        if track == Track::Ops && !state.accepts_restore(opened) {
            return Err(ConnectionEnd::BrokeRule(format!(
                "it has restored the session from mark {}, which the client did not offer",
                opened.mark
            )));
        }
        if track == Track::Ops && opened.epoch > state.epoch() && !state.is_served_by(&profile) {
            return Err(ConnectionEnd::Over(
                "the session went on at a device that lacks types of the earlier one, so its tensors cannot be used there"
                    .into(),
            ));
        }
        let attached = state.attach(track, opened, profile);
        drop(state);
        self.room.notify_all();
        attached.map_err(|e| ConnectionEnd::Over(e.to_string()))
    }

    /// Processes a frame from the worker, and adds the replies it completes to `deliveries`.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub(super) fn receive(
        &self,
        track: Track,
        connection: Connection,
        frame: Bytes,
        now: Instant,
        deliveries: &mut Vec<Delivery>,
    ) -> Result<(), Broken<ConnectionEnd>> {
        let received = self
            .lock()
            .receive(track, connection, frame, now, deliveries);
        let receipt = received.map_err(|e| broken(&e))?;
        let receipt = receipt.ok_or(Broken::Replaced)?;
        if receipt.has_room {
            self.room.notify_all();
        }
        if receipt.is_held {
            self.held.notify_one();
        }
        if receipt.must_wake {
            self.wake_of(track).notify_one();
        }
        let counter = &self.counters.tensors_down;
        counter.fetch_add(receipt.tensor_bytes as u64, Ordering::Relaxed);
        match receipt.end {
            Some(end) => Err(Broken::Over(end, Duration::ZERO)),
            None => Ok(()),
        }
    }

    pub(super) fn ping(
        &self,
        track: Track,
        connection: Connection,
        must: bool,
    ) -> Option<FrameParts> {
        self.lock().track(track).ping(connection, must)
    }

    /// Returns when a frame was last received on a track, or when the track was made.
    pub(super) fn last_received(&self, track: Track) -> Instant {
        self.lock().track(track).last_received()
    }
}
