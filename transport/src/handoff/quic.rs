//! Passes QUIC connections to another process, without a look into their packets' contents.
//!
//! A client chooses the connection id of its first packet so that it starts with the lease's id. So the worker finds the lease in the plain part of that packet. It
//! opens a second socket on its port, connected to the client, and passes that on with the
//! packet. From then on the kernel delivers the client's packets to the connected socket, so
//! none passes the worker.
//!
//! A packet that the kernel delivered before the second socket was connected is lost, as any
//! datagram may be, and the client sends it again.

use std::{
    collections::VecDeque,
    fmt, io,
    io::IoSliceMut,
    net::{SocketAddr, UdpSocket},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use quinn::{
    AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use rustix::net::sockopt::set_socket_reuseport;
use socket2::{Domain, Protocol, Socket, Type};
use tensord_proto::ids::LeaseId;
use tracing::debug;

use super::{Destination, LeaseRouter, Passed};
use crate::carriers::quic::INITIAL_ID_BYTES;

/// For this time after a client was passed on, its further Initial packets are dropped here: the
/// client sends them again, to the connected socket.
const MEMORY: Duration = Duration::from_secs(5);

/// A datagram with the first packet of a connection is at least as long (RFC 9000, 14.1).
const MIN_INITIAL_BYTES: usize = 1200;

/// Maximum number of client addresses that are remembered.
const MAX_REMEMBERED: usize = 256;

/// Returns the lease that a datagram names, if it begins with the first packet of a connection
/// (RFC 9000, 17.2: a long header of type Initial).
fn lease_of_datagram(datagram: &[u8]) -> Option<LeaseId> {
    let (header, rest) = datagram.split_first_chunk::<6>()?;
    let [flags, version @ .., id_bytes] = *header;
    if datagram.len() < MIN_INITIAL_BYTES
        || flags & 0xf0 != 0xc0
        || version != [0, 0, 0, 1]
        || usize::from(id_bytes) != INITIAL_ID_BYTES
    {
        return None;
    }
    Some(LeaseId(u64::from_be_bytes(*rest.first_chunk()?)))
}

/// The socket of a listener. It takes the packets that open connections to other
/// processes out of the received ones, and passes them on.
pub(crate) struct RoutingSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    router: Arc<dyn LeaseRouter>,
    /// The clients whose first packets were passed on, and when.
    recent: Mutex<VecDeque<(SocketAddr, Instant)>>,
}

impl fmt::Debug for RoutingSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RoutingSocket").field(&self.socket).finish()
    }
}

impl RoutingSocket {
    /// Wraps `socket`. Must be called within a Tokio runtime.
    pub(crate) fn new(socket: UdpSocket, router: Arc<dyn LeaseRouter>) -> io::Result<Self> {
        // Each socket that is connected to a client is bound to the same port as this
        // one.
        set_socket_reuseport(&socket, true)?;
        Ok(Self {
            socket: TokioRuntime.wrap_udp_socket(socket)?,
            router,
            recent: Mutex::default(),
        })
    }

    /// Passes a datagram on if it opens a connection to another process. Returns whether this
    /// process must drop the datagram.
    fn pass_on(&self, datagram: &[u8], meta: &RecvMeta) -> bool {
        let lease = lease_of_datagram(datagram);
        let destination = lease.map(|lease| self.router.destination(lease));
        let Some(Destination::Process(process)) = destination else {
            return false;
        };
        let now = Instant::now();
        if self.is_remembered(meta.addr, now) {
            return true;
        }
        match self.connected(meta) {
            Ok(socket) => {
                let first = Bytes::copy_from_slice(datagram);
                // The queue is full, or the process gone; the client sends the packet again.
                if process.try_send(Passed::Quic { socket, first }).is_ok() {
                    self.remember(meta.addr, now);
                }
            }
            Err(e) => debug!(peer = %meta.addr, "cannot pass a QUIC connection on: {e}"),
        }
        true
    }

