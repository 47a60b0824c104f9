//! The certificate of the other side of a finished handshake.

use rustls::{client::verify_server_name, pki_types::CertificateDer, server::ParsedCertificate};
use tensord_proto::ids::LeaseId;

use super::dns_name;
use crate::{
    fingerprint::Fingerprint,
    identity::{Identity, lease_name},
};

/// A certificate whose private key the other side proved to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCertificate {
    /// The certificate's own fingerprint.
    pub fingerprint: Fingerprint,
    /// Set if the other side also showed the certificate that issued its own. The handshake
    /// has verified the signature.
    issued: Option<Issued>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Issued {
    certificate: CertificateDer<'static>,
    issuer: Fingerprint,
}

impl PeerCertificate {
    /// Returns the certificate of a peer that shows `identity`.
    pub fn shown_by(identity: &Identity) -> Self {
        Self::of(Some(identity.chain())).expect("a chain is never empty")
    }

    /// Returns the certificate of a peer that showed this chain in a finished handshake,
    /// or `None` if it showed none.
    pub(crate) fn of(chain: Option<&[CertificateDer<'_>]>) -> Option<Self> {
        let chain = chain?;
        let own = chain.first()?;
        let issued = chain.get(1).map(|issuer| Issued {
            certificate: own.clone().into_owned(),
            issuer: Fingerprint::of(issuer),
        });
        Some(Self {
            fingerprint: Fingerprint::of(own),
            issued,
        })
    }

    /// Returns whether the other side is the worker with the certificate `worker`, or a
    /// process that runs `lease` for it.
    pub fn is_of_lease(&self, worker: &Fingerprint, lease: LeaseId) -> bool {
        let has_name = |issued: &Issued| {
            ParsedCertificate::try_from(&issued.certificate)
                .and_then(|parsed| verify_server_name(&parsed, &dns_name(lease_name(lease))))
                .is_ok()
        };
        self.fingerprint == *worker
            || self
                .issued
                .as_ref()
                .is_some_and(|issued| issued.issuer == *worker && has_name(issued))
    }
}
