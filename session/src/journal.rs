//! When a session places marks, and from which one it can go on.
//!
//! When a worker opens a session, it reports whether it keeps snapshots of the session outside of
//! the session's process. The outboxes of both tracks then keep what they have sent: the
//! *journal*. The session puts *marks* into its stream of ops at intervals. A mark is *committed*
//! when the worker has kept a snapshot of the session there and all earlier requests are
//! answered. The journal up to the mark is then dropped. If the process dies, another one
//! restores the snapshot, and the client sends the journal again. The sessions of a lease of several
//! devices place and commit their marks together, as [`Cuts`](crate::cohort::Cuts) decides.
//!
//! The journal is bounded ([`JournalBudget`](crate::JournalBudget)). A program that sends more than its limit
//! between two marks is not held up: the journal *lapses*, and the session ends with its process until the next
//! mark is committed.
//!
//! Time is an argument; what other journals of the process take is in the budget that they share.

use std::time::Duration;

use tensord_proto::v1::{Mark, Marked, RestorePoint};
use web_time::Instant;

use crate::journal_budget::{JournalBudget, JournalMemory};

/// Shortest time between two marks of a program that sends little.
const MIN_INTERVAL: Duration = Duration::from_secs(2);

/// Longest time between two marks, whatever the last one has cost.
const MAX_INTERVAL: Duration = Duration::from_secs(600);

/// The time between two marks is at least this many times as long as copying the last snapshot took.
const COPYING_FACTOR: u32 = 50;

/// The time between two marks is at least this many times as long as the last snapshot was sent over the network of
/// all-reduces. While it is sent, it takes about half of what an all-reduce could use, so a training that does nothing
/// but all-reduces takes about 2 % longer.
const SENDING_FACTOR: u32 = 25;

/// A mark is due before [`MIN_INTERVAL`] has passed when a journal has an equal part of the budget, divided by this.
const DUE_DIVISOR: usize = 2;

/// What a mark has cost, as the worker reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MarkCost {
    /// How long it took to capture and copy the session.
    pub(super) copying: Duration,
    /// How long the snapshot was sent over the network that the session's all-reduces use.
    pub(super) sending: Duration,
}

impl MarkCost {
    pub(super) fn of(marked: &Marked) -> Self {
        Self {
            copying: Duration::from_micros(marked.cost_us),
            sending: Duration::from_micros(marked.sending_us),
        }
    }

    /// Returns the larger of each of the two times.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            copying: self.copying.max(other.copying),
            sending: self.sending.max(other.sending),
        }
    }
}

/// Returns the least time between two marks when the last one has cost `cost`, and the journal has
/// `bytes`, of which it may always have `equal_part`.
pub(super) fn interval(cost: MarkCost, bytes: usize, equal_part: usize) -> Duration {
    let least = cost.copying.saturating_mul(COPYING_FACTOR);
    let interval = match bytes >= equal_part / DUE_DIVISOR {
        true => least,
        false => {
            let sending = cost.sending.saturating_mul(SENDING_FACTOR);
            least.max(sending).max(MIN_INTERVAL)
        }
    };
    interval.min(MAX_INTERVAL)
}

/// The marks of a session. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// Whether the worker takes snapshots.
    is_on: bool,
    /// The epoch of the process that the session is in: higher for each process of the lease.
    epoch: u64,
    /// Whether the journal has lapsed, so that nothing is kept until the next mark.
    is_lapsed: bool,
    /// Number of the last mark.
    last: u64,
    pending: Option<PendingMark>,
    committed: Option<RestorePoint>,
    /// When the committed mark was placed.
    committed_at: Option<Instant>,
    /// Number of marks that were committed.
    commits: u64,
    /// When the last mark was placed.
    last_at: Option<Instant>,
    /// What the last mark has cost.
    cost: MarkCost,
    requested: Option<RequestedMark>,
    /// When the first mark after the committed one was placed.
    uncommitted_since: Option<Instant>,
    memory: JournalMemory,
}

/// A mark that was requested before it is due by itself, until it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestedMark {
    Unplaced,
    /// It has this number.
    Placed(u64),
}

impl RequestedMark {
    /// Returns whether the mark `committed`, or a later one, is the requested one.
    pub(crate) fn is_committed(self, committed: u64) -> bool {
        matches!(self, Self::Placed(number) if number <= committed)
    }
}

