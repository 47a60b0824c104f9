//! How durable leases move to their keepers.

use super::durable::*;
use super::*;
use crate::CannotMove;

#[test]
fn lease_moves_to_its_keeper_when_its_worker_is_lost() {
    let lost = [
        (3, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![moved(1, 10, 1, 2, 0)]),
        // The worker is back, and still runs the lease.
        (
            6_000,
            join_holding(1, &[exact(16)], &[(10, 0)]),
            vec![end_lease(1, 10)],
        ),
        (6_100, released(1, 10), vec![keep(10, 2, 1)]),
        (
            7_000,
            release(1, 10),
            vec![end_lease(2, 10), drop_snapshots(1, 10)],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(lost));
}

#[test]
fn lease_of_several_devices_moves_as_a_whole() {
    let here = [(1, 0, exact(16)), (1, 1, exact(16))];
    check([
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable_of(2, 1, 1), vec![granted(1, 1, &here)]),
        (1, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (
            2,
            join(3, &[exact(16), exact(8), exact(16), exact(16)]),
            vec![drop_snapshots(2, 10), keep(10, 1, 3)],
        ),
        (
            2,
            request(1, 2, 1),
            vec![granted(1, 2, &[(3, 1, exact(8))])],
        ),
        (
            2,
            request_durable(1, 3),
            vec![granted_exact(1, 3, 2, 0), keep(30, 2, 3)],
        ),
        (3, worker_disconnected(1), vec![]),
        (
            5_000,
            tick(),
            vec![moved_to(1, 10, 1, 3, &[0, 2]), keep(10, 3, 2)],
        ),
    ]);
}

/// Lease 10 of client 1 has both devices of worker 1, and worker 2, which has as many, keeps its
/// snapshots. Client 2 has a device of worker 2.
fn pair_kept_by_worker_2() -> Vec<Step> {
    let here = [(1, 0, exact(16)), (1, 1, exact(16))];
    vec![
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable_of(2, 1, 1), vec![granted(1, 1, &here)]),
        (2, join(2, &[exact(16), exact(16)]), vec![keep(10, 1, 2)]),
        (2, attach(2), vec![]),
        (2, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
    ]
}

/// A request that waits for long changes nothing for the lease.
fn without_reservations() -> Options {
    Options {
        reserve_after: Duration::MAX,
        ..Options::default()
    }
}

#[test]
fn lost_lease_ends_when_its_time_is_over() {
    let ended_after = |recover_within, seconds: u64| {
        let mut steps = lost_while_worker_2_is_busy();
        for (_, event, _) in &mut steps {
            if let Event::Client {
                event: ClientEvent::Request { demand, .. },
                ..
            } = event
            {
                demand.recover_within = Some(recover_within);
            }
        }
        let over = ended(1, 10, not_replaced(1, 2));
        let at_last = (seconds * 1000, tick(), vec![drop_snapshots(2, 10), over]);
        check_with(without_reservations(), steps.into_iter().chain([at_last]));
    };
    ended_after(Duration::from_secs(30), 5 + 30);
    ended_after(Duration::ZERO, 5 + 10);
    ended_after(Duration::MAX, 5 + 24 * 3600);
}

/// Lease 10, which needs two devices, is lost. One of its keeper is free, and two requests wait.
pub(super) fn lost_with_one_free_device() -> Vec<Step> {
    let mut steps = pair_kept_by_worker_2();
    steps.extend([
        (2, request(2, 3, 1), vec![granted_exact(2, 3, 2, 1)]),
        (2, request(2, 4, 1), vec![queued(2, 4, 1)]),
        (3, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![interrupted(1, 10, 1, 2)]),
        (5_100, release(2, 20), vec![end_lease(2, 20)]),
        (5_200, released(2, 20), vec![]),
    ]);
    steps
}

#[test]
fn devices_are_held_back_for_a_lost_lease_that_needs_several() {
    let waits = [
        (5_300, request(2, 5, 1), vec![queued(2, 5, 2)]),
        (5_400, release(2, 30), vec![end_lease(2, 30)]),
        (5_500, released(2, 30), vec![moved_to(1, 10, 1, 2, &[0, 1])]),
    ];
    check(lost_with_one_free_device().into_iter().chain(waits));
}

#[test]
fn devices_are_not_held_back_once_the_lost_lease_is_over() {
    let over = [
        (3, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![interrupted(1, 10, 1, 2)]),
        (5_100, request(2, 3, 1), vec![queued(2, 3, 1)]),
        (
            5_200,
            release(1, 10),
            vec![drop_snapshots(2, 10), granted_exact(2, 3, 2, 1)],
        ),
    ];
    check(pair_kept_by_worker_2().into_iter().chain(over));
}

fn unreachable(id: u64, lease: u64) -> Event {
    let lease = LeaseId(lease);
    client(
        id,
        ClientEvent::Unreachable {
            lease,
            worker: None,
        },
    )
}

#[test]
fn lease_moves_at_once_if_client_and_scheduler_miss_its_worker() {
    let lost = [
        (3, kept(1, &[(10, 2)]), vec![]),
        // The scheduler has a stream from the worker.
        (3, unreachable(1, 10), vec![]),
        (4, worker_disconnected(1), vec![]),
        // Not the client's lease.
        (5, attach(2), vec![]),
        (6, unreachable(2, 10), vec![]),
        (7, unreachable(1, 10), vec![moved(1, 10, 1, 2, 0)]),
        (8, unreachable(1, 10), vec![]),
    ];
    let back = [(
        9,
        join_holding(1, &[exact(16)], &[(10, 0)]),
        vec![end_lease(1, 10)],
    )];
    check(kept_by_worker_2().into_iter().chain(lost).chain(back));
}

#[test]
fn lease_waits_for_a_device_of_its_keeper() {
    let free = [
        (5_500, release(2, 20), vec![end_lease(2, 20)]),
        // It comes before the queue.
        (5_600, released(2, 20), vec![moved(1, 10, 1, 2, 0)]),
    ];
    check(lost_while_worker_2_is_busy().into_iter().chain(free));
}

#[test]
fn client_that_was_away_learns_that_its_lease_waits() {
    let away = [
        (5_500, client_disconnected(1), vec![]),
        (
            6_000,
            attach_claiming(1, &[(10, &[(1, 0)])]),
            vec![interrupted(1, 10, 1, 2)],
        ),
    ];
    check(lost_while_worker_2_is_busy().into_iter().chain(away));
}

#[test]
fn lease_goes_on_where_it_was_if_its_worker_is_back_first() {
    let back = [(
        6_000,
        join_holding(1, &[exact(16)], &[(10, 0)]),
        vec![moved(1, 10, 0, 1, 0), keep(10, 1, 2)],
    )];
    check(lost_while_worker_2_is_busy().into_iter().chain(back));
}

#[test]
fn lease_ends_when_its_keeper_is_lost_too() {
    let both_lost = EndReason::nothing_left(lost(1), snapshots_lost(2));
    let lost = [
        (5_001, beat(2), vec![]),
        (6_000, worker_disconnected(2), vec![]),
        (
            10_001,
            tick(),
            vec![
                ended(2, 20, lost(2)),
                ended(1, 10, both_lost.clone()),
                unsatisfiable(2, 3, 1, &[]),
            ],
        ),
    ];
    let expected = "worker w1 (0000000000000001) was lost, and worker w2 (0000000000000002), which kept the \
                    snapshots of the lease, is gone; a lease with a snapshot store (`tensord worker --snapshots`) \
                    outlives that";
    assert_eq!(both_lost.to_string(), expected);
    check(lost_while_worker_2_is_busy().into_iter().chain(lost));
}

#[test]
fn end_names_a_keeper_that_was_lost_shortly_before() {
    let keeper_lost = [
        (2, kept(1, &[(10, 2)]), vec![]),
        (3, worker_left(2), vec![]),
    ];
    let both = EndReason::nothing_left(lost(1), snapshots_lost(2));
    let at_once = [(4, worker_left(1), vec![ended(1, 10, both)])];
    check(
        kept_by_worker_2()
            .into_iter()
            .chain(keeper_lost.clone())
            .chain(at_once),
    );
    // Another one has had the snapshots meanwhile.
    let kept_again = [
        (4, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
        (5, kept(1, &[(10, 3)]), vec![]),
        (6, worker_left(3), vec![]),
        (
            7,
            worker_left(1),
            vec![ended(
                1,
                10,
                EndReason::nothing_left(lost(1), snapshots_lost(3)),
            )],
        ),
    ];
    check(
        kept_by_worker_2()
            .into_iter()
            .chain(keeper_lost)
            .chain(kept_again),
    );
}

#[test]
fn lease_ends_when_no_device_becomes_free_for_long() {
    let over = ended(1, 10, not_replaced(1, 2));
    let too_late = [(3_605_000, tick(), vec![drop_snapshots(2, 10), over])];
    let steps = lost_while_worker_2_is_busy().into_iter().chain(too_late);
    check_with(without_reservations(), steps);
}

#[test]
fn leases_of_a_worker_that_is_about_to_stop_move() {
    let moved = || vec![end_lease(1, 10), moved(1, 10, 1, 2, 0)];
    let stops = [
        (3, leaving(1), vec![]),
        // Of another keeper.
        (4, kept(1, &[(10, 3)]), vec![]),
        (5, kept(1, &[(10, 2)]), moved()),
        (6, kept(1, &[]), vec![]),
        (7, released(1, 10), vec![]),
        (8, worker_left(1), vec![]),
    ];
    check(kept_by_worker_2().into_iter().chain(stops));
    let stops_later = [
        (3, kept(1, &[(10, 2)]), vec![]),
        (4, kept(1, &[]), vec![]),
        (5, leaving(1), vec![]),
        (6, kept(1, &[(10, 2)]), moved()),
    ];
    check(kept_by_worker_2().into_iter().chain(stops_later));
}

#[test]
fn lease_stays_while_its_client_could_not_go_on_elsewhere() {
    let drained = [
        (3, kept(1, &[(10, 2)]), vec![]),
        (4, restorable(1, 10, false), vec![]),
        // Not the client's lease.
        (4, attach(2), vec![]),
        (4, restorable(2, 10, true), vec![]),
        (5, drain(1, true), vec![]),
        (
            6,
            restorable(1, 10, true),
            vec![end_lease(1, 10), moved(1, 10, 1, 2, 0)],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(drained));
    // A new stream.
    let back = [
        (3, kept(1, &[(10, 2)]), vec![]),
        (4, client_disconnected(1), vec![]),
        (5, attach_claiming(1, &[(10, &[(1, 0)])]), vec![]),
        (6, drain(1, true), vec![]),
    ];
    check(kept_by_worker_2().into_iter().chain(back));
}

#[test]
fn lease_moves_to_another_worker_if_its_keeper_has_no_free_device() {
    let stops = [
        (3, attach(2), vec![]),
        (3, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
        (4, kept(1, &[(10, 2)]), vec![]),
        (5, leaving(1), vec![]),
        (6, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
        // The report is from before.
        (7, kept(1, &[(10, 2)]), vec![]),
        (
            8,
            kept(1, &[(10, 3)]),
            vec![
                drop_snapshots(2, 10),
                end_lease(1, 10),
                moved(1, 10, 1, 3, 0),
                keep(10, 3, 2),
            ],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(stops));
}

/// The new keeper has nothing yet when the worker is lost.
#[test]
fn snapshots_stay_at_a_keeper_until_the_next_one_has_them() {
    let waits = Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w2".into()],
        needs_all: false,
        cause: Some(lost(1)),
    };
    let lost_early = [
        (3, kept(1, &[(10, 2)]), vec![]),
        (3, leaving(2), vec![]),
        (4, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
        (
            5,
            worker_left(1),
            vec![
                drop_snapshots(3, 10),
                super::suspension::hold(2, 10),
                waits,
                keep(10, 2, 3),
            ],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(lost_early));
}

pub(super) fn drain(id: u64, is_drained: bool) -> Event {
    let worker = WorkerId(id);
    Event::Drain { worker, is_drained }
}

#[test]
fn leases_move_away_from_a_drained_worker() {
    let drained = [
        (3, kept(1, &[(10, 2)]), vec![]),
        (
            4,
            drain(1, true),
            vec![end_lease(1, 10), moved(1, 10, 1, 2, 0)],
        ),
        (5, released(1, 10), vec![]),
        // It is drained on its next stream, too: it neither keeps snapshots nor gets leases.
        (6, worker_disconnected(1), vec![]),
        (7, join(1, &[exact(16)]), vec![]),
        (8, request(1, 2, 1), vec![queued(1, 2, 1)]),
        (
            9,
            drain(1, false),
            vec![granted_exact(1, 2, 1, 0), keep(10, 2, 1)],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(drained));
}

#[test]
fn lease_moves_at_an_administrators_command() {
    let move_lease = |lease| Event::MoveLease {
        lease: LeaseId(lease),
    };
    let moves = [
        (3, move_lease(99), vec![]),
        // The keeper has no snapshots.
        (4, move_lease(10), vec![]),
        (5, kept(1, &[(10, 2)]), vec![]),
        (
            6,
            move_lease(10),
            vec![end_lease(1, 10), moved(1, 10, 1, 2, 0)],
        ),
        (7, released(1, 10), vec![keep(10, 2, 1)]),
    ];
    check(kept_by_worker_2().into_iter().chain(moves));
}

#[test]
fn reason_why_a_lease_cannot_move_names_what_is_missing() {
    let mut engine = Engine::new(Options::default(), 1, at(0));
    let mut check = |events: Vec<Event>, lease: u64, expected: Result<&str, CannotMove>| {
        for event in events {
            engine.handle(with_assignments(&engine, event), at(1));
        }
        let expected = expected.map(str::to_owned);
        assert_eq!(engine.check_move(LeaseId(lease)), expected);
    };
    let keeper = || "w2".to_owned();
    check(vec![], 10, Err(CannotMove::Unknown));
    let ready = vec![
        join(1, &[exact(16), exact(16), flex(16), exact(16), exact(16)]),
        attach(1),
        request_durable(1, 1),
    ];
    check(ready, 10, Err(CannotMove::NoKeeper));
    let joined = vec![join(2, &[exact(16)])];
    check(joined, 10, Err(CannotMove::NotRestorable));
    check(
        vec![restorable(1, 10, true)],
        10,
        Err(CannotMove::NoSnapshots { keeper: keeper() }),
    );
    check(vec![kept(1, &[(10, 2)])], 10, Ok("w2"));
    check(
        vec![client_disconnected(1)],
        10,
        Err(CannotMove::ClientAway),
    );
    let back = vec![attach(2), request(2, 2, 1)];
    check(back, 20, Err(CannotMove::NotDurable));
}

#[test]
fn lease_waits_if_its_worker_leaves_before_it_could_move() {
    let gone = not_replaced_after(left(1), 2);
    let reason = gone.clone();
    let interrupted = Command::Interrupted {
        client: ClientId(1),
        lease: LeaseId(10),
        reason,
    };
    let stops = [
        (3, attach(2), vec![]),
        (3, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
        (4, kept(1, &[(10, 2)]), vec![]),
        (5, leaving(1), vec![]),
        (6, worker_left(1), vec![interrupted]),
    ];
    let frees = [
        (7, release(2, 20), vec![end_lease(2, 20)]),
        (8, released(2, 20), vec![moved(1, 10, 1, 2, 0)]),
    ];
    let waits = || kept_by_worker_2().into_iter().chain(stops.clone());
    check(waits().chain(frees));
    let over = (
        3_600_006,
        tick(),
        vec![drop_snapshots(2, 10), ended(1, 10, gone)],
    );
    check(waits().chain([over]));
}

#[test]
fn lease_moves_if_its_client_alone_misses_its_worker_for_long() {
    let reports = |from: u64, to: u64| {
        let times = (from..to).step_by(1_000);
        times.map(|at| (at, unreachable(1, 10), vec![]))
    };
    let moves = || vec![end_lease(1, 10), moved(1, 10, 1, 2, 0)];
    let known = [(3, kept(1, &[(10, 2)]), vec![])];
    let steps = kept_by_worker_2().into_iter().chain(known.clone());
    let long = reports(1_000, 11_000).chain([(11_000, unreachable(1, 10), moves())]);
    check(steps.clone().chain(long));
    // The client reached the worker in between.
    let twice = reports(1_000, 9_000).chain(reports(12_000, 22_000));
    check(steps.chain(twice));
    // The keeper has no snapshots.
    check(kept_by_worker_2().into_iter().chain(reports(1_000, 20_000)));
}

#[test]
fn client_that_was_away_learns_where_its_lease_is() {
    let away = [
        (3, worker_disconnected(1), vec![]),
        (4, client_disconnected(1), vec![]),
        // Nobody could open its sessions.
        (5_000, tick(), vec![]),
        (
            6_000,
            attach_claiming(1, &[(10, &[(1, 0)])]),
            vec![moved(1, 10, 1, 2, 0)],
        ),
        // The message was lost with the stream.
        (7_000, client_disconnected(1), vec![]),
        (
            8_000,
            attach_claiming(1, &[(10, &[(1, 0)])]),
            vec![moved(1, 10, 1, 2, 0)],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(away));
}

#[test]
fn lease_of_devices_without_fingerprints_has_no_keeper() {
    let durable = |request: u64, devices, kind: &str| {
        let kind = Some(kind.into());
        let demand = Demand {
            devices,
            kind,
            memory_bytes: 0,
            durability: Durability::Auto,
            recover_within: None,
            max_duration: None,
            is_spot: false,
            may_end: false,
            share_permille: None,
        };
        request_for(1, request, demand)
    };
    let several = granted(1, 1, &[(1, 0, exact(16)), (1, 1, exact(16))]);
    check([
        (0, join(1, &[exact(16), exact(16), cuda(8)]), vec![]),
        (0, join(2, &[exact(16), cuda(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, durable(1, 2, "flex"), vec![several, keep(10, 1, 2)]),
        (
            2,
            durable(2, 1, "cuda"),
            vec![granted(1, 2, &[(1, 2, cuda(8))])],
        ),
        (3, request(1, 3, 1), vec![granted_exact(1, 3, 2, 0)]),
    ]);
}

#[test]
fn lease_does_not_move_to_a_device_with_less_memory() {
    check([
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        // It only keeps the snapshots.
        (2, join(2, &[exact(8)]), vec![keep(10, 1, 2)]),
        (
            3,
            join(3, &[exact(32)]),
            vec![drop_snapshots(2, 10), keep(10, 1, 3)],
        ),
    ]);
}

#[test]
fn restarted_scheduler_ends_a_lease_where_it_was_before_it_moved() {
    let back = join_holding(2, &[exact(16)], &[(10, 0)]);
    check([
        (0, join_holding(1, &[exact(16)], &[(10, 0)]), vec![]),
        (1, back, vec![]),
        (
            2,
            attach_claiming(1, &[(10, &[(2, 0)])]),
            vec![end_lease(1, 10)],
        ),
    ]);
}
