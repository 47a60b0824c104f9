use rustix::fs::fcntl_add_seals;
use tensord_proto::ids::LeaseId;

use super::*;
use crate::{
    memory_file::{SEALS, unnamed_memory},
    supervisor::sealed_memory::sealed_memory,
};

const LEASE: LeaseId = LeaseId(7);

/// Bytes in which the tests count sizes.
const UNIT: u64 = MIN_COST_BYTES;

/// The bound of the tests.
const MAX: SnapshotBounds = SnapshotBounds {
    max_bytes: 100 * UNIT,
    devices: 1,
};

fn memory(units: u64) -> MemoryFile {
    sealed_memory(&vec![1; (units * UNIT) as usize])
}

fn info(session_id: u64, mark: u64, committed: u64, units: u64) -> SnapshotInfo {
    SnapshotInfo {
        session_id,
        mark,
        committed,
        size_bytes: units * UNIT,
        base_id: 0,
    }
}

fn used_units(snapshots: &Snapshots<LeaseId>) -> u64 {
    let lease = snapshots.leases.get(&LEASE);
    lease.map_or(0, |lease| lease.used_bytes / UNIT)
}

fn marks(snapshots: &Snapshots<LeaseId>) -> Vec<(u64, u64)> {
    let kept = snapshots.of(LEASE).into_iter();
    kept.map(|kept| (kept.info.session_id, kept.info.mark))
        .collect()
}

#[test]
fn committed_and_latest_snapshot_of_a_session_are_kept() {
    let mut snapshots = Snapshots::default();
    let mut add = |info: SnapshotInfo| {
        let file = memory(info.size_bytes / UNIT);
        snapshots.add(LEASE, MAX, 0, info, file).unwrap();
        marks(&snapshots)
    };
    assert_eq!(add(info(1, 1, 0, 40)), [(1, 1)]);
    assert_eq!(add(info(1, 2, 1, 40)), [(1, 1), (1, 2)]);
    // The client has not learnt of mark 2.
    assert_eq!(add(info(1, 3, 1, 40)), [(1, 1), (1, 3)]);
    assert_eq!(add(info(1, 4, 3, 40)), [(1, 3), (1, 4)]);
    assert_eq!(add(info(2, 1, 0, 20)), [(1, 3), (1, 4), (2, 1)]);
    snapshots.forget_session(LEASE, SessionId(1));
    assert_eq!(
        (marks(&snapshots), used_units(&snapshots)),
        (vec![(2, 1)], 20)
    );
    assert!(snapshots.has(LEASE));
    snapshots.forget_lease(LEASE);
    assert_eq!((marks(&snapshots), used_units(&snapshots)), (vec![], 0));
    assert!(!snapshots.has(LEASE));
}

#[test]
fn snapshot_that_does_not_fit_leaves_the_one_before() {
    let mut snapshots = Snapshots::default();
    snapshots
        .add(LEASE, MAX, 0, info(1, 1, 0, 60), memory(60))
        .unwrap();
    let refused = snapshots.add(LEASE, MAX, 0, info(1, 2, 1, 60), memory(60));
    assert!(matches!(refused, Err(Refused::NotKept(_))), "{refused:?}");
    assert_eq!(
        (marks(&snapshots), used_units(&snapshots)),
        (vec![(1, 1)], 60)
    );
    let other = LeaseId(8);
    let kept = snapshots.add(other, MAX, 0, info(1, 1, 0, 100), memory(100));
    assert_eq!(kept, Ok(()), "each lease has its own bound");
}

#[test]
fn memory_that_can_change_is_refused() {
    let mut snapshots = Snapshots::default();
    let open = unnamed_memory("test").unwrap();
    let mut add = |size, file| snapshots.add(LEASE, MAX, 0, info(1, 1, 0, size), file);
    assert!(matches!(add(0, open.into()), Err(Refused::Violation(_))));
    assert!(matches!(add(11, memory(10)), Err(Refused::Violation(_))));
    // Memory beyond the end of the file.
    let more = unnamed_memory("test").unwrap();
    let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&more, keep, 0, 100 * UNIT).unwrap();
    fcntl_add_seals(&more, SEALS).unwrap();
    assert!(matches!(add(0, more.into()), Err(Refused::Violation(_))));
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(add(0, file.into()), Err(Refused::Violation(_))));
    assert!(snapshots.of(LEASE).is_empty());
}

