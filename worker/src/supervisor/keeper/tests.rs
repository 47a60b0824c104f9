//! Tests of what a keeper allows and keeps.

use std::{fs::File, io::Write, os::fd::OwnedFd};

use rustix::fs::fcntl_add_seals;

use super::*;
use crate::{
    blobs::shared::{SEALS, unnamed_memory},
    process_message::SnapshotInfo,
};

const LEASE: LeaseId = LeaseId(7);

const PART: PartId = part(7, 0);

const ASSIGNMENT: u64 = 5;

const fn part(lease: u64, index: u32) -> PartId {
    let lease = LeaseId(lease);
    PartId { lease, index }
}

const BOUNDS: SnapshotBounds = SnapshotBounds {
    max_bytes: 1 << 20,
    devices: 1,
};

fn certificate(byte: u8) -> Fingerprint {
    Fingerprint([byte; 32])
}

fn allowed(now: Instant) -> KeptForOthers {
    let mut kept = KeptForOthers::new(BOUNDS);
    kept.allow(now, PART, "w1".into(), certificate(1), ASSIGNMENT);
    kept
}

fn memory() -> OwnedFd {
    let mut file = unnamed_memory("test").unwrap();
    file.write_all(&[1; 8]).unwrap();
    fcntl_add_seals(&file, SEALS).unwrap();
    file.into()
}

fn info(session_id: u64, mark: u64) -> SnapshotInfo {
    SnapshotInfo {
        session_id,
        mark,
        committed: 0,
        size_bytes: 8,
        base_id: 0,
    }
}

fn add(kept: &mut KeptForOthers, mark: u64) {
    let added = kept.snapshots.add(PART, BOUNDS, 0, info(1, mark), memory());
    assert_eq!(added, Ok(()));
}

#[test]
fn only_the_named_worker_may_send_snapshots() {
    let mut kept = allowed(Instant::now());
    assert!(
        kept.source(PART, Some(certificate(1)), ASSIGNMENT)
            .is_some()
    );
    assert!(
        kept.source(PART, Some(certificate(2)), ASSIGNMENT)
            .is_none()
    );
    assert!(kept.source(PART, None, ASSIGNMENT).is_none());
    assert!(
        kept.source(part(8, 0), Some(certificate(1)), ASSIGNMENT)
            .is_none()
    );
}

#[test]
fn connection_of_an_earlier_assignment_counts_no_more() {
    let now = Instant::now();
    let mut kept = allowed(now);
    let certificate = certificate(1);
    let first = kept.source(PART, Some(certificate), ASSIGNMENT);
    let first = first.unwrap().number;
    // The scheduler sends the same again when this worker has joined again.
    kept.allow(now, PART, "w1".into(), certificate, ASSIGNMENT);
    assert!(kept.numbered_source(PART, first).is_some());
    kept.add(PART, first, 0, info(1, 1), memory()).unwrap();
    kept.allow(now, PART, "w1".into(), certificate, ASSIGNMENT + 1);
    assert!(kept.numbered_source(PART, first).is_none());
    assert!(kept.source(PART, Some(certificate), ASSIGNMENT).is_none());
    assert!(
        kept.source(PART, Some(certificate), ASSIGNMENT + 1)
            .is_some()
    );
    assert_eq!(kept.snapshots_of(PART).len(), 1, "what is here stays");
    let second = kept.source(PART, Some(certificate), ASSIGNMENT + 1);
    let second = second.unwrap().number;
    kept.end_session(PART, SessionId(1), second);
    assert!(kept.snapshots_of(PART).is_empty(), "the worker has sent it");
}

