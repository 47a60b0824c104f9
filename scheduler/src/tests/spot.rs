//! Spot leases, which come after all others and give their devices to any other request.

use super::durable::{
    granted_exact, interrupted, keep, kept, kept_parts, moved, moved_to, request_durable_of,
    restorable,
};
use super::reclaim::reclaimed;
use super::several_workers::{drop_part, keep_each_other, waits_for_both};
use super::suspension::{end_and_keep, resume, suspend, suspended, waits_for};
use super::tenants::{attach_of, kinds, limit_of_16_gib, request_kind, set_policy};
use super::*;

fn spot(id: u64, number: u64, durability: Durability) -> Event {
    demand(id, number, durability, true)
}

fn ordinary(id: u64, number: u64) -> Event {
    demand(id, number, Durability::Off, false)
}

fn demand(id: u64, number: u64, durability: Durability, is_spot: bool) -> Event {
    let demand = Demand {
        durability,
        is_spot,
        ..demand_of(1, Some("flex"))
    };
    request_for(id, number, demand)
}

/// Client 1 of tenant `a` has the only device by a spot lease since 1 ms; client 2 is of tenant `a`, too, and
/// client 3 of tenant `b`.
fn start(durability: Durability) -> Vec<Step> {
    vec![
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("a", 2), vec![]),
        (0, attach_of("b", 3), vec![]),
        (1, spot(1, 1, durability), vec![granted_exact(1, 1, 1, 0)]),
    ]
}

fn start_with_snapshots() -> Vec<Step> {
    let mut steps = start(Durability::Auto);
    steps.push((1, restorable(1, 10, true), vec![]));
    steps.push((2, kept(1, &[(10, 1)]), vec![]));
    steps
}

/// A request of the same tenant gets the device, and the spot lease goes on after all other requests.
#[test]
fn a_spot_lease_makes_room_for_any_other_request() {
    let steps = [
        (20_000, spot(3, 2, Durability::Auto), vec![queued(3, 2, 1)]),
        (
            20_001,
            ordinary(2, 3),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued(2, 3, 1),
                queued(3, 2, 2),
            ],
        ),
        (
            20_002,
            released(1, 10),
            vec![granted_exact(2, 3, 1, 0), queued(3, 2, 1)],
        ),
        (
            20_003,
            ordinary(3, 4),
            vec![queued(3, 4, 1), queued(3, 2, 2)],
        ),
        (20_004, release(2, 30), vec![end_lease(1, 30)]),
        (
            20_005,
            released(1, 30),
            vec![granted_exact(3, 4, 1, 0), queued(3, 2, 1)],
        ),
        (20_006, release(3, 40), vec![end_lease(1, 40)]),
        (20_007, released(1, 40), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(start_with_snapshots().into_iter().chain(steps));
}

/// As many requests as are looked at first wait for a kind of which no spot lease has a device.
#[test]
fn a_spot_lease_makes_room_behind_requests_that_it_cannot_serve() {
    let mut start = start_with_snapshots();
    start[0] = (0, join(1, &[exact(16), cuda(80)]), vec![]);
    let taken = granted(3, 3, &[(1, 1, cuda(80))]);
    let mut steps = vec![(3, request_kind(3, 3, 1, "cuda", 0), vec![taken])];
    steps.extend((1..=16).map(|position| {
        let number = 100 + u64::from(position);
        let queued = queued(3, number, position);
        (4, request_kind(3, number, 1, "cuda", 0), vec![queued])
    }));
    let makes_room = vec![
        end_and_keep(1, 10),
        reclaimed(1, 10, &[1]),
        queued(3, 5, 17),
    ];
    steps.push((20_000, ordinary(3, 5), makes_room));
    check(start.into_iter().chain(steps));
}

/// Neither one that is not durable nor one that should have snapshots for long.
#[test]
fn a_spot_lease_that_cannot_be_suspended_ends() {
    let over = ended(1, 10, EndReason::Reclaimed);
    let ends_at = |durability, at: u64| {
        let steps = [
            (2, ordinary(2, 3), vec![queued(2, 3, 1)]),
            (at, tick(), vec![end_lease(1, 10), over.clone()]),
            (at + 1, released(1, 10), vec![granted_exact(2, 3, 1, 0)]),
        ];
        check(start(durability).into_iter().chain(steps));
    };
    ends_at(Durability::Off, 10_001);
    ends_at(Durability::Auto, 70_001);
}

#[test]
fn a_spot_lease_is_within_no_guarantee() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("flex", 1)]),
        ..TenantPolicy::default()
    };
    let steps = [
        (3, set_policy([("a", guaranteed)]), vec![]),
        (
            20_000,
            ordinary(3, 2),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1]), queued(3, 2, 1)],
        ),
    ];
    check(start_with_snapshots().into_iter().chain(steps));
}

