//! The marks of a lease whose snapshots another place is to have: its keeper, or a snapshot store.
//!
//! A mark counts as kept there when the place has its snapshot, or some time after it is clear that the
//! place will not have it soon: the lease then survives the death of its process, but not that of
//! this worker.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use tensord_proto::ids::SessionId;
use tokio::{sync::mpsc, time::Instant};

use super::copy_progress::{CopyProgress, StoredMarks};
use crate::{locks::lock, process_message::SnapshotKept};

/// How long a snapshot may take to be stored at the place. The client keeps its journal meanwhile,
/// which has a bound.
pub(super) const STORE_DEADLINE: Duration = Duration::from_secs(8);

/// A mark whose snapshot the place will not have soon counts as kept after this time: longer than
/// the interval of heartbeats, so that the scheduler no longer takes the lease for one that could
/// move. If the lease moves, it ends here meanwhile, and its client goes on from an earlier mark.
const GIVE_UP_DELAY: Duration = Duration::from_millis(1500);

/// A mark whose snapshot the place is to have.
struct PendingMark {
    mark: u64,
    /// Until when the place must have the snapshot; or, if that is given up, when the mark counts as
    /// kept without it.
    until: Instant,
    is_given_up: bool,
    /// When sending the snapshot began.
    sent_at: Option<Instant>,
    /// For how long the snapshot was sent, once the place has it or that is given up.
    sending: Duration,
}

impl PendingMark {
    /// Returns for how long the snapshot has been sent.
    fn sending(&self, now: Instant) -> Duration {
        let sent_at = self.sent_at.unwrap_or(now);
        now.saturating_duration_since(sent_at)
    }
}

/// The marks that count as kept when a place has their snapshots, by session. `P` identifies the place.
pub(super) struct PendingMarks<P> {
    pending: HashMap<SessionId, PendingMark>,
    progress: Arc<Mutex<CopyProgress<P>>>,
    kept: mpsc::Sender<SnapshotKept>,
}

