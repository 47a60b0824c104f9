//! Workers that join, go silent, come back and leave.

use super::*;

/// Worker 1 with one device and worker 2 with one, leased together to client 9.
fn gang_of_two() -> [Step; 4] {
    [
        (0, join(1, &[flex(1)]), vec![]),
        (0, join(2, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (
            0,
            request(9, 1, 2),
            vec![granted(9, 1, &[(1, 0, flex(1)), (2, 0, flex(1))])],
        ),
    ]
}

fn check_gang(steps: impl IntoIterator<Item = Step>) -> Engine {
    check(gang_of_two().into_iter().chain(steps))
}

#[test]
fn disconnected_worker_is_lost_after_the_timeout() {
    check_gang([
        (3_000, beat(1), vec![]),
        (4_000, worker_disconnected(1), vec![]),
        (8_000, tick(), vec![end_lease(2, 10), ended(9, 10, lost(1))]),
        // The worker has been removed, and its device is no longer in the pool.
        (
            8_000,
            request(9, 2, 2),
            vec![unsatisfiable(9, 2, 2, &[&[flex(1)]])],
        ),
        (8_000, released(2, 10), vec![]),
        (
            8_000,
            request(9, 3, 1),
            vec![granted(9, 3, &[(2, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn a_silent_worker_is_not_lost_while_its_stream_is_up() {
    let engine = check_gang([(60_000, attach(8), vec![])]);
    assert_eq!(engine.next_deadline(), None);
}

#[test]
fn worker_disconnected_after_long_silence_is_lost_at_once() {
    let mut engine = check_gang([(6_000, worker_disconnected(1), vec![])]);
    assert_eq!(engine.next_deadline(), Some(at(5_000)));
    let commands = engine.handle(Event::Tick, at(6_000));
    assert_eq!(
        without_numbers(commands),
        [end_lease(2, 10), ended(9, 10, lost(1))]
    );
}

#[test]
fn rejoined_worker_keeps_its_leases() {
    let engine = check_gang([
        (1_000, worker_disconnected(1), vec![]),
        (
            4_999,
            on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)])),
            vec![],
        ),
        (20_000, attach(8), vec![]),
    ]);
    assert_eq!(engine.next_deadline(), None);
    assert_eq!(engine.snapshot().leases, 1);
}

#[test]
fn worker_rejoined_before_the_tick_is_not_lost() {
    let mut engine = check_gang([(1_000, worker_disconnected(1), vec![])]);
    let back = on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)]));
    assert_eq!(engine.handle(back, at(9_000)), []);
    assert_eq!(engine.handle(Event::Tick, at(9_000)), []);
    assert_eq!(engine.snapshot().leases, 1);
}

#[test]
fn end_of_a_replaced_stream_is_ignored() {
    let engine = check_gang([
        (
            1_000,
            on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)])),
            vec![],
        ),
        (1_001, leaving(1), vec![]),
        (1_002, worker_disconnected(1), vec![]),
        (1_003, beat(1), vec![]),
    ]);
    let snapshot = engine.snapshot();
    assert!(snapshot.workers[0].connected && !snapshot.workers[0].draining);
    assert_eq!(snapshot.workers[0].last_beat, at(1_000));
}

#[test]
fn disconnected_worker_gets_no_lease() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (1_000, worker_disconnected(1), vec![]),
        (1_000, request(9, 1, 1), vec![queued(9, 1, 1)]),
        (
            1_500,
            on_stream(11, join(1, &[flex(1)])),
            vec![granted(9, 1, &[(1, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn worker_rejoined_with_other_devices_is_new() {
    check_gang([
        (1_000, worker_disconnected(1), vec![]),
        (
            2_000,
            on_stream(11, join_holding(1, &[flex(1), flex(1)], &[(10, 0)])),
            vec![end_lease(2, 10), ended(9, 10, lost(1)), end_lease(1, 10)],
        ),
        (2_000, released(2, 10), vec![]),
        (2_000, on_stream(11, released(1, 10)), vec![]),
        (
            2_000,
            request(9, 2, 3),
            vec![granted(
                9,
                2,
                &[(1, 0, flex(1)), (1, 1, flex(1)), (2, 0, flex(1))],
            )],
        ),
    ]);
}

#[test]
fn worker_rejoined_with_another_certificate_is_new() {
    let registration = Registration {
        endpoint: Endpoint {
            certificate_sha256: [77; 32],
            ..endpoint(1)
        },
        devices: vec![flex(1)],
        store: None,
    };
    let back = worker(
        1,
        WorkerEvent::Join {
            registration,
            held: vec![],
            ended: vec![],
            suspended: Vec::new(),
            out_of_service: Outages::new(),
            leaving: false,
        },
    );
    check_gang([(
        1_000,
        on_stream(11, back),
        vec![end_lease(2, 10), ended(9, 10, lost(1))],
    )]);
}

#[test]
fn lost_worker_ends_its_leases_after_rejoining() {
    check_gang([
        (1_000, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![end_lease(2, 10), ended(9, 10, lost(1))]),
        (
            9_000,
            on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)])),
            vec![end_lease(1, 10)],
        ),
    ]);
}

#[test]
fn rejoined_worker_gets_missed_end_lease() {
    check_gang([
        (1_000, worker_disconnected(1), vec![]),
        (1_000, release(9, 10), vec![end_lease(2, 10)]),
        (
            2_000,
            on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)])),
            vec![end_lease(1, 10)],
        ),
    ]);
}