#[test]
fn each_worker_of_a_lease_ends_its_own_sessions() {
    let now = Instant::now();
    let mut kept = allowed(now);
    kept.allow(now, PART, "w2".into(), certificate(2), ASSIGNMENT);
    let number = |kept: &mut KeptForOthers, byte| {
        let source = kept.source(PART, Some(certificate(byte)), ASSIGNMENT);
        source.unwrap().number
    };
    let [first, second] = [1, 2].map(|byte| number(&mut kept, byte));
    kept.add(PART, first, 0, info(1, 1), memory()).unwrap();
    kept.add(PART, second, 0, info(2, 1), memory()).unwrap();
    kept.end_session(PART, SessionId(1), second);
    assert_eq!(kept.snapshots.of(PART).len(), 2);
    // The session has gone on at the second worker, which the first one does not know.
    kept.add(PART, second, 1, info(1, 2), memory()).unwrap();
    kept.end_session(PART, SessionId(1), first);
    let refused = kept.add(PART, first, 0, info(1, 3), memory());
    assert!(matches!(refused, Err(Refused::Full(_))), "{refused:?}");
    assert_eq!(kept.snapshots.of(PART).len(), 2);
    kept.end_session(PART, SessionId(1), second);
    kept.end_session(PART, SessionId(2), second);
    assert_eq!(kept.snapshots.used_bytes(), 0);
    kept.forget(LEASE);
    assert!(kept.senders.is_empty() && kept.sources.is_empty());
}

#[test]
fn lease_that_starts_here_takes_its_snapshots() {
    let mut kept = allowed(Instant::now());
    add(&mut kept, 1);
    assert_eq!(kept.take(PART).len(), 1);
    assert_eq!(kept.take(PART).len(), 0);
    assert!(
        kept.source(PART, Some(certificate(1)), ASSIGNMENT)
            .is_none()
    );
}

#[test]
fn snapshots_without_a_connection_are_dropped_after_a_while() {
    let now = Instant::now();
    let mut kept = allowed(now);
    add(&mut kept, 1);
    let source = kept.source(PART, Some(certificate(1)), ASSIGNMENT).unwrap();
    source.connections = 1;
    kept.expire(now + 2 * ORPHAN_TIMEOUT);
    assert_eq!(kept.snapshots.of(PART).len(), 1);
    let source = kept.source(PART, Some(certificate(1)), ASSIGNMENT).unwrap();
    source.connections = 0;
    kept.expire(now + ORPHAN_TIMEOUT - Duration::from_millis(1));
    assert_eq!(kept.snapshots.of(PART).len(), 1);
    kept.expire(now + ORPHAN_TIMEOUT);
    assert_eq!(kept.snapshots.used_bytes(), 0);
    assert!(
        kept.source(PART, Some(certificate(1)), ASSIGNMENT)
            .is_some()
    );
}

#[test]
fn snapshots_of_a_suspended_lease_stay() {
    let now = Instant::now();
    let mut kept = allowed(now);
    add(&mut kept, 1);
    kept.hold(LEASE);
    kept.expire(now + 10 * ORPHAN_TIMEOUT);
    let other = part(8, 0);
    let max_bytes = BOUNDS.max_bytes;
    let full = kept.reserve(
        now + 10 * ORPHAN_TIMEOUT,
        other,
        2,
        SessionId(2),
        0,
        max_bytes,
    );
    assert!(full.is_err());
    assert_eq!(kept.take(PART).len(), 1);
}

#[test]
fn snapshots_without_a_connection_give_way() {
    let now = Instant::now();
    let mut kept = allowed(now);
    add(&mut kept, 1);
    let other = part(8, 0);
    kept.allow(now, other, "w2".into(), certificate(2), ASSIGNMENT);
    let mut reserve = |now, size_bytes| {
        let reserved = kept.reserve(now, other, 2, SessionId(2), 0, size_bytes);
        (reserved.is_ok(), kept.snapshots.of(PART).len())
    };
    let max_bytes = BOUNDS.max_bytes;
    let late = now + ORPHAN_PRIORITY_TIMEOUT;
    assert_eq!(
        reserve(late - Duration::from_millis(1), max_bytes),
        (false, 1)
    );
    assert_eq!(
        reserve(late, max_bytes + 1),
        (false, 1),
        "it would not be enough"
    );
    assert_eq!(reserve(late, 1), (true, 1), "there is room for both");
    assert_eq!(reserve(late, max_bytes - 1), (true, 0));
}

