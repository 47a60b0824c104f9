//! Leases that are suspended and resumed.

use super::durable::*;
use super::*;
use crate::{CannotMove, CannotResume};

pub(super) fn suspend(lease: u64) -> Event {
    let lease = LeaseId(lease);
    let by = Suspender::Administrator;
    Event::SuspendLease { lease, by }
}

pub(super) fn resume(lease: u64) -> Event {
    let lease = LeaseId(lease);
    let by = Suspender::Administrator;
    Event::ResumeLease { lease, by }
}

pub(super) fn suspended(client: u64, lease: u64) -> Command {
    waits_for(client, lease, &[])
}

/// The client learns that its lease was resumed and waits for devices of these workers.
pub(super) fn waits_for(client: u64, lease: u64, workers: &[u64]) -> Command {
    Command::Suspended {
        client: ClientId(client),
        lease: LeaseId(lease),
        waits_for: workers.iter().map(|worker| format!("w{worker}")).collect(),
        needs_all: false,
        cause: None,
    }
}

/// A worker ends a lease and keeps its snapshots.
pub(super) fn end_and_keep(worker: u64, lease: u64) -> Command {
    Command::EndLease {
        worker: WorkerId(worker),
        lease: LeaseId(lease),
        grants: Vec::new(),
        hold_snapshots: true,
    }
}

pub(super) fn hold(holder: u64, lease: u64) -> Command {
    Command::HoldSnapshots {
        holder: WorkerId(holder),
        lease: LeaseId(lease),
        part: None,
    }
}

/// A worker holds the snapshots of a part of a lease.
pub(super) fn hold_part(holder: u64, lease: u64, index: u32) -> Command {
    Command::HoldSnapshots {
        holder: WorkerId(holder),
        lease: LeaseId(lease),
        part: Some(index),
    }
}

/// Lease 10 of client 1 runs at worker 1, the only one, which has its snapshots.
pub(super) fn kept_by_worker_1() -> Vec<Step> {
    vec![
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        (1, restorable(1, 10, true), vec![]),
        (2, kept(1, &[(10, 1)]), vec![]),
    ]
}

/// As [`kept_by_worker_1`], and the lease is suspended.
pub(super) fn suspended_at_worker_1() -> Vec<Step> {
    let mut steps = kept_by_worker_1();
    steps.extend([
        (3, suspend(10), vec![end_and_keep(1, 10), suspended(1, 10)]),
        (4, released(1, 10), vec![]),
    ]);
    steps
}

#[test]
fn workers_with_snapshots_of_a_lease_are_known() {
    let owner = |engine: &Engine, workers: [u64; 3]| {
        workers.map(|worker| {
            let owner = engine.owner_of_snapshots(LeaseId(10), WorkerId(worker));
            owner.map(|client| client.0)
        })
    };
    let engine = check(kept_by_worker_2());
    assert_eq!(owner(&engine, [1, 2, 3]), [Some(1), Some(1), None]);
    assert!(engine.is_running(LeaseId(10)));
    assert_eq!(engine.tenant_of(LeaseId(10)), Some(&"default".into()));
    let engine = check(suspended_at_worker_1());
    assert_eq!(owner(&engine, [1, 2, 3]), [Some(1), None, None]);
    assert!(!engine.is_running(LeaseId(10)));
    let engine = check(Vec::new());
    assert_eq!(owner(&engine, [1, 2, 3]), [None; 3]);
    assert_eq!(engine.tenant_of(LeaseId(10)), None);
}

