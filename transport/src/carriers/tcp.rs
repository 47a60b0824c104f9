//! The TCP carrier: length-prefixed frames in TLS, and nothing else.
//!
//! This carrier costs both processes the least time. QUIC does in the process, packet by
//! packet, what the kernel does for TCP many packets at a time, and HTTP/2 adds a layer
//! of flow control and copies. Both also have tasks of their own to wake, while any
//! thread that has something to send can write to a socket ([`Sender::send_now`]).
//!
//! A TCP link sends no probes of its own: the kernel detects a dead network, and the
//! users of a link send frames from time to time anyway.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::{Buf, Bytes};
use socket2::{SockRef, Socket, TcpKeepalive};
use tokio::{
    io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split},
    net::TcpStream,
    sync::mpsc,
    task::unconstrained,
    time::timeout,
};
use tokio_rustls::TlsStream;
use tracing::debug;

use super::{
    Halves, IDLE_TIMEOUT, KEEP_ALIVE, LinkError, SETUP_DEADLINE,
    framing::{self, FrameDecoder},
    poll_once,
};
use crate::{
    admission::AdmissionLimitError,
    control::{self, FrameConnection},
    dial::error::DialError,
    gate::GateEntry,
    tls::{ALPN_FRAMES, PeerCertificate, TlsOptions},
};

/// Limit on the bytes that TLS buffers: how much is encrypted before the socket is
/// written to.
const TLS_BUFFER_BYTES: usize = 256 << 10;

