//! Durable leases that a restarted scheduler has from the records of the earlier one.

use super::durable::*;
use super::suspension::*;
use super::*;
use crate::{
    LeaseRecord, RecordChange, RecordedKeeper, RecordedStanding, Requirement, SuspendedPart,
};

pub(super) const NEEDS_16_GIB: Requirement = Requirement {
    fingerprint: [7; 16],
    kind: None,
    smallest_bytes: 16 << 30,
    largest_bytes: 16 << 30,
    share: None,
};

/// Lease 10 of client 1 has the only device of worker 1, and worker 2 has its snapshots.
fn running() -> LeaseRecord {
    LeaseRecord {
        owner: ClientId(1),
        tenant: Some(TENANT.into()),
        charge: crate::Amounts::of(&[exact(16)]),
        is_reclaimed: false,
        is_spot: false,
        may_end: false,
        epoch: 0,
        durability: Durability::Auto,
        recover_within: None,
        time_left: None,
        standing: RecordedStanding::Running,
        devices: vec![GrantedDevice {
            device_ref: device_ref(1, 0),
            grant: old_grant(10),
            share: None,
        }],
        keepers: vec![RecordedKeeper {
            source: WorkerId(1),
            part: 0,
            keeper: WorkerId(2),
            assignment: 0,
            requirement: NEEDS_16_GIB,
            is_kept: true,
        }],
        stored: Vec::new(),
        parts: Vec::new(),
    }
}

/// Lease 10 of client 1 is without devices, and has snapshots at these workers.
fn without_devices(standing: RecordedStanding, holders: &[u64]) -> LeaseRecord {
    LeaseRecord {
        standing,
        devices: Vec::new(),
        keepers: Vec::new(),
        stored: Vec::new(),
        parts: vec![SuspendedPart {
            source: WorkerId(1),
            devices: 1,
            requirement: NEEDS_16_GIB,
            holders: holders.iter().copied().map(WorkerId).collect(),
            store: None,
        }],
        ..running()
    }
}

/// Checks the steps with an engine that has this record of lease 10.
fn check_restored(record: LeaseRecord, steps: impl IntoIterator<Item = Step>) -> Engine {
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    engine.restore([(LeaseId(10), record)]);
    assert_eq!(engine.take_record_changes(), []);
    check_on(engine, steps)
}

/// Client 1 attaches with a token of lease 10, of this epoch, for the device of `worker`.
fn attach_with_token(worker: u64, epoch: u64) -> Event {
    let claim = Claim {
        lease: LeaseId(10),
        lease_devices: vec![GrantedDevice {
            device_ref: device_ref(worker, 0),
            grant: old_grant(10 + epoch),
            share: None,
        }],
        durability: Durability::Auto,
        epoch,
        time_left: None,
        is_spot: false,
        may_end: false,
    };
    let claims = vec![claim];
    client(
        1,
        ClientEvent::Attach {
            tenant: TENANT.into(),
            claims,
        },
    )
}

/// A worker with one device joins that holds snapshots of lease 10.
pub(super) fn join_as_holder(id: u64) -> Event {
    let mut join = join(id, &[exact(16)]);
    if let Event::Worker {
        event: WorkerEvent::Join { suspended, .. },
        ..
    } = &mut join
    {
        suspended.push(LeaseId(10));
    }
    join
}

fn unreachable_10(worker: u64) -> Event {
    let (lease, worker) = (LeaseId(10), Some(WorkerId(worker)));
    client(1, ClientEvent::Unreachable { lease, worker })
}

fn by_administrator() -> RecordedStanding {
    RecordedStanding::Suspended(Suspender::Administrator)
}

#[test]
fn record_says_who_has_the_snapshots() {
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    for (now, event, _) in kept_by_worker_2() {
        engine.handle(event, at(now));
    }
    let change = |record, is_urgent| RecordChange {
        lease: LeaseId(10),
        record,
        is_urgent,
    };
    let changes = engine.take_record_changes();
    let mut expected = running();
    expected.keepers[0].is_kept = false;
    let record = changes[0].record.as_ref().unwrap();
    expected.devices[0].grant = record.devices[0].grant;
    expected.keepers[0].assignment = record.keepers[0].assignment;
    assert_eq!(changes, [change(Some(expected.clone()), false)]);
    assert_eq!(engine.take_record_changes(), []);
    engine.handle(with_assignments(&engine, kept(1, &[(10, 2)])), at(9));
    let mut kept_there = expected;
    kept_there.keepers[0].is_kept = true;
    assert_eq!(
        engine.take_record_changes(),
        [change(Some(kept_there), false)]
    );
    // A lease that moves, or has no devices, must not be forgotten.
    engine.handle(restorable(1, 10, true), at(10));
    engine.handle(suspend(10), at(10));
    let changes = engine.take_record_changes();
    assert!(
        changes[0].is_urgent && changes[0].record.is_some(),
        "{changes:?}"
    );
    engine.handle(resume(10), at(11));
    let changes = engine.take_record_changes();
    let record = changes[0].record.as_ref().unwrap();
    assert!(changes[0].is_urgent && record.epoch == 1, "{changes:?}");
    engine.handle(release(1, 10), at(12));
    assert_eq!(engine.take_record_changes(), [change(None, false)]);
}

