//! Durable leases whose snapshots are in a snapshot store.

use super::durable::*;
use super::records::NEEDS_16_GIB;
use super::suspension::*;
use super::*;
use crate::{LeaseRecord, RecordedStanding, SuspendedPart};

const STORE: StoreId = StoreId(5);

/// A worker joins that has the store open.
fn join_with_store(id: u64, devices: &[DeviceSpec]) -> Event {
    let mut join = join(id, devices);
    if let Event::Worker {
        event: WorkerEvent::Join { registration, .. },
        ..
    } = &mut join
    {
        registration.store = Some(STORE);
    }
    join
}

/// A worker reports that its store has the snapshots of these leases.
fn in_store(worker_id: u64, leases: &[u64]) -> Event {
    let kept = WorkerEvent::SnapshotsKept {
        at_keepers: Vec::new(),
        handed_over: Vec::new(),
        refused: Vec::new(),
        here: leases.iter().map(|id| (LeaseId(*id), true)).collect(),
        in_store: leases.iter().copied().map(LeaseId).collect(),
    };
    worker(worker_id, kept)
}

/// Lease 10 has moved to device 0 of a worker, which loads its snapshots.
fn moved_and_loaded(worker: u64, epoch: u64) -> Command {
    let mut moved = moved(1, 10, epoch, worker, 0);
    if let Command::Moved { load_stored, .. } = &mut moved {
        load_stored.insert(WorkerId(worker));
    }
    moved
}

fn drop_stored(worker: u64, lease: u64) -> Command {
    Command::DropStored {
        worker: WorkerId(worker),
        leases: vec![LeaseId(lease)],
    }
}

/// The client of lease 10 learns that worker 1 is gone, and its snapshots are in the store.
fn interrupted_with_store() -> Command {
    Command::Interrupted {
        client: ClientId(1),
        lease: LeaseId(10),
        reason: not_replaced_from_store(),
    }
}

fn not_replaced_from_store() -> EndReason {
    EndReason::NotReplaced {
        gone: Box::new(lost(1)),
        places: SnapshotPlaces::Store(STORE),
    }
}

