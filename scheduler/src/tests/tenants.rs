//! Tenants: their limits and guarantees, and the order of their requests.

use super::durable::{granted_exact, kept, moved, request_durable, restorable};
use super::reclaim::reclaimed;
use super::suspension::{end_and_keep, resume, suspended_at_worker_1, waits_for};
use super::*;

/// A client of another tenant than that of `attach`.
pub(super) fn attach_of(tenant: &str, id: u64) -> Event {
    let (tenant, claims) = (tenant.into(), Vec::new());
    client(id, ClientEvent::Attach { tenant, claims })
}

/// A request for devices of a kind, with a priority.
pub(super) fn request_kind(
    id: u64,
    number: u64,
    devices: u32,
    kind: &str,
    at_priority: i32,
) -> Event {
    let demand = demand_of(devices, Some(kind));
    let mut event = request_for(id, number, demand);
    if let Event::Client {
        event: ClientEvent::Request { priority, .. },
        ..
    } = &mut event
    {
        *priority = at_priority;
    }
    event
}

pub(super) fn kinds(kinds: &[(&str, u32)]) -> BTreeMap<String, u32> {
    let kinds = kinds.iter().map(|(kind, count)| ((*kind).into(), *count));
    kinds.collect()
}

pub(super) fn queued_guaranteed(client: u64, request: u64, position: u32) -> Command {
    queued_for(client, request, position, WaitReason::Guaranteed)
}

pub(super) fn queued_at_limit(client: u64, request: u64, position: u32) -> Command {
    queued_for(client, request, position, WaitReason::TenantLimit)
}

fn limit(devices: &[(&str, u32)]) -> TenantPolicy {
    TenantPolicy {
        limit: TenantLimit {
            devices: kinds(devices),
            memory_bytes: None,
        },
        ..TenantPolicy::default()
    }
}

pub(super) fn limit_of_16_gib() -> TenantLimit {
    TenantLimit {
        devices: BTreeMap::new(),
        memory_bytes: Some(16 << 30),
    }
}

pub(super) fn set_policy<const N: usize>(tenants: [(&str, TenantPolicy); N]) -> Event {
    let tenants = tenants.map(|(name, policy)| (name.into(), policy));
    Event::SetPolicy {
        policy: Policy::from(tenants),
    }
}

/// A pool of two workers with devices of kind cuda, all leased by client 8, one by one, and client 9 of
/// another tenant.
fn full_pool() -> Vec<Step> {
    let devices = [cuda(1), cuda(1), cuda(1)];
    let mut steps = vec![
        (0, join(1, &devices), vec![]),
        (0, attach_of("a", 8), vec![]),
        (0, attach_of("b", 9), vec![]),
    ];
    for number in 1..4 {
        let grant = granted(8, number, &[(1, number as u32 - 1, cuda(1))]);
        steps.push((0, request(8, number, 1), vec![grant]));
    }
    steps
}

/// Client 8 gives the device of its first lease back, which has `index`, and these commands follow.
fn device_is_free(commands: Vec<Command>) -> [Step; 2] {
    [
        (0, release(8, 10), vec![end_lease(1, 10)]),
        (0, released(1, 10), commands),
    ]
}

#[test]
fn the_tenant_with_fewer_devices_is_first() {
    let steps = [
        (0, request(8, 4, 1), vec![queued(8, 4, 1)]),
        (0, request(8, 5, 1), vec![queued(8, 5, 2)]),
        // Its tenant has no device.
        (
            0,
            request(9, 6, 1),
            vec![queued(9, 6, 1), queued(8, 4, 2), queued(8, 5, 3)],
        ),
    ];
    let free = device_is_free(vec![
        granted(9, 6, &[(1, 0, cuda(1))]),
        queued(8, 4, 1),
        queued(8, 5, 2),
    ]);
    check(full_pool().into_iter().chain(steps).chain(free));
}

#[test]
fn a_weight_scales_what_a_tenant_has() {
    let weight = |weight| TenantPolicy {
        weight,
        ..TenantPolicy::default()
    };
    let steps = [
        (0, request(9, 4, 1), vec![queued(9, 4, 1)]),
        (0, request(9, 5, 1), vec![queued(9, 5, 2)]),
        (0, request(8, 6, 1), vec![queued(8, 6, 3)]),
        // Three devices by 12 are less than one by 3.
        (
            0,
            set_policy([("a", weight(12)), ("b", weight(3))]),
            vec![queued(8, 6, 2), queued(9, 5, 3)],
        ),
        (0, set_policy([]), vec![queued(9, 5, 2), queued(8, 6, 3)]),
    ];
    check(full_pool().into_iter().chain(steps));
}

