//! Durable leases with devices of several workers: a process of one dies, one is lost or drains, or an administrator
//! suspends them.

use super::durable::*;
use super::moves::drain;
use super::scene::Scene;
use super::suspension::*;
use super::*;
use crate::CannotMove;

/// A command, after which the two workers of the lease keep the snapshots of each other, as there are no
/// others.
fn then_keep(command: Command) -> Vec<Command> {
    let mut commands = vec![command];
    commands.extend(keep_each_other(1, 2));
    commands
}

/// The workers that run the first and the second part of the lease keep the snapshots of each other.
pub(super) fn keep_each_other(first: u64, second: u64) -> [Command; 2] {
    let mut keep = [keep(10, first, second), keep_part(10, 1, second, first)];
    // In the order of the workers' ids.
    if first > second {
        keep.reverse();
    }
    keep
}

/// Lease 10 of client 1 has two devices of worker 1 and one of worker 2, which have its snapshots.
fn on_two_workers() -> Vec<Step> {
    let devices = [(1, 0, exact(16)), (1, 1, exact(16)), (2, 0, exact(16))];
    vec![
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, join(2, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (
            1,
            request_durable_of(3, 1, 1),
            then_keep(granted(1, 1, &devices)),
        ),
        (1, restorable(1, 10, true), vec![]),
        (2, kept(1, &[(10, 1)]), vec![]),
        (2, kept(2, &[(10, 2)]), vec![]),
    ]
}

/// As before, and each worker has the snapshots of the other one.
pub(super) fn kept_by_each_other() -> Vec<Step> {
    let mut steps = on_two_workers();
    steps.extend([
        (2, kept_parts(1, &[(10, 0, 1), (10, 0, 2)]), vec![]),
        (2, kept_parts(2, &[(10, 1, 2), (10, 1, 1)]), vec![]),
    ]);
    steps
}

fn interrupted_at(worker_id: u64) -> Event {
    let leases = vec![(LeaseId(10), format!("w{worker_id} died"))];
    worker(worker_id, WorkerEvent::Interrupted { leases })
}

fn died(worker: u64) -> EndReason {
    EndReason::ProcessDied {
        how: format!("w{worker} died"),
    }
}

fn waits_after_death(worker: u64, workers: &[&str]) -> Command {
    Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: workers.iter().map(ToString::to_string).collect(),
        needs_all: true,
        cause: Some(died(worker)),
    }
}

/// Commands after a process of the lease at this worker has died: both workers end the lease and keep its
/// snapshots, and the client learns what the lease waits for.
fn ended_by_death(worker: u64) -> Vec<Command> {
    vec![
        end_and_keep(1, 10),
        end_and_keep(2, 10),
        drop_part(1, 1),
        drop_part(2, 0),
        waits_after_death(worker, &["w1", "w2"]),
    ]
}

/// The client learns that its lease was resumed, and waits for devices of both workers.
pub(super) fn waits_for_both() -> Command {
    Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w1".into(), "w2".into()],
        needs_all: true,
        cause: None,
    }
}

/// The lease has moved to these devices, each with its worker, index and GiB.
pub(super) fn moved_to_several(epoch: u64, devices: &[(u64, u32, u64)]) -> Command {
    let leased = |&(worker, index, gib): &(u64, u32, u64)| LeasedDevice {
        device_ref: device_ref(worker, index),
        grant: GrantNumber::ZERO,
        device: exact(gib),
        worker: endpoint(worker),
        share: None,
    };
    Command::Moved {
        client: ClientId(1),
        lease: LeaseId(10),
        epoch,
        devices: devices.iter().map(leased).collect(),
        load_stored: BTreeSet::new(),
    }
}

/// The lease has moved to where it was.
fn moved_back(epoch: u64) -> Command {
    moved_to_several(epoch, &[(1, 0, 16), (1, 1, 16), (2, 0, 16)])
}

/// A process of worker 2 has died, and both workers end the lease and keep its snapshots.
fn interrupted_at_2() -> Vec<Step> {
    let mut steps = on_two_workers();
    steps.push((3, interrupted_at(2), ended_by_death(2)));
    steps
}