#[test]
fn memory_is_taken_before_a_snapshot_is_received() {
    let mut kept = allowed(Instant::now());
    let max_bytes = 1 << 20;
    let reserve = |kept: &mut KeptForOthers, committed, size_bytes| {
        let now = Instant::now();
        kept.reserve(now, PART, 1, SessionId(1), committed, size_bytes)
    };
    assert_eq!(reserve(&mut kept, 0, max_bytes), Ok(()));
    assert!(reserve(&mut kept, 0, 1).is_err());
    kept.release(max_bytes);
    add(&mut kept, 1);
    assert!(reserve(&mut kept, 1, max_bytes).is_err());
    assert!(reserve(&mut kept, 1, u64::MAX).is_err());
    assert_eq!(reserve(&mut kept, 1, 1), Ok(()));
    kept.release(1);
    // The client has committed mark 2, so that it cannot go on from mark 1.
    assert_eq!(reserve(&mut kept, 2, max_bytes), Ok(()));
}

#[test]
fn connection_of_an_earlier_source_counts_for_no_other() {
    let now = Instant::now();
    let mut kept = allowed(now);
    let number = |kept: &mut KeptForOthers| {
        kept.source(PART, Some(certificate(1)), ASSIGNMENT)
            .unwrap()
            .number
    };
    let first = number(&mut kept);
    kept.forget(LEASE);
    kept.allow(now, PART, "w1".into(), certificate(1), ASSIGNMENT);
    assert_ne!(number(&mut kept), first);
    assert!(kept.numbered_source(PART, first).is_none());
}

#[test]
fn snapshots_of_one_part_are_dropped_while_the_lease_is_held() {
    let now = Instant::now();
    let mut kept = allowed(now);
    let other = part(7, 1);
    kept.allow(now, other, "w2".into(), certificate(2), ASSIGNMENT);
    assert!(
        kept.source(other, Some(certificate(1)), ASSIGNMENT)
            .is_none()
    );
    for (part, byte) in [(PART, 1), (other, 2)] {
        let number = kept
            .source(part, Some(certificate(byte)), ASSIGNMENT)
            .unwrap()
            .number;
        let session = u64::from(byte);
        kept.add(part, number, 0, info(session, 1), memory())
            .unwrap();
    }
    kept.hold(LEASE);
    assert!(
        kept.source(PART, Some(certificate(1)), ASSIGNMENT)
            .is_none()
    );
    kept.forget_part(other);
    assert_eq!(kept.held(), [LEASE]);
    let left = kept.take(PART);
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].info.session_id, 1);
    assert!(kept.senders.is_empty() && kept.sources.is_empty());
    assert!(kept.held().is_empty());
}

/// A worker can run a part of a lease and keep the snapshots of another one.
#[test]
fn part_that_ran_here_is_held_with_those_of_other_workers() {
    let mut kept = allowed(Instant::now());
    let own = part(7, 1);
    let held = |kept: &KeptForOthers, part| {
        let snapshots = kept.snapshots_of(part);
        let sessions = snapshots.iter().map(|kept| kept.info.session_id);
        sessions.collect::<Vec<_>>()
    };
    let snapshot = |session| KeptSnapshot::new(0, info(session, 1), File::from(memory()), None);
    add(&mut kept, 1);
    kept.hold_own(own, vec![snapshot(2)]);
    assert_eq!((held(&kept, PART), held(&kept, own)), (vec![1], vec![2]));
    kept.hold_own(own, vec![snapshot(3)]);
    assert_eq!((held(&kept, PART), held(&kept, own)), (vec![1], vec![3]));
    assert_eq!(kept.take(own).len(), 1);
    assert_eq!((held(&kept, PART), held(&kept, own)), (vec![1], vec![]));
    kept.forget(LEASE);
    assert_eq!(kept.snapshots.used_bytes(), 0);
}
