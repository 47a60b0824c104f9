//! Snapshots of suspended leases whose only holder drains.

use super::durable::*;
use super::moves::drain;
use super::several_workers::{
    drop_part, keep_each_other, kept_by_each_other, moved_to_several, suspended_on_two_workers,
    waits_because,
};
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
            vec![hold_part(2, 10, 0), drop_snapshots(1, 10)],
        ),
        (9, worker_left(1), vec![]),
        (10, resume(10), vec![moved(1, 10, 1, 2, 0)]),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(handed_over));
}

#[test]
fn a_worker_that_joins_later_takes_the_snapshots_of_a_holder_that_drains() {
    let joined = [
        (6, leaving(1), vec![]),
        (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        // The next one takes over if that is lost.
        (8, worker_left(2), vec![]),
        (9, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(joined));
}

#[test]
fn lease_ends_if_nobody_could_take_its_snapshots() {
    let gone = snapshots_lost(1);
    let alone = [
        (6, leaving(1), vec![]),
        (7, worker_left(1), vec![ended(1, 10, gone)]),
    ];
    check(suspended_at_worker_1().into_iter().chain(alone));
}

/// Two hosts with different devices: the lease goes on when its host is back.
#[test]
fn worker_with_other_devices_keeps_the_snapshots_of_a_lost_one() {
    let lost_1 = EndReason::NotReplaced {
        gone: Box::new(lost(1)),
        places: SnapshotPlaces::Keeper("w2".into()),
    };
    let waits = |reason| Command::Interrupted {
        client: ClientId(1),
        lease: LeaseId(10),
        reason,
    };
    let resumed = Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w2".into()],
        needs_all: false,
        cause: Some(lost(1)),
    };
    let replaced = [
        (2, join(2, &[flex(16)]), vec![keep(10, 1, 2)]),
        (3, kept(1, &[(10, 2)]), vec![]),
        (4, worker_left(1), vec![waits(lost_1)]),
        (
            5,
            join(3, &[exact(16)]),
            vec![hold(2, 10), resumed, keep(10, 2, 3)],
        ),
        (
            6,
            kept(2, &[(10, 3)]),
            vec![
                hold_part(3, 10, 0),
                hold_part(2, 10, 0),
                drop_snapshots(2, 10),
                moved(1, 10, 1, 3, 0),
                keep(10, 3, 2),
            ],
        ),
    ];
    let before = kept_by_worker_2().into_iter().take(4);
    check(before.chain(replaced));
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
            vec![drop_snapshots(3, 10), hold_part(1, 10, 0), keep(10, 1, 4)]
        }),
        // A report about the one that is not meant any more.
        (10, kept(1, &[(10, 3)]), vec![]),
        (
            11,
            kept(1, &[(10, 4)]),
            vec![hold_part(4, 10, 0), drop_snapshots(1, 10)],
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
            vec![hold_part(2, 10, 0), drop_snapshots(1, 10)]
        }),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(broke));
}

#[test]
fn handover_is_withdrawn_with_the_lease_and_with_the_drain() {
    let withdrawn = [
        (6, drain(1, true), vec![keep(10, 1, 2)]),
        // The source is told to hold what it has, and to send no more.
        (
            7,
            drain(1, false),
            vec![drop_snapshots(2, 10), hold_part(1, 10, 0)],
        ),
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
            vec![hold_part(2, 10, 0), drop_snapshots(1, 10)],
        ),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(broke));
}

/// One worker can hold both parts of a lease, and gets the second only if there is no other.
#[test]
fn parts_of_a_lease_are_handed_over_to_different_workers() {
    let drained = [
        (5, join(3, &[exact(16), exact(16)]), vec![]),
        (6, drain(1, true), vec![keep(10, 1, 3)]),
        (7, join(4, &[exact(16), exact(16)]), vec![]),
        (8, drain(2, true), vec![keep_part(10, 1, 2, 4)]),
        (
            9,
            kept(1, &[(10, 3)]),
            vec![hold_part(3, 10, 0), drop_snapshots(1, 10)],
        ),
        (
            10,
            kept_parts(2, &[(10, 1, 4)]),
            vec![hold_part(4, 10, 1), drop_snapshots(2, 10)],
        ),
    ];
    check(suspended_on_two_workers().into_iter().chain(drained));
}

/// Client 2 has the device of the only holder of lease 10, which is resumed.
pub(super) fn resumed_while_its_holder_is_busy() -> Vec<Step> {
    let mut steps = suspended_at_worker_1();
    steps.extend([
        (5, attach(2), vec![]),
        (5, request(2, 2, 1), vec![granted_exact(2, 2, 1, 0)]),
        (6, resume(10), vec![waits_for(1, 10, &[1])]),
    ]);
    steps
}