#[test]
fn lease_goes_on_when_all_its_workers_have_released_it() {
    let released = [
        (4, released(2, 10), vec![]),
        // The worker's report may come once more.
        (4, interrupted_at(2), vec![]),
        (5, released(1, 10), then_keep(moved_back(1))),
    ];
    let engine = check(interrupted_at_2().into_iter().chain(released));
    assert_eq!(engine.lease(LeaseId(10)).unwrap().epoch, 1);
}

#[test]
fn lease_goes_on_again_and_again() {
    let again = [
        (4, released(2, 10), vec![]),
        (5, released(1, 10), then_keep(moved_back(1))),
        (6, kept(1, &[(10, 1)]), vec![]),
        (
            7,
            // A worker whose process has died has the snapshots.
            interrupted_at(2),
            ended_by_death(2),
        ),
        (8, released(1, 10), vec![]),
        (9, released(2, 10), then_keep(moved_back(2))),
    ];
    check(interrupted_at_2().into_iter().chain(again));
}

#[test]
fn other_requests_do_not_get_its_devices_meanwhile() {
    let devices = [(1, 0, exact(16))];
    let other = [
        (4, attach(2), vec![]),
        (4, request(2, 2, 1), vec![queued(2, 2, 1)]),
        (5, released(1, 10), vec![]),
        (6, released(2, 10), then_keep(moved_back(1))),
        (
            7,
            release(1, 10),
            vec![
                end_lease(1, 10),
                end_lease(2, 10),
                drop_snapshots(1, 10),
                drop_snapshots(2, 10),
            ],
        ),
        (8, released(1, 10), vec![granted(2, 2, &devices)]),
    ];
    check(interrupted_at_2().into_iter().chain(other));
}

#[test]
fn lease_goes_on_when_another_worker_has_its_snapshots_soon() {
    let lacks_one = [
        (2, kept(1, &[]), vec![]),
        (3, interrupted_at(2), vec![]),
        // A report that is older than the death.
        (4, kept(1, &[]), vec![]),
        (1003, interrupted_at(2), vec![]),
        (1004, kept(1, &[(10, 1)]), vec![]),
        (2003, interrupted_at(2), ended_by_death(2)),
    ];
    check(on_two_workers().into_iter().chain(lacks_one));
}

#[test]
fn lease_ends_without_the_snapshots_of_another_worker() {
    let not_restored = EndReason::NotRestored {
        how: "w2 died".into(),
        why: CannotMove::NoHolder,
    };
    let lacks_one = [
        (2, kept(1, &[]), vec![]),
        (3, interrupted_at(2), vec![]),
        (2003, kept(1, &[]), vec![]),
        (
            3003,
            interrupted_at(2),
            vec![
                end_lease(1, 10),
                end_lease(2, 10),
                drop_snapshots(1, 10),
                drop_snapshots(2, 10),
                ended(1, 10, not_restored),
            ],
        ),
    ];
    check(on_two_workers().into_iter().chain(lacks_one));
}

#[test]
fn lease_of_workers_with_different_memory_goes_on() {
    let devices = [(1, 0, exact(16)), (2, 0, exact(15))];
    let moved = moved_to_several(1, &[(1, 0, 16), (2, 0, 15)]);
    check([
        (0, join(1, &[exact(16)]), vec![]),
        (0, join(2, &[exact(15)]), vec![]),
        (0, attach(1), vec![]),
        (
            1,
            request_durable_of(2, 1, 1),
            then_keep(granted(1, 1, &devices)),
        ),
        (1, restorable(1, 10, true), vec![]),
        (2, kept(1, &[(10, 1)]), vec![]),
        (3, kept(2, &[(10, 2)]), vec![]),
        (4, interrupted_at(1), ended_by_death(1)),
        (5, released(1, 10), vec![]),
        (6, released(2, 10), then_keep(moved)),
    ]);
}

