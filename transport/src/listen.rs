//! The accepting end: one port, TCP for frames and gRPC, and UDP for QUIC.

pub(crate) mod error;
#[cfg(target_os = "linux")]
mod passed;

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
};

use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};
use tracing::{debug, warn};

pub use self::error::BindError;
#[cfg(target_os = "linux")]
use crate::handoff::{LeaseRouter, Passed};
use crate::{
    carriers::{SETUP_DEADLINE, grpc, quic, tcp},
    control,
    gate::{Gate, GateEntry},
    identity::Identity,
    link::Link,
};

/// Queue length for links that [`Listener::accept`] has not taken yet.
const ACCEPT_QUEUE: usize = 16;

/// Number of attempts to find a port that is free for UDP and TCP, when the port given is
/// 0.
const PORT_TRIES: usize = 16;

/// Accepts links. Dropping the listener closes the port and the links not yet accepted;
/// accepted links go on.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    links: mpsc::Receiver<Link>,
    quic: Option<quinn::Endpoint>,
    /// The accepting tasks. They end by themselves when `links` is dropped, the task of
    /// gRPC with the last of its links.
    tasks: JoinSet<()>,
}

impl Listener {
    /// Listens on `address`, UDP and TCP; port 0 picks a port that is free for both. Must
    /// be called within a Tokio runtime.
    ///
    /// # Errors
    ///
    /// When the port is taken or the identity unusable.
    pub async fn bind(address: SocketAddr, identity: &Identity) -> Result<Self, BindError> {
        let (tcp, udp) = bind_tcp_and_udp(address).await?;
        let mut starting = Starting::new(Some(quic::server(udp, identity)?));
        let address = tcp_address(&tcp)?;
        let server = starting.server(control::Incoming::Port(tcp), identity)?;
        Ok(starting.serve(server, address))
    }

    /// Listens as [`bind`](Self::bind) does, and passes connections on to the processes that
    /// `router` names, before their TLS handshake.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    #[cfg(target_os = "linux")]
    pub async fn bind_with_router(
        address: SocketAddr,
        identity: &Identity,
        router: Arc<dyn LeaseRouter>,
    ) -> Result<Self, BindError> {
        let (tcp, udp) = bind_tcp_and_udp(address).await?;
        let endpoint = quic::routing_server(udp, identity, router.clone())?;
        let mut starting = Starting::new(Some(endpoint));
        let address = tcp_address(&tcp)?;
        let server = starting.server(control::Incoming::Port(tcp), identity)?;
        Ok(starting.serve(server.with_router(router), address))
    }

    /// Accepts links on `connections`, which another process has accepted and passed on. The
    /// listener has no address of its own. Must be called within a Tokio runtime.
    ///
    /// # Errors
    ///
    /// When the identity is unusable.
    #[cfg(target_os = "linux")]
    pub fn of_passed(
        connections: mpsc::Receiver<Passed>,
        identity: &Identity,
    ) -> Result<Self, BindError> {
        let mut starting = Starting::new(None);
        let (tcp, passed_tcp) = mpsc::channel(ACCEPT_QUEUE);
        starting.tasks.spawn(passed::accept(
            connections,
            tcp,
            quic::server_config(identity)?,
            starting.gate.clone(),
            starting.accepted.clone(),
        ));
        let server = starting.server(control::Incoming::Passed(passed_tcp), identity)?;
        Ok(starting.serve(server, (Ipv4Addr::UNSPECIFIED, 0).into()))
    }

    /// Listens on TCP alone, leaving the UDP port to others.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub async fn bind_tcp(address: SocketAddr, identity: &Identity) -> Result<Self, BindError> {
        let tcp = listen_tcp(address).await?;
        let address = tcp_address(&tcp)?;
        let mut starting = Starting::new(None);
        let server = starting.server(control::Incoming::Port(tcp), identity)?;
        Ok(starting.serve(server, address))
    }

    /// Returns the address that the listener is bound to, or `0.0.0.0:0` if it has none.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next link. Its first frame has arrived, or is in flight.
    pub async fn accept(&mut self) -> Link {
        match self.links.recv().await {
            Some(link) => link,
            // All accepting tasks have ended, which only dropping the listener causes.
            None => std::future::pending().await,
        }
    }
}

/// A listener whose tasks are being started.
struct Starting {
    tasks: JoinSet<()>,
    gate: Arc<Gate>,
    quic: Option<quinn::Endpoint>,
    accepted: mpsc::Sender<Link>,
    links: mpsc::Receiver<Link>,
}

