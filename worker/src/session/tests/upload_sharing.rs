//! The sharing of kept uploads while their session runs: when syncs are answered, and what rounds there
//! are.

use std::time::Duration;

use super::{super::work_queue::MAX_READS_IN_FLIGHT, *};

/// How long a test waits at most.
const DEADLINE: Duration = Duration::from_secs(20);

/// Uploads a pair of values, and has it kept in `slot`.
fn keep(harness: &mut SessionHarness, slot: u32) {
    let bytes = bytes_of(&[slot as f32, -1.0]);
    let keep = Some(slot);
    harness.upload_from(1 + u64::from(slot), Content::Inline { bytes, keep });
}

/// Returns the ids of the syncs that were answered, in order.
fn synced(harness: &SessionHarness) -> Vec<u64> {
    let request = |body: &Body| match body {
        Body::Synced(synced) => Some(synced.request_id),
        _ => None,
    };
    harness.replies.iter().filter_map(request).collect()
}

/// Lets rounds end until `count` syncs are answered.
fn wait_for(harness: &mut SessionHarness, count: usize) -> Vec<u64> {
    let began = Instant::now();
    while synced(harness).len() < count {
        assert!(began.elapsed() < DEADLINE, "no answers");
        harness.wait(Duration::from_millis(1));
        harness.run_all();
    }
    synced(harness)
}

/// Returns how many uploads a new session is offered.
fn offered(harness: &SessionHarness) -> usize {
    harness.blobs.blobs_of("a").len()
}

#[test]
fn sync_is_answered_when_its_uploads_are_shared() {
    let mut harness = SessionHarness::new();
    keep(&mut harness, 0);
    harness.sync(1, true);
    harness.run_all();
    assert!(synced(&harness).is_empty(), "the round has not ended");
    assert!(!harness.session.is_idle());
    // The session goes on during the round, and other syncs do not wait for it.
    keep(&mut harness, 1);
    harness.sync(2, true);
    harness.sync(3, true);
    harness.read(4, &tensor(1, TensorStatus::ReadOnly));
    harness.sync(5, false);
    harness.run_all();
    assert_eq!(harness.values(), [(4, Ok(vec![0.0, -1.0]))]);
    assert_eq!(synced(&harness), [5]);
    assert_eq!(wait_for(&mut harness, 2)[..2], [5, 1]);
    // Another round has what was uploaded during the first.
    assert_eq!(wait_for(&mut harness, 4), [5, 1, 2, 3]);
    assert_eq!(offered(&harness), 2);
    // Nothing is left to share, so no round is needed.
    harness.sync(6, true);
    harness.run_all();
    assert_eq!(synced(&harness), [5, 1, 2, 3, 6]);
}

#[test]
fn uploads_after_the_last_round_are_kept_at_the_end() {
    let mut harness = SessionHarness::new();
    keep(&mut harness, 0);
    harness.sync(1, true);
    wait_for(&mut harness, 1);
    keep(&mut harness, 1);
    harness.run_all();
    assert_eq!(offered(&harness), 1);
    harness.client.push(Body::Close(v1::Close {}));
    harness.run_all();
    let began = Instant::now();
    while offered(&harness) < 2 {
        assert!(began.elapsed() < DEADLINE, "{}", offered(&harness));
        harness.wait(Duration::from_millis(1));
    }
}

#[test]
fn syncs_that_wait_for_a_round_are_bounded() {
    let mut harness = SessionHarness::new();
    keep(&mut harness, 0);
    let count = 3 * MAX_READS_IN_FLIGHT as u64;
    for request in 1..=count {
        // More work than the session plans ahead.
        (0..4).for_each(|slot| keep(&mut harness, slot));
        harness.sync(request, true);
    }
    harness.read(count + 1, &tensor(1, TensorStatus::ReadOnly));
    harness.run_all();
    assert!(harness.values().is_empty(), "the session is paused");
    let answered = wait_for(&mut harness, count as usize);
    assert_eq!(answered, Vec::from_iter(1..=count));
    assert_eq!(harness.values().len(), 1);
}

#[test]
fn session_that_ends_during_a_round_sends_nothing_more() {
    let mut harness = SessionHarness::new();
    keep(&mut harness, 0);
    harness.sync(1, true);
    keep(&mut harness, 1);
    harness.sync(2, true);
    harness.client.push(Body::Close(v1::Close {}));
    harness.run_all();
    assert!(matches!(harness.replies.last(), Some(Body::Closed(_))));
    let began = Instant::now();
    while offered(&harness) < 2 {
        assert!(began.elapsed() < DEADLINE, "{}", offered(&harness));
        harness.wait(Duration::from_millis(1));
    }
    harness.wait(Duration::from_millis(20));
    harness.run_all();
    assert!(synced(&harness).is_empty());
    assert!(matches!(harness.replies.last(), Some(Body::Closed(_))));
}
