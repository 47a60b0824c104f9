//! Accepts the connections of a server: the gate, the TLS handshake, and the handoff to
//! tonic or to the handler of frames.

use std::{io, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::sleep,
};
use tokio_rustls::{TlsAcceptor, server};
use tracing::{debug, warn};

#[cfg(target_os = "linux")]
use crate::handoff::{Destination, LeaseRouter, Passed, lease_of};
use crate::{
    connection::{Closer, Connection, PeerInfo},
    gate::{Gate, GateEntry},
    handshakes,
    tls::{ALPN_FRAMES, PeerCertificate},
};

/// Time limit for a peer's TLS handshake and HTTP/2 preface.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(4);

/// How long a connection waits for its lease to become known. The scheduler announces a lease to
/// its worker and its client at the same time.
#[cfg(target_os = "linux")]
const ANNOUNCEMENT_TIMEOUT: Duration = Duration::from_millis(200);

/// Pause after a connection that could not be accepted.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Length of the connection preface that every HTTP/2 client sends first (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 24;

/// A connection that negotiated frames instead of gRPC.
pub(crate) struct FrameConnection {
    pub(crate) stream: server::TlsStream<TcpStream>,
    pub(crate) peer: SocketAddr,
    pub(crate) gate_entry: GateEntry,
}

/// Runs a connection that negotiated frames until it is closed.
pub(crate) type FrameHandler =
    Arc<dyn Fn(FrameConnection) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// Returns a handler that calls `run`.
pub(crate) fn frame_handler<F>(
    run: impl Fn(FrameConnection) -> F + Send + Sync + 'static,
) -> FrameHandler
where
    F: Future<Output = ()> + Send + 'static,
{
    Arc::new(move |connection| Box::pin(run(connection)))
}

/// Where connections come from.
pub(crate) enum Incoming {
    /// A port of this process.
    Port(TcpListener),
    /// Another process, which has accepted them.
    #[cfg(target_os = "linux")]
    Passed(mpsc::Receiver<TcpStream>),
}

impl Incoming {
    async fn next(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        match self {
            Self::Port(tcp) => tcp.accept().await,
            #[cfg(target_os = "linux")]
            Self::Passed(connections) => loop {
                let Some(stream) = connections.recv().await else {
                    // No more connections come; those that are open go on.
                    return std::future::pending().await;
                };
                // The call fails if the peer has reset the connection meanwhile.
                if let Ok(peer) = stream.peer_addr() {
                    return Ok((stream, peer));
                }
            },
        }
    }
}

/// Where accepted connections go: to the process of their lease, or after the TLS
/// handshake to tonic or to the handler of frames.
#[derive(Clone)]
pub(super) struct Handoff {
    #[cfg(target_os = "linux")]
    pub(super) router: Option<Arc<dyn LeaseRouter>>,
    pub(super) acceptor: TlsAcceptor,
    pub(super) handshakes: handshakes::Handle,
    pub(super) grpc: mpsc::Sender<Connection<server::TlsStream<TcpStream>>>,
    pub(super) frames: Option<FrameHandler>,
}

