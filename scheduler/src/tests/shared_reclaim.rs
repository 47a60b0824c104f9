//! Leases with shares of devices that make room for others, or go on elsewhere.

use tensord_proto::share::DeviceShare;

use super::property::{Op, check_any};
use super::reclaim::reclaimed;
use super::shares::{
    GIB, granted_share, part, request_part, request_share, request_whole, with_share,
};
use super::suspension::{end_and_keep, hold, resume, suspend, suspended, waits_for};
use super::tenants::{attach_of, kinds, queued_guaranteed, set_policy};
use super::*;
use crate::device::Share;

/// Leases of tenant `a` with shares of both devices, which have snapshots; client 2 is of tenant `b`, which is
/// guaranteed one device.
fn borrowed_shares() -> Vec<Step> {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("flex", 1)]),
        ..TenantPolicy::default()
    };
    let share = |number, permille| request_part(1, number, permille, 0, Durability::Auto);
    let kept = durable::kept(1, &[(10, 1), (20, 1), (30, 1)]);
    let restorable = |lease| (1, durable::restorable(1, lease, true), vec![]);
    vec![
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (1, share(1, 600), vec![granted_share(1, 1, 0, part(600, 1))]),
        (1, share(2, 300), vec![granted_share(1, 2, 0, part(300, 2))]),
        (1, share(3, 900), vec![granted_share(1, 3, 1, part(900, 1))]),
        restorable(10),
        restorable(20),
        restorable(30),
        (2, kept, vec![]),
        (2, set_policy([("b", guaranteed)]), vec![]),
    ]
}

/// A lease of client 1 goes on with a share of the first device of worker 1.
fn moved_to_share(lease: u64, share: Option<DeviceShare>) -> Command {
    with_share(durable::moved(1, lease, 1, 1, 0), share)
}

/// The second device has fewer leases than the first.
#[test]
fn all_leases_of_a_shared_device_make_room_for_one_that_needs_all_of_it() {
    let steps = [
        (
            20_000,
            request_whole(2, 4),
            vec![
                end_and_keep(1, 30),
                reclaimed(1, 30, &[1]),
                queued_guaranteed(2, 4, 1),
            ],
        ),
        (
            20_001,
            released(1, 30),
            vec![granted(2, 4, &[(1, 1, exact(16))])],
        ),
    ];
    check(borrowed_shares().into_iter().chain(steps));
}

/// Of the shares that are enough, the fewest: the larger one of the first device, although the smaller is later.
/// The lease goes on beside others once there is room.
#[test]
fn a_share_makes_room_for_a_share_and_goes_on_later() {
    let steps = [
        (
            20_000,
            request_part(2, 4, 650, 10, Durability::Off),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued_guaranteed(2, 4, 1),
            ],
        ),
        (
            20_001,
            released(1, 10),
            vec![granted_share(
                2,
                4,
                0,
                Some(DeviceShare {
                    permille: 650,
                    memory_bytes: 10 * GIB,
                    lane: 1,
                }),
            )],
        ),
        (20_002, release(1, 20), vec![end_lease(1, 20)]),
        (20_003, released(1, 20), vec![]),
        (20_004, release(2, 40), vec![end_lease(1, 40)]),
        (
            20_005,
            released(1, 40),
            vec![moved_to_share(10, part(600, 1))],
        ),
    ];
    check(borrowed_shares().into_iter().chain(steps));
}

/// The request needs 65 % of a device, for which a lease of the first makes room that has just begun. So nobody
/// gets what is left of that device; the second one is for all.
#[test]
fn the_room_beside_a_lease_that_has_just_begun_is_held_back() {
    let share = Share {
        permille: 650,
        memory_bytes: 10 * GIB,
    };
    let steps = [
        (
            5_000,
            request_part(2, 4, 650, 10, Durability::Off),
            vec![queued_guaranteed(2, 4, 1)],
        ),
        (5_001, attach_of("c", 3), vec![]),
        (
            5_001,
            request_share(3, 5, 60),
            vec![granted_share(3, 5, 1, part(60, 2))],
        ),
        (5_002, request_share(3, 6, 60), vec![queued(3, 6, 2)]),
        (
            10_001,
            tick(),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1])],
        ),
        (
            10_002,
            released(1, 10),
            vec![
                granted_share(2, 4, 0, Some(share.in_lane(1))),
                queued(3, 6, 1),
            ],
        ),
    ];
    check(borrowed_shares().into_iter().chain(steps));
}

