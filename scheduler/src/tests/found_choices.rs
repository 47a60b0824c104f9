//! Further sequences of events that the property tests have found: which leases make room for others, and which wait.

use super::property::{Op, check_any, check_with_policy, request};
use super::*;

/// Devices of a kind for a lease that can be suspended.
fn durable(devices: u32, kind: &str) -> Demand {
    Demand {
        durability: Durability::Auto,
        ..demand_of(devices, Some(kind))
    }
}

/// Two leases share a device, and another one has two devices: one lease makes room for a device, not the two.
#[test]
fn one_lease_with_two_devices_makes_room_and_not_two_with_shares() {
    let share = || Demand {
        share_permille: Some(250),
        ..durable(1, "flex")
    };
    let ops = [
        request(0, durable(1, "vulkan")),
        request(2, durable(2, "vulkan")),
        request(0, durable(2, "flex")),
        request(0, demand_of(1, None)),
        request(1, durable(1, "flex")),
        request(1, share()),
        request(0, share()),
        request(
            1,
            Demand {
                is_spot: true,
                ..demand_of(1, Some("flex"))
            },
        ),
        Op::Wait { millis: 10_000 },
        request(0, durable(1, "vulkan")),
        Op::Release { client: 1, nth: 14 },
        request(0, demand_of(2, Some("flex"))),
        Op::Finish {
            worker: 0,
            devices: u32::MAX,
        },
        Op::AllKept,
        request(2, durable(1, "flex")),
    ];
    check_with_policy(1, ops);
}

/// A spot lease has lost its worker, and another one has free devices. It does not go on there before a request of its
/// tenant within the guarantee, which waits until a second spot lease has run for long enough to be suspended.
#[test]
fn lost_spot_lease_does_not_go_on_elsewhere_before_a_request_of_its_tenant() {
    let spot = |kind| Demand {
        is_spot: true,
        ..durable(1, kind)
    };
    let ops = [
        request(0, durable(1, "flex")),
        request(0, spot("flex")),
        request(0, spot("vulkan")),
        Op::AllKept,
        request(0, durable(1, "flex")),
        Op::WorkerDisconnected { worker: 0 },
        Op::Wait { millis: 5_000 },
    ];
    check_with_policy(3, ops);
}

/// A lease with two devices makes room for a request of another tenant, and for one of its own tenant, before a spot lease
/// does for a third request. That one is within the guarantee of the tenant only since the first lease was suspended.
#[test]
fn request_comes_within_a_guarantee_when_a_lease_of_its_tenant_makes_room() {
    let share = |permille| Demand {
        share_permille: Some(permille),
        ..durable(1, "vulkan")
    };
    let spot = Demand {
        is_spot: true,
        ..share(250)
    };
    let ops = [
        Op::Leaving { worker: 0 },
        request(0, share(500)),
        Op::SetPolicy { which: 1 },
        Op::AllKept,
        request(0, durable(2, "flex")),
        request(0, durable(2, "vulkan")),
        request(0, share(250)),
        request(2, durable(1, "vulkan")),
        request(2, durable(1, "flex")),
        request(0, spot),
        request(0, durable(1, "flex")),
        request(0, durable(1, "flex")),
        Op::SetPolicy { which: 3 },
        request(0, durable(1, "vulkan")),
        request(1, share(250)),
        Op::AllKept,
        Op::SetPolicy { which: 2 },
        Op::Wait { millis: 10_000 },
    ];
    check_with_policy(1, ops);
}

/// A lease of two devices waits for these, one of which is not released yet. A later request cannot count on that one, and
/// a spot lease makes room for it.
#[test]
fn spot_lease_makes_room_for_a_request_after_a_lease_that_waits_for_what_is_being_released() {
    let spot = |kind| Demand {
        is_spot: true,
        ..durable(1, kind)
    };
    let ops = [
        Op::WorkerDisconnected { worker: 2 },
        request(0, durable(1, "flex")),
        request(0, durable(2, "vulkan")),
        Op::Wait { millis: 10_000 },
        request(2, spot("vulkan")),
        request(2, durable(2, "vulkan")),
        Op::SetPolicy { which: 2 },
        Op::AllKept,
        request(0, durable(1, "flex")),
        request(0, durable(1, "flex")),
        Op::SetPolicy { which: 3 },
        request(0, for_seconds(1, durable(1, "vulkan"))),
        Op::Wait { millis: 1497 },
        Op::SetPolicy { which: 1 },
        Op::Wait { millis: 1503 },
        Op::Finish {
            worker: 1,
            devices: u32::MAX,
        },
        Op::Wait { millis: 10_000 },
        request(0, durable(1, "vulkan")),
    ];
    check_with_policy(1, ops);
}

