//! Connections that belong to no process: of leases that are dead, have ended, or are not
//! known yet.

use std::{sync::Arc, time::Instant};

use tensord_proto::{
    ids::LeaseId,
    v1::{Error, ErrorCode, LeaseClaims, LeaseGranted, Open, Rejected, frame::Body},
    version,
};
use tensord_transport::{Link, channel::duplex};
use tracing::{debug, warn};

use super::{Supervisor, keeper, table::Route};
use crate::{
    admission::Claim,
    connection::{FirstFrame, first_frame},
    locks::lock,
};

/// Answers a connection. One that a process must serve is closed without an answer: the peer
/// dials again, and then the lease is known.
pub(super) async fn serve(supervisor: Arc<Supervisor>, link: Link) {
    let Link {
        mut sender,
        mut receiver,
        carrier,
        peer,
        certificate,
    } = link;
    let checked = match first_frame(&mut receiver).await {
        Ok(FirstFrame::OfferSnapshots(offer)) => {
            let link = Link {
                sender,
                receiver,
                carrier,
                peer,
                certificate,
            };
            return keeper::connection::serve(supervisor, offer, link).await;
        }
        Ok(FirstFrame::Open(open)) => supervisor.check_open(&open),
        Ok(FirstFrame::Join(join)) => supervisor.check(&join.lease_token),
        Err(e) => Err(e),
    };
    match checked {
        Ok(()) => debug!(%peer, "closed a connection that its lease's process is to serve"),
        Err(error) => {
            warn!(%peer, "refused a {carrier} connection: {error}");
            let rejected = Body::Rejected(Rejected { error: Some(error) });
            if sender.send(&[duplex::encode(rejected)]).await.is_ok() {
                sender.finish().await;
            }
        }
    }
}

impl Supervisor {
    /// Checks the first message of a connection of a client. Returns `Ok` if a process runs the
    /// connection's lease, which is started if need be.
    pub(super) fn check_open(&self, open: &Open) -> Result<(), Error> {
        let theirs = open.hello.clone().unwrap_or_default();
        version::negotiate(&version::hello(), &theirs)?;
        self.check(&open.lease_token)
    }

    /// Checks the lease token of a connection. Returns `Ok` if a process runs the connection's
    /// lease, which is started if need be.
    fn check(&self, lease_token: &[u8]) -> Result<(), Error> {
        let claims = self.lease_tokens.verify(lease_token)?;
        let lease = LeaseId(claims.lease_id);
        // The table must not stay locked, as a new lease changes it.
        let route = lock(&self.table).route(lease);
        match route {
            Route::Dead(reason) => {
                let code = match lock(&self.interrupted).contains_key(&lease) {
                    // The client learns from the scheduler where the lease goes on.
                    true => ErrorCode::Lease,
                    false => ErrorCode::Session,
                };
                return Err(Error::new(code, reason));
            }
            Route::Closed(reason) => return Err(Error::new(ErrorCode::Draining, reason)),
            Route::Process => {}
            Route::Unknown => self.admit_claims(&claims)?,
        }
        Ok(())
    }

    /// Starts the lease of a token with a valid signature.
    fn admit_claims(&self, claims: &LeaseClaims) -> Result<(), Error> {
        let lease_error = |reason: String| Error::new(ErrorCode::Lease, reason);
        let here = self.lease_tokens.claims_here(claims)?;
        if here.is_empty() {
            return Err(lease_error(
                "the lease does not include a device of this worker".into(),
            ));
        }
        for claim in &here {
            let table = lock(&self.table);
            let checked = table.check(Instant::now(), *claim, claims.expires_at_ms);
            checked.map_err(|refused| lease_error(refused.to_string()))?;
        }
        let has_other_workers = here.len() < claims.shares.len();
        let admitted = self.admit(&LeaseGranted {
            lease_id: claims.lease_id,
            grants: here.into_iter().map(Claim::to_grant).collect(),
            tenant: claims.tenant.clone(),
            epoch: claims.epoch,
            has_other_workers,
            part: self.lease_tokens.part_here(claims),
            // The scheduler's command would say whether that is needed.
            load_stored: claims.epoch > 0 && self.settings.store.is_some(),
        });
        admitted.map_err(|refused| lease_error(refused.to_string()))
    }
}
