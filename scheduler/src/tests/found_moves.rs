//! Sequences of events around leases that go on elsewhere, each with what it once broke.

use super::found_sequences::{durable, spot, wait};
use super::property::{Op, check_with_policy, request};
use super::*;

/// A lost spot lease that waits for a request of its tenant does not go on at its keeper, which has a free
/// device.
#[test]
fn lost_spot_lease_with_snapshots_waits_for_a_request_of_its_tenant() {
    let flex = || durable(1, Some("flex"));
    let ops = [
        request(0, flex()),
        request(0, spot(durable(1, Some("vulkan")))),
        Op::AllKept,
        request(0, spot(flex())),
        request(0, flex()),
        Op::WorkerDisconnected { worker: 0 },
        wait(5_000),
    ];
    check_with_policy(3, ops);
}

/// A lost spot lease waits for a request of its tenant, and its keeper drains: the keeper hands the snapshots over.
#[test]
fn lost_spot_lease_that_waits_for_a_request_leaves_a_keeper_that_drains() {
    let (flex, vulkan) = (|| durable(1, Some("flex")), || durable(1, Some("vulkan")));
    let large = Demand {
        memory_bytes: 16 << 30,
        ..flex()
    };
    let release = |nth| Op::Release { client: 1, nth };
    let ops = [
        // Worker 1 ends leases on its devices of kind flex, so the others get those of worker 0.
        request(1, flex()),
        release(0),
        request(1, flex()),
        release(1),
        request(2, vulkan()),
        request(0, spot(vulkan())),
        request(0, spot(flex())),
        Op::AllKept,
        request(0, large),
        Op::WorkerDisconnected { worker: 2 },
        wait(5_000),
        Op::Drain {
            worker: 1,
            is_drained: true,
        },
    ];
    check_with_policy(3, ops);
}

/// A worker of a lease drains, another one has no stream, and other workers have the snapshots of both parts and free
/// devices: the lease goes on there at once.
#[test]
fn lease_leaves_a_worker_that_drains_while_another_one_is_away() {
    let (flex, two) = (|| durable(1, Some("flex")), || durable(2, Some("vulkan")));
    let for_a_second = Demand {
        max_duration: Some(Duration::from_secs(1)),
        ..two()
    };
    let ops = [
        Op::ClientDisconnected { client: 2 },
        request(0, flex()),
        request(0, for_a_second),
        request(2, flex()),
        wait(10_000),
        request(0, flex()),
        request(0, flex()),
        request(0, flex()),
        request(2, flex()),
        Op::Join {
            worker: 3,
            changed: false,
        },
        Op::MoveLease { nth: 0 },
        request(0, two()),
        request(0, flex()),
        Op::AllKept,
        Op::WorkerDisconnected { worker: 3 },
        Op::Finish {
            worker: 1,
            devices: u32::MAX,
        },
        Op::Leaving { worker: 0 },
    ];
    check_with_policy(1, ops);
}
