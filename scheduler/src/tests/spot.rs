//! Spot leases, which come after all others and give their devices to any other request.

use super::durable::{granted_exact, kept, moved, restorable};
use super::reclaim::reclaimed;
use super::suspension::end_and_keep;
use super::tenants::{attach_of, kinds, set_policy};
use super::*;

fn spot(id: u64, number: u64, durability: Durability) -> Event {
    demand(id, number, durability, true)
}

fn ordinary(id: u64, number: u64) -> Event {
    demand(id, number, Durability::Off, false)
}

fn demand(id: u64, number: u64, durability: Durability, is_spot: bool) -> Event {
    let demand = Demand {
        durability,
        is_spot,
        ..demand_of(1, Some("flex"))
    };
    request_for(id, number, demand)
}

/// Client 1 of tenant `a` has the only device by a spot lease since 1 ms; client 2 is of tenant `a`, too, and
/// client 3 of tenant `b`.
fn start(durability: Durability) -> Vec<Step> {
    vec![
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("a", 2), vec![]),
        (0, attach_of("b", 3), vec![]),
        (1, spot(1, 1, durability), vec![granted_exact(1, 1, 1, 0)]),
    ]
}

fn start_with_snapshots() -> Vec<Step> {
    let mut steps = start(Durability::Auto);
    steps.push((1, restorable(1, 10, true), vec![]));
    steps.push((2, kept(1, &[(10, 1)]), vec![]));
    steps
}

/// A request of the same tenant gets the device, and the spot lease goes on after all other requests.
#[test]
fn a_spot_lease_makes_room_for_any_other_request() {
    let steps = [
        (20_000, spot(3, 2, Durability::Auto), vec![queued(3, 2, 1)]),
        (
            20_001,
            ordinary(2, 3),
            vec![
                end_and_keep(1, 10),
                reclaimed(1, 10, &[1]),
                queued(2, 3, 1),
                queued(3, 2, 2),
            ],
        ),
        (
            20_002,
            released(1, 10),
            vec![granted_exact(2, 3, 1, 0), queued(3, 2, 1)],
        ),
        (
            20_003,
            ordinary(3, 4),
            vec![queued(3, 4, 1), queued(3, 2, 2)],
        ),
        (20_004, release(2, 30), vec![end_lease(1, 30)]),
        (
            20_005,
            released(1, 30),
            vec![granted_exact(3, 4, 1, 0), queued(3, 2, 1)],
        ),
        (20_006, release(3, 40), vec![end_lease(1, 40)]),
        (20_007, released(1, 40), vec![moved(1, 10, 1, 1, 0)]),
    ];
    check(start_with_snapshots().into_iter().chain(steps));
}

/// Neither one that is not durable nor one that should have snapshots for long.
#[test]
fn a_spot_lease_that_cannot_be_suspended_ends() {
    let over = ended(1, 10, EndReason::Reclaimed);
    let ends_at = |durability, at: u64| {
        let steps = [
            (2, ordinary(2, 3), vec![queued(2, 3, 1)]),
            (at, tick(), vec![end_lease(1, 10), over.clone()]),
            (at + 1, released(1, 10), vec![granted_exact(2, 3, 1, 0)]),
        ];
        check(start(durability).into_iter().chain(steps));
    };
    ends_at(Durability::Off, 10_001);
    ends_at(Durability::Auto, 70_001);
}

#[test]
fn a_spot_lease_is_within_no_guarantee() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("flex", 1)]),
        ..TenantPolicy::default()
    };
    let steps = [
        (3, set_policy([("a", guaranteed)]), vec![]),
        (
            20_000,
            ordinary(3, 2),
            vec![end_and_keep(1, 10), reclaimed(1, 10, &[1]), queued(3, 2, 1)],
        ),
    ];
    check(start_with_snapshots().into_iter().chain(steps));
}

/// Tenant `a` has two devices by spot leases, `b` one by another lease: `a` has the smaller share.
#[test]
fn a_spot_lease_counts_a_quarter() {
    let devices = [exact(16), exact(16), exact(16)];
    let steps = [
        (0, join(1, &devices), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (
            1,
            spot(1, 1, Durability::Off),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (
            1,
            spot(1, 2, Durability::Off),
            vec![granted_exact(1, 2, 1, 1)],
        ),
        (1, ordinary(2, 3), vec![granted_exact(2, 3, 1, 2)]),
        (2, ordinary(2, 4), vec![queued(2, 4, 1)]),
        (2, ordinary(1, 5), vec![queued(1, 5, 1), queued(2, 4, 2)]),
    ];
    check(steps);
}
