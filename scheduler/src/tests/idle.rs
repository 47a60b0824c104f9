//! Leases that are suspended because they are idle while others wait.

use super::durable::*;
use super::several_workers::kept_by_each_other;
use super::suspension::*;
use super::tenants::{
    attach_of, kinds, queued_at_limit, queued_guaranteed, request_kind, set_policy,
};
use super::*;
use crate::CannotResume;

/// Requests that wait for long have no reservations here.
fn options() -> Options {
    Options {
        reserve_after: Duration::MAX,
        ..Options::default()
    }
}

fn check(steps: impl IntoIterator<Item = Step>) -> Engine {
    check_with(options(), steps)
}

/// A worker reports that these leases have been idle for these times, in ms.
fn idle(id: u64, leases: &[(u64, u64)]) -> Event {
    let leases = leases
        .iter()
        .map(|&(lease, millis)| (LeaseId(lease), Duration::from_millis(millis)));
    let leases = leases.collect();
    worker(id, WorkerEvent::Idle { leases })
}

/// The client of a lease learns that the lease was suspended as it was idle.
fn suspended_for_idleness(client: u64, lease: u64) -> Command {
    Command::Suspended {
        client: ClientId(client),
        lease: LeaseId(lease),
        waits_for: Vec::new(),
        needs_all: false,
        cause: Some(EndReason::Idle),
    }
}

fn suspends(client: u64, lease: u64) -> Vec<Command> {
    vec![
        end_and_keep(1, lease),
        suspended_for_idleness(client, lease),
    ]
}

fn resume_by_client(lease: u64) -> Event {
    Event::ResumeLease {
        lease: LeaseId(lease),
        by: Suspender::Client,
    }
}

/// Lease 10 of client 1 has the only device, with snapshots, and client 2 has requested one.
fn awaited_by_client_2() -> Vec<Step> {
    let mut steps = kept_by_worker_1();
    steps.extend([
        (2, attach(2), vec![]),
        (2, request_durable(2, 2), vec![queued(2, 2, 1)]),
    ]);
    steps
}

/// As before, and the lease is suspended after 10 min without anything to do.
fn suspended_after_10_min() -> Vec<Step> {
    let mut steps = awaited_by_client_2();
    steps.extend([
        (300_000, idle(1, &[(10, 299_000)]), vec![]),
        (600_000, idle(1, &[(10, 599_000)]), vec![]),
        (601_000, tick(), suspends(1, 10)),
        (601_100, released(1, 10), vec![granted_exact(2, 2, 1, 0)]),
    ]);
    steps
}

