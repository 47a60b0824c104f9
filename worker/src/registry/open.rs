//! Opens sessions, and finds those that exist.

use std::{sync::Arc, time::Instant};

use dashmap::mapref::entry::Entry;
use tensord_proto::{
    ids::SessionId,
    v1::{Error, ErrorCode, LeaseClaims, Open},
};
use tracing::info;

use super::Registry;
use crate::{
    admission::{AdmissionError, Claim},
    locks::lock,
    session::{Grant, Session, SessionBegin, sealed_snapshot::SnapshotKey},
};

/// Most sessions of a lease on one device; programs have one, a gateway a few.
const MAX_SESSIONS_PER_DEVICE: usize = 64;

impl Registry {
    /// Returns the existing session with this id, if `claim` entitles the connection to it.
    pub(super) fn existing_session(
        &self,
        id: SessionId,
        claim: Claim,
    ) -> Result<Arc<Session>, Error> {
        lock(&self.admission).check(claim).map_err(lease_error)?;
        let known = self.sessions.get(&id).map(|session| session.clone());
        let known = known
            .filter(|session| session.grant.lease == claim.lease && !session.has_ended())
            .ok_or_else(|| {
                Error::new(
                    ErrorCode::Session,
                    format!("session {id} no longer exists on this worker"),
                )
            })?;
        check_session_device(&known, &claim)
    }

    pub(super) fn open(
        &self,
        id: SessionId,
        claim: Claim,
        claims: LeaseClaims,
        open: &Open,
    ) -> Result<Arc<Session>, Error> {
        let expires_at_ms = claims.expires_at_ms;
        let admitted = lock(&self.admission).open(claim, expires_at_ms, Instant::now());
        for earlier in admitted.map_err(lease_error)? {
            self.end_superseded(earlier, claim.device);
        }
        let begin = SessionBegin::New { seed: open.seed };
        let session = self.open_admitted(id, claim, claims, open, begin)?;
        self.check_still_admitted(claim, session)
    }

    /// Returns `session`, or ends it if its lease has ended.
    pub(super) fn check_still_admitted(
        &self,
        claim: Claim,
        session: Arc<Session>,
    ) -> Result<Arc<Session>, Error> {
        // The lease may have ended meanwhile, and its sessions with it, except for this
        // one.
        let still = lock(&self.admission).check(claim).map_err(lease_error);
        match still {
            Ok(()) => Ok(session),
            Err(error) => {
                session.end(error.clone());
                Err(error)
            }
        }
    }

    pub(super) fn open_admitted(
        &self,
        id: SessionId,
        claim: Claim,
        claims: LeaseClaims,
        open: &Open,
        begin: SessionBegin,
    ) -> Result<Arc<Session>, Error> {
        let (lease, index) = (claim.lease, claim.device);
        let beside = |s: &Session| s.grant.lease == lease && s.grant.device_index == index;
        let beside = self
            .sessions
            .iter()
            .filter(|session| beside(session))
            .count();
        if beside >= MAX_SESSIONS_PER_DEVICE {
            let reason =
                format!("the lease has {beside} sessions on this device, which is the limit");
            return Err(Error::new(ErrorCode::Limit, reason));
        }
        let session = match self.sessions.entry(id) {
            // The reply to the first attempt was lost.
            Entry::Occupied(entry) if entry.get().grant.lease == lease => {
                check_session_device(entry.get(), &claim)?
            }
            Entry::Occupied(_) => {
                return Err(Error::new(
                    ErrorCode::Session,
                    "another lease uses this session id",
                ));
            }
            Entry::Vacant(entry) => {
                let device_slot = &self.device_slots[&index];
                let device_context = device_slot
                    .open(lease)
                    .map_err(|reason| Error::new(ErrorCode::Limit, reason))?;
                let grant = Grant {
                    lease,
                    tenant: claims.tenant.as_str().into(),
                    device_index: index,
                };
                let cohort = self.cohorts.get_or_create(lease, open, claims);
                let key = SnapshotKey::from_message(&open.snapshot_key);
                let session = Session::new(id, grant, begin, key, device_context, cohort)?;
                info!(session = %id, %lease, device = index, "session opened");
                self.opened.notify_one();
                entry.insert(session).clone()
            }
        };
        Ok(session)
    }
}

/// Returns a refusal as the error for the client.
pub(super) fn lease_error(refusal: AdmissionError) -> Error {
    Error::new(ErrorCode::Lease, refusal.to_string())
}

/// Returns `session` if it is on the device that `claim` is for.
pub(super) fn check_session_device(
    session: &Arc<Session>,
    claim: &Claim,
) -> Result<Arc<Session>, Error> {
    let (own, named) = (session.grant.device_index, claim.device);
    match own == named {
        true => Ok(session.clone()),
        false => Err(Error::new(
            ErrorCode::Session,
            format!("session {} is on device {own}, not {named}", session.id),
        )),
    }
}