/// A share of a device, for a lease that can be suspended.
fn durable_share(permille: u32) -> Demand {
    Demand {
        share_permille: Some(permille),
        ..durable(1, "flex")
    }
}

/// The same for a lease that ends after this time.
fn for_seconds(seconds: u64, demand: Demand) -> Demand {
    Demand {
        max_duration: Some(Duration::from_secs(seconds)),
        ..demand
    }
}

fn as_spot(demand: Demand) -> Demand {
    Demand {
        is_spot: true,
        ..demand
    }
}

/// More is held back of a device than is left of it, as a spot lease will make room for the later of two requests.
#[test]
fn first_of_two_requests_has_a_share_to_come_of_what_is_held_back_for_both() {
    let ops = [
        request(0, durable(1, "flex")),
        request(1, durable(2, "flex")),
        request(0, as_spot(durable(1, "vulkan"))),
        request(0, durable_share(500)),
        request(0, durable(1, "flex")),
        request(0, durable(1, "vulkan")),
        request(0, as_spot(durable_share(500))),
        request(0, durable_share(500)),
        Op::Wait { millis: 10_000 },
        Op::AllKept,
        request(0, durable(1, "vulkan")),
        Op::Release { client: 0, nth: 26 },
        request(0, durable(1, "flex")),
        request(2, durable_share(250)),
        request(0, durable(1, "flex")),
        request(0, durable(1, "flex")),
    ];
    check_with_policy(1, ops);
}

/// A tenant is next until one of its requests is granted, so a spot lease makes room for a request of another tenant,
/// which is next after that.
#[test]
fn spot_lease_makes_room_for_the_request_of_a_tenant_that_is_next_later() {
    let any = |devices| Demand {
        durability: Durability::Auto,
        ..demand_of(devices, None)
    };
    let ops = [
        request(
            2,
            Demand {
                memory_bytes: 9 << 30,
                ..as_spot(demand_of(1, None))
            },
        ),
        request(2, any(4)),
        Op::Wait { millis: 5_000 },
        Op::Release { client: 2, nth: 5 },
        request(0, any(1)),
        Op::Wait { millis: 5_000 },
        request(2, durable(3, "flex")),
        request(2, any(4)),
        request(0, any(2)),
    ];
    check_with_policy(1, ops);
}

/// A share within the guarantee has the reservation, and a lease that may end passes it. Then the share is not within the
/// guarantee any more, and a larger request of the tenant, which comes before that lease, has the reservation.
#[test]
fn lease_passes_the_reservation_of_another_request_than_the_one_that_has_it_then() {
    let ops = [
        request(0, as_spot(durable(2, "flex"))),
        request(0, as_spot(demand_of(1, Some("flex")))),
        request(0, for_seconds(1, durable_share(250))),
        Op::Request {
            client: 0,
            demand: durable(2, "flex"),
            priority: 1,
        },
        request(0, durable_share(500)),
        request(
            0,
            Demand {
                may_end: true,
                ..durable(1, "flex")
            },
        ),
        request(1, durable(1, "flex")),
        Op::Wait { millis: 10_000 },
        Op::SetPolicy { which: 2 },
        request(0, durable_share(500)),
        Op::Wait { millis: 10_000 },
        Op::Release { client: 1, nth: 0 },
    ];
    check_with_policy(1, ops);
}