#[test]
fn time_that_a_lease_may_wait_is_recorded() {
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    let demand = Demand {
        durability: Durability::Auto,
        recover_within: Some(Duration::from_secs(20)),
        ..demand_of(1, None)
    };
    for event in [join(1, &[exact(16)]), attach(1), request_for(1, 1, demand)] {
        engine.handle(event, at(0));
    }
    let changes = engine.take_record_changes();
    let record = changes[0].record.as_ref().unwrap();
    assert_eq!(record.recover_within, Some(Duration::from_secs(20)));
    assert_eq!(record.keepers, []);
}

#[test]
fn leases_without_keepers_have_no_record() {
    let mut engine = check([
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        (1, request(1, 2, 1), vec![granted_exact(1, 2, 1, 1)]),
    ]);
    assert_eq!(engine.take_record_changes(), []);
}

#[test]
fn suspended_lease_survives_a_restart() {
    check_restored(
        without_devices(by_administrator(), &[1]),
        [
            (0, join_as_holder(1), vec![hold(1, 10)]),
            (9, attach_with_token(1, 0), vec![suspended(1, 10)]),
            (70_000, beat(1), vec![]),
            (70_001, resume(10), vec![moved(1, 10, 1, 1, 0)]),
        ],
    );
}

#[test]
fn suspended_lease_ends_if_its_client_stays_away() {
    check_restored(
        without_devices(by_administrator(), &[1]),
        [
            (0, join_as_holder(1), vec![hold(1, 10)]),
            (30_000, tick(), vec![drop_snapshots(1, 10)]),
        ],
    );
}

#[test]
fn suspended_lease_ends_if_its_holders_do_not_join() {
    let missing = EndReason::HolderMissing {
        worker: WorkerId(1),
    };
    check_restored(
        without_devices(by_administrator(), &[1]),
        [
            (9, attach_with_token(1, 0), vec![suspended(1, 10)]),
            (60_000, tick(), vec![ended(1, 10, missing)]),
        ],
    );
}

#[test]
fn holders_that_do_not_join_are_given_up() {
    check_restored(
        without_devices(RecordedStanding::Resuming(None), &[1, 2]),
        [
            (9, attach_with_token(1, 0), vec![waits_for(1, 10, &[])]),
            (10, join(2, &[exact(8)]), vec![hold(2, 10)]),
            (60_000, tick(), vec![]),
            (60_001, release(1, 10), vec![drop_snapshots(2, 10)]),
        ],
    );
}

#[test]
fn lost_lease_moves_once_its_keeper_has_joined() {
    let lost = LeaseRecord {
        standing: RecordedStanding::Lost("worker w1 was lost".into()),
        ..running()
    };
    let reason = EndReason::BeforeRestart {
        text: "worker w1 was lost".into(),
    };
    let waits = Command::Interrupted {
        client: ClientId(1),
        lease: LeaseId(10),
        reason: reason.clone(),
    };
    let missing = EndReason::HolderMissing {
        worker: WorkerId(2),
    };
    let both_gone = EndReason::nothing_left(reason, missing);
    check_restored(
        lost.clone(),
        [
            (9, attach_with_token(1, 0), vec![waits.clone()]),
            (40_000, join(2, &[exact(16)]), vec![moved(1, 10, 1, 2, 0)]),
        ],
    );
    check_restored(
        lost,
        [
            (9, attach_with_token(1, 0), vec![waits]),
            (60_000, tick(), vec![ended(1, 10, both_gone)]),
        ],
    );
}

#[test]
fn lease_moves_whose_worker_died_while_the_scheduler_was_away() {
    // The client notices.
    check_restored(
        running(),
        [
            (0, join(2, &[exact(16)]), vec![]),
            (9, attach_with_token(1, 0), vec![]),
            (10, restorable(1, 10, true), vec![]),
            (10, unreachable_10(1), vec![moved(1, 10, 1, 2, 0)]),
            // It was only late.
            (
                20,
                join_holding(1, &[exact(16)], &[(10, 0)]),
                vec![end_lease(1, 10)],
            ),
        ],
    );
    // The client reports nothing.
    check_restored(
        running(),
        [
            (0, join(2, &[exact(16)]), vec![]),
            (9, attach_with_token(1, 0), vec![]),
            (30_000, tick(), vec![moved(1, 10, 1, 2, 0)]),
        ],
    );
}