#[test]
fn an_idle_lease_makes_room_and_its_client_resumes_it() {
    let engine = check(suspended_after_10_min());
    let snapshot = engine.lease(LeaseId(10)).unwrap().suspension.unwrap();
    assert_eq!(snapshot.by, Some(Suspender::Idleness));
    let turns = [
        (602_000, resume_by_client(10), vec![waits_for(1, 10, &[1])]),
        (603_000, release(2, 20), vec![end_lease(1, 20)]),
        (603_100, released(1, 20), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(suspended_after_10_min().into_iter().chain(turns));
}

/// Two programs that are used now and then take turns: the one that goes on waits until the other one is idle.
#[test]
fn two_idle_leases_take_turns() {
    let turns = [
        (601_200, restorable(2, 20, true), vec![]),
        (601_200, kept(1, &[(20, 1)]), vec![]),
        (700_000, resume_by_client(10), vec![waits_for(1, 10, &[1])]),
        // It was granted later than it reports to have been idle since.
        (1_201_000, idle(1, &[(20, 700_000)]), vec![]),
        (1_201_100, tick(), suspends(2, 20)),
        (1_201_200, released(1, 20), vec![moved(1, 10, 1, 1, 0)]),
        (
            1_201_300,
            resume_by_client(20),
            vec![waits_for(2, 20, &[1])],
        ),
        (1_201_400, idle(1, &[(10, 100)]), vec![]),
    ];
    check(suspended_after_10_min().into_iter().chain(turns));
}

#[test]
fn nothing_is_suspended_before_something_waits() {
    let steps = [
        (2, attach(2), vec![]),
        (700_000, idle(1, &[(10, 699_000)]), vec![]),
        (
            700_001,
            request_durable(2, 2),
            [suspends(1, 10), vec![queued(2, 2, 1)]].concat(),
        ),
    ];
    check(kept_by_worker_1().into_iter().chain(steps));
}

#[test]
fn a_lease_that_has_computed_again_is_not_idle() {
    let steps = [
        (300_000, idle(1, &[(10, 299_000)]), vec![]),
        (500_000, idle(1, &[]), vec![]),
        (600_000, idle(1, &[(10, 50_000)]), vec![]),
        (900_000, idle(1, &[(10, 1_000)]), vec![]),
        (1_499_000, tick(), suspends(1, 10)),
    ];
    let steps = awaited_by_client_2().into_iter().chain(steps);
    // The deadline of the earlier report passes without an effect.
    check(steps);
}

/// It may have computed meanwhile.
#[test]
fn a_worker_that_was_away_reports_again() {
    let steps = [
        (599_000, idle(1, &[(10, 598_000)]), vec![]),
        (599_500, beat(1), vec![]),
        (599_500, worker_disconnected(1), vec![]),
        (600_000, join_running(1, 10), vec![]),
        (600_001, kept(1, &[(10, 1)]), vec![]),
        (602_000, idle(1, &[(10, 1_000)]), vec![]),
        (1_201_000, tick(), suspends(1, 10)),
    ];
    check(awaited_by_client_2().into_iter().chain(steps));
}

/// Worker 1 joins again, and still runs a lease by its first grant.
fn join_running(id: u64, lease: u64) -> Event {
    let mut event = join_holding(id, &[exact(16)], &[(lease, 0)]);
    if let Event::Worker {
        event: WorkerEvent::Join { held, .. },
        ..
    } = &mut event
    {
        held[0].grant = GrantNumber {
            term: TERM,
            count: 1,
        };
    }
    event
}

/// In turn: the client is away; the lease has no snapshots; it is never done.
#[test]
fn other_leases_stay() {
    let report = (700_000, idle(1, &[(10, 699_000)]), vec![]);
    let away = [
        (3, client_disconnected(1), vec![]),
        (4, idle(1, &[(10, 1)]), vec![]),
    ];
    check(awaited_by_client_2().into_iter().chain(away));
    let lacking = [(3, kept(1, &[]), vec![]), report.clone()];
    check(awaited_by_client_2().into_iter().chain(lacking));
    let never = Options {
        idle_timeout: Duration::ZERO,
        ..options()
    };
    check_with(never, awaited_by_client_2().into_iter().chain([report]));
}

/// A lease with devices of several workers is idle if it is at all of them.
#[test]
fn a_lease_is_idle_at_all_its_workers() {
    let busy_at_worker_2 = [
        (2, attach(2), vec![]),
        (2, request(2, 2, 1), vec![queued(2, 2, 1)]),
        (700_000, idle(1, &[(10, 699_000)]), vec![]),
    ];
    let steps = kept_by_each_other().into_iter().chain(busy_at_worker_2);
    check(steps.clone());
    let suspends = vec![
        end_and_keep(1, 10),
        end_and_keep(2, 10),
        suspended_for_idleness(1, 10),
    ];
    let idle_at_both = [
        (700_001, idle(2, &[(10, 10_000)]), vec![]),
        (1_290_001, tick(), suspends),
    ];
    check(steps.chain(idle_at_both));
}

#[test]
fn what_may_not_have_more_devices_needs_none() {
    let at_most_one = TenantPolicy {
        limit: TenantLimit {
            devices: kinds(&[("flex", 1)]),
            memory_bytes: None,
        },
        ..TenantPolicy::default()
    };
    let mut steps = kept_by_worker_1();
    steps[0] = (0, join(1, &[exact(16), exact(16)]), vec![]);
    let second = granted(2, 2, &[(1, 1, exact(16))]);
    steps.extend([
        (2, attach_of("b", 2), vec![]),
        (2, set_policy([("b", at_most_one)]), vec![]),
        (3, request_kind(2, 2, 1, "flex", 0), vec![second]),
        (
            4,
            request_kind(2, 3, 1, "flex", 0),
            vec![queued_at_limit(2, 3, 1)],
        ),
        (700_000, idle(1, &[(10, 699_000)]), vec![]),
    ]);
    check(steps);
}

/// Leases 10, 30 and 40 have one device each, and lease 20 has two, of client 1.
fn four_leases() -> Vec<Step> {
    let devices = [(); 5].map(|()| exact(16));
    let pair = granted(1, 2, &[(1, 1, exact(16)), (1, 2, exact(16))]);
    let all = [10, 20, 30, 40];
    let mut steps = vec![
        (0, join(1, &devices), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        (1, request_durable_of(2, 1, 2), vec![pair]),
        (1, request_durable(1, 3), vec![granted_exact(1, 3, 1, 3)]),
        (1, request_durable(1, 4), vec![granted_exact(1, 4, 1, 4)]),
        (1, kept(1, &all.map(|lease| (lease, 1))), vec![]),
        (2, attach(2), vec![]),
    ];
    let restorables = all.map(|lease| (1, restorable(1, lease, true), vec![]));
    steps.splice(6..6, restorables);
    steps
}

#[test]
fn the_fewest_leases_are_suspended_the_longest_idle_first() {
    let all = idle(
        1,
        &[(10, 600_000), (20, 600_003), (30, 600_002), (40, 600_001)],
    );
    let idle_before = [(700_000, all, vec![])];
    let expect = |devices, leases: &[u64]| {
        let suspended = leases.iter().flat_map(|lease| suspends(1, *lease));
        let commands = suspended.chain([queued(2, 5, 1)]).collect();
        let request = (700_001, request_durable_of(devices, 2, 5), commands);
        check(
            four_leases()
                .into_iter()
                .chain(idle_before.clone())
                .chain([request]),
        );
    };
    expect(1, &[20]);
    expect(2, &[20]);
    expect(3, &[20, 30]);
    expect(4, &[20, 30, 40]);
    // Too few are idle, so none is suspended.
    let one_is_busy = [(700_000, idle(1, &[(10, 700_000), (20, 700_000)]), vec![])];
    let request = (700_001, request_durable_of(4, 2, 5), vec![queued(2, 5, 1)]);
    check(
        four_leases()
            .into_iter()
            .chain(one_is_busy)
            .chain([request]),
    );
}

/// The next request that waits uses what the first one does not need.
#[test]
fn devices_of_one_lease_are_enough_for_two_requests() {
    let steps = [
        (3, request_durable(2, 5), vec![queued(2, 5, 1)]),
        (3, request_durable(2, 6), vec![queued(2, 6, 2)]),
        (700_000, idle(1, &[(20, 699_000)]), suspends(1, 20)),
        (
            700_100,
            released(1, 20),
            vec![granted_exact(2, 5, 1, 1), granted_exact(2, 6, 1, 2)],
        ),
    ];
    check(four_leases().into_iter().chain(steps));
}

/// An idle lease loses less than one that is borrowed.
#[test]
fn an_idle_lease_goes_before_a_borrowed_one() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("flex", 1)]),
        ..TenantPolicy::default()
    };
    let steps = [
        (2, attach_of("b", 3), vec![]),
        (2, set_policy([("b", guaranteed)]), vec![]),
        (700_000, idle(1, &[(30, 699_000)]), vec![]),
        (
            700_001,
            request_kind(3, 5, 1, "flex", 0),
            [suspends(1, 30), vec![queued_guaranteed(3, 5, 1)]].concat(),
        ),
    ];
    check(four_leases().into_iter().chain(steps));
}

