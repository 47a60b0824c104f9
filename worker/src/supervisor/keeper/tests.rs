//! Tests of what a keeper allows and keeps.

use super::*;
use crate::{
    memory_file::MemoryFile, process_message::SnapshotInfo,
    supervisor::sealed_memory::sealed_memory,
};

const LEASE: LeaseId = LeaseId(7);

const PART: PartId = part(7, 0);

const ASSIGNMENT: u64 = 5;

const TENANT: &str = "a";

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

/// The worker that has a certificate, for leases that run.
fn source(byte: u8, assignment: u64) -> NewSource {
    NewSource {
        name: format!("w{byte}"),
        certificate: certificate(byte),
        assignment,
        is_handover: false,
    }
}

fn allowed(now: Instant) -> KeptForOthers {
    let mut kept = KeptForOthers::new(BOUNDS);
    kept.allow(now, PART, TENANT, source(1, ASSIGNMENT));
    kept
}

fn memory() -> MemoryFile {
    sealed_memory(&[1; 8])
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
    kept.allow(now, PART, TENANT, source(1, ASSIGNMENT));
    assert!(kept.numbered_source(PART, first).is_some());
    kept.add(PART, first, 0, info(1, 1), memory()).unwrap();
    kept.allow(now, PART, TENANT, source(1, ASSIGNMENT + 1));
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
    kept.allow(now, PART, TENANT, source(2, ASSIGNMENT));
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
    assert!(matches!(refused, Err(Refused::NotKept(_))), "{refused:?}");
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
    kept.allow(now, other, TENANT, source(2, ASSIGNMENT));
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
    let reserved = reserve(&mut kept, 0, max_bytes).unwrap();
    assert!(reserve(&mut kept, 0, 1).is_err());
    kept.release(reserved);
    add(&mut kept, 1);
    assert!(reserve(&mut kept, 1, max_bytes).is_err());
    assert!(reserve(&mut kept, 1, u64::MAX).is_err());
    let reserved = reserve(&mut kept, 1, 1).unwrap();
    kept.release(reserved);
    // The client has committed mark 2, so that it cannot go on from mark 1.
    assert!(reserve(&mut kept, 2, max_bytes).is_ok());
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
    kept.allow(now, PART, TENANT, source(1, ASSIGNMENT));
    assert_ne!(number(&mut kept), first);
    assert!(kept.numbered_source(PART, first).is_none());
}

#[test]
fn snapshots_of_one_part_are_dropped_while_the_lease_is_held() {
    let now = Instant::now();
    let mut kept = allowed(now);
    let other = part(7, 1);
    kept.allow(now, other, TENANT, source(2, ASSIGNMENT));
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
    let snapshot = |session| KeptSnapshot::new(0, info(session, 1), memory(), None);
    add(&mut kept, 1);
    kept.hold_own(own, TENANT, vec![snapshot(2)]);
    assert_eq!((held(&kept, PART), held(&kept, own)), (vec![1], vec![2]));
    kept.hold_own(own, TENANT, vec![snapshot(3)]);
    assert_eq!((held(&kept, PART), held(&kept, own)), (vec![1], vec![3]));
    assert_eq!(kept.take(own).len(), 1);
    assert_eq!((held(&kept, PART), held(&kept, own)), (vec![1], vec![]));
    kept.forget(LEASE);
    assert_eq!(kept.snapshots.used_bytes(), 0);
}

/// Reserves memory for a snapshot of the only session of a part. Returns the reason if there is no room.
fn reserve(
    kept: &mut KeptForOthers,
    now: Instant,
    part: PartId,
    size_bytes: u64,
) -> Result<Reserved, String> {
    let source = kept.source(part, Some(certificate(1)), ASSIGNMENT);
    let number = source.unwrap().number;
    kept.reserve(now, part, number, SessionId(1), 0, size_bytes)
}