/// Tenant `a` has two devices by spot leases, `b` one by another lease: `a` has the smaller share.
#[test]
fn a_spot_lease_counts_a_quarter() {
    let devices = [exact(16), exact(16), exact(16)];
    let steps = [
        (0, join(1, &devices), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (
            1,
            spot(1, 1, Durability::Off),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (
            1,
            spot(1, 2, Durability::Off),
            vec![granted_exact(1, 2, 1, 1)],
        ),
        (1, ordinary(2, 3), vec![granted_exact(2, 3, 1, 2)]),
        (2, ordinary(2, 4), vec![queued(2, 4, 1)]),
        (2, ordinary(1, 5), vec![queued(1, 5, 1), queued(2, 4, 2)]),
    ];
    check(steps);
}

/// Lease 10 of tenant `a` is not a spot lease, and was suspended and resumed: it gets the device of the spot lease.
#[test]
fn a_spot_lease_makes_room_for_a_lease_that_was_resumed() {
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (
            1,
            demand(1, 1, Durability::Auto, false),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (1, restorable(1, 10, true), vec![]),
        (2, kept(1, &[(10, 1)]), vec![]),
        (3, suspend(10), vec![end_and_keep(1, 10), suspended(1, 10)]),
        (4, released(1, 10), vec![]),
        (
            5,
            spot(2, 2, Durability::Auto),
            vec![granted_exact(2, 2, 1, 0)],
        ),
        (5, restorable(2, 20, true), vec![]),
        (6, kept(1, &[(20, 1)]), vec![]),
        (7, resume(10), vec![waits_for(1, 10, &[1])]),
        (
            10_005,
            tick(),
            vec![end_and_keep(1, 20), reclaimed(2, 20, &[1])],
        ),
        (10_006, released(1, 20), vec![moved(1, 10, 1, 1, 0)]),
        (10_007, release(1, 10), vec![end_lease(1, 10)]),
        (10_008, released(1, 10), vec![moved(2, 20, 1, 1, 0)]),
    ];
    check(steps);
}

/// Lease 10 needs two devices of a worker. Worker 2 keeps its snapshots, and has one free device and one of a spot
/// lease, which ends for it; nobody gets the free one meanwhile.
#[test]
fn a_spot_lease_makes_room_for_a_lost_lease() {
    let two = Demand {
        durability: Durability::Auto,
        ..demand_of(2, Some("flex"))
    };
    let steps = [
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (
            1,
            request_for(1, 1, two),
            vec![granted(1, 1, &[(1, 0, exact(16)), (1, 1, exact(16))])],
        ),
        (1, restorable(1, 10, true), vec![]),
        (2, join(2, &[exact(16), exact(16)]), vec![keep(10, 1, 2)]),
        (3, kept(1, &[(10, 2)]), vec![]),
        (
            4,
            spot(2, 2, Durability::Off),
            vec![granted_exact(2, 2, 2, 0)],
        ),
        (5, worker_left(1), vec![interrupted(1, 10, 1, 2)]),
        (6, ordinary(2, 3), vec![queued(2, 3, 1)]),
        (
            10_004,
            tick(),
            vec![end_lease(2, 20), ended(2, 20, EndReason::Reclaimed)],
        ),
        (
            10_005,
            released(2, 20),
            vec![moved_to(1, 10, 1, 2, &[0, 1])],
        ),
    ];
    check(steps);
}

/// Lease 10 has a part of 4 devices and one of 8, and waits as spot leases have all devices of worker 1, which has 4,
/// and of worker 2, which has 8 and could make room for the part of 4 first in the second case.
#[test]
fn spot_leases_make_room_for_each_part_of_a_lease() {
    let of_worker = |worker: u64| {
        let count = if worker == 1 { 4 } else { 8 };
        (0..count).map(move |index| (worker, index, exact(16)))
    };
    let both: Vec<_> = of_worker(1).chain(of_worker(2)).collect();
    let spot_of = |number, devices| {
        let demand = Demand {
            is_spot: true,
            ..demand_of(devices, Some("flex"))
        };
        request_for(2, number, demand)
    };
    let spot_at = |worker: u64| {
        let devices: Vec<_> = of_worker(worker).collect();
        let request = spot_of(worker + 1, u32::try_from(devices.len()).unwrap());
        (request, vec![granted(2, worker + 1, &devices)])
    };
    let mut commands = vec![granted(1, 1, &both)];
    commands.extend(keep_each_other(1, 2));
    let start = [
        (0, join(1, &vec![exact(16); 4]), vec![]),
        (0, join(2, &vec![exact(16); 8]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (1, request_durable_of(12, 1, 1), commands),
        (1, restorable(1, 10, true), vec![]),
        (2, kept(1, &[(10, 1)]), vec![]),
        (2, kept_parts(2, &[(10, 1, 2)]), vec![]),
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
        (4, released(2, 10), vec![]),
    ];
    for [first, second] in [[1, 2], [2, 1]] {
        let at = |worker: u64, now| {
            let (request, commands) = spot_at(worker);
            (now, request, commands)
        };
        let is_over = |lease| ended(2, lease, EndReason::Reclaimed);
        let steps = [
            at(first, 5),
            at(second, 6),
            (7, resume(10), vec![waits_for_both()]),
            (
                10_006,
                tick(),
                vec![end_lease(1, 20), is_over(20), end_lease(2, 30), is_over(30)],
            ),
        ];
        check(start.clone().into_iter().chain(steps));
    }
}

/// Tenant `a` may have one device.
fn limit_a() -> Event {
    let limited = TenantPolicy {
        limit: TenantLimit {
            devices: kinds(&[("flex", 1)]),
            memory_bytes: None,
        },
        ..TenantPolicy::default()
    };
    set_policy([("a", limited)])
}

/// As [`start_with_snapshots`], with a second device and the limit.
fn start_with_limit() -> Vec<Step> {
    let mut steps = start_with_snapshots();
    steps[0] = (0, join(1, &[exact(16), exact(16)]), vec![]);
    steps.push((2, limit_a(), vec![]));
    steps
}

/// The free device is for the request, which the spot lease keeps waiting as both count towards the limit.
#[test]
fn a_spot_lease_makes_room_within_the_limit_of_its_tenant() {
    let steps = [
        (
            20_000,
            ordinary(2, 3),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                granted_exact(2, 3, 1, 1),
            ],
        ),
        (20_001, released(1, 10), vec![]),
        (
            20_002,
            release(2, 30),
            vec![end_lease(1, 30), moved(1, 10, 1, 1, 0)],
        ),
    ];
    check(start_with_limit().into_iter().chain(steps));
}

#[test]
fn a_spot_lease_that_has_just_begun_runs_for_a_while_in_spite_of_the_limit() {
    let mut start = start_with_limit();
    start[0] = (0, join(1, &[exact(16), exact(16), exact(16)]), vec![]);
    let steps = [
        (3, ordinary(3, 2), vec![granted_exact(3, 2, 1, 1)]),
        (
            5_000,
            ordinary(2, 3),
            vec![queued_for(2, 3, 1, WaitReason::TenantLimit)],
        ),
        // The free device is held back.
        (5_001, ordinary(3, 4), vec![queued(3, 4, 2)]),
        (
            10_001,
            tick(),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                granted_exact(2, 3, 1, 2),
                queued(3, 4, 1),
            ],
        ),
        (10_002, released(1, 10), vec![granted_exact(3, 4, 1, 0)]),
    ];
    check(start.into_iter().chain(steps));
}

/// Tenant `b` has a spot lease, too: that of the limited tenant is suspended, and its device is enough.
#[test]
fn a_limited_request_gets_the_device_of_its_own_tenants_spot_lease() {
    let steps = [
        (
            3,
            spot(3, 2, Durability::Auto),
            vec![granted_exact(3, 2, 1, 1)],
        ),
        (3, restorable(3, 20, true), vec![]),
        (3, kept(1, &[(10, 1), (20, 1)]), vec![]),
        (
            20_000,
            ordinary(2, 3),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1]), queued(2, 3, 1)],
        ),
        (20_001, released(1, 10), vec![granted_exact(2, 3, 1, 0)]),
    ];
    check(start_with_limit().into_iter().chain(steps));
}