#[test]
fn interrupted_lease_goes_on_before_one_that_was_resumed_earlier() {
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, join(2, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (0, attach(2), vec![]),
        (
            1,
            request_durable(2, 2),
            vec![granted_exact(2, 2, 1, 0), keep(20, 1, 2)],
        ),
        (1, restorable(2, 20, true), vec![]),
        (2, kept(1, &[(20, 1)]), vec![]),
        (
            3,
            suspend(20),
            vec![end_and_keep(1, 20), drop_snapshots(2, 20), suspended(2, 20)],
        ),
        (4, released(1, 20), vec![]),
        (
            5,
            request_durable_of(2, 1, 1),
            then_keep(granted(1, 1, &[(1, 0, exact(16)), (2, 0, exact(16))])),
        ),
        (5, restorable(1, 10, true), vec![]),
        (6, kept(1, &[(10, 1)]), vec![]),
        (6, kept(2, &[(10, 2)]), vec![]),
        (7, resume(20), vec![waits_for(2, 20, &[1])]),
        (8, interrupted_at(2), ended_by_death(2)),
        (9, released(1, 10), vec![]),
        (
            10,
            released(2, 10),
            then_keep(moved_to_several(1, &[(1, 0, 16), (2, 0, 16)])),
        ),
    ];
    check(steps);
}

#[test]
fn lease_waits_for_a_worker_that_has_to_report_its_snapshots() {
    let back = join_holding(1, &[exact(16), exact(16)], &[(10, 0), (10, 1)]);
    let reconnected = [
        (2, worker_disconnected(1), vec![]),
        (3, interrupted_at(2), vec![]),
        (4, back, keep_each_other(1, 2).into()),
        (5, interrupted_at(2), vec![]),
        (6, kept(1, &[(10, 1)]), vec![]),
        (7, interrupted_at(2), ended_by_death(2)),
    ];
    check(on_two_workers().into_iter().chain(reconnected));
}

#[test]
fn lease_ends_if_a_worker_with_its_snapshots_is_lost_meanwhile() {
    let died = EndReason::ProcessDied {
        how: "w2 died".into(),
    };
    let gone = EndReason::nothing_left(died, snapshots_lost(1));
    let steps = [
        (4, released(2, 10), vec![]),
        (
            5,
            worker_left(1),
            vec![drop_snapshots(2, 10), ended(1, 10, gone)],
        ),
    ];
    check(interrupted_at_2().into_iter().chain(steps));
}

#[test]
fn client_that_was_away_learns_where_its_lease_goes_on() {
    let away = [
        (2, client_disconnected(1), vec![]),
        (
            3,
            interrupted_at(1),
            vec![
                end_and_keep(1, 10),
                end_and_keep(2, 10),
                drop_part(1, 1),
                drop_part(2, 0),
            ],
        ),
        (4, released(1, 10), vec![]),
        (5, released(2, 10), vec![]),
        (
            6,
            attach_claiming(1, &[(10, &[(1, 0), (1, 1), (2, 0)])]),
            then_keep(moved_back(1)),
        ),
    ];
    check(on_two_workers().into_iter().chain(away));
}

/// The lease is suspended, and both workers have released it.
pub(super) fn suspended_on_two_workers() -> Vec<Step> {
    let mut steps = on_two_workers();
    steps.extend([
        (
            3,
            suspend(10),
            vec![
                end_and_keep(1, 10),
                end_and_keep(2, 10),
                drop_part(1, 1),
                drop_part(2, 0),
                suspended(1, 10),
            ],
        ),
        (4, released(1, 10), vec![]),
        (5, released(2, 10), vec![]),
    ]);
    steps
}

#[test]
fn lease_is_suspended_on_all_its_workers() {
    let resumed = [(6, resume(10), then_keep(moved_back(1)))];
    check(suspended_on_two_workers().into_iter().chain(resumed));
}

