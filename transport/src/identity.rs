//! Certificates and keys: the pool's authority, its server, a worker.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tensord_proto::ids::{LeaseId, WorkerId};

use crate::fingerprint::Fingerprint;

/// The name in the certificates of a pool's own authority.
pub const POOL_NAME: &str = "tensord";

/// Hashed before the certificate and the start, so that a hash made for another purpose
/// is not a worker's id.
const WORKER_CONTEXT: &[u8] = b"tensord worker v1\0";

/// Number of random bytes that identify one start of a worker.
pub const START_BYTES: usize = 16;

/// Returns the id of a worker with this certificate, for one of its starts. Neither
/// another worker, which cannot show the certificate, nor an earlier start can have the
/// same id.
pub fn worker_id(certificate: &Fingerprint, start: &[u8; START_BYTES]) -> WorkerId {
    let hashed = [WORKER_CONTEXT, &certificate.0, start].concat();
    let digest = ring::digest::digest(&ring::digest::SHA256, &hashed);
    let (first, _) = digest
        .as_ref()
        .split_first_chunk()
        .expect("it has 32 bytes");
    WorkerId(u64::from_le_bytes(*first))
}

/// Returns the name in the certificates of the processes that run `lease`.
pub(crate) fn lease_name(lease: LeaseId) -> String {
    format!("lease-{:016x}.{POOL_NAME}", lease.0)
}

/// Returns the lease of which `name` is the [name](lease_name), or `None` if there is
/// none.
#[cfg(target_os = "linux")]
pub(crate) fn lease_of_name(name: &str) -> Option<LeaseId> {
    let digits = name.strip_prefix("lease-")?;
    let digits = digits.strip_suffix(POOL_NAME)?.strip_suffix('.')?;
    let lease = LeaseId(u64::from_str_radix(digits, 16).ok()?);
    // Only the form that `lease_name` writes is accepted.
    (lease_name(lease) == name).then_some(lease)
}

/// A certificate chain, leaf first, and the leaf's private key.
#[derive(Debug)]
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// An [`Identity`] as PEM text, for files.
pub struct IdentityPem {
    /// The chain, leaf first.
    pub chain: String,
    /// The private key.
    pub key: String,
}

/// An [`Identity`] in DER form, for another process.
#[derive(Clone)]
pub struct IdentityDer {
    /// The chain, leaf first.
    pub chain: Vec<Vec<u8>>,
    /// The private key, in PKCS #8.
    pub key: Vec<u8>,
}

/// Why a certificate could not be made or read.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IdentityError(String);

impl From<rcgen::Error> for IdentityError {
    fn from(error: rcgen::Error) -> Self {
        Self(format!("cannot generate a certificate: {error}"))
    }
}

impl Identity {
    /// Creates a self-signed identity that is lost when the process ends.
    ///
    /// # Errors
    ///
    /// When the system gives no randomness.
    pub fn self_signed() -> Result<Self, IdentityError> {
        Self::from_pem(&IdentityPem::self_signed()?)
    }

    /// Reads an identity from PEM text.
    ///
    /// # Errors
    ///
    /// When `pem` holds no certificate or no key.
    pub fn from_pem(pem: &IdentityPem) -> Result<Self, IdentityError> {
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(pem.chain.as_bytes()).collect();
        let chain =
            chain.map_err(|e| IdentityError(format!("cannot read the certificate: {e}")))?;
        if chain.is_empty() {
            return Err(IdentityError(
                "cannot read the certificate: the file contains none".into(),
            ));
        }
        let key = PrivateKeyDer::from_pem_slice(pem.key.as_bytes())
            .map_err(|e| IdentityError(format!("cannot read the private key: {e}")))?;
        Ok(Self { chain, key })
    }

