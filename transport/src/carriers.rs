//! What carries a link: TCP, QUIC or gRPC.
//!
//! Each carrier has a file of its own, which dials or accepts a connection and returns the
//! [`Halves`] of a link on it. This file has what they share. The laws that they follow are
//! in [`link`](crate::link), which combines them into one type; no carrier knows that type
//! or another carrier.

pub(crate) mod faulty;
mod framing;
pub(crate) mod grpc;
pub(crate) mod quic;
pub(crate) mod tcp;

use std::{
    fmt,
    net::SocketAddr,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::MAX_FRAME_BYTES;

use crate::tls::PeerCertificate;

/// Time limit for what a new peer sends first: the start of a frame over TCP or QUIC, a
/// whole frame over gRPC. It begins after the TLS handshake, but on QUIC with the
/// connection.
pub(crate) const SETUP_DEADLINE: Duration = Duration::from_secs(4);

/// How long a silent connection is kept before it counts as lost.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest frame that the dialled side accepts before
/// [`LinkReceiver::admit`](crate::LinkReceiver::admit). The frame that opens a session has
/// its lease's token, of about 100 bytes per device.
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

/// The halves of a link on a connection of one carrier.
#[derive(Debug)]
pub(crate) struct Halves<S, R> {
    pub(crate) sender: S,
    pub(crate) receiver: R,
    /// The other side's address.
    pub(crate) peer: SocketAddr,
    /// The certificate whose private key the other side proved to have.
    pub(crate) certificate: Option<PeerCertificate>,
}

/// Polls `future` once and returns its output if it is ready.
pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        // The next caller polls the source again, with a real waker.
        Poll::Pending => None,
    }
}

pub(crate) fn check_sizes<'a>(
    mut frames: impl Iterator<Item = &'a [Bytes]>,
) -> Result<(), LinkError> {
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
