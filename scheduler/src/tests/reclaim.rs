//! Leases that are suspended for requests within other tenants' guarantees.

use super::durable::moved;
use super::several_workers::{drop_part, keep_each_other};
use super::suspension::{end_and_keep, kept_by_worker_1, resume, suspend, waits_for};
use super::tenants::{attach_of, kinds, queued_guaranteed, request_kind, set_policy};
use super::*;
use crate::reason::CannotMove;

/// Client 1 has the only device since 1 ms, with snapshots; client 2 is of tenant `b`, which is guaranteed one.
fn borrowed_by_client_1() -> Vec<Step> {
    let mut steps = kept_by_worker_1();
    steps.extend([
        (2, attach_of("b", 2), vec![]),
        (2, set_policy([("b", guaranteed(1))]), vec![]),
    ]);
    steps
}

fn guaranteed(count: u32) -> TenantPolicy {
    TenantPolicy {
        guaranteed: kinds(&[("flex", count)]),
        ..TenantPolicy::default()
    }
}

/// The client of a lease learns that another tenant needs its device.
pub(super) fn reclaimed(client: u64, lease: u64, waits_at: &[u64]) -> Command {
    match waits_for(client, lease, waits_at) {
        Command::Suspended {
            client,
            lease,
            waits_for,
            needs_all,
            ..
        } => Command::Suspended {
            client,
            lease,
            waits_for,
            needs_all,
            cause: Some(EndReason::Reclaimed),
        },
        other => panic!("{other:?} is not about a suspension"),
    }
}

fn request_flex(id: u64, number: u64) -> Event {
    request_kind(id, number, 1, "flex", 0)
}

fn granted_flex(id: u64, number: u64) -> Command {
    granted(id, number, &[(1, 0, exact(16))])
}

#[test]
fn a_borrowed_lease_makes_room_and_goes_on_later() {
    let steps = [
        (
            11_001,
            request_flex(2, 2),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued_guaranteed(2, 2, 1),
            ],
        ),
        (11_300, released(1, 10), vec![granted_flex(2, 2)]),
        // Another request beyond the guarantees does not get ahead of it.
        (11_400, attach_of("c", 3), vec![]),
        (11_400, request_flex(3, 3), vec![queued(3, 3, 1)]),
        (12_000, release(2, 20), vec![end_lease(1, 20)]),
        (12_100, released(1, 20), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(borrowed_by_client_1().into_iter().chain(steps));
}

#[test]
fn a_lease_that_has_just_begun_runs_for_a_while() {
    let steps = [
        (5000, request_flex(2, 2), vec![queued_guaranteed(2, 2, 1)]),
        (
            10_001,
            tick(),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1])],
        ),
    ];
    check(borrowed_by_client_1().into_iter().chain(steps));
}

/// In turn: its tenant is guaranteed the device, too; it could not go on; it is not durable.
#[test]
fn other_leases_are_not_suspended() {
    let policy = set_policy([("b", guaranteed(1)), (TENANT, guaranteed(1))]);
    let waits = |engine: Engine| {
        let waiting = engine.waiting(LeaseId(20)).expect("it waits");
        assert!(!waiting.is_at_limit);
    };
    let request = (11_001, request_flex(2, 2), vec![queued_guaranteed(2, 2, 1)]);
    let steps = [(3, policy, vec![]), request.clone()];
    waits(check(borrowed_by_client_1().into_iter().chain(steps)));
    let lost_snapshots = durable::kept(1, &[]);
    let steps = [(3, lost_snapshots, vec![]), request.clone()];
    waits(check(borrowed_by_client_1().into_iter().chain(steps)));
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, super::request(1, 1, 1), vec![granted_flex(1, 1)]),
        (2, attach_of("b", 2), vec![]),
        (2, set_policy([("b", guaranteed(1))]), vec![]),
        request,
    ];
    waits(check(steps));
}