/// A request counts on a device of which no shares are leased. A spot lease ends for a second request, which needs a share,
/// and the first does not take that one's device instead: otherwise another spot lease would end.
#[test]
fn one_spot_lease_ends_for_a_share_after_a_request_that_counts_on_another_device() {
    let ops = [
        request(0, for_seconds(1, durable(1, "flex"))),
        request(0, as_spot(demand_of(1, Some("flex")))),
        request(0, as_spot(demand_of(2, Some("flex")))),
        Op::SetPolicy { which: 2 },
        request(0, durable(1, "flex")),
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(0, durable(1, "flex")),
        request(2, durable(1, "flex")),
        Op::Wait { millis: 10_000 },
        request(0, durable_share(250)),
    ];
    check_with_policy(1, ops);
}

/// A lease makes room for a larger request of its own tenant. That one stays next, although its tenant has less then.
#[test]
fn request_stays_next_for_which_a_lease_of_its_tenant_makes_room() {
    let any = |devices| Demand {
        durability: Durability::Auto,
        ..demand_of(devices, None)
    };
    let resume = Op::ResumeLease {
        nth: 0,
        by: Suspender::Administrator,
    };
    let ops = [
        request(1, as_spot(demand_of(1, None))),
        request(0, any(4)),
        request(
            0,
            Demand {
                share_permille: Some(250),
                ..demand_of(1, None)
            },
        ),
        request(0, durable(4, "vulkan")),
        Op::Wait { millis: 5_000 },
        request(0, durable(3, "vulkan")),
        Op::ReportIdle { worker: 0 },
        request(2, any(2)),
        Op::Wait { millis: 5_000 },
        request(2, any(1)),
        Op::Wait { millis: 5_000 },
        resume,
        Op::AllKept,
        Op::Release { client: 0, nth: 5 },
    ];
    check_with_policy(2, ops);
    let ops = [
        request(1, any(4)),
        request(1, any(3)),
        Op::Release { client: 1, nth: 20 },
        request(2, durable(2, "vulkan")),
        request(2, durable(2, "vulkan")),
        request(0, any(1)),
        request(2, durable(1, "vulkan")),
        Op::Wait { millis: 5_000 },
        Op::Finish {
            worker: 1,
            devices: u32::MAX,
        },
        Op::Work {
            worker: 0,
            leases: 0,
        },
        request(0, durable(1, "vulkan")),
        request(0, any(4)),
        Op::Wait { millis: 5_000 },
        request(0, demand_of(1, None)),
        Op::Join {
            worker: 2,
            changed: true,
        },
        Op::Wait { millis: 5_000 },
        Op::ReportIdle { worker: 2 },
        Op::WorkerDisconnected { worker: 0 },
        Op::AllKept,
        Op::Wait { millis: 5_000 },
    ];
    check_with_policy(0, ops);
}

/// A request within its guarantee has the reservation of most devices until it is granted. What was held back for a third
/// request is for the second one then, which has the reservation, and no spot lease makes room for it.
#[test]
fn what_is_reserved_for_a_request_is_not_held_back_for_a_later_one() {
    let ops = [
        request(2, durable(1, "flex")),
        request(0, for_seconds(1, durable(1, "flex"))),
        request(2, as_spot(durable(1, "vulkan"))),
        request(0, demand_of(2, Some("flex"))),
        Op::AllKept,
        Op::Release { client: 2, nth: 34 },
        request(0, durable(1, "vulkan")),
        request(0, durable(1, "vulkan")),
        request(0, durable(1, "flex")),
        request(2, durable(2, "flex")),
        Op::Wait { millis: 3_000 },
        request(
            0,
            Demand {
                memory_bytes: 9 << 30,
                ..demand_of(3, None)
            },
        ),
        Op::Release { client: 0, nth: 36 },
        request(2, durable(1, "flex")),
        Op::Wait { millis: 10_000 },
        Op::Finish {
            worker: 0,
            devices: u32::MAX,
        },
    ];
    check_with_policy(1, ops);
}

/// A lease makes room for a larger request of its own tenant. Without it, another request of the tenant is within the
/// guarantee, which has just changed, and has the reservation.
#[test]
fn lease_makes_room_for_a_request_that_has_no_reservation_then() {
    let ops = [
        request(2, durable(2, "flex")),
        request(2, durable_share(250)),
        request(0, durable_share(250)),
        Op::SetPolicy { which: 2 },
        request(0, durable(2, "flex")),
        request(0, for_seconds(8, durable_share(250))),
        request(0, durable(1, "vulkan")),
        request(2, durable(3, "flex")),
        Op::Wait { millis: 5_000 },
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(2, durable(1, "flex")),
        request(2, durable_share(500)),
        Op::ReportIdle { worker: 1 },
        Op::AllKept,
        Op::Wait { millis: 10_000 },
        Op::SetPolicy { which: 1 },
    ];
    check_with_policy(1, ops);
}

