//! gRPC over our own TLS: the control plane, and the carrier of gRPC links.
//!
//! tonic receives connections whose TLS handshake is already done. That way a client can
//! distinguish "nothing listens" from "wrong certificate", and a server can limit
//! handshakes and set a deadline for them.

mod accept;

use std::{
    future, io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::{Instant, interval_at},
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Status,
    service::Routes,
    transport::{Channel, Endpoint},
};
use tracing::debug;

pub(crate) use self::accept::{FrameConnection, FrameHandler, Incoming, frame_handler};
use self::accept::{Handoff, accept};
#[cfg(target_os = "linux")]
use crate::handoff::LeaseRouter;
use crate::{
    admission::AdmissionLimitError,
    carriers::{IDLE_TIMEOUT, KEEP_ALIVE},
    connection::{Connection, PeerHandle, PeerInfo},
    dial::error::DialError,
    gate::Gate,
    handshakes::Handshakes,
    identity::Identity,
    listen::error::BindError,
    tls::{self, ALPN_FRAMES, ALPN_GRPC, Fingerprint, PeerCertificate, TlsOptions, Trust},
};

/// How long a connection attempt runs before another one starts in parallel: several
/// times what a handshake takes across an ocean.
const REDIAL_INTERVAL: Duration = Duration::from_millis(750);

/// Maximum number of parallel connection attempts.
const MAX_DIALS: usize = 5;

/// Queue length for connections whose handshake is done and that tonic has not taken yet.
const ACCEPT_QUEUE: usize = 16;

/// How long an HTTP/2 peer may take to answer a keep-alive ping.
const PROBE_DEADLINE: Duration = IDLE_TIMEOUT.saturating_sub(KEEP_ALIVE);

/// HTTP/2 flow control windows of links, as large as QUIC's.
const WINDOW_BYTES: u32 = 16 << 20;

/// Flow-control windows of a server of calls, per stream and per connection: how many
/// bytes a peer can make this side buffer. No control message is larger than the stream's
/// window.
const CALL_WINDOW_BYTES: u32 = 256 << 10;
const CALLS_WINDOW_BYTES: u32 = 1 << 20;

/// Maximum number of concurrent calls on one connection of a server of calls. A client
/// has one stream open and sends status requests as well.
const MAX_CALLS: u32 = 16;

/// Limit on the headers of one call: a token and the headers of gRPC itself.
const MAX_HEADER_BYTES: u32 = 4 << 10;

/// Time limit for the response to a call. The response to a streaming call begins after
/// the client's first message.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(10);

/// Connects to the gRPC server at `host:port` if `trust` accepts its certificate. A
/// channel is one connection: when it is lost, calls fail and the caller must connect
/// again.
///
/// A server under attack makes connections wait, and serves the newest first. So when an
/// attempt takes long, another one starts in parallel, and the first to succeed is used.
///
/// # Errors
///
/// Distinguishes an unreachable server, an unexpected certificate and unusable trust
/// settings. There is no deadline: the caller must set one.
pub async fn connect(host: &str, port: u16, trust: &Trust) -> Result<Channel, DialError> {
    let at = authority(host, port);
    connect_to(&at, host, &TlsOptions::anonymous(trust)).await
}

/// Connects as [`connect`] does, and shows `identity`, by which the server identifies the
/// caller.
///
/// # Errors
///
/// As [`connect`].
pub async fn connect_as(
    identity: Arc<Identity>,
    host: &str,
    port: u16,
    trust: &Trust,
) -> Result<Channel, DialError> {
    let at = authority(host, port);
    let tls_options = TlsOptions {
        trust: trust.clone(),
        lease: None,
        identity: Some(identity),
    };
    connect_to(&at, host, &tls_options).await
}

