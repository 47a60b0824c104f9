//! A framed, ordered, secured duplex between two processes.
//!
//! Laws, checked on every carrier by one suite (`tests/conformance`):
//!
//! 1. Frames arrive whole, in order and once, independently in both directions.
//! 2. A frame of up to [`MAX_FRAME_BYTES`](tensord_proto::MAX_FRAME_BYTES) passes. The
//!    dialled side accepts only [`FIRST_FRAME_BYTES`] until it calls
//!    [`LinkReceiver::admit`]. [`LinkSender::send`] refuses a larger frame; if a peer sends
//!    one anyway, the link ends.
//! 3. After [`LinkSender::finish`] the peer receives all frames sent before, then `None`.
//!    It receives `None` in no other case. The other direction goes on.
//! 4. When the connection is lost, `send` and `recv` end with an error; neither hangs for
//!    longer than [`IDLE_TIMEOUT`]. (TCP relies on the two kernels to detect the loss: a
//!    peer whose process is stopped does not count as lost.)
//! 5. `send` waits while the peer does not keep up, so memory is bounded.
//! 6. The side that dialled must send first; only then does the other side accept the
//!    link.
//! 7. Dropping a sender before it finished ends the link, with an error on the other
//!    side. Dropping a receiver leaves the sender working; the peer should then stop
//!    sending, as its `send` may fail or wait.

use std::net::SocketAddr;

use bytes::Bytes;

pub use crate::carriers::{Carrier, FIRST_FRAME_BYTES, IDLE_TIMEOUT, LinkError};
use crate::{
    carriers::{Halves, check_sizes, faulty, grpc, poll_once, quic, tcp},
    faults::FaultSwitch,
    tls::PeerCertificate,
};

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
    pub certificate: Option<PeerCertificate>,
}

impl Link {
    /// Puts the link under the control of `faults`. For tests.
    pub fn with_faults(self, faults: &FaultSwitch) -> Self {
        let (sender, receiver) = faulty::wrap(self.sender, self.receiver, faults);
        Self {
            sender: LinkSender(SenderKind::Faulty(sender)),
            receiver: LinkReceiver(ReceiverKind::Faulty(receiver)),
            ..self
        }
    }
}

/// Makes a link of the halves of one carrier.
macro_rules! link_from_halves {
    ($($module:ident: $carrier:ident),*) => {$(
        impl From<Halves<$module::Sender, $module::Receiver>> for Link {
            fn from(halves: Halves<$module::Sender, $module::Receiver>) -> Self {
                Self {
                    sender: LinkSender(SenderKind::$carrier(halves.sender)),
                    receiver: LinkReceiver(ReceiverKind::$carrier(halves.receiver)),
                    carrier: Carrier::$carrier,
                    peer: halves.peer,
                    certificate: halves.certificate,
                }
            }
        }
    )*};
}

link_from_halves!(quic: Quic, grpc: Grpc, tcp: Tcp);

/// The sending half. Dropping it before [`finish`](Self::finish) ends the link
/// and may lose frames not yet delivered.
#[derive(Debug)]
pub struct LinkSender(SenderKind);

#[derive(Debug)]
enum SenderKind {
    Quic(quic::Sender),
    Grpc(grpc::Sender),
    Tcp(tcp::Sender),
    Faulty(faulty::Sender),
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

/// The receiving half.
#[derive(Debug)]
pub struct LinkReceiver(ReceiverKind);

#[derive(Debug)]
enum ReceiverKind {
    Quic(quic::Receiver),
    Grpc(grpc::Receiver),
    Tcp(tcp::Receiver),
    Faulty(faulty::Receiver<LinkReceiver>),
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

    /// Returns how many bytes have arrived of a frame that is not complete. Always 0 over gRPC,
    /// whose library passes on whole messages only.
    pub(crate) fn partial_bytes(&self) -> usize {
        match &self.0 {
            ReceiverKind::Quic(receiver) => receiver.partial_bytes(),
            ReceiverKind::Grpc(_) => 0,
            ReceiverKind::Tcp(receiver) => receiver.partial_bytes(),
            ReceiverKind::Faulty(receiver) => receiver.partial_bytes(),
        }
    }

    /// Admits the peer: frames of up to
    /// [`MAX_FRAME_BYTES`](tensord_proto::MAX_FRAME_BYTES) are accepted from now on. A link
    /// that is not admitted within five seconds is closed, earlier if other connections
    /// wait. No effect on the side that dialled, or when called again.
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

    /// Returns the result of [`recv`](Self::recv) if it is ready, or `None` if `recv`
    /// would wait.
    pub fn try_recv(&mut self) -> Option<Result<Option<Bytes>, LinkError>> {
        poll_once(self.recv())
    }
}

impl faulty::InnerSender for LinkSender {
    fn can_send_now(&self) -> bool {
        self.can_send_now()
    }

    fn send<'a>(&'a mut self, parts: &'a [Bytes]) -> faulty::BoxFuture<'a, Result<(), LinkError>> {
        Box::pin(self.send(parts))
    }

    fn finish(self) -> faulty::BoxFuture<'static, ()> {
        Box::pin(self.finish())
    }
}

impl faulty::InnerReceiver for LinkReceiver {
    fn recv(&mut self) -> faulty::BoxFuture<'_, Result<Option<Bytes>, LinkError>> {
        Box::pin(self.recv())
    }

    fn partial_bytes(&self) -> usize {
        self.partial_bytes()
    }

    fn admit(&mut self) -> Result<(), LinkError> {
        self.admit()
    }
}
