//! Whether a lease could go on at the other place that has copies of its snapshots: at its keeper, or at
//! a worker with its snapshot store.
//!
//! A client restores a session from the last mark that counts as kept, or from a later one, or, as
//! long as requests from before that are not answered, from the committed mark; if its journal has
//! lapsed, it reports that to the scheduler. A mark may count as kept although the place does not have
//! its snapshot; see [`pending_marks`](super::pending_marks).

use std::collections::HashMap;

use tensord_proto::ids::SessionId;

/// What the other place has, and what counts as kept. `P` identifies the place.
#[derive(Debug)]
pub(super) struct CopyProgress<P> {
    /// The place to which there is a connection.
    place: Option<P>,
    /// The mark from which, or from a later one, each session would go on.
    required: HashMap<SessionId, u64>,
    /// What the place has of each session.
    stored: HashMap<SessionId, StoredMarks>,
    is_unknown: bool,
    /// Whether the place has refused a snapshot, and stored none since.
    has_refused: bool,
}

impl<P> Default for CopyProgress<P> {
    fn default() -> Self {
        Self {
            place: None,
            required: HashMap::new(),
            stored: HashMap::new(),
            is_unknown: false,
            has_refused: false,
        }
    }
}

/// The snapshots of a session that the other place has.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct StoredMarks {
    /// Their marks, in ascending order.
    pub(super) marks: Vec<u64>,
    /// The mark that the client had committed when the last one was taken; 0 if none.
    pub(super) committed: u64,
}

impl StoredMarks {
    /// Returns whether a session could go on from `required` or a later mark.
    fn suffice(&self, required: u64) -> bool {
        let has_committed = self.committed == 0 || self.marks.contains(&self.committed);
        has_committed && self.marks.last().is_some_and(|last| *last >= required)
    }
}

impl<P: Copy> CopyProgress<P> {
    /// Records a connection to `place`.
    pub(super) fn connected(&mut self, place: P) {
        (self.place, self.has_refused) = (Some(place), false);
    }

    /// Records that the connection to the place has ended.
    pub(super) fn disconnected(&mut self) {
        self.place = None;
        self.stored.clear();
    }

    /// Records that the session can go on at the place only from this mark or a later one, as it counts as kept, or soon
    /// will.
    pub(super) fn require(&mut self, session: SessionId, mark: u64) {
        let latest = self.required.entry(session).or_default();
        *latest = mark.max(*latest);
    }

    /// Records that the end of a session was missed, so that it is not known any more which sessions
    /// there are. The lease then moves only if its worker is lost.
    pub(super) fn set_unknown(&mut self) {
        self.is_unknown = true;
    }

    /// Records which snapshots of a session the place has. Returns whether it had none from which the
    /// session could go on.
    pub(super) fn stored(&mut self, session: SessionId, stored: StoredMarks) -> bool {
        self.has_refused = false;
        let had_one = self.has(session);
        self.stored.insert(session, stored);
        !had_one
    }

    /// Records that the place has refused a snapshot. Returns whether it had not refused the one before.
    pub(super) fn refused(&mut self) -> bool {
        !std::mem::replace(&mut self.has_refused, true)
    }

    /// Returns the place if it has refused the last snapshot.
    pub(super) fn refusing_place(&self) -> Option<P> {
        self.place.filter(|_| self.has_refused)
    }

    /// Returns whether the session could go on at the place.
    fn has(&self, session: SessionId) -> bool {
        let required = self.required.get(&session).copied().unwrap_or_default();
        let stored = self.stored.get(&session);
        stored.is_some_and(|stored| stored.suffice(required))
    }

    pub(super) fn end_session(&mut self, session: SessionId) {
        self.required.remove(&session);
        self.stored.remove(&session);
    }

    /// Returns the place if all sessions could go on there. `live_sessions` is their number.
    pub(super) fn place_of_all(&self, live_sessions: usize) -> Option<P> {
        let mut sessions = self.required.keys().chain(self.stored.keys());
        let has_all =
            sessions.all(|session| self.has(*session)) && self.stored.len() >= live_sessions;
        self.place
            .filter(|_| has_all && live_sessions > 0 && !self.is_unknown)
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::ids::WorkerId;

    use super::*;

    const KEEPER: WorkerId = WorkerId(7);

    /// The keeper has snapshots of these marks, of which the client had committed one.
    fn stored(marks: &[u64], committed: u64) -> StoredMarks {
        let marks = marks.to_vec();
        StoredMarks { marks, committed }
    }

    #[test]
    fn keeper_has_all_once_each_session_has_a_snapshot_there() {
        let [first, second] = [SessionId(1), SessionId(2)];
        let mut progress = CopyProgress::default();
        progress.stored(first, stored(&[1], 0));
        assert_eq!(progress.place_of_all(1), None, "there is no connection");
        progress.connected(KEEPER);
        assert_eq!(progress.place_of_all(1), Some(KEEPER));
        assert_eq!(progress.place_of_all(2), None);
        progress.stored(second, stored(&[4], 0));
        assert_eq!(progress.place_of_all(2), Some(KEEPER));
        progress.end_session(first);
        assert_eq!(progress.place_of_all(2), None);
        assert_eq!(progress.place_of_all(1), Some(KEEPER));
        assert_eq!(progress.place_of_all(0), None, "nothing could go on");
    }

    #[test]
    fn snapshot_before_the_last_mark_that_counts_as_kept_is_too_old() {
        let session = SessionId(1);
        let mut progress = CopyProgress::default();
        progress.connected(KEEPER);
        progress.stored(session, stored(&[1], 0));
        progress.require(session, 1);
        assert_eq!(progress.place_of_all(1), Some(KEEPER));
        // The keeper did not store it in time.
        progress.require(session, 2);
        assert_eq!(progress.place_of_all(1), None);
        progress.stored(session, stored(&[1], 0));
        assert_eq!(progress.place_of_all(1), None);
        progress.stored(session, stored(&[2], 0));
        assert_eq!(progress.place_of_all(1), Some(KEEPER));
        progress.disconnected();
        progress.connected(KEEPER);
        assert_eq!(progress.place_of_all(1), None);
    }

    #[test]
    fn committed_mark_is_needed_while_later_requests_are_not_answered() {
        let session = SessionId(1);
        let mut progress = CopyProgress::default();
        progress.connected(KEEPER);
        // The keeper had no room for mark 2.
        progress.stored(session, stored(&[3], 2));
        assert_eq!(progress.place_of_all(1), None);
        progress.stored(session, stored(&[3, 4], 3));
        assert_eq!(progress.place_of_all(1), Some(KEEPER));
    }
}