#[test]
fn an_idle_lease_makes_room_for_one_that_is_resumed() {
    let steps = [
        (602_000, restorable(2, 20, true), vec![]),
        (602_000, kept(1, &[(20, 1)]), vec![]),
        (
            603_000,
            suspend(20),
            vec![end_and_keep(1, 20), suspended(2, 20)],
        ),
        (603_100, released(1, 20), vec![]),
        (603_200, resume(10), vec![moved(1, 10, 1, 1, 0)]),
        (603_300, kept(1, &[(10, 1)]), vec![]),
        (603_400, resume(20), vec![waits_for(2, 20, &[1])]),
        (1_300_000, idle(1, &[(10, 690_000)]), suspends(1, 10)),
        (1_300_100, released(1, 10), vec![moved(2, 20, 1, 1, 0)]),
    ];
    check(suspended_after_10_min().into_iter().chain(steps));
}

#[test]
fn an_administrator_decides_over_an_idle_lease() {
    let steps = [
        (602_000, suspend(10), vec![suspended(1, 10)]),
        (602_001, resume_by_client(10), vec![]),
    ];
    let engine = check(suspended_after_10_min().into_iter().chain(steps));
    assert_eq!(
        engine.check_resume(LeaseId(10), Suspender::Client),
        Err(CannotResume::ByAdministrator)
    );
}

