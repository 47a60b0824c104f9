//! What a peer must prove, and the TLS settings shared by all carriers.
//!
//! TLS 1.3 only, with ring as the provider. A pool has its own certificate authority,
//! which clients identify by its fingerprint. Every holder of a certificate from this
//! authority *is* the pool, so such certificates carry the fixed name [`POOL_NAME`]
//! instead of host names. Workers show a self-signed certificate; the scheduler puts its
//! fingerprint into each lease.
//!
//! A worker may run each lease in a process of its own. Such a process has a key of its own
//! and a certificate that the worker's certificate has issued for the lease's name. The
//! side that dials names the lease, and accepts the worker's certificate or one that the
//! worker has issued for this lease.
//!
//! The side that dials may show a certificate, too: workers do, to schedulers and to each
//! other. The handshake only proves that they have its private key. Callers compare the
//! [`PeerCertificate`] with those that they know.

mod client_certificate;
mod peer_certificate;

use std::{path::PathBuf, sync::Arc};

use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, Error as TlsError,
    RootCertStore, ServerConfig, SignatureScheme, SupportedCipherSuite,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring::default_provider},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    version::TLS13,
};

use tensord_proto::ids::LeaseId;

use self::client_certificate::AnyCertificate;
pub use self::peer_certificate::PeerCertificate;
use crate::identity::{Identity, lease_name};
pub use crate::{fingerprint::Fingerprint, identity::POOL_NAME};

/// ALPN protocol of the gRPC carrier.
pub(crate) const ALPN_GRPC: &[u8] = b"h2";
/// ALPN protocol of the carriers that send frames directly, QUIC and TCP.
pub(crate) const ALPN_FRAMES: &[u8] = b"tensord/1";

/// What the other side's certificate must be or chain to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// The certificate itself, or one in its chain, has this fingerprint.
    Pin(Fingerprint),
    /// The certificate chains to a certificate in this PEM file.
    CaFile(PathBuf),
    /// The certificate chains to an authority that the operating system trusts, and names
    /// the host.
    System,
}

/// Why TLS settings could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The file named by `ca-file` is unreadable or holds no certificate.
    #[error("cannot read a certificate from ca-file {path}: {reason}")]
    CaFile {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The system has no trusted authorities.
    #[error(
        "cannot read the system's certificate authorities ({0}); name the pool's own with ca= or ca-file="
    )]
    System(String),
    /// This side's own certificate is unusable.
    #[error("cannot use the certificate of this process: {0}")]
    Identity(String),
}

/// What a dialling side expects of its peer, and what it shows to the peer.
#[derive(Debug, Clone)]
pub(crate) struct TlsOptions {
    /// What the other side's certificate must be.
    pub(crate) trust: Trust,
    /// The lease whose process is dialled, if any. The process may then show a
    /// certificate that the pinned one issued for this lease.
    pub(crate) lease: Option<LeaseId>,
    /// The certificate to show, if any.
    pub(crate) identity: Option<Arc<Identity>>,
}

impl TlsOptions {
    /// Creates options that show no certificate and name no lease.
    pub(crate) fn anonymous(trust: &Trust) -> Self {
        Self {
            trust: trust.clone(),
            lease: None,
            identity: None,
        }
    }

    /// Returns the name that the other side's certificate must have, if the dialler pins the
    /// certificate that issued it.
    fn issued_name(&self) -> String {
        self.lease.map_or_else(|| POOL_NAME.to_owned(), lease_name)
    }

    /// Returns the server name to send to a server at `host`: that of the lease, or else
    /// `host` itself, or [`POOL_NAME`] if it is not valid in TLS.
    pub(crate) fn server_name(&self, host: &str) -> String {
        match (self.lease, ServerName::try_from(host)) {
            (Some(lease), _) => lease_name(lease),
            (None, Ok(_)) => host.to_owned(),
            (None, Err(_)) => POOL_NAME.to_owned(),
        }
    }
}

