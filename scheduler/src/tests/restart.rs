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
fn a_lease_a_worker_still_runs_keeps_its_device() {
    let engine = check([
        (0, join_holding(1, &[flex(1), flex(1)], &[(10, 0)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
        (0, request(9, 3, 1), vec![granted(9, 3, &[(1, 1, flex(1))])]),
    ]);
    assert_eq!(engine.snapshot().leases, 2);
}

#[test]
fn an_adopted_lease_that_nobody_claims_expires() {
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
fn an_adopted_lease_that_is_claimed_is_the_clients() {
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
fn a_claim_whose_worker_stays_away_ends() {
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
fn to_come_and_go_does_not_put_off_the_end_of_a_claim() {
    check([
        (0, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (10_000, client_gone(9), vec![]),
        (
            20_000,
            on(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (30_000, tick(), vec![ended(9, 10, missing(1))]),
    ]);
}

#[test]
fn a_lease_of_two_workers_is_one_lease() {
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
fn a_claim_brings_the_devices_the_worker_did_not_tell_of() {
    check([
        (0, join_holding(1, &[flex(1), flex(1)], &[(10, 0)]), vec![]),
        (0, attach_claiming(9, &[(10, &[(1, 0), (1, 1)])]), vec![]),
        (0, request(9, 2, 1), vec![queued(9, 2, 1)]),
        (0, release(9, 10), vec![end_lease(1, 10)]),
        (0, released(1, 10), vec![granted(9, 2, &[(1, 0, flex(1))])]),
    ]);
}

#[test]
fn a_claim_comes_too_late_for_a_device_leased_anew() {
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
fn of_two_claims_to_a_device_the_one_that_runs_there_stays() {
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
fn of_two_leases_a_worker_runs_on_a_device_the_known_one_stays() {
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
fn a_worker_cannot_run_what_it_does_not_have() {
    let engine = check([(
        0,
        join_holding(1, &[flex(1)], &[(10, 7)]),
        vec![end_lease(1, 10)],
    )]);
    assert_eq!(engine.snapshot().leases, 0);
}

#[test]
fn a_client_that_attached_with_a_claim_may_go_again() {
    check([
        (0, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (10_000, attach_claiming(9, &[(10, &[(1, 0)])]), vec![]),
        (20_000, client_gone(9), vec![]),
        (50_000, tick(), vec![end_lease(1, 10)]),
    ]);
}

#[test]
fn the_loss_of_a_worker_ends_what_it_was_adopted_with() {
    check([
        (0, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (0, join_holding(2, &[flex(1)], &[(10, 0)]), vec![]),
        (1_000, worker_gone(1), vec![]),
        (5_000, tick(), vec![end_lease(2, 10)]),
        (
            5_000,
            attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]),
            vec![ended(9, 10, Unknown)],
        ),
    ]);
}

#[test]
fn after_a_while_an_unknown_lease_is_one_that_ended() {
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
