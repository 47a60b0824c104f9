//! Sequences of events around leases that go on elsewhere, each with what it once broke.

use super::found_sequences::{durable, spot, wait};
use super::property::{Op, check_with_policy, request};

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
