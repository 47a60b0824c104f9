//! The errors of dialling, and when `auto` uses another carrier.

use std::{net::SocketAddr, path::Path, time::Duration};

use quinn::Endpoint;
use tensord_transport::{
    Carrier, Dialer, Identity, Link, Listener, TransportChoice,
    dial::DialError,
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};
use tokio::net::{TcpListener, UdpSocket};

use crate::{
    harness::*,
    raw::{any_proxy, http_proxy, quic_server},
};

const CHOICES: [TransportChoice; 4] = [
    TransportChoice::Quic,
    TransportChoice::Grpc,
    TransportChoice::Tcp,
    TransportChoice::Auto,
];

/// Dials with each choice, at the same time.
pub(crate) async fn dial_with_all_choices(
    address: &str,
    trust: &Trust,
    deadline: Duration,
) -> Vec<Result<Link, DialError>> {
    let dial = async |choice| Dialer::new(choice).dial(address, trust, deadline).await;
    let [quic, grpc, tcp, auto] = CHOICES.map(dial);
    let (quic, grpc, tcp, auto) = tokio::join!(quic, grpc, tcp, auto);
    vec![quic, grpc, tcp, auto]
}

pub(crate) fn unknown_pin() -> Trust {
    Trust::Pin(Fingerprint([7; 32]))
}