#[test]
fn a_guarantee_comes_before_shares() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("cuda", 4)]),
        ..TenantPolicy::default()
    };
    let steps = [
        (0, request(9, 4, 1), vec![queued(9, 4, 1)]),
        (0, request(8, 5, 1), vec![queued(8, 5, 2)]),
        (0, request(8, 6, 1), vec![queued(8, 6, 3)]),
        // It has three of four.
        (
            0,
            set_policy([("a", guaranteed)]),
            vec![queued_guaranteed(8, 5, 1), queued(9, 4, 2)],
        ),
    ];
    let free = device_is_free(vec![
        granted(8, 5, &[(1, 0, cuda(1))]),
        queued_guaranteed(8, 6, 1),
        queued(9, 4, 2),
    ]);
    // With the first lease over, two of its requests were within the guarantee.
    let free = free.map(|(at, event, commands)| match event {
        Event::Client { .. } => {
            let moved = [queued_guaranteed(8, 6, 2), queued(9, 4, 3)];
            (at, event, commands.into_iter().chain(moved).collect())
        }
        other => (at, other, commands),
    });
    check(full_pool().into_iter().chain(steps).chain(free));
}

#[test]
fn priorities_order_the_requests_of_one_tenant_only() {
    let cuda_with = |id, number, priority| request_kind(id, number, 1, "cuda", priority);
    let steps = [
        (0, cuda_with(8, 4, 0), vec![queued(8, 4, 1)]),
        (
            0,
            cuda_with(8, 5, 7),
            vec![queued(8, 5, 1), queued(8, 4, 2)],
        ),
        (
            0,
            cuda_with(9, 6, -7),
            vec![queued(9, 6, 1), queued(8, 5, 2), queued(8, 4, 3)],
        ),
    ];
    check(full_pool().into_iter().chain(steps));
}

#[test]
fn an_administrator_changes_priorities_and_ends_what_waits_or_runs() {
    let lease = |number: u64| LeaseId(number * 10);
    let end = |number| Event::EndLease {
        lease: lease(number),
    };
    let raise = |number| Event::SetPriority {
        lease: lease(number),
        priority: 1,
    };
    let steps = [
        (0, request(8, 4, 1), vec![queued(8, 4, 1)]),
        (0, request(8, 5, 1), vec![queued(8, 5, 2)]),
        (0, raise(5), vec![queued(8, 5, 1), queued(8, 4, 2)]),
        (
            0,
            end(5),
            vec![
                refused(8, 5, RefuseReason::ByAdministrator),
                queued(8, 4, 1),
            ],
        ),
        (
            0,
            end(1),
            vec![end_lease(1, 10), ended(8, 10, EndReason::ByAdministrator)],
        ),
        // There are none such.
        (0, end(1), vec![]),
        (0, raise(1), vec![]),
    ];
    check(full_pool().into_iter().chain(steps));
}

