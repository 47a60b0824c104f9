//! Carries out the [`Journal`]'s decisions: what the session keeps so that another process can
//! restore it.
//!
//! [`Journal`]: super::Journal

use tensord_channel::resume::ResumeError;
use tensord_proto::{
    text::{MESSAGE_CHARS, sanitize},
    v1::{Marked, Opened, RestorePoint, frame::Body},
};
use tracing::{info, warn};
use web_time::Instant;

use super::{State, Track};
use crate::{
    Capability,
    cohort::{CohortMember, Cuts},
    journal::{Commit, MarkCost, interval},
    journal_budget::MAX_JOURNAL_BYTES,
    op_buffer::Item,
};

/// Bytes that a journal may have while other sessions of the lease have yet to be restored: without it, the lease would
/// end.
const MAX_RESTORING_BYTES: usize = 4 * MAX_JOURNAL_BYTES;

impl State {
    /// Returns the bytes that both tracks keep.
    fn journal_bytes(&self) -> usize {
        self.ops.outbox().kept_bytes() + self.bulk.outbox().kept_bytes()
    }

    /// Returns the number of marks from which the session could have gone on in another process.
    pub fn commits(&self) -> u64 {
        self.journal.commits()
    }

    /// Returns when the mark from which the session could go on in another process was placed, if
    /// there is one.
    pub fn committed_at(&self) -> Option<Instant> {
        // A session that has ended goes on from nothing.
        self.journal.committed_at().filter(|_| self.end.is_none())
    }

    /// Returns the number of bytes that are kept so that the session can go on in another process.
    pub fn kept_bytes(&self) -> usize {
        match self.journal.must_keep() {
            true => self.journal_bytes(),
            false => 0,
        }
    }

    /// Records a mark after all recorded items, if one is due.
    pub fn record_due_mark(&mut self, now: Instant) {
        if self.end.is_some() {
            return;
        }
        let bytes = self.journal_bytes();
        self.report_keeping(now);
        let equal_part = self.journal.equal_part();
        let Some(member) = &self.cohort_member else {
            if let Some(number) = self.journal.due(now, bytes) {
                self.record_mark(number, now);
            }
            return;
        };
        let has_begun = member
            .cuts()
            .begin_if_due(now, |cost| interval(cost, bytes, equal_part));
        if has_begun {
            member.cohort.wake_all();
        }
        self.record_cut_mark(now, |_, _| {});
    }

    /// Has a mark placed as soon as possible, although none is due: the lease is about to move or to be
    /// suspended. [`record_due_mark`](Self::record_due_mark) must follow, again and again as long as the
    /// mark is awaited.
    pub fn request_mark(&mut self) {
        match &self.cohort_member {
            None => self.journal.request_mark(),
            // One cut is enough for all sessions.
            Some(member) if member.lease_rank == 0 => member.cuts().request(),
            Some(_) => {}
        }
    }

    /// Returns whether a requested mark may yet be committed.
    pub fn awaits_requested_mark(&self) -> bool {
        let awaits = match &self.cohort_member {
            None => self.journal.awaits_requested(),
            Some(member) => member.cuts().awaits_requested(),
        };
        awaits && self.end.is_none()
    }

    /// Records the mark of this session for the present cut, if it belongs after all recorded items.
    /// Calls `count` under the same lock, for what is recorded next: no other session can place the
    /// first mark of a cut in between.
    fn record_cut_mark(&mut self, now: Instant, count: impl FnOnce(&mut Cuts, &CohortMember)) {
        let Some(member) = &self.cohort_member else {
            return;
        };
        let mut cuts = member.cuts();
        let number = match self.end {
            None => cuts.place_mark(member.lease_rank, now),
            Some(_) => None,
        };
        let is_first = number.is_some() && cuts.has_one_mark();
        count(&mut cuts, member);
        drop(cuts);
        if is_first {
            member.cohort.wake_all();
        }
        if let Some(number) = number {
            self.commit_cut();
            self.record_mark(number, now);
        }
    }

    fn record_mark(&mut self, number: u64, now: Instant) {
        if !self.journal.must_keep() {
            self.keep();
        }
        // The payloads of all recorded uploads are queued already.
        let (bulk, last_request) = (self.bulk.outbox().end(), self.requests.last());
        let mark = self.journal.place(number, bulk, last_request, now);
        self.op_buffer.push(Item::Mark(mark));
    }

    /// Must be called before an all-reduce of `group` is recorded, or left out because the session has
    /// ended.
    pub fn before_all_reduce(&mut self, group: &[u32], now: Instant) {
        self.record_cut_mark(now, |cuts, member| {
            if cuts.all_reduce(member.lease_rank, group) {
                member.cohort.flush_lagging();
            }
        });
    }

    /// Must be called before this session's part of a transfer is recorded.
    pub fn before_transfer(&mut self, capability: Capability, now: Instant) {
        self.record_cut_mark(now, |cuts, _| cuts.transfer(capability));
    }

    /// Returns whether the session must place a mark after all that is recorded.
    pub(super) fn is_at_mark(&self) -> bool {
        let is_at_mark = |member: &CohortMember| member.cuts().is_at_mark(member.lease_rank);
        self.end.is_none() && self.cohort_member.as_ref().is_some_and(is_at_mark)
    }

