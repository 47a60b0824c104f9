//! Snapshots of suspended leases whose only holder drains.

use super::durable::*;
use super::moves::drain;
use super::several_workers::suspended_on_two_workers;
use super::suspension::*;
use super::*;

/// Lease 10 of client 1 is suspended, worker 1 has its snapshots, and worker 2 joins.
fn worker_2_beside_the_holder() -> Vec<Step> {
    let mut steps = suspended_at_worker_1();
    steps.push((5, join(2, &[exact(16)]), vec![]));
    steps
}

#[test]
fn holder_that_drains_hands_over_to_another_worker() {
    let handed_over = [
        (6, leaving(1), vec![keep(10, 1, 2)]),
        // It has one of two sessions.
        (7, kept(1, &[]), vec![]),
        (
            8,
            kept(1, &[(10, 2)]),
            vec![hold(2, 10), drop_snapshots(1, 10)],
        ),
        (9, worker_left(1), vec![]),
        (10, resume(10), vec![moved(1, 10, 1, 2, 0)]),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(handed_over));
}

#[test]
fn lease_ends_if_nobody_could_take_its_snapshots() {
    let gone = EndReason::SnapshotsLost {
        worker: WorkerId(1),
        name: "w1".into(),
    };
    let small = [
        (5, join(2, &[exact(8), flex(16)]), vec![]),
        (6, leaving(1), vec![]),
        (7, worker_left(1), vec![ended(1, 10, gone)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(small));
}

#[test]
fn snapshots_that_another_worker_has_stay_there() {
    let both = [
        (5, suspend(10), {
            vec![end_and_keep(1, 10), hold(2, 10), suspended(1, 10)]
        }),
        (6, leaving(1), vec![]),
        (7, worker_left(1), vec![]),
        // Now worker 2 is the only one.
        (8, join(3, &[exact(16)]), vec![]),
        (9, leaving(2), vec![keep(10, 2, 3)]),
    ];
    let kept_by_both = kept_by_worker_2().into_iter();
    let kept_by_both = kept_by_both.chain([(4, kept(1, &[(10, 1), (10, 2)]), vec![])]);
    check(kept_by_both.chain(both));
}

#[test]
fn another_worker_takes_the_snapshots_if_the_first_is_lost_or_drains() {
    let lost = [
        (5, join(3, &[exact(16)]), vec![]),
        (6, leaving(1), vec![keep(10, 1, 2)]),
        (7, worker_left(2), vec![keep(10, 1, 3)]),
        (8, join(4, &[exact(16)]), vec![]),
        (9, leaving(3), {
            vec![drop_snapshots(3, 10), hold(1, 10), keep(10, 1, 4)]
        }),
        // A report about the one that is not meant any more.
        (10, kept(1, &[(10, 3)]), vec![]),
        (
            11,
            kept(1, &[(10, 4)]),
            vec![hold(4, 10), drop_snapshots(1, 10)],
        ),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(lost));
}

#[test]
fn handover_goes_on_after_a_stream_broke() {
    let broke = [
        (6, leaving(1), vec![keep(10, 1, 2)]),
        (7, worker_disconnected(2), vec![]),
        (8, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (9, kept(1, &[(10, 2)]), {
            vec![hold(2, 10), drop_snapshots(1, 10)]
        }),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(broke));
}

#[test]
fn handover_is_withdrawn_with_the_lease_and_with_the_drain() {
    let withdrawn = [
        (6, drain(1, true), vec![keep(10, 1, 2)]),
        // The source is told to hold what it has, and to send no more.
        (7, drain(1, false), vec![drop_snapshots(2, 10), hold(1, 10)]),
        (8, drain(1, true), vec![keep(10, 1, 2)]),
        (
            9,
            release(1, 10),
            vec![drop_snapshots(1, 10), drop_snapshots(2, 10)],
        ),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(withdrawn));
}

/// The keeper has what it got before, and is asked for it.
#[test]
fn source_whose_stream_broke_is_told_again() {
    let broke = [
        (6, drain(1, true), vec![keep(10, 1, 2)]),
        (7, worker_disconnected(1), vec![]),
        (8, join(1, &[exact(16)]), vec![hold(1, 10), keep(10, 1, 2)]),
        (
            9,
            kept(1, &[(10, 2)]),
            vec![hold(2, 10), drop_snapshots(1, 10)],
        ),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(broke));
}

/// The parts of a lease must not come together on one worker.
#[test]
fn each_part_of_a_lease_is_handed_over_to_a_worker_of_its_own() {
    let drained = [
        (5, join(3, &[exact(16), exact(16)]), vec![]),
        (6, drain(1, true), vec![keep(10, 1, 3)]),
        // Worker 3 is to be the holder of the other part.
        (7, drain(2, true), vec![]),
        (
            8,
            join(4, &[exact(16), exact(16)]),
            vec![keep_part(10, 1, 2, 4)],
        ),
        (
            9,
            kept(1, &[(10, 3)]),
            vec![hold(3, 10), drop_snapshots(1, 10)],
        ),
        (
            10,
            kept_parts(2, &[(10, 1, 4)]),
            vec![hold(4, 10), drop_snapshots(2, 10)],
        ),
    ];
    check(suspended_on_two_workers().into_iter().chain(drained));
}
