//! Which snapshots were sent to the keeper on a connection.

use std::collections::HashMap;

use tensord_proto::{ids::SessionId, v1::SnapshotId};

/// The latest snapshot of each session that was sent on a connection, or that the keeper had
/// before.
#[derive(Default)]
pub(super) struct SentSnapshots(HashMap<SessionId, (SnapshotId, bool)>);

impl SentSnapshots {
    fn order(id: SnapshotId) -> (u64, u64) {
        (id.epoch, id.mark)
    }

    /// Returns whether a snapshot is later than all that were sent of its session.
    pub(super) fn is_new(&self, id: SnapshotId) -> bool {
        let sent = self.0.get(&SessionId(id.session_id));
        sent.is_none_or(|(latest, _)| Self::order(*latest) < Self::order(id))
    }

    /// Records that a snapshot is sent.
    pub(super) fn record(&mut self, id: SnapshotId) {
        if self.is_new(id) {
            self.0.insert(SessionId(id.session_id), (id, false));
        }
    }

    /// Records that the keeper has a snapshot. Returns whether it is the latest that was sent of its
    /// session.
    pub(super) fn stored(&mut self, id: SnapshotId) -> bool {
        let sent = self.0.get_mut(&SessionId(id.session_id));
        let sent = sent.filter(|(latest, _)| *latest == id);
        sent.map(|(_, is_stored)| *is_stored = true).is_some()
    }

    pub(super) fn is_stored(&self, id: SnapshotId) -> bool {
        self.0.get(&SessionId(id.session_id)) == Some(&(id, true))
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.0.remove(&session);
    }
}
