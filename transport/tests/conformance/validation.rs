//! Address validation of QUIC dialers while there are many strangers: no state is kept,
//! and few bytes are sent, for a source address that anybody may have forged.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    net::{TcpStream, UdpSocket},
    task::JoinSet,
};

use crate::harness::*;

/// Number of strangers from which on a listener validates addresses (`BUSY` in
/// `gate.rs`).
const BUSY_THRESHOLD: usize = 32;

/// What passed through a relay.
#[derive(Debug, Default)]
struct RelayStats {
    /// Number of packets with which the listener requests address validation.
    retries: AtomicUsize,
    /// Bytes of the dialler before the first of these packets, and bytes of these
    /// packets.
    request_bytes: AtomicUsize,
    retry_bytes: AtomicUsize,
}

/// A relay of UDP packets to `listener`, for one dialler.
async fn relay(listener: SocketAddr, stats: Arc<RelayStats>) -> (SocketAddr, JoinSet<()>) {
    let near = UdpSocket::bind(any_port()).await.unwrap();
    let far = UdpSocket::bind(any_port()).await.unwrap();
    far.connect(listener).await.unwrap();
    let address = near.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut up, mut down, mut dialler) = ([0; 2048], [0; 2048], None);
        loop {
            tokio::select! {
                received = near.recv_from(&mut up) => {
                    let (size, from) = received.unwrap();
                    dialler = Some(from);
                    if stats.retries.load(Ordering::Relaxed) == 0 {
                        stats.request_bytes.fetch_add(size, Ordering::Relaxed);
                    }
                    far.send(&up[..size]).await.unwrap();
                }
                received = far.recv(&mut down) => {
                    let size = received.unwrap();
                    // A long header of the type `Retry` (RFC 9000, 17.2.5).
                    if down[0] & 0xf0 == 0xf0 {
                        stats.retries.fetch_add(1, Ordering::Relaxed);
                        stats.retry_bytes.fetch_add(size, Ordering::Relaxed);
                    }
                    near.send_to(&down[..size], dialler.unwrap()).await.unwrap();
                }
            }
        }
    });
    (address, tasks)
}

/// Dials through a relay while there are `unadmitted`, and returns what passed through it.
async fn dial_with_unadmitted(unadmitted: usize) -> Arc<RelayStats> {
    let mut server = Server::start().await;
    let listener = server.listener.address();
    let mut sockets = Vec::new();
    for _ in 0..unadmitted {
        sockets.push(TcpStream::connect(listener).await.unwrap());
    }
    // They are in the listener's queue, which accepts them in order.
    let (mut near, mut far) = server.connect(TCP).await;
    send_frames(&mut near.sender, 1, 10).await;
    expect_frames(&mut far.receiver, 1, 10).await;
    let stats = Arc::<RelayStats>::default();
    let (address, _relay) = relay(listener, stats.clone()).await;
    let dialer = QUIC.dialer();
    let address = address.to_string();
    let near = dialer.dial(&address, &server.trust, DIAL_DEADLINE);
    let (mut near, mut far) = server.exchange_first_frame(near.await.unwrap()).await;
    send_frames(&mut near.sender, 3, 1000).await;
    expect_frames(&mut far.receiver, 3, 1000).await;
    stats
}

#[tokio::test]
async fn few_unadmitted_peers_need_no_address_validation() {
    let stats = no_hang(dial_with_unadmitted(0)).await;
    assert_eq!(stats.retries.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn many_unadmitted_peers_trigger_address_validation() {
    let stats = no_hang(dial_with_unadmitted(BUSY_THRESHOLD)).await;
    assert!(stats.retries.load(Ordering::Relaxed) > 0, "{stats:?}");
    let bytes = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    // A forged address gets fewer bytes than the attacker sends.
    assert!(
        bytes(&stats.retry_bytes) < bytes(&stats.request_bytes),
        "{stats:?}"
    );
}