/// Worker 1, the only one, runs lease 10 of client 1, and its store has the snapshots.
fn stored_by_worker_1() -> Vec<Step> {
    vec![
        (0, join_with_store(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        (1, restorable(1, 10, true), vec![]),
        (2, in_store(1, &[10]), vec![]),
    ]
}

fn check_stored(steps: impl IntoIterator<Item = Step>) -> Engine {
    check(stored_by_worker_1().into_iter().chain(steps))
}

#[test]
fn lease_waits_for_a_worker_with_its_store() {
    check_stored([
        (3, worker(1, WorkerEvent::Disconnected), vec![]),
        (5_000, tick(), vec![interrupted_with_store()]),
        (6_000, join(2, &[exact(16)]), vec![]),
        (7_000, join_with_store(3, &[exact(8)]), vec![]),
        (
            8_000,
            join_with_store(4, &[exact(16)]),
            vec![moved_and_loaded(4, 1), keep(10, 4, 2)],
        ),
        // Its new worker has not stored a snapshot itself yet, and needs no keeper to be replaced.
        (
            8_001,
            worker(4, WorkerEvent::Left),
            vec![keeper_interrupted(4)],
        ),
    ]);
}

/// Worker `gone` has left, and worker 2 could keep the snapshots, but does not have them.
fn keeper_interrupted(gone: u64) -> Command {
    Command::Interrupted {
        client: ClientId(1),
        lease: LeaseId(10),
        reason: EndReason::NotReplaced {
            gone: Box::new(lost(gone)),
            places: SnapshotPlaces::Store(STORE),
        },
    }
}

#[test]
fn lease_ends_if_no_worker_with_its_store_joins_in_time() {
    let end = Command::LeaseEnded {
        client: ClientId(1),
        lease: LeaseId(10),
        reason: not_replaced_from_store(),
    };
    check_stored([
        (3, worker(1, WorkerEvent::Disconnected), vec![]),
        (5_000, tick(), vec![interrupted_with_store()]),
        (3_605_000, tick(), vec![end]),
        // Nobody was there to delete what the store has of it.
        (3_606_000, join_with_store(2, &[exact(16)]), vec![]),
        (
            3_606_001,
            worker(
                2,
                WorkerEvent::StoredLeases {
                    leases: vec![LeaseId(10)],
                },
            ),
            vec![drop_stored(2, 10)],
        ),
    ]);
}

#[test]
fn keeper_with_the_snapshots_is_chosen_before_a_worker_that_would_load_them() {
    let both = WorkerEvent::SnapshotsKept {
        at_keepers: vec![assigned(10, 0, 3)],
        handed_over: Vec::new(),
        refused: Vec::new(),
        here: [(LeaseId(10), true)].into(),
        in_store: [LeaseId(10)].into(),
    };
    check_stored([
        (3, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
        (4, join_with_store(2, &[exact(16)]), vec![]),
        (5, worker(1, both), vec![]),
        (
            6,
            worker(1, WorkerEvent::Left),
            vec![moved(1, 10, 1, 3, 0), keep(10, 3, 2)],
        ),
    ]);
}

#[test]
fn worker_with_the_store_takes_over_from_a_keeper_that_lacks_the_snapshots() {
    check_stored([
        (3, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
        (4, join_with_store(2, &[exact(16)]), vec![]),
        (5, in_store(1, &[10]), vec![]),
        (
            6,
            worker(1, WorkerEvent::Left),
            vec![
                drop_snapshots(3, 10),
                moved_and_loaded(2, 1),
                keep(10, 2, 3),
            ],
        ),
    ]);
}

#[test]
fn lease_leaves_a_draining_worker_by_way_of_the_store() {
    check_stored([
        (
            3,
            join_with_store(2, &[cuda(16), exact(16)]),
            vec![keep(10, 1, 2)],
        ),
        (
            4,
            Event::Drain {
                worker: WorkerId(1),
                is_drained: true,
            },
            vec![end_lease(1, 10), {
                let mut moved = moved(1, 10, 1, 2, 1);
                if let Command::Moved { load_stored, .. } = &mut moved {
                    load_stored.insert(WorkerId(2));
                }
                moved
            }],
        ),
    ]);
}

#[test]
fn stored_snapshots_are_dropped_with_their_lease() {
    check_stored([(
        3,
        release(1, 10),
        vec![end_lease(1, 10), drop_stored(1, 10)],
    )]);
}

/// Lease 10 waits until a worker has the store open.
fn waits_for_store() -> Command {
    let mut waits = waits_for(1, 10, &[]);
    if let Command::Suspended { waits_for, .. } = &mut waits {
        waits_for.push("a worker with snapshot store 0000000000000005".into());
    }
    waits
}

#[test]
fn suspended_lease_goes_on_from_the_store_when_its_holder_is_gone() {
    check_stored([
        (3, suspend(10), vec![end_and_keep(1, 10), suspended(1, 10)]),
        (4, worker(1, WorkerEvent::Left), vec![]),
        (5, resume(10), vec![waits_for_store()]),
        (6, join(2, &[exact(16)]), vec![]),
        (
            7,
            join_with_store(3, &[exact(16)]),
            vec![moved_and_loaded(3, 1), keep(10, 3, 2)],
        ),
    ]);
}

#[test]
fn lease_outlives_a_scheduler_and_its_only_worker() {
    let mut engine = Engine::new(Options::default(), TERM - 1, at(0));
    let mut record = None;
    for (now, event, _) in stored_by_worker_1() {
        engine.handle(event, at(now));
        for change in engine.take_record_changes() {
            record = change.record;
        }
    }
    let record: LeaseRecord = record.expect("the store has its snapshots");
    assert_eq!(record.standing, RecordedStanding::Running);
    let claim = Claim {
        lease: LeaseId(10),
        lease_devices: record.devices.clone(),
        durability: Durability::Auto,
        epoch: 0,
        time_left: None,
        is_spot: false,
        may_end: false,
    };
    let claims = vec![claim];
    let attach = client(
        1,
        ClientEvent::Attach {
            tenant: TENANT.into(),
            claims,
        },
    );
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    engine.restore([(LeaseId(10), record)]);
    let unreachable = ClientEvent::Unreachable {
        lease: LeaseId(10),
        worker: None,
    };
    let stored = WorkerEvent::StoredLeases {
        leases: vec![LeaseId(10), LeaseId(11)],
    };
    check_on(
        engine,
        [
            (1, attach, vec![]),
            (2, restorable(1, 10, true), vec![]),
            (3, join_with_store(2, &[exact(16)]), vec![]),
            // Lease 11 may come back.
            (4, worker(2, stored.clone()), vec![]),
            (5, client(1, unreachable), vec![moved_and_loaded(2, 1)]),
            (60_000, worker(2, stored), vec![drop_stored(2, 11)]),
        ],
    );
}

#[test]
fn store_has_the_snapshots_of_a_lease_that_is_being_loaded() {
    let nothing = WorkerEvent::SnapshotsKept {
        at_keepers: Vec::new(),
        handed_over: Vec::new(),
        refused: Vec::new(),
        here: [].into(),
        in_store: BTreeSet::new(),
    };
    let unreachable = || {
        let lease = LeaseId(10);
        client(
            1,
            ClientEvent::Unreachable {
                lease,
                worker: None,
            },
        )
    };
    let report = |at: u64| (at, unreachable(), vec![]);
    let moved_here = moved_and_loaded(2, 1);
    let steps = [
        (
            3,
            worker(1, WorkerEvent::Left),
            vec![interrupted_with_store()],
        ),
        (4, join_with_store(2, &[exact(16)]), vec![moved_here]),
        (5, worker(2, nothing), vec![]),
        (6, join_with_store(3, &[exact(16)]), vec![keep(10, 2, 3)]),
    ];
    // It takes longer than a worker may be unreachable that has nothing to load.
    let reports = (1..=12).map(|second| report(second * 1_000));
    let lost = [(
        13_000,
        worker(2, WorkerEvent::Left),
        vec![moved_and_loaded(3, 2)],
    )];
    check_stored(steps.into_iter().chain(reports).chain(lost));
}

#[test]
fn parts_of_a_lease_go_on_at_workers_of_their_own() {
    let part = |source: u64, holders: &[u64], store| SuspendedPart {
        source: WorkerId(source),
        devices: 1,
        requirement: NEEDS_16_GIB,
        holders: holders.iter().copied().map(WorkerId).collect(),
        store,
    };
    let record = LeaseRecord {
        owner: ClientId(1),
        tenant: Some(TENANT.into()),
        charge: crate::Amounts::of(&[exact(16)]),
        is_reclaimed: false,
        is_spot: false,
        may_end: false,
        epoch: 1,
        durability: Durability::Auto,
        recover_within: None,
        time_left: None,
        standing: RecordedStanding::Suspended(Suspender::Administrator),
        devices: Vec::new(),
        keepers: Vec::new(),
        stored: Vec::new(),
        // Worker 2 has the second part in memory, and could load the first one.
        parts: vec![part(1, &[], Some(STORE)), part(2, &[2], None)],
    };
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    engine.restore([(LeaseId(10), record)]);
    let claim = Claim {
        lease: LeaseId(10),
        lease_devices: vec![
            GrantedDevice {
                device_ref: device_ref(1, 0),
                grant: old_grant(10),
                share: None,
            },
            GrantedDevice {
                device_ref: device_ref(2, 0),
                grant: old_grant(10),
                share: None,
            },
        ],
        durability: Durability::Auto,
        epoch: 1,
        time_left: None,
        is_spot: false,
        may_end: false,
    };
    let claims = vec![claim];
    let hold = hold(2, 10);
    let mut join_2 = join_with_store(2, &[exact(16)]);
    if let Event::Worker {
        event: WorkerEvent::Join { suspended, .. },
        ..
    } = &mut join_2
    {
        suspended.push(LeaseId(10));
    }
    engine.handle(
        client(
            1,
            ClientEvent::Attach {
                tenant: TENANT.into(),
                claims,
            },
        ),
        at(1),
    );
    assert_eq!(engine.handle(join_2, at(2)), [hold]);
    engine.handle(join_with_store(3, &[exact(16)]), at(3));
    let commands = engine.handle(resume(10), at(4));
    let moved = commands.iter().find_map(|command| match command {
        Command::Moved {
            devices,
            load_stored,
            ..
        } => Some((devices, load_stored)),
        _ => None,
    });
    let (devices, load_stored) = moved.unwrap();
    let workers = devices.iter().map(|leased| leased.device_ref.worker.0);
    assert_eq!(workers.collect::<Vec<_>>(), [3, 2]);
    assert_eq!(*load_stored, [WorkerId(3)].into());
}