#[test]
fn resumed_lease_waits_for_devices_of_all_its_workers() {
    let other = [(2, 0, exact(16))];
    let turns = [
        (
            3,
            suspend(10),
            vec![
                end_and_keep(1, 10),
                end_and_keep(2, 10),
                drop_part(1, 1),
                drop_part(2, 0),
                suspended(1, 10),
            ],
        ),
        (4, released(2, 10), vec![]),
        (4, attach(2), vec![]),
        (5, request(2, 2, 1), vec![granted(2, 2, &other)]),
        (5, released(1, 10), vec![]),
        (6, resume(10), vec![waits_for_both()]),
        (7, release(2, 20), vec![end_lease(2, 20)]),
        (8, released(2, 20), then_keep(moved_back(1))),
    ];
    check(on_two_workers().into_iter().chain(turns));
}

#[test]
fn lease_is_not_suspended_without_all_its_snapshots() {
    let engine = check(on_two_workers());
    assert_eq!(
        engine.check_suspend(LeaseId(10), Suspender::Administrator),
        Ok(())
    );
    assert_eq!(
        engine.check_move(LeaseId(10)),
        Err(CannotMove::SeveralWorkers)
    );
    let lacks_one = [(3, kept(2, &[]), vec![])];
    let engine = check(on_two_workers().into_iter().chain(lacks_one));
    assert_eq!(
        engine.check_suspend(LeaseId(10), Suspender::Administrator),
        Err(CannotMove::NoHolder)
    );
    let engine = check(interrupted_at_2());
    assert_eq!(
        engine.check_suspend(LeaseId(10), Suspender::Administrator),
        Err(CannotMove::Interrupted)
    );
}

/// As [`on_two_workers`], and worker 3 keeps the snapshots of both.
pub(super) fn kept_by_worker_3() -> Vec<Step> {
    let mut steps = on_two_workers();
    steps.extend([
        (
            2,
            join(3, &[exact(16), exact(16)]),
            vec![
                drop_part(2, 0),
                keep(10, 1, 3),
                drop_part(1, 1),
                keep_part(10, 1, 2, 3),
            ],
        ),
        (2, kept(1, &[(10, 1), (10, 3)]), vec![]),
        (2, kept_parts(2, &[(10, 1, 2), (10, 1, 3)]), vec![]),
    ]);
    steps
}

pub(super) fn waits_because(cause: EndReason, workers: &[&str]) -> Command {
    Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: workers.iter().map(ToString::to_string).collect(),
        needs_all: true,
        cause: Some(cause),
    }
}

pub(super) fn hold(holder: u64) -> Command {
    Command::HoldSnapshots {
        holder: WorkerId(holder),
        lease: LeaseId(10),
        part: None,
    }
}

/// A worker drops what it has of a part of the lease.
pub(super) fn drop_part(keeper: u64, index: u32) -> Command {
    Command::DropSnapshots {
        keeper: WorkerId(keeper),
        lease: LeaseId(10),
        part: Some(index),
    }
}

#[test]
fn lease_goes_on_at_the_keeper_of_a_lost_worker() {
    let steps = [
        (
            3,
            worker_left(1),
            vec![
                end_and_keep(2, 10),
                hold(3),
                waits_because(lost(1), &["w3", "w2"]),
            ],
        ),
        (
            4,
            released(2, 10),
            // The ranks of worker 1 are first, as before.
            [
                drop_part(3, 1),
                moved_to_several(1, &[(3, 0, 16), (3, 1, 16), (2, 0, 16)]),
            ]
            .into_iter()
            .chain(keep_each_other(3, 2))
            .collect(),
        ),
        (
            5,
            join(4, &[exact(16), exact(16)]),
            vec![
                drop_part(3, 1),
                keep_part(10, 1, 2, 4),
                drop_part(2, 0),
                keep(10, 3, 4),
            ],
        ),
    ];
    check(kept_by_worker_3().into_iter().chain(steps));
}

#[test]
fn lease_ends_if_a_lost_worker_has_no_keeper() {
    let steps = [
        (2, kept(1, &[(10, 1)]), vec![]),
        (
            3,
            worker_left(1),
            vec![
                end_lease(2, 10),
                drop_snapshots(3, 10),
                ended(1, 10, lost(1)),
            ],
        ),
    ];
    check(kept_by_worker_3().into_iter().chain(steps));
}

