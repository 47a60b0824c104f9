//! The leases and requests that wait for devices, their order, and how the suitable devices are used.

use std::slice;

use super::durable::{granted_exact, keep, lost_while_worker_2_is_busy};
use super::handover::resumed_while_its_holder_is_busy;
use super::moves::{drain, lost_with_one_free_device};
use super::suspension::{resume, suspended_at_worker_1, waits_for};
use super::*;
use crate::{NeededDevices, SuitableDevices, Waiting};

fn needs(count: usize, at_one_worker: bool, suitable: SuitableDevices) -> Vec<NeededDevices> {
    vec![NeededDevices {
        count,
        share_permille: None,
        at_one_worker,
        suitable,
    }]
}

/// Devices of which leases have some, each with its number.
fn leased(leases: &[(u64, usize)]) -> SuitableDevices {
    let leases = leases
        .iter()
        .map(|(lease, count)| (LeaseId(*lease), *count));
    SuitableDevices {
        leased_devices: leases.clone().map(|(_, count)| count).sum(),
        leased: leases.collect(),
        ..SuitableDevices::default()
    }
}

/// Returns all that waits, in order.
fn all_waiting(engine: &Engine) -> Vec<Waiting> {
    let ids = engine.waiting_ids().into_iter();
    ids.map(|id| engine.waiting(id).expect("it waits"))
        .collect()
}

#[test]
fn devices_are_counted_by_how_they_are_used() {
    let demand = Demand {
        devices: 8,
        kind: Some("cuda".into()),
        memory_bytes: 8 << 30,
        durability: Durability::Off,
        recover_within: None,
        max_duration: None,
        is_spot: false,
        may_end: false,
        share_permille: None,
    };
    let engine = check([
        // Too small, of another kind, free, out of service, leased, and of a lease that has ended.
        (
            0,
            join(
                1,
                &[cuda(4), flex(16), cuda(16), cuda(16), cuda(8), cuda(8)],
            ),
            vec![],
        ),
        (0, out_of_service(1, &[3]), vec![]),
        (0, attach(8), vec![]),
        (
            0,
            request_for(
                8,
                1,
                Demand {
                    devices: 1,
                    ..demand.clone()
                },
            ),
            vec![granted(8, 1, &[(1, 4, cuda(8))])],
        ),
        (
            0,
            request_for(
                8,
                2,
                Demand {
                    devices: 1,
                    ..demand.clone()
                },
            ),
            vec![granted(8, 2, &[(1, 5, cuda(8))])],
        ),
        (0, release(8, 20), vec![end_lease(1, 20)]),
        (0, join(2, &[cuda(16), cuda(16)]), vec![]),
        (0, join(3, &[cuda(16), cuda(16), cuda(16)]), vec![]),
        (1, request_for(8, 3, demand.clone()), vec![queued(8, 3, 1)]),
        (2, worker_disconnected(2), vec![]),
        (2, join(4, &[cuda(16)]), vec![]),
        (3, drain(4, true), vec![]),
    ]);
    let suitable = SuitableDevices {
        free: 4,
        free_at_one_worker: 3,
        ending: 1,
        out_of_service: 1,
        unreachable: 2,
        draining: 1,
        ..leased(&[(10, 1)])
    };
    let expected = Waiting {
        lease: LeaseId(30),
        client: Some(ClientId(8)),
        tenant: Some(TENANT.into()),
        is_at_limit: false,
        waiter: Waiter::Request {
            demand,
            since: at(1),
            priority: 0,
            is_guaranteed: false,
            has_reservation: false,
            reserved_for: None,
            enough_at: None,
        },
        needs: needs(8, false, suitable),
    };
    assert_eq!(all_waiting(&engine), [expected]);
}

#[test]
fn resumed_lease_is_before_the_requests_and_suspended_one_does_not_wait() {
    let steps = [
        (5, attach(2), vec![]),
        (5, request(2, 2, 1), vec![granted_exact(2, 2, 1, 0)]),
        (5, request(2, 3, 1), vec![queued(2, 3, 1)]),
    ];
    let suspended = suspended_at_worker_1().into_iter().chain(steps);
    let of_request = Waiting {
        lease: LeaseId(30),
        client: Some(ClientId(2)),
        tenant: Some(TENANT.into()),
        is_at_limit: false,
        waiter: Waiter::Request {
            demand: demand_of(1, None),
            since: at(5),
            priority: 0,
            is_guaranteed: false,
            has_reservation: false,
            reserved_for: None,
            enough_at: None,
        },
        needs: needs(1, false, leased(&[(20, 1)])),
    };
    let engine = check(suspended.clone());
    assert_eq!(all_waiting(&engine), slice::from_ref(&of_request));
    let resumed = [(6, resume(10), vec![waits_for(1, 10, &[1])])];
    let engine = check(suspended.chain(resumed));
    let of_lease = Waiting {
        lease: LeaseId(10),
        client: Some(ClientId(1)),
        tenant: Some(TENANT.into()),
        is_at_limit: false,
        waiter: Waiter::Lease {
            cause: None,
            resumed_at: Some(at(6)),
            is_client_attached: true,
            ends_at: None,
            receivers: Vec::new(),
            left_workers: Vec::new(),
        },
        needs: needs(1, true, leased(&[(20, 1)])),
    };
    assert_eq!(all_waiting(&engine), [of_lease, of_request]);
}

