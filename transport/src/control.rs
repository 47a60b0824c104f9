//! gRPC over our own TLS: the control plane, and the carrier of gRPC links.
//!
//! tonic is handed connections whose TLS handshake is already done. That is
//! what lets a client tell "nothing listens" from "wrong certificate", and a
//! server bound and time out handshakes.

use std::{
    future, io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Status,
    service::Routes,
    transport::{Channel, Endpoint},
};
use tracing::debug;

use crate::{
    connection::{Caller, Closer, Connection},
    dial::DialError,
    identity::Identity,
    link::{IDLE_TIMEOUT, KEEP_ALIVE, Link},
    listen::BindError,
    tcp,
    tls::{self, ALPN_FRAMES, ALPN_GRPC, Trust},
};

/// Connections in use at once; more wait in the system's backlog.
const MAX_CONNECTIONS: usize = 1024;

/// How long a peer may take for its TLS handshake and the HTTP/2 preface.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Handshakes done and not yet taken by the server.
const ACCEPT_QUEUE: usize = 16;

/// What every HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 24;

/// How long an HTTP/2 peer may leave a probe unanswered.
const PROBE_DEADLINE: Duration = IDLE_TIMEOUT.saturating_sub(KEEP_ALIVE);

/// HTTP/2 flow control windows, as large as QUIC's.
const WINDOW_BYTES: u32 = 16 << 20;

/// Connects to a gRPC server at `host:port` that `trust` accepts. A channel is
/// one connection: when it is lost, calls fail and the caller connects again.
///
/// # Errors
///
/// Says apart: nothing there, another certificate, unusable trust settings.
/// Sets no deadline: the caller does.
pub async fn connect(host: &str, port: u16, trust: &Trust) -> Result<Channel, DialError> {
    let at = crate::dial::authority(host, port);
    Ok(connect_closable(&at, host, trust).await?.0)
}

