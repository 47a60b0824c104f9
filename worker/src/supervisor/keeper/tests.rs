//! Tests of what a keeper allows and keeps.

use std::io::Write;

use rustix::fs::fcntl_add_seals;

use super::*;
use crate::{
    blobs::shared::{SEALS, unnamed_memory},
    process_message::SnapshotInfo,
};

const LEASE: LeaseId = LeaseId(7);

const BOUNDS: SnapshotBounds = SnapshotBounds {
    max_bytes: 1 << 20,
    devices: 1,
};

fn certificate(byte: u8) -> Fingerprint {
    Fingerprint([byte; 32])
}

fn allowed(now: Instant) -> KeptForOthers {
    let mut kept = KeptForOthers::new(BOUNDS);
    kept.allow(now, LEASE, "w1".into(), certificate(1));
    kept
}

fn add(kept: &mut KeptForOthers, mark: u64) {
    let mut file = unnamed_memory("test").unwrap();
    file.write_all(&[1; 8]).unwrap();
    fcntl_add_seals(&file, SEALS).unwrap();
    let info = SnapshotInfo {
        session_id: 1,
        mark,
        committed: 0,
        size_bytes: 8,
    };
    let added = kept.snapshots.add(LEASE, BOUNDS, 0, info, file.into());
    assert_eq!(added, Ok(()));
}

#[test]
fn only_the_named_worker_may_send_snapshots() {
    let mut kept = allowed(Instant::now());
    assert!(kept.source(LEASE, Some(certificate(1))).is_some());
    assert!(kept.source(LEASE, Some(certificate(2))).is_none());
    assert!(kept.source(LEASE, None).is_none());
    assert!(kept.source(LeaseId(8), Some(certificate(1))).is_none());
}

#[test]
fn another_worker_begins_anew_and_the_same_one_goes_on() {
    let now = Instant::now();
    let mut kept = allowed(now);
    add(&mut kept, 1);
    kept.allow(now, LEASE, "w1".into(), certificate(1));
    assert_eq!(kept.snapshots.of(LEASE).len(), 1);
    kept.allow(now, LEASE, "w2".into(), certificate(2));
    assert_eq!(kept.snapshots.of(LEASE).len(), 0);
    assert!(kept.source(LEASE, Some(certificate(1))).is_none());
}

#[test]
fn lease_that_starts_here_takes_its_snapshots() {
    let mut kept = allowed(Instant::now());
    add(&mut kept, 1);
    assert_eq!(kept.take(LEASE).len(), 1);
    assert_eq!(kept.take(LEASE).len(), 0);
    assert!(kept.source(LEASE, Some(certificate(1))).is_none());
}

#[test]
fn snapshots_without_a_connection_are_dropped_after_a_while() {
    let now = Instant::now();
    let mut kept = allowed(now);
    add(&mut kept, 1);
    let source = kept.source(LEASE, Some(certificate(1))).unwrap();
    source.connections = 1;
    kept.expire(now + 2 * ORPHAN_TIMEOUT);
    assert_eq!(kept.snapshots.of(LEASE).len(), 1);
    let source = kept.source(LEASE, Some(certificate(1))).unwrap();
    source.connections = 0;
    kept.expire(now + ORPHAN_TIMEOUT - Duration::from_millis(1));
    assert_eq!(kept.snapshots.of(LEASE).len(), 1);
    kept.expire(now + ORPHAN_TIMEOUT);
    assert_eq!(kept.snapshots.used_bytes(), 0);
    assert!(kept.source(LEASE, Some(certificate(1))).is_some());
}

#[test]
fn memory_is_taken_before_a_snapshot_is_received() {
    let mut kept = allowed(Instant::now());
    let max_bytes = 1 << 20;
    let reserve = |kept: &mut KeptForOthers, committed, size_bytes| {
        kept.reserve(LEASE, SessionId(1), committed, size_bytes)
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
    let number =
        |kept: &mut KeptForOthers| kept.source(LEASE, Some(certificate(1))).unwrap().number;
    let first = number(&mut kept);
    kept.forget(LEASE);
    kept.allow(now, LEASE, "w1".into(), certificate(1));
    assert_ne!(number(&mut kept), first);
    assert!(kept.numbered_source(LEASE, first).is_none());
}
