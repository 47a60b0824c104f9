//! Peers that are built on the protocols alone, not on this crate's code.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use quinn::{
    Endpoint,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::ResolvesClientCert,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    sign::CertifiedKey,
};
use tensord_transport::{
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use crate::harness::{Server, any_port};

const ALPN_QUIC: &[u8] = b"tensord/1";
const ALPN_GRPC: &[u8] = b"h2";

fn certificates(pem: &IdentityPem) -> Vec<CertificateDer<'static>> {
    let found = CertificateDer::pem_slice_iter(pem.chain.as_bytes());
    found.collect::<Result<_, _>>().unwrap()
}

/// The fingerprints in a chain, leaf first.
pub(crate) fn fingerprints(pem: &IdentityPem) -> Vec<Fingerprint> {
    certificates(pem)
        .iter()
        .map(|c| Fingerprint::of(c))
        .collect()
}

fn client_config(pem: &IdentityPem, alpn: &[u8]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    let authority = certificates(pem).pop().unwrap();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    config
}

/// Opens a QUIC connection to `server`, with nothing on it yet.
pub(crate) async fn quic_client(server: &Server) -> quinn::Connection {
    let crypto = QuicClientConfig::try_from(client_config(&server.pem, ALPN_QUIC)).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let endpoint = Endpoint::client(any_port()).unwrap();
    let address = server.listener.address();
    let connecting = endpoint.connect_with(config, address, "tensord");
    connecting.unwrap().await.unwrap()
}

/// Opens a TLS connection to `server`, with nothing on it yet.
pub(crate) async fn tls_client(server: &Server) -> TlsStream<TcpStream> {
    connect(&grpc_connector(server), server.listener.address()).await
}

fn grpc_connector(server: &Server) -> TlsConnector {
    TlsConnector::from(Arc::new(client_config(&server.pem, ALPN_GRPC)))
}

async fn connect(connector: &TlsConnector, address: SocketAddr) -> TlsStream<TcpStream> {
    let tcp = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("tensord").unwrap();
    connector.connect(name, tcp).await.unwrap()
}

fn server_config(pem: &IdentityPem, alpn: &[&[u8]]) -> ServerConfig {
    let key = PrivateKeyDer::from_pem_slice(pem.key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates(pem), key)
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

/// Shows one certificate and signs with the key of another one.
#[derive(Debug)]
struct Impostor(Arc<CertifiedKey>);

impl ResolvesClientCert for Impostor {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn impostor(
    server: &Server,
    victim: &IdentityPem,
    thief: &IdentityPem,
    alpn: &[u8],
) -> ClientConfig {
    let key = PrivateKeyDer::from_pem_slice(thief.key.as_bytes()).unwrap();
    let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
    let certified = CertifiedKey::new(certificates(victim), key);
    let mut config = client_config(&server.pem, alpn);
    config.client_auth_cert_resolver = Arc::new(Impostor(Arc::new(certified)));
    config
}

/// Opens a connection for frames that shows the certificate of `victim` with the key of
/// `thief`.
pub(crate) async fn impostor_over_tls(
    server: &Server,
    victim: &IdentityPem,
    thief: &IdentityPem,
) -> TlsStream<TcpStream> {
    let config = impostor(server, victim, thief, ALPN_QUIC);
    connect(
        &TlsConnector::from(Arc::new(config)),
        server.listener.address(),
    )
    .await
}

/// The same over QUIC.
pub(crate) async fn impostor_over_quic(
    server: &Server,
    victim: &IdentityPem,
    thief: &IdentityPem,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let config = impostor(server, victim, thief, ALPN_QUIC);
    let crypto = QuicClientConfig::try_from(config).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let endpoint = Endpoint::client(any_port()).unwrap();
    let connecting = endpoint.connect_with(config, server.listener.address(), "tensord");
    connecting.unwrap().await
}

/// An endpoint for QUIC links, and the trust with which to dial it.
pub(crate) fn quic_server() -> (Endpoint, Trust) {
    let pem = IdentityPem::new_pool().unwrap();
    let trust = Trust::Pin(fingerprints(&pem)[0]);
    let crypto = QuicServerConfig::try_from(server_config(&pem, &[ALPN_QUIC])).unwrap();
    let config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    (Endpoint::server(config, any_port()).unwrap(), trust)
}

/// Passes connections on to a server over gRPC, one at a time.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    pub(crate) trust: Trust,
    counts: Arc<[AtomicUsize; 2]>,
    _task: JoinSet<()>,
}

impl Proxy {
    /// Number of connections accepted.
    pub(crate) fn connections(&self) -> usize {
        self.counts[0].load(Ordering::Relaxed)
    }

    /// Number of connections whose handshake failed.
    pub(crate) fn failed_handshakes(&self) -> usize {
        self.counts[1].load(Ordering::Relaxed)
    }
}

/// A proxy to `server` that lets nothing but HTTP/2 pass.
pub(crate) async fn http_proxy(server: &Server) -> Proxy {
    proxy(server, &[ALPN_GRPC]).await
}

/// A proxy to `server` that accepts any protocol.
pub(crate) async fn any_proxy(server: &Server) -> Proxy {
    proxy(server, &[ALPN_QUIC, ALPN_GRPC]).await
}

/// A proxy that has a certificate of its own.
async fn proxy(server: &Server, alpn: &[&[u8]]) -> Proxy {
    let pem = IdentityPem::new_pool().unwrap();
    let trust = Trust::Pin(fingerprints(&pem)[0]);
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(server_config(&pem, alpn)));
    let (onward, to) = (grpc_connector(server), server.listener.address());
    let counts = Arc::<[AtomicUsize; 2]>::default();
    let counting = counts.clone();
    let mut task = JoinSet::new();
    task.spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            counting[0].fetch_add(1, Ordering::Relaxed);
            let Ok(mut near) = acceptor.accept(tcp).await else {
                counting[1].fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let mut far = connect(&onward, to).await;
            // The connection is over, with or without an error.
            let _ = copy_bidirectional(&mut near, &mut far).await;
        }
    });
    Proxy {
        address,
        trust,
        counts,
        _task: task,
    }
}
