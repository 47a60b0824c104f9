//! A framed, ordered, secured duplex between two processes.
//!
//! Laws, checked on every carrier by one suite (`tests/conformance`):
//!
//! 1. Frames arrive whole, in order, once, in both directions independently.
//! 2. A frame of up to [`MAX_FRAME_BYTES`] passes, or up to [`FIRST_FRAME_BYTES`] to the
//!    side that was dialled until it calls [`LinkReceiver::admit`]; a larger one is refused by
//!    [`LinkSender::send`] and, when a peer sends it anyway, ends the link.
//! 3. After [`LinkSender::finish`] the peer gets all frames sent before, then
//!    `None`; it gets `None` in no other case. The other direction goes on.
//! 4. When the connection is lost, both calls end with an error; neither
//!    hangs for longer than [`IDLE_TIMEOUT`]. (TCP leaves it to the two systems
//!    to notice: a peer whose process stands still is not lost to it.)
//! 5. `send` waits while the peer does not keep up: memory is bounded.
//! 6. The side that dialled must send first; the other learns of the link then.
//! 7. A sender that is dropped before it finished ends the link, with an error
//!    on the other side. A receiver that is dropped leaves the sender working;
//!    the peer should stop sending then, as its `send` may fail or wait.

use std::{
    fmt,
    net::SocketAddr,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::MAX_FRAME_BYTES;

use crate::{faults, grpc, quic, tcp, tls::Fingerprint};

/// How long a silent connection is kept before it counts as lost.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest frame that the side that was dialled takes before [`LinkReceiver::admit`]. The
/// frame that opens a session has the token of its lease, of some 100 bytes a device.
pub const FIRST_FRAME_BYTES: usize = 64 << 10;

/// How often a carrier probes a silent connection.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// What carries a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// A QUIC stream.
    Quic,
    /// A gRPC stream.
    Grpc,
    /// A TLS stream over TCP.
    Tcp,
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quic => "QUIC",
            Self::Grpc => "gRPC",
            Self::Tcp => "TCP",
        })
    }
}

/// Why a link ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The connection broke or fell silent.
    #[error("the connection was lost: {0}")]
    Lost(String),
    /// A frame is over the limit.
    #[error("a frame of {0} bytes is over the limit of {MAX_FRAME_BYTES}")]
    TooLarge(usize),
    /// A frame is over the limit for a peer that was not admitted yet.
    #[error("a first frame of {0} bytes is over the limit of {FIRST_FRAME_BYTES}")]
    FirstTooLarge(usize),
}

impl LinkError {
    pub(crate) fn lost(reason: impl fmt::Display) -> Self {
        Self::Lost(reason.to_string())
    }
}

/// One link; its halves work independently.
#[derive(Debug)]
pub struct Link {
    /// The half that sends.
    pub sender: LinkSender,
    /// The half that receives.
    pub receiver: LinkReceiver,
    /// What carries it.
    pub carrier: Carrier,
    /// The other side's address.
    pub peer: SocketAddr,
    /// The certificate whose key the other side proved to have. A side that dialled may
    /// have shown none.
    pub certificate: Option<Fingerprint>,
}

/// The sending half. Dropping it before [`finish`](Self::finish) ends the link
/// and may lose frames not yet delivered.
#[derive(Debug)]
pub struct LinkSender(pub(crate) SenderKind);

#[derive(Debug)]
pub(crate) enum SenderKind {
    Quic(quic::Sender),
    Grpc(grpc::Sender),
    Tcp(tcp::Sender),
    Faulty(faults::Sender),
}

impl LinkSender {
    /// Sends one frame, given in parts that are joined on the way. Waits while
    /// the peer does not keep up. A call that is cancelled leaves the link
    /// usable; its frame may be lost, or sent with the next one, but never in
    /// part.
    ///
    /// # Errors
    ///
    /// When the connection is lost or the frame too large; the latter sends
    /// nothing and leaves the link usable.
    pub async fn send(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        self.send_each([parts].into_iter()).await
    }

