//! Sequences of events that the property tests have found, each with what it once broke.

use super::actions::KeptRecords;
use super::property::{Op, attach_client_2, check_any, check_with_policy, request};
use super::*;

/// Devices of a kind, or of any, for a lease that can be suspended.
pub(super) fn durable(devices: u32, kind: Option<&str>) -> Demand {
    Demand {
        durability: Durability::Auto,
        ..demand_of(devices, kind)
    }
}

fn durable_share(permille: u32) -> Demand {
    Demand {
        share_permille: Some(permille),
        ..durable(1, Some("flex"))
    }
}

pub(super) fn spot(demand: Demand) -> Demand {
    Demand {
        is_spot: true,
        ..demand
    }
}

pub(super) fn wait(millis: u64) -> Op {
    Op::Wait { millis }
}

/// A worker's devices have been released from all leases that have ended.
fn finish(worker: usize) -> Op {
    Op::Finish {
        worker,
        devices: u32::MAX,
    }
}

/// The sessions of a lease in a store may use what the devices had when their worker joined last.
#[test]
fn worker_of_a_stored_lease_comes_back_with_other_devices_twice() {
    let demand = Demand {
        durability: Durability::Auto,
        ..demand_of(1, None)
    };
    check_any(vec![
        request(0, demand),
        Op::WorkerDisconnected { worker: 0 },
        Op::SnapshotsKept {
            worker: 1,
            all: true,
        },
        Op::Join {
            worker: 1,
            changed: true,
        },
        wait(5_000),
        Op::Join {
            worker: 1,
            changed: false,
        },
    ]);
}

/// One of two workers is lost when its new keeper has no snapshots yet, and the one before has them. The
/// first requests determine the number of the last, and with it what worker 0 reports of its lease.
#[test]
fn worker_is_lost_while_its_keeper_is_replaced() {
    let request = |client, devices, kind: Option<&str>, durability| {
        let demand = Demand {
            durability,
            ..demand_of(devices, kind)
        };
        request(client, demand)
    };
    check_any(vec![
        request(0, 1, Some("flex"), Durability::Off),
        request(0, 4, Some("cuda"), Durability::Off),
        request(2, 1, None, Durability::Off),
        request(0, 1, None, Durability::Off),
        request(0, 2, None, Durability::Exact),
        Op::SnapshotsKept {
            worker: 0,
            all: true,
        },
        Op::Join {
            worker: 3,
            changed: false,
        },
        Op::Join {
            worker: 0,
            changed: true,
        },
    ]);
}

/// At the end, the worker that gets the snapshots of a lease that waits is cut off as well.
#[test]
fn worker_is_cut_off_while_it_gets_snapshots() {
    let request = |devices, durability| {
        let demand = Demand {
            durability,
            ..demand_of(devices, None)
        };
        request(0, demand)
    };
    check_any(vec![
        request(1, Durability::Auto),
        wait(5_000),
        Op::SnapshotsKept {
            worker: 1,
            all: true,
        },
        request(2, Durability::Off),
        Op::WorkerDisconnected { worker: 1 },
        Op::Wait { millis: 0 },
        Op::Join {
            worker: 3,
            changed: false,
        },
        Op::Drain {
            worker: 1,
            is_drained: false,
        },
    ]);
}

/// Another worker has the snapshots of one of them only.
#[test]
fn both_workers_of_a_lease_are_lost_at_once() {
    let demand = Demand {
        durability: Durability::Exact,
        ..demand_of(3, None)
    };
    check_any(vec![
        request(0, demand),
        Op::SnapshotsKept {
            worker: 0,
            all: true,
        },
        Op::WorkerDisconnected { worker: 1 },
        Op::WorkerDisconnected { worker: 0 },
        wait(5_000),
    ]);
}

/// A lost lease waits for its snapshots at a device of which a request with a reservation has more held back than is
/// left: the request counts on a lease there that makes room. The snapshots go on being handed over.
#[test]
fn a_lost_lease_keeps_its_room_beside_a_later_reservation() {
    let durable = |client, devices, kind: &str, share_permille| {
        let demand = Demand {
            share_permille,
            ..durable(devices, Some(kind))
        };
        request(client, demand)
    };
    let not_durable = Demand {
        share_permille: Some(250),
        ..demand_of(1, Some("vulkan"))
    };
    let ops = [
        durable(0, 3, "flex", None),
        request(0, not_durable),
        durable(2, 1, "vulkan", Some(1)),
        durable(0, 2, "vulkan", None),
        durable(1, 1, "vulkan", Some(500)),
        durable(1, 1, "vulkan", Some(250)),
        Op::AllKept,
        durable(0, 1, "flex", None),
        Op::WorkerDisconnected { worker: 0 },
        durable(1, 1, "flex", None),
        wait(10_000),
        wait(10_000),
        durable(0, 1, "vulkan", Some(250)),
        wait(10_000),
        Op::Release { client: 1, nth: 20 },
    ];
    check_with_policy(1, ops);
}