/// A mark that is not committed.
#[derive(Debug)]
struct PendingMark {
    point: RestorePoint,
    placed_at: Instant,
    /// Id of the last request from before the mark.
    last_request: u64,
    /// Whether the worker has kept the snapshot.
    is_kept: bool,
}

/// A mark that was committed.
#[derive(Debug, PartialEq)]
pub(super) struct Commit {
    pub(super) point: RestorePoint,
    /// Id of the last request from before the mark.
    pub(super) last_request: u64,
}

impl PendingMark {
    /// Returns whether all requests from before the mark are answered.
    fn is_answered(&self, first_pending: Option<u64>) -> bool {
        first_pending.is_none_or(|id| id > self.last_request)
    }
}

impl Journal {
    /// Creates a journal that shares a budget with others.
    pub(super) fn new(budget: JournalBudget) -> Self {
        Self {
            memory: JournalMemory::new(budget),
            ..Self::default()
        }
    }

    /// Starts placing marks in a process of this epoch.
    pub(super) fn begin(&mut self, epoch: u64) {
        (self.is_on, self.epoch) = (true, epoch);
        self.memory.begin();
    }

    /// Records that the journal has `bytes`.
    pub(super) fn set_bytes(&mut self, bytes: usize) {
        self.memory.set(if self.must_keep() { bytes } else { 0 });
    }

    /// Returns how many bytes the journal may always have.
    pub(super) fn equal_part(&self) -> usize {
        self.memory.equal_part()
    }

    /// Gives back what the journal takes of the budget: the session has ended.
    pub(super) fn end(&mut self) {
        self.memory = JournalMemory::default();
    }

    /// Returns whether what is sent and answered must be kept.
    pub(super) fn must_keep(&self) -> bool {
        self.is_on && !self.is_lapsed
    }

    /// Lets the journal lapse if it has more than its limit. Returns whether it has just lapsed:
    /// nothing must be kept then.
    pub(super) fn lapses(&mut self, bytes: usize) -> bool {
        self.set_bytes(bytes);
        if !self.must_keep() || bytes <= self.memory.limit() {
            return false;
        }
        self.is_lapsed = true;
        self.set_bytes(0);
        (self.pending, self.committed, self.requested) = (None, None, None);
        true
    }

    /// Returns the epoch of the process that the session is in.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the mark from which the session can go on, if the worker has its snapshot: the committed
    /// one; if none is committed, as at first and after the journal has lapsed, the pending one. A worker may have the snapshot of a pending mark and its
    /// keeper not, and a session that went on from there could not go on at the keeper any more.
    /// `first_pending` is the id of the first request that is not answered: it would not be answered after
    /// a later mark.
    pub(super) fn restore_point(&self, first_pending: Option<u64>) -> Option<RestorePoint> {
        let pending = self.pending.as_ref();
        let pending = pending.filter(|pending| pending.is_answered(first_pending));
        let pending = pending.map(|pending| pending.point);
        self.committed.or(pending)
    }

    /// Has a mark placed as soon as none is pending.
    pub(super) fn request_mark(&mut self) {
        if self.must_keep() {
            self.requested = Some(RequestedMark::Unplaced);
        }
    }

    /// Returns whether a requested mark may yet be committed.
    pub(super) fn awaits_requested(&self) -> bool {
        self.requested.is_some()
    }

    /// Returns the number of the mark that is due, if one is, when the journal has `bytes`.
    pub(super) fn due(&self, now: Instant, bytes: usize) -> Option<u64> {
        // A mark makes a journal that has lapsed no shorter.
        let bytes = if self.must_keep() { bytes } else { 0 };
        let is_early = |last_at| now < last_at + interval(self.cost, bytes, self.equal_part());
        let is_requested = self.requested == Some(RequestedMark::Unplaced);
        let is_time = is_requested || !self.last_at.is_some_and(is_early);
        (self.is_on && self.pending.is_none() && is_time).then_some(self.last + 1)
    }

    /// Begins the mark `number`, which is higher than those of all earlier marks; everything that is
    /// sent after it must be kept. `bulk` is the position of the bulk track and `last_request` the id
    /// of the last request, both after the ops before the mark. [`placed`](Self::placed) must follow.
    pub(super) fn place(
        &mut self,
        number: u64,
        bulk: (u64, u64),
        last_request: u64,
        now: Instant,
    ) -> Mark {
        self.last = number;
        self.last_at = Some(now);
        self.uncommitted_since.get_or_insert(now);
        self.is_lapsed = false;
        if self.requested == Some(RequestedMark::Unplaced) {
            self.requested = Some(RequestedMark::Placed(number));
        }
        let (bulk_frames, bulk_bytes) = bulk;
        self.pending = Some(PendingMark {
            point: RestorePoint {
                mark: self.last,
                bulk_frames,
                bulk_bytes,
                ..RestorePoint::default()
            },
            placed_at: now,
            last_request,
            is_kept: false,
        });
        Mark {
            mark: self.last,
            committed: self.committed.map_or(0, |point| point.mark),
        }
    }

