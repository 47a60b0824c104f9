//! Connections that another process has accepted and passed on.

use std::{io, net::UdpSocket, sync::Arc};

use bytes::Bytes;
use tokio::{net::TcpStream, sync::mpsc, task::JoinSet, time::timeout};
use tracing::debug;

use super::set_up_quic;
use crate::{
    carriers::{SETUP_DEADLINE, quic},
    gate::{Gate, GateEntry},
    handoff::Passed,
    link::Link,
};

/// Sorts connections by carrier: TCP connections go to `tcp`, and QUIC connections are set up
/// here. Ends when the listener is dropped, or when the other process is gone and all setups
/// have ended.
pub(super) async fn accept(
    mut connections: mpsc::Receiver<Passed>,
    tcp: mpsc::Sender<TcpStream>,
    config: quinn::ServerConfig,
    gate: Arc<Gate>,
    accepted: mpsc::Sender<Link>,
) {
    let (mut setups, mut ticks) = (JoinSet::new(), Gate::ticks());
    loop {
        let passed = tokio::select! {
            passed = connections.recv() => passed,
            _ = ticks.tick(), if gate.has_unadmitted() => {
                gate.tick();
                continue;
            }
            () = accepted.closed() => return,
        };
        while setups.try_join_next().is_some() {}
        match passed {
            // If the queue is full, because connections arrive faster than they are taken, the
            // connection is dropped, and the client dials again.
            Some(Passed::Tcp(stream)) => drop(tcp.try_send(stream)),
            Some(Passed::Quic { socket, first }) => {
                let set_up = set_up(socket, first, &config, &gate, &accepted);
                match set_up {
                    Ok(set_up) => drop(setups.spawn(set_up)),
                    Err(e) => debug!("cannot use a QUIC connection that was passed on: {e}"),
                }
            }
            None => break,
        }
    }
    // Connections that are being set up go on.
    while setups.join_next().await.is_some() {}
}

/// Lets a connection into the gate, and returns what sets it up. The gate counts it before it has an endpoint: the
/// first datagram may be anything, from a forged address, and no connection may ever follow.
///
/// # Errors
///
/// When the gate has no place for the connection, or the system refuses a call.
fn set_up(
    socket: UdpSocket,
    first: Bytes,
    config: &quinn::ServerConfig,
    gate: &Arc<Gate>,
    accepted: &mpsc::Sender<Link>,
) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let is_busy = gate.is_busy();
    let gate_entry = gate.enter(socket.peer_addr()?.ip());
    if !gate_entry.is_served() {
        return Err(io::Error::other("too many peers without a valid token"));
    }
    let endpoint = quic::passed_server(socket, first, config.clone())?;
    Ok(accept_one(endpoint, is_busy, gate_entry, accepted.clone()))
}

/// Accepts the connection on an endpoint that has one client. If the gate `is_busy`, the client must first prove
/// its address, which may be forged.
async fn accept_one(
    endpoint: quinn::Endpoint,
    is_busy: bool,
    gate_entry: GateEntry,
    accepted: mpsc::Sender<Link>,
) {
    let incoming = async {
        loop {
            let incoming = endpoint.accept().await?;
            if !is_busy || incoming.remote_address_validated() {
                return Some(incoming);
            }
            if let Err(e) = incoming.retry() {
                e.into_incoming().refuse();
                return None;
            }
        }
    };
    let mut watch = gate_entry.watch();
    let incoming = tokio::select! {
        incoming = timeout(SETUP_DEADLINE, incoming) => incoming,
        true = watch.wait_until_expelled() => return,
    };
    let Ok(Some(incoming)) = incoming else {
        return;
    };
    // The endpoint accepts no further connection.
    endpoint.set_server_config(None);
    set_up_quic(incoming, gate_entry, accepted).await;
}
