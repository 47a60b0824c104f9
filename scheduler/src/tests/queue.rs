//! The queue: which requests wait, in which order, and how many may.

use super::tenants::{attach_of, kinds, request_kind, set_policy};
use super::*;

/// One worker with two devices, which client 8 has leased one by one.
fn full_pool() -> Vec<Step> {
    vec![
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach(8), vec![]),
        (0, request(8, 1, 1), vec![granted(8, 1, &[(1, 0, flex(1))])]),
        (0, request(8, 2, 1), vec![granted(8, 2, &[(1, 1, flex(1))])]),
        (0, attach(9), vec![]),
    ]
}

fn check_full(steps: impl IntoIterator<Item = Step>) {
    check(full_pool().into_iter().chain(steps));
}

#[test]
fn first_come_first_served() {
    check_full([
        (0, request(9, 3, 1), vec![queued(9, 3, 1)]),
        (0, request(8, 4, 1), vec![queued(8, 4, 2)]),
        (0, request(9, 5, 1), vec![queued(9, 5, 3)]),
        (0, release(8, 10), vec![end_lease(1, 10)]),
        (
            0,
            released(1, 10),
            vec![
                granted(9, 3, &[(1, 0, flex(1))]),
                queued(8, 4, 1),
                queued(9, 5, 2),
            ],
        ),
        (0, release(8, 20), vec![end_lease(1, 20)]),
        (
            0,
            released(1, 20),
            vec![granted(8, 4, &[(1, 1, flex(1))]), queued(9, 5, 1)],
        ),
        (0, release(9, 30), vec![end_lease(1, 30)]),
        (0, released(1, 30), vec![granted(9, 5, &[(1, 0, flex(1))])]),
    ]);
}

#[test]
fn small_requests_backfill_past_large_ones() {
    check_full([
        (0, request(9, 3, 2), vec![queued(9, 3, 1)]),
        (0, request(9, 4, 1), vec![queued(9, 4, 2)]),
        // The position of the larger request stays the same, so it is not reported.
        (0, release(8, 10), vec![end_lease(1, 10)]),
        (0, released(1, 10), vec![granted(9, 4, &[(1, 0, flex(1))])]),
        (0, release(8, 20), vec![end_lease(1, 20)]),
        (0, released(1, 20), vec![]),
        (0, request(8, 5, 1), vec![granted(8, 5, &[(1, 1, flex(1))])]),
        (0, release(8, 50), vec![end_lease(1, 50)]),
        (0, released(1, 50), vec![]),
        (0, release(9, 40), vec![end_lease(1, 40)]),
        (
            0,
            released(1, 40),
            vec![granted(9, 3, &[(1, 0, flex(1)), (1, 1, flex(1))])],
        ),
    ]);
}

#[test]
fn one_release_can_grant_several_requests() {
    check([
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach(8), vec![]),
        (
            0,
            request(8, 1, 2),
            vec![granted(8, 1, &[(1, 0, flex(1)), (1, 1, flex(1))])],
        ),
        (0, request(8, 2, 1), vec![queued(8, 2, 1)]),
        (0, request(8, 3, 1), vec![queued(8, 3, 2)]),
        (0, request(8, 4, 1), vec![queued(8, 4, 3)]),
        (0, release(8, 10), vec![end_lease(1, 10)]),
        (
            0,
            released(1, 10),
            vec![
                granted(8, 2, &[(1, 0, flex(1))]),
                granted(8, 3, &[(1, 1, flex(1))]),
                queued(8, 4, 1),
            ],
        ),
    ]);
}

#[test]
fn a_cancelled_request_ends_and_the_others_move_up() {
    check_full([
        (0, request(9, 3, 1), vec![queued(9, 3, 1)]),
        (0, request(9, 4, 1), vec![queued(9, 4, 2)]),
        (
            0,
            cancel(9, 3),
            vec![refused(9, 3, RefuseReason::Cancelled), queued(9, 4, 1)],
        ),
        // In turn: it has ended, belongs to another client, was granted, never existed.
        (0, cancel(9, 3), vec![]),
        (0, cancel(8, 4), vec![]),
        (0, cancel(8, 1), vec![]),
        (0, cancel(8, 7), vec![]),
    ]);
}

