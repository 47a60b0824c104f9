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
            self.give_up(now, session, mark);
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
        };
        let known = self.pending.get(&session);
        if known.is_none_or(|known| known.mark < mark) {
            self.pending.insert(session, expected);
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
        lock(&self.progress).require(session, mark);
        let until = now + GIVE_UP_DELAY;
        let given_up = PendingMark {
            mark,
            until,
            is_given_up: true,
        };
        let known = self.pending.get(&session);
        if known.is_none_or(|known| known.mark < mark || known.mark == mark && !known.is_given_up) {
            self.pending.insert(session, given_up);
        }
    }

    /// Lets a mark count as kept now.
    pub(super) async fn count_as_kept(&mut self, session: SessionId, mark: u64) {
        if self.is_pending(session, mark) {
            self.pending.remove(&session);
        }
        lock(&self.progress).require(session, mark);
        let kept = SnapshotKept {
            session_id: session.0,
            mark,
            error: String::new(),
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
                true => self.count_as_kept(session, it.mark).await,
                false => self.give_up(now, session, it.mark),
            }
        }
        has_given_up
    }
}