#[test]
fn client_resumes_only_what_it_has_suspended() {
    let suspend_by = |by| Event::SuspendLease {
        lease: LeaseId(10),
        by,
    };
    let engine = check(suspended_at_worker_1());
    assert_eq!(
        engine.check_resume(LeaseId(10), Suspender::Client),
        Err(CannotResume::ByAdministrator)
    );
    let by_client = Event::ResumeLease {
        lease: LeaseId(10),
        by: Suspender::Client,
    };
    let refused = [(5, by_client.clone(), vec![])];
    check(suspended_at_worker_1().into_iter().chain(refused));
    let own = [
        (
            3,
            suspend_by(Suspender::Client),
            vec![end_and_keep(1, 10), suspended(1, 10)],
        ),
        (4, released(1, 10), vec![]),
        (5, by_client, vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(kept_by_worker_1().into_iter().chain(own));
}

#[test]
fn administrator_takes_over_what_the_client_has_suspended() {
    let by_client = Event::SuspendLease {
        lease: LeaseId(10),
        by: Suspender::Client,
    };
    let steps = [
        (3, by_client, vec![end_and_keep(1, 10), suspended(1, 10)]),
        (4, suspend(10), vec![suspended(1, 10)]),
    ];
    let engine = check(kept_by_worker_1().into_iter().chain(steps));
    assert_eq!(
        engine.check_resume(LeaseId(10), Suspender::Client),
        Err(CannotResume::ByAdministrator)
    );
}

#[test]
fn client_suspends_a_few_leases() {
    let mut steps = vec![(0, join(1, &[exact(16)]), vec![]), (0, attach(1), vec![])];
    for request in 1..9 {
        let lease = request * 10;
        steps.extend([
            (
                request,
                request_durable(1, request),
                vec![granted_exact(1, request, 1, 0)],
            ),
            (request, restorable(1, lease, true), vec![]),
            (request, kept(1, &[(lease, 1)]), vec![]),
            (
                request,
                Event::SuspendLease {
                    lease: LeaseId(lease),
                    by: Suspender::Client,
                },
                vec![end_and_keep(1, lease), suspended(1, lease)],
            ),
            (request, released(1, lease), vec![]),
        ]);
    }
    steps.extend([
        (9, request_durable(1, 9), vec![granted_exact(1, 9, 1, 0)]),
        (9, restorable(1, 90, true), vec![]),
        (9, kept(1, &[(90, 1)]), vec![]),
    ]);
    let engine = check(steps);
    let check = |by| engine.check_suspend(LeaseId(90), by);
    let limit = CannotMove::ClientLimit { max: 8 };
    assert_eq!(check(Suspender::Client), Err(limit));
    assert_eq!(check(Suspender::Administrator), Ok(()));
}

#[test]
fn two_leases_take_turns_on_one_device() {
    let turns = [
        (5, attach(2), vec![]),
        (5, request_durable(2, 2), vec![granted_exact(2, 2, 1, 0)]),
        (5, restorable(2, 20, true), vec![]),
        (6, resume(10), vec![waits_for(1, 10, &[1])]),
        (7, kept(1, &[(20, 1)]), vec![]),
        (8, suspend(20), vec![end_and_keep(1, 20), suspended(2, 20)]),
        (9, released(1, 20), vec![moved(1, 10, 1, 1, 0)]),
        (10, resume(20), vec![waits_for(2, 20, &[1])]),
        (11, release(1, 10), vec![end_lease(1, 10)]),
        (12, released(1, 10), vec![moved(2, 20, 1, 1, 0)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(turns));
}

#[test]
fn worker_keeps_the_snapshots_of_a_lease_whose_announcement_it_has_not_received() {
    let steps = [
        (5, resume(10), vec![moved(1, 10, 1, 1, 0)]),
        (6, worker_disconnected(1), vec![]),
        (7, super::records::join_as_holder(1), vec![]),
    ];
    check(suspended_at_worker_1().into_iter().chain(steps));
}

#[test]
fn resumed_lease_comes_before_the_queue() {
    let waits = [
        (5, attach(2), vec![]),
        (5, request(2, 2, 1), vec![granted_exact(2, 2, 1, 0)]),
        (5, request(2, 3, 1), vec![queued(2, 3, 1)]),
        (6, resume(10), vec![waits_for(1, 10, &[1])]),
        (7, release(2, 20), vec![end_lease(1, 20)]),
        (8, released(1, 20), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(waits));
}

#[test]
fn lease_is_resumed_only_after_its_worker_has_released_it() {
    let steps = [
        (3, suspend(10), vec![end_and_keep(1, 10), suspended(1, 10)]),
        (4, resume(10), vec![waits_for(1, 10, &[1])]),
        // The stream broke before the worker received the command.
        (5, worker_disconnected(1), vec![]),
        (
            6,
            join_holding(1, &[exact(16)], &[(10, 0)]),
            vec![end_and_keep(1, 10), hold(1, 10)],
        ),
        (7, released(1, 10), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(kept_by_worker_1().into_iter().chain(steps));
}

#[test]
fn lease_is_resumed_at_either_worker_that_has_its_snapshots() {
    let suspended = [
        (3, kept(1, &[(10, 1), (10, 2)]), vec![]),
        (
            4,
            suspend(10),
            vec![end_and_keep(1, 10), hold(2, 10), suspended(1, 10)],
        ),
        (5, released(1, 10), vec![]),
        (5, attach(2), vec![]),
        (5, request(2, 2, 1), vec![granted_exact(2, 2, 1, 0)]),
    ];
    let steps = kept_by_worker_2().into_iter().chain(suspended);
    let elsewhere = (
        6,
        resume(10),
        vec![drop_snapshots(1, 10), moved(1, 10, 1, 2, 0), keep(10, 2, 1)],
    );
    check(steps.clone().chain([elsewhere]));
    // One of them is lost meanwhile, and then the other one.
    let over = Command::LeaseEnded {
        client: ClientId(1),
        lease: LeaseId(10),
        reason: snapshots_lost(1),
    };
    let gone = [
        (6, worker_left(2), vec![]),
        (7, worker_left(1), vec![ended(2, 20, lost(1)), over]),
    ];
    check(steps.chain(gone));
}

#[test]
fn worker_that_drains_does_not_keep_a_suspended_lease() {
    let drained = [
        (3, attach(2), vec![]),
        (3, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
        (4, leaving(1), vec![]),
        (5, kept(1, &[(10, 1), (10, 2)]), vec![]),
        (
            6,
            suspend(10),
            vec![end_lease(1, 10), hold(2, 10), suspended(1, 10)],
        ),
        (7, worker_left(1), vec![]),
    ];
    check(kept_by_worker_2().into_iter().chain(drained));
}

#[test]
fn client_that_was_away_learns_that_its_lease_is_suspended() {
    let away = [
        (5, client_disconnected(1), vec![]),
        (
            6,
            attach_claiming(1, &[(10, &[(1, 0)])]),
            vec![suspended(1, 10)],
        ),
        (7, resume(10), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(away));
}

#[test]
fn worker_that_joins_again_drops_snapshots_of_leases_that_are_over() {
    let again = |suspended: &[u64]| {
        let joined = join(1, &[exact(16)]);
        let Event::Worker { event, .. } = joined else {
            unreachable!()
        };
        let mut event = event;
        if let WorkerEvent::Join {
            suspended: held, ..
        } = &mut event
        {
            *held = suspended.iter().map(|id| LeaseId(*id)).collect();
        }
        worker(1, event)
    };
    let back = [
        (5, worker_disconnected(1), vec![]),
        (6, again(&[10]), vec![hold(1, 10)]),
        (7, worker_disconnected(1), vec![]),
        (8, release(1, 10), vec![]),
        (9, again(&[10]), vec![drop_snapshots(1, 10)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(back));
}

#[test]
fn suspended_lease_ends_with_its_client() {
    let gone = [
        (5, client_disconnected(1), vec![]),
        (30_005, tick(), vec![drop_snapshots(1, 10)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(gone));
    let released = [(5, release(1, 10), vec![drop_snapshots(1, 10)])];
    check(suspended_at_worker_1().into_iter().chain(released));
}

#[test]
fn reasons_name_what_is_missing() {
    let engine = check(suspended_at_worker_1());
    assert_eq!(
        engine.check_suspend(LeaseId(10), Suspender::Administrator),
        Err(CannotMove::Suspended)
    );
    assert_eq!(engine.check_move(LeaseId(10)), Err(CannotMove::Suspended));
    assert_eq!(
        engine.check_resume(LeaseId(10), Suspender::Administrator),
        Ok(())
    );
    assert_eq!(
        engine.check_resume(LeaseId(99), Suspender::Administrator),
        Err(CannotResume::Unknown)
    );
    let engine = check(kept_by_worker_1());
    let not_suspended = Err(CannotResume::NotSuspended);
    assert_eq!(
        engine.check_resume(LeaseId(10), Suspender::Administrator),
        not_suspended
    );
    let no_room = kept_by_worker_1()
        .into_iter()
        .chain([(3, kept(1, &[]), vec![])]);
    let engine = check(no_room);
    assert_eq!(
        engine.check_suspend(LeaseId(10), Suspender::Administrator),
        Err(CannotMove::NoHolder)
    );
    let waits = suspended_at_worker_1().into_iter().chain([
        (5, attach(2), vec![]),
        (5, request(2, 2, 1), vec![granted_exact(2, 2, 1, 0)]),
        (6, resume(10), vec![waits_for(1, 10, &[1])]),
    ]);
    let engine = check(waits.clone());
    assert_eq!(
        engine.check_resume(LeaseId(10), Suspender::Administrator),
        Err(CannotResume::Resumed)
    );
    let waits_no_more = (7, suspend(10), vec![suspended(1, 10)]);
    let after = check(waits.chain([waits_no_more]));
    assert_eq!(
        after.check_resume(LeaseId(10), Suspender::Administrator),
        Ok(())
    );
    let away = kept_by_worker_1()
        .into_iter()
        .chain([(3, worker_disconnected(1), vec![])]);
    let away = check(away);
    assert_eq!(
        away.check_suspend(LeaseId(10), Suspender::Administrator),
        Err(CannotMove::WorkerAway)
    );
    let snapshot = engine.lease(LeaseId(10)).unwrap().suspension.unwrap();
    assert!(snapshot.is_resumed && snapshot.holders == ["w1"]);
}