impl<P: Copy> PendingMarks<P> {
    pub(super) fn new(
        progress: Arc<Mutex<CopyProgress<P>>>,
        kept: mpsc::Sender<SnapshotKept>,
    ) -> Self {
        Self {
            pending: HashMap::new(),
            progress,
            kept,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Records a connection to `place`.
    pub(super) fn connected(&self, place: P) {
        lock(&self.progress).connected(place);
    }

    /// Records that the connection to the place has ended. Gives up all marks.
    pub(super) fn disconnected(&mut self, now: Instant) {
        lock(&self.progress).disconnected();
        let pending = self.pending.iter();
        let pending: Vec<_> = pending.map(|(session, it)| (*session, it.mark)).collect();
        for (session, mark) in pending {
            // While a connection is being lost, nothing is sent.
            self.give_up_after(now, session, mark, Duration::ZERO);
        }
    }

    /// Records which snapshots of a session the place has. Returns whether it had none from which the
    /// session could go on.
    pub(super) fn stored(&self, session: SessionId, stored: StoredMarks) -> bool {
        lock(&self.progress).stored(session, stored)
    }

    /// Records that the place has refused a snapshot. Returns whether it had not refused the one before.
    pub(super) fn refused(&self) -> bool {
        lock(&self.progress).refused()
    }

    /// Forgets a session that has ended.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.pending.remove(&session);
        lock(&self.progress).end_session(session);
    }

    /// Returns when the next pending mark is given up, or counts as kept.
    pub(super) fn next_deadline(&self) -> Instant {
        let deadlines = self.pending.values().map(|it| it.until);
        deadlines.min().unwrap_or_else(Instant::now)
    }

    /// Records that the place must have the snapshot of a mark, which was queued at `queued_at`, within
    /// [`STORE_DEADLINE`].
    pub(super) fn expect(&mut self, session: SessionId, mark: u64, queued_at: Instant) {
        let expected = PendingMark {
            mark,
            until: queued_at + STORE_DEADLINE,
            is_given_up: false,
            sent_at: None,
            sending: Duration::ZERO,
        };
        let known = self.pending.get(&session);
        if known.is_none_or(|known| known.mark < mark) {
            self.pending.insert(session, expected);
        }
    }

    /// Records that sending the snapshot of a mark begins, if the place is to have it.
    pub(super) fn begin_sending(&mut self, now: Instant, session: SessionId, mark: u64) {
        let pending = self.pending.get_mut(&session);
        if let Some(pending) = pending.filter(|it| it.mark == mark) {
            pending.sent_at.get_or_insert(now);
        }
    }

    /// Records that the place has the snapshot of a mark, if it is to have it.
    pub(super) fn sent(&mut self, now: Instant, session: SessionId, mark: u64) {
        let pending = self.pending.get_mut(&session);
        if let Some(pending) = pending.filter(|it| it.mark == mark && !it.is_given_up) {
            pending.sending = pending.sending(now);
        }
    }

    /// Returns whether the place is to have the snapshot of a mark.
    pub(super) fn is_pending(&self, session: SessionId, mark: u64) -> bool {
        let pending = self.pending.get(&session);
        pending.is_some_and(|it| it.mark == mark)
    }

    /// Gives up that the place gets the snapshot of a mark: the lease cannot move from now on, and the mark counts as
    /// kept after [`GIVE_UP_DELAY`].
    pub(super) fn give_up(&mut self, now: Instant, session: SessionId, mark: u64) {
        let known = self.pending.get(&session);
        let known = known.filter(|known| known.mark == mark);
        let sending = known.map(|known| known.sending(now)).unwrap_or_default();
        self.give_up_after(now, session, mark, sending);
    }

    /// As [`give_up`](Self::give_up), of a mark whose snapshot was sent for this long.
    fn give_up_after(&mut self, now: Instant, session: SessionId, mark: u64, sending: Duration) {
        lock(&self.progress).require(session, mark);
        let until = now + GIVE_UP_DELAY;
        let given_up = PendingMark {
            mark,
            until,
            is_given_up: true,
            sent_at: None,
            sending,
        };
        let known = self.pending.get(&session);
        if known.is_none_or(|known| known.mark < mark || known.mark == mark && !known.is_given_up) {
            self.pending.insert(session, given_up);
        }
    }

    /// Lets a mark count as kept now.
    pub(super) async fn count_as_kept(&mut self, session: SessionId, mark: u64) {
        let pending = match self.is_pending(session, mark) {
            true => self.pending.remove(&session),
            false => None,
        };
        let sending = pending.map(|it| it.sending).unwrap_or_default();
        self.kept_after(session, mark, sending).await;
    }

    /// Lets a mark count as kept whose snapshot was sent for this long.
    async fn kept_after(&mut self, session: SessionId, mark: u64, sending: Duration) {
        lock(&self.progress).require(session, mark);
        let kept = SnapshotKept {
            session_id: session.0,
            mark,
            error: String::new(),
            sending_us: sending.as_micros() as u64,
        };
        // An error means that the lease has ended.
        let _ = self.kept.send(kept).await;
    }

    /// Gives up pending marks whose time was over at `now`, and lets those count as kept that were
    /// given up before. Returns whether any was given up.
    pub(super) async fn give_up_due(&mut self, now: Instant) -> bool {
        let over = self.pending.extract_if(|_, it| it.until <= now);
        let mut has_given_up = false;
        for (session, it) in over.collect::<Vec<_>>() {
            has_given_up |= !it.is_given_up;
            match it.is_given_up {
                true => self.kept_after(session, it.mark, it.sending).await,
                false => {
                    let sending = it.sending(now);
                    self.give_up_after(now, session, it.mark, sending);
                }
            }
        }
        has_given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionId = SessionId(1);

    #[tokio::test]
    async fn kept_mark_has_the_time_for_which_its_snapshot_was_sent() {
        let (kept, mut kept_marks) = mpsc::channel(1);
        let mut marks = PendingMarks::<u8>::new(Arc::default(), kept);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut sending_ms = || {
            let kept = kept_marks.try_recv().unwrap();
            (kept.mark, kept.sending_us / 1000)
        };

        marks.expect(SESSION, 1, start);
        marks.begin_sending(at(30), SESSION, 1);
        // Another mark's.
        marks.begin_sending(at(40), SESSION, 2);
        marks.sent(at(100), SESSION, 1);
        marks.count_as_kept(SESSION, 1).await;
        assert_eq!(sending_ms(), (1, 70));

        // Given up while it is sent.
        marks.expect(SESSION, 2, start);
        marks.begin_sending(at(500), SESSION, 2);
        let given_up = start + STORE_DEADLINE;
        assert!(marks.give_up_due(given_up).await);
        assert!(!marks.give_up_due(given_up + GIVE_UP_DELAY).await);
        assert_eq!(sending_ms(), (2, 7500));

        // Never sent.
        marks.count_as_kept(SESSION, 3).await;
        assert_eq!(sending_ms(), (3, 0));
    }
}