    /// Makes an identity with a key of its own for a process that runs `lease` for the
    /// worker that has this identity. The chain ends with this certificate, so a peer that
    /// pins this certificate accepts the process, but only for this lease. The process cannot issue
    /// certificates, as its own is not an authority's.
    ///
    /// # Errors
    ///
    /// When the system gives no randomness, or this identity has a key of a kind that
    /// cannot sign.
    pub fn issue_for_lease(&self, lease: LeaseId) -> Result<IdentityDer, IdentityError> {
        let issuer = Issuer::new(leaf_params(), KeyPair::try_from(&self.key)?);
        let key = KeyPair::generate()?;
        let certificate = params_for(&lease_name(lease)).signed_by(&key, &issuer)?;
        let own = self.chain.first().expect("a chain is never empty");
        Ok(IdentityDer {
            chain: vec![certificate.der().to_vec(), own.to_vec()],
            key: key.serialize_der(),
        })
    }

    /// Returns an identity that another process has made.
    ///
    /// # Errors
    ///
    /// When `der` has no certificate, or its key is malformed.
    pub fn from_der(der: IdentityDer) -> Result<Self, IdentityError> {
        let chain: Vec<_> = der.chain.into_iter().map(CertificateDer::from).collect();
        if chain.is_empty() {
            return Err(IdentityError("the identity has no certificate".into()));
        }
        let key = PrivateKeyDer::try_from(der.key)
            .map_err(|e| IdentityError(format!("cannot read the private key: {e}")))?;
        Ok(Self { chain, key })
    }

    /// Returns the fingerprint that a client pins: that of the authority at the chain's
    /// end, or of the certificate itself if it is self-signed.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self.chain.last().expect("a chain is never empty"))
    }

    pub(crate) fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

impl IdentityPem {
    /// Creates a self-signed identity, as a worker does at its first start. Its
    /// certificate is valid for as long as the worker keeps the key.
    ///
    /// # Errors
    ///
    /// When the system gives no randomness.
    pub fn self_signed() -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let certificate = leaf_params().self_signed(&key)?;
        Ok(Self {
            chain: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    /// Creates an authority and a server certificate signed by it. The chain holds both.
    /// The authority's key is not kept, so it cannot sign anything else.
    ///
    /// # Errors
    ///
    /// When the system gives no randomness.
    pub fn new_pool() -> Result<Self, IdentityError> {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "tensord pool authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let server = leaf_params().signed_by(&key, &authority)?;
        Ok(Self {
            chain: server.pem() + &authority.pem(),
            key: key.serialize_pem(),
        })
    }
}

fn leaf_params() -> CertificateParams {
    params_for(POOL_NAME)
}

/// Returns the parameters of a certificate for `name`, a DNS name.
fn params_for(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.into()]).expect("a DNS name");
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_fingerprint_is_that_of_its_authority() {
        let pem = IdentityPem::new_pool().unwrap();
        let identity = Identity::from_pem(&pem).unwrap();
        assert_eq!(identity.chain().len(), 2);
        assert_eq!(
            identity.fingerprint(),
            Fingerprint::of(&identity.chain()[1])
        );
    }

    #[test]
    fn worker_id_depends_on_certificate_and_start() {
        let id = |certificate, start| worker_id(&Fingerprint([certificate; 32]), &[start; 16]);
        assert_eq!(id(1, 1), id(1, 1));
        assert_ne!(id(1, 1), id(1, 2));
        assert_ne!(id(1, 1), id(2, 1));
    }

    #[test]
    fn broken_pem_is_an_error() {
        let pem = IdentityPem::new_pool().unwrap();
        let no_chain = IdentityPem {
            chain: "x".into(),
            key: pem.key.clone(),
        };
        assert!(
            Identity::from_pem(&no_chain)
                .unwrap_err()
                .to_string()
                .contains("certificate")
        );
        let no_key = IdentityPem {
            chain: pem.chain,
            key: "x".into(),
        };
        assert!(
            Identity::from_pem(&no_key)
                .unwrap_err()
                .to_string()
                .contains("private key")
        );
    }
}