/// While the device is not released yet, nobody else gets another one that becomes free, which the request
/// needs as well.
#[test]
fn free_devices_are_held_back_until_all_have_come() {
    let mut start = borrowed_by_client_1();
    start[0] = (0, join(1, &[exact(16), exact(16)]), vec![]);
    let second = granted(3, 3, &[(1, 1, exact(16))]);
    let steps = [
        (3, attach_of("c", 3), vec![]),
        (3, request_flex(3, 3), vec![second]),
        (3, set_policy([("b", guaranteed(2))]), vec![]),
        (
            4,
            request_kind(2, 2, 2, "flex", 0),
            vec![queued_guaranteed(2, 2, 1)],
        ),
        // With this one and that of the borrowed lease, there are enough.
        (
            11_001,
            release(3, 30),
            vec![
                end_lease(1, 30),
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
            ],
        ),
        (11_100, released(1, 30), vec![]),
        (11_200, request_flex(3, 4), vec![queued(3, 4, 2)]),
        (
            11_300,
            released(1, 10),
            vec![
                granted(2, 2, &[(1, 0, exact(16)), (1, 1, exact(16))]),
                queued(3, 4, 1),
            ],
        ),
    ];
    check(start.into_iter().chain(steps));
}

/// Tenant `b` has more requests within its guarantee than devices are held back for at once, and none of them can get
/// any: the only device of their kind has a lease that cannot be suspended.
#[test]
fn a_guarantee_does_not_wait_for_those_of_others() {
    const REQUESTS: u32 = 70;
    let mut start = borrowed_by_client_1();
    start[0] = (0, join(1, &[exact(16), cuda(80)]), vec![]);
    let many = TenantPolicy {
        guaranteed: kinds(&[("cuda", REQUESTS)]),
        ..TenantPolicy::default()
    };
    let taken = granted(3, 3, &[(1, 1, cuda(80))]);
    let mut steps = vec![
        (3, attach_of("c", 3), vec![]),
        (3, request_kind(3, 3, 1, "cuda", 0), vec![taken]),
        (3, attach_of("d", 4), vec![]),
        (3, set_policy([("b", many), ("d", guaranteed(1))]), vec![]),
    ];
    steps.extend((1..=REQUESTS).map(|position| {
        let number = 100 + u64::from(position);
        let queued = queued_guaranteed(2, number, position);
        (4, request_kind(2, number, 1, "cuda", 0), vec![queued])
    }));
    let is_next = vec![
        end_and_keep(1, 10),
        reclaimed(1, 10, &[1]),
        queued_guaranteed(4, 5, REQUESTS + 1),
    ];
    steps.push((11_001, request_flex(4, 5), is_next));
    let options = Options {
        max_waiting_per_client: 100,
        // Positions are reported at once, however many wait.
        position_interval: Duration::ZERO,
        ..Options::default()
    };
    check_with(options, start.into_iter().chain(steps));
}

#[test]
fn an_administrator_decides_over_a_reclaimed_lease() {
    let steps = [
        (
            11_001,
            request_flex(2, 2),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued_guaranteed(2, 2, 1),
            ],
        ),
        (11_002, suspend(10), vec![waits_for(1, 10, &[])]),
        (11_300, released(1, 10), vec![granted_flex(2, 2)]),
        (12_000, release(2, 20), vec![end_lease(1, 20)]),
        (12_100, released(1, 20), vec![]),
        (12_200, resume(10), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(borrowed_by_client_1().into_iter().chain(steps));
}

/// It would be ahead of the request otherwise, and get the device back.
#[test]
fn a_program_does_not_get_ahead_by_suspending_its_lease() {
    let by_client = |event: fn(LeaseId, Suspender) -> Event| event(LeaseId(10), Suspender::Client);
    let suspend = by_client(|lease, by| Event::SuspendLease { lease, by });
    let resume = by_client(|lease, by| Event::ResumeLease { lease, by });
    let steps = [
        (
            11_001,
            request_flex(2, 2),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued_guaranteed(2, 2, 1),
            ],
        ),
        (11_002, suspend, vec![waits_for(1, 10, &[])]),
        (11_003, resume, vec![waits_for(1, 10, &[1])]),
        (11_300, released(1, 10), vec![granted_flex(2, 2)]),
    ];
    check(borrowed_by_client_1().into_iter().chain(steps));
}

