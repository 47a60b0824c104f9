//! Which of several requests that fit is granted, and when positions are reported.

use proptest::collection::vec;
use proptest::prelude::*;

use super::tenants::{attach_of, request_kind, set_policy};
use super::*;

/// Number of devices that become free.
const FREE: usize = 8;

/// A request: its tenant, priority and number of devices.
type Request = (usize, i32, u32);

/// Returns the requests that are granted, the first first: each time the next of those that fit of the tenant
/// that has the smallest share, as a number of devices divided by its weight.
fn expected_grants(weights: &[u32], requests: &[Request]) -> Vec<usize> {
    let mut has = vec![0; weights.len()];
    let mut waiting: Vec<_> = (0..requests.len()).collect();
    let mut free = FREE as u32;
    let mut granted = Vec::new();
    loop {
        let firsts = (0..weights.len()).filter_map(|tenant| {
            let own = waiting.iter().copied();
            let fitting = own.filter(|at| requests[*at].0 == tenant && requests[*at].2 <= free);
            let first = fitting.min_by_key(|at| (-requests[*at].1, *at))?;
            Some((f64::from(has[tenant]) / f64::from(weights[tenant]), first))
        });
        let next = firsts.min_by(|one, other| one.partial_cmp(other).unwrap());
        let Some((_, next)) = next else {
            return granted;
        };
        let (tenant, _, devices) = requests[next];
        has[tenant] += devices;
        free -= devices;
        waiting.retain(|at| *at != next);
        granted.push(next);
    }
}

proptest! {
    #[test]
    fn the_tenant_with_the_smallest_share_of_those_that_fit_is_next(
        weights in vec(1..4_u32, 3),
        requests in vec((0..3_usize, -1..2_i32, 1..5_u32), 1..20),
    ) {
        let names = ["a", "b", "c"];
        let weight = |at: usize| TenantPolicy { weight: weights[at], ..TenantPolicy::default() };
        let policy = [0, 1, 2].map(|at| (names[at], weight(at)));
        let mut engine = check([
            (0, join(1, &vec![cuda(1); FREE]), vec![]),
            (0, set_policy(policy), vec![]),
            (0, attach_of("a", 1), vec![]),
            (0, attach_of("b", 2), vec![]),
            (0, attach_of("c", 3), vec![]),
            (0, attach_of("d", 9), vec![]),
        ]);
        engine.handle(request_kind(9, 99, FREE as u32, "cuda", 0), at(0));
        for (number, (tenant, priority, devices)) in (1..).zip(&requests) {
            let client = *tenant as u64 + 1;
            engine.handle(request_kind(client, number, *devices, "cuda", *priority), at(0));
        }
        engine.handle(release(9, 990), at(1));
        let commands = engine.handle(released(1, 990), at(1));
        let granted = commands.iter().filter_map(|command| match command {
            Command::Granted { request, .. } => Some(request.0 as usize - 1),
            _ => None,
        });
        let granted: Vec<_> = granted.collect();
        prop_assert_eq!(granted, expected_grants(&weights, &requests));
        let used = engine.used_by_tenants().values();
        prop_assert!(used.map(|used| used.all_permille).sum::<u64>() <= 1000 * FREE as u64);
    }
}

/// A request that does not fit does not count for its tenant: a smaller one of the tenant is next.
#[test]
fn a_large_request_that_waits_does_not_hold_small_ones_of_its_tenant_back() {
    let devices = [cuda(1), cuda(1)];
    check([
        (0, join(1, &devices), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, attach_of("d", 9), vec![]),
        (
            0,
            request_kind(9, 8, 1, "cuda", 0),
            vec![granted(9, 8, &[(1, 0, cuda(1))])],
        ),
        (
            0,
            request_kind(9, 9, 1, "cuda", 0),
            vec![granted(9, 9, &[(1, 1, cuda(1))])],
        ),
        (0, request_kind(1, 1, 2, "cuda", 0), vec![queued(1, 1, 1)]),
        (0, request_kind(1, 2, 1, "cuda", 0), vec![queued(1, 2, 2)]),
        (
            0,
            request_kind(2, 3, 1, "cuda", 0),
            vec![queued(2, 3, 2), queued(1, 2, 3)],
        ),
        (0, release(9, 90), vec![end_lease(1, 90)]),
        (
            0,
            released(1, 90),
            vec![
                granted(1, 2, &[(1, 1, cuda(1))]),
                queued(2, 3, 1),
                queued(1, 1, 2),
            ],
        ),
    ]);
}

/// With many requests, each grant changes the positions of all.
#[test]
fn positions_of_many_requests_are_reported_once_a_second() {
    let mut engine = check_with(
        bounds(1000, 1000),
        [
            (0, join(1, &[cuda(1)]), vec![]),
            (0, attach(9), vec![]),
            (
                0,
                request(9, 1000, 1),
                vec![granted(9, 1000, &[(1, 0, cuda(1))])],
            ),
        ],
    );
    for number in 1..=64 {
        let commands = engine.handle(request(9, number, 1), at(100));
        assert_eq!(commands, [queued(9, number, number as u32)]);
    }
    assert_eq!(engine.handle(request(9, 65, 1), at(200)), []);
    assert_eq!(
        without_numbers(engine.handle(release(9, 10_000), at(300))),
        [end_lease(1, 10_000)]
    );
    assert_eq!(engine.next_deadline(), Some(at(1100)));
    assert_eq!(engine.handle(tick(), at(1099)), []);
    assert_eq!(engine.handle(tick(), at(1100)), [queued(9, 65, 65)]);
    assert_eq!(engine.next_deadline(), None);
    // With 64 that wait, all are told at once.
    let commands = without_numbers(engine.handle(released(1, 10_000), at(1200)));
    let moved = (2..=65).map(|number| queued(9, number, number as u32 - 1));
    let granted = granted(9, 1, &[(1, 0, cuda(1))]);
    assert_eq!(
        commands,
        [granted].into_iter().chain(moved).collect::<Vec<_>>()
    );
}
