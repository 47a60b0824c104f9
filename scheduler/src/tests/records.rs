//! Durable leases that a restarted scheduler has from the records of the earlier one.

use super::durable::*;
use super::suspension::*;
use super::*;
use crate::{LeaseRecord, RecordedKeeper, RecordedStanding, Requirement, SuspendedPart};

const NEEDS_16_GIB: Requirement = Requirement {
    fingerprint: [7; 16],
    smallest_bytes: 16 << 30,
    largest_bytes: 16 << 30,
};

/// Lease 10 of client 1 has the only device of worker 1, and worker 2 has its snapshots.
fn running() -> LeaseRecord {
    LeaseRecord {
        owner: ClientId(1),
        epoch: 0,
        recover_within: None,
        standing: RecordedStanding::Running,
        devices: vec![GrantedDevice {
            device_ref: device_ref(1, 0),
            grant: old_grant(10),
        }],
        keepers: vec![RecordedKeeper {
            source: WorkerId(1),
            keeper: WorkerId(2),
            requirement: NEEDS_16_GIB,
            is_kept: true,
        }],
        parts: Vec::new(),
    }
}

/// Lease 10 of client 1 is without devices, and has snapshots at these workers.
fn without_devices(standing: RecordedStanding, holders: &[u64]) -> LeaseRecord {
    LeaseRecord {
        standing,
        devices: Vec::new(),
        keepers: Vec::new(),
        parts: vec![SuspendedPart {
            source: WorkerId(1),
            devices: 1,
            requirement: NEEDS_16_GIB,
            holders: holders.iter().copied().map(WorkerId).collect(),
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
        }],
        is_durable: true,
        epoch,
    };
    let claims = vec![claim];
    client(1, ClientEvent::Attach { claims })
}

/// A worker with one device joins that holds snapshots of lease 10.
fn join_as_holder(id: u64) -> Event {
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

fn unreachable_10() -> Event {
    let lease = LeaseId(10);
    client(1, ClientEvent::Unreachable { lease })
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
    let changes = engine.take_record_changes();
    let [(LeaseId(10), Some(record))] = &changes[..] else {
        panic!("{changes:?}");
    };
    let mut expected = running();
    expected.keepers[0].is_kept = false;
    expected.devices[0].grant = record.devices[0].grant;
    assert_eq!(*record, expected);
    assert_eq!(engine.take_record_changes(), []);
    engine.handle(kept(1, &[(10, 2)]), at(9));
    let kept_there = LeaseRecord {
        devices: expected.devices.clone(),
        ..running()
    };
    let changes = engine.take_record_changes();
    assert_eq!(changes, [(LeaseId(10), Some(kept_there))]);
    engine.handle(release(1, 10), at(10));
    assert_eq!(engine.take_record_changes(), [(LeaseId(10), None)]);
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
            (60_000, tick(), vec![ended(1, 10, reason)]),
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
            (10, unreachable_10(), vec![moved(1, 10, 1, 2, 0)]),
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
