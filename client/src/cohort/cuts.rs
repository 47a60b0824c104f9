//! When the sessions of a lease of several devices place marks, and from which they go on.
//!
//! If the process of such a lease dies, all its sessions must go on from the same state. A *cut* is
//! one mark in the stream of each session, placed so that each all-reduce of a group, and each
//! transfer, is before the marks of all its ranks or after all of them. The cut is *committed* when
//! the snapshots of all its marks are kept, and all requests from before them are answered. The
//! sessions only go on from the committed cut.
//!
//! When a cut begins, each group's *target* is the number of all-reduces that its first rank has
//! reached. A session places its mark where it has reached the targets of all its groups. That takes
//! no lock of several sessions at once. A session may pass one target before it has reached another:
//! the cut is then *dropped*, as is one to which a session does not come within [`CUT_TIMEOUT`].
//! Another one begins later.
//!
//! Pure state: time is an argument. A session calls this under its own lock.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::session::Capability;

/// A cut is dropped if not all sessions have placed their marks within this time. A session may wait
/// for a thread that waits for another session.
const CUT_TIMEOUT: Duration = Duration::from_secs(2);

/// The marks of the sessions of a lease. See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// By lease rank.
    ranks: Vec<Rank>,
    /// By the lease ranks of a group, ascending: the number of all-reduces that each rank of the
    /// group has reached.
    reached: HashMap<Vec<u32>, Vec<u64>>,
    /// The transfers of which one session has recorded its part, and the other has not.
    transfers: HashMap<Capability, HalfTransfer>,
    cut: Option<Cut>,
    /// Number of the last cut.
    last: u64,
    /// Number of the committed cut, from which the sessions can go on.
    committed: Option<u64>,
    /// When the last cut began.
    last_at: Option<Instant>,
    /// How long the workers needed for the last mark that took longest.
    cost: Duration,
}

#[derive(Debug, Default)]
struct Rank {
    /// The epoch of the process that the session is in; `None` if it is in none yet that takes
    /// snapshots.
    epoch: Option<u64>,
    /// Whether the session has asked a process to open it, and has no answer. The process may have
    /// restored it from the committed cut.
    is_opening: bool,
}

/// A cut that is not committed.
#[derive(Debug)]
struct Cut {
    number: u64,
    began: Instant,
    /// How long the workers needed for the mark that took longest so far.
    cost: Duration,
    /// For each group, the number of all-reduces before the cut; 0 for those that are not listed.
    targets: HashMap<Vec<u32>, u64>,
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

/// The part of a transfer that one session has recorded.
#[derive(Debug)]
struct HalfTransfer {
    /// The session that has not recorded its part.
    missing: u32,
    /// Number of the last cut whose mark the other session had placed before its part.
    after: u64,
}

impl Cut {
    fn target(&self, group: &[u32]) -> u64 {
        self.targets.get(group).copied().unwrap_or(0)
    }

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

    /// Records that a session asks a process to open it. Nothing is committed until
    /// [`opened`](Self::opened): other sessions could otherwise go on from another cut than this
    /// one.
    pub(crate) fn opening(&mut self, rank: u32) {
        if let Some(rank) = self.ranks.get_mut(rank as usize) {
            rank.is_opening = true;
        }
    }

    /// Records that a session is in a process of this epoch, which takes snapshots. In another
    /// process than before it has gone on from the committed cut.
    pub(crate) fn opened(&mut self, rank: u32, epoch: u64) {
        let Some(known) = self.ranks.get_mut(rank as usize) else {
            return;
        };
        known.is_opening = false;
        let before = known.epoch.replace(epoch);
        if before.is_some_and(|before| before != epoch)
            && let Some(cut) = &mut self.cut
            && let Some(progress) = cut.progress.get_mut(rank as usize)
            && *progress == Progress::Ready
        {
            // The mark is in the session's journal, so the new process answers it again.
            *progress = Progress::Marked;
        }
        self.try_commit();
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
        interval: impl FnOnce(Duration) -> Duration,
    ) -> bool {
        self.drop_if_late(now);
        let is_early = |at: Instant| now < at + interval(self.cost);
        if self.cut.is_some() || !self.are_together() || self.last_at.is_some_and(is_early) {
            return false;
        }
        self.last += 1;
        self.last_at = Some(now);
        let target = |(group, reached): (&Vec<u32>, &Vec<u64>)| {
            let furthest = reached.iter().copied().max().unwrap_or(0);
            (group.clone(), furthest)
        };
        self.cut = Some(Cut {
            number: self.last,
            began: now,
            cost: Duration::ZERO,
            targets: self.reached.iter().map(target).collect(),
            progress: vec![Progress::Unmarked; self.ranks.len()],
        });
        true
    }

