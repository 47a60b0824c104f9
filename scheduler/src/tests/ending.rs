//! Devices between two leases, and devices that are out of service.

use super::*;

/// One worker of two devices, both leased to client 9, and client 8 without any.
fn both_leased() -> [Step; 4] {
    let both = [(1, 0, flex(1)), (1, 1, flex(1))];
    [
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, attach(8), vec![]),
        (0, request(9, 1, 2), vec![granted(9, 1, &both)]),
    ]
}

fn check_leased(steps: impl IntoIterator<Item = Step>) -> Engine {
    check(both_leased().into_iter().chain(steps))
}

/// Returns whether each device of the first worker is leased and ending, and its outage.
fn devices(engine: &Engine) -> Vec<(bool, bool, Option<String>)> {
    let worker = engine.snapshot().workers.remove(0);
    let devices = worker.devices.into_iter();
    devices
        .map(|device| {
            (
                !device.leases.is_empty(),
                device.ending,
                device.out_of_service,
            )
        })
        .collect()
}

#[test]
fn a_device_gets_no_lease_before_its_worker_has_released_it() {
    let engine = check_leased([
        (1_000, release(9, 10), vec![end_lease(1, 10)]),
        // The devices are not released yet, so the request is queued.
        (1_000, request(8, 2, 1), vec![queued(8, 2, 1)]),
        (40_000, beat(1), vec![]),
    ]);
    assert_eq!(devices(&engine), [(false, true, None), (false, true, None)]);
    assert_eq!(engine.next_deadline(), None);
    let engine = check_leased([
        (1_000, release(9, 10), vec![end_lease(1, 10)]),
        (1_000, request(8, 2, 1), vec![queued(8, 2, 1)]),
        (1_500, released_but(1, 10, &[0, 1]), vec![]),
        (
            2_000,
            released_but(1, 10, &[0]),
            vec![granted(8, 2, &[(1, 1, flex(1))])],
        ),
        (2_000, request(8, 3, 1), vec![queued(8, 3, 1)]),
        (
            3_000,
            released(1, 10),
            vec![granted(8, 3, &[(1, 0, flex(1))])],
        ),
        (3_000, released(1, 10), vec![]),
    ]);
    assert_eq!(devices(&engine), [(true, false, None), (true, false, None)]);
}

#[test]
fn release_of_an_unrelated_lease_is_ignored() {
    check_leased([
        (1_000, released(1, 10), vec![]),
        (1_000, request(8, 2, 1), vec![queued(8, 2, 1)]),
        (2_000, release(9, 10), vec![end_lease(1, 10)]),
        (2_000, released(1, 20), vec![]),
        (2_000, released(2, 10), vec![]),
        (2_000, on_stream(7, released(1, 10)), vec![]),
    ]);
}

