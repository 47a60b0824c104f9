//! What is sent to the keeper of a lease: which snapshots, in which order, and what follows from its
//! replies.

use std::{io, sync::Arc};

use tensord_proto::{
    ids::{PartId, SessionId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{SnapshotId, SnapshotStored, frame::Body},
};
use tokio::time::Instant;
use tracing::warn;

use super::{Assignment, sent_snapshots::SentSnapshots, wire::frames};
use crate::{
    locks::lock,
    supervisor::{Supervisor, pending_marks::PendingMarks, snapshots::KeptSnapshot},
};

/// The snapshots of a part of a lease on their way to its keeper, over one connection after the other.
pub(in crate::supervisor) struct SnapshotStream {
    supervisor: Arc<Supervisor>,
    pub(super) part: PartId,
    pub(in crate::supervisor) marks: PendingMarks<Assignment>,
    /// Those of the present connection.
    sent: SentSnapshots,
    has_warned: bool,
}

impl SnapshotStream {
    /// Creates the stream of a part of a lease. `marks` are those that wait for the keeper.
    pub(in crate::supervisor) fn new(
        supervisor: Arc<Supervisor>,
        part: PartId,
        marks: PendingMarks<Assignment>,
    ) -> Self {
        Self {
            supervisor,
            part,
            marks,
            sent: SentSnapshots::default(),
            has_warned: false,
        }
    }

    /// Begins a connection to a keeper, which has the snapshots `kept`. Returns all snapshots here; the
    /// caller sends those that are [new](Self::is_new) when it comes to them.
    pub(in crate::supervisor) fn connected(
        &mut self,
        assignment: Assignment,
        kept: Vec<SnapshotId>,
    ) -> Vec<KeptSnapshot> {
        self.sent = SentSnapshots::default();
        let present = lock(&self.supervisor.snapshots).of(self.part.lease);
        self.marks.connected(assignment);
        for id in kept {
            // A keeper may send anything.
            let is_of_session = |it: &&KeptSnapshot| it.info.session_id == id.session_id;
            if let Some(latest) = present.iter().rfind(is_of_session) {
                self.sent.record(id, latest.info.committed);
                self.record_stored(id);
            }
        }
        present
    }

    /// Returns whether a snapshot is later than all that were sent of its session.
    pub(in crate::supervisor) fn is_new(&self, snapshot: &KeptSnapshot) -> bool {
        self.sent.is_new(snapshot.id())
    }

    /// Returns the snapshot of this mark, which was queued at `queued_at`, if it is to be sent.
    pub(in crate::supervisor) async fn next_to_send(
        &mut self,
        session: SessionId,
        mark: u64,
        queued_at: Instant,
    ) -> Option<KeptSnapshot> {
        let latest = lock(&self.supervisor.snapshots).latest(self.part.lease, session);
        // A later snapshot than the queued one has a message of its own, or none is left.
        let latest = latest.filter(|latest| latest.info.mark == mark);
        let Some(latest) = latest.filter(|latest| !self.sent.is_stored(latest.id())) else {
            self.marks.count_as_kept(session, mark).await;
            return None;
        };
        self.marks.expect(session, mark, queued_at);
        self.is_new(&latest).then_some(latest)
    }

    /// Begins to send a snapshot. Returns its frames, which are read one by one.
    pub(in crate::supervisor) fn begin<'a>(
        &mut self,
        now: Instant,
        snapshot: &'a KeptSnapshot,
    ) -> impl Iterator<Item = io::Result<Body>> + use<'a> {
        let (id, committed) = (snapshot.id(), snapshot.info.committed);
        let has_base = self.sent.has_base_of(id, committed);
        self.sent.record(id, committed);
        let session = SessionId(id.session_id);
        self.marks.begin_sending(now, session, id.mark);
        frames(snapshot, has_base)
    }

    /// Forgets a session that has ended.
    pub(in crate::supervisor) fn forget(&mut self, session: SessionId) {
        self.marks.forget(session);
        self.sent.forget(session);
    }

    /// Records that a connection has worked: what fails from now on is worth a warning again.
    pub(super) fn worked(&mut self) {
        self.has_warned = false;
    }

    /// Returns whether a warning is due, as none was logged since a connection has worked last; the caller
    /// logs it.
    pub(super) fn take_warning(&mut self) -> bool {
        !std::mem::replace(&mut self.has_warned, true)
    }

    /// Records that the keeper has a snapshot, if it was sent.
    fn record_stored(&mut self, id: SnapshotId) {
        let session = SessionId(id.session_id);
        if let Some(stored) = self.sent.stored(id)
            && self.marks.stored(session, stored)
        {
            // The lease may be able to move now.
            self.supervisor.reports.notify_one();
        }
    }

    /// Processes the keeper's reply to a snapshot.
    pub(in crate::supervisor) async fn on_stored(&mut self, now: Instant, stored: SnapshotStored) {
        let id = stored.id.unwrap_or_default();
        let session = SessionId(id.session_id);
        // A process that was restored comes to a mark again, and takes another snapshot there.
        let latest = lock(&self.supervisor.snapshots).latest(self.part.lease, session);
        let is_replaced =
            latest.is_some_and(|latest| latest.info.mark == id.mark && latest.id() != id);
        let is_pending = self.marks.is_pending(session, id.mark) && !is_replaced;
        if stored.error.is_empty() {
            self.record_stored(id);
            if is_pending {
                self.marks.sent(now, session, id.mark);
                self.marks.count_as_kept(session, id.mark).await;
            }
            return;
        }
        self.sent.refused(session);
        if self.marks.refused() {
            // Another worker may have room.
            self.supervisor.reports.notify_one();
        }
        if is_pending {
            self.marks.give_up(now, session, id.mark);
        }
        if self.take_warning() {
            let reason = sanitize(&stored.error, MESSAGE_CHARS);
            warn!(lease = %self.part.lease, "the keeper has not kept a snapshot of the lease: {reason}");
        }
    }
}