#[test]
fn resumed_lease_goes_on_where_devices_are_free_first() {
    let elsewhere = [
        (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        // The device is held back for the lease meanwhile.
        (8, request(2, 3, 1), vec![queued(2, 3, 1)]),
        (
            9,
            kept(1, &[(10, 2)]),
            vec![
                hold_part(2, 10, 0),
                hold_part(1, 10, 0),
                drop_snapshots(1, 10),
                moved(1, 10, 1, 2, 0),
                keep(10, 2, 1),
            ],
        ),
    ];
    check(
        resumed_while_its_holder_is_busy()
            .into_iter()
            .chain(elsewhere),
    );
}

#[test]
fn handover_is_withdrawn_if_devices_of_the_holder_are_free_first() {
    let at_holder = [
        (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (8, release(2, 20), vec![end_lease(1, 20)]),
        (
            9,
            released(1, 20),
            vec![drop_snapshots(2, 10), moved(1, 10, 1, 1, 0), keep(10, 1, 2)],
        ),
        // A report about the handover.
        (10, kept(1, &[(10, 2)]), vec![]),
    ];
    check(
        resumed_while_its_holder_is_busy()
            .into_iter()
            .chain(at_holder),
    );
}

#[test]
fn handover_goes_to_another_worker_if_the_first_is_gone() {
    let lost = [
        (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (8, join(3, &[exact(16)]), vec![]),
        (9, worker_left(2), vec![keep(10, 1, 3)]),
        (10, kept(1, &[(10, 2)]), vec![]),
        (
            11,
            kept(1, &[(10, 3)]),
            vec![
                hold_part(3, 10, 0),
                hold_part(1, 10, 0),
                drop_snapshots(1, 10),
                moved(1, 10, 1, 3, 0),
                keep(10, 3, 1),
            ],
        ),
    ];
    check(resumed_while_its_holder_is_busy().into_iter().chain(lost));
}

/// The lease does not wait for the keeper's device, which another lease has.
#[test]
fn lost_lease_goes_on_where_devices_are_free() {
    let waits = |cause: EndReason| Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w2".into()],
        needs_all: false,
        cause: Some(cause),
    };
    let elsewhere = [
        (4, kept(1, &[(10, 2)]), vec![]),
        (4, attach(2), vec![]),
        (4, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
        (5, worker_left(1), vec![interrupted(1, 10, 1, 2)]),
        // Without a device for it.
        (6, join(3, &[exact(8)]), vec![]),
        (
            7,
            join(4, &[exact(16)]),
            vec![hold(2, 10), waits(lost(1)), keep(10, 2, 4)],
        ),
        // The worker is back, too late.
        (
            8,
            join_holding(1, &[exact(16)], &[(10, 0)]),
            vec![end_lease(1, 10)],
        ),
        (
            9,
            kept(2, &[(10, 4)]),
            vec![
                hold_part(4, 10, 0),
                hold_part(2, 10, 0),
                drop_snapshots(2, 10),
                moved(1, 10, 1, 4, 0),
                keep(10, 4, 2),
            ],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(elsewhere));
}

/// The only other worker of the lease has the snapshots of the lost one, and no device for them.
#[test]
fn lease_that_had_the_whole_pool_goes_on_when_a_worker_joins() {
    let replaced = [
        (
            3,
            worker_left(1),
            vec![end_and_keep(2, 10), waits_because(lost(1), &["w2"])],
        ),
        (4, released(2, 10), vec![]),
        (5, attach(2), vec![]),
        // One device of two.
        (5, join(3, &[exact(16)]), vec![]),
        (6, join(4, &[exact(16), exact(16)]), vec![keep(10, 2, 4)]),
        (7, request(2, 2, 2), vec![queued(2, 2, 1)]),
        (8, kept(2, &[(10, 4)]), {
            let moved = moved_to_several(1, &[(4, 0, 16), (4, 1, 16), (2, 0, 16)]);
            vec![
                hold_part(4, 10, 0),
                hold_part(2, 10, 0),
                drop_part(2, 0),
                moved,
                keep_part(10, 1, 2, 3),
                keep(10, 4, 3),
            ]
        }),
    ];
    check(kept_by_each_other().into_iter().chain(replaced));
}

/// Both workers of a lease are restarted, one after the other, and there are no others.
#[test]
fn workers_of_a_lease_that_has_the_whole_pool_are_replaced_one_by_one() {
    let replaced = [
        // It keeps the snapshots of the other part until it is gone.
        (3, leaving(1), vec![]),
        (
            4,
            worker_left(1),
            vec![end_and_keep(2, 10), waits_because(left(1), &["w2"])],
        ),
        (5, released(2, 10), vec![]),
        (6, join(3, &[exact(16), exact(16)]), vec![keep(10, 2, 3)]),
        (7, kept(2, &[(10, 3)]), {
            let moved = moved_to_several(1, &[(3, 0, 16), (3, 1, 16), (2, 0, 16)]);
            let mut commands = vec![
                hold_part(3, 10, 0),
                hold_part(2, 10, 0),
                drop_part(2, 0),
                moved,
            ];
            commands.extend(keep_each_other(3, 2));
            commands
        }),
    ];
    check(kept_by_each_other().into_iter().chain(replaced));
}

#[test]
fn handover_that_fails_is_tried_with_another_worker() {
    let failed = [
        (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (8, join(3, &[exact(16)]), vec![]),
        (
            9,
            not_handed_over(1, 10, 2, HandoverOutcome::Failed),
            vec![drop_snapshots(2, 10), hold_part(1, 10, 0), keep(10, 1, 3)],
        ),
        (
            10,
            not_handed_over(1, 10, 3, HandoverOutcome::Failed),
            vec![drop_snapshots(3, 10), hold_part(1, 10, 0)],
        ),
        // Their devices are not held back meanwhile.
        (
            11,
            request(2, 3, 1),
            vec![granted(2, 3, &[(2, 0, exact(16))])],
        ),
        (30_009, beat(1), vec![]),
        (30_010, beat(1), vec![keep(10, 1, 3)]),
    ];
    check(resumed_while_its_holder_is_busy().into_iter().chain(failed));
}

/// Both parts are sent at the same time, each by a worker of its own.
#[test]
fn one_worker_receives_two_parts() {
    let drained = [
        (5, join(3, &[exact(16), exact(16)]), vec![]),
        (6, drain(1, true), vec![keep(10, 1, 3)]),
        (7, drain(2, true), vec![keep_part(10, 1, 2, 3)]),
        (
            8,
            kept(1, &[(10, 3)]),
            vec![hold_part(3, 10, 0), drop_snapshots(1, 10)],
        ),
        (
            9,
            kept_parts(2, &[(10, 1, 3)]),
            vec![hold_part(3, 10, 1), drop_snapshots(2, 10)],
        ),
    ];
    check(suspended_on_two_workers().into_iter().chain(drained));
}

/// The keeper of a lost lease is about to stop.
#[test]
fn keeper_that_drains_hands_a_lost_lease_over() {
    let waits = Command::Suspended {
        client: ClientId(1),
        lease: LeaseId(10),
        waits_for: vec!["w2".into()],
        needs_all: false,
        cause: Some(lost(1)),
    };
    let drained = [
        (4, kept(1, &[(10, 2)]), vec![]),
        (4, attach(2), vec![]),
        (4, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
        (5, worker_left(1), vec![interrupted(1, 10, 1, 2)]),
        (6, leaving(2), vec![hold(2, 10), waits]),
        (7, join(3, &[exact(16)]), vec![keep(10, 2, 3)]),
        (
            8,
            kept(2, &[(10, 3)]),
            vec![
                hold_part(3, 10, 0),
                drop_snapshots(2, 10),
                moved(1, 10, 1, 3, 0),
            ],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(drained));
}

#[test]
fn draining_worker_goes_on_trying_to_hand_over() {
    let failed = [
        (6, leaving(1), vec![keep(10, 1, 2)]),
        (
            7,
            not_handed_over(1, 10, 2, HandoverOutcome::Failed),
            vec![drop_snapshots(2, 10), hold_part(1, 10, 0), keep(10, 1, 2)],
        ),
        (
            8,
            kept(1, &[(10, 2)]),
            vec![hold_part(2, 10, 0), drop_snapshots(1, 10)],
        ),
    ];
    check(worker_2_beside_the_holder().into_iter().chain(failed));
}

#[test]
fn lease_ends_if_its_only_holder_lacks_the_snapshots() {
    let gone = snapshots_lost(1);
    let missing = [
        (7, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
        (
            8,
            not_handed_over(1, 10, 2, HandoverOutcome::Missing),
            vec![
                drop_snapshots(2, 10),
                hold_part(1, 10, 0),
                ended(1, 10, gone),
            ],
        ),
    ];
    check(
        resumed_while_its_holder_is_busy()
            .into_iter()
            .chain(missing),
    );
}

/// The stream of the worker that sends breaks for a moment: it also has the other part.
#[test]
fn handover_goes_on_if_the_stream_of_a_holder_breaks() {
    let broke = [
        (
            3,
            worker_left(1),
            vec![end_and_keep(2, 10), waits_because(lost(1), &["w2"])],
        ),
        (4, released(2, 10), vec![]),
        (5, join(3, &[exact(16), exact(16)]), vec![keep(10, 2, 3)]),
        (6, worker_disconnected(2), vec![]),
        (7, attach(2), vec![]),
        (7, request(2, 2, 2), vec![queued(2, 2, 1)]),
        (8, join(2, &[exact(16)]), vec![hold(2, 10), keep(10, 2, 3)]),
    ];
    check(kept_by_each_other().into_iter().chain(broke));
}

/// The devices of a lease that had the whole pool are held back until the other worker is replaced.
#[test]
fn lease_keeps_its_place_at_the_worker_that_is_left() {
    let waits = [
        (
            3,
            worker_left(1),
            vec![end_and_keep(2, 10), waits_because(lost(1), &["w2"])],
        ),
        (4, released(2, 10), vec![]),
        (5, attach(2), vec![]),
        (5, request(2, 2, 1), vec![queued(2, 2, 1)]),
        // It could run no part.
        (
            6,
            join(3, &[flex(16)]),
            vec![granted(2, 2, &[(3, 0, flex(16))])],
        ),
    ];
    check(kept_by_each_other().into_iter().chain(waits));
}
