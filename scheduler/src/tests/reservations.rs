//! Requests that have waited for long, whose devices others get only if they can be suspended.

use super::durable::{kept, moved, request_durable, restorable};
use super::reclaim::reclaimed;
use super::suspension::end_and_keep;
use super::tenants::{attach_of, kinds, queued_guaranteed, request_kind, set_policy};
use super::*;

/// Clients 1, 2 and 3 are of tenants of their own. Client 1 has one of two devices; client 2 waits for both
/// since 2 ms.
fn start() -> Vec<Step> {
    vec![
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, attach_of("c", 3), vec![]),
        (1, request_flex(1, 1), vec![granted_flex(1, 1, 0)]),
        (2, request_both(2, 2), vec![queued(2, 2, 1)]),
    ]
}

fn options() -> Options {
    Options {
        reserve_after: Duration::from_secs(60),
        half_life: Duration::ZERO,
        ..Options::default()
    }
}

/// A request for one device, which is not durable.
fn request_flex(id: u64, number: u64) -> Event {
    request_kind(id, number, 1, "flex", 0)
}

fn request_both(id: u64, number: u64) -> Event {
    request_kind(id, number, 2, "flex", 0)
}

fn granted_flex(id: u64, number: u64, index: u32) -> Command {
    granted(id, number, &[(1, index, exact(16))])
}

fn granted_both(id: u64, number: u64) -> Command {
    granted(id, number, &[(1, 0, exact(16)), (1, 1, exact(16))])
}

fn queued_reserved(client: u64, request: u64, position: u32) -> Command {
    queued_for(client, request, position, WaitReason::HasReservation)
}

fn queued_behind(client: u64, request: u64, position: u32) -> Command {
    queued_for(client, request, position, WaitReason::Reserved)
}

/// Returns whether a request has a reservation, and for which other one devices are reserved.
fn shown(engine: &Engine, lease: u64) -> (bool, Option<u64>) {
    let waiting = engine.waiting(LeaseId(lease)).expect("it waits");
    match waiting.waiter {
        Waiter::Request {
            has_reservation,
            reserved_for,
            ..
        } => (has_reservation, reserved_for.map(|lease| lease.0)),
        Waiter::Lease { .. } => panic!("{lease} is a lease"),
    }
}

#[test]
fn small_requests_do_not_pass_a_large_one_that_has_waited_for_long() {
    let steps = [
        // It has not waited for long.
        (60_001, request_flex(3, 3), vec![granted_flex(3, 3, 1)]),
        (
            60_002,
            release(3, 30),
            vec![end_lease(1, 30), queued_reserved(2, 2, 1)],
        ),
        (60_003, released(1, 30), vec![]),
        (60_004, request_flex(3, 4), vec![queued_behind(3, 4, 2)]),
    ];
    let engine = check_with(options(), start().into_iter().chain(steps));
    let engine = check_request_2_is_next(engine);
    let steps = [
        (80_000, release(2, 20), vec![end_lease(1, 20)]),
        (80_001, released(1, 20), vec![granted_flex(3, 4, 0)]),
    ];
    check_on(engine, steps);
}

/// Request 2 has a reservation, behind which request 4 waits, and gets both devices when lease 10 has left its own.
fn check_request_2_is_next(engine: Engine) -> Engine {
    assert_eq!(shown(&engine, 20), (true, None));
    assert_eq!(shown(&engine, 40), (false, Some(20)));
    let steps = [
        (70_000, release(1, 10), vec![end_lease(1, 10)]),
        (
            70_001,
            released(1, 10),
            vec![granted_both(2, 2), queued(3, 4, 1)],
        ),
    ];
    check_on(engine, steps)
}

#[test]
fn nothing_is_reserved_for_a_request_that_has_gone() {
    let steps = [
        (
            60_004,
            request_flex(3, 4),
            vec![queued_reserved(2, 2, 1), queued_behind(3, 4, 2)],
        ),
        (
            60_005,
            cancel(2, 2),
            vec![
                refused(2, 2, RefuseReason::Cancelled),
                granted_flex(3, 4, 1),
            ],
        ),
    ];
    check_with(options(), start().into_iter().chain(steps));
}

