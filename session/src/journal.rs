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
    match bytes >= equal_part / DUE_DIVISOR {
        true => least,
        false => {
            let sending = cost.sending.saturating_mul(SENDING_FACTOR);
            least.max(sending).max(MIN_INTERVAL)
        }
    }
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
mod tests {
    use super::*;
    use crate::journal_budget::MAX_JOURNAL_BYTES as MAX_BYTES;

    const DUE_BYTES: usize = MAX_BYTES / DUE_DIVISOR;

    fn marked(mark: u64, error: &str, cost_ms: u64) -> Marked {
        Marked {
            mark,
            error: error.into(),
            cost_us: cost_ms * 1000,
            sending_us: 0,
        }
    }

    fn point(mark: u64, frames: u64) -> RestorePoint {
        RestorePoint {
            mark,
            frames,
            bytes: 10 * frames,
            bulk_frames: 3,
            bulk_bytes: 30,
        }
    }

    fn commit(mark: u64, frames: u64, last_request: u64) -> Option<Commit> {
        let point = point(mark, frames);
        Some(Commit {
            point,
            last_request,
        })
    }

    fn place(journal: &mut Journal, frames: u64, last_request: u64, now: Instant) -> Mark {
        let mark = journal.place(journal.last + 1, (3, 30), last_request, now);
        journal.placed((frames, 10 * frames));
        mark
    }

    /// Returns a journal whose first mark is committed, and has cost `cost_ms`.
    fn committed(now: Instant, cost_ms: u64) -> Journal {
        let mut journal = Journal::default();
        journal.begin(0);
        place(&mut journal, 1, 0, now);
        journal.on_marked(marked(1, "", cost_ms));
        journal.try_commit(None).unwrap();
        assert_eq!((journal.commits(), journal.committed_at()), (1, Some(now)));
        journal
    }

    #[test]
    fn mark_is_committed_when_its_snapshot_is_kept_and_requests_are_answered() {
        let now = Instant::now();
        let mut journal = Journal::default();
        assert!(journal.due(now, MAX_BYTES).is_none() && !journal.must_keep());
        journal.begin(0);
        assert!(journal.must_keep());
        assert!(
            journal.due(now, 0).is_some(),
            "the first mark is due at once"
        );
        let mark = place(&mut journal, 7, 4, now);
        assert_eq!((mark.mark, mark.committed), (1, 0));
        assert!(journal.due(now, MAX_BYTES).is_none());
        assert_eq!(journal.try_commit(None), None);
        assert_eq!(journal.on_marked(marked(1, "", 1)), None);
        assert_eq!(journal.try_commit(Some(4)), None, "request 4 is pending");
        assert_eq!(journal.try_commit(Some(5)), commit(1, 7, 4));
        assert_eq!(journal.restore_point(None), Some(point(1, 7)));
        let later = now + MIN_INTERVAL;
        let soon = now + Duration::from_millis(50);
        assert!(
            journal
                .due(later - Duration::from_millis(1), DUE_BYTES - 1)
                .is_none()
        );
        assert!(journal.due(soon, DUE_BYTES).is_some() && journal.due(later, 0).is_some());
        let mark = place(&mut journal, 9, 4, later);
        assert_eq!((mark.mark, mark.committed), (2, 1));
    }

    #[test]
    fn interval_follows_the_cost() {
        let now = Instant::now();
        let journal = committed(now, 100);
        let due = now + Duration::from_secs(5);
        let before = due - Duration::from_millis(1);
        assert!(journal.due(before, MAX_BYTES).is_none() && journal.due(due, 0).is_some());
    }

    #[test]
    fn sending_snapshots_takes_a_small_part_of_the_time_unless_the_journal_is_long() {
        let cost = MarkCost {
            copying: Duration::from_millis(10),
            sending: Duration::from_millis(400),
        };
        let interval = |bytes| interval(cost, bytes, MAX_BYTES);
        assert_eq!(interval(DUE_BYTES - 1), Duration::from_secs(10));
        assert_eq!(interval(DUE_BYTES), Duration::from_millis(500));
    }

    #[test]
    fn refused_mark_leaves_the_one_before() {
        let now = Instant::now();
        let mut journal = committed(now, 0);
        place(&mut journal, 5, 0, now);
        let refused = journal.on_marked(marked(2, "no room", 0));
        assert_eq!(refused, Some("no room".into()));
        assert_eq!(journal.restore_point(None), Some(point(1, 1)));
        assert_eq!(place(&mut journal, 6, 0, now).mark, 3);
    }