/// After a restart of the scheduler, a worker joins with other devices than a lease has got there, and leaves.
#[test]
fn worker_joins_another_scheduler_with_other_devices() {
    let restart = |sessions_closed| Op::Restart {
        sessions_closed,
        kept: KeptRecords::All,
    };
    let attach = |client| Op::Attach {
        client,
        give_up: 0,
        outdated: 0,
    };
    let join = |worker, changed| Op::Join { worker, changed };
    let any = |devices, durability| Demand {
        durability,
        ..demand_of(devices, None)
    };
    check_any(vec![
        restart(false),
        attach(2),
        attach(1),
        join(1, false),
        request(1, any(2, Durability::Off)),
        join(2, false),
        request(1, any(5, Durability::Continue)),
        request(2, any(1, Durability::Continue)),
        join(3, true),
        restart(true),
        join(3, false),
        attach(2),
        join(0, false),
        Op::WorkerLeft { worker: 3 },
    ]);
}

/// At the end, the worker that gets the snapshots of a lease that waits has no stream for a moment, and others have
/// free devices.
#[test]
fn handover_goes_on_although_others_have_free_devices() {
    let request = |devices, kind| request(0, durable(devices, kind));
    let ops = [
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(1, Some("vulkan")),
        wait(5_000),
        Op::AllKept,
        request(4, Some("vulkan")),
        request(3, None),
        request(4, None),
        Op::AllReportIdle,
        Op::ResumeLease {
            nth: 63,
            by: Suspender::Administrator,
        },
        finish(0),
        request(2, None),
        wait(5_000),
        request(1, None),
        Op::AllKept,
        finish(2),
        Op::Join {
            worker: 0,
            changed: false,
        },
        finish(0),
    ];
    check_with_policy(1, ops);
}

/// A grant beyond guarantees brings another request within that of its tenant, for which a device is free.
#[test]
fn grant_beyond_guarantees_brings_a_request_within() {
    let flex = |devices| durable(devices, Some("flex"));
    let not_durable = demand_of(1, Some("flex"));
    let ops = [
        request(0, flex(3)),
        Op::WorkerDisconnected { worker: 1 },
        request(2, durable(1, Some("vulkan"))),
        request(0, flex(1)),
        request(2, flex(3)),
        request(0, flex(2)),
        Op::Release { client: 2, nth: 13 },
        request(2, flex(1)),
        request(0, flex(1)),
        wait(15_000),
        Op::AllKept,
        request(0, durable(1, None)),
        request(0, durable(1, None)),
        request(0, durable(1, None)),
        wait(5_000),
        Op::Release { client: 0, nth: 30 },
        request(2, not_durable),
        finish(0),
    ];
    check_with_policy(2, ops);
}

/// A grant brings a request within its tenant's guarantee, for which the share of a device has to be held back that a
/// lease can make room for.
#[test]
fn share_is_held_back_for_a_request_that_a_grant_brings_within_the_guarantee() {
    let flex = |devices| durable(devices, Some("flex"));
    let short = Demand {
        durability: Durability::Off,
        max_duration: Some(Duration::from_secs(1)),
        ..durable_share(250)
    };
    let first = Op::Request {
        client: 2,
        demand: flex(2),
        priority: 1,
    };
    let ops = [
        request(0, flex(2)),
        request(0, flex(1)),
        Op::SetPolicy { which: 2 },
        request(2, flex(1)),
        request(0, durable_share(250)),
        request(0, short),
        request(0, spot(durable_share(250))),
        request(2, durable_share(500)),
        first,
        request(2, durable_share(250)),
        wait(10_000),
        finish(0),
    ];
    check_with_policy(1, ops);
}

/// A device of a spot lease is held back for a request, which then gets another one, as what was reserved for a request
/// before it is not any more.
#[test]
fn spot_leases_go_on_beside_one_whose_device_a_request_does_not_need() {
    let vulkan = |devices| durable(devices, Some("vulkan"));
    let flex = |devices| durable(devices, Some("flex"));
    let share = Demand {
        share_permille: Some(250),
        ..vulkan(1)
    };
    let last = Op::Request {
        client: 0,
        demand: flex(1),
        priority: -1,
    };
    let ops = [
        request(0, spot(durable_share(250))),
        request(0, spot(flex(1))),
        request(0, flex(2)),
        request(2, vulkan(1)),
        request(2, vulkan(1)),
        request(0, spot(durable_share(250))),
        request(0, spot(durable_share(250))),
        Op::SetPolicy { which: 3 },
        request(0, share),
        wait(10_000),
        request(0, vulkan(1)),
        Op::AllKept,
        last,
        request(0, flex(1)),
        finish(1),
        wait(10_000),
        Op::SetPolicy { which: 2 },
    ];
    check_with_policy(1, ops);
}

