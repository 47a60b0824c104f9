//! The state of a channel, apart from its I/O.

use bytes::Bytes;
use tensord_proto::v1::frame;
use web_time::Instant;

use super::{FrameParts, Next};
use crate::{
    duplex::{Duplex, FrameError},
    resume::{Inbox, Outbox, ResumeError},
};

/// The number of one of a channel's connections. Only the latest may use the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection(u64);

/// A connection that became a channel's latest, with what its peer must know to resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attached {
    /// The connection.
    pub connection: Connection,
    /// The number of the last frame received from the peer.
    pub received: u64,
    /// The bytes granted to the peer in all.
    pub credit_bytes: u64,
}

/// A frame that was received on a connection.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "a value is taken apart as soon as it is returned"
)]
pub enum Received {
    /// The body of a new frame, and the number of bytes to [consume](Inbox::consume) once
    /// the body has been acted on.
    New(frame::Body, usize),
    /// The frame was received before, or carries only an acknowledgement.
    Nothing,
    /// A later connection has replaced the one that the frame came on.
    Replaced,
}

/// One end of a channel. See the [crate](crate).
#[derive(Debug)]
pub struct Channel {
    duplex: Duplex,
    /// Number of connections so far.
    connections: u64,
    /// Since when the channel has no connection; `None` while it has one.
    detached: Option<Instant>,
    last_received: Instant,
}

impl Channel {
    /// Creates an end without a connection. It keeps about `capacity_bytes` of
    /// unacknowledged bodies, may send `credit` bytes at first, and lets the peer send
    /// `window_bytes`.
    pub fn new(capacity_bytes: usize, credit: u64, window_bytes: u64, now: Instant) -> Self {
        Self {
            duplex: Duplex::new(capacity_bytes, credit, window_bytes),
            connections: 0,
            detached: Some(now),
            last_received: now,
        }
    }

    /// Creates an end that replaces a lost one; see [`Duplex::restored`].
    pub fn restored(
        capacity_bytes: usize,
        credit: u64,
        window_bytes: u64,
        received: (u64, u64),
        now: Instant,
    ) -> Self {
        Self {
            duplex: Duplex::restored(capacity_bytes, credit, window_bytes, received),
            connections: 0,
            detached: Some(now),
            last_received: now,
        }
    }

    /// Returns the outbox, to keep its journal.
    pub fn outbox_mut(&mut self) -> &mut Outbox {
        self.duplex.outbox_mut()
    }

    /// Continues with a peer whose end was lost and replaced; see [`Duplex::restore`]. A new
    /// connection must be [attached](Self::attach) before anything is sent.
    ///
    /// # Errors
    ///
    /// When a frame after `number` is not kept any more.
    pub fn restore(&mut self, number: u64) -> Result<(), ResumeError> {
        self.connections += 1;
        self.duplex.restore(number, 0)
    }

    /// Returns the outbox: the bodies that wait to be sent or acknowledged.
    pub fn outbox(&self) -> &Outbox {
        self.duplex.outbox()
    }

    /// Returns the inbox: how much was received and granted.
    pub fn inbox(&mut self) -> &mut Inbox {
        self.duplex.inbox()
    }

    /// Queues `body` for sending.
    pub fn push(&mut self, body: frame::Body) {
        self.duplex.push(body);
    }

    /// Drops all unacknowledged bodies; nothing more is sent.
    pub fn abandon(&mut self) {
        self.duplex.abandon();
    }

    /// Makes a new connection the latest. Its peer has received the frames up to `received`,
    /// and grants `credit` bytes in all.
    ///
    /// # Errors
    ///
    /// When `received` contradicts what was sent and acknowledged.
    pub fn attach(&mut self, received: u64, credit: u64) -> Result<Attached, ResumeError> {
        self.duplex.rewind(received, credit)?;
        self.connections += 1;
        self.detached = None;
        let (received, credit_bytes) = self.duplex.inbox().acknowledge();
        Ok(Attached {
            connection: Connection(self.connections),
            received,
            credit_bytes,
        })
    }

    /// Records that `connection` has ended. Returns `false`, and does nothing, if a later one
    /// has replaced it.
    pub fn detach(&mut self, connection: Connection, now: Instant) -> bool {
        let is_latest = self.is_latest(connection);
        if is_latest {
            self.detached = Some(now);
        }
        is_latest
    }

    /// Returns since when the channel has no connection, or `None` while it has one.
    pub fn detached(&self) -> Option<Instant> {
        self.detached
    }

    /// Returns the latest connection, if there was any.
    pub fn latest(&self) -> Option<Connection> {
        self.was_attached().then_some(Connection(self.connections))
    }

    /// Returns whether the channel ever had a connection.
    pub fn was_attached(&self) -> bool {
        self.connections > 0
    }

    /// Returns whether no later connection has replaced `connection`.
    pub fn is_latest(&self, connection: Connection) -> bool {
        connection.0 == self.connections
    }

    /// Returns when a frame was last received, or when the channel was made.
    pub fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Processes a frame that was received on `connection`.
    ///
    /// # Errors
    ///
    /// When the frame is malformed or breaks the numbering; the channel cannot go on after
    /// that, except after a [loss](FrameError::is_loss).
    pub fn receive(
        &mut self,
        connection: Connection,
        frame: Bytes,
        now: Instant,
    ) -> Result<Received, FrameError> {
        if !self.is_latest(connection) {
            return Ok(Received::Replaced);
        }
        self.last_received = now;
        Ok(match self.duplex.receive(frame)? {
            Some((body, bytes)) => Received::New(body, bytes),
            None => Received::Nothing,
        })
    }

    /// Returns the parts of the next frame to send, if there is one and the credit covers
    /// it. The caller must be the latest connection.
    pub fn next_frame(&mut self) -> Option<FrameParts> {
        self.duplex.next_to_send()
    }

    /// Returns the parts of the next frames to send, about 64 KiB in all. The caller must be
    /// the latest connection.
    pub fn next_frames(&mut self) -> Vec<FrameParts> {
        self.duplex.next_frames()
    }

    /// Returns what the writer is to do while there are no bodies to send: send a ping if an
    /// acknowledgement is due, or else wait, with or without a pending acknowledgement.
    pub fn acknowledgement(&mut self) -> Next {
        match self.duplex.inbox() {
            inbox if inbox.is_ack_due() => Next::Frames(vec![self.ping_now()]),
            inbox if inbox.has_pending_ack() => Next::PendingAck,
            _ => Next::Nothing,
        }
    }

    /// Returns a ping, which carries the acknowledgement, the credit, and the number of the
    /// last frame sent. Returns `None` if no acknowledgement is pending, unless `must` is true.
    /// Also returns `None` if a later connection has replaced `connection`: the contents of a
    /// ping count as sent, so a replaced connection must not take one.
    pub fn ping(&mut self, connection: Connection, must: bool) -> Option<FrameParts> {
        let is_due = must || self.duplex.inbox().has_pending_ack();
        (is_due && self.is_latest(connection)).then(|| self.ping_now())
    }

    fn ping_now(&mut self) -> FrameParts {
        [self.duplex.ping(), Bytes::new(), Bytes::new()]
    }
}
