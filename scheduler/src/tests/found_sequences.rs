//! Sequences of events that the property tests have found, each with what it once broke.

use super::actions::KeptRecords;
use super::property::{Op, check_any, request, with_policy};
use super::*;

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
        Op::Wait { millis: 5000 },
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
        Op::Wait { millis: 5000 },
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
        Op::Wait { millis: 5000 },
    ]);
}

/// A lost lease waits for its snapshots at a device of which a request with a reservation has more held back than is
/// left: the request counts on a lease there that makes room. The snapshots go on being handed over.
#[test]
fn a_lost_lease_keeps_its_room_beside_a_later_reservation() {
    let durable = |client, devices, kind: &str, share_permille| {
        let demand = Demand {
            share_permille,
            durability: Durability::Auto,
            ..demand_of(devices, Some(kind))
        };
        request(client, demand)
    };
    let not_durable = Demand {
        share_permille: Some(250),
        ..demand_of(1, Some("vulkan"))
    };
    let wait = || Op::Wait { millis: 10_000 };
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
        wait(),
        wait(),
        durable(0, 1, "vulkan", Some(250)),
        wait(),
        Op::Release { client: 1, nth: 20 },
    ];
    check_any(with_policy(1).into_iter().chain(ops).collect());
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
    let request = |devices, kind| {
        let demand = Demand {
            durability: Durability::Auto,
            ..demand_of(devices, kind)
        };
        request(0, demand)
    };
    let finish = |worker| Op::Finish {
        worker,
        devices: u32::MAX,
    };
    let wait = || Op::Wait { millis: 5000 };
    let ops = [
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(1, Some("vulkan")),
        wait(),
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
        wait(),
        request(1, None),
        Op::AllKept,
        finish(2),
        Op::Join {
            worker: 0,
            changed: false,
        },
        finish(0),
    ];
    check_any(with_policy(1).into_iter().chain(ops).collect());
}
