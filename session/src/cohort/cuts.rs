//! When the sessions of a lease of several devices place marks, and from which they go on.
//!
//! If the process of such a lease dies, all its sessions must go on from the same state. A *cut* is
//! one mark in the stream of each session, placed so that each all-reduce of a group, and each
//! transfer, is before the marks of all its ranks or after all of them. The cut is *committed* when
//! the snapshots of all its marks are kept, and all requests from before them are answered. The
//! sessions only go on from the committed cut.
//!
//! A session places its mark when the sessions are *level*: all ranks of each group have recorded
//! the same number of all-reduces, and both parts of each transfer are recorded. The worker executes
//! nothing behind a mark before all results from before it are there, so a mark at any other place
//! could wait for an op that the program records only after a read behind the mark. Once one session
//! has placed its mark, each of the others does so before its next all-reduce or transfer. So no two
//! sessions need to be locked at once.
//!
//! A cut is *dropped* if a session does not come to place its mark within [`CUT_TIMEOUT`] of the
//! first one, or a worker does not keep a snapshot. Another one begins later.
//!
//! Pure state: time is an argument. A session calls this under its own lock.

use std::{collections::HashSet, time::Duration};

use web_time::Instant;

use super::ahead::Ahead;
use crate::{
    Capability,
    journal::{MarkCost, RequestedMark},
    state::{OVERDUE_AFTER, REPORT_INTERVAL},
};

/// A cut is dropped if not all sessions have placed their marks within this time after the first one:
/// a session may have no connection.
const CUT_TIMEOUT: Duration = Duration::from_secs(2);

/// The marks of the sessions of a lease. See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// By lease rank.
    ranks: Vec<Rank>,
    /// The all-reduces that the sessions have recorded.
    ahead: Ahead,
    /// The transfers of which one session has recorded its part, and the other has not.
    transfers: HashSet<Capability>,
    cut: Option<Cut>,
    /// Number of the last cut.
    last: u64,
    /// Number of the committed cut, from which the sessions can go on.
    committed: Option<u64>,
    /// When the last cut began.
    last_at: Option<Instant>,
    /// Since when a cut after the committed one is incomplete: when it began, or the sessions went on in another process.
    uncommitted_since: Option<Instant>,
    /// When it was reported that a cut is incomplete.
    reported_at: Option<Instant>,
    /// What the marks of the last committed cut, or of a later one, have cost at most.
    cost: MarkCost,
    /// The highest epoch of a process that has restored a session. What marks have cost in earlier ones does not count.
    cost_epoch: u64,
    /// A cut that was requested before it is due by itself.
    requested: Option<RequestedMark>,
}

#[derive(Debug, Default)]
struct Rank {
    /// The epoch of the process that the session is in; `None` if it is in none yet that takes
    /// snapshots.
    epoch: Option<u64>,
    /// Whether the session has sent a process the request to open it, and has no reply. The process
    /// may have restored the session from the committed cut.
    is_opening: bool,
    /// Number of the last mark of the session.
    last_mark: Option<u64>,
    /// Whether the worker has not replied to the last mark. It keeps one snapshot of a session at a
    /// time.
    is_unanswered: bool,
}

/// A cut that is not committed.
#[derive(Debug)]
struct Cut {
    number: u64,
    /// When the first session placed its mark.
    first_at: Option<Instant>,
    /// What its marks have cost at most so far.
    cost: MarkCost,
    /// By lease rank.
    progress: Vec<Progress>,
}

/// How far a session is with a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// It has not placed its mark.
    Unmarked,
    Marked,
    /// Its snapshot is kept, and all requests from before its mark are answered.
    Ready,
}

impl Cut {
    fn is_marked(&self, rank: u32) -> bool {
        let progress = self.progress.get(rank as usize);
        progress.is_some_and(|progress| *progress != Progress::Unmarked)
    }
}

