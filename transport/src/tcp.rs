//! The TCP carrier: length-prefixed frames in TLS, and nothing else.
//!
//! It takes the least of both processes. QUIC does here, packet by packet, what the
//! system does for TCP many packets at a time, and HTTP/2 adds a layer of flow control
//! and copies. Both have tasks of their own to wake, too, where a socket is written to
//! by whoever has something to say ([`Sender::send_now`]).
//!
//! A link of it has no probes of its own: the system notices a dead network, and
//! whoever uses a link says something from time to time anyway.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
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
use tokio_rustls::{TlsStream, server};
use tracing::debug;

use crate::{
    admission::Full,
    control,
    dial::DialError,
    framing::{self, Incoming},
    gate::GateEntry,
    link::{
        self, Carrier, IDLE_TIMEOUT, KEEP_ALIVE, Link, LinkError, LinkReceiver, LinkSender,
        ReceiverKind, SenderKind,
    },
    tls::{ALPN_FRAMES, Terms, shown},
};

/// Plaintext that TLS may hold: what is encrypted before the socket is asked.
const TLS_BUFFER_BYTES: usize = 256 << 10;

/// Dials `address`, where `host` is.
pub(crate) async fn dial(
    address: SocketAddr,
    host: &str,
    terms: &Terms,
) -> Result<Link, DialError> {
    let at = address.to_string();
    let stream = control::connect_tls(&at, host, terms, ALPN_FRAMES).await?;
    on_stream(stream.into(), address, Incoming::dialled(), None)
        .map_err(|e| DialError::unreachable(address, &e))
}

/// The link on a stream whose handshake is done; it holds `place` while it lives.
fn on_stream(
    mut stream: TlsStream<TcpStream>,
    peer: SocketAddr,
    incoming: Incoming,
    place: Option<GateEntry>,
) -> io::Result<Link> {
    match &mut stream {
        TlsStream::Client(stream) => stream.get_mut().1.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
        TlsStream::Server(stream) => stream.get_mut().1.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
    }
    let certificate = shown(stream.get_ref().1.peer_certificates());
    let socket = SockRef::from(stream.get_ref().0);
    notice_dead_peers(&socket);
    let owner = Arc::new(ConnectionOwner {
        socket: socket.try_clone()?,
        unread: Mutex::default(),
        place,
    });
    let (reader, writer) = split(stream);
    let sender = Sender {
        stream: writer,
        begun: Vec::new(),
        finished: false,
        owner: owner.clone(),
    };
    let receiver = Receiver {
        stream: Some(reader),
        incoming,
        owner,
    };
    Ok(Link {
        sender: LinkSender(SenderKind::Tcp(sender)),
        receiver: LinkReceiver(ReceiverKind::Tcp(receiver)),
        carrier: Carrier::Tcp,
        peer,
        certificate,
    })
}

/// Takes a connection that was accepted for frames. Its first bytes must come
/// within `deadline`; then the link goes to `accepted`. Closes it, also then, if it is
/// expelled before it is admitted.
pub(crate) async fn accept(
    stream: server::TlsStream<TcpStream>,
    peer: SocketAddr,
    place: GateEntry,
    deadline: Duration,
    accepted: mpsc::Sender<Link>,
) {
    let mut watch = place.watch();
    let mut link = match on_stream(stream.into(), peer, Incoming::accepted(), Some(place)) {
        Ok(link) => link,
        Err(e) => return debug!(%peer, "TCP link failed: {e}"),
    };
    let ReceiverKind::Tcp(receiver) = &mut link.receiver.0 else {
        unreachable!("it was just made");
    };
    match timeout(deadline, receiver.fill()).await {
        Ok(Ok(true)) => {
            let owner = Arc::downgrade(&receiver.owner);
            // An error means that the listener was dropped, and so is the link.
            let _ = accepted.send(link).await;
            // So that the server may end.
            drop(accepted);
            if watch.expelled().await
                && let Some(owner) = owner.upgrade()
            {
                owner.close();
            }
        }
        Ok(Ok(false)) => debug!(%peer, "TCP link ended before its first frame"),
        Ok(Err(e)) => debug!(%peer, "TCP link failed: {e}"),
        Err(_) => debug!(%peer, "TCP link sent nothing for {deadline:?}"),
    }
}