/// Accepts connections forever. Each has a task in `open`, which ends when the connection
/// is closed.
pub(super) async fn accept(
    mut incoming: Incoming,
    gate: &Arc<Gate>,
    handoff: Handoff,
    open: &mut JoinSet<()>,
) {
    let (mut failing, mut ticks) = (false, Gate::ticks());
    loop {
        while open.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = incoming.next() => accepted,
            _ = ticks.tick(), if gate.has_unadmitted() => {
                gate.tick();
                continue;
            }
        };
        match accepted {
            Ok((stream, peer)) => {
                failing = false;
                let gate_entry = gate.enter(peer.ip());
                open.spawn(run_connection(stream, peer, gate_entry, handoff.clone()));
            }
            // Most likely out of file descriptors, which is temporary.
            Err(e) => {
                if !std::mem::replace(&mut failing, true) {
                    warn!("cannot accept connections and will try again: {e}");
                }
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Waits until the gate serves the connection, then runs it until it ends or is expelled.
async fn run_connection(
    tcp: TcpStream,
    peer: SocketAddr,
    mut gate_entry: GateEntry,
    handoff: Handoff,
) {
    if !gate_entry.wait_until_served().await {
        return;
    }
    let mut watch = gate_entry.watch();
    // Boxed, because under attack most tasks never get here and should stay small.
    let serving = Box::pin(handshake_and_hand_off(tcp, peer, gate_entry, handoff));
    tokio::select! {
        // `serving` is polled first: it must see the expulsion of a link that it has handed on, and
        // close the link.
        biased;
        () = serving => {}
        true = watch.wait_until_expelled() => debug!(%peer, "the peer presented no valid token or certificate in time"),
    }
}

async fn handshake_and_hand_off(
    tcp: TcpStream,
    peer: SocketAddr,
    gate_entry: GateEntry,
    handoff: Handoff,
) {
    #[cfg(target_os = "linux")]
    let tcp = match pass_on(tcp, peer, handoff.router.as_deref()).await {
        Some(tcp) => tcp,
        None => return,
    };
    let Handoff {
        acceptor,
        handshakes,
        grpc,
        frames,
        ..
    } = handoff;
    let handshake = async {
        tcp.set_nodelay(true)?;
        let mut stream = handshakes.run(acceptor.accept(tcp)).await?;
        if stream.get_ref().1.alpn_protocol() == Some(ALPN_FRAMES) {
            return Ok((stream, None));
        }
        // The HTTP/2 stack would wait for the preface without a deadline.
        let mut preface = [0; PREFACE_BYTES];
        stream.read_exact(&mut preface).await?;
        io::Result::Ok((stream, Some(Bytes::copy_from_slice(&preface))))
    };
    match tokio::time::timeout(HANDSHAKE_DEADLINE, handshake).await {
        Ok(Ok((stream, Some(read_ahead)))) => {
            let certificate = PeerCertificate::of(stream.get_ref().1.peer_certificates());
            let peer = PeerInfo {
                address: peer,
                certificate,
                gate_entry: Some(gate_entry),
            };
            let connection = Connection::new(stream, read_ahead, peer);
            let guard = CloseOnDrop(connection.closer());
            // An error means that the server is gone.
            let _ = grpc.send(connection).await;
            // The server can only end when all these senders are dropped.
            drop((grpc, frames));
            guard.0.closed().await;
        }
        Ok(Ok((stream, None))) => {
            let run = frames.expect("only servers of links negotiate frames");
            let connection = FrameConnection {
                stream,
                peer,
                gate_entry,
            };
            run(connection).await;
        }
        Ok(Err(e)) => debug!(%peer, "TLS handshake failed: {e}"),
        Err(_) => {
            debug!(%peer, "the peer completed no TLS handshake and HTTP/2 preface within {HANDSHAKE_DEADLINE:?}");
        }
    }
}

/// Passes a connection on to the process of its lease. Returns the connection if this process
/// serves it, and `None` if it is passed on or broken.
#[cfg(target_os = "linux")]
async fn pass_on(
    tcp: TcpStream,
    peer: SocketAddr,
    router: Option<&dyn LeaseRouter>,
) -> Option<TcpStream> {
    let Some(router) = router else {
        return Some(tcp);
    };
    let passed = async {
        let Some(lease) = lease_of(&tcp).await else {
            return Some(tcp);
        };
        let mut timeout = std::pin::pin!(sleep(ANNOUNCEMENT_TIMEOUT));
        loop {
            let announced = router.announced().notified();
            match router.destination(lease) {
                Destination::Process(process) => {
                    // An error means that the process is gone; the client dials again.
                    let _ = process.send(Passed::Tcp(tcp)).await;
                    return None;
                }
                Destination::Unknown => tokio::select! {
                    () = announced => {}
                    () = &mut timeout => return Some(tcp),
                },
                Destination::Here => return Some(tcp),
            }
        }
    };
    match tokio::time::timeout(HANDSHAKE_DEADLINE, passed).await {
        Ok(kept) => kept,
        Err(_) => {
            debug!(%peer, "the peer sent no TLS ClientHello, or its lease's process took no connection, within {HANDSHAKE_DEADLINE:?}");
            None
        }
    }
}

/// Closes the connection when this task is dropped: tonic serves it in a task of its own.
struct CloseOnDrop(Closer);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}