#[test]
fn lease_leaves_a_worker_that_drains_once_there_are_devices() {
    let drain = Event::Drain {
        worker: WorkerId(2),
        is_drained: true,
    };
    let cause = EndReason::WorkerDrains {
        worker: WorkerId(2),
        name: "w2".into(),
    };
    let others = [(3, 0, exact(16)), (3, 1, exact(16))];
    let drained = [
        (3, attach(2), vec![]),
        (3, request(2, 2, 2), vec![granted(2, 2, &others)]),
        (4, drain, vec![]),
        (5, release(2, 20), vec![end_lease(3, 20)]),
        (
            6,
            released(3, 20),
            vec![
                end_and_keep(1, 10),
                end_lease(2, 10),
                hold(3),
                waits_because(cause, &["w1", "w3"]),
            ],
        ),
        (7, released(2, 10), vec![]),
        (
            8,
            released(1, 10),
            [
                drop_part(3, 0),
                moved_to_several(1, &[(1, 0, 16), (1, 1, 16), (3, 0, 16)]),
            ]
            .into_iter()
            .chain(keep_each_other(1, 3))
            .collect(),
        ),
    ];
    check(kept_by_worker_3().into_iter().chain(drained));
}

/// Replaces the keeper of a worker of lease 10, which the new one does not have the snapshots of yet. Returns the keeper
/// before and the new one.
fn replace_keeper(scene: &mut Scene, source: u64) -> [WorkerId; 2] {
    let keeper = |scene: &Scene| {
        let lease = scene.engine.leases().get(LeaseId(10)).unwrap();
        lease.keepers[&WorkerId(source)].clone()
    };
    let before = keeper(scene).worker;
    scene.send(drain(before.0, true));
    scene.send(drain(before.0, false));
    let after = keeper(scene);
    assert_eq!((after.previous, after.is_kept), (Some(before), false));
    [before, after.worker]
}

/// The client may have gone on from snapshots that only the new keeper has, which the worker reports later.
#[test]
fn lease_does_not_go_on_at_a_keeper_that_was_replaced() {
    let mut scene = Scene::new(4, 2);
    let [_, keeper] = replace_keeper(&mut scene, 2);
    scene.send(drain(2, true));
    assert_eq!(scene.places(), [1, 2]);
    scene.settle();
    assert_eq!(scene.places(), [1, keeper.0]);
}

#[test]
fn lease_of_two_lost_workers_goes_on_at_a_keeper_that_was_replaced() {
    let mut scene = Scene::new(5, 2);
    let [before, _] = replace_keeper(&mut scene, 1);
    let lease = scene.engine.leases().get(LeaseId(10)).unwrap();
    let other = lease.keepers[&WorkerId(2)].worker;
    scene.send(kept_parts(2, &[(10, 1, other.0), (10, 1, 2)]));
    scene.send(worker_left(2));
    scene.send(worker_left(1));
    scene.settle();
    let places = scene.places();
    assert!(
        places.contains(&before.0) && places.len() == 2,
        "{places:?}"
    );
}

#[test]
fn interrupted_lease_ends_if_there_are_no_devices_for_long() {
    let taken = [(3, 0, exact(16)), (3, 1, exact(16))];
    let not_resumed = EndReason::NotResumed {
        cause: Box::new(lost(1)),
        workers: "w3, w2".into(),
    };
    let steps = [
        (3, attach(2), vec![]),
        (3, request(2, 2, 2), vec![granted(2, 2, &taken)]),
        (
            3,
            worker_left(1),
            vec![
                end_and_keep(2, 10),
                hold(3),
                waits_because(lost(1), &["w3", "w2"]),
            ],
        ),
        (4, released(2, 10), vec![]),
        (
            3_600_003,
            tick(),
            vec![
                drop_snapshots(2, 10),
                drop_snapshots(3, 10),
                ended(1, 10, not_resumed),
            ],
        ),
    ];
    check(kept_by_worker_3().into_iter().chain(steps));
}
