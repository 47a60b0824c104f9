//! A framed, ordered, secured duplex between two processes.
//!
//! Laws, checked on every carrier by one suite (`tests/conformance`):
//!
//! 1. Frames arrive whole, in order and once, independently in both directions.
//! 2. A frame of up to [`MAX_FRAME_BYTES`] passes. The dialled side accepts only
//!    [`FIRST_FRAME_BYTES`] until it calls [`LinkReceiver::admit`]. [`LinkSender::send`]
//!    refuses a larger frame; if a peer sends one anyway, the link ends.
//! 3. After [`LinkSender::finish`] the peer receives all frames sent before, then `None`.
//!    It receives `None` in no other case. The other direction goes on.
//! 4. When the connection is lost, both calls end with an error; neither hangs for longer
//!    than [`IDLE_TIMEOUT`]. (TCP relies on the two kernels to detect the loss: a peer
//!    whose process is stopped does not count as lost.)
//! 5. `send` waits while the peer does not keep up, so memory is bounded.
//! 6. The side that dialled must send first; only then does the other side accept the
//!    link.
//! 7. Dropping a sender before it finished ends the link, with an error on the other
//!    side. Dropping a receiver leaves the sender working; the peer should then stop
//!    sending, as its `send` may fail or wait.

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

/// Largest frame that the dialled side accepts before [`LinkReceiver::admit`]. The frame
/// that opens a session has its lease's token, of about 100 bytes per device.
pub const FIRST_FRAME_BYTES: usize = 64 << 10;

/// Interval at which a carrier probes a silent connection.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// The protocol that carries a link.
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
    #[error("a frame of {0} bytes exceeds the limit of {MAX_FRAME_BYTES}")]
    TooLarge(usize),
    /// A frame is over the limit for a peer that was not admitted yet.
    #[error("a first frame of {0} bytes exceeds the limit of {FIRST_FRAME_BYTES}")]
    FirstTooLarge(usize),
}

impl LinkError {
    pub(crate) fn lost(reason: impl fmt::Display) -> Self {
        Self::Lost(reason.to_string())
    }
}

/// A link between two processes. Its two halves work independently.
#[derive(Debug)]
pub struct Link {
    /// The half that sends.
    pub sender: LinkSender,
    /// The half that receives.
    pub receiver: LinkReceiver,
    /// The carrier of the link.
    pub carrier: Carrier,
    /// The other side's address.
    pub peer: SocketAddr,
    /// The certificate whose private key the other side proved to have. `None` if the
    /// side that dialled showed no certificate.
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
    /// Sends one frame, given in parts that are joined on the way. Waits while the peer
    /// does not keep up. A cancelled call leaves the link usable; its frame may be lost
    /// or sent with the next one, but never in part.
    ///
    /// # Errors
    ///
    /// When the connection is lost or the frame is too large. A frame that is too large
    /// sends nothing and leaves the link usable.
    pub async fn send(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        self.send_each([parts].into_iter()).await
    }

    /// Sends frames as [`send`](Self::send) does, as one batch where the carrier can: with
    /// one system call and one or two wakeups. All frames are in memory meanwhile, so the
    /// caller must limit their size.
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

    /// Returns whether [`send_now`](Self::send_now) works on this link.
    pub fn can_send_now(&self) -> bool {
        match &self.0 {
            SenderKind::Tcp(_) => true,
            SenderKind::Quic(_) | SenderKind::Grpc(_) => false,
            SenderKind::Faulty(sender) => sender.can_send_now(),
        }
    }

    /// Sends frames without waiting, from any thread; works only where
    /// [`can_send_now`](Self::can_send_now) is true. Returns `false` if the kernel did not
    /// accept all bytes. The rest is kept and goes before the next frames;
    /// [`send_all`](Self::send_all) with no frames waits until it is sent.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and on links whose carrier cannot send without waiting.
    pub fn send_now(&mut self, frames: &[[Bytes; 3]]) -> Result<bool, LinkError> {
        let frames = frames.iter().map(<[Bytes; 3]>::as_slice);
        check_sizes(frames.clone())?;
        match &mut self.0 {
            SenderKind::Tcp(sender) => sender.send_now(frames),
            SenderKind::Faulty(sender) if sender.can_send_now() => {
                sender.send_now(frames).map(|()| true)
            }
            SenderKind::Quic(_) | SenderKind::Grpc(_) | SenderKind::Faulty(_) => {
                Err(LinkError::lost("its carrier sends nothing without a wait"))
            }
        }
    }

    /// Limits the bytes that the kernel holds as sent but not acknowledged, on carriers
    /// that support it (TCP). The kernel treats this as a hint.
    pub fn limit_in_flight(&self, bytes: usize) {
        if let SenderKind::Tcp(sender) = &self.0 {
            sender.limit_in_flight(bytes);
        }
    }

    /// Ends the sending direction, and waits until the carrier has taken all frames or
    /// [`IDLE_TIMEOUT`] has passed. A peer that reads nothing for that long may lose the
    /// rest.
    pub async fn finish(self) {
        match self.0 {
            SenderKind::Quic(sender) => sender.finish().await,
            SenderKind::Grpc(sender) => sender.finish().await,
            SenderKind::Tcp(sender) => sender.finish().await,
            SenderKind::Faulty(sender) => sender.finish().await,
        }
    }
}

/// Polls `future` once and returns its output if it is ready.
pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        // The next caller polls the source again, with a real waker.
        Poll::Pending => None,
    }
}

fn check_sizes<'a>(mut frames: impl Iterator<Item = &'a [Bytes]>) -> Result<(), LinkError> {
    let size = |parts: &[Bytes]| parts.iter().map(Bytes::len).sum::<usize>();
    let over = frames.find_map(|parts| Some(size(parts)).filter(|&size| size > MAX_FRAME_BYTES));
    over.map_or(Ok(()), |size| Err(LinkError::TooLarge(size)))
}

/// Checks the size of a received frame against `limit`, which is either
/// [`FIRST_FRAME_BYTES`] or [`MAX_FRAME_BYTES`].
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
    /// Returns the next frame, or `None` when the peer has finished. Cancel safe: no part
    /// of a frame is lost. After the end, every call returns the same result.
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

    /// Admits the peer: frames of up to [`MAX_FRAME_BYTES`] are accepted from now on. A
    /// link that is not admitted within five seconds is closed, earlier if other
    /// connections wait. No effect on the side that dialled, or when called again.
    ///
    /// # Errors
    ///
    /// When the listener already has its maximum number of admitted links.
    pub fn admit(&mut self) -> Result<(), LinkError> {
        let admitted = match &mut self.0 {
            ReceiverKind::Quic(receiver) => receiver.admit(),
            ReceiverKind::Grpc(receiver) => receiver.admit(),
            ReceiverKind::Tcp(receiver) => receiver.admit(),
            ReceiverKind::Faulty(receiver) => return receiver.admit(),
        };
        admitted.map_err(LinkError::lost)
    }

    /// Returns what [`recv`](Self::recv) would return without waiting, if anything.
    pub fn try_recv(&mut self) -> Option<Result<Option<Bytes>, LinkError>> {
        poll_once(self.recv())
    }
}
