//! Leases on several workers, one of which their client or another worker cannot reach.

use super::durable::*;
use super::scene::Scene;
use super::several_workers::*;
use super::suspension::end_and_keep;
use super::*;
use crate::LeftWorker;

/// The client of lease 10 reports that it cannot reach this worker of it.
fn unreachable(worker: u64) -> Event {
    let (lease, worker) = (LeaseId(10), Some(WorkerId(worker)));
    client(1, ClientEvent::Unreachable { lease, worker })
}

/// A worker of lease 10 reports that it cannot reach another one.
fn missing(by: u64, of: u64) -> Event {
    let missing = vec![(LeaseId(10), WorkerId(of))];
    worker(by, WorkerEvent::PeersMissing { missing })
}

/// Returns reports from 1 s until just before 11 s.
fn reports(report: impl Fn() -> Event) -> impl Iterator<Item = Step> {
    (1..=10).map(move |second| (second * 1_000, report(), vec![]))
}

fn missed(by: Option<u64>) -> EndReason {
    EndReason::WorkerMissed {
        worker: WorkerId(2),
        name: "w2".into(),
        by: match by {
            Some(id) => format!("worker w{id} ({})", WorkerId(id)),
            None => "the program".into(),
        },
        other: by.map(WorkerId),
    }
}

#[test]
fn lease_goes_on_at_once_if_client_and_scheduler_miss_a_worker() {
    let cause = EndReason::WorkerUnreachable {
        worker: WorkerId(2),
        name: "w2".into(),
    };
    let steps = [
        (3, unreachable(2), vec![]),
        (4, worker_disconnected(2), vec![]),
        (
            5,
            unreachable(2),
            vec![
                end_and_keep(1, 10),
                hold(3),
                waits_because(cause, &["w1", "w3"]),
            ],
        ),
        (6, released(1, 10), goes_on_at_3()),
        // It still runs its part, in a process that nobody can use.
        (
            7,
            join_holding(2, &[exact(16)], &[(10, 0)]),
            vec![end_lease(2, 10)],
        ),
        (
            8,
            released(2, 10),
            vec![
                drop_part(3, 0),
                keep(10, 1, 2),
                drop_part(1, 1),
                keep_part(10, 1, 3, 2),
            ],
        ),
    ];
    check(kept_by_worker_3().into_iter().chain(steps));
}

/// The lease goes on at workers 1 and 3.
fn goes_on_at_3() -> Vec<Command> {
    let moved = [
        drop_part(3, 0),
        moved_to_several(1, &[(1, 0, 16), (1, 1, 16), (3, 0, 16)]),
    ];
    moved.into_iter().chain(keep_each_other(1, 3)).collect()
}

/// The same, and worker 2 drops the snapshots that it has held.
fn leaves_2() -> Vec<Command> {
    let dropped = [drop_snapshots(2, 10)];
    dropped.into_iter().chain(goes_on_at_3()).collect()
}

#[test]
fn lease_goes_on_without_a_worker_that_its_client_misses_for_long() {
    let restorable = [(3, restorable(1, 10, true), vec![])];
    let left = [
        (
            11_000,
            unreachable(2),
            vec![
                end_and_keep(1, 10),
                end_and_keep(2, 10),
                hold(3),
                waits_because(missed(None), &["w1", "w3"]),
            ],
        ),
        (11_001, released(1, 10), vec![]),
        (11_002, released(2, 10), leaves_2()),
    ];
    let steps = restorable
        .into_iter()
        .chain(reports(|| unreachable(2)))
        .chain(left);
    check(kept_by_worker_3().into_iter().chain(steps));
}

#[test]
fn lease_goes_on_without_one_of_two_workers_that_cannot_reach_each_other() {
    let restorable = [(3, restorable(1, 10, true), vec![])];
    let left = [
        (
            11_000,
            missing(1, 2),
            vec![
                end_and_keep(1, 10),
                end_and_keep(2, 10),
                hold(3),
                waits_because(missed(Some(1)), &["w1", "w3"]),
            ],
        ),
        (11_001, released(1, 10), vec![]),
        (11_002, released(2, 10), leaves_2()),
    ];
    let steps = restorable
        .into_iter()
        .chain(reports(|| missing(1, 2)))
        .chain(left);
    check(kept_by_worker_3().into_iter().chain(steps));
}

