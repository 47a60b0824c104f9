//! Lease tokens, as this worker checks them: the scheduler's signature, and what they claim
//! of this worker's devices.

use std::sync::Mutex;

use tensord_proto::{
    ids::{LeaseId, WorkerId},
    v1::{DeviceGrant, Error, ErrorCode, LeaseClaims, LeaseShare, Open},
};
use tensord_transport::token;

use crate::{admission::Claim, locks::lock};

/// The check of lease tokens.
pub(crate) struct LeaseTokens {
    worker_id: WorkerId,
    /// Public key that verifies lease tokens; `None` until the worker is registered.
    key: Mutex<Option<Vec<u8>>>,
}

impl LeaseTokens {
    pub(crate) fn new(worker_id: WorkerId) -> Self {
        Self {
            worker_id,
            key: Mutex::new(None),
        }
    }

    pub(crate) fn set_key(&self, key: Vec<u8>) {
        *lock(&self.key) = Some(key);
    }

    /// Verifies the scheduler's signature of a token and returns the token's claims.
    pub(crate) fn verify(&self, lease_token: &[u8]) -> Result<LeaseClaims, Error> {
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
    ///
    /// # Errors
    ///
    /// If a share of a device is not valid.
    pub(crate) fn claims_here(&self, claims: &LeaseClaims) -> Result<Vec<Claim>, Error> {
        let lease = LeaseId(claims.lease_id);
        let ours = |share: &&LeaseShare| share.worker_id == self.worker_id.0;
        let claim = |share: &LeaseShare| {
            let granted = DeviceGrant {
                device_index: share.device_index,
                grant: share.grant,
                share: share.share,
            };
            Claim::new(lease, &granted)
        };
        let here = claims.shares.iter().filter(ours).map(claim);
        here.collect::<Result<_, _>>()
            .map_err(|e| Error::new(ErrorCode::Lease, format!("the token of lease {lease}: {e}")))
    }

    /// Returns the position of this worker among those of a lease, in the order of its ranks.
    pub(crate) fn part_here(&self, claims: &LeaseClaims) -> u32 {
        let mut workers: Vec<_> = claims.shares.iter().map(|share| share.worker_id).collect();
        // Devices of one worker are next to each other.
        workers.dedup();
        let part = workers.iter().position(|id| *id == self.worker_id.0);
        part.map_or(0, |part| part as u32)
    }

    /// Verifies the token of `open`. Returns the claim to the requested device, and all
    /// claims of the token.
    pub(crate) fn authorise(&self, open: &Open) -> Result<(Claim, LeaseClaims), Error> {
        let claims = self.verify(&open.lease_token)?;
        let is_requested = |claim: &Claim| claim.device == open.device_index;
        let claim = self.claims_here(&claims)?.into_iter().find(is_requested);
        match claim {
            Some(claim) => Ok((claim, claims)),
            None => Err(not_included(open.device_index)),
        }
    }
}

/// Returns the error for a token that does not include a device.
pub(crate) fn not_included(device: u32) -> Error {
    let reason = format!("the lease does not include device {device} of this worker");
    Error::new(ErrorCode::Lease, reason)
}