#[test]
fn a_tenant_at_its_limit_waits_although_devices_are_free() {
    let one = [("cuda", 1)];
    let above = || RefuseReason::TenantLimit {
        demand: demand_of(2, Some("cuda")),
        limit: limit(&one).limit,
    };
    let engine = check([
        (0, join(1, &[cuda(1), cuda(1), flex(1)]), vec![]),
        (0, attach_of("a", 8), vec![]),
        (0, attach_of("b", 9), vec![]),
        (0, set_policy([("a", limit(&one))]), vec![]),
        (
            0,
            request_kind(8, 1, 1, "cuda", 0),
            vec![granted(8, 1, &[(1, 0, cuda(1))])],
        ),
        (
            0,
            request_kind(8, 2, 1, "cuda", 0),
            vec![queued_at_limit(8, 2, 1)],
        ),
        (
            0,
            request_kind(8, 3, 2, "cuda", 0),
            vec![refused(8, 3, above())],
        ),
        // Of any kind, it may have those of another one.
        (0, request(8, 4, 1), vec![granted(8, 4, &[(1, 2, flex(1))])]),
        // Nobody waits for those who may not have the device.
        (
            0,
            request_kind(9, 5, 1, "cuda", 0),
            vec![granted(9, 5, &[(1, 1, cuda(1))])],
        ),
        (0, release(9, 50), vec![end_lease(1, 50)]),
        (0, released(1, 50), vec![]),
    ]);
    let waiting = engine.waiting(LeaseId(20)).expect("it waits");
    assert!(waiting.is_at_limit);
    assert_eq!(waiting.tenant, Some("a".into()));
    let steps = [
        // The device of the lease that ends is not released yet, and another one is free.
        (
            0,
            release(8, 10),
            vec![end_lease(1, 10), granted(8, 2, &[(1, 1, cuda(1))])],
        ),
        (
            0,
            request_kind(8, 6, 1, "cuda", 0),
            vec![queued_at_limit(8, 6, 1)],
        ),
        // What is granted stays; what waits is refused if it could never be granted.
        (
            0,
            set_policy([("a", limit(&[("cuda", 0)]))]),
            vec![refused(
                8,
                6,
                RefuseReason::TenantLimit {
                    demand: demand_of(1, Some("cuda")),
                    limit: limit(&[("cuda", 0)]).limit,
                },
            )],
        ),
    ];
    check_on(engine, steps);
}

#[test]
fn a_raised_limit_grants_what_waits() {
    check([
        (0, join(1, &[cuda(1), cuda(1)]), vec![]),
        (0, attach_of("a", 8), vec![]),
        (0, set_policy([("a", limit(&[("cuda", 1)]))]), vec![]),
        (0, request(8, 1, 1), vec![granted(8, 1, &[(1, 0, cuda(1))])]),
        (0, request(8, 2, 1), vec![queued_at_limit(8, 2, 1)]),
        (
            0,
            set_policy([("a", limit(&[("cuda", 2)]))]),
            vec![granted(8, 2, &[(1, 1, cuda(1))])],
        ),
    ]);
}

#[test]
fn a_suspended_lease_is_not_resumed_beyond_the_limit() {
    let most = |count| set_policy([(TENANT, limit(&[("flex", count)]))]);
    let steps = [
        (5, most(0), vec![]),
        (5, resume(10), vec![waits_for(1, 10, &[1])]),
    ];
    let engine = check(suspended_at_worker_1().into_iter().chain(steps));
    let waiting = engine.waiting(LeaseId(10)).expect("it waits");
    assert!(waiting.is_at_limit);
    assert_eq!(waiting.needs[0].suitable.free, 1);
    check_on(engine, [(6, most(1), vec![moved(1, 10, 1, 1, 0)])]);
}