/// A worker comes back with fewer devices while it has yet to release a lease from one that it had.
#[test]
fn worker_comes_back_without_the_device_of_a_lease_that_it_has_to_end() {
    let ops = [
        request(0, durable(3, None)),
        request(0, durable(2, None)),
        request(0, durable(1, None)),
        request(0, durable(2, Some("vulkan"))),
        Op::AllKept,
        Op::Join {
            worker: 1,
            changed: true,
        },
        request(0, durable(1, None)),
        finish(0),
    ];
    check_with_policy(1, ops);
}

/// A request gets within a guarantee by a new policy, and a later one of its tenant must not take a device of those that
/// were reserved for it.
#[test]
fn request_keeps_its_reservation_when_it_comes_within_a_guarantee() {
    let any = |devices, durability| Demand {
        durability,
        ..demand_of(devices, None)
    };
    let share = Demand {
        share_permille: Some(250),
        ..demand_of(1, None)
    };
    check_any(vec![
        Op::Leaving { worker: 0 },
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(0, any(4, Durability::Off)),
        request(0, any(1, Durability::Continue)),
        attach_client_2(),
        Op::SetPriority {
            nth: 0,
            priority: 0,
        },
        request(2, any(3, Durability::Exact)),
        request(0, share),
        wait(3_000),
        request(2, any(3, Durability::Off)),
        Op::SetPolicy { which: 2 },
    ]);
}

/// A request within a guarantee counts on a device, for which a spot lease ends. A later one of its tenant must not use
/// up the tenant's limit meanwhile.
#[test]
fn later_requests_leave_room_within_the_limit() {
    let vulkan = |devices| durable(devices, Some("vulkan"));
    let flex = |devices| durable(devices, Some("flex"));
    let ops = [
        request(0, spot(vulkan(3))),
        request(2, flex(2)),
        Op::AllKept,
        wait(10_000),
        request(0, spot(flex(3))),
        request(0, flex(1)),
        wait(30_000),
        Op::SetPolicy { which: 3 },
        request(0, vulkan(2)),
        wait(40_000),
        finish(0),
    ];
    check_with_policy(1, ops);
}

/// Devices are held back for a lease, and then a request of its tenant gets others, so the lease is beyond the limit.
#[test]
fn what_is_held_back_for_a_lease_is_given_up_when_it_is_beyond_its_limit() {
    let ops = [
        request(1, durable(2, None)),
        Op::AllKept,
        request(0, durable(1, Some("flex"))),
        request(2, durable(1, Some("vulkan"))),
        Op::SuspendLease {
            nth: 43,
            by: Suspender::Administrator,
        },
        Op::ResumeLease {
            nth: 46,
            by: Suspender::Administrator,
        },
        request(0, demand_of(2, None)),
        Op::Release { client: 0, nth: 54 },
        Op::AllReportIdle,
    ];
    check_with_policy(3, ops);
}

/// A spot lease has lost its worker, and a request of its tenant waits until another spot lease has run for long enough to
/// be suspended. The lost one must not come before the request.
#[test]
fn lost_spot_lease_waits_for_a_request_of_its_tenant() {
    let ops = [
        request(0, spot(durable(1, Some("vulkan")))),
        request(0, spot(durable(1, Some("flex")))),
        Op::WorkerDisconnected { worker: 0 },
        request(0, durable(1, Some("flex"))),
        request(
            0,
            Demand {
                kind: Some("vulkan".into()),
                ..durable_share(250)
            },
        ),
        wait(10_000),
        request(0, durable(1, Some("flex"))),
    ];
    check_with_policy(3, ops);
}

/// A worker has come back without a device of a lease that it still ends, and reports one ended lease after the other.
#[test]
fn worker_that_ends_a_lease_on_a_device_that_it_lacks_becomes_its_keeper() {
    let ops = [
        request(0, durable(2, None)),
        request(0, durable(2, None)),
        request(0, durable(2, Some("vulkan"))),
        Op::AllKept,
        Op::Join {
            worker: 1,
            changed: true,
        },
        finish(0),
        finish(1),
    ];
    check_with_policy(2, ops);
}

/// A worker reports a false lease while it has a device of a lease whose sessions are closed. The model took that device
/// for the false lease, whose number then ended the other one.
#[test]
fn worker_with_a_lease_that_has_no_sessions_reports_a_false_one() {
    let demand = |durability, kind| Demand {
        durability,
        ..demand_of(1, kind)
    };
    check_any(vec![
        Op::Drain {
            worker: 0,
            is_drained: false,
        },
        request(0, demand(Durability::Auto, Some("flex"))),
        request(0, demand(Durability::Off, None)),
        Op::CloseSessions { worker: 1 },
        request(
            0,
            Demand {
                durability: Durability::Off,
                ..demand_of(3, Some("flex"))
            },
        ),
        request(0, demand(Durability::Exact, None)),
        Op::JoinFalsely { worker: 1, nth: 0 },
        Op::Join {
            worker: 1,
            changed: true,
        },
    ]);
}