/// Who has suspended the lease last decides whether its use resumes it.
#[test]
fn use_resumes_a_lease_only_if_it_was_idle() {
    let suspend_by = |by| Event::SuspendLease {
        lease: LeaseId(10),
        by,
    };
    let cases = [
        (None, Ok(())),
        (Some(Suspender::Client), Err(CannotResume::ByClient)),
        (
            Some(Suspender::Administrator),
            Err(CannotResume::ByAdministrator),
        ),
    ];
    for (by, expected) in cases {
        let suspended = by.map(|by| (602_000, suspend_by(by), vec![suspended(1, 10)]));
        let engine = check(suspended_after_10_min().into_iter().chain(suspended));
        let checked = engine.check_resume(LeaseId(10), Suspender::Idleness);
        assert_eq!(checked, expected, "{by:?}");
    }
}

/// It does not go on at its next op then.
#[test]
fn a_program_suspends_its_idle_lease_itself() {
    let by_client = Event::SuspendLease {
        lease: LeaseId(10),
        by: Suspender::Client,
    };
    let steps = [(602_000, by_client, vec![suspended(1, 10)])];
    check(suspended_after_10_min().into_iter().chain(steps));
}

#[test]
fn client_that_was_away_learns_that_its_lease_was_idle() {
    let away = [
        (602_000, client_disconnected(1), vec![]),
        (
            602_001,
            attach_claiming(1, &[(10, &[(1, 0)])]),
            vec![suspended_for_idleness(1, 10)],
        ),
    ];
    check(suspended_after_10_min().into_iter().chain(away));
}

/// The parts of lease 10 wait for devices of two workers, which leases 20 and 30 have.
#[test]
fn idle_leases_make_room_for_all_parts_of_a_lease_or_for_none() {
    let mut steps = kept_by_each_other();
    let suspended_parts = vec![end_and_keep(1, 10), end_and_keep(2, 10), suspended(1, 10)];
    let pair = granted(2, 2, &[(1, 0, exact(16)), (1, 1, exact(16))]);
    let waits = Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w1".into(), "w2".into()],
        needs_all: true,
        cause: None,
    };
    steps.extend([
        (3, suspend(10), suspended_parts),
        (4, released(1, 10), vec![]),
        (4, released(2, 10), vec![]),
        (5, attach(2), vec![]),
        (6, request_durable_of(2, 2, 2), vec![pair, keep(20, 1, 2)]),
        (
            6,
            request_durable(2, 3),
            vec![granted_exact(2, 3, 2, 0), keep(30, 2, 1)],
        ),
        (7, restorable(2, 20, true), vec![]),
        (7, restorable(2, 30, true), vec![]),
        (7, kept(1, &[(20, 1)]), vec![]),
        (7, kept(2, &[(30, 2)]), vec![]),
        (8, resume(10), vec![waits]),
        (700_000, idle(1, &[(20, 699_000)]), vec![]),
        (
            700_001,
            idle(2, &[(30, 699_000)]),
            vec![
                end_and_keep(1, 20),
                drop_snapshots(2, 20),
                suspended_for_idleness(2, 20),
                end_and_keep(2, 30),
                drop_snapshots(1, 30),
                suspended_for_idleness(2, 30),
            ],
        ),
        (700_100, released(1, 20), vec![]),
    ]);
    let mut engine = check(steps);
    let commands = engine.handle(released(2, 30), at(700_101));
    let goes_on =
        |command: &Command| matches!(command, Command::Moved { lease, .. } if lease.0 == 10);
    assert!(commands.iter().any(goes_on), "{commands:?}");
}