/// Returns `host:port`, with brackets if the host is an IPv6 address.
fn authority(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Connects to `at`, an address of `host`, by up to [`MAX_DIALS`] parallel attempts. The
/// first to succeed wins.
async fn connect_to(at: &str, host: &str, tls_options: &TlsOptions) -> Result<Channel, DialError> {
    let mut dials = vec![Box::pin(connect_closable(at, host, tls_options))];
    let mut redial = interval_at(Instant::now() + REDIAL_INTERVAL, REDIAL_INTERVAL);
    loop {
        let may_redial = dials.len() < MAX_DIALS;
        let first = future::poll_fn(|cx| {
            for i in 0..dials.len() {
                if let Poll::Ready(dialled) = dials[i].as_mut().poll(cx) {
                    drop(dials.swap_remove(i));
                    return Poll::Ready(dialled);
                }
            }
            Poll::Pending
        });
        let dialled = tokio::select! {
            dialled = first => dialled,
            _ = redial.tick(), if may_redial => {
                dials.push(Box::pin(connect_closable(at, host, tls_options)));
                continue;
            }
        };
        match dialled {
            Ok((channel, _)) => return Ok(channel),
            // Another attempt may still succeed.
            Err(e) if !dials.is_empty() && !e.is_final() => debug!("{e}"),
            Err(e) => return Err(e),
        }
    }
}

/// Connects as [`connect`] does, but with a single attempt, however long it takes.
///
/// # Errors
///
/// As [`connect`].
pub async fn connect_once(host: &str, port: u16, trust: &Trust) -> Result<Channel, DialError> {
    let at = authority(host, port);
    let (channel, _) = connect_closable(&at, host, &TlsOptions::anonymous(trust)).await?;
    Ok(channel)
}

/// Connects to `at`, an address of `host`. Also returns the peer's [`PeerHandle`], whose
/// closer ends the connection whatever its calls do.
pub(crate) async fn connect_closable(
    at: &str,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<(Channel, PeerHandle), DialError> {
    let connection = handshake(at, host, tls_options).await?;
    let peer_handle = connection.peer();
    let once = Mutex::new(Some(TokioIo::new(connection)));
    let connector = tower::service_fn(move |_| {
        let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        let lost = || io::Error::new(io::ErrorKind::NotConnected, "the connection was lost");
        future::ready(stream.ok_or_else(lost))
    });
    // The scheme only sets the pseudo-header; the bytes are already inside TLS.
    let channel = Endpoint::from_static("http://tensord")
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(PROBE_DEADLINE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .connect_with_connector(connector)
        .await
        .map_err(|e| DialError::unreachable(at, &e))?;
    Ok((channel, peer_handle))
}

async fn handshake(
    at: &str,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<Connection<client::TlsStream<TcpStream>>, DialError> {
    let stream = connect_tls(at, host, tls_options, ALPN_GRPC).await?;
    let peer = stream.get_ref().0.peer_addr();
    let peer = peer.map_err(|e| DialError::unreachable(at, &e))?;
    let certificate = PeerCertificate::of(stream.get_ref().1.peer_certificates());
    let peer = PeerInfo {
        address: peer,
        certificate,
        gate_entry: None,
    };
    Ok(Connection::new(stream, Bytes::new(), peer))
}

/// Opens a TLS stream to `at`, an address of `host`, for the ALPN protocol `alpn`.
pub(crate) async fn connect_tls(
    at: &str,
    host: &str,
    tls_options: &TlsOptions,
    alpn: &[u8],
) -> Result<client::TlsStream<TcpStream>, DialError> {
    let config = tls::client_config(tls_options, alpn)?;
    let unreachable = |e: io::Error| DialError::unreachable(at, &e);
    let tcp = TcpStream::connect(at).await;
    let tcp = tcp.map_err(unreachable)?;
    // Frames are written whole; Nagle's algorithm would only add latency.
    tcp.set_nodelay(true).map_err(unreachable)?;
    let name = ServerName::try_from(tls_options.server_name(host)).expect("a usable name");
    TlsConnector::from(Arc::new(config))
        .connect(name, tcp)
        .await
        .map_err(|e| match tls::is_certificate_error(&e) {
            true => DialError::certificate(at, &tls_options.trust),
            false => unreachable(e),
        })
}

/// A gRPC server that is ready to run.
pub struct Server {
    incoming: Incoming,
    #[cfg(target_os = "linux")]
    router: Option<Arc<dyn LeaseRouter>>,
    acceptor: TlsAcceptor,
    call_limits: CallLimits,
    /// Runs connections that negotiated frames instead of gRPC.
    frames: Option<FrameHandler>,
    gate: Arc<Gate>,
    handshakes: Handshakes,
}

/// Limits on the calls of one connection.
struct CallLimits {
    /// Maximum number of concurrent calls.
    max_concurrent: u32,
    /// Flow-control windows, per call and per connection: bytes received and not read
    /// yet.
    windows_bytes: (u32, u32),
    /// Time limit for the response to a call.
    deadline: Option<Duration>,
}

/// Prepares a server on `tcp` that shows `identity`.
///
/// # Errors
///
/// When the identity is unusable.
pub fn server(tcp: TcpListener, identity: &Identity) -> Result<Server, BindError> {
    let call_limits = CallLimits {
        max_concurrent: MAX_CALLS,
        windows_bytes: (CALL_WINDOW_BYTES, CALLS_WINDOW_BYTES),
        deadline: Some(RESPONSE_DEADLINE),
    };
    let incoming = Incoming::Port(tcp);
    new_server(
        incoming,
        identity,
        &[ALPN_GRPC],
        call_limits,
        None,
        Gate::new(),
    )
}

/// Prepares a server of links. A gRPC link is one call, the only one on its connection. A
/// connection that negotiated frames is a link as well, and goes to `frames`.
pub(crate) fn link_server(
    incoming: Incoming,
    identity: &Identity,
    frames: FrameHandler,
    gate: Arc<Gate>,
) -> Result<Server, BindError> {
    let call_limits = CallLimits {
        max_concurrent: 1,
        windows_bytes: (WINDOW_BYTES, WINDOW_BYTES),
        // A call's response waits for a place in the queue of accepted links.
        deadline: None,
    };
    let alpn = [ALPN_GRPC, ALPN_FRAMES];
    new_server(incoming, identity, &alpn, call_limits, Some(frames), gate)
}

fn new_server(
    incoming: Incoming,
    identity: &Identity,
    alpn: &[&[u8]],
    call_limits: CallLimits,
    frames: Option<FrameHandler>,
    gate: Arc<Gate>,
) -> Result<Server, BindError> {
    let config = tls::server_config(identity, alpn).map_err(BindError::identity)?;
    Ok(Server {
        incoming,
        #[cfg(target_os = "linux")]
        router: None,
        acceptor: TlsAcceptor::from(Arc::new(config)),
        call_limits,
        frames,
        gate,
        handshakes: Handshakes::start()
            .map_err(|e| BindError::new("start the thread for TLS handshakes", e))?,
    })
}

impl Server {
    /// Passes connections on to the processes that `router` names.
    #[cfg(target_os = "linux")]
    pub(crate) fn with_router(mut self, router: Arc<dyn LeaseRouter>) -> Self {
        self.router = Some(router);
        self
    }

    /// Serves `routes` until the future is dropped, which closes all connections.
    pub async fn run(self, routes: Routes) {
        self.run_until(routes, future::pending()).await;
    }

    /// Serves `routes`. Once `closing` ends, the server accepts no more connections, and
    /// the future ends with the last open one. Dropping the future closes all
    /// connections.
    pub(crate) async fn run_until(self, routes: Routes, closing: impl Future<Output = ()>) {
        let (grpc, connections) = mpsc::channel(ACCEPT_QUEUE);
        let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
        let mut open = JoinSet::new();
        let handoff = Handoff {
            #[cfg(target_os = "linux")]
            router: self.router,
            acceptor: self.acceptor,
            handshakes: self.handshakes.handle(),
            grpc,
            frames: self.frames,
        };
        let accepting = async {
            tokio::select! {
                () = closing => {}
                () = accept(self.incoming, &self.gate, handoff, &mut open) => {}
            }
        };
        let mut builder = tonic::transport::Server::builder();
        if let Some(deadline) = self.call_limits.deadline {
            builder = builder.timeout(deadline);
        }
        let (stream_window, connection_window) = self.call_limits.windows_bytes;
        let serving = builder
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .http2_keepalive_timeout(Some(PROBE_DEADLINE))
            .initial_connection_window_size(connection_window)
            .initial_stream_window_size(stream_window)
            .max_concurrent_streams(self.call_limits.max_concurrent)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .add_routes(routes)
            // The end of `incoming` starts the graceful shutdown. Without a shutdown
            // future, tonic would not notify the connections of it, so it gets one that
            // never completes.
            .serve_with_incoming_shutdown(incoming, future::pending());
        let (served, ()) = tokio::join!(serving, accepting);
        if let Err(e) = served {
            debug!("the gRPC server ended: {e}");
        }
    }
}

/// The response stream of a streaming call.
pub type ResponseStream<T> = tonic::codegen::BoxStream<T>;

/// Returns a response stream of what arrives in `messages`.
pub fn response_stream<T: Send + 'static>(messages: mpsc::Receiver<T>) -> ResponseStream<T> {
    Box::pin(ReceiverStream::new(messages).map(Ok::<T, Status>))
}

/// Returns the address that `request` came from.
pub fn peer<T>(request: &Request<T>) -> SocketAddr {
    peer_handle(request).peer
}

/// Returns the fingerprint of the certificate whose private key the peer of `request`
/// proved to have, if it showed one. Who issued it does not count.
pub fn certificate<T>(request: &Request<T>) -> Option<Fingerprint> {
    let certificate = peer_handle(request).certificate.as_ref()?;
    Some(certificate.fingerprint)
}

/// Admits the peer of `request`: its connection is no longer subject to the limits on
/// bytes and time for unadmitted peers. A peer with a `reserved` place is admitted even
/// when the other places are taken.
///
/// # Errors
///
/// When no place is free for the peer.
pub fn admit<T>(request: &Request<T>, reserved: bool) -> Result<(), AdmissionLimitError> {
    peer_handle(request).admit(reserved)
}

/// Returns the peer that `request` came from.
pub(crate) fn peer_handle<T>(request: &Request<T>) -> &PeerHandle {
    let peer_handle = request.extensions().get::<PeerHandle>();
    peer_handle.expect("every request of this server has the handle of its peer")
}
