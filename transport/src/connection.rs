//! A TLS stream that can be closed from elsewhere.
//!
//! The HTTP/2 stack owns its streams and the tasks that drive them. A link that is
//! dropped, or a server that stops, must end them at once. The stack itself would end
//! them later, and never while the peer does not read.

use std::{
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::mpsc,
    time::{Sleep, sleep},
};
use tonic::transport::server::Connected;

use crate::{
    admission::AdmissionLimitError, allowance::Allowance, carriers::IDLE_TIMEOUT, gate::GateEntry,
    tls::PeerCertificate,
};

/// Maximum number of bytes in one read from a peer that is not admitted.
const SCRATCH_BYTES: usize = 4 << 10;

/// A TLS stream, the bytes read ahead of it, and the means to close it.
pub(crate) struct Connection<S> {
    stream: S,
    /// Bytes read before the stack took over, returned first.
    read_ahead: Bytes,
    /// Number of bytes received before the peer was admitted.
    unadmitted_bytes: usize,
    peer_handle: PeerHandle,
    close_requests: mpsc::Receiver<()>,
    closed: bool,
    /// Deadline for the peer to close the connection, set once this side has shut down
    /// its writes.
    linger_timeout: Option<Pin<Box<Sleep>>>,
}

/// What is known of a connection's peer after the handshake.
#[derive(Debug)]
pub(crate) struct PeerInfo {
    pub(crate) address: SocketAddr,
    /// The certificate whose private key the peer proved to have.
    pub(crate) certificate: Option<PeerCertificate>,
    /// Set on the accepting side.
    pub(crate) gate_entry: Option<GateEntry>,
}

/// A connection's peer, with the means to admit it and to close the connection.
#[derive(Debug, Clone)]
pub(crate) struct PeerHandle {
    pub(crate) peer: SocketAddr,
    /// The certificate whose private key the peer proved to have.
    pub(crate) certificate: Option<PeerCertificate>,
    pub(crate) closer: Closer,
    allowance: Arc<Allowance>,
    /// Set on the accepting side.
    gate_entry: Option<Arc<GateEntry>>,
}

impl PeerHandle {
    /// Admits the peer: from now on everything that it sends is read.
    ///
    /// # Errors
    ///
    /// When no place is free for the peer.
    pub(crate) fn admit(&self, reserved: bool) -> Result<(), AdmissionLimitError> {
        if let Some(gate_entry) = &self.gate_entry {
            gate_entry.admit(reserved)?;
        }
        self.allowance.lift();
        Ok(())
    }

    /// Returns the limit on what the peer may send before it is admitted.
    pub(crate) fn allowance(&self) -> Arc<Allowance> {
        self.allowance.clone()
    }
}

/// Closes a connection.
#[derive(Clone)]
pub(crate) struct Closer(mpsc::Sender<()>);

impl Closer {
    /// Closes the connection at once; bytes not sent yet are lost.
    pub(crate) fn close(&self) {
        // A full or closed channel means that the connection was closed before.
        let _ = self.0.try_send(());
    }

    /// Waits until either side has closed the connection.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Closer")
    }
}

impl<S> Connection<S> {
    /// Creates a connection to `peer` on `stream`, from which `read_ahead` was read already.
    /// If `peer` has a gate entry, as on the accepting side, only a limited number of bytes
    /// is read until the peer is admitted.
    pub(crate) fn new(stream: S, read_ahead: Bytes, peer: PeerInfo) -> Self {
        let (closer, close_requests) = mpsc::channel(1);
        let PeerInfo {
            address,
            certificate,
            gate_entry,
        } = peer;
        let allowance = match gate_entry {
            Some(_) => Allowance::default(),
            None => Allowance::unbounded(),
        };
        let peer_handle = PeerHandle {
            peer: address,
            certificate,
            closer: Closer(closer),
            allowance: Arc::new(allowance),
            gate_entry: gate_entry.map(Arc::new),
        };
        Self {
            stream,
            read_ahead,
            unadmitted_bytes: 0,
            peer_handle,
            close_requests,
            closed: false,
            linger_timeout: None,
        }
    }

    pub(crate) fn peer(&self) -> PeerHandle {
        self.peer_handle.clone()
    }

    pub(crate) fn closer(&self) -> Closer {
        self.peer_handle.closer.clone()
    }

    /// Returns an error once the connection was closed. Every call of the stack checks
    /// this, as the stack may be waiting to read or to write.
    fn check_open(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.closed |= self.close_requests.poll_recv(cx).is_ready();
        if self.closed {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "closed on this side",
            ));
        }
        Ok(())
    }

    /// Reads at most `room` bytes.
    fn poll_read_limited(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        room: usize,
    ) -> Poll<io::Result<()>>
    where
        S: AsyncRead + Unpin,
    {
        let mut scratch = [0; SCRATCH_BYTES];
        let size = room.min(buf.remaining()).min(scratch.len());
        let mut some = ReadBuf::new(&mut scratch[..size]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut some))?;
        self.unadmitted_bytes += some.filled().len();
        buf.put_slice(some.filled());
        Poll::Ready(Ok(()))
    }

    /// Reads and discards bytes until the peer closes the connection.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()>
    where
        S: AsyncRead + Unpin,
    {
        let mut scratch = [0; 1024];
        loop {
            let mut buf = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf)) {
                Ok(()) if !buf.filled().is_empty() => {}
                _ => return Poll::Ready(()),
            }
        }
    }
}

impl<S> Connected for Connection<S> {
    type ConnectInfo = PeerHandle;

    fn connect_info(&self) -> PeerHandle {
        self.peer_handle.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_open(cx)?;
        if self.read_ahead.is_empty() {
            let room = self
                .peer_handle
                .allowance
                .poll_room(cx, self.unadmitted_bytes);
            return match ready!(room) {
                Some(room) => self.poll_read_limited(cx, buf, room),
                None => Pin::new(&mut self.stream).poll_read(cx, buf),
            };
        }
        let size = self.read_ahead.len().min(buf.remaining());
        buf.put_slice(&self.read_ahead[..size]);
        self.read_ahead.advance(size);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_open(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_open(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_open(cx)?;
        if self.linger_timeout.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
            self.linger_timeout = Some(Box::pin(sleep(IDLE_TIMEOUT)));
        }
        // If a socket is closed with unread bytes, the connection is reset, and the peer
        // loses what it has not read yet.
        let over = self
            .linger_timeout
            .as_mut()
            .is_some_and(|l| l.as_mut().poll(cx).is_ready());
        match over {
            true => Poll::Ready(Ok(())),
            false => self.poll_discard(cx).map(Ok),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_open(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