    /// Sends frames as [`send`](Self::send) does, in one go where the carrier can:
    /// a system call and a wake or two for all of them. They are in memory for
    /// as long, so the caller bounds them.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub async fn send_all(&mut self, frames: &[[Bytes; 3]]) -> Result<(), LinkError> {
        self.send_each(frames.iter().map(<[Bytes; 3]>::as_slice))
            .await
    }

    async fn send_each<'a>(
        &mut self,
        frames: impl Iterator<Item = &'a [Bytes]> + Clone,
    ) -> Result<(), LinkError> {
        check_sizes(frames.clone())?;
        match &mut self.0 {
            SenderKind::Quic(sender) => return sender.send(frames).await,
            SenderKind::Tcp(sender) => return sender.send(frames).await,
            SenderKind::Grpc(sender) => {
                for parts in frames {
                    sender.send(parts).await?;
                }
            }
            SenderKind::Faulty(sender) => {
                sender.check()?;
                for parts in frames {
                    sender.send(parts).await?;
                }
            }
        }
        Ok(())
    }

    /// Whether [`send_now`](Self::send_now) works on this link.
    pub fn sends_now(&self) -> bool {
        match &self.0 {
            SenderKind::Tcp(_) => true,
            SenderKind::Quic(_) | SenderKind::Grpc(_) => false,
            SenderKind::Faulty(sender) => sender.sends_now(),
        }
    }

    /// Sends frames without a wait, on any thread, where [`sends_now`](Self::sends_now)
    /// says so. False: the system did not take all of them. The rest is kept, and goes
    /// before what is sent next; [`send_all`](Self::send_all) of nothing waits for it.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and on links that cannot.
    pub fn send_now(&mut self, frames: &[[Bytes; 3]]) -> Result<bool, LinkError> {
        let frames = frames.iter().map(<[Bytes; 3]>::as_slice);
        check_sizes(frames.clone())?;
        match &mut self.0 {
            SenderKind::Tcp(sender) => sender.send_now(frames),
            SenderKind::Faulty(sender) if sender.sends_now() => {
                sender.send_now(frames).map(|()| true)
            }
            SenderKind::Quic(_) | SenderKind::Grpc(_) | SenderKind::Faulty(_) => {
                Err(LinkError::lost("its carrier sends nothing without a wait"))
            }
        }
    }

    /// Bounds what the system holds of what was sent and not confirmed, in bytes, where
    /// the carrier lets it. The system takes it for about what it is.
    pub fn bound_flight(&self, bytes: usize) {
        if let SenderKind::Tcp(sender) = &self.0 {
            sender.bound_flight(bytes);
        }
    }

    /// Says that no more frames come, and waits until the carrier has taken all
    /// of them or [`IDLE_TIMEOUT`] passed. A peer that reads nothing for that
    /// long may lose the rest.
    pub async fn finish(self) {
        match self.0 {
            SenderKind::Quic(sender) => sender.finish().await,
            SenderKind::Grpc(sender) => sender.finish().await,
            SenderKind::Tcp(sender) => sender.finish().await,
            SenderKind::Faulty(sender) => sender.finish().await,
        }
    }
}

/// What a future that does not wait comes to.
pub(crate) fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        // Whoever waits for it asks again, with a waker.
        Poll::Pending => None,
    }
}

fn check_sizes<'a>(mut frames: impl Iterator<Item = &'a [Bytes]>) -> Result<(), LinkError> {
    let size = |parts: &[Bytes]| parts.iter().map(Bytes::len).sum::<usize>();
    let over = frames.find_map(|parts| Some(size(parts)).filter(|&size| size > MAX_FRAME_BYTES));
    over.map_or(Ok(()), |size| Err(LinkError::TooLarge(size)))
}

/// Refuses what a peer sends for its size: `limit` is that of a first frame, or of any.
pub(crate) fn check_received(size: usize, limit: usize) -> Result<(), LinkError> {
    match size {
        size if size <= limit => Ok(()),
        size if limit < MAX_FRAME_BYTES => Err(LinkError::FirstTooLarge(size)),
        size => Err(LinkError::TooLarge(size)),
    }
}

/// The receiving half.
#[derive(Debug)]
pub struct LinkReceiver(pub(crate) ReceiverKind);

#[derive(Debug)]
pub(crate) enum ReceiverKind {
    Quic(quic::Receiver),
    Grpc(grpc::Receiver),
    Tcp(tcp::Receiver),
    Faulty(faults::Receiver),
}

impl LinkReceiver {
    /// The next frame, or `None` when the peer finished. Safe to cancel: no
    /// part of a frame is lost. After the end, every call says the same.
    ///
    /// # Errors
    ///
    /// When the connection is lost or the peer breaks the framing.
    pub async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        match &mut self.0 {
            ReceiverKind::Quic(receiver) => receiver.recv().await,
            ReceiverKind::Grpc(receiver) => receiver.recv().await,
            ReceiverKind::Tcp(receiver) => receiver.recv().await,
            ReceiverKind::Faulty(receiver) => receiver.recv().await,
        }
    }

    /// Takes frames of any size from here on, as the peer has shown that it may send them.
    /// A link that is not admitted within five seconds is closed. No effect on the side
    /// that dialled, and the second time.
    ///
    /// # Errors
    ///
    /// When the listener has as many links as it may.
    pub fn admit(&mut self) -> Result<(), LinkError> {
        let admitted = match &mut self.0 {
            ReceiverKind::Quic(receiver) => receiver.admit(),
            ReceiverKind::Grpc(receiver) => receiver.admit(),
            ReceiverKind::Tcp(receiver) => receiver.admit(),
            ReceiverKind::Faulty(receiver) => return receiver.admit(),
        };
        admitted.map_err(LinkError::lost)
    }

    /// What [`recv`](Self::recv) has to say without a wait.
    pub fn arrived(&mut self) -> Option<Result<Option<Bytes>, LinkError>> {
        now(self.recv())
    }
}