/// As before, for a request that needs all of a device, the second one: a share of it that somebody else gets would
/// have just begun in turn.
#[test]
fn the_room_of_a_device_that_is_needed_as_a_whole_is_held_back() {
    let steps = [
        (5_000, request_whole(2, 4), vec![queued_guaranteed(2, 4, 1)]),
        (5_001, attach_of("c", 3), vec![]),
        (
            5_001,
            request_share(3, 5, 60),
            vec![granted_share(3, 5, 0, part(60, 3))],
        ),
        (5_002, request_share(3, 6, 60), vec![queued(3, 6, 2)]),
        (
            10_001,
            tick(),
            vec![end_and_keep(1, 30), reclaimed(1, 30, &[1])],
        ),
        (
            10_002,
            released(1, 30),
            vec![granted(2, 4, &[(1, 1, exact(16))]), queued(3, 6, 1)],
        ),
    ];
    check(borrowed_shares().into_iter().chain(steps));
}

/// What the suspended lease leaves is enough for both.
#[test]
fn a_second_request_uses_what_the_first_leaves_of_a_device() {
    let share = |number, permille| request_part(2, number, permille, 0, Durability::Off);
    let steps = [
        (
            20_000,
            share(4, 500),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued_guaranteed(2, 4, 1),
            ],
        ),
        (20_001, share(5, 150), vec![queued_guaranteed(2, 5, 2)]),
        (
            20_002,
            released(1, 10),
            vec![
                granted_share(2, 4, 0, part(500, 1)),
                granted_share(2, 5, 0, part(150, 3)),
            ],
        ),
    ];
    check(borrowed_shares().into_iter().chain(steps));
}

/// Leases of clients 1 and 2 have shares of the device of worker 1, which is lost. Worker 2, which has other devices,
/// has their snapshots, and hands those of both over to worker 3 at the same time.
#[test]
fn shares_of_a_lost_worker_go_on_at_the_same_time() {
    let share = |id, permille| request_part(id, id, permille, 0, Durability::Auto);
    let lost_at_keeper = EndReason::NotReplaced {
        gone: Box::new(lost(1)),
        places: SnapshotPlaces::Keeper("w2".into()),
    };
    let waits = |client, lease| Command::Interrupted {
        client: ClientId(client),
        lease: LeaseId(lease),
        reason: lost_at_keeper.clone(),
    };
    let resumed = |client, lease| Command::Suspended {
        client: ClientId(client),
        lease: LeaseId(lease),
        waits_for: vec!["w2".into()],
        needs_all: false,
        cause: Some(lost(1)),
    };
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (0, attach(2), vec![]),
        (0, attach(3), vec![]),
        (1, share(1, 500), vec![granted_share(1, 1, 0, part(500, 1))]),
        (1, share(2, 300), vec![granted_share(2, 2, 0, part(300, 2))]),
        (1, durable::restorable(1, 10, true), vec![]),
        (1, durable::restorable(2, 20, true), vec![]),
        (
            2,
            join(2, &[flex(16)]),
            vec![durable::keep(10, 1, 2), durable::keep(20, 1, 2)],
        ),
        (3, durable::kept(1, &[(10, 2), (20, 2)]), vec![]),
        (4, worker_left(1), vec![waits(1, 10), waits(2, 20)]),
        (
            5,
            join(3, &[exact(16)]),
            vec![
                hold(2, 10),
                resumed(1, 10),
                hold(2, 20),
                resumed(2, 20),
                durable::keep(10, 2, 3),
                durable::keep(20, 2, 3),
            ],
        ),
    ];
    let engine = check(steps);
    let held = engine.held_back().values().flatten();
    let held = held.map(|(lease, share)| (lease.0, share.unwrap().permille));
    assert_eq!(held.collect::<Vec<_>>(), [(10, 500), (20, 300)]);
}

