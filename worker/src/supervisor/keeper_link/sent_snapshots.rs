//! Which snapshots were sent to the keeper on a connection.

use std::collections::HashMap;

use tensord_proto::{ids::SessionId, v1::SnapshotId};

use crate::supervisor::{
    copy_progress::StoredMarks,
    snapshots::{keeps_base, order},
};

/// The latest snapshot of each session that was sent on a connection, or that the keeper had
/// before, and the one before it that the client had committed.
#[derive(Default)]
pub(super) struct SentSnapshots(HashMap<SessionId, Sent>);

#[derive(Default)]
struct Sent {
    /// In the order in which they were sent; each with whether the keeper has it.
    snapshots: Vec<(SnapshotId, bool)>,
    /// The mark that the client had committed when the last one was taken.
    committed: u64,
    /// Whether the keeper has refused a snapshot since it stored one: it may have dropped others.
    is_refused: bool,
}

impl SentSnapshots {
    /// Returns whether a snapshot is later than all that were sent of its session.
    pub(super) fn is_new(&self, id: SnapshotId) -> bool {
        let sent = self.0.get(&SessionId(id.session_id));
        let latest = sent.and_then(|sent| sent.snapshots.last());
        latest.is_none_or(|(latest, _)| order(*latest) < order(id))
    }

    /// Returns whether the keeper has the base of the snapshot `id` already, or will have it when that arrives: with a
    /// snapshot that outlasts the arrival, as its mark is `committed`, which the client had committed, or later.
    pub(super) fn has_base_of(&self, id: SnapshotId, committed: u64) -> bool {
        let sent = self.0.get(&SessionId(id.session_id));
        let sent = sent.filter(|sent| !sent.is_refused);
        let mut snapshots = sent.into_iter().flat_map(|sent| &sent.snapshots);
        // One without a reply counts. If the keeper refuses that one, it refuses this one, too, as it lacks the base;
        // the next one is then sent with its base.
        snapshots.any(|(it, _)| keeps_base(*it, id, committed))
    }

    /// Records that the keeper has refused a snapshot of a session.
    pub(super) fn refused(&mut self, session: SessionId) {
        if let Some(sent) = self.0.get_mut(&session) {
            sent.is_refused = true;
        }
    }

    /// Records that a snapshot is sent, which was taken when the client had committed the mark
    /// `committed`. The keeper drops the session's others but that of this mark.
    pub(super) fn record(&mut self, id: SnapshotId, committed: u64) {
        if self.is_new(id) {
            let sent = self.0.entry(SessionId(id.session_id)).or_default();
            sent.committed = committed;
            sent.snapshots.retain(|(it, _)| it.mark == committed);
            sent.snapshots.push((id, false));
        }
    }

    /// Records that the keeper has a snapshot. Returns what it has of the session, if the snapshot was
    /// sent.
    pub(super) fn stored(&mut self, id: SnapshotId) -> Option<StoredMarks> {
        let sent = self.0.get_mut(&SessionId(id.session_id))?;
        let (_, is_stored) = sent.snapshots.iter_mut().find(|(it, _)| *it == id)?;
        *is_stored = true;
        sent.is_refused = false;
        let stored = sent.snapshots.iter().filter(|(_, is_stored)| *is_stored);
        Some(StoredMarks {
            marks: stored.map(|(id, _)| id.mark).collect(),
            committed: sent.committed,
        })
    }

    pub(super) fn is_stored(&self, id: SnapshotId) -> bool {
        let sent = self.0.get(&SessionId(id.session_id));
        sent.is_some_and(|sent| sent.snapshots.contains(&(id, true)))
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.0.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(mark: u64, epoch: u64) -> SnapshotId {
        SnapshotId {
            session_id: 1,
            mark,
            epoch,
            base_id: 0,
        }
    }

    #[test]
    fn base_is_there_with_a_snapshot_that_stays() {
        let mut sent = SentSnapshots::default();
        let with_base = |mark, base_id| SnapshotId {
            base_id,
            ..id(mark, 0)
        };
        assert!(!sent.has_base_of(with_base(1, 7), 0));
        sent.record(with_base(1, 7), 0);
        assert!(sent.has_base_of(with_base(2, 7), 0));
        sent.refused(SessionId(1));
        assert!(!sent.has_base_of(with_base(2, 7), 0));
        sent.stored(with_base(1, 7)).unwrap();
        assert!(sent.has_base_of(with_base(2, 7), 0));
        assert!(sent.has_base_of(with_base(2, 7), 1));
        assert!(!sent.has_base_of(with_base(2, 8), 1));
        // The client has committed mark 2, which the keeper does not have.
        assert!(!sent.has_base_of(with_base(3, 7), 2));
    }

    #[test]
    fn keeper_has_the_committed_and_the_latest_snapshot() {
        let mut sent = SentSnapshots::default();
        let mut store = |id, committed| {
            sent.record(id, committed);
            sent.stored(id).map(|stored| stored.marks)
        };
        assert_eq!(store(id(1, 0), 0), Some(vec![1]));
        assert_eq!(store(id(2, 0), 1), Some(vec![1, 2]));
        assert_eq!(store(id(3, 0), 2), Some(vec![2, 3]));
        // Another process was restored at mark 2.
        assert_eq!(store(id(3, 1), 2), Some(vec![2, 3]));
        assert_eq!(store(id(4, 0), 3), None, "it was not sent");
        assert!(sent.is_stored(id(3, 1)) && !sent.is_stored(id(3, 0)));
    }

    #[test]
    fn reply_counts_for_an_earlier_snapshot_too() {
        let mut sent = SentSnapshots::default();
        sent.record(id(1, 0), 0);
        sent.record(id(2, 0), 1);
        let stored = |marks: &[u64]| {
            let marks = marks.to_vec();
            Some(StoredMarks {
                marks,
                committed: 1,
            })
        };
        assert_eq!(sent.stored(id(1, 0)), stored(&[1]));
        assert_eq!(sent.stored(id(2, 0)), stored(&[1, 2]));
    }
}