/// Leases of others make room for a request that is not held up by its tenant's limit alone, and not one spot lease of its
/// own, which would allow larger devices.
#[test]
fn two_leases_of_others_make_room_before_one_spot_lease_of_its_own() {
    let ops = [
        request(2, durable(1, "flex")),
        request(2, durable(1, "flex")),
        request(0, as_spot(durable(1, "flex"))),
        request(0, for_seconds(1, durable(1, "flex"))),
        request(2, durable(1, "flex")),
        request(2, durable(1, "flex")),
        Op::Join {
            worker: 3,
            changed: false,
        },
        Op::AllKept,
        Op::SetPolicy { which: 3 },
        Op::Wait { millis: 10_000 },
        request(0, durable(1, "vulkan")),
        request(0, as_spot(durable(1, "flex"))),
        request(0, durable(2, "flex")),
    ];
    check_with_policy(1, ops);
}

/// As [`lease_passes_the_reservation_of_another_request_than_the_one_that_has_it_then`], where the larger request has none
/// for a moment, as it could not get enough of the devices that are left.
#[test]
fn lease_passes_no_reservation_while_a_share_has_that_of_most_devices() {
    let finish = |worker| Op::Finish {
        worker,
        devices: u32::MAX,
    };
    let settle = || {
        let waited = [Op::AllKept, Op::Wait { millis: 10_000 }];
        waited.into_iter().chain((0..4).map(finish))
    };
    let first = [request(0, durable(1, "flex"))];
    let second = [
        request(0, as_spot(durable(3, "flex"))),
        Op::Release { client: 0, nth: 14 },
        request(2, durable_share(250)),
    ];
    let third = [
        request(0, durable_share(500)),
        Op::Request {
            client: 0,
            demand: durable(2, "flex"),
            priority: 1,
        },
        Op::SetPolicy { which: 2 },
    ];
    let fourth = [
        request(0, durable_share(500)),
        request(0, durable(1, "flex")),
    ];
    let ops = first.into_iter().chain(settle());
    let ops = ops.chain(second).chain(settle());
    let ops = ops.chain(third).chain(settle()).chain(settle());
    let ops = ops.chain(fourth).chain(settle()).chain(settle());
    check_with_policy(1, ops);
}

/// A lease with a share makes room for a request within a guarantee. One with two devices, which that request would have
/// too many of, does not: a request that waited before it has counted on the share already.
#[test]
fn a_share_makes_room_for_a_guarantee_and_not_a_lease_with_two_devices() {
    let share = || Demand {
        share_permille: Some(250),
        ..durable(1, "flex")
    };
    let wait = || Op::Wait { millis: 10_000 };
    let ops = [
        request(0, durable(2, "flex")),
        request(2, share()),
        request(0, durable(2, "flex")),
        request(2, durable(2, "flex")),
        wait(),
        request(0, durable(1, "flex")),
        request(0, share()),
        wait(),
        Op::AllKept,
        request(2, durable(1, "flex")),
        Op::Release { client: 2, nth: 51 },
    ];
    check_with_policy(1, ops);
}