#[test]
fn marks_must_increase_and_follow_the_committed_one() {
    let mut snapshots = Snapshots::default();
    let mut add =
        |mark, committed| snapshots.add(LEASE, MAX, 0, info(1, mark, committed, 0), memory(0));
    assert!(matches!(add(1, 1), Err(Refused::Violation(_))));
    assert_eq!(add(2, 0), Ok(()));
    assert!(matches!(add(2, 0), Err(Refused::Violation(_))));
    assert!(matches!(add(1, 0), Err(Refused::Violation(_))));
    assert_eq!(add(3, 2), Ok(()));
}

#[test]
fn another_process_replaces_snapshots_of_later_marks() {
    let mut snapshots = Snapshots::default();
    let mut add = |epoch, mark, committed| {
        let added = snapshots.add(LEASE, MAX, epoch, info(1, mark, committed, 10), memory(10));
        (added, marks(&snapshots))
    };
    assert_eq!(add(0, 1, 0), (Ok(()), vec![(1, 1)]));
    assert_eq!(add(0, 2, 1), (Ok(()), vec![(1, 1), (1, 2)]));
    // The session was restored at mark 1, as its client had not got all answers from before
    // mark 2.
    assert_eq!(add(1, 2, 1), (Ok(()), vec![(1, 1), (1, 2)]));
    assert!(matches!(add(1, 2, 1).0, Err(Refused::Violation(_))));
    assert_eq!(add(1, 3, 2), (Ok(()), vec![(1, 2), (1, 3)]));
    assert_eq!(used_units(&snapshots), 20);
    let mut add = |epoch, mark| snapshots.add(LEASE, MAX, epoch, info(1, mark, 2, 10), memory(10));
    // A process that does not know that the lease has moved.
    assert!(matches!(add(0, 4), Err(Refused::NotKept(_))));
    assert_eq!(add(1, 4), Ok(()));
}

fn with_base(session_id: u64, mark: u64, committed: u64, base_id: u64) -> SnapshotInfo {
    SnapshotInfo {
        base_id,
        ..info(session_id, mark, committed, 10)
    }
}

fn files(base_units: u64) -> SnapshotFiles {
    SnapshotFiles {
        file: memory(10),
        base: Some(memory(base_units)),
    }
}

#[test]
fn base_is_charged_once_and_kept_while_a_snapshot_needs_it() {
    let mut snapshots = Snapshots::default();
    snapshots
        .add(LEASE, MAX, 0, with_base(1, 1, 0, 7), files(50))
        .unwrap();
    assert_eq!(used_units(&snapshots), 60);
    snapshots
        .add(LEASE, MAX, 0, with_base(1, 2, 1, 7), memory(10))
        .unwrap();
    assert_eq!(used_units(&snapshots), 70);
    // Mark 2 is dropped, and its base is that of mark 3.
    snapshots
        .add(LEASE, MAX, 0, with_base(1, 3, 1, 7), memory(10))
        .unwrap();
    assert_eq!(used_units(&snapshots), 70);
    let unknown = snapshots.add(LEASE, MAX, 0, with_base(1, 4, 3, 8), memory(10));
    assert_eq!(
        unknown,
        Err(Refused::NotKept("its base 8 is not kept".into()))
    );
    // A new base does not fit beside the old one.
    let refused = snapshots.add(LEASE, MAX, 0, with_base(1, 4, 3, 8), files(50));
    assert!(matches!(refused, Err(Refused::NotKept(_))), "{refused:?}");
    assert_eq!(
        (marks(&snapshots), used_units(&snapshots)),
        (vec![(1, 3)], 60)
    );
    let other_size = snapshots.add(LEASE, MAX, 0, with_base(1, 4, 3, 7), files(20));
    assert!(matches!(other_size, Err(Refused::Violation(_))));
    let without_id = snapshots.add(LEASE, MAX, 0, info(2, 1, 0, 10), files(20));
    assert!(matches!(without_id, Err(Refused::Violation(_))));
    snapshots
        .add(LEASE, MAX, 0, info(1, 4, 3, 10), memory(10))
        .unwrap();
    snapshots.forget_before(LEASE, SessionId(1), 4);
    assert_eq!(used_units(&snapshots), 10);
}

