//! Restores sessions whose process has died.

use std::sync::Arc;

use tensord_proto::{
    ids::SessionId,
    v1::{Error, ErrorCode, LeaseClaims, Open},
};
use tracing::info;

use super::{
    Registry,
    attachment::restore_point,
    open::{check_session_device, lease_error},
};
use crate::{
    admission::Claim,
    locks::lock,
    session::{
        Session, SessionBegin, SnapshotKeeper, sealed_snapshot::SnapshotKey, snapshot::Snapshot,
    },
};

/// Where the snapshots of this process's sessions are kept, and those of earlier processes are.
pub(crate) struct SnapshotStores {
    /// Keeps the snapshots of this process's sessions.
    pub(crate) keeper: Arc<dyn SnapshotKeeper>,
    /// Higher than that of all earlier processes of the lease, on whichever worker.
    pub(crate) epoch: u64,
    /// The snapshots of their sessions.
    pub(crate) snapshots: Arc<dyn StoredSnapshots>,
}

/// Snapshots that earlier processes of the lease have left.
pub(crate) trait StoredSnapshots: Send + Sync {
    /// Returns whether there is a snapshot of a session at a mark.
    fn has(&self, session: SessionId, mark: u64) -> bool;

    /// Reads the snapshot of a session at a mark. May block for as long as it takes to copy it.
    ///
    /// # Errors
    ///
    /// When there is none, it cannot be read, or it was sealed with another key than `key`.
    fn read(
        &self,
        session: SessionId,
        mark: u64,
        key: &SnapshotKey,
        max_bytes: u64,
    ) -> Result<Snapshot, String>;
}

impl Registry {
    /// Opens the session of a client whose session was in a process that has died. Returns the session
    /// and the mark from which it goes on.
    pub(super) fn restore(
        &self,
        id: SessionId,
        claim: Claim,
        claims: LeaseClaims,
        open: &Open,
    ) -> Result<(Arc<Session>, u64), Error> {
        lock(&self.admission).check(claim).map_err(lease_error)?;
        let lost = |reason: &str| {
            let reason = format!("session {id} was lost with its process: {reason}");
            Error::new(ErrorCode::Session, reason)
        };
        let stored = self.stored.as_ref();
        let stored = stored.ok_or_else(|| lost("this worker keeps no snapshots"))?;
        // One at a time, as the bytes of a snapshot are read before they are charged.
        let _restoring = lock(&self.restoring);
        if let Some(session) = self.sessions.get(&id).map(|session| session.clone()) {
            // The reply to the first attempt was lost.
            let mark = session.restored_at();
            return Ok((check_session_device(&session, &claim)?, mark));
        }
        let point = restore_point(&open.restore, |mark| stored.has(id, mark));
        let point = point.ok_or_else(|| lost("the worker has no snapshot of it"))?;
        let device_context = &self.device_slots[&claim.device].device_context;
        let capacity = device_context.memory.capacity_bytes();
        let max_bytes = capacity.saturating_add(device_context.kept_limits.restored);
        let key = SnapshotKey::from_message(&open.snapshot_key);
        let key = key.ok_or_else(|| lost("the client sent no key of its snapshots"))?;
        let snapshot = stored.read(id, point.mark, &key, max_bytes);
        let snapshot = snapshot.map_err(|reason| lost(&reason))?;
        let snapshot = Box::new(snapshot);
        let begin = SessionBegin::Restored { point, snapshot };
        let session = self.open_admitted(id, claim, claims, open, begin)?;
        info!(session = %id, mark = point.mark, "the session goes on in another process");
        Ok((self.check_still_admitted(claim, session)?, point.mark))
    }
}
