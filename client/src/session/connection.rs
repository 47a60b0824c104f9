//! A connection of a session's track, as the pump of its channel sees the session.

use std::{sync::atomic::Ordering, time::Duration};

use bytes::Bytes;
use tensord_proto::{
    codec::DeviceProfile,
    v1::{Error, ErrorCode, Opened},
    version,
};
use tensord_transport::{
    LinkError, LinkSender,
    channel::{Broken, Connection, Ended, Endpoint, FrameParts, Look, Next, duplex::FrameError},
};
use tokio::{sync::Notify, time::timeout_at};

use super::{Session, pending_reads::Delivery, state::Track};

/// Why a connection ended.
#[derive(Debug)]
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

/// Returns how a session ends that the worker closed with `error`.
pub(super) fn closed_by(error: &Error) -> ConnectionEnd {
    match error.code() {
        ErrorCode::Unspecified => ConnectionEnd::Over("closed".into()),
        _ => ConnectionEnd::Over(format!("the worker ended the session: {error}")),
    }
}

/// Returns how a frame that was refused with `error` ends the connection.
pub(super) fn broken(error: &FrameError) -> Broken<ConnectionEnd> {
    match error.is_loss() {
        true => Broken::Loss(error.to_string()),
        false => Broken::Over(ConnectionEnd::BrokeRule(error.to_string()), Duration::ZERO),
    }
}

/// Returns the profile of the device with which the worker opened the session.
///
/// # Errors
///
/// When the worker does not use a protocol of this client, or the profile is malformed.
pub(super) fn accepted_profile(opened: &Opened) -> Result<DeviceProfile, String> {
    let ours = version::hello();
    let theirs = opened.hello.clone().unwrap_or_default();
    let protocol = version::negotiate(&ours, &theirs).map_err(|e| e.message)?;
    if opened.protocol != protocol {
        let chosen = opened.protocol;
        return Err(format!(
            "the worker chose protocol {chosen} instead of {protocol}"
        ));
    }
    let settings = opened.settings.clone().unwrap_or_default();
    DeviceProfile::decode(&settings.encoded).map_err(|e| e.to_string())
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
