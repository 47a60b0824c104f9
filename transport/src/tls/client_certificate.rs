//! The certificate that the dialling side may show.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error as TlsError, RootCertStore,
    SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, UnixTime},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

/// Accepts any certificate whose private key the other side proves to have, alone or with
/// the certificate that issued it, or no certificate.
#[derive(Debug)]
pub(super) struct AnyCertificate(Arc<CryptoProvider>);

impl AnyCertificate {
    pub(super) fn new(provider: CryptoProvider) -> Self {
        Self(Arc::new(provider))
    }
}

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        match intermediates {
            // Any certificate is accepted: callers compare it with those that they know.
            [] => Ok(ClientCertVerified::assertion()),
            [issuer] => {
                let mut roots = RootCertStore::empty();
                roots.add(issuer.clone())?;
                WebPkiClientVerifier::builder_with_provider(roots.into(), self.0.clone())
                    .build()
                    .map_err(|e| TlsError::General(e.to_string()))?
                    .verify_client_cert(end_entity, &[], now)
            }
            _ => Err(CertificateError::UnknownIssuer.into()),
        }
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
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.0.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}