/// Has the system probe the peer's. Best effort: users of links notice, too.
fn notice_dead_peers(socket: &SockRef<'_>) {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEP_ALIVE)
        .with_interval(KEEP_ALIVE);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

impl Sender {
    /// As [`LinkSender::bound_flight`](crate::link::LinkSender::bound_flight).
    pub(crate) fn bound_flight(&self, bytes: usize) {
        // Linux doubles it, for what it needs itself beside the bytes. A hint: without
        // it the system decides.
        let _ = self.owner.socket.set_send_buffer_size(bytes);
    }
}

/// What the halves of a link share.
#[derive(Debug)]
struct ConnectionOwner {
    /// A second handle, to close the connection whatever the halves do.
    socket: Socket,
    /// The reading half, once its receiver was dropped.
    unread: Mutex<Option<ReadHalf<TlsStream<TcpStream>>>>,
    place: Option<GateEntry>,
}

impl ConnectionOwner {
    fn close(&self) {
        // An error means that it is closed.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    fn unread(&self) -> MutexGuard<'_, Option<ReadHalf<TlsStream<TcpStream>>>> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Sender {
    stream: WriteHalf<TlsStream<TcpStream>>,
    /// What is left of the latest frames, if their `send` was cancelled.
    begun: Vec<Bytes>,
    finished: bool,
    owner: Arc<ConnectionOwner>,
}

impl Sender {
    pub(crate) async fn send<'a>(
        &mut self,
        frames: impl Iterator<Item = &'a [Bytes]>,
    ) -> Result<(), LinkError> {
        self.flush().await?;
        framing::put_frames(&mut self.begun, frames);
        self.flush().await
    }

    /// As [`LinkSender::send_now`](crate::link::LinkSender::send_now).
    pub(crate) fn send_now<'a>(
        &mut self,
        frames: impl Iterator<Item = &'a [Bytes]>,
    ) -> Result<bool, LinkError> {
        framing::put_frames(&mut self.begun, frames);
        // A task that has run for long would be told to wait.
        let flush = unconstrained(self.flush());
        link::now(flush).map_or(Ok(false), |flushed| flushed.map(|()| true))
    }

    async fn flush(&mut self) -> Result<(), LinkError> {
        write_all(&mut self.stream, &mut self.begun)
            .await
            .map_err(LinkError::lost)
    }

    pub(crate) async fn finish(mut self) {
        let delivered = async {
            if self.flush().await.is_ok() {
                self.finished = self.stream.shutdown().await.is_ok();
            }
            // A socket that is closed with bytes unread is reset, and the peer
            // then loses what is still on its way.
            let unread = self.owner.unread().take();
            if let Some(mut unread) = unread {
                let _ = tokio::io::copy(&mut unread, &mut tokio::io::sink()).await;
            }
        };
        let _ = timeout(IDLE_TIMEOUT, delivered).await;
    }
}

/// Writes `parts`, taking off what was written as it goes.
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
        // The peer then misses TLS's goodbye and knows that this was no end.
        if !self.finished {
            self.owner.close();
        }
    }
}

#[derive(Debug)]
pub(crate) struct Receiver {
    /// Taken when dropped.
    stream: Option<ReadHalf<TlsStream<TcpStream>>>,
    incoming: Incoming,
    owner: Arc<ConnectionOwner>,
}

impl Receiver {
    /// As [`LinkReceiver::admit`](crate::link::LinkReceiver::admit).
    pub(crate) fn admit(&mut self) -> Result<(), Full> {
        if let Some(place) = &self.owner.place {
            place.admit(false)?;
        }
        self.incoming.admit();
        Ok(())
    }

    pub(crate) async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        loop {
            match self.incoming.take() {
                Ok(Some(frame)) => return Ok(Some(frame)),
                Ok(None) => {}
                Err(error) => {
                    self.owner.close();
                    return Err(error);
                }
            }
            if !self.fill().await? {
                return match self.incoming.is_between() {
                    true => Ok(None),
                    false => Err(LinkError::lost("the stream ended within a frame")),
                };
            }
        }
    }

    /// Waits for more bytes. False: the peer finished.
    pub(crate) async fn fill(&mut self) -> Result<bool, LinkError> {
        let stream = self.stream.as_mut().expect("only taken when dropped");
        let read = stream.read_buf(&mut self.incoming.room()).await;
        Ok(read.map_err(LinkError::lost)? > 0)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        *self.owner.unread() = self.stream.take();
    }
}