#[test]
fn lease_that_runs_keeps_its_keeper() {
    let run = |late: Step| {
        let mut steps = vec![
            (0, join_holding(1, &[exact(16)], &[(10, 0)]), vec![]),
            (9, attach_with_token(1, 0), vec![]),
            // As good as the one that is yet to join.
            (9, join(3, &[exact(16)]), vec![]),
        ];
        steps.push(late);
        check_restored(running(), steps)
    };
    run((9_999, join(2, &[exact(16)]), vec![keep(10, 1, 2)]));
    run((10_000, beat(1), vec![keep(10, 1, 3)]));
}

#[test]
fn token_of_a_later_epoch_is_right() {
    // The record was written before the lease had moved to worker 2.
    let mut join_2 = join(2, &[exact(16)]);
    if let Event::Worker {
        event: WorkerEvent::Join { held, .. },
        ..
    } = &mut join_2
    {
        held.push(HeldDevice {
            lease: LeaseId(10),
            index: 0,
            grant: old_grant(11),
            ended: false,
            share: None,
        });
    }
    check_restored(
        running(),
        [
            (0, attach_with_token(2, 1), vec![]),
            (1, join_2, vec![]),
            (2, join(1, &[exact(16)]), vec![keep(10, 2, 1)]),
            (70_000, beat(2), vec![]),
        ],
    );
}

#[test]
fn client_that_does_not_know_of_the_move_learns_of_it() {
    // The lease has moved from worker 1 to worker 2, and no other worker can be its keeper.
    let moved_to_2 = LeaseRecord {
        epoch: 1,
        durability: Durability::Auto,
        devices: vec![GrantedDevice {
            device_ref: device_ref(2, 0),
            grant: old_grant(10),
            share: None,
        }],
        keepers: Vec::new(),
        ..running()
    };
    let at_2 = || join_holding(2, &[exact(16)], &[(10, 0)]);
    let client_first = [
        (0, attach_with_token(1, 0), vec![]),
        (1, at_2(), vec![moved(1, 10, 1, 2, 0)]),
        (70_000, beat(2), vec![]),
    ];
    check_restored(moved_to_2.clone(), client_first);
    let worker_first = [
        (0, at_2(), vec![]),
        (1, attach_with_token(1, 0), vec![moved(1, 10, 1, 2, 0)]),
        (70_000, beat(2), vec![]),
    ];
    check_restored(moved_to_2, worker_first);
}

#[test]
fn lease_on_two_workers_goes_on_at_once_without_the_one_that_died() {
    let mut record = running();
    record.devices.push(GrantedDevice {
        device_ref: device_ref(3, 0),
        grant: old_grant(10),
        share: None,
    });
    record.keepers.push(RecordedKeeper {
        source: WorkerId(3),
        part: 1,
        ..record.keepers[0].clone()
    });
    let engine = check_restored(
        record,
        [
            (0, join(2, &[exact(16)]), vec![]),
            (
                0,
                join_holding(3, &[exact(16)], &[(10, 0)]),
                vec![keep_part(10, 1, 3, 2)],
            ),
            (9, attach_with_token(1, 0), vec![]),
            (10, kept(3, &[(10, 3)]), vec![]),
            (10, restorable(1, 10, true), vec![]),
            (
                11,
                unreachable_10(1),
                vec![
                    end_and_keep(3, 10),
                    hold(2, 10),
                    super::several_workers::drop_part(2, 1),
                    Command::Suspended {
                        client: ClientId(1),
                        lease: LeaseId(10),
                        waits_for: vec!["w2".into(), "w3".into()],
                        needs_all: true,
                        cause: Some(EndReason::WorkerMissing {
                            worker: WorkerId(1),
                        }),
                    },
                ],
            ),
        ],
    );
    assert_eq!(engine.snapshot().leases, 1);
}

#[test]
fn recorded_keeper_may_join_after_the_worker_of_its_lease_was_lost() {
    let keeper = "0000000000000002, which has yet to join".to_owned();
    let waits = Command::Interrupted {
        client: ClientId(1),
        lease: LeaseId(10),
        reason: EndReason::NotReplaced {
            gone: Box::new(lost(1)),
            places: SnapshotPlaces::Keeper(keeper),
        },
    };
    check_restored(
        running(),
        [
            (0, join_holding(1, &[exact(16)], &[(10, 0)]), vec![]),
            (9, attach_with_token(1, 0), vec![]),
            (12_000, beat(1), vec![]),
            (12_001, worker_disconnected(1), vec![]),
            (17_000, tick(), vec![waits]),
            (18_000, join(2, &[exact(16)]), vec![moved(1, 10, 1, 2, 0)]),
        ],
    );
}