/// The lease has not run for long enough. What is free meanwhile is not given to others.
#[test]
fn free_devices_are_held_back_until_a_lease_may_be_suspended() {
    let mut start = borrowed_by_client_1();
    start[0] = (0, join(1, &[exact(16), exact(16)]), vec![]);
    let steps = [
        (3, attach_of("c", 3), vec![]),
        (3, set_policy([("b", guaranteed(2))]), vec![]),
        (
            4,
            request_kind(2, 2, 2, "flex", 0),
            vec![queued_guaranteed(2, 2, 1)],
        ),
        (5, request_flex(3, 3), vec![queued(3, 3, 2)]),
        (
            10_001,
            tick(),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1])],
        ),
        (
            10_300,
            released(1, 10),
            vec![
                granted(2, 2, &[(1, 0, exact(16)), (1, 1, exact(16))]),
                queued(3, 3, 1),
            ],
        ),
    ];
    check(start.into_iter().chain(steps));
}

/// Two requests of any kind are not both within a guarantee of one device of each kind.
#[test]
fn requests_of_any_kind_use_up_the_guarantees_of_all_kinds() {
    let one_of_each = TenantPolicy {
        guaranteed: kinds(&[("flex", 1), ("cuda", 1)]),
        ..TenantPolicy::default()
    };
    let mut start = borrowed_by_client_1();
    start[0] = (0, join(1, &[exact(16), cuda(80)]), vec![]);
    let steps = [
        (3, attach_of("c", 3), vec![]),
        (
            3,
            request_kind(3, 3, 1, "cuda", 0),
            vec![granted(3, 3, &[(1, 1, cuda(80))])],
        ),
        (3, set_policy([("b", one_of_each)]), vec![]),
        (4, request(2, 2, 1), vec![queued_guaranteed(2, 2, 1)]),
        (4, request(2, 4, 1), vec![queued(2, 4, 2)]),
    ];
    let engine = check(start.into_iter().chain(steps));
    let is_guaranteed = [20, 40].map(|id| {
        let waiting = engine.waiting(LeaseId(id)).expect("it waits");
        matches!(
            waiting.waiter,
            Waiter::Request {
                is_guaranteed: true,
                ..
            }
        )
    });
    assert_eq!(is_guaranteed, [true, false]);
}

/// A request whose lease is not durable, and may end.
fn request_ending(id: u64, number: u64) -> Event {
    let demand = Demand {
        may_end: true,
        ..demand_of(1, Some("flex"))
    };
    request_for(id, number, demand)
}

/// Clients 1 and 3 have a device each, client 1 by a lease that may end; that of client 3 can be suspended from
/// `suspendable_at` on. Client 2 is of tenant `b`, which is guaranteed a device.
fn borrowed_and_may_end(suspendable_at: u64) -> Vec<Step> {
    vec![
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, attach_of("c", 3), vec![]),
        (0, set_policy([("b", guaranteed(1))]), vec![]),
        (1, request_ending(1, 1), vec![granted_flex(1, 1)]),
        (
            suspendable_at - 10_000,
            durable::request_durable(3, 3),
            vec![granted(3, 3, &[(1, 1, exact(16))])],
        ),
    ]
}

#[test]
fn a_borrowed_lease_that_may_end_ends_if_it_cannot_be_suspended() {
    let steps = [
        (
            11_000,
            request_flex(2, 2),
            vec![
                end_lease(1, 10),
                ended(1, 10, EndReason::Reclaimed),
                queued_guaranteed(2, 2, 1),
            ],
        ),
        (11_001, released(1, 10), vec![granted_flex(2, 2)]),
    ];
    check(borrowed_and_may_end(15_000).into_iter().chain(steps));
}

/// It runs for as long as any other before that.
#[test]
fn a_lease_that_may_end_does_not_end_at_once() {
    let steps = [
        (10_000, request_flex(2, 2), vec![queued_guaranteed(2, 2, 1)]),
        (
            10_001,
            tick(),
            vec![end_lease(1, 10), ended(1, 10, EndReason::Reclaimed)],
        ),
    ];
    check(borrowed_and_may_end(15_000).into_iter().chain(steps));
}