/// Returns client settings for `tls_options`.
pub(crate) fn client_config(
    tls_options: &TlsOptions,
    alpn: &[u8],
) -> Result<ClientConfig, TrustError> {
    let provider = Arc::new(provider());
    let verifier = verifier(tls_options, &provider)?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("ring supports TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match &tls_options.identity {
        None => config.with_no_client_auth(),
        Some(identity) => config
            .with_client_auth_cert(identity.chain().to_vec(), identity.key())
            .map_err(|e| TrustError::Identity(e.to_string()))?,
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(config)
}

/// Returns a verifier of the other side's certificate.
fn verifier(
    tls_options: &TlsOptions,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, TrustError> {
    Ok(match &tls_options.trust {
        Trust::Pin(pin) => Arc::new(PinVerifier {
            pin: *pin,
            issued_name: dns_name(tls_options.issued_name()),
            provider: Arc::clone(provider),
        }),
        Trust::CaFile(path) => {
            let unreadable = |reason: String| TrustError::CaFile {
                path: path.clone(),
                reason,
            };
            let mut roots = RootCertStore::empty();
            let found =
                CertificateDer::pem_file_iter(path).map_err(|e| unreadable(e.to_string()))?;
            for certificate in found {
                let certificate = certificate.map_err(|e| unreadable(e.to_string()))?;
                roots
                    .add(certificate)
                    .map_err(|e| unreadable(e.to_string()))?;
            }
            let chain = chain_verifier(roots, provider).map_err(unreadable)?;
            Arc::new(PoolVerifier(chain))
        }
        Trust::System => {
            let mut roots = RootCertStore::empty();
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            chain_verifier(roots, provider).map_err(TrustError::System)?
        }
    })
}

/// Returns server settings that show `identity`, and let the client show a certificate.
pub(crate) fn server_config(identity: &Identity, alpn: &[&[u8]]) -> Result<ServerConfig, TlsError> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&TLS13])
        .expect("ring supports TLS 1.3")
        .with_client_cert_verifier(Arc::new(AnyCertificate::new(provider())))
        .with_single_cert(identity.chain().to_vec(), identity.key())?;
    config.alpn_protocols = alpn.iter().map(|alpn| alpn.to_vec()).collect();
    // No TLS session is resumed here. Tickets could also stay unread in the peer's
    // socket, whose close would then reset the connection.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Returns ring's provider, with the fastest of TLS 1.3's ciphers first: nothing here
/// must stay secret for so long that 128 bits of key are too few.
fn provider() -> CryptoProvider {
    let mut provider = default_provider();
    let fast =
        |suite: &SupportedCipherSuite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(fast);
    provider
}

fn chain_verifier(
    roots: RootCertStore,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, String> {
    WebPkiServerVerifier::builder_with_provider(roots.into(), provider.clone())
        .build()
        .map_err(|e| e.to_string())
}

fn pool_name() -> ServerName<'static> {
    dns_name(POOL_NAME.to_owned())
}

/// Returns `name`, which is a DNS name, as the name of a server.
fn dns_name(name: String) -> ServerName<'static> {
    ServerName::try_from(name).expect("a DNS name")
}

/// Returns whether `error` means that the certificate was not the expected one.
pub(crate) fn is_certificate_error(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let tls = error.downcast_ref::<TlsError>();
        if matches!(tls, Some(TlsError::InvalidCertificate(_))) {
            return true;
        }
        // The error that an `io::Error` wraps is not in the chain of `source()`.
        let inner = error
            .downcast_ref::<std::io::Error>()
            .and_then(|e| e.get_ref());
        cause = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    false
}

/// Accepts a certificate with the pinned fingerprint, or one that the pinned certificate
/// issued for a name.
#[derive(Debug)]
struct PinVerifier {
    pin: Fingerprint,
    /// The name in a certificate that the pinned one issued.
    issued_name: ServerName<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        if Fingerprint::of(end_entity) == self.pin {
            return Ok(ServerCertVerified::assertion());
        }
        let not_pinned = TlsError::InvalidCertificate(CertificateError::UnknownIssuer);
        let pinned = intermediates
            .iter()
            .find(|c| Fingerprint::of(c) == self.pin);
        let authority = pinned.ok_or(not_pinned)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone())?;
        let chain = chain_verifier(roots, &self.provider).map_err(TlsError::General)?;
        chain.verify_server_cert(end_entity, intermediates, &self.issued_name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        Err(TlsError::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Accepts a certificate that chains to the pool's authority and has the pool's fixed
/// name or the host's. The latter is for certificates from an authority of the user's
/// own.
#[derive(Debug)]
struct PoolVerifier(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for PoolVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let verify = |name| {
            self.0
                .verify_server_cert(end_entity, intermediates, name, ocsp, now)
        };
        verify(&pool_name()).or_else(|_| verify(server_name))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