/// A request has a reservation, and waits as its tenant would exceed its limit with it and an earlier one, which counts
/// on a device that its worker does not release. So the bound of the reservation does not hold.
#[test]
fn a_reservation_has_no_bound_while_an_earlier_request_counts_in_the_limit() {
    let for_a_second = |demand| Demand {
        max_duration: Some(Duration::from_secs(1)),
        ..demand
    };
    let vulkan = |permille| Demand {
        share_permille: Some(permille),
        ..durable(1, "vulkan")
    };
    let spot = |demand| Demand {
        is_spot: true,
        ..demand
    };
    let (flex, wait) = (|| durable(1, "flex"), || Op::Wait { millis: 10_000 });
    let attach = |client| Op::Attach {
        client,
        give_up: client,
        outdated: 0,
    };
    let ops = [
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(0, for_a_second(vulkan(501))),
        request(1, durable(3, "flex")),
        request(0, vulkan(500)),
        request(0, durable(2, "flex")),
        request(0, for_a_second(flex())),
        request(0, spot(durable(2, "vulkan"))),
        Op::AllKept,
        request(0, flex()),
        request(0, flex()),
        request(2, vulkan(501)),
        request(0, flex()),
        wait(),
        request(0, flex()),
        request(0, flex()),
        request(0, flex()),
        Op::SetPolicy { which: 3 },
        request(2, durable(1, "vulkan")),
        attach(1),
        request(0, flex()),
        attach(0),
        wait(),
        request(
            0,
            spot(Demand {
                durability: Durability::Off,
                ..durable(1, "vulkan")
            }),
        ),
        wait(),
        request(2, flex()),
    ];
    check_with_policy(1, ops);
}

/// Two requests of a tenant wait for devices that are being released, and a third one, of the same shape as the first,
/// comes later. It does not come before the second, for which a spot lease would have to make room then.
#[test]
fn requests_of_one_shape_do_not_come_before_an_earlier_one_of_another() {
    let flex = || durable(1, "flex");
    let spot = || Demand {
        is_spot: true,
        ..flex()
    };
    let for_a_second = Demand {
        max_duration: Some(Duration::from_secs(1)),
        ..flex()
    };
    let ops = [
        request(0, flex()),
        request(1, durable(3, "flex")),
        Op::Release { client: 1, nth: 1 },
        request(0, spot()),
        Op::AllKept,
        request(0, flex()),
        request(0, for_a_second),
        Op::Wait { millis: 10_000 },
        request(0, spot()),
        request(1, flex()),
    ];
    check_with_policy(2, ops);
}

/// A spot lease makes room for the last of four requests. The last has the shape of the first ones, and all the same comes
/// after the third, which has another shape.
#[test]
fn request_of_another_shape_comes_before_the_last_for_which_a_spot_lease_makes_room() {
    let flex = || durable(1, "flex");
    let later = |demand| Op::Request {
        client: 0,
        demand,
        priority: -1,
    };
    let ops = [
        request(1, durable(3, "flex")),
        Op::Attach {
            client: 0,
            give_up: 0,
            outdated: 0,
        },
        request(0, durable(1, "vulkan")),
        request(1, for_seconds(1, flex())),
        Op::Release { client: 1, nth: 19 },
        request(0, as_spot(flex())),
        request(1, flex()),
        later(Demand {
            may_end: true,
            ..durable(2, "flex")
        }),
        request(0, flex()),
        Op::AllKept,
        later(flex()),
        Op::Wait { millis: 10_000 },
    ];
    check_with_policy(2, ops);
}

/// A lease that may end passes a request with a reservation. That lease and a spot lease end for the request. Another
/// lease that may end has as many devices, and keeps them: it had them before there was the reservation.
#[test]
fn lease_from_before_the_reservation_does_not_end_for_it() {
    let off = |devices, kind: Option<&str>| Demand {
        durability: Durability::Off,
        ..demand_of(devices, kind)
    };
    let may_end = |devices| Demand {
        may_end: true,
        ..off(devices, None)
    };
    let for_any = Demand {
        durability: Durability::Continue,
        ..demand_of(7, None)
    };
    let broken = |worker, device| Op::ToggleBroken { worker, device };
    let join = |worker| Op::Join {
        worker,
        changed: false,
    };
    let ops = [
        request(0, off(1, None)),
        request(0, off(1, Some("cuda"))),
        request(1, may_end(3)),
        Op::WorkerDisconnected { worker: 2 },
        Op::WorkerLeft { worker: 2 },
        Op::ClientDisconnected { client: 0 },
        broken(3, 0),
        request(1, as_spot(off(1, Some("flex")))),
        broken(0, 1),
        request(1, for_any),
        join(2),
        Op::Suspend { millis: 5_000 },
        request(1, may_end(1)),
        Op::Oversleep { millis: 30_000 },
    ];
    check_any(ops.into());
}