    /// Returns whether a client was passed on a short time ago.
    fn is_remembered(&self, client: SocketAddr, now: Instant) -> bool {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |(_, at): &(SocketAddr, Instant)| now.duration_since(*at) > MEMORY;
        while recent.front().is_some_and(is_old) {
            recent.pop_front();
        }
        recent.iter().any(|(known, _)| *known == client)
    }

    /// Records that a client was passed on.
    fn remember(&self, client: SocketAddr, now: Instant) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() >= MAX_REMEMBERED {
            recent.pop_front();
        }
        recent.push_back((client, now));
    }

    /// Opens a socket on this port that is connected to the client of a datagram.
    fn connected(&self, meta: &RecvMeta) -> io::Result<UdpSocket> {
        let own = self.socket.local_addr()?;
        let ip = meta.dst_ip.unwrap_or(own.ip()).to_canonical();
        let own = SocketAddr::new(ip, own.port());
        let client = SocketAddr::new(meta.addr.ip().to_canonical(), meta.addr.port());
        let domain = Domain::for_address(client);
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        set_socket_reuseport(&socket, true)?;
        socket.bind(&own.into())?;
        socket.connect(&client.into())?;
        Ok(socket.into())
    }
}

impl AsyncUdpSocket for RoutingSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.socket.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.socket.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let received = self.socket.poll_recv(cx, bufs, meta);
        if let Poll::Ready(Ok(count)) = received {
            for (buffer, meta) in bufs.iter().zip(meta).take(count) {
                // The kernel may have joined several datagrams of one client.
                let first = meta.stride.min(meta.len);
                if self.pass_on(&buffer[..first], meta) {
                    meta.len = 0;
                }
            }
        }
        received
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

/// A socket that was passed on. Its first read returns the datagram that came with it.
pub(crate) struct PassedSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    client: SocketAddr,
    first: Mutex<Option<Bytes>>,
}

impl fmt::Debug for PassedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PassedSocket").field(&self.client).finish()
    }
}

impl PassedSocket {
    /// Wraps `socket`, which is connected to a client. Must be called within a Tokio runtime.
    pub(crate) fn new(socket: UdpSocket, first: Bytes) -> io::Result<Self> {
        let client = socket.peer_addr()?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: TokioRuntime.wrap_udp_socket(socket)?,
            client,
            first: Mutex::new(Some(first)),
        })
    }
}

impl AsyncUdpSocket for PassedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.socket.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        // The kernel knows both addresses.
        self.socket.try_send(&Transmit {
            src_ip: None,
            ..*transmit
        })
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |first: &Bytes| {
            bufs.first()
                .is_some_and(|buffer| buffer.len() >= first.len())
        };
        if let Some(first) = first.take().filter(fits) {
            bufs[0][..first.len()].copy_from_slice(&first);
            meta[0] = RecvMeta {
                addr: self.client,
                len: first.len(),
                stride: first.len(),
                ecn: None,
                dst_ip: None,
            };
            return Poll::Ready(Ok(1));
        }
        drop(first);
        self.socket.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carriers::quic::initial_id;

    #[test]
    fn first_packet_names_its_lease() {
        let lease = LeaseId(0x0123_4567_89ab_cdef);
        let id = initial_id(lease);
        assert_ne!(id, initial_id(lease), "the rest is random");
        let mut datagram = vec![0xc3, 0, 0, 0, 1, INITIAL_ID_BYTES as u8];
        datagram.extend_from_slice(&id);
        datagram.resize(1200, 0);
        assert_eq!(lease_of_datagram(&datagram), Some(lease));
        // Other types, other versions, other connection ids, and pieces.
        for (at, byte) in [(0, 0x43), (0, 0xe3), (4, 2), (5, 8)] {
            let mut other = datagram.clone();
            other[at] = byte;
            assert_eq!(lease_of_datagram(&other), None, "{at}");
        }
        for length in (0..14).chain([1199]) {
            assert_eq!(lease_of_datagram(&datagram[..length]), None, "{length}");
        }
    }
}