/// Tenant `c` has nothing, and `b` has a device: the request of `c` is next, and is not passed.
#[test]
fn a_request_of_a_tenant_with_less_comes_before() {
    let steps = [
        (0, join(1, &[exact(16), exact(16), exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, attach_of("c", 3), vec![]),
        (1, request_flex(1, 1), vec![granted_flex(1, 1, 0)]),
        (1, request_flex(2, 9), vec![granted_flex(2, 9, 1)]),
        (2, request_both(2, 2), vec![queued(2, 2, 1)]),
        (
            60_002,
            request_flex(3, 3),
            vec![granted_flex(3, 3, 2), queued_reserved(2, 2, 1)],
        ),
    ];
    check_with(options(), steps);
}

/// A durable lease gets the free device meanwhile. It is suspended once there are enough devices with its own,
/// and it has run for long enough; what is free is held back until then.
#[test]
fn a_lease_that_can_be_suspended_passes_and_gives_its_device_back() {
    let steps = [
        (
            61_000,
            request_durable(3, 3),
            vec![granted_flex(3, 3, 1), queued_reserved(2, 2, 1)],
        ),
        (61_001, restorable(3, 30, true), vec![]),
        (61_002, kept(1, &[(30, 1)]), vec![]),
        (62_000, release(1, 10), vec![end_lease(1, 10)]),
        (62_001, released(1, 10), vec![]),
        // The free device is held back.
        (62_002, request_durable(1, 4), vec![queued(1, 4, 2)]),
        (
            71_000,
            tick(),
            vec![end_and_keep(1, 30), reclaimed(3, 30, &[1])],
        ),
        (
            71_100,
            released(1, 30),
            vec![granted_both(2, 2), queued(1, 4, 1)],
        ),
        (80_000, release(2, 20), vec![end_lease(1, 20)]),
        // It goes on before other requests.
        (
            80_001,
            released(1, 20),
            vec![moved(3, 30, 1, 1, 0), granted_flex(1, 4, 1)],
        ),
    ];
    check_with(options(), start().into_iter().chain(steps));
}

/// It had its device before anything was reserved.
#[test]
fn a_lease_from_before_is_not_suspended() {
    let mut start = start();
    start[4] = (1, request_durable(1, 1), vec![granted_flex(1, 1, 0)]);
    let steps = [
        (3, restorable(1, 10, true), vec![]),
        (4, kept(1, &[(10, 1)]), vec![]),
        (
            61_000,
            request_durable(3, 3),
            vec![granted_flex(3, 3, 1), queued_reserved(2, 2, 1)],
        ),
        (100_000, request_flex(3, 4), vec![queued_behind(3, 4, 2)]),
    ];
    check_with(options(), start.into_iter().chain(steps));
}

/// Small requests of the same tenant count for it no more than those of others, as they have passed its large
/// one: it stays next.
#[test]
fn small_requests_of_a_tenant_do_not_keep_back_its_large_one() {
    let mut start = start();
    start[0] = (0, join(1, &[exact(16), exact(16), exact(16)]), vec![]);
    start[5] = (2, request_kind(2, 2, 3, "flex", 0), vec![queued(2, 2, 1)]);
    let steps = [
        (
            61_000,
            request_durable(2, 3),
            vec![granted_flex(2, 3, 1), queued_reserved(2, 2, 1)],
        ),
        // Tenant `c` has nothing, and `b` has a device, which has passed its own request.
        (61_001, request_durable(3, 4), vec![granted_flex(3, 4, 2)]),
    ];
    let engine = check_with(options(), start.into_iter().chain(steps));
    assert_eq!(shown(&engine, 20), (true, None));
}

/// Client 1 has a device until 100,001 ms at the latest, so the large request starts by then.
#[test]
fn a_lease_that_ends_in_time_passes() {
    let lasting = |id, number, seconds| {
        let demand = Demand {
            max_duration: Some(Duration::from_secs(seconds)),
            ..demand_of(1, Some("flex"))
        };
        request_for(id, number, demand)
    };
    let mut start = start();
    start[4] = (1, lasting(1, 1, 100), vec![granted_flex(1, 1, 0)]);
    let steps = [
        // Rounded up, it takes 65.5 s.
        (
            61_000,
            lasting(3, 3, 33),
            vec![queued_reserved(2, 2, 1), queued_behind(3, 3, 2)],
        ),
        // 16.4 s.
        (61_001, lasting(1, 4, 16), vec![granted_flex(1, 4, 1)]),
        (
            77_001,
            tick(),
            vec![end_lease(1, 40), ended(1, 40, EndReason::TimeOver)],
        ),
        (77_002, released(1, 40), vec![]),
        (
            100_001,
            tick(),
            vec![end_lease(1, 10), ended(1, 10, EndReason::TimeOver)],
        ),
        (
            100_002,
            released(1, 10),
            vec![granted_both(2, 2), queued(3, 3, 1)],
        ),
    ];
    check_with(options(), start.into_iter().chain(steps));
}

/// A lease that cannot be suspended has one of the devices that the tenant of the request is guaranteed.
#[test]
fn a_request_within_a_guarantee_has_a_reservation_too() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("flex", 2)]),
        ..TenantPolicy::default()
    };
    let steps = [
        (
            3,
            set_policy([("b", guaranteed)]),
            vec![queued_guaranteed(2, 2, 1)],
        ),
        (60_001, request_flex(3, 3), vec![granted_flex(3, 3, 1)]),
        (60_002, release(3, 30), vec![end_lease(1, 30)]),
        (60_003, released(1, 30), vec![]),
        (60_004, request_flex(3, 4), vec![queued_behind(3, 4, 2)]),
    ];
    check_request_2_is_next(check_with(options(), start().into_iter().chain(steps)));
}