/// A free device is held back for the lost lease, which needs two, so it is not free for a request.
#[test]
fn device_that_is_held_back_is_free_for_the_lost_lease_alone() {
    let engine = check(lost_with_one_free_device());
    let waiting = all_waiting(&engine);
    let [of_lease, of_request] = &waiting[..] else {
        panic!("{waiting:?}");
    };
    let expected = Waiter::Lease {
        cause: Some(lost(1)),
        resumed_at: None,
        is_client_attached: true,
        ends_at: Some(at(5_000 + 3_600_000)),
        receivers: Vec::new(),
        left_workers: Vec::new(),
    };
    assert_eq!(of_lease.waiter, expected);
    let suitable = SuitableDevices {
        free: 1,
        free_at_one_worker: 1,
        ..leased(&[(30, 1)])
    };
    assert_eq!(of_lease.needs, needs(2, true, suitable));
    let suitable = SuitableDevices {
        held_back: [(LeaseId(10), 1)].into(),
        ..leased(&[(30, 1)])
    };
    assert_eq!(of_request.needs, needs(1, false, suitable));
}

/// Its devices at another worker are held back while that one gets the snapshots.
#[test]
fn resumed_lease_names_the_workers_that_get_its_snapshots() {
    let steps = resumed_while_its_holder_is_busy();
    let receivers = |engine: &Engine| {
        let waiting = engine.waiting(LeaseId(10)).expect("it waits");
        let Waiter::Lease { receivers, .. } = waiting.waiter else {
            panic!("{waiting:?}");
        };
        (receivers, waiting.needs)
    };
    let busy = needs(1, true, leased(&[(20, 1)]));
    assert_eq!(receivers(&check(steps.clone())), (vec![], busy));
    let joins = (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]);
    let suitable = SuitableDevices {
        free: 1,
        free_at_one_worker: 1,
        ..leased(&[(20, 1)])
    };
    let free = needs(1, true, suitable);
    let engine = check(steps.into_iter().chain([joins]));
    assert_eq!(receivers(&engine), (vec!["w2".into()], free));
}

/// The program of a lost lease has ended, or is cut off.
#[test]
fn lost_lease_without_its_program_ends_earlier_and_waits_for_it() {
    let away = [(5_100, client_disconnected(1), vec![])];
    let engine = check(lost_while_worker_2_is_busy().into_iter().chain(away));
    let waiting = engine.waiting(LeaseId(10)).expect("it waits");
    let expected = Waiter::Lease {
        cause: Some(lost(1)),
        resumed_at: None,
        is_client_attached: false,
        ends_at: Some(at(5_100 + 30_000)),
        receivers: Vec::new(),
        left_workers: Vec::new(),
    };
    assert_eq!(waiting.waiter, expected);
}

#[test]
fn leased_device_of_a_worker_that_drains_is_not_one_that_its_lease_could_free() {
    let engine = check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(8), vec![]),
        (0, request(8, 1, 1), vec![granted(8, 1, &[(1, 0, flex(1))])]),
        (1, join(2, &[flex(1)]), vec![]),
        (2, request(8, 2, 1), vec![granted(8, 2, &[(2, 0, flex(1))])]),
        (3, join(3, &[flex(1), flex(1), flex(1)]), vec![]),
        (3, request(8, 3, 4), vec![queued(8, 3, 1)]),
        (4, drain(2, true), vec![]),
    ]);
    let suitable = SuitableDevices {
        free: 3,
        free_at_one_worker: 3,
        draining: 1,
        ..leased(&[(10, 1)])
    };
    let waiting = engine.waiting(LeaseId(30)).expect("it waits");
    assert_eq!(waiting.needs, needs(4, false, suitable));
    assert_eq!(engine.waiting(LeaseId(10)), None);
}

/// Returns when there will be enough devices for a request.
fn enough_at(engine: &Engine, request: u64) -> Option<Timestamp> {
    let waiting = engine.waiting(LeaseId(request)).expect("it waits");
    match waiting.waiter {
        Waiter::Request { enough_at, .. } => enough_at,
        Waiter::Lease { .. } => panic!("{waiting:?}"),
    }
}

/// Two leases share the only device, for a minute and for two, with 60 % and 30 % of it.
#[test]
fn the_estimate_counts_leases_with_shares() {
    let share = |permille, seconds: Option<u64>| Demand {
        share_permille: Some(permille),
        max_duration: seconds.map(Duration::from_secs),
        ..demand_of(1, Some("flex"))
    };
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    engine.handle(join(1, &[exact(16)]), at(0));
    engine.handle(attach(1), at(0));
    let mut request = |number, demand| {
        engine.handle(request_for(1, number, demand), at(1_000));
    };
    request(1, share(600, Some(60)));
    request(2, share(300, Some(120)));
    request(3, share(200, None));
    request(4, share(650, None));
    request(5, share(900, None));
    request(6, demand_of(1, Some("flex")));
    let expected = [
        (30, Some(at(61_000))),
        (40, Some(at(61_000))),
        (50, Some(at(121_000))),
        (60, Some(at(121_000))),
    ];
    for (lease, expected) in expected {
        assert_eq!(enough_at(&engine, lease), expected, "{lease}");
    }
    // One that does not declare how long it takes.
    engine.handle(request_for(1, 7, share(50, None)), at(2_000));
    assert_eq!(enough_at(&engine, 50), Some(at(121_000)));
    assert_eq!(enough_at(&engine, 60), None);
}