/// There are no devices elsewhere: the lease stays, as the workers may reach each other again.
#[test]
fn lease_stays_if_there_is_no_other_worker() {
    let others = [
        (3, restorable(1, 10, true), vec![]),
        (3, attach(2), vec![]),
        (
            3,
            request(2, 2, 2),
            vec![granted(2, 2, &[(3, 0, exact(16)), (3, 1, exact(16))])],
        ),
    ];
    let later = [
        (11_000, missing(1, 2), vec![]),
        (11_000, unreachable(2), vec![]),
    ];
    let steps = others
        .into_iter()
        .chain(reports(|| missing(1, 2)))
        .chain(later);
    check(kept_by_worker_3().into_iter().chain(steps));
}

/// Reports that stop for a while begin anew, and so do those of another worker.
#[test]
fn lease_stays_while_no_worker_is_missed_for_long() {
    let restorable = [(3, restorable(1, 10, true), vec![])];
    let later = [
        (11_000, missing(2, 1), vec![]),
        (12_900, missing(1, 2), vec![]),
        (14_800, missing(2, 1), vec![]),
    ];
    let steps = restorable
        .into_iter()
        .chain(reports(|| missing(1, 2)))
        .chain(later);
    check(kept_by_worker_3().into_iter().chain(steps));
}

#[test]
fn lease_leaves_the_worker_that_more_others_miss() {
    let mut scene = Scene::new(5, 3);
    scene.report(&[|| missing(1, 2), || missing(2, 3)]);
    scene.check_left(2);
    let mut scene = Scene::new(5, 3);
    scene.report(&[|| missing(1, 2), || missing(1, 3)]);
    scene.check_left(1);
}

/// Worker 1 has no connection to others. The second time, it is not the other one that is left.
#[test]
fn lease_leaves_a_worker_that_misses_one_after_the_other() {
    let mut scene = Scene::new(5, 2);
    scene.report(&[|| missing(1, 2)]);
    scene.check_left(2);
    scene.report(&[|| missing(1, 3), || missing(1, 4), || missing(1, 5)]);
    scene.check_left(1);
}

#[test]
fn lease_does_not_come_back_to_a_worker_for_a_while() {
    let mut scene = Scene::new(3, 2);
    scene.report(&[|| unreachable(2)]);
    assert_eq!(scene.places(), [1, 3]);
    scene.send(Event::Drain {
        worker: WorkerId(3),
        is_drained: true,
    });
    scene.wait(580_000);
    assert_eq!(scene.places(), [1, 3], "worker 2 is left");
    scene.wait(30_000);
    assert_eq!(scene.places(), [1, 2]);
}

#[test]
fn lease_that_waits_names_the_worker_that_it_has_left() {
    let mut scene = Scene::new(3, 2);
    scene.report(&[|| unreachable(2)]);
    scene.send(worker_disconnected(3));
    scene.wait(6_000);
    let waiting = scene.engine.waiting(LeaseId(10)).expect("it waits");
    let Waiter::Lease { left_workers, .. } = waiting.waiter else {
        panic!("{waiting:?}");
    };
    let (name, until) = ("w2".into(), at(11_000 + 600_000));
    assert_eq!(left_workers, [LeftWorker { name, until }]);
}

#[test]
fn lease_leaves_a_worker_at_once_that_another_one_and_the_scheduler_miss() {
    let mut scene = Scene::new(3, 2);
    scene.send(worker_disconnected(2));
    scene.send(missing(1, 2));
    scene.settle();
    assert_eq!(scene.places(), [1, 3]);
}

#[test]
fn reports_that_do_not_concern_the_lease_change_nothing() {
    let mut scene = Scene::new(4, 2);
    scene.send(attach(2));
    scene.report(&[
        || missing(1, 1),
        || missing(1, 3),
        || missing(3, 1),
        || missing(1, 99),
        || unreachable(3),
        || {
            let (lease, worker) = (LeaseId(10), Some(WorkerId(1)));
            client(2, ClientEvent::Unreachable { lease, worker })
        },
    ]);
    assert_eq!(scene.places(), [1, 2]);
}