/// A lease of another tenant has the device that the request needs.
#[test]
fn a_spot_lease_is_not_suspended_in_vain_for_a_limited_request() {
    let cuda_request = |id, number| request_for(id, number, demand_of(1, Some("cuda")));
    let limited = TenantPolicy {
        limit: limit_of_16_gib(),
        ..TenantPolicy::default()
    };
    let mut start = start_with_snapshots();
    start[0] = (0, join(1, &[exact(16), cuda(16)]), vec![]);
    let steps = [
        (2, set_policy([("a", limited)]), vec![]),
        (
            3,
            cuda_request(3, 2),
            vec![granted(3, 2, &[(1, 1, cuda(16))])],
        ),
        (
            20_000,
            cuda_request(2, 3),
            vec![queued_for(2, 3, 1, WaitReason::TenantLimit)],
        ),
        // Once it is free, the spot lease goes.
        (
            20_001,
            release(3, 20),
            vec![
                end_lease(1, 20),
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued(2, 3, 1),
            ],
        ),
        (
            20_002,
            released(1, 20),
            vec![granted(2, 3, &[(1, 1, cuda(16))])],
        ),
    ];
    check(start.into_iter().chain(steps));
}

/// The device of worker 2 is the only one at which lease 10 could go on, and that of another spot lease, which ends for
/// a request.
#[test]
fn a_lost_spot_lease_comes_after_requests() {
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (
            1,
            spot(1, 1, Durability::Auto),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (1, restorable(1, 10, true), vec![]),
        (2, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (3, kept(1, &[(10, 2)]), vec![]),
        (
            4,
            spot(2, 2, Durability::Off),
            vec![granted_exact(2, 2, 2, 0)],
        ),
        (5, worker_left(1), vec![interrupted(1, 10, 1, 2)]),
        (
            20_000,
            ordinary(2, 3),
            vec![
                end_lease(2, 20),
                ended(2, 20, EndReason::Reclaimed),
                queued(2, 3, 1),
            ],
        ),
        (20_001, released(2, 20), vec![granted_exact(2, 3, 2, 0)]),
        (20_002, release(2, 30), vec![end_lease(2, 30)]),
        (20_003, released(2, 30), vec![moved_to(1, 10, 1, 2, &[0])]),
    ];
    check(steps);
}

/// The last spot lease makes room for a request for both devices. Another request for a spot lease does not get the one
/// that is free first.
#[test]
fn requests_for_spot_leases_wait_while_devices_are_released_for_others() {
    let steps = [
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (
            1,
            spot(1, 1, Durability::Off),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (1, ordinary(1, 2), vec![granted_exact(1, 2, 1, 1)]),
        (
            20_000,
            request_kind(2, 3, 2, "flex", 0),
            vec![queued(2, 3, 1)],
        ),
        (20_000, spot(1, 4, Durability::Off), vec![queued(1, 4, 2)]),
        (
            20_001,
            release(1, 20),
            vec![
                end_lease(1, 20),
                end_lease(1, 10),
                ended(1, 10, EndReason::Reclaimed),
            ],
        ),
        (20_002, released(1, 20), vec![]),
        (
            20_003,
            released(1, 10),
            vec![
                granted(2, 3, &[(1, 0, exact(16)), (1, 1, exact(16))]),
                queued(1, 4, 1),
            ],
        ),
    ];
    check(steps);
}
