//! The queue between the run of a lease and what copies the lease's snapshots to another place.

use std::sync::{Arc, Mutex};

use tensord_proto::ids::SessionId;
use tokio::{sync::mpsc, time::Instant};

use super::copy_progress::CopyProgress;
use crate::{locks::lock, process_message::SnapshotKept};

/// Number of messages that wait to be taken, for each device of the lease.
const QUEUE_PER_DEVICE: usize = 32;

/// A message for what copies snapshots.
pub(super) enum Outgoing {
    /// A session has a new snapshot, of this mark. The latest one is copied.
    Snapshot {
        session: SessionId,
        mark: u64,
        queued_at: Instant,
    },
    SessionEnded(SessionId),
}

/// The end of the queue at the run of a lease. `P` identifies the place.
pub(super) struct CopyQueue<P> {
    outgoing: mpsc::Sender<Outgoing>,
    /// Yields the snapshots that count as kept at the place.
    pub(super) kept: mpsc::Receiver<SnapshotKept>,
    progress: Arc<Mutex<CopyProgress<P>>>,
}

impl<P: Copy> CopyQueue<P> {
    /// Creates a queue for a lease of this number of devices here. Returns with it what the other end
    /// needs.
    pub(super) fn new(
        devices: usize,
        progress: Arc<Mutex<CopyProgress<P>>>,
    ) -> (Self, mpsc::Receiver<Outgoing>, mpsc::Sender<SnapshotKept>) {
        let capacity = QUEUE_PER_DEVICE * devices.max(1);
        let (outgoing, queued) = mpsc::channel(capacity);
        let (kept, kept_receiver) = mpsc::channel(capacity);
        let queue = Self {
            outgoing,
            kept: kept_receiver,
            progress,
        };
        (queue, queued, kept)
    }

    /// Has a session's new snapshot copied. Returns `false` if the place does not keep up: the snapshot
    /// counts as kept.
    pub(super) fn send(&self, session: SessionId, mark: u64) -> bool {
        let message = Outgoing::Snapshot {
            session,
            mark,
            queued_at: Instant::now(),
        };
        let is_queued = self.outgoing.try_send(message).is_ok();
        if !is_queued {
            self.count_as_kept(session, mark);
        }
        is_queued
    }

    /// Lets a session's new snapshot count as kept without a copy.
    pub(super) fn count_as_kept(&self, session: SessionId, mark: u64) {
        lock(&self.progress).require(session, mark);
    }

    /// Has the copies of a session's snapshots dropped. If the queue is full, they are dropped with
    /// the lease.
    pub(super) fn end_session(&self, session: SessionId) {
        if self
            .outgoing
            .try_send(Outgoing::SessionEnded(session))
            .is_err()
        {
            let mut progress = lock(&self.progress);
            progress.end_session(session);
            // The link does not learn of the end, so it goes on counting the session.
            progress.set_unknown();
        }
    }
}
