//! Peers that are not bound by this crate's code, only by its protocols.

use std::sync::Arc;

use quinn::{
    Endpoint,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tensord_transport::{
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

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

/// A QUIC connection to `server`, with nothing on it yet.
pub(crate) async fn quic_client(server: &Server) -> quinn::Connection {
    let crypto = QuicClientConfig::try_from(client_config(&server.pem, ALPN_QUIC)).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let endpoint = Endpoint::client(any_port()).unwrap();
    let address = server.listener.address();
    let connecting = endpoint.connect_with(config, address, "tensord");
    connecting.unwrap().await.unwrap()
}

/// A TLS connection to `server`, with nothing on it yet.
pub(crate) async fn tls_client(server: &Server) -> TlsStream<TcpStream> {
    let connector = TlsConnector::from(Arc::new(client_config(&server.pem, ALPN_GRPC)));
    let tcp = TcpStream::connect(server.listener.address()).await.unwrap();
    let name = ServerName::try_from("tensord").unwrap();
    connector.connect(name, tcp).await.unwrap()
}

/// An endpoint that speaks the links' QUIC, and what to trust it by.
pub(crate) fn quic_server() -> (Endpoint, Trust) {
    let pem = IdentityPem::new_pool().unwrap();
    let chain = certificates(&pem);
    let trust = Trust::Pin(Fingerprint::of(&chain[0]));
    let key = PrivateKeyDer::from_pem_slice(pem.key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![ALPN_QUIC.to_vec()];
    let crypto = QuicServerConfig::try_from(config).unwrap();
    let config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    (Endpoint::server(config, any_port()).unwrap(), trust)
}