/// Ids of bases are those of a session, and come from its process.
#[test]
fn adopted_snapshots_are_charged_as_those_that_were_added() {
    let kept = |session, mark, base_units: u64| {
        let base = KeptBase {
            id: 7,
            size_bytes: base_units * UNIT,
            file: Arc::new(memory(base_units)),
        };
        let info = with_base(session, mark, 0, 7);
        KeptSnapshot::new(0, info, memory(10), Some(base))
    };
    let mut snapshots = Snapshots::default();
    snapshots.adopt(LEASE, vec![kept(1, 1, 50), kept(2, 1, 1)]);
    assert_eq!(used_units(&snapshots), 71);
    snapshots.adopt(LEASE, vec![kept(1, 2, 50)]);
    assert_eq!(used_units(&snapshots), 81);
    let files = snapshots.of(LEASE).into_iter();
    let files = files.filter_map(|kept| Some(Arc::as_ptr(&kept.base?.file)));
    assert_eq!(
        files.collect::<BTreeSet<_>>().len(),
        2,
        "one for each session"
    );
    snapshots.forget_session(LEASE, SessionId(1));
    snapshots.forget_session(LEASE, SessionId(2));
    assert_eq!(used_units(&snapshots), 0);
}

#[test]
fn small_snapshots_are_bounded_in_number() {
    let mut snapshots = Snapshots::default();
    let max = SnapshotBounds {
        max_bytes: 10 * UNIT,
        ..MAX
    };
    let mut add = |session| snapshots.add(LEASE, max, 0, info(session, 1, 0, 0), memory(0));
    assert!((0..10).all(|session| add(session).is_ok()));
    assert!(matches!(add(10), Err(Refused::NotKept(_))));
}

#[test]
fn number_of_sessions_is_bounded_for_each_device() {
    for devices in [1, 3] {
        let mut snapshots = Snapshots::default();
        let bounds = SnapshotBounds { devices, ..MAX };
        let mut add = |session| {
            let info = info(session, 1, 0, 0);
            snapshots.add(LEASE, bounds, 0, info, memory(0))
        };
        let sessions = (MAX_SESSIONS_PER_DEVICE * devices) as u64;
        assert!((0..sessions).all(|session| add(session).is_ok()));
        assert!(matches!(add(sessions), Err(Refused::NotKept(_))));
        assert!(
            matches!(add(0), Err(Refused::Violation(_))),
            "not a later mark"
        );
    }
}

#[test]
fn file_larger_than_the_bound_is_refused_before_sizes_are_added() {
    let mut snapshots = Snapshots::default();
    snapshots
        .add(LEASE, MAX, 0, info(1, 1, 0, 1), memory(1))
        .unwrap();
    // Files without contents, which take no memory.
    let sparse = || {
        let file = unnamed_memory("test").unwrap();
        file.set_len(i64::MAX as u64).unwrap();
        fcntl_add_seals(&file, SEALS).unwrap();
        MemoryFile::from(file)
    };
    let huge = SnapshotInfo {
        size_bytes: i64::MAX as u64,
        base_id: 7,
        ..info(1, 2, 1, 0)
    };
    let files = SnapshotFiles {
        file: sparse(),
        base: Some(sparse()),
    };
    let Err(Refused::NotKept(reason)) = snapshots.add(LEASE, MAX, 0, huge, files) else {
        panic!("it is larger than all snapshots may be");
    };
    assert!(reason.contains("9223372036854775807 bytes"), "{reason}");
    assert_eq!(
        (marks(&snapshots), used_units(&snapshots)),
        (vec![(1, 1)], 1)
    );
}
