//! A session's [`Endpoint`] of a track, as the pump of the track's channel sees it.

use std::{sync::atomic::Ordering, time::Instant};

use bytes::Bytes;
use tensord_transport::{
    LinkError, LinkSender,
    channel::{Broken, Connection, Endpoint, FrameParts, Look, Next},
};
use tokio::{sync::Notify, time::timeout_at};

use super::{Session, connection_end::ConnectionEnd, pending_reads::Delivery, state::Track};

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