#[test]
fn expired_and_lost_leases_wait_for_release() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, join(2, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (
            0,
            request(9, 1, 2),
            vec![granted(9, 1, &[(1, 0, flex(1)), (2, 0, flex(1))])],
        ),
        (1_000, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (
            2_000,
            worker_left(1),
            vec![end_lease(2, 10), ended(9, 10, lost(1))],
        ),
        (
            3_000,
            released(2, 10),
            vec![granted(9, 2, &[(2, 0, flex(1))])],
        ),
        (4_000, client_disconnected(9), vec![]),
        (34_000, tick(), vec![end_lease(2, 20)]),
        (34_000, attach(8), vec![]),
        (34_000, request(8, 3, 1), vec![queued(8, 3, 1)]),
        (
            34_500,
            released(2, 20),
            vec![granted(8, 3, &[(2, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn rejoined_worker_gets_end_lease_again_for_unreleased_devices() {
    check_leased([
        (1_000, worker_disconnected(1), vec![]),
        (1_000, release(9, 10), vec![]),
        (1_000, request(8, 2, 1), vec![queued(8, 2, 1)]),
        // It may have ended the lease and reported so, or never have received the command.
        (
            2_000,
            on_stream(11, join(1, &[flex(1), flex(1)])),
            vec![end_lease(1, 10)],
        ),
        (
            2_500,
            on_stream(12, join_ending(1, &[flex(1), flex(1)], &[(10, 0)])),
            vec![end_lease(1, 10)],
        ),
        (
            3_000,
            on_stream(13, join_holding(1, &[flex(1), flex(1)], &[(10, 1)])),
            vec![end_lease(1, 10)],
        ),
        (
            3_500,
            on_stream(13, released(1, 10)),
            vec![granted(8, 2, &[(1, 0, flex(1))])],
        ),
        // It has reported the release, so the command is not repeated.
        (
            4_000,
            on_stream(14, join_holding(1, &[flex(1), flex(1)], &[(20, 0)])),
            vec![],
        ),
    ]);
}

#[test]
fn losing_a_worker_forgets_its_unreleased_devices() {
    let engine = check_leased([
        (1_000, release(9, 10), vec![end_lease(1, 10)]),
        (1_000, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![]),
        (6_000, on_stream(11, join(1, &[flex(1), flex(1)])), vec![]),
        (
            6_000,
            request(8, 2, 1),
            vec![granted(8, 2, &[(1, 0, flex(1))])],
        ),
    ]);
    assert_eq!(
        devices(&engine),
        [(true, false, None), (false, false, None)]
    );
}

#[test]
fn restarted_scheduler_learns_unreleased_devices() {
    check([
        (
            0,
            join_ending(1, &[flex(1), flex(1)], &[(10, 1)]),
            vec![end_lease(1, 10)],
        ),
        (0, attach(9), vec![]),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
        (
            2_000,
            released(1, 10),
            vec![granted(9, 2, &[(1, 0, flex(1)), (1, 1, flex(1))])],
        ),
    ]);
}

#[test]
fn lease_being_ended_cannot_be_claimed() {
    let unavailable = EndReason::DeviceUnavailable {
        worker: WorkerId(1),
        index: 0,
    };
    check([
        (0, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (
            1_000,
            join_ending(1, &[flex(1)], &[(10, 0)]),
            vec![end_lease(1, 10), ended(9, 10, unavailable.clone())],
        ),
    ]);
    check([
        (
            0,
            join_ending(1, &[flex(1)], &[(10, 0)]),
            vec![end_lease(1, 10)],
        ),
        (
            1_000,
            attach_claiming(9, &[(10, &[(1, 0)])]),
            vec![end_lease(1, 10), ended(9, 10, unavailable)],
        ),
    ]);
}

#[test]
fn device_is_free_after_a_stale_lease_is_released() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (1_000, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![ended(9, 10, lost(1))]),
        (
            6_000,
            on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)])),
            vec![end_lease(1, 10)],
        ),
        (6_000, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (
            7_000,
            on_stream(11, released(1, 10)),
            vec![granted(9, 2, &[(1, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn requests_wait_for_devices_out_of_service() {
    let two = [flex(1), flex(1)];
    let engine = check([
        (0, join(1, &two), vec![]),
        (0, out_of_service(1, &[0]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 2), vec![queued(9, 1, 1)]),
        (0, request(9, 2, 1), vec![granted(9, 2, &[(1, 1, flex(1))])]),
        (1_000, out_of_service(1, &[0, 1]), vec![]),
        // The current lease goes on, and the next request for the device has to wait.
        (2_000, release(9, 20), vec![end_lease(1, 20)]),
        (2_000, released(1, 20), vec![]),
        (2_000, on_stream(7, out_of_service(1, &[])), vec![]),
    ]);
    let broken = || (false, false, Some("broken".to_owned()));
    assert_eq!(devices(&engine), [broken(), broken()]);
    check([
        (0, join(1, &two), vec![]),
        (0, out_of_service(1, &[0, 1]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 2), vec![queued(9, 1, 1)]),
        (1_000, out_of_service(1, &[1]), vec![]),
        (
            2_000,
            out_of_service(1, &[]),
            vec![granted(9, 1, &[(1, 0, flex(1)), (1, 1, flex(1))])],
        ),
    ]);
}

#[test]
fn a_worker_may_join_with_a_device_out_of_service() {
    let registration = Registration {
        endpoint: endpoint(1),
        devices: vec![flex(1)],
        store: None,
    };
    let join = worker(
        1,
        WorkerEvent::Join {
            registration,
            held: vec![],
            ended: vec![],
            suspended: Vec::new(),
            out_of_service: Outages::from([(0, "broken".into())]),
            leaving: false,
        },
    );
    check([
        (0, attach(9), vec![]),
        (0, join, vec![]),
        (0, request(9, 1, 1), vec![queued(9, 1, 1)]),
        (
            1_000,
            on_stream(11, join_holding(1, &[flex(1)], &[])),
            vec![granted(9, 1, &[(1, 0, flex(1))])],
        ),
    ]);
}

/// The leases 1 to 4,096, on two devices in turn.
fn many_held() -> Vec<(u64, u32)> {
    (1..=4_096).map(|lease| (lease, lease as u32 % 2)).collect()
}

fn all_ended(held: &[(u64, u32)]) -> Vec<Command> {
    let leases = held.iter().map(|(lease, _)| *lease);
    leases.map(|lease| end_lease(1, lease)).collect()
}

/// The two leases with the latest grants on each of two devices.
const LATEST: [(u64, u32); 4] = [(4_093, 1), (4_094, 0), (4_095, 1), (4_096, 0)];

#[test]
fn worker_can_report_many_leases_that_have_ended() {
    let (two, held) = ([flex(1), flex(1)], many_held());
    let mut steps = vec![
        // After the adoption window.
        (60_000, join_holding(1, &two, &held), all_ended(&held)),
        // Not all of them can be real.
        (60_000, on_stream(11, join(1, &two)), all_ended(&LATEST)),
        (
            60_000,
            on_stream(12, join_ending(1, &two, &held)),
            all_ended(&LATEST),
        ),
        (60_000, attach(9), vec![]),
        (60_000, request(9, 2, 2), vec![queued(9, 2, 1)]),
    ];
    let [rest @ .., (last, _)] = LATEST;
    let released = |lease| on_stream(12, released(1, lease));
    steps.extend(rest.map(|(lease, _)| (61_000, released(lease), vec![])));
    let all = [(1, 0, flex(1)), (1, 1, flex(1))];
    steps.push((61_000, released(last), vec![granted(9, 2, &all)]));
    check(steps);
}

#[test]
fn ended_lease_on_many_devices_is_ended_once() {
    let held: Vec<_> = (0..4_096).map(|index| (10, index)).collect();
    let two = [flex(1), flex(1)];
    check([
        (0, join_holding(1, &two, &held), vec![end_lease(1, 10)]),
        (0, on_stream(11, join(1, &two)), vec![end_lease(1, 10)]),
        (0, on_stream(11, released(1, 10)), vec![]),
        (0, on_stream(12, join(1, &two)), vec![]),
    ]);
}