    fn drop_if_late(&mut self, now: Instant) {
        let is_late = |cut: &mut Cut| {
            let is_incomplete = cut.progress.contains(&Progress::Unmarked);
            is_incomplete && now.saturating_duration_since(cut.began) >= CUT_TIMEOUT
        };
        self.cut.take_if(is_late);
    }

    /// Returns whether a session is where its mark of the present cut belongs.
    pub(crate) fn is_at_mark(&self, rank: u32) -> bool {
        let Some(cut) = self.cut.as_ref().filter(|cut| !cut.is_marked(rank)) else {
            return false;
        };
        let has_reached_target = |(group, reached): (&Vec<u32>, &Vec<u64>)| {
            let at = group.binary_search(&rank).ok();
            at.is_none_or(|at| reached[at] == cut.target(group))
        };
        let is_part_missing =
            |half: &HalfTransfer| half.missing == rank && half.after != cut.number;
        self.reached.iter().all(has_reached_target) && !self.transfers.values().any(is_part_missing)
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
        Some(cut.number)
    }

    /// Records that a session records an all-reduce of `group`, whose lease ranks are ascending.
    /// [`place_mark`](Self::place_mark) must have been called before.
    pub(crate) fn all_reduce(&mut self, rank: u32, group: &[u32]) {
        let Ok(at) = group.binary_search(&rank) else {
            return;
        };
        if !self.reached.contains_key(group) {
            self.reached.insert(group.to_vec(), vec![0; group.len()]);
        }
        let Some(reached) = self.reached.get_mut(group) else {
            return;
        };
        // The session has reached the place of its mark in this group, but not in another one.
        let passes_target =
            |cut: &mut Cut| !cut.is_marked(rank) && reached[at] >= cut.target(group);
        self.cut.take_if(passes_target);
        reached[at] += 1;
    }

    /// Records that a session records its part of a transfer: it offers a tensor to the session at
    /// `other`, or takes one from there. [`place_mark`](Self::place_mark) must have been called
    /// before.
    pub(crate) fn transfer(&mut self, rank: u32, other: u32, capability: Capability) {
        let number = self.cut.as_ref().map_or(0, |cut| cut.number);
        let is_marked = |rank| self.cut.as_ref().is_some_and(|cut| cut.is_marked(rank));
        let (is_after, is_other_marked) = (is_marked(rank), is_marked(other));
        let is_split = match self.transfers.remove(&capability) {
            Some(half) => (half.after == number) != is_after,
            None => {
                let after = if is_after { number } else { 0 };
                let missing = other;
                let half = HalfTransfer { missing, after };
                self.transfers.insert(capability, half);
                // The other part can only come after a mark that its session has placed.
                is_other_marked && !is_after
            }
        };
        if is_split {
            self.cut = None;
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

    /// Records how long a worker needed for a mark of the cut `number`.
    pub(crate) fn cost(&mut self, number: u64, cost: Duration) {
        if let Some(cut) = self.cut.as_mut().filter(|cut| cut.number == number) {
            cut.cost = cut.cost.max(cost);
            self.cost = cut.cost;
        }
    }

    /// Drops the cut `number`, as the worker has not kept a snapshot of it.
    pub(crate) fn refused(&mut self, number: u64) {
        self.cut.take_if(|cut| cut.number == number);
    }

    /// Records that a session no longer keeps what it has sent since the committed cut, so that the
    /// sessions cannot go on from there.
    pub(crate) fn lapsed(&mut self) {
        (self.cut, self.committed) = (None, None);
    }

    /// Commits the cut if all sessions are ready. While they are in different processes, some go on
    /// from the committed cut, and all the others will.
    fn try_commit(&mut self) {
        let is_ready = |progress: &Progress| *progress == Progress::Ready;
        if let Some(cut) = &self.cut
            && self.are_together()
            && cut.progress.iter().all(is_ready)
        {
            self.committed = Some(cut.number);
            self.cut = None;
        }
    }

    /// Returns the number of the committed cut, if the sessions can go on from one.
    pub(crate) fn committed(&self) -> Option<u64> {
        self.committed
    }
}

#[cfg(test)]
mod tests;
