//! The QUIC carrier: one bidirectional stream of length-prefixed frames.
//!
//! Each link is a connection of its own, so that losses and flow control on one link
//! never affect another.

use std::{
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use quinn::{
    Connection, ConnectionId, Endpoint, EndpointConfig, RecvStream, SendStream, TokioRuntime,
    TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rand::Rng;
use rustls::pki_types::CertificateDer;
use tensord_proto::ids::LeaseId;

use super::{
    Halves, IDLE_TIMEOUT, KEEP_ALIVE, LinkError,
    framing::{self, FrameDecoder},
};
#[cfg(target_os = "linux")]
use crate::handoff::{
    LeaseRouter,
    quic::{PassedSocket, RoutingSocket},
};
use crate::{
    admission::AdmissionLimitError,
    dial::error::DialError,
    gate::GateEntry,
    identity::Identity,
    listen::error::BindError,
    tls::{self, ALPN_FRAMES, PeerCertificate, TlsOptions},
};

/// Limit on a link's bytes in flight: 16 MiB fill 1 Gbit/s at 130 ms, or 10 Gbit/s at 13
/// ms.
const WINDOW_BYTES: u32 = 16 << 20;

/// The same for a peer that is not admitted yet.
const UNADMITTED_WINDOW_BYTES: u32 = 64 << 10;

/// Maximum number of connections that have begun and wait to be accepted, and limits on
/// the bytes kept for each and for all. They are accepted at once, unless the process is
/// behind.
const MAX_INCOMING: usize = 256;
const INCOMING_BYTES: u64 = 16 << 10;
const ALL_INCOMING_BYTES: u64 = 2 << 20;

/// Requested size of the socket buffers; the system may grant less.
const SOCKET_BYTES: usize = 4 << 20;

/// Length of the connection id in a client's first packet: the most that QUIC allows.
pub(crate) const INITIAL_ID_BYTES: usize = 20;

/// Close code when a link is dropped before it was finished.
const CODE_DROPPED: VarInt = VarInt::from_u32(1);

/// Close code when the peer broke the framing.
const CODE_BAD_FRAMING: VarInt = VarInt::from_u32(2);

/// Close code when the peer was not admitted in time.
const CODE_EXPELLED: VarInt = VarInt::from_u32(3);

/// Returns the destination connection id of a client's first packet to the process that runs
/// `lease`: the lease's id, then 12 random bytes (RFC 9000, 7.2 requires an unpredictable id
/// of at least 8 bytes).
pub(crate) fn initial_id(lease: LeaseId) -> ConnectionId {
    let mut id = [0; INITIAL_ID_BYTES];
    let (head, rest) = id.split_at_mut(size_of::<LeaseId>());
    head.copy_from_slice(&lease.0.to_be_bytes());
    rand::rng().fill_bytes(rest);
    ConnectionId::new(&id)
}

/// Returns settings for links whose peer may send `receive_window` bytes ahead at first.
fn transport_config(receive_window: u32) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    let idle = IDLE_TIMEOUT.try_into().expect("the idle timeout fits");
    config
        .max_idle_timeout(Some(idle))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .initial_rtt(Duration::from_millis(20))
        .max_concurrent_bidi_streams(1u8.into())
        .max_concurrent_uni_streams(0u8.into())
        .datagram_receive_buffer_size(None)
        .stream_receive_window(WINDOW_BYTES.into())
        .receive_window(receive_window.into())
        .send_window(WINDOW_BYTES.into());
    Arc::new(config)
}

fn enlarge_buffers(socket: &std::net::UdpSocket) {
    let settings = socket2::SockRef::from(socket);
    // Best effort: small buffers cost speed, nothing else.
    let _ = settings.set_recv_buffer_size(SOCKET_BYTES);
    let _ = settings.set_send_buffer_size(SOCKET_BYTES);
}

fn endpoint(
    socket: std::net::UdpSocket,
    server: Option<quinn::ServerConfig>,
) -> std::io::Result<Endpoint> {
    enlarge_buffers(&socket);
    Endpoint::new(
        EndpointConfig::default(),
        server,
        socket,
        Arc::new(TokioRuntime),
    )
}

/// Creates an endpoint that accepts connections, on a socket already bound.
pub(crate) fn server(
    socket: std::net::UdpSocket,
    identity: &Identity,
) -> Result<Endpoint, BindError> {
    let config = server_config(identity)?;
    endpoint(socket, Some(config)).map_err(|e| BindError::new("QUIC", e))
}

/// Creates an endpoint as [`server`] does, which passes connections on to the processes that
/// `router` names.
#[cfg(target_os = "linux")]
pub(crate) fn routing_server(
    socket: std::net::UdpSocket,
    identity: &Identity,
    router: Arc<dyn LeaseRouter>,
) -> Result<Endpoint, BindError> {
    let config = server_config(identity)?;
    enlarge_buffers(&socket);
    RoutingSocket::new(socket, router)
        .and_then(|socket| endpoint_on(Arc::new(socket), config))
        .map_err(|e| BindError::new("QUIC", e))
}

/// Creates an endpoint that accepts the one connection that another process has passed on.
/// `socket` is connected to the client, and `first` is the client's first datagram.
#[cfg(target_os = "linux")]
pub(crate) fn passed_server(
    socket: std::net::UdpSocket,
    first: Bytes,
    config: quinn::ServerConfig,
) -> std::io::Result<Endpoint> {
    enlarge_buffers(&socket);
    endpoint_on(Arc::new(PassedSocket::new(socket, first)?), config)
}

#[cfg(target_os = "linux")]
fn endpoint_on(
    socket: Arc<dyn quinn::AsyncUdpSocket>,
    config: quinn::ServerConfig,
) -> std::io::Result<Endpoint> {
    Endpoint::new_with_abstract_socket(
        EndpointConfig::default(),
        Some(config),
        socket,
        Arc::new(TokioRuntime),
    )
}

/// Returns the settings of an accepting endpoint.
pub(crate) fn server_config(identity: &Identity) -> Result<quinn::ServerConfig, BindError> {
    let tls = tls::server_config(identity, &[ALPN_FRAMES]).map_err(BindError::identity)?;
    let crypto = QuicServerConfig::try_from(tls).map_err(BindError::identity)?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(transport_config(UNADMITTED_WINDOW_BYTES));
    config
        .max_incoming(MAX_INCOMING)
        .incoming_buffer_size(INCOMING_BYTES)
        .incoming_buffer_size_total(ALL_INCOMING_BYTES);
    // A link's connection does not migrate: what looks like a migration may be an attack.
    config.migration(false);
    Ok(config)
}

/// Dials `address`, an address of `host`. The stream exists for the peer once the first
/// frame is sent.
pub(crate) async fn dial(
    address: SocketAddr,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<Halves<Sender, Receiver>, DialError> {
    let tls = tls::client_config(tls_options, ALPN_FRAMES)?;
    let crypto = QuicClientConfig::try_from(tls).expect("ring has QUIC's initial cipher suite");
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport_config(WINDOW_BYTES));
    if let Some(lease) = tls_options.lease {
        config.initial_dst_cid_provider(Arc::new(move || initial_id(lease)));
    }
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let unreachable = |e: &dyn std::error::Error| DialError::unreachable(address, e);
    let endpoint = std::net::UdpSocket::bind(any)
        .and_then(|socket| endpoint(socket, None))
        .map_err(|e| unreachable(&e))?;
    let connecting = endpoint.connect_with(config, address, &tls_options.server_name(host));
    let connection = connecting
        .map_err(|e| unreachable(&e))?
        .await
        .map_err(|e| {
            if refused_certificate(&e) {
                DialError::certificate(address, &tls_options.trust)
            } else {
                unreachable(&e)
            }
        })?;
    let (send, recv) = connection.open_bi().await.map_err(|e| unreachable(&e))?;
    Ok(link(connection, send, recv, FrameDecoder::dialled(), None))
}

/// Returns whether this side ended the handshake because of the peer's certificate.
/// rustls' error is not available by then, but the transport error code has the TLS alert
/// it chose.
fn refused_certificate(error: &quinn::ConnectionError) -> bool {
    // RFC 8446, 6.2: bad_certificate to certificate_unknown, unknown_ca and
    // access_denied, and decrypt_error for an invalid signature.
    let mut alerts = (42..=46).chain([48, 49, 51]);
    let quinn::ConnectionError::TransportError(error) = error else {
        return false;
    };
    alerts.any(|alert| error.code == quinn::TransportErrorCode::crypto(alert))
}

/// Creates the link on an accepted connection. The link holds `gate_entry` while it lives.
pub(crate) fn accepted(
    connection: Connection,
    send: SendStream,
    recv: RecvStream,
    gate_entry: GateEntry,
) -> (Halves<Sender, Receiver>, ExpelHandle) {
    let halves = link(
        connection,
        send,
        recv,
        FrameDecoder::accepted(),
        Some(gate_entry),
    );
    let expel = ExpelHandle(Arc::downgrade(&halves.receiver.owner));
    (halves, expel)
}

/// Closes a link's connection, without keeping it open.
pub(crate) struct ExpelHandle(Weak<ConnectionOwner>);

impl ExpelHandle {
    pub(crate) fn close(&self) {
        if let Some(owner) = self.0.upgrade() {
            let connection = &owner.connection;
            connection.close(CODE_EXPELLED, b"no right to call was shown");
        }
    }
}

fn link(
    connection: Connection,
    send: SendStream,
    recv: RecvStream,
    decoder: FrameDecoder,
    gate_entry: Option<GateEntry>,
) -> Halves<Sender, Receiver> {
    let (peer, certificate) = (connection.remote_address(), peer_certificate(&connection));
    let owner = Arc::new(ConnectionOwner {
        connection,
        gate_entry,
    });
    let sender = Sender {
        stream: send,
        unsent: Vec::new(),
        finished: false,
        owner: owner.clone(),
    };
    let receiver = Receiver {
        stream: recv,
        decoder,
        owner,
    };
    Halves {
        sender,
        receiver,
        peer,
        certificate,
    }
}

/// Returns the certificate that the peer showed in the handshake.
fn peer_certificate(connection: &Connection) -> Option<PeerCertificate> {
    let identity = connection.peer_identity()?;
    let certificates = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    PeerCertificate::of(Some(&certificates))
}

/// State shared by the halves of a link. quinn closes the connection when its last handle
/// is dropped, so nothing else may keep one.
#[derive(Debug)]
struct ConnectionOwner {
    connection: Connection,
    gate_entry: Option<GateEntry>,
}

#[derive(Debug)]
pub(crate) struct Sender {
    stream: SendStream,
    /// Unsent rest of the latest frames, after a cancelled `send`.
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

    async fn flush(&mut self) -> Result<(), LinkError> {
        while !self.unsent.is_empty() {
            let written = self.stream.write_chunks(&mut self.unsent).await;
            let written = written.map_err(LinkError::lost)?;
            self.unsent.drain(..written.chunks);
        }
        Ok(())
    }

    pub(crate) async fn finish(mut self) {
        let delivered = async {
            if self.flush().await.is_ok() {
                self.finished = self.stream.finish().is_ok();
                // The peer has confirmed all, or the connection is gone: there is no more
                // to do.
                let _ = self.stream.stopped().await;
            }
        };
        let _ = tokio::time::timeout(IDLE_TIMEOUT, delivered).await;
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // Otherwise quinn would finish the stream, which the peer would take for a proper
        // end.
        if !self.finished {
            self.owner
                .connection
                .close(CODE_DROPPED, b"the link was dropped");
        }
    }
}

#[derive(Debug)]
pub(crate) struct Receiver {
    stream: RecvStream,
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
        self.owner
            .connection
            .set_receive_window(WINDOW_BYTES.into());
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
                    self.owner
                        .connection
                        .close(CODE_BAD_FRAMING, b"the frame is too large");
                    return Err(error);
                }
            }
            let chunk = self.stream.read_chunk(usize::MAX, true).await;
            match chunk.map_err(LinkError::lost)? {
                Some(chunk) => self.decoder.put(&chunk.bytes),
                None => return self.decoder.end(),
            }
        }
    }
}