/// Tenant `b` has requests within its guarantee for two devices and for one. A worker leaves, so the first cannot be
/// granted any more and is refused. In the same event, the device of a lease that can be ended is held back for the second.
#[test]
fn room_is_held_back_for_the_next_request_when_the_first_is_refused() {
    let demand = |devices, share_permille, may_end| Demand {
        share_permille,
        may_end,
        ..demand_of(devices, Some("cuda"))
    };
    let request = |client, demand| Op::Request {
        client,
        demand,
        priority: 0,
    };
    check_any(vec![
        Op::WorkerLeft { worker: 1 },
        request(0, demand(1, None, false)),
        Op::Join {
            worker: 1,
            changed: false,
        },
        Op::Attach {
            client: 2,
            give_up: 0,
            outdated: 0,
        },
        request(0, demand(1, Some(250), true)),
        request(2, demand(2, None, false)),
        request(2, demand(1, None, false)),
        Op::SetPolicy { which: 1 },
        Op::WorkerLeft { worker: 2 },
    ]);
}

/// Lease 20 waits until an ended lease has left its half of the first device. A request counts on the other half, once
/// spot lease 40 has run for long enough; so more of the device is held back than will be left. What is held back for the
/// request does not reduce the room of lease 20, which came before. So the spot lease of the other device goes on.
#[test]
fn what_is_held_back_for_a_later_request_costs_an_earlier_lease_nothing() {
    let share = |permille, gib| Share {
        permille,
        memory_bytes: gib * GIB,
    };
    let request = |id, number, share: Share, durability, is_spot| {
        let demand = Demand {
            share_permille: Some(share.permille),
            memory_bytes: share.memory_bytes,
            durability,
            is_spot,
            ..demand_of(1, Some("flex"))
        };
        request_for(id, number, demand)
    };
    let devices = [exact(16), exact(8)];
    let granted = |id, number, index: u32, share: Share, lane| {
        let device = devices[index as usize].clone();
        let granted = granted(id, number, &[(1, index, device)]);
        with_share(granted, Some(share.in_lane(lane)))
    };
    let half = share(500, 5);
    let (off, auto) = (Durability::Off, Durability::Auto);
    let steps = [
        (0, join(1, &devices), vec![]),
        (0, attach(1), vec![]),
        (0, attach(2), vec![]),
        (
            1,
            request(1, 1, share(600, 4), auto, true),
            vec![granted(1, 1, 1, share(600, 4), 1)],
        ),
        (
            1,
            request(1, 2, half, auto, false),
            vec![granted(1, 2, 0, half, 1)],
        ),
        (
            1,
            request(1, 3, half, off, false),
            vec![granted(1, 3, 0, half, 2)],
        ),
        (1, durable::restorable(1, 10, true), vec![]),
        (1, durable::restorable(1, 20, true), vec![]),
        (2, durable::kept(1, &[(10, 1), (20, 1)]), vec![]),
        (3, suspend(20), vec![end_and_keep(1, 20), suspended(1, 20)]),
        (4, released(1, 20), vec![]),
        (
            20_000,
            request(1, 4, half, off, true),
            vec![granted(1, 4, 0, half, 1)],
        ),
        (20_001, release(1, 30), vec![end_lease(1, 30)]),
        (20_002, resume(20), vec![waits_for(1, 20, &[1])]),
        (
            20_003,
            request(2, 5, share(500, 9), off, false),
            vec![queued(2, 5, 1)],
        ),
        (
            20_004,
            released(1, 30),
            vec![moved_to_share(20, Some(half.in_lane(2)))],
        ),
        (
            30_000,
            tick(),
            vec![end_lease(1, 40), ended(1, 40, EndReason::Reclaimed)],
        ),
    ];
    check(steps);
}
