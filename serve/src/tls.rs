//! The certificate of a server.

use std::{fmt, net::SocketAddr, sync::Arc};

use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ServerConfig,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// The protocols over TLS, the preferred first. gRPC needs the first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A certificate chain and its key, as PEM text.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) chain: String,
    key: String,
}

impl Identity {
    pub(crate) fn new(chain: String, key: String) -> Self {
        Self { chain, key }
    }

    /// Makes a certificate for `localhost` and an address, signed by its own key.
    ///
    /// # Errors
    ///
    /// If the system gives no random numbers.
    pub(crate) fn self_signed(address: SocketAddr) -> Result<Self, String> {
        let failed = |error: rcgen::Error| format!("cannot make a certificate: {error}");
        let names = [
            "localhost".to_owned(),
            "127.0.0.1".into(),
            "::1".into(),
            address.ip().to_string(),
        ];
        let params = CertificateParams::new(names).map_err(failed)?;
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?;
        Ok(Self::new(certificate.pem(), key.serialize_pem()))
    }

    /// Returns the configuration of TLS with this certificate.
    ///
    /// # Errors
    ///
    /// If the text has no certificate or no key, or these do not belong together.
    pub(crate) fn server_config(&self) -> Result<Arc<ServerConfig>, String> {
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.chain.as_bytes()).collect();
        let chain = chain.map_err(|error| format!("the certificate is not PEM text: {error}"))?;
        if chain.is_empty() {
            return Err("the file of the certificate has none".into());
        }
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|error| format!("the private key is not PEM text: {error}"))?;
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|it| it.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config
            .map_err(|error| format!("the certificate cannot be used with its key: {error}"))?;
        config.alpn_protocols = PROTOCOLS.iter().map(|it| it.to_vec()).collect();
        Ok(Arc::new(config))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("chain", &self.chain)
            .finish_non_exhaustive()
    }
}