    /// Queues a frame that was encoded.
    pub fn push(&mut self, body: Body) {
        let is_mark = matches!(body, Body::Mark(_));
        self.ops.push(body);
        if is_mark {
            self.journal.placed(self.ops.outbox().end());
        }
        // The bytes before a cut that another session has committed need not be kept.
        self.commit_cut();
        let bytes = self.journal_bytes();
        let is_restoring = |member: &CohortMember| member.cuts().is_restoring();
        if self.cohort_member.as_ref().is_some_and(is_restoring) && bytes <= MAX_RESTORING_BYTES {
            // What is beyond the limit is there for a moment only, and takes no room from other sessions.
            self.journal.set_bytes(bytes.min(MAX_JOURNAL_BYTES));
        } else if self.journal.lapses(bytes) {
            self.report.lapsed();
            self.keep_nothing();
            if let Some(member) = &self.cohort_member {
                member.cuts().lapsed();
            }
        }
    }

    /// Returns the mark from which the session can go on in another process, if there is one.
    pub fn restore_points(&self) -> Vec<RestorePoint> {
        match &self.cohort_member {
            None => {
                let first_pending = self.requests.first_pending();
                let point = self.journal.restore_point(first_pending);
                point.into_iter().collect()
            }
            Some(member) => {
                let committed = member.cuts().committed();
                let point = committed.and_then(|mark| self.journal.point(mark));
                point.into_iter().collect()
            }
        }
    }

    /// As [`restore_points`](Self::restore_points), for a request to open the session, which may be
    /// restored there.
    pub fn opening_points(&mut self) -> Vec<RestorePoint> {
        if let Some(member) = self.cohort_member.as_ref().filter(|_| self.journal.is_on()) {
            member.cuts().opening(member.lease_rank);
        }
        self.restore_points()
    }

    /// Returns whether a worker has opened the session in the process that it was in, or has restored
    /// it from a mark that the client has offered.
    pub fn accepts_restore(&self, opened: &Opened) -> bool {
        let is_restored = self.ops.was_attached() && opened.epoch > self.journal.epoch();
        let mut points = self.restore_points().into_iter();
        self.end.is_some() || !is_restored || points.any(|point| point.mark == opened.mark)
    }

    /// Processes that the worker has opened the session.
    pub(super) fn on_opened(&mut self) {
        if let Some(member) = self.cohort_member.as_ref().filter(|_| self.journal.is_on()) {
            let epoch = self.journal.epoch();
            member.cuts().opened(member.lease_rank, epoch);
        }
    }

    /// Returns the epoch of the process that the session is in.
    pub fn epoch(&self) -> u64 {
        self.journal.epoch()
    }

    /// Begins to place marks in a process of this epoch.
    pub fn begin_journal(&mut self, epoch: u64) {
        self.journal.begin(epoch);
        self.keep();
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
        let Some(member) = &self.cohort_member else {
            if let Some(commit) = self.journal.try_commit(first_pending) {
                self.commit(&commit);
            }
            return;
        };
        if let Some(mark) = self.journal.ready(first_pending) {
            member.cuts().ready(member.lease_rank, mark);
        }
        self.commit_cut();
    }

    /// Drops what the journal no longer needs, if the cut of the pending mark is committed.
    fn commit_cut(&mut self) {
        let Some(member) = &self.cohort_member else {
            return;
        };
        let committed = member.cuts().committed();
        if let Some(commit) = committed.and_then(|mark| self.journal.commit_mark(mark)) {
            self.commit(&commit);
        }
    }

    fn commit(&mut self, commit: &Commit) {
        self.requests.commit(commit.last_request);
        self.ops.outbox_mut().commit(commit.point.frames);
        self.bulk.outbox_mut().commit(commit.point.bulk_frames);
        self.journal.set_bytes(self.journal_bytes());
        if let Some(text) = self.report.kept() {
            info!(session = %self.id, "{text}");
        }
    }

    pub(super) fn on_marked(&mut self, marked: Marked) {
        if let Some(member) = &self.cohort_member {
            let cost = MarkCost::of(&marked);
            let (rank, is_kept) = (member.lease_rank, marked.error.is_empty());
            member.cuts().answered(rank, marked.mark, cost, is_kept);
        }
        if let Some(reason) = self.journal.on_marked(marked) {
            let reason = sanitize(&reason, MESSAGE_CHARS).to_string();
            self.report.refused(reason);
        }
    }

    /// Logs if snapshots are not kept.
    fn report_keeping(&mut self, now: Instant) {
        let age = |at: Instant| now.saturating_duration_since(at);
        let of_cut = |member: &CohortMember| member.cuts().take_overdue(now);
        let of_cut = self.cohort_member.as_ref().and_then(of_cut);
        let since = self.journal.uncommitted_since().into_iter().chain(of_cut);
        let waited = since.min().map(age).unwrap_or_default();
        let committed = self.journal.committed_at().map(age);
        if let Some(text) = self.report.warning(now, waited, committed) {
            warn!(session = %self.id, "{text}");
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
        self.upload_cache.forget_held();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