#[test]
fn repeated_request_is_queued_once() {
    check_full([
        (0, request(9, 3, 1), vec![queued(9, 3, 1)]),
        (0, request(9, 3, 2), vec![]),
        // Request ids are per client.
        (0, request_as_lease(8, 3, 1, 33), vec![queued(8, 3, 2)]),
    ]);
}

fn request_as_lease(id: u64, request: u64, devices: u32, lease: u64) -> Event {
    let demand = demand_of(devices, None);
    let (request, lease) = (RequestId(request), LeaseId(lease));
    client(
        id,
        ClientEvent::Request {
            request,
            demand,
            priority: 0,
            lease,
        },
    )
}

#[test]
fn pending_requests_per_client_are_limited() {
    let steps = [
        (0, request(9, 3, 1), vec![queued(9, 3, 1)]),
        (0, request(9, 4, 1), vec![queued(9, 4, 2)]),
        (
            0,
            request(9, 5, 1),
            vec![refused(9, 5, RefuseReason::ClientLimit { max: 2 })],
        ),
        (0, request(8, 6, 1), vec![queued(8, 6, 3)]),
        (
            0,
            cancel(9, 3),
            vec![
                refused(9, 3, RefuseReason::Cancelled),
                queued(9, 4, 1),
                queued(8, 6, 2),
            ],
        ),
        (0, request(9, 7, 1), vec![queued(9, 7, 3)]),
    ];
    check_with(bounds(100, 2), full_pool().into_iter().chain(steps));
}

#[test]
fn pending_requests_per_pool_are_limited() {
    let steps = [
        (0, request(9, 3, 1), vec![queued(9, 3, 1)]),
        (0, request(8, 4, 1), vec![queued(8, 4, 2)]),
        (
            0,
            request(9, 5, 1),
            vec![refused(9, 5, RefuseReason::PoolLimit { max: 2 })],
        ),
        // A request that can never be granted gets that reason, even when the queue is
        // full.
        (
            0,
            request(9, 6, 3),
            vec![unsatisfiable(9, 6, 3, &[&[flex(1), flex(1)]])],
        ),
    ];
    check_with(bounds(2, 100), full_pool().into_iter().chain(steps));
}

/// Another tenant finds room in the queue, however many requests one has.
#[test]
fn a_tenant_leaves_room_in_the_queue() {
    let full = (0, attach_of("b", 7), vec![]);
    let mut steps = vec![full];
    for number in 3..9 {
        let position = number as u32 - 2;
        steps.push((0, request(9, number, 1), vec![queued(9, number, position)]));
    }
    let reason = RefuseReason::TenantQueueLimit { waiting: 6 };
    steps.extend([
        (0, request(8, 9, 1), vec![refused(8, 9, reason)]),
        // Its tenant has no devices, so it is next.
        (
            0,
            request(7, 10, 1),
            (10..11)
                .chain(3..9)
                .zip(1..)
                .map(|(number, position)| match number {
                    10 => queued(7, number, position),
                    _ => queued(9, number, position),
                })
                .collect(),
        ),
    ]);
    check_with(bounds(8, 100), full_pool().into_iter().chain(steps));
}

#[test]
fn limits_apply_only_to_queued_requests() {
    let options = bounds(0, 0);
    check_with(
        options,
        full_pool().into_iter().chain([
            (
                0,
                request(9, 3, 1),
                vec![refused(9, 3, RefuseReason::ClientLimit { max: 0 })],
            ),
            (0, release(8, 10), vec![end_lease(1, 10)]),
            (0, released(1, 10), vec![]),
            (0, request(9, 4, 1), vec![granted(9, 4, &[(1, 0, flex(1))])]),
        ]),
    );
}