#[tokio::test]
async fn dialling_a_closed_port_is_unreachable() {
    no_hang(async {
        let tcp = TcpListener::bind(any_port()).await.unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        drop(tcp);
        for result in dial_with_all_choices(&address, &unknown_pin(), DIAL_DEADLINE).await {
            let error = result.unwrap_err();
            assert!(matches!(error, DialError::Unreachable { .. }), "{error:?}");
            let expected = format!("nothing answers at {address}");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    })
    .await;
}

#[tokio::test]
async fn address_without_port_is_unreachable() {
    for result in dial_with_all_choices("127.0.0.1", &unknown_pin(), DIAL_DEADLINE).await {
        let error = result.unwrap_err();
        assert!(matches!(error, DialError::Unreachable { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn all_addresses_of_a_name_are_tried() {
    no_hang(async {
        let mut server = Server::start().await;
        // On many machines the name also means ::1, where nothing listens.
        let name = format!("localhost:{}", server.listener.address().port());
        for result in dial_with_all_choices(&name, &server.trust, DIAL_DEADLINE).await {
            server.exchange_first_frame(result.unwrap()).await;
        }
    })
    .await;
}

/// Returns trust in a file that contains `text`.
pub(crate) fn ca_file_with(directory: &Path, text: &str) -> Trust {
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
        ca_file_with(directory.path(), ""),
        ca_file_with(directory.path(), "no certificate at all"),
        ca_file_with(directory.path(), certificate),
    ];
    for trust in cases {
        // Nothing listens there, but the error about trust comes first.
        for result in dial_with_all_choices("127.0.0.1:1", &trust, DIAL_DEADLINE).await {
            let error = result.unwrap_err();
            assert!(matches!(error, DialError::Trust(_)), "{trust:?}: {error:?}");
            assert!(error.to_string().contains(".pem"), "{error}");
        }
    }
}

/// Accepts connections, and never sends anything.
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
        for result in dial_with_all_choices(&address.to_string(), &unknown_pin(), deadline).await {
            let error = result.unwrap_err();
            assert!(matches!(error, DialError::Deadline { .. }), "{error:?}");
            assert!(error.to_string().contains("within 1.5s"), "{error}");
        }
        assert!(start.elapsed() >= deadline);
    })
    .await;
}

/// Returns the carrier of a link from `dialer` to `server`.
async fn carrier_to(server: &mut Server, dialer: &Dialer) -> Carrier {
    let link = dialer
        .dial(&server.address(), &server.trust, DIAL_DEADLINE)
        .await;
    let (near, _far) = server.exchange_first_frame(link.unwrap()).await;
    near.carrier
}

#[tokio::test]
async fn auto_prefers_tcp() {
    no_hang(async {
        let mut server = Server::start().await;
        let dialer = Dialer::new(TransportChoice::Auto);
        assert_eq!(carrier_to(&mut server, &dialer).await, Carrier::Tcp);
    })
    .await;
}

/// QUIC's UDP port, with a TCP port of the same number that accepts nothing.
async fn quic_only_endpoint() -> (Endpoint, Trust, TcpListener) {
    loop {
        let (endpoint, trust) = quic_server();
        if let Ok(tcp) = TcpListener::bind(endpoint.local_addr().unwrap()).await {
            return (endpoint, trust, tcp);
        }
    }
}

/// Returns the carrier of a link from `dialer` to `endpoint`.
async fn carrier_to_endpoint(endpoint: &Endpoint, trust: &Trust, dialer: &Dialer) -> Carrier {
    let address = endpoint.local_addr().unwrap().to_string();
    let accepting = async { endpoint.accept().await.unwrap().await.unwrap() };
    let dialling = dialer.dial(&address, trust, DIAL_DEADLINE);
    let (link, _accepted) = tokio::join!(dialling, accepting);
    link.unwrap().carrier
}

#[tokio::test]
async fn auto_falls_back_to_quic_and_logs_it_once() {
    let log = Log::capture();
    no_hang(async {
        let (endpoint, trust, tcp) = quic_only_endpoint().await;
        let dialer = Dialer::new(TransportChoice::Auto);
        for _ in 0..2 {
            // Clones share what they learnt.
            let carrier = carrier_to_endpoint(&endpoint, &trust, &dialer.clone()).await;
            assert_eq!(carrier, Carrier::Quic);
        }
        // TCP was tried at the first dial only, and not for gRPC: if one is silent, so is
        // the other.
        let tcp = tcp.into_std().unwrap();
        let tried = std::iter::from_fn(|| tcp.accept().ok()).count();
        assert_eq!(tried, 1);
    })
    .await;
    let said = log.lines_with("are not delivered; using QUIC instead");
    assert_eq!(said.len(), 1, "{said:?}");
}

#[tokio::test]
async fn auto_goes_back_to_tcp_when_quic_no_longer_gets_through() {
    no_hang(async {
        let (endpoint, trust, tcp) = quic_only_endpoint().await;
        let dialer = Dialer::new(TransportChoice::Auto);
        let carrier = carrier_to_endpoint(&endpoint, &trust, &dialer).await;
        assert_eq!(carrier, Carrier::Quic);
        // Now UDP is silent, and TCP is open.
        let address = endpoint.local_addr().unwrap();
        endpoint.set_server_config(None);
        drop(tcp);
        let pem = IdentityPem::new_pool().unwrap();
        let identity = Identity::from_pem(&pem).unwrap();
        let mut server = Server {
            listener: Listener::bind_tcp(address, &identity).await.unwrap(),
            pem,
            trust: Trust::Pin(identity.fingerprint()),
        };
        assert_eq!(carrier_to(&mut server, &dialer).await, Carrier::Tcp);
    })
    .await;
}

#[tokio::test]
async fn auto_falls_back_to_grpc_behind_an_http_proxy() {
    let log = Log::capture();
    no_hang(async {
        let mut server = Server::start().await;
        let proxy = http_proxy(&server).await;
        let dialer = Dialer::new(TransportChoice::Auto);
        let address = proxy.address.to_string();
        for _ in 0..2 {
            let link = dialer.dial(&address, &proxy.trust, DIAL_DEADLINE).await;
            let (near, far) = server.exchange_first_frame(link.unwrap()).await;
            assert_eq!(near.carrier, Carrier::Grpc);
            // The proxy takes one connection at a time.
            drop((near, far));
        }
        // Frames were refused once, before gRPC was known to pass.
        assert_eq!(proxy.failed_handshakes(), 1);
    })
    .await;
    let said = log.lines_with("are not delivered; using gRPC instead");
    assert_eq!(said.len(), 1, "{said:?}");
}

#[tokio::test]
async fn auto_does_not_fall_back_on_a_wrong_certificate() {
    no_hang(async {
        let server = Server::start().await;
        let proxy = any_proxy(&server).await;
        let udp = UdpSocket::bind(proxy.address).await.unwrap();
        let dialer = Dialer::new(TransportChoice::Auto);
        let address = proxy.address.to_string();
        let error = dialer.dial(&address, &unknown_pin(), DIAL_DEADLINE).await;
        let error = error.unwrap_err();
        assert!(matches!(error, DialError::Certificate { .. }), "{error:?}");
        assert_eq!(proxy.connections(), 1);
        assert!(udp.try_recv_from(&mut [0; 2000]).is_err());
    })
    .await;
}

#[tokio::test]
async fn bulk_links_use_tcp_unless_set_to_quic() {
    let cases = [
        (TransportChoice::Auto, Carrier::Tcp),
        (TransportChoice::Tcp, Carrier::Tcp),
        (TransportChoice::Grpc, Carrier::Tcp),
        (TransportChoice::Quic, Carrier::Quic),
    ];
    no_hang(async {
        let server = Server::start().await;
        let address = server.address();
        for (choice, expected) in cases {
            let dialer = Dialer::new(choice);
            let link = dialer.dial_bulk(&address, &server.trust, DIAL_DEADLINE);
            assert_eq!(link.await.unwrap().carrier, expected, "{choice}");
        }
    })
    .await;
}