    /// Records the position of the mark that was begun on the track for ops.
    pub(super) fn placed(&mut self, (frames, bytes): (u64, u64)) {
        if let Some(pending) = &mut self.pending {
            (pending.point.frames, pending.point.bytes) = (frames, bytes);
        }
    }

    /// Processes the worker's reply to a mark. Returns the reason if the worker has not kept the
    /// snapshot.
    pub(super) fn on_marked(&mut self, marked: Marked) -> Option<String> {
        let pending = self.pending.as_mut();
        let pending = pending.filter(|pending| pending.point.mark == marked.mark)?;
        self.cost = MarkCost::of(&marked);
        if marked.error.is_empty() {
            pending.is_kept = true;
            return None;
        }
        self.pending = None;
        self.requested.take_if(|it| it.is_committed(marked.mark));
        Some(marked.error)
    }

    /// Returns the pending mark if its snapshot is kept and all requests from before it are
    /// answered, so that it can be committed. `first_pending` is the id of the first request that is
    /// not.
    pub(super) fn ready(&self, first_pending: Option<u64>) -> Option<u64> {
        let is_ready =
            |pending: &&PendingMark| pending.is_kept && pending.is_answered(first_pending);
        let ready = self.pending.as_ref().filter(is_ready);
        ready.map(|pending| pending.point.mark)
    }

    /// Commits the pending mark if it is ready.
    pub(super) fn try_commit(&mut self, first_pending: Option<u64>) -> Option<Commit> {
        self.ready(first_pending).and_then(|_| self.commit())
    }

    /// Commits the pending mark if it has this number: the cut that it is part of was committed.
    pub(super) fn commit_mark(&mut self, mark: u64) -> Option<Commit> {
        let pending = self.pending.as_ref();
        let is_pending = pending.is_some_and(|pending| pending.point.mark == mark);
        is_pending.then(|| self.commit()).flatten()
    }

    fn commit(&mut self) -> Option<Commit> {
        let PendingMark {
            point,
            placed_at,
            last_request,
            ..
        } = self.pending.take()?;
        (self.committed, self.committed_at) = (Some(point), Some(placed_at));
        self.commits += 1;
        self.uncommitted_since = None;
        self.requested.take_if(|it| it.is_committed(point.mark));
        Some(Commit {
            point,
            last_request,
        })
    }

    /// Records that the session goes on from its [`restore_point`](Self::restore_point) in another
    /// process, of this epoch. Returns the mark from which it goes on if that was not committed before.
    pub(super) fn restored(&mut self, epoch: u64, mark: u64) -> Option<Commit> {
        self.epoch = epoch;
        // The session may have waited for a device for long.
        self.uncommitted_since = None;
        // It may be another worker's process, to which a snapshot costs less.
        self.cost = MarkCost::default();
        let commit = self.commit_mark(mark);
        if let Some(pending) = &mut self.pending {
            // The mark is in the journal, so the new process will answer it again.
            pending.is_kept = false;
        }
        commit
    }

    /// Returns where the mark `mark` is, if it is committed or pending.
    pub(super) fn point(&self, mark: u64) -> Option<RestorePoint> {
        let pending = self.pending.as_ref().map(|pending| pending.point);
        let mut points = pending.into_iter().chain(self.committed);
        points.find(|point| point.mark == mark)
    }

    /// Returns whether the worker takes snapshots.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Returns the committed mark.
    pub(super) fn committed(&self) -> Option<RestorePoint> {
        self.committed
    }

    /// Returns when the committed mark was placed.
    pub(super) fn committed_at(&self) -> Option<Instant> {
        self.committed.and(self.committed_at)
    }

    /// Returns when the first of the marks was placed that came after the committed one, if there is one.
    pub(super) fn uncommitted_since(&self) -> Option<Instant> {
        self.uncommitted_since
    }

    /// Returns the number of marks that were committed so far.
    pub(super) fn commits(&self) -> u64 {
        self.commits
    }
}

#[cfg(test)]
mod tests;
