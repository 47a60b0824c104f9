//! Clients that attach, disconnect, and come back with or without their leases.

use super::*;

/// One worker of two devices, of which client 9 has leased the first.
fn one_leased() -> [Step; 3] {
    [
        (0, join(1, &[flex(1), flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
    ]
}

fn check_leased(steps: impl IntoIterator<Item = Step>) -> Engine {
    check(one_leased().into_iter().chain(steps))
}

#[test]
fn leases_of_a_disconnected_client_expire() {
    let engine = check_leased([
        (1_000, client_disconnected(9), vec![]),
        (31_000, tick(), vec![end_lease(1, 10)]),
        (
            32_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![ended(9, 10, EndReason::Unknown)],
        ),
    ]);
    assert_eq!(engine.snapshot().leases, 0);
}

#[test]
fn reconnected_client_keeps_its_leases() {
    let engine = check_leased([
        (1_000, client_disconnected(9), vec![]),
        (
            30_999,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (90_000, attach(8), vec![]),
    ]);
    assert_eq!(engine.next_deadline(), None);
    assert_eq!(engine.snapshot().leases, 1);
}

#[test]
fn every_disconnect_restarts_lease_expiry() {
    check_leased([
        (1_000, client_disconnected(9), vec![]),
        (
            20_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (25_000, on_stream(19, client_disconnected(9)), vec![]),
        (55_000, tick(), vec![end_lease(1, 10)]),
    ]);
}

#[test]
fn end_of_a_replaced_stream_is_ignored() {
    let engine = check_leased([
        (
            1_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (1_001, client_disconnected(9), vec![]),
        (1_002, release(9, 10), vec![]),
        (1_003, request(9, 2, 1), vec![]),
        (
            1_004,
            on_stream(19, request(9, 3, 1)),
            vec![granted(9, 3, &[(1, 1, flex(1))])],
        ),
    ]);
    assert_eq!(engine.next_deadline(), None);
}

#[test]
fn leases_not_claimed_on_reattach_end() {
    check_leased([
        (0, request(9, 2, 1), vec![granted(9, 2, &[(1, 1, flex(1))])]),
        (1_000, client_disconnected(9), vec![]),
        (
            2_000,
            on_stream(19, attach_claiming(9, &[(20, &[(1, 1)])])),
            vec![end_lease(1, 10)],
        ),
        (2_000, released(1, 10), vec![]),
        (
            2_000,
            on_stream(19, request(9, 3, 1)),
            vec![granted(9, 3, &[(1, 0, flex(1))])],
        ),
    ]);
}

#[test]
fn pending_requests_are_dropped_on_disconnect() {
    check_leased([
        (0, attach(8), vec![]),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
        (0, request(8, 3, 2), vec![queued(8, 3, 2)]),
        (0, request(9, 4, 2), vec![queued(9, 4, 3)]),
        (1_000, client_disconnected(9), vec![queued(8, 3, 1)]),
        // It repeats the request, which goes to the end of the queue.
        (
            2_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (
            2_000,
            on_stream(19, request(9, 2, 2)),
            vec![queued(9, 2, 2)],
        ),
        // The end of the old stream is noticed only because of the new one.
        (
            3_000,
            on_stream(29, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
        (3_000, on_stream(29, cancel(9, 2)), vec![]),
        (3_000, on_stream(29, release(9, 10)), vec![end_lease(1, 10)]),
        (
            3_000,
            released(1, 10),
            vec![granted(8, 3, &[(1, 0, flex(1)), (1, 1, flex(1))])],
        ),
    ]);
}

#[test]
fn disconnected_clients_get_no_commands() {
    check_leased([
        (0, attach(8), vec![]),
        (1_000, client_disconnected(9), vec![]),
        (1_000, leaving(1), vec![]),
        (1_000, worker_left(1), vec![]),
        (1_000, release(9, 10), vec![]),
        (1_000, cancel(9, 1), vec![]),
    ]);
}

#[test]
fn client_can_release_only_its_own_leases() {
    check_leased([
        (0, attach(8), vec![]),
        // A lease of another client and one that never existed give the same answer.
        (0, release(8, 10), vec![ended(8, 10, EndReason::Unknown)]),
        (0, release(8, 70), vec![ended(8, 70, EndReason::Unknown)]),
        (0, release(9, 10), vec![end_lease(1, 10)]),
        (0, release(9, 10), vec![ended(9, 10, EndReason::Unknown)]),
    ]);
}

#[test]
fn client_can_claim_only_its_own_leases() {
    let engine = check_leased([
        (
            0,
            attach_claiming(8, &[(10, &[(1, 0)])]),
            vec![ended(8, 10, EndReason::Unknown)],
        ),
        (0, release(9, 10), vec![end_lease(1, 10)]),
        // The token is still valid, but the lease has ended.
        (
            0,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![ended(9, 10, EndReason::Unknown)],
        ),
        (
            0,
            on_stream(29, attach_claiming(9, &[(70, &[])])),
            vec![ended(9, 70, EndReason::Unknown)],
        ),
    ]);
    assert_eq!(engine.snapshot().leases, 0);
}

#[test]
fn events_of_unattached_clients_are_ignored() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, request(9, 1, 1), vec![]),
        (0, release(9, 10), vec![]),
        (0, client_disconnected(9), vec![]),
        (0, beat(2), vec![]),
        (0, leaving(2), vec![]),
        (0, worker_left(2), vec![]),
        (0, worker_disconnected(2), vec![]),
    ]);
}

#[test]
fn evicted_client_loses_leases_and_requests() {
    let evict = |client| Event::Evict {
        client: ClientId(client),
    };
    let engine = check_leased([
        (0, attach(8), vec![]),
        (0, request(8, 3, 1), vec![granted(8, 3, &[(1, 1, flex(1))])]),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
        (0, request(8, 4, 1), vec![queued(8, 4, 2)]),
        (
            1_000,
            evict(9),
            vec![
                end_lease(1, 10),
                ended(9, 10, EndReason::TokenRevoked),
                queued(8, 4, 1),
            ],
        ),
        (
            1_000,
            released(1, 10),
            vec![granted(8, 4, &[(1, 0, flex(1))])],
        ),
        // Events that were still in its stream.
        (1_000, request(9, 3, 1), vec![]),
        (1_000, client_disconnected(9), vec![]),
        // Detached clients can be evicted too, with or without leases.
        (2_000, client_disconnected(8), vec![]),
        (2_000, evict(8), vec![end_lease(1, 30), end_lease(1, 40)]),
        (2_000, evict(8), vec![]),
    ]);
    assert_eq!(engine.snapshot().leases, 0);
    assert_eq!(engine.next_deadline(), None);
}
