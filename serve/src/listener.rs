//! Accepts connections, with TLS or without, and serves HTTP/1.1 and HTTP/2 on them.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{
        conn::auto::Builder,
        graceful::{GracefulShutdown, Watcher},
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;
use tracing::debug;

use crate::{
    connection::{Patience, Watched},
    http::Peer,
    limits::Limits,
};

/// How long the listener waits after it could not accept a connection, as there may be too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Most requests at a time on a connection of HTTP/2.
const STREAMS: u32 = 256;

/// A connection of HTTP/2 without traffic for the first time gets a PING, and is closed if there is no reply within the
/// second.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// Accepts connections, and serves requests by these routes.
pub(crate) struct Listener {
    /// `None` without TLS.
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) routes: Router,
    pub(crate) limits: Limits,
}

impl Listener {
    /// Serves until `stop` is set; then accepts no more, and lets the requests finish within `grace`.
    pub(crate) async fn run(
        self,
        listener: TcpListener,
        mut stop: watch::Receiver<bool>,
        grace: Duration,
    ) {
        let graceful = GracefulShutdown::new();
        let places = Arc::new(Semaphore::new(self.limits.connections));
        let connections = Arc::new(self);
        while !*stop.borrow() {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                changed = stop.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => break,
                },
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    debug!("cannot accept a connection: {error}");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            // A connection beyond the bound is closed.
            let Ok(place) = places.clone().try_acquire_owned() else {
                debug!(?peer, "there are too many connections");
                continue;
            };
            let (connections, watcher) = (connections.clone(), graceful.watcher());
            let mut stopped = stop.clone();
            tokio::spawn(async move {
                let stream = tokio::select! {
                    stream = connections.handshake(stream, peer) => stream,
                    () = async { drop(stopped.wait_for(|is_stopped| *is_stopped).await) } => None,
                };
                if let Some(stream) = stream {
                    connections.serve(stream, peer, watcher).await;
                }
                drop(place);
            });
        }
        // Further clients are refused from now on, and can go to another server.
        drop(listener);
        if tokio::time::timeout(grace, graceful.shutdown())
            .await
            .is_err()
        {
            debug!("some requests had no answer after {grace:?}");
        }
    }

    /// Returns the connection with TLS, if the server has it, or `None` if the handshake fails.
    async fn handshake(&self, stream: TcpStream, peer: SocketAddr) -> Option<Stream> {
        // Answers are small, and clients wait for them.
        let _ = stream.set_nodelay(true);
        let Some(tls) = &self.tls else {
            return Some(Box::new(stream));
        };
        match tokio::time::timeout(self.limits.header_timeout, tls.accept(stream)).await {
            Ok(Ok(stream)) => Some(Box::new(stream)),
            Ok(Err(error)) => {
                debug!(?peer, "the TLS handshake failed: {error}");
                None
            }
            Err(_) => {
                debug!(?peer, "the TLS handshake took too long");
                None
            }
        }
    }

    /// Serves a connection until either end closes it, or its client does nothing for too long.
    async fn serve(&self, stream: Stream, peer: SocketAddr, watcher: Watcher) {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS)
            .keep_alive_interval(KEEP_ALIVE.0)
            .keep_alive_timeout(KEEP_ALIVE.1);
        let watched = Watched::new();
        let service = service_fn(|mut request: Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            let begun = watched.begin();
            let answered = self.routes.clone().oneshot(request);
            async move {
                let answer = answered.await.unwrap_or_else(|never| match never {});
                Ok::<_, Infallible>(answer.map(|body| begun.answered_with(body)))
            }
        });
        let patience = Patience {
            first: self.limits.header_timeout,
            answer: self.limits.body_timeout,
        };
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            ended = watcher.watch(connection) => if let Err(error) = ended {
                debug!(?peer, "the connection ended: {error}");
            },
            () = watched.expired(patience) => {
                debug!(?peer, "the connection is closed, as its client does nothing");
            }
        }
    }
}

/// A connection, with TLS or without.
type Stream = Box<dyn Io>;

trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}
