//! Tests of when marks are due, when they are committed, and when a journal lapses.

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
fn cost_of_a_mark_has_a_limit_and_is_that_of_the_process() {
    let now = Instant::now();
    let mut journal = committed(now, u64::MAX / 1000);
    let due = now + MAX_INTERVAL;
    let before = due - Duration::from_millis(1);
    assert!(journal.due(before, 0).is_none() && journal.due(due, 0).is_some());
    journal.restored(1, 1);
    assert_eq!(journal.due(now + MIN_INTERVAL, 0), Some(2));
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