/// Asserts the commands in an order other than the default one, in a pool with two devices, of which client 8
/// of tenant a has one and client 9 of tenant b has the other. Both tenants are guaranteed both devices, and b
/// has the smaller share by weight.
#[track_caller]
fn check_order(order: RequestOrder, steps: impl IntoIterator<Item = Step>) {
    let options = Options {
        order,
        ..Options::default()
    };
    let policy = |weight| TenantPolicy {
        weight,
        guaranteed: kinds(&[("flex", 2)]),
        ..TenantPolicy::default()
    };
    let before = [
        (0, set_policy([("a", policy(1)), ("b", policy(9))]), vec![]),
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach_of("a", 8), vec![]),
        (0, attach_of("b", 9), vec![]),
        (0, request(8, 1, 1), vec![granted(8, 1, &[(1, 0, flex(1))])]),
        (0, request(9, 2, 1), vec![granted(9, 2, &[(1, 1, flex(1))])]),
    ];
    check_with(options, before.into_iter().chain(steps));
}

#[test]
fn in_order_of_arrival_shares_guarantees_and_priorities_do_not_count() {
    for order in [RequestOrder::Backfill, RequestOrder::Fifo] {
        let steps = [
            (0, request(8, 3, 1), vec![queued(8, 3, 1)]),
            (0, request_kind(9, 4, 1, "flex", 5), vec![queued(9, 4, 2)]),
            (0, request(8, 5, 1), vec![queued(8, 5, 3)]),
            (
                0,
                Event::SetPriority {
                    lease: LeaseId(50),
                    priority: 9,
                },
                vec![],
            ),
            (0, release(8, 10), vec![end_lease(1, 10)]),
            (
                0,
                released(1, 10),
                vec![
                    granted(8, 3, &[(1, 0, flex(1))]),
                    queued(9, 4, 1),
                    queued(8, 5, 2),
                ],
            ),
            (0, release(9, 20), vec![end_lease(1, 20)]),
            (
                0,
                released(1, 20),
                vec![granted(9, 4, &[(1, 1, flex(1))]), queued(8, 5, 1)],
            ),
        ];
        check_order(order, steps);
    }
}

#[test]
fn with_backfill_a_later_request_that_fits_does_not_wait() {
    let steps = [
        (0, request(8, 3, 2), vec![queued(8, 3, 1)]),
        (0, request(9, 4, 1), vec![queued(9, 4, 2)]),
        (0, release(8, 10), vec![end_lease(1, 10)]),
        (0, released(1, 10), vec![granted(9, 4, &[(1, 0, flex(1))])]),
        (0, release(9, 20), vec![end_lease(1, 20)]),
        (0, released(1, 20), vec![]),
        (0, request(9, 5, 1), vec![granted(9, 5, &[(1, 1, flex(1))])]),
    ];
    check_order(RequestOrder::Backfill, steps);
}

#[test]
fn in_fifo_order_nothing_is_granted_before_an_earlier_request() {
    let steps = [
        (0, request(8, 3, 2), vec![queued(8, 3, 1)]),
        (0, request(9, 4, 1), vec![queued(9, 4, 2)]),
        (0, release(8, 10), vec![end_lease(1, 10)]),
        (0, released(1, 10), vec![]),
        // It would fit.
        (0, request(9, 5, 1), vec![queued(9, 5, 3)]),
        (
            0,
            cancel(8, 3),
            vec![
                refused(8, 3, RefuseReason::Cancelled),
                granted(9, 4, &[(1, 0, flex(1))]),
                queued(9, 5, 1),
            ],
        ),
    ];
    check_order(RequestOrder::Fifo, steps);
}

#[test]
fn in_fifo_order_a_request_that_can_never_be_granted_does_not_wait() {
    let pool: &[&[_]] = &[&[flex(1), flex(1)]];
    let steps = [
        (0, request(8, 3, 2), vec![queued(8, 3, 1)]),
        (0, request(9, 4, 3), vec![unsatisfiable(9, 4, 3, pool)]),
    ];
    check_order(RequestOrder::Fifo, steps);
}