    #[test]
    fn journal_that_lapsed_begins_at_the_next_mark() {
        let now = Instant::now();
        let mut journal = committed(now, 0);
        place(&mut journal, 5, 0, now);
        assert_eq!(journal.uncommitted_since(), Some(now));
        assert!(!journal.lapses(MAX_BYTES) && journal.lapses(MAX_BYTES + 1));
        assert!(!journal.lapses(MAX_BYTES + 1) && !journal.must_keep());
        assert_eq!(journal.restore_point(None), None);
        journal.on_marked(marked(2, "", 0));
        assert_eq!(journal.try_commit(None), None, "ops after it were dropped");
        let soon = now + MIN_INTERVAL - Duration::from_millis(1);
        assert_eq!(
            journal.due(soon, MAX_BYTES),
            None,
            "marks are not placed in a row"
        );
        let mark = place(&mut journal, 9, 0, now + MIN_INTERVAL);
        assert_eq!((mark.mark, mark.committed), (3, 0));
        assert!(journal.must_keep());
        journal.on_marked(marked(3, "", 0));
        assert_eq!(journal.uncommitted_since(), Some(now));
        assert_eq!(journal.try_commit(None), commit(3, 9, 0));
        assert_eq!(journal.uncommitted_since(), None);
    }

    #[test]
    fn journals_of_a_process_lapse_when_they_have_too_much_together() {
        let now = Instant::now();
        let budget = JournalBudget::default();
        let journal = || {
            let mut journal = Journal::new(budget.clone());
            journal.begin(0);
            place(&mut journal, 1, 0, now);
            journal
        };
        let [mut first, mut second, mut third] = [journal(), journal(), journal()];
        assert!(!first.lapses(MAX_BYTES) && !second.lapses(MAX_BYTES));
        // Nothing is left, so the third has a third of what all may have.
        let part = 2 * MAX_BYTES / 3;
        assert_eq!((third.equal_part(), third.memory.limit()), (part, part));
        let is_due = |journal: &Journal, bytes| {
            interval(MarkCost::default(), bytes, journal.equal_part()) < MIN_INTERVAL
        };
        assert!(!is_due(&third, part / 2 - 1) && is_due(&third, part / 2));
        assert!(!third.lapses(part));
        // The others have more than an equal part, and lapse when they send next.
        assert!(first.lapses(MAX_BYTES));
        assert!(!second.lapses(MAX_BYTES), "the first one has left room");
        second.end();
        assert_eq!(
            (third.equal_part(), third.memory.limit()),
            (MAX_BYTES, MAX_BYTES)
        );
    }

    #[test]
    fn requested_mark_is_placed_at_once() {
        let now = Instant::now();
        let mut journal = committed(now, 1);
        assert_eq!(journal.due(now, 0), None);
        journal.request_mark();
        assert_eq!(journal.due(now, 0), Some(2));
        place(&mut journal, 2, 0, now);
        assert_eq!(journal.due(now, 0), None);
        assert!(journal.awaits_requested());
        journal.on_marked(marked(2, "", 1));
        journal.try_commit(None).unwrap();
        assert!(!journal.awaits_requested());
        assert_eq!(journal.due(now, 0), None, "later marks come at their time");
        // A mark is pending: the requested one follows.
        place(&mut journal, 3, 0, now);
        journal.request_mark();
        assert_eq!(journal.due(now, 0), None);
        journal.on_marked(marked(3, "", 1));
        journal.try_commit(None).unwrap();
        assert!(journal.awaits_requested());
        assert_eq!(journal.due(now, 0), Some(4));
        place(&mut journal, 4, 0, now);
        journal.on_marked(marked(4, "full", 1));
        assert!(!journal.awaits_requested(), "it cannot be committed");
        // Nothing can go on from a journal that has lapsed.
        journal.request_mark();
        journal.lapses(MAX_BYTES + 1);
        assert!(!journal.awaits_requested());
        journal.request_mark();
        assert!(!journal.awaits_requested());
    }

    #[test]
    fn pending_mark_is_answered_again_after_a_restore() {
        let now = Instant::now();
        let mut journal = committed(now, 0);
        place(&mut journal, 5, 8, now);
        journal.on_marked(marked(2, "", 0));
        assert_eq!(journal.try_commit(Some(8)), None);
        assert_eq!(journal.restore_point(Some(8)), Some(point(1, 1)));
        assert_eq!(journal.restored(1, 1), None);
        assert_eq!(journal.epoch(), 1);
        assert_eq!(
            journal.try_commit(None),
            None,
            "the new process has no such snapshot"
        );
        journal.on_marked(marked(2, "", 0));
        assert_eq!(journal.try_commit(None), commit(2, 5, 8));
    }

    #[test]
    fn session_goes_on_from_a_mark_whose_reply_was_lost() {
        let now = Instant::now();
        let mut journal = Journal::default();
        journal.begin(0);
        place(&mut journal, 5, 8, now);
        assert_eq!(journal.restore_point(Some(8)), None);
        assert_eq!(journal.restore_point(Some(9)), Some(point(1, 5)));
        assert_eq!(journal.restored(1, 1), commit(1, 5, 8));
        assert_eq!(journal.committed(), Some(point(1, 5)));
    }
}