/// The other lease has begun later, and can be suspended at 15 s.
#[test]
fn no_lease_ends_if_one_that_can_be_suspended_is_enough() {
    let steps = [
        (5_001, durable::restorable(3, 30, true), vec![]),
        (5_002, durable::kept(1, &[(30, 1)]), vec![]),
        (11_000, request_flex(2, 2), vec![queued_guaranteed(2, 2, 1)]),
        (
            15_000,
            tick(),
            vec![end_and_keep(1, 30), reclaimed(3, 30, &[1])],
        ),
        (
            15_001,
            released(1, 30),
            vec![granted(2, 2, &[(1, 1, exact(16))])],
        ),
    ];
    check(borrowed_and_may_end(15_000).into_iter().chain(steps));
}

#[test]
fn a_lease_within_a_guarantee_does_not_end_although_it_may() {
    let policy = set_policy([("a", guaranteed(1)), ("b", guaranteed(1))]);
    let steps = [
        (5_001, policy, vec![]),
        (11_000, request_flex(2, 2), vec![queued_guaranteed(2, 2, 1)]),
        (60_000, beat(1), vec![]),
    ];
    check(borrowed_and_may_end(15_000).into_iter().chain(steps));
}

/// Lease 10 of client 1, of tenant `a`, has a device each of two workers, which have its snapshots; client 2 is of
/// tenant `b`, which is guaranteed a device.
fn with_snapshots_at_two_workers(is_spot: bool) -> Vec<Step> {
    let demand = Demand {
        durability: Durability::Auto,
        is_spot,
        may_end: !is_spot,
        ..demand_of(2, Some("flex"))
    };
    let mut commands = vec![granted(1, 1, &[(1, 0, exact(16)), (2, 0, exact(16))])];
    commands.extend(keep_each_other(1, 2));
    vec![
        (0, join(1, &[exact(16)]), vec![]),
        (0, join(2, &[exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, set_policy([("b", guaranteed(1))]), vec![]),
        (1, request_for(1, 1, demand), commands),
        (1, durable::restorable(1, 10, true), vec![]),
        (2, durable::kept(1, &[(10, 1)]), vec![]),
        (2, durable::kept_parts(2, &[(10, 1, 2)]), vec![]),
    ]
}

fn reclaimed_from_both() -> Command {
    Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w1".into(), "w2".into()],
        needs_all: true,
        cause: Some(EndReason::Reclaimed),
    }
}

/// Its snapshots are there again once the worker is.
#[test]
fn a_lease_with_snapshots_does_not_end_as_a_worker_is_away() {
    for is_spot in [false, true] {
        let steps = [
            (80_000, beat(1), vec![]),
            (80_000, worker_disconnected(1), vec![]),
            (80_001, request_flex(2, 2), vec![queued_guaranteed(2, 2, 1)]),
            (80_002, beat(2), vec![]),
        ];
        let start = with_snapshots_at_two_workers(is_spot);
        let engine = check(start.into_iter().chain(steps));
        assert_eq!(
            engine.check_suspend(LeaseId(10), Suspender::Administrator),
            Err(CannotMove::WorkerAway)
        );
    }
}

/// A worker has no room for them, or a keeper that had them restarts.
#[test]
fn a_lease_does_not_end_as_its_snapshots_have_no_holder() {
    for is_spot in [false, true] {
        let request = request_flex(2, 2);
        let steps = [
            (3, durable::kept(1, &[]), vec![]),
            (80_001, request, vec![queued_guaranteed(2, 2, 1)]),
            (
                80_002,
                durable::kept(1, &[(10, 1)]),
                vec![
                    end_and_keep(1, 10),
                    end_and_keep(2, 10),
                    drop_part(1, 1),
                    drop_part(2, 0),
                    reclaimed_from_both(),
                ],
            ),
        ];
        let start = with_snapshots_at_two_workers(is_spot);
        check(start.into_iter().chain(steps));
    }
}