/// Connections.
impl Cuts {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            ranks: (0..ranks).map(|_| Rank::default()).collect(),
            ..Self::default()
        }
    }

    /// Records that a session sends a process the request to open it. Nothing is committed until
    /// [`opened`](Self::opened): otherwise this session could go on from the cut that is committed
    /// now, and another one from a later cut.
    pub(crate) fn opening(&mut self, rank: u32) {
        if let Some(rank) = self.ranks.get_mut(rank as usize) {
            rank.is_opening = true;
        }
    }

    /// Records that a session is in a process of this epoch, which takes snapshots. If that is another
    /// process than before, it has restored the session from the committed cut.
    pub(crate) fn opened(&mut self, rank: u32, epoch: u64) {
        let Some(known) = self.ranks.get_mut(rank as usize) else {
            return;
        };
        known.is_opening = false;
        let before = known.epoch.replace(epoch);
        if before.is_some_and(|before| before != epoch) {
            // The lease may have waited for devices for long.
            self.uncommitted_since = None;
            if epoch > self.cost_epoch {
                // It may be another worker's process, to which a snapshot costs less.
                self.cost = MarkCost::default();
                if let Some(cut) = &mut self.cut {
                    cut.cost = MarkCost::default();
                }
                self.cost_epoch = epoch;
            }
            // The mark is in the session's journal if it is later than the restored one, so the new
            // process replies to it, again or for the first time.
            known.is_unanswered = known.last_mark > self.committed;
            if let Some(cut) = &mut self.cut
                && let Some(progress) = cut.progress.get_mut(rank as usize)
                && *progress == Progress::Ready
            {
                *progress = Progress::Marked;
            }
        }
        self.try_commit();
    }

    /// Returns the number of sessions.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns whether all sessions are in the same process.
    fn are_together(&self) -> bool {
        let first = self.ranks.first().and_then(|rank| rank.epoch);
        let is_there = |rank: &Rank| rank.epoch == first && !rank.is_opening;
        first.is_some() && self.ranks.iter().all(is_there)
    }
}

/// Marks.
impl Cuts {
    /// Begins a cut if that is due. `interval` returns the least time between two cuts for the cost
    /// of the last one. Returns whether a cut has begun: the other sessions must then be woken to
    /// place their marks.
    pub(crate) fn begin_if_due(
        &mut self,
        now: Instant,
        interval: impl FnOnce(MarkCost) -> Duration,
    ) -> bool {
        self.drop_if_late(now);
        if self.cut.is_some() && self.are_together() {
            self.uncommitted_since.get_or_insert(now);
        }
        let is_early = |at: Instant| now < at + interval(self.cost);
        let is_requested = self.requested == Some(RequestedMark::Unplaced);
        if self.cut.is_some()
            || !self.are_together()
            || self.ranks.iter().any(|rank| rank.is_unanswered)
            || !is_requested && self.last_at.is_some_and(is_early)
        {
            return false;
        }
        self.last += 1;
        if is_requested {
            self.requested = Some(RequestedMark::Placed(self.last));
        }
        self.last_at = Some(now);
        self.uncommitted_since.get_or_insert(now);
        self.cut = Some(Cut {
            number: self.last,
            first_at: None,
            cost: MarkCost::default(),
            progress: vec![Progress::Unmarked; self.ranks.len()],
        });
        true
    }

    /// Has a cut begin as soon as none is incomplete.
    pub(crate) fn request(&mut self) {
        if self.committed.is_some() {
            self.requested = Some(RequestedMark::Unplaced);
        }
    }

    /// Returns whether a requested cut may yet be committed.
    pub(crate) fn awaits_requested(&self) -> bool {
        self.requested.is_some()
    }

    fn drop_if_late(&mut self, now: Instant) {
        let is_late = |cut: &mut Cut| {
            let is_incomplete = cut.progress.contains(&Progress::Unmarked);
            let is_over = |at| now.saturating_duration_since(at) >= CUT_TIMEOUT;
            is_incomplete && cut.first_at.is_some_and(is_over)
        };
        let late = self.cut.take_if(is_late);
        let placed = late.map(|cut| RequestedMark::Placed(cut.number));
        if placed.is_some() && self.requested == placed {
            self.requested = Some(RequestedMark::Unplaced);
        }
    }

    /// Returns whether a session is where its mark of the present cut belongs.
    pub(crate) fn is_at_mark(&self, rank: u32) -> bool {
        let Some(cut) = self.cut.as_ref().filter(|cut| !cut.is_marked(rank)) else {
            return false;
        };
        // Before an all-reduce or a transfer, each session places its mark. So as long as a session has
        // not, it is where it was when the sessions were level.
        cut.first_at.is_some() || self.are_level()
    }

    /// Returns whether no all-reduce and no transfer is recorded by some of its sessions only.
    fn are_level(&self) -> bool {
        self.transfers.is_empty() && self.ahead.are_level()
    }

    /// Returns the number of the cut for which a session must place a mark after all that it has
    /// recorded, if it [is where the mark belongs](Self::is_at_mark). The caller must place it.
    pub(crate) fn place_mark(&mut self, rank: u32, now: Instant) -> Option<u64> {
        self.drop_if_late(now);
        if !self.is_at_mark(rank) {
            return None;
        }
        let cut = self.cut.as_mut()?;
        *cut.progress.get_mut(rank as usize)? = Progress::Marked;
        cut.first_at.get_or_insert(now);
        let rank = self.ranks.get_mut(rank as usize)?;
        (rank.last_mark, rank.is_unanswered) = (Some(cut.number), true);
        Some(cut.number)
    }