/// Connects to `at`, an address of `host`, and returns also the means to end
/// the connection whatever its calls do.
pub(crate) async fn connect_closable(
    at: &str,
    host: &str,
    trust: &Trust,
) -> Result<(Channel, Closer), DialError> {
    let connection = handshake(at, host, trust).await?;
    let closer = connection.closer();
    let once = Mutex::new(Some(TokioIo::new(connection)));
    let connector = tower::service_fn(move |_| {
        let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        let lost = || io::Error::new(io::ErrorKind::NotConnected, "the connection was lost");
        future::ready(stream.ok_or_else(lost))
    });
    // The scheme only names the pseudo-header; the bytes are inside TLS already.
    let channel = Endpoint::from_static("http://tensord")
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(PROBE_DEADLINE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .connect_with_connector(connector)
        .await
        .map_err(|e| DialError::unreachable(at, &e))?;
    Ok((channel, closer))
}

async fn handshake(
    at: &str,
    host: &str,
    trust: &Trust,
) -> Result<Connection<client::TlsStream<TcpStream>>, DialError> {
    let stream = connect_tls(at, host, trust, ALPN_GRPC).await?;
    let peer = stream.get_ref().0.peer_addr();
    let peer = peer.map_err(|e| DialError::unreachable(at, &e))?;
    Ok(Connection::new(stream, Bytes::new(), peer, None))
}

/// A TLS stream to `at`, an address of `host`, for the protocol `alpn`.
pub(crate) async fn connect_tls(
    at: &str,
    host: &str,
    trust: &Trust,
    alpn: &[u8],
) -> Result<client::TlsStream<TcpStream>, DialError> {
    let config = tls::client_config(trust, alpn)?;
    let unreachable = |e: io::Error| DialError::unreachable(at, &e);
    let tcp = TcpStream::connect(at).await;
    let tcp = tcp.map_err(unreachable)?;
    // Frames are written whole; waiting to fill packets only adds latency.
    tcp.set_nodelay(true).map_err(unreachable)?;
    let name = ServerName::try_from(tls::server_name(host).to_owned()).expect("a usable name");
    TlsConnector::from(Arc::new(config))
        .connect(name, tcp)
        .await
        .map_err(|e| match tls::is_certificate_error(&e) {
            true => DialError::certificate(at, trust),
            false => unreachable(e),
        })
}

/// A gRPC server about to run.
pub struct Server {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
    /// Calls at once on one connection; `None` is HTTP/2's default.
    max_calls: Option<u32>,
    /// Where connections go that come for frames, not for gRPC.
    links: Option<mpsc::Sender<Link>>,
}

/// Prepares a server on `tcp` that shows `identity`.
///
/// # Errors
///
/// When the identity is unusable.
pub fn server(tcp: TcpListener, identity: &Identity) -> Result<Server, BindError> {
    serve_on(tcp, identity, &[ALPN_GRPC], None)
}

/// Prepares a server of links: a call is one, with no other on its connection, and
/// so is a connection that comes for frames, which goes to `links`.
pub(crate) fn link_server(
    tcp: TcpListener,
    identity: &Identity,
    links: mpsc::Sender<Link>,
) -> Result<Server, BindError> {
    let server = serve_on(tcp, identity, &[ALPN_GRPC, ALPN_FRAMES], Some(links))?;
    Ok(Server {
        max_calls: Some(1),
        ..server
    })
}

fn serve_on(
    tcp: TcpListener,
    identity: &Identity,
    alpn: &[&[u8]],
    links: Option<mpsc::Sender<Link>>,
) -> Result<Server, BindError> {
    let config = tls::server_config(identity, alpn).map_err(BindError::identity)?;
    Ok(Server {
        tcp,
        acceptor: TlsAcceptor::from(Arc::new(config)),
        max_calls: None,
        links,
    })
}

impl Server {
    /// Serves `routes` until the future is dropped, which closes all connections.
    pub async fn run(self, routes: Routes) {
        self.run_until(routes, future::pending()).await;
    }

    /// Serves `routes`; once `closing` ends, no connections come any more, and
    /// the future ends with the last of them. Dropping it closes them all.
    pub(crate) async fn run_until(self, routes: Routes, closing: impl Future<Output = ()>) {
        let (grpc, connections) = mpsc::channel(ACCEPT_QUEUE);
        let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
        let mut open = JoinSet::new();
        let takers = Takers {
            acceptor: self.acceptor,
            grpc,
            links: self.links,
        };
        let accepting = async {
            tokio::select! {
                () = closing => {}
                () = accept(self.tcp, takers, &mut open) => {}
            }
        };
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .http2_keepalive_timeout(Some(PROBE_DEADLINE))
            .initial_connection_window_size(WINDOW_BYTES)
            .initial_stream_window_size(WINDOW_BYTES)
            .max_concurrent_streams(self.max_calls)
            .add_routes(routes)
            // The end of `incoming` is the signal; with none, the connections
            // would not be told.
            .serve_with_incoming_shutdown(incoming, future::pending());
        let (served, ()) = tokio::join!(serving, accepting);
        if let Err(e) = served {
            debug!("the gRPC server ended: {e}");
        }
    }
}

/// Where connections go once their handshake is done.
#[derive(Clone)]
struct Takers {
    acceptor: TlsAcceptor,
    grpc: mpsc::Sender<Connection<server::TlsStream<TcpStream>>>,
    links: Option<mpsc::Sender<Link>>,
}

/// Accepts connections for ever, a task in `open` for each until it is closed or
/// a link.
async fn accept(tcp: TcpListener, takers: Takers, open: &mut JoinSet<()>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        while open.try_join_next().is_some() {}
        let place = places.clone().acquire_owned().await;
        let place = place.expect("the semaphore is never closed");
        let (stream, peer) = match tcp.accept().await {
            Ok(accepted) => accepted,
            // Out of file descriptors, most likely; they come back.
            Err(e) => {
                debug!("accepting a connection failed: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        open.spawn(set_up(stream, peer, place, takers.clone()));
    }
}

async fn set_up(tcp: TcpStream, peer: SocketAddr, place: OwnedSemaphorePermit, takers: Takers) {
    let Takers {
        acceptor,
        grpc,
        links,
    } = takers;
    let handshake = async {
        tcp.set_nodelay(true)?;
        let mut stream = acceptor.accept(tcp).await?;
        if stream.get_ref().1.alpn_protocol() == Some(ALPN_FRAMES) {
            return Ok((stream, None));
        }
        // The HTTP/2 stack would wait for this without a deadline.
        let mut preface = [0; PREFACE_BYTES];
        stream.read_exact(&mut preface).await?;
        io::Result::Ok((stream, Some(Bytes::copy_from_slice(&preface))))
    };
    match tokio::time::timeout(HANDSHAKE_DEADLINE, handshake).await {
        Ok(Ok((stream, Some(ahead)))) => {
            let connection = Connection::new(stream, ahead, peer, Some(place));
            let guard = CloseOnDrop(connection.closer());
            // An error means that the server is gone.
            let _ = grpc.send(connection).await;
            // So that the server may end.
            drop((grpc, links));
            guard.0.closed().await;
        }
        Ok(Ok((stream, None))) => {
            let links = links.expect("only servers of links offer to take frames");
            tcp::accept(stream, peer, place, HANDSHAKE_DEADLINE, &links).await;
        }
        Ok(Err(e)) => debug!(%peer, "TLS handshake failed: {e}"),
        Err(_) => {
            debug!(%peer, "no TLS handshake and HTTP/2 preface within {HANDSHAKE_DEADLINE:?}");
        }
    }
}

/// tonic leaves connections to tasks of its own; this ends them with ours.
struct CloseOnDrop(Closer);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The stream of answers of a streaming call.
pub type Answers<T> = tonic::codegen::BoxStream<T>;

/// Answers a streaming call with what arrives in `messages`.
pub fn answers<T: Send + 'static>(messages: mpsc::Receiver<T>) -> Answers<T> {
    Box::pin(ReceiverStream::new(messages).map(Ok::<T, Status>))
}

/// The address `request` came from.
pub fn peer<T>(request: &Request<T>) -> SocketAddr {
    caller(request).peer
}

/// Who `request` came from.
pub(crate) fn caller<T>(request: &Request<T>) -> &Caller {
    let caller = request.extensions().get::<Caller>();
    caller.expect("every connection of this server carries its caller")
}
