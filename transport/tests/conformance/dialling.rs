//! Which error says what, and when `auto` is content with gRPC.

use std::{net::SocketAddr, path::Path, time::Duration};

use tensord_transport::{
    Carrier, Dialer, Identity, Link, Listener, TransportChoice,
    dial::DialError,
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};
use tokio::net::{TcpListener, UdpSocket};

use crate::harness::*;

const CHOICES: [TransportChoice; 3] = [
    TransportChoice::Quic,
    TransportChoice::Grpc,
    TransportChoice::Auto,
];

/// Dials with each choice, at the same time.
pub(crate) async fn dial_each(
    address: &str,
    trust: &Trust,
    deadline: Duration,
) -> Vec<Result<Link, DialError>> {
    let dial = async |choice| Dialer::new(choice).dial(address, trust, deadline).await;
    let (quic, grpc, auto) = tokio::join!(dial(CHOICES[0]), dial(CHOICES[1]), dial(CHOICES[2]));
    vec![quic, grpc, auto]
}

pub(crate) fn pin_of_nobody() -> Trust {
    Trust::Pin(Fingerprint([7; 32]))
}

#[tokio::test]
async fn nothing_listens() {
    no_hang(async {
        let tcp = TcpListener::bind(any_port()).await.unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        drop(tcp);
        for result in dial_each(&address, &pin_of_nobody(), DIAL_DEADLINE).await {
            let error = result.unwrap_err();
            assert!(matches!(error, DialError::Unreachable { .. }), "{error:?}");
            let expected = format!("nothing answers at {address}");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    })
    .await;
}

#[tokio::test]
async fn an_address_without_a_port_leads_nowhere() {
    for result in dial_each("127.0.0.1", &pin_of_nobody(), DIAL_DEADLINE).await {
        let error = result.unwrap_err();
        assert!(matches!(error, DialError::Unreachable { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn a_name_is_tried_at_all_its_addresses() {
    no_hang(async {
        let mut server = Server::start().await;
        // Which is ::1 as well on many machines, where nobody listens.
        let name = format!("localhost:{}", server.listener.address().port());
        for result in dial_each(&name, &server.trust, DIAL_DEADLINE).await {
            server.greet(result.unwrap()).await;
        }
    })
    .await;
}

/// Trust in what a file with `text` says.
pub(crate) fn file(directory: &Path, text: &str) -> Trust {
    let path = directory.join("ca.pem");
    std::fs::write(&path, text).unwrap();
    Trust::CaFile(path)
}

#[tokio::test]
async fn an_unusable_ca_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let cases = [
        Trust::CaFile(directory.path().join("missing.pem")),
        file(directory.path(), ""),
        file(directory.path(), "no certificate at all"),
        file(directory.path(), certificate),
    ];
    for trust in cases {
        // Nothing listens there, which is not what comes up first.
        for result in dial_each("127.0.0.1:1", &trust, DIAL_DEADLINE).await {
            let error = result.unwrap_err();
            assert!(matches!(error, DialError::Trust(_)), "{trust:?}: {error:?}");
            assert!(error.to_string().contains(".pem"), "{error}");
        }
    }
}

/// Accepts, and never says a word.
async fn silent_peer() -> (TcpListener, UdpSocket, SocketAddr) {
    loop {
        let tcp = TcpListener::bind(any_port()).await.unwrap();
        let address = tcp.local_addr().unwrap();
        if let Ok(udp) = UdpSocket::bind(address).await {
            return (tcp, udp, address);
        }
    }
}

#[tokio::test]
async fn a_silent_peer_is_given_up_at_the_deadline() {
    no_hang(async {
        let (_tcp, _udp, address) = silent_peer().await;
        let deadline = Duration::from_millis(1500);
        let start = std::time::Instant::now();
        for result in dial_each(&address.to_string(), &pin_of_nobody(), deadline).await {
            let error = result.unwrap_err();
            assert!(matches!(error, DialError::Deadline { .. }), "{error:?}");
            assert!(error.to_string().contains("within 1.5s"), "{error}");
        }
        assert!(start.elapsed() >= deadline);
    })
    .await;
}

#[tokio::test]
async fn auto_prefers_quic() {
    no_hang(async {
        let mut server = Server::start().await;
        let dialer = Dialer::new(TransportChoice::Auto);
        let link = dialer
            .dial(&server.address(), &server.trust, DIAL_DEADLINE)
            .await;
        let (near, _far) = server.greet(link.unwrap()).await;
        assert_eq!(near.carrier, Carrier::Quic);
    })
    .await;
}

/// A listener for gRPC alone, on a port whose UDP side swallows everything.
async fn server_behind_a_firewall() -> (Server, UdpSocket) {
    let pem = IdentityPem::new_pool().unwrap();
    let identity = Identity::from_pem(&pem).unwrap();
    loop {
        let listener = Listener::bind_grpc(any_port(), &identity).await.unwrap();
        if let Ok(udp) = UdpSocket::bind(listener.address()).await {
            let trust = Trust::Pin(identity.fingerprint());
            return (
                Server {
                    listener,
                    pem,
                    trust,
                },
                udp,
            );
        }
    }
}

#[tokio::test]
async fn auto_takes_grpc_where_udp_is_blocked_and_says_so_once() {
    let log = Log::capture();
    no_hang(async {
        let (mut server, udp) = server_behind_a_firewall().await;
        let dialer = Dialer::new(TransportChoice::Auto);
        let mut buffer = [0; 2000];
        for _ in 0..2 {
            // What one learns, its clones know.
            let dialer = dialer.clone();
            let link = dialer
                .dial(&server.address(), &server.trust, DIAL_DEADLINE)
                .await;
            let (near, _far) = server.greet(link.unwrap()).await;
            assert_eq!(near.carrier, Carrier::Grpc);
        }
        // The handshakes of the first dial alone: all from one socket.
        let mut from = Vec::new();
        while let Ok((_, peer)) = udp.try_recv_from(&mut buffer) {
            from.push(peer);
        }
        from.dedup();
        assert_eq!(from.len(), 1, "{from:?}");
    })
    .await;
    let said = log.lines_with("does not get through; using gRPC");
    assert_eq!(said.len(), 1, "{said:?}");
}

#[tokio::test]
async fn auto_reports_what_grpc_says_where_both_fail() {
    no_hang(async {
        let (server, _udp) = server_behind_a_firewall().await;
        let dialer = Dialer::new(TransportChoice::Auto);
        let error = dialer
            .dial(&server.address(), &pin_of_nobody(), DIAL_DEADLINE)
            .await;
        let error = error.unwrap_err();
        assert!(matches!(error, DialError::Certificate { .. }), "{error:?}");
    })
    .await;
}