    /// Returns whether exactly one session has placed its mark of the present cut. The others must
    /// then be woken: they may have nothing else to send.
    pub(crate) fn has_one_mark(&self) -> bool {
        let placed = |cut: &Cut| {
            let progress = cut.progress.iter();
            progress.filter(|it| **it != Progress::Unmarked).count()
        };
        self.cut.as_ref().is_some_and(|cut| placed(cut) == 1)
    }

    /// Records that a session records an all-reduce of `group`, whose lease ranks are ascending.
    /// [`place_mark`](Self::place_mark) must have been called before. Returns whether a rank of the
    /// group lags behind another one.
    pub(crate) fn all_reduce(&mut self, rank: u32, group: &[u32]) -> bool {
        self.ahead.record(group, rank)
    }

    /// Returns the lease ranks of the sessions for which others wait.
    pub(super) fn lagging_ranks(&self) -> Vec<u32> {
        self.ahead.lagging_ranks()
    }

    /// Records that a session records its part of a transfer: it offers a tensor to another one, or
    /// takes one. [`place_mark`](Self::place_mark) must have been called before.
    pub(crate) fn transfer(&mut self, capability: Capability) {
        if !self.transfers.remove(&capability) {
            self.transfers.insert(capability);
        }
    }
}

/// Commits.
impl Cuts {
    /// Records that the worker has kept a session's snapshot at the cut `number`, and that all
    /// requests from before the mark are answered.
    pub(crate) fn ready(&mut self, rank: u32, number: u64) {
        if let Some(cut) = self.cut.as_mut().filter(|cut| cut.number == number)
            && let Some(progress) = cut.progress.get_mut(rank as usize)
            && *progress == Progress::Marked
        {
            *progress = Progress::Ready;
            self.try_commit();
        }
    }

    /// Records a worker's reply to a session's mark of the cut `number`: what the mark has cost,
    /// and whether the worker has kept the snapshot. If not, the cut is dropped.
    pub(crate) fn answered(&mut self, rank: u32, number: u64, cost: MarkCost, is_kept: bool) {
        if let Some(rank) = self.ranks.get_mut(rank as usize) {
            rank.is_unanswered &= rank.last_mark != Some(number);
        }
        self.cost = self.cost.max(cost);
        if let Some(cut) = self.cut.as_mut().filter(|cut| cut.number == number) {
            cut.cost = cut.cost.max(cost);
            if !is_kept {
                self.cut = None;
                self.requested.take_if(|it| it.is_committed(number));
            }
        }
    }

    /// Records that a session no longer keeps what it has sent since the committed cut, so that the
    /// sessions cannot go on from there.
    pub(crate) fn lapsed(&mut self) {
        (self.cut, self.committed, self.requested) = (None, None, None);
    }

    /// Commits the cut if all sessions are ready and in the same process. If they are not, some were
    /// restored from the cut that is committed now, and the others must be restored from it, too.
    fn try_commit(&mut self) {
        let is_ready = |progress: &Progress| *progress == Progress::Ready;
        if let Some(cut) = &self.cut
            && self.are_together()
            && cut.progress.iter().all(is_ready)
        {
            self.committed = Some(cut.number);
            self.requested.take_if(|it| it.is_committed(cut.number));
            self.cost = cut.cost;
            (self.cut, self.uncommitted_since) = (None, None);
        }
    }

    /// Returns since when a cut after the committed one is incomplete, if that is to be reported: the sessions may not
    /// have come to place their marks. Of all sessions, the first that calls this reports it, and again after a while.
    pub(crate) fn take_overdue(&mut self, now: Instant) -> Option<Instant> {
        let age = |at: Instant| now.saturating_duration_since(at);
        let since = self
            .uncommitted_since
            .filter(|since| age(*since) >= OVERDUE_AFTER)?;
        let is_due = self.reported_at.is_none_or(|at| age(at) >= REPORT_INTERVAL);
        self.reported_at = is_due.then_some(now).or(self.reported_at);
        is_due.then_some(since)
    }

    /// Returns whether some sessions may yet have to go on from the committed cut, from which others do: what these
    /// have sent since must be kept.
    pub(crate) fn is_restoring(&self) -> bool {
        self.committed.is_some() && !self.are_together()
    }

    /// Returns the number of the committed cut, if the sessions can go on from one.
    pub(crate) fn committed(&self) -> Option<u64> {
        self.committed
    }
}

#[cfg(test)]
mod tests;
