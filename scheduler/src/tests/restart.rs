//! A restarted scheduler: it starts without state and adopts the leases that workers still
//! run and clients still hold.

use super::*;
use crate::EndReason::{DeviceUnavailable, Unknown, WorkerMissing};

fn unavailable(worker: u64, index: u32) -> EndReason {
    DeviceUnavailable {
        worker: WorkerId(worker),
        index,
    }
}

fn missing(worker: u64) -> EndReason {
    WorkerMissing {
        worker: WorkerId(worker),
    }
}

#[test]
fn lease_reported_by_a_worker_is_adopted() {
    let engine = check([
        (0, join_holding(1, &[flex(1), flex(1)], &[(10, 0)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
        (0, request(9, 3, 1), vec![granted(9, 3, &[(1, 1, flex(1))])]),
    ]);
    assert_eq!(engine.snapshot().leases, 2);
}

#[test]
fn unclaimed_adopted_lease_expires() {
    check([
        (1_000, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (1_000, attach(9), vec![]),
        (1_000, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (31_000, tick(), vec![end_lease(1, 10)]),
        (
            31_000,
            released(1, 10),
            vec![granted(9, 2, &[(1, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn claimed_adopted_lease_belongs_to_the_client() {
    check([
        (1_000, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (2_000, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (
            50_000,
            attach_claiming(8, &[(10, &[(1, 0)])]),
            vec![ended(8, 10, Unknown)],
        ),
        (50_000, release(9, 10), vec![end_lease(1, 10)]),
    ]);
}

#[test]
fn a_claim_waits_for_its_workers() {
    let engine = check([
        (
            1_000,
            attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]),
            vec![],
        ),
        (2_000, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        // This worker runs no session of the lease at the moment.
        (3_000, join(2, &[flex(1), flex(1)]), vec![]),
        (
            3_000,
            request(9, 2, 1),
            vec![granted(9, 2, &[(2, 1, flex(1))])],
        ),
        (3_000, request(9, 3, 1), vec![queued(9, 3, 1)]),
        (90_000, beat(1), vec![]),
    ]);
    assert_eq!(engine.next_deadline(), None);
}

#[test]
fn claim_ends_if_its_worker_does_not_join() {
    check([
        (0, attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]), vec![]),
        (1_000, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (
            30_000,
            tick(),
            vec![end_lease(1, 10), ended(9, 10, missing(2))],
        ),
        (
            30_500,
            join_holding(2, &[flex(1)], &[(10, 0)]),
            vec![end_lease(2, 10)],
        ),
    ]);
}

#[test]
fn reconnecting_does_not_extend_a_claims_deadline() {
    check([
        (0, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (10_000, client_disconnected(9), vec![]),
        (
            20_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (30_000, tick(), vec![ended(9, 10, missing(1))]),
    ]);
}

#[test]
fn lease_reported_by_two_workers_is_one_lease() {
    let engine = check([
        (0, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (0, join_holding(2, &[flex(1)], &[(10, 0)]), vec![]),
        (0, attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]), vec![]),
        (40_000, attach(8), vec![]),
    ]);
    assert_eq!(
        (engine.snapshot().leases, engine.next_deadline()),
        (1, None)
    );
}

#[test]
fn claim_adds_devices_the_worker_did_not_report() {
    check([
        (0, join_holding(1, &[flex(1), flex(1)], &[(10, 0)]), vec![]),
        (0, attach_claiming(9, &[(10, &[(1, 0), (1, 1)])]), vec![]),
        (0, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (0, release(9, 10), vec![end_lease(1, 10)]),
        (0, released(1, 10), vec![granted(9, 2, &[(1, 0, flex(1))])]),
    ]);
}

#[test]
fn claim_to_a_regranted_device_ends() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, join(2, &[flex(1)]), vec![]),
        (0, attach(8), vec![]),
        (0, request(8, 2, 1), vec![granted(8, 2, &[(1, 0, flex(1))])]),
        (
            1_000,
            attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]),
            vec![
                end_lease(1, 10),
                end_lease(2, 10),
                ended(9, 10, unavailable(1, 0)),
            ],
        ),
        // Nothing of the ended lease stays, and the other lease is unchanged.
        (
            1_000,
            request(9, 3, 1),
            vec![granted(9, 3, &[(2, 0, flex(1))])],
        ),
        (1_000, release(8, 20), vec![end_lease(1, 20)]),
    ]);
}

#[test]
fn a_claim_to_a_device_that_does_not_exist_ends() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (
            0,
            attach_claiming(9, &[(10, &[(1, 1)])]),
            vec![end_lease(1, 10), ended(9, 10, unavailable(1, 1))],
        ),
        (0, attach_claiming(8, &[(20, &[(2, 3)])]), vec![]),
        (
            1_000,
            join(2, &[flex(1)]),
            vec![end_lease(2, 20), ended(8, 20, unavailable(2, 3))],
        ),
    ]);
}

#[test]
fn running_lease_wins_between_two_claims() {
    check([
        (0, attach_claiming(8, &[(10, &[(1, 0)])]), vec![]),
        (0, attach_claiming(9, &[(20, &[(1, 0)])]), vec![]),
        (
            1_000,
            join_holding(1, &[flex(1)], &[(20, 0)]),
            vec![end_lease(1, 10), ended(8, 10, unavailable(1, 0))],
        ),
    ]);
}

#[test]
fn known_lease_wins_between_two_reported_on_one_device() {
    check([
        (0, attach_claiming(9, &[(20, &[(1, 0)])]), vec![]),
        (
            1_000,
            join_holding(1, &[flex(1)], &[(10, 0), (20, 0)]),
            vec![end_lease(1, 10)],
        ),
        (1_000, release(9, 20), vec![end_lease(1, 20)]),
    ]);
}

#[test]
fn leases_on_nonexistent_devices_are_ended() {
    let engine = check([(
        0,
        join_holding(1, &[flex(1)], &[(10, 7)]),
        vec![end_lease(1, 10)],
    )]);
    assert_eq!(engine.snapshot().leases, 0);
}

#[test]
fn client_can_detach_after_claiming() {
    check([
        (0, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (10_000, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (20_000, client_disconnected(9), vec![]),
        (50_000, tick(), vec![end_lease(1, 10)]),
    ]);
}

#[test]
fn losing_a_worker_ends_its_adopted_leases() {
    check([
        (0, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (0, join_holding(2, &[flex(1)], &[(10, 0)]), vec![]),
        (1_000, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![end_lease(2, 10)]),
        (
            5_000,
            attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]),
            vec![ended(9, 10, Unknown)],
        ),
    ]);
}

#[test]
fn unknown_leases_end_after_the_adoption_window() {
    check([
        (59_999, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (
            60_000,
            join_holding(2, &[flex(1)], &[(20, 0)]),
            vec![end_lease(2, 20)],
        ),
        (
            60_000,
            attach_claiming(9, &[(10, &[(1, 0)]), (20, &[(2, 0)])]),
            vec![ended(9, 20, Unknown)],
        ),
        (60_000, release(9, 10), vec![end_lease(1, 10)]),
    ]);
}

/// A worker, or a client, may report a lease by the id of a request that waits. The request becomes that lease later.
#[test]
fn lease_with_the_id_of_a_waiting_request_is_not_adopted() {
    let engine = check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (0, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (
            1_000,
            join_holding(2, &[flex(1)], &[(20, 0)]),
            vec![end_lease(2, 20)],
        ),
        (
            1_000,
            attach_claiming(8, &[(20, &[(3, 0)])]),
            vec![ended(8, 20, Unknown)],
        ),
        (2_000, release(9, 10), vec![end_lease(1, 10)]),
        (
            2_000,
            released(1, 10),
            vec![granted(9, 2, &[(1, 0, flex(1))])],
        ),
        (2_000, released(2, 20), vec![]),
    ]);
    assert_eq!(engine.leases_of(ClientId(9)), [LeaseId(20)]);
}

#[test]
fn false_report_of_a_lease_ends_it_nowhere_else() {
    check([
        (0, join_holding(2, &[flex(1)], &[(10, 0)]), vec![]),
        (
            0,
            join_holding(1, &[flex(1)], &[(10, 7)]),
            vec![end_lease(1, 10)],
        ),
        (0, attach_claiming(9, &[(10, &[(2, 0)])]), vec![]),
        (0, release(9, 10), vec![end_lease(2, 10)]),
    ]);
}

/// How a worker reports leases that do not exist.
#[derive(Clone, Copy, Debug)]
enum FalseReport {
    /// On a device that it does not have.
    NoDevice,
    /// By no grant.
    NoGrant,
    /// By grants before that of another lease.
    EarlierGrants,
    /// By grants each of which is later than the one before.
    LaterGrants,
}

/// Returns the join of worker 1 with 4,096 leases that do not exist, from the id `first` on.
fn false_join(report: FalseReport, first: u64) -> Event {
    let held: Vec<_> = (first..first + 4_096).map(|lease| (lease, 0)).collect();
    let mut join = join_holding(1, &[flex(1)], &held);
    if let Event::Worker {
        event: WorkerEvent::Join { held, .. },
        ..
    } = &mut join
    {
        for held in held {
            match report {
                FalseReport::NoDevice => held.index = 1,
                FalseReport::NoGrant => held.grant = GrantNumber::ZERO,
                FalseReport::EarlierGrants => held.grant = old_grant(1),
                FalseReport::LaterGrants => {}
            }
        }
    }
    join
}

/// Has worker 1 report 73,728 leases that do not exist, and then workers 2 and 3 two leases that do.
fn check_false_reports(report: FalseReport) {
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    engine.handle(join_holding(1, &[flex(1)], &[(99, 0)]), at(0));
    for n in 1..=18 {
        let join = on_stream(100 + n, false_join(report, n << 16));
        let commands = engine.handle(join, at(0));
        let ends = commands.iter();
        let ends = ends.filter(|it| matches!(it, Command::EndLease { .. }));
        assert!(ends.count() >= 4_095, "{report:?}");
    }
    let real = [(2, 50), (3, 50), (3, 51)];
    for (worker, lease) in real {
        let join = join_holding(worker, &[flex(1), flex(1)], &[(lease, lease as u32 - 50)]);
        let join = on_stream(lease, join);
        assert_eq!(engine.handle(join, at(1_000)), [], "{report:?}");
    }
    let claims: &[(u64, &[(u64, u32)])] = &[(50, &[(2, 0), (3, 0)]), (51, &[(3, 1)])];
    assert_eq!(engine.handle(attach_claiming(9, claims), at(2_000)), []);
    assert_eq!(engine.leases_of(ClientId(9)), [50, 51].map(LeaseId));
}

#[test]
fn leases_reported_on_no_device_do_not_close_the_window_for_others() {
    check_false_reports(FalseReport::NoDevice);
}

#[test]
fn leases_reported_by_no_grant_do_not_close_the_window_for_others() {
    check_false_reports(FalseReport::NoGrant);
}

#[test]
fn leases_reported_by_earlier_grants_do_not_close_the_window_for_others() {
    check_false_reports(FalseReport::EarlierGrants);
}

#[test]
fn leases_reported_by_later_and_later_grants_do_not_close_the_window_for_others() {
    check_false_reports(FalseReport::LaterGrants);
}