#[test]
fn worker_must_end_lease_on_nonexistent_device() {
    check([
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (
            1_000,
            on_stream(11, join_holding(1, &[flex(1), flex(1)], &[(10, 1)])),
            vec![end_lease(1, 10)],
        ),
    ]);
}

#[test]
fn a_leaving_worker_keeps_its_leases_but_gets_no_more() {
    check([
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (0, leaving(1), vec![]),
        (0, request(9, 2, 1), vec![unsatisfiable(9, 2, 1, &[&[]])]),
        // It gets no lease even if it reconnects while leaving.
        (
            1_000,
            on_stream(11, join_holding(1, &[flex(1), flex(1)], &[(10, 0)])),
            vec![],
        ),
        (
            1_000,
            request(9, 3, 1),
            vec![unsatisfiable(9, 3, 1, &[&[]])],
        ),
        (2_000, release(9, 10), vec![end_lease(1, 10)]),
        (
            2_000,
            request(9, 4, 1),
            vec![unsatisfiable(9, 4, 1, &[&[]])],
        ),
    ]);
}

#[test]
fn a_worker_that_left_ends_its_leases_at_once() {
    check_gang([
        (1_000, leaving(1), vec![]),
        (
            2_000,
            worker_left(1),
            vec![end_lease(2, 10), ended(9, 10, left(1))],
        ),
        (2_000, worker_disconnected(1), vec![]),
    ]);
}

#[test]
fn leases_of_a_leaving_worker_outlive_its_stream() {
    check_gang([
        (1_000, leaving(1), vec![]),
        (2_000, beat(1), vec![]),
        (3_000, worker_disconnected(1), vec![]),
        (
            6_999,
            on_stream(11, join_leaving(join_holding(1, &[flex(1)], &[(10, 0)]))),
            vec![],
        ),
        (8_000, on_stream(11, beat(1)), vec![]),
        (9_000, on_stream(11, worker_disconnected(1)), vec![]),
        (
            13_000,
            tick(),
            vec![end_lease(2, 10), ended(9, 10, left(1))],
        ),
    ]);
}

#[test]
fn a_leaving_worker_that_joins_a_new_scheduler_gets_no_lease() {
    let engine = check([
        (
            0,
            join_leaving(join_holding(1, &[flex(1), flex(1)], &[(10, 0)])),
            vec![],
        ),
        (0, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (0, request(9, 2, 1), vec![unsatisfiable(9, 2, 1, &[&[]])]),
    ]);
    let snapshot = engine.snapshot();
    assert!(snapshot.workers[0].draining && snapshot.leases == 1);
}

#[test]
fn requests_are_refused_once_unsatisfiable() {
    let two = [flex(1), flex(1)];
    check([
        (0, join(1, &two), vec![]),
        (0, join(2, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(2, 0, flex(1))])]),
        (0, request(9, 2, 3), vec![queued(9, 2, 1)]),
        (
            0,
            request(9, 3, 2),
            vec![granted(9, 3, &[(1, 0, flex(1)), (1, 1, flex(1))])],
        ),
        (0, request(9, 4, 2), vec![queued(9, 4, 2)]),
        // A broken stream alone does not cause a refusal.
        (1_000, worker_disconnected(2), vec![]),
        (
            5_000,
            tick(),
            vec![
                ended(9, 10, lost(2)),
                unsatisfiable(9, 2, 3, &[&two]),
                queued(9, 4, 1),
            ],
        ),
        (6_000, leaving(1), vec![unsatisfiable(9, 4, 2, &[&[]])]),
    ]);
}

#[test]
fn new_worker_serves_pending_requests() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (0, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (
            0,
            join(2, &[flex(1)]),
            vec![granted(9, 2, &[(2, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn the_snapshot_shows_workers_devices_requests_and_leases() {
    let engine = check([
        (0, join(1, &[flex(1), cuda(8)]), vec![]),
        (0, join(2, &[]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
        (1_500, beat(1), vec![]),
        (1_600, worker_disconnected(2), vec![]),
    ]);
    let snapshot = engine.snapshot();
    assert_eq!((snapshot.waiting_requests, snapshot.leases), (1, 1));
    let [first, second] = &snapshot.workers[..] else {
        panic!("{snapshot:?}")
    };
    assert_eq!((&*first.name, &*first.address), ("w1", "w1:7420"));
    assert_eq!((first.connected, second.connected), (true, false));
    assert_eq!((first.last_beat, second.last_beat), (at(1_500), at(0)));
    let leased: Vec<_> = first
        .devices
        .iter()
        .map(|device| !device.leases.is_empty())
        .collect();
    assert_eq!(leased, [true, false]);
    assert_eq!(first.devices[1].device, cuda(8));
}