/// Tenant `a` had all devices for a day, which counts half.
#[test]
fn what_a_tenant_had_counts() {
    const DAY: u64 = 24 * 3_600_000;
    let grant = |id, number, index| granted(id, number, &[(1, index, cuda(1))]);
    check([
        (0, join(1, &[cuda(1), cuda(1)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, attach_of("c", 3), vec![]),
        (0, request(1, 1, 1), vec![grant(1, 1, 0)]),
        (0, request(1, 2, 1), vec![grant(1, 2, 1)]),
        (DAY, release(1, 10), vec![end_lease(1, 10)]),
        (DAY, released(1, 10), vec![]),
        (DAY, release(1, 20), vec![end_lease(1, 20)]),
        (DAY, released(1, 20), vec![]),
        (DAY, request(3, 3, 1), vec![grant(3, 3, 0)]),
        (DAY, request(3, 4, 1), vec![grant(3, 4, 1)]),
        (DAY, request(1, 5, 1), vec![queued(1, 5, 1)]),
        (
            DAY,
            request(2, 6, 1),
            vec![queued(2, 6, 1), queued(1, 5, 2)],
        ),
        (DAY, request(2, 7, 1), vec![queued(2, 7, 3)]),
        // A device of two is as much as half of the pool for a day.
        (DAY, release(3, 30), vec![end_lease(1, 30)]),
        (
            DAY,
            released(1, 30),
            vec![grant(2, 6, 0), queued(1, 5, 1), queued(2, 7, 2)],
        ),
    ]);
}

/// A lease counts also if the pool offered nothing when it was granted, as after a restart.
#[test]
fn a_lease_counts_in_the_past_once_the_pool_offers_devices() {
    const DAY: u64 = 24 * 3_600_000;
    let drain = |is_drained| Event::Drain {
        worker: WorkerId(1),
        is_drained,
    };
    let mut engine = check([
        (0, join(1, &[cuda(1)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, request(1, 1, 1), vec![granted(1, 1, &[(1, 0, cuda(1))])]),
        (0, drain(true), vec![]),
        (0, drain(false), vec![]),
    ]);
    engine.handle(tick(), at(DAY));
    let share = engine.past_shares()["a"];
    assert!((0.49..=0.5).contains(&share), "{share}");
}

/// Until it is granted, a request of any kind uses up the guarantees of all kinds.
#[test]
fn a_request_is_granted_that_comes_within_the_guarantee_by_a_grant() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("cuda", 1), ("flex", 1)]),
        ..TenantPolicy::default()
    };
    check([
        (0, join(1, &[cuda(1), flex(1)]), vec![]),
        (0, set_policy([("b", guaranteed)]), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, attach_of("c", 3), vec![]),
        (0, attach_of("d", 9), vec![]),
        (
            0,
            request(9, 9, 2),
            vec![granted(9, 9, &[(1, 0, cuda(1)), (1, 1, flex(1))])],
        ),
        (0, request(2, 1, 1), vec![queued_guaranteed(2, 1, 1)]),
        (0, request_kind(2, 2, 1, "flex", 0), vec![queued(2, 2, 2)]),
        (
            0,
            request_kind(3, 3, 1, "flex", 0),
            vec![queued(3, 3, 2), queued(2, 2, 3)],
        ),
        (0, release(9, 90), vec![end_lease(1, 90)]),
        (
            0,
            released(1, 90),
            vec![
                granted(2, 1, &[(1, 0, cuda(1))]),
                granted(2, 2, &[(1, 1, flex(1))]),
                queued(3, 3, 1),
            ],
        ),
    ]);
}

/// Tenant `b` may have 16 GiB, which its first request can count on, as the lease of `a` is borrowed.
#[test]
fn what_a_request_can_count_on_counts_in_the_limit_for_later_ones() {
    let policy = TenantPolicy {
        guaranteed: kinds(&[("flex", 1)]),
        limit: limit_of_16_gib(),
        ..TenantPolicy::default()
    };
    check([
        (0, join(1, &[exact(16), gpu(1, 16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, set_policy([("b", policy)]), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        (1, restorable(1, 10, true), vec![]),
        (1, kept(1, &[(10, 1)]), vec![]),
        (
            2,
            request_kind(2, 2, 1, "flex", 0),
            vec![queued_guaranteed(2, 2, 1)],
        ),
        (
            2,
            request_kind(2, 3, 1, "vulkan", 0),
            vec![queued_at_limit(2, 3, 2)],
        ),
        (
            10_001,
            tick(),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1])],
        ),
        (
            10_002,
            released(1, 10),
            vec![granted_exact(2, 2, 1, 0), queued_at_limit(2, 3, 1)],
        ),
        (
            10_003,
            release(2, 20),
            vec![end_lease(1, 20), granted(2, 3, &[(1, 1, gpu(1, 16))])],
        ),
    ]);
}

/// The first request can count on the device of a spot lease that has just begun. The second has a higher priority, so
/// it comes first although it came later, and uses up the limit.
#[test]
fn a_request_with_a_higher_priority_does_not_wait_for_what_others_can_count_on() {
    let limited = TenantPolicy {
        limit: limit_of_16_gib(),
        ..TenantPolicy::default()
    };
    let spot = Demand {
        is_spot: true,
        ..demand_of(1, Some("flex"))
    };
    check([
        (0, join(1, &[exact(16), gpu(1, 16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, set_policy([("b", limited)]), vec![]),
        (1, request_for(1, 1, spot), vec![granted_exact(1, 1, 1, 0)]),
        (2, request_kind(2, 2, 1, "flex", 0), vec![queued(2, 2, 1)]),
        (
            2,
            request_kind(2, 3, 1, "vulkan", 0),
            vec![queued_at_limit(2, 3, 2)],
        ),
        (
            2,
            request_kind(2, 4, 1, "vulkan", 1),
            vec![
                granted(2, 4, &[(1, 1, gpu(1, 16))]),
                queued_at_limit(2, 2, 1),
            ],
        ),
    ]);
}