/// Dials `address`, an address of `host`.
pub(crate) async fn dial(
    address: SocketAddr,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<Halves<Sender, Receiver>, DialError> {
    let at = address.to_string();
    let stream = control::connect_tls(&at, host, tls_options, ALPN_FRAMES).await?;
    link_over(stream.into(), address, FrameDecoder::dialled(), None)
        .map_err(|e| DialError::unreachable(address, &e))
}

/// Creates the link on a stream whose handshake is done. The link holds `gate_entry` while it
/// lives.
fn link_over(
    mut stream: TlsStream<TcpStream>,
    peer: SocketAddr,
    decoder: FrameDecoder,
    gate_entry: Option<GateEntry>,
) -> io::Result<Halves<Sender, Receiver>> {
    match &mut stream {
        TlsStream::Client(stream) => stream.get_mut().1.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
        TlsStream::Server(stream) => stream.get_mut().1.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
    }
    let certificate = PeerCertificate::of(stream.get_ref().1.peer_certificates());
    let socket = SockRef::from(stream.get_ref().0);
    enable_keepalive(&socket);
    let owner = Arc::new(ConnectionOwner {
        socket: socket.try_clone()?,
        dropped_reader: Mutex::default(),
        gate_entry,
    });
    let (reader, writer) = split(stream);
    let sender = Sender {
        stream: writer,
        unsent: Vec::new(),
        finished: false,
        owner: owner.clone(),
    };
    let receiver = Receiver {
        stream: Some(reader),
        decoder,
        owner,
    };
    Ok(Halves {
        sender,
        receiver,
        peer,
        certificate,
    })
}

/// Runs an accepted connection that negotiated frames. Its first bytes must arrive within
/// [`SETUP_DEADLINE`]; then the link goes to `accepted`. Closes the connection if it is
/// expelled before it is admitted, also after the link was passed on.
pub(crate) async fn accept<L: From<Halves<Sender, Receiver>>>(
    connection: FrameConnection,
    accepted: mpsc::Sender<L>,
) {
    let FrameConnection {
        stream,
        peer,
        gate_entry,
    } = connection;
    let mut watch = gate_entry.watch();
    let decoder = FrameDecoder::accepted();
    let mut halves = match link_over(stream.into(), peer, decoder, Some(gate_entry)) {
        Ok(halves) => halves,
        Err(e) => return debug!(%peer, "TCP link failed: {e}"),
    };
    match timeout(SETUP_DEADLINE, halves.receiver.read_more()).await {
        Ok(Ok(true)) => {
            let owner = Arc::downgrade(&halves.receiver.owner);
            // An error means that the listener was dropped, and the link with it.
            let _ = accepted.send(halves.into()).await;
            // The server can only end when every clone of `accepted` is dropped.
            drop(accepted);
            if watch.wait_until_expelled().await
                && let Some(owner) = owner.upgrade()
            {
                owner.close();
            }
        }
        Ok(Ok(false)) => debug!(%peer, "TCP link ended before its first frame"),
        Ok(Err(e)) => debug!(%peer, "TCP link failed: {e}"),
        Err(_) => debug!(%peer, "the TCP link sent nothing for {SETUP_DEADLINE:?}"),
    }
}

/// Enables the kernel's keepalive probes. Best effort: the users of links detect a dead
/// peer, too.
fn enable_keepalive(socket: &SockRef<'_>) {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEP_ALIVE)
        .with_interval(KEEP_ALIVE);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

impl Sender {
    /// See [`LinkSender::limit_in_flight`](crate::link::LinkSender::limit_in_flight).
    pub(crate) fn limit_in_flight(&self, bytes: usize) {
        // Linux doubles the value, to cover its own bookkeeping. If the call fails, the
        // kernel's own limit stays.
        let _ = self.owner.socket.set_send_buffer_size(bytes);
    }
}

/// State shared by the halves of a link.
#[derive(Debug)]
struct ConnectionOwner {
    /// A second handle of the socket, to close the connection whatever the halves do.
    socket: Socket,
    /// The reading half, once its receiver was dropped.
    dropped_reader: Mutex<Option<ReadHalf<TlsStream<TcpStream>>>>,
    gate_entry: Option<GateEntry>,
}

impl ConnectionOwner {
    fn close(&self) {
        // An error means that the socket is closed already.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    fn dropped_reader(&self) -> MutexGuard<'_, Option<ReadHalf<TlsStream<TcpStream>>>> {
        self.dropped_reader
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Sender {
    stream: WriteHalf<TlsStream<TcpStream>>,
    /// Unsent rest of the latest frames, after a cancelled `send` or an incomplete
    /// `send_now`.
    unsent: Vec<Bytes>,
    finished: bool,
    owner: Arc<ConnectionOwner>,
}

impl Sender {
    pub(crate) async fn send<'a>(
        &mut self,
        frames: impl Iterator<Item = &'a [Bytes]>,
    ) -> Result<(), LinkError> {
        self.flush().await?;
        framing::queue_frames(&mut self.unsent, frames);
        self.flush().await
    }

    /// See [`LinkSender::send_now`](crate::link::LinkSender::send_now).
    pub(crate) fn send_now<'a>(
        &mut self,
        frames: impl Iterator<Item = &'a [Bytes]>,
    ) -> Result<bool, LinkError> {
        framing::queue_frames(&mut self.unsent, frames);
        // A task that has used up its cooperative budget would get `Pending`.
        let flush = unconstrained(self.flush());
        poll_once(flush).map_or(Ok(false), |flushed| flushed.map(|()| true))
    }

    async fn flush(&mut self) -> Result<(), LinkError> {
        write_all(&mut self.stream, &mut self.unsent)
            .await
            .map_err(LinkError::lost)
    }

    pub(crate) async fn finish(mut self) {
        let delivered = async {
            if self.flush().await.is_ok() {
                self.finished = self.stream.shutdown().await.is_ok();
            }
            // If a socket is closed with unread bytes, the connection is reset, and the
            // peer loses what is still in flight.
            let dropped_reader = self.owner.dropped_reader().take();
            if let Some(mut dropped_reader) = dropped_reader {
                let _ = tokio::io::copy(&mut dropped_reader, &mut tokio::io::sink()).await;
            }
        };
        let _ = timeout(IDLE_TIMEOUT, delivered).await;
    }
}

/// Writes and flushes `parts`, removing from them what was written.
async fn write_all(
    stream: &mut (impl AsyncWrite + Unpin),
    parts: &mut Vec<Bytes>,
) -> io::Result<()> {
    while !parts.is_empty() {
        let slices: Vec<_> = parts.iter().map(|part| io::IoSlice::new(part)).collect();
        let mut written = stream.write_vectored(&slices).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        parts.retain_mut(|part| {
            let gone = part.len().min(written);
            part.advance(gone);
            written -= gone;
            !part.is_empty()
        });
    }
    stream.flush().await
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The peer then receives no close_notify of TLS, and treats the end as a loss.
        if !self.finished {
            self.owner.close();
        }
    }
}

#[derive(Debug)]
pub(crate) struct Receiver {
    /// Taken by `drop`.
    stream: Option<ReadHalf<TlsStream<TcpStream>>>,
    decoder: FrameDecoder,
    owner: Arc<ConnectionOwner>,
}

impl Receiver {
    /// See [`LinkReceiver::admit`](crate::link::LinkReceiver::admit).
    pub(crate) fn admit(&mut self) -> Result<(), AdmissionLimitError> {
        if let Some(gate_entry) = &self.owner.gate_entry {
            gate_entry.admit(false)?;
        }
        self.decoder.admit();
        Ok(())
    }

    /// See [`LinkReceiver::partial_bytes`](crate::link::LinkReceiver::partial_bytes).
    pub(crate) fn partial_bytes(&self) -> usize {
        self.decoder.partial_bytes()
    }

    pub(crate) async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) => return Ok(Some(frame)),
                Ok(None) => {}
                Err(error) => {
                    self.owner.close();
                    return Err(error);
                }
            }
            if !self.read_more().await? {
                return self.decoder.end();
            }
        }
    }

    /// Waits for more bytes. Returns `false` if the peer has finished.
    pub(crate) async fn read_more(&mut self) -> Result<bool, LinkError> {
        let stream = self
            .stream
            .as_mut()
            .expect("the field is taken only on drop");
        let read = stream.read_buf(&mut self.decoder.read_buffer()).await;
        Ok(read.map_err(LinkError::lost)? > 0)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        *self.owner.dropped_reader() = self.stream.take();
    }
}