impl Starting {
    fn new(quic: Option<quinn::Endpoint>) -> Self {
        let (accepted, links) = mpsc::channel(ACCEPT_QUEUE);
        let (mut tasks, gate) = (JoinSet::new(), Gate::new());
        if let Some(endpoint) = quic.clone() {
            tasks.spawn(accept_quic(endpoint, gate.clone(), accepted.clone()));
        }
        Self {
            tasks,
            gate,
            quic,
            accepted,
            links,
        }
    }

    /// Makes the server of TCP connections.
    fn server(
        &mut self,
        incoming: control::Incoming,
        identity: &Identity,
    ) -> Result<control::Server, BindError> {
        let links = self.accepted.clone();
        let frames =
            control::frame_handler(move |connection| tcp::accept(connection, links.clone()));
        control::link_server(incoming, identity, frames, self.gate.clone())
    }

    fn serve(mut self, server: control::Server, address: SocketAddr) -> Listener {
        self.tasks.spawn(grpc::serve_links(server, self.accepted));
        Listener {
            address,
            links: self.links,
            quic: self.quic,
            tasks: self.tasks,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(endpoint) = &self.quic {
            endpoint.set_server_config(None);
        }
        self.tasks.detach_all();
    }
}

fn tcp_address(tcp: &TcpListener) -> Result<SocketAddr, BindError> {
    tcp.local_addr().map_err(|e| BindError::new("listen", e))
}

async fn listen_tcp(address: SocketAddr) -> Result<TcpListener, BindError> {
    let tcp = TcpListener::bind(address).await;
    tcp.map_err(|e| BindError::listen("TCP", address, e))
}

async fn bind_tcp_and_udp(address: SocketAddr) -> Result<(TcpListener, UdpSocket), BindError> {
    let mut failure = None;
    for _ in 0..PORT_TRIES {
        let tcp = listen_tcp(address).await?;
        let chosen = tcp_address(&tcp)?;
        match UdpSocket::bind(chosen) {
            Ok(udp) => return Ok((tcp, udp)),
            Err(e) => failure = Some(BindError::listen("UDP", chosen, e)),
        }
        if address.port() != 0 {
            break;
        }
    }
    Err(failure.expect("a try that binds neither returns its error"))
}

/// Accepts connections until the receiver of the links is dropped.
async fn accept_quic(endpoint: quinn::Endpoint, gate: Arc<Gate>, accepted: mpsc::Sender<Link>) {
    let (mut setups, mut ticks) = (JoinSet::new(), Gate::ticks());
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            _ = ticks.tick(), if gate.has_unadmitted() => {
                gate.tick();
                continue;
            }
            () = accepted.closed() => return,
        };
        let Some(incoming) = incoming else {
            // quinn gave up the socket after an error that it does not return.
            return warn!("QUIC connections are no longer accepted, because the socket failed");
        };
        while setups.try_join_next().is_some() {}
        if gate.is_busy() && !incoming.remote_address_validated() {
            // No state is kept for the connection until its peer has proved its address.
            if let Err(e) = incoming.retry() {
                e.into_incoming().refuse();
            }
            continue;
        }
        let peer = incoming.remote_address();
        let gate_entry = gate.enter(peer.ip());
        match gate_entry.is_served() {
            true => drop(setups.spawn(set_up_quic(incoming, gate_entry, accepted.clone()))),
            // A QUIC connection cannot wait unread in a socket of its own as a TCP one
            // can.
            false => {
                debug!(%peer, "connection refused: too many peers have presented no valid token or certificate");
                incoming.refuse();
            }
        }
    }
}

async fn set_up_quic(
    incoming: quinn::Incoming,
    gate_entry: GateEntry,
    accepted: mpsc::Sender<Link>,
) {
    let peer = incoming.remote_address();
    let mut watch = gate_entry.watch();
    let setup = async {
        let connection = incoming.await?;
        let (send, recv) = connection.accept_bi().await?;
        Ok::<_, quinn::ConnectionError>((connection, send, recv))
    };
    let setup = tokio::select! {
        setup = tokio::time::timeout(SETUP_DEADLINE, setup) => setup,
        true = watch.wait_until_expelled() => return,
    };
    match setup {
        Ok(Ok((connection, send, recv))) => {
            let (halves, expel) = quic::accepted(connection, send, recv, gate_entry);
            // An error means that the listener was dropped, and the link with it.
            let _ = accepted.send(halves.into()).await;
            drop(accepted);
            if watch.wait_until_expelled().await {
                expel.close();
            }
        }
        Ok(Err(e)) => debug!(%peer, "QUIC connection failed: {e}"),
        Err(_) => debug!(%peer, "the QUIC connection sent nothing for {SETUP_DEADLINE:?}"),
    }
}