#[test]
fn a_tenant_uses_only_its_part_of_the_memory() {
    let now = Instant::now();
    let mut kept = KeptForOthers::new(BOUNDS);
    let [first, second, other] = [part(1, 0), part(2, 0), part(3, 0)];
    for (part, tenant) in [(first, "a"), (second, "a"), (other, "b")] {
        kept.allow(now, part, tenant, source(1, ASSIGNMENT));
    }
    kept.set_tenant_permille(500);
    let half = BOUNDS.max_bytes / 2;
    let reserved = reserve(&mut kept, now, first, half - 1).unwrap();
    let refused = reserve(&mut kept, now, second, 2).unwrap_err();
    let expected = "the snapshot has 2 bytes, and its tenant's leases use 524287 of the 524288 bytes that one tenant may use of the memory for other workers' snapshots";
    assert_eq!(refused, expected);
    let of_other = reserve(&mut kept, now, other, half).unwrap();
    assert!(reserve(&mut kept, now, other, 1).is_err());
    kept.release(of_other);
    kept.release(reserved);
    // A suspended lease is held whatever its size, and its bytes count for its tenant.
    let snapshot = KeptSnapshot::new(0, info(1, 1), memory(), None);
    kept.hold_own(second, "a", vec![snapshot]);
    assert!(reserve(&mut kept, now, first, half).is_err());
    let reserved = reserve(&mut kept, now, first, half - (64 << 10)).unwrap();
    kept.release(reserved);
    // So are the snapshots of one that another worker hands over.
    let handover = NewSource {
        is_handover: true,
        ..source(1, ASSIGNMENT + 1)
    };
    kept.allow(now, first, "a", handover);
    let number = kept.source(first, Some(certificate(1)), ASSIGNMENT + 1);
    let number = number.unwrap().number;
    let reserved = kept.reserve(now, first, number, SessionId(1), 0, half);
    kept.release(reserved.unwrap());
    kept.forget(LeaseId(1));
    kept.forget(LeaseId(2));
    for part in [first, second] {
        kept.allow(now, part, "a", source(1, ASSIGNMENT));
    }
    // A pool of one tenant.
    let reserved = reserve(&mut kept, now, first, half - 1).unwrap();
    kept.set_tenant_permille(1000);
    let more = reserve(&mut kept, now, second, half).unwrap();
    kept.release(more);
    kept.release(reserved);
    assert_eq!(kept.used_bytes(), 0);
}

#[test]
fn a_tenants_own_snapshots_give_way_first() {
    let now = Instant::now();
    let late = now + ORPHAN_PRIORITY_TIMEOUT;
    let [own, other, runs] = [part(1, 0), part(2, 0), part(3, 0)];
    let check = |size_bytes, expected: [usize; 2]| {
        let mut kept = KeptForOthers::new(BOUNDS);
        kept.set_tenant_permille(750);
        // The other tenant's snapshot comes first in the order of orphans.
        for (part, tenant, since) in [(other, "b", now), (own, "a", now), (runs, "a", late)] {
            kept.allow(since, part, tenant, source(1, ASSIGNMENT));
        }
        for part in [own, other] {
            kept.add(part, 1, 0, info(1, 1), memory()).unwrap();
        }
        let reserved = reserve(&mut kept, late, runs, size_bytes);
        let left = [own, other].map(|part| kept.snapshots_of(part).len());
        assert_eq!((reserved.is_ok(), left), (expected != [1, 1], expected));
    };
    // Each of the two costs 64 KiB of 1 MiB, of which a tenant may use three quarters.
    let kib = 1 << 10;
    check(768 * kib, [0, 1]);
    check(705 * kib, [0, 1]);
    // To drop the tenant's own snapshot would not be enough.
    check(769 * kib, [1, 1]);
}

#[test]
fn nothing_is_dropped_if_suspended_leases_use_up_the_tenants_part() {
    let now = Instant::now();
    let late = now + ORPHAN_PRIORITY_TIMEOUT;
    let mut kept = KeptForOthers::new(BOUNDS);
    let [waits, runs] = [part(1, 0), part(2, 0)];
    for (part, since) in [(waits, now), (runs, late)] {
        kept.allow(since, part, "a", source(1, ASSIGNMENT));
    }
    kept.add(waits, 1, 0, info(1, 1), memory()).unwrap();
    // Five suspended leases of 64 KiB each exceed the tenant's quarter of 1 MiB.
    for lease in 3..8 {
        let snapshot = KeptSnapshot::new(0, info(1, 1), memory(), None);
        kept.hold_own(part(lease, 0), "a", vec![snapshot]);
    }
    kept.set_tenant_permille(250);
    assert!(reserve(&mut kept, late, runs, 1).is_err());
    assert_eq!(kept.snapshots_of(waits).len(), 1);
    kept.forget(LeaseId(3));
    kept.forget(LeaseId(4));
    assert!(reserve(&mut kept, late, runs, 64 << 10).is_ok());
    assert!(kept.snapshots_of(waits).is_empty());
}

#[test]
fn the_tenant_of_a_lease_may_be_known_later() {
    let now = Instant::now();
    let mut kept = KeptForOthers::new(BOUNDS);
    kept.set_tenant_permille(500);
    let mut allow = |tenant: &str, assignment| {
        kept.allow(now, PART, tenant, source(1, assignment));
        let reserved = kept.tenants.of(PART);
        reserved.to_string()
    };
    assert_eq!(allow("", ASSIGNMENT), "");
    assert_eq!(allow("a", ASSIGNMENT), "a");
    assert_eq!(
        allow("", ASSIGNMENT + 1),
        "a",
        "an unknown tenant replaces no known one"
    );
    kept.forget(LEASE);
    assert_eq!(&*kept.tenants.of(PART), "");
}
