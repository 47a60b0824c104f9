//! Connections that another process has accepted and passed on.

use std::sync::Arc;

use tokio::{net::TcpStream, sync::mpsc, task::JoinSet, time::timeout};
use tracing::debug;

use super::set_up_quic;
use crate::{
    carriers::{SETUP_DEADLINE, quic},
    gate::Gate,
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
                match quic::passed_server(socket, first, config.clone()) {
                    Ok(endpoint) => {
                        let set_up = accept_one(endpoint, gate.clone(), accepted.clone());
                        setups.spawn(set_up);
                    }
                    Err(e) => debug!("cannot use a QUIC connection that was passed on: {e}"),
                }
            }
            None => break,
        }
    }
    // Connections that are being set up go on.
    while setups.join_next().await.is_some() {}
}

/// Accepts the connection on an endpoint that has one client.
async fn accept_one(endpoint: quinn::Endpoint, gate: Arc<Gate>, accepted: mpsc::Sender<Link>) {
    let incoming = async {
        loop {
            let incoming = endpoint.accept().await?;
            // While the gate is busy, the client must first prove its address, which may be
            // forged.
            if !gate.is_busy() || incoming.remote_address_validated() {
                return Some(incoming);
            }
            if let Err(e) = incoming.retry() {
                e.into_incoming().refuse();
                return None;
            }
        }
    };
    let Ok(Some(incoming)) = timeout(SETUP_DEADLINE, incoming).await else {
        return;
    };
    // The endpoint accepts no further connection.
    endpoint.set_server_config(None);
    let gate_entry = gate.enter(incoming.remote_address().ip());
    match gate_entry.is_served() {
        true => set_up_quic(incoming, gate_entry, accepted).await,
        false => incoming.refuse(),
    }
}
