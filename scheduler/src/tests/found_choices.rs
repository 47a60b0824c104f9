//! Sequences of events that the property tests have found, in which the wrong leases made room for others.

use super::property::{Op, check_with_policy, request};
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
