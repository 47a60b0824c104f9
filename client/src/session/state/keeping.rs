//! Carries out the [`Journal`]'s decisions: what the session keeps so that another process can
//! restore it.
//!
//! [`Journal`]: super::Journal

use std::time::Instant;

use tensord_proto::{
    text::{MESSAGE_CHARS, sanitize},
    v1::{Mark, Marked, RestorePoint, frame::Body},
};
use tensord_transport::channel::resume::ResumeError;
use tracing::warn;

use super::{State, Track};
use crate::session::journal::Commit;

impl State {
    /// Returns the bytes that both tracks keep.
    fn journal_bytes(&self) -> usize {
        self.ops.outbox().kept_bytes() + self.bulk.outbox().kept_bytes()
    }

    /// Begins a mark after all recorded items, if one is due. [`place_mark`](Self::place_mark)
    /// must be called once those items are encoded and queued.
    pub(in super::super) fn begin_mark(&mut self, now: Instant) -> Option<Mark> {
        if self.end.is_some() || !self.journal.is_due(now, self.journal_bytes()) {
            return None;
        }
        if !self.journal.must_keep() {
            self.keep();
        }
        // The payloads of all recorded uploads are queued already.
        let (bulk, last_request) = (self.bulk.outbox().end(), self.requests.last());
        Some(self.journal.place(bulk, last_request, now))
    }

    /// Queues the mark that was begun.
    pub(in super::super) fn place_mark(&mut self, mark: Mark) {
        self.ops.push(Body::Mark(mark));
        self.journal.placed(self.ops.outbox().end());
    }

    /// Queues a frame that was encoded.
    pub(in super::super) fn push(&mut self, body: Body) {
        self.ops.push(body);
        if self.journal.lapses(self.journal_bytes()) {
            self.keep_nothing();
        }
    }

    /// Returns the epoch of the process that the session is in, and the marks from which the session
    /// can go on in another process.
    pub(in super::super) fn restore_points(&self) -> (u64, Vec<RestorePoint>) {
        let first_pending = self.requests.first_pending();
        let points = self.journal.restore_points(first_pending);
        (self.journal.epoch(), points)
    }

    /// Returns the epoch of the process that the session is in.
    pub(in super::super) fn epoch(&self) -> u64 {
        self.journal.epoch()
    }

    /// Begins to keep what is sent and answered.
    pub(super) fn keep(&mut self) {
        self.requests.begin_journal();
        for track in [Track::Ops, Track::Bulk] {
            self.track(track).outbox_mut().begin_journal();
        }
    }

    /// Drops what the outboxes keep of what was sent and acknowledged.
    pub(super) fn keep_nothing(&mut self) {
        self.requests.end_journal();
        for track in [Track::Ops, Track::Bulk] {
            self.track(track).outbox_mut().end_journal();
        }
    }

    /// Drops what the journal no longer needs, if the pending mark can be committed.
    pub(super) fn try_commit(&mut self) {
        if !self.journal.must_keep() {
            return;
        }
        let first_pending = self.requests.first_pending();
        if let Some(commit) = self.journal.try_commit(first_pending) {
            self.commit(&commit);
        }
    }

    fn commit(&mut self, commit: &Commit) {
        self.requests.commit(commit.last_request);
        self.ops.outbox_mut().commit(commit.point.frames);
        self.bulk.outbox_mut().commit(commit.point.bulk_frames);
    }

    pub(super) fn on_marked(&mut self, marked: Marked) {
        if let Some(reason) = self.journal.on_marked(marked)
            && !std::mem::replace(&mut self.has_warned, true)
        {
            warn!(
                "the worker has not kept a snapshot, so a session may be lost if its process dies: {}",
                sanitize(&reason, MESSAGE_CHARS)
            );
        }
    }

    /// Goes on from `mark` in another process, of this epoch.
    pub(super) fn restore(&mut self, epoch: u64, mark: u64) -> Result<(), ResumeError> {
        if let Some(commit) = self.journal.restored(epoch, mark) {
            self.commit(&commit);
        }
        let point = self.journal.committed().unwrap_or_default();
        self.ops.restore(point.frames)?;
        self.bulk.restore(point.bulk_frames)?;
        self.requests.restored();
        Ok(())
    }
}
