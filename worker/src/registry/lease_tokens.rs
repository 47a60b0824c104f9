//! Lease tokens, as this worker checks them: the scheduler's signature, and what they claim
//! of this worker's devices.

use std::sync::Mutex;

use tensord_proto::{
    grant::number,
    ids::{LeaseId, WorkerId},
    v1::{Error, ErrorCode, LeaseClaims, LeaseShare, Open},
};
use tensord_transport::token;

use crate::{admission::Claim, locks::lock};

/// The check of lease tokens.
pub(super) struct LeaseTokens {
    worker_id: WorkerId,
    /// Public key that verifies lease tokens; `None` until the worker is registered.
    key: Mutex<Option<Vec<u8>>>,
}

impl LeaseTokens {
    pub(super) fn new(worker_id: WorkerId) -> Self {
        Self {
            worker_id,
            key: Mutex::new(None),
        }
    }

    pub(super) fn set_key(&self, key: Vec<u8>) {
        *lock(&self.key) = Some(key);
    }

    /// Verifies the scheduler's signature of a token and returns the token's claims.
    pub(super) fn verify(&self, lease_token: &[u8]) -> Result<LeaseClaims, Error> {
        let key = lock(&self.key).clone();
        let key = key.ok_or_else(|| {
            Error::new(
                ErrorCode::Lease,
                "this worker has not joined its scheduler yet; try again",
            )
        })?;
        token::verify(lease_token, &key).map_err(|e| Error::new(ErrorCode::Token, e.to_string()))
    }

    /// Returns the claims to devices of this worker.
    pub(super) fn claims_here(&self, claims: &LeaseClaims) -> impl Iterator<Item = Claim> {
        let lease = LeaseId(claims.lease_id);
        let ours = |share: &&LeaseShare| share.worker_id == self.worker_id.0;
        claims.shares.iter().filter(ours).map(move |share| Claim {
            lease,
            device: share.device_index,
            grant: number(share.grant),
        })
    }

    /// Verifies the token of `open`. Returns the claim to the requested device, which is one
    /// of this worker's `device_count`, and all claims of the token.
    pub(super) fn authorise(
        &self,
        open: &Open,
        device_count: usize,
    ) -> Result<(Claim, LeaseClaims), Error> {
        let claims = self.verify(&open.lease_token)?;
        let is_requested = |claim: &Claim| {
            claim.device == open.device_index && (claim.device as usize) < device_count
        };
        let claim = self.claims_here(&claims).find(is_requested);
        match claim {
            Some(claim) => Ok((claim, claims)),
            None => {
                let reason = format!(
                    "the lease does not include device {} of this worker",
                    open.device_index
                );
                Err(Error::new(ErrorCode::Lease, reason))
            }
        }
    }
}
