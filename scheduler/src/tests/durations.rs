//! Leases that end when they have had devices for as long as their requests declare.

use super::durable::{granted_exact, kept, moved, restorable};
use super::suspension::{end_and_keep, resume, suspend, suspended, waits_for};
use super::*;

/// One device for at most this time.
fn for_seconds(seconds: u64, durability: Durability) -> Demand {
    Demand {
        durability,
        max_duration: Some(Duration::from_secs(seconds)),
        ..demand_of(1, Some("flex"))
    }
}

fn lasting(id: u64, number: u64, durability: Durability, seconds: u64) -> Event {
    request_for(id, number, for_seconds(seconds, durability))
}

#[test]
fn time_does_not_run_while_a_lease_is_suspended() {
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (
            1_000,
            lasting(1, 1, Durability::Auto, 60),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (1_001, restorable(1, 10, true), vec![]),
        (1_002, kept(1, &[(10, 1)]), vec![]),
        (
            21_000,
            suspend(10),
            vec![end_and_keep(1, 10), suspended(1, 10)],
        ),
        (500_000, resume(10), vec![waits_for(1, 10, &[1])]),
        (500_001, released(1, 10), vec![moved(1, 10, 1, 1, 0)]),
        (
            540_001,
            tick(),
            vec![end_lease(1, 10), ended(1, 10, EndReason::TimeOver)],
        ),
    ];
    check(steps);
}

/// The time of a spot lease is over while the scheduler does not run, and a request of its tenant waits for the lease to
/// make room within the limit.
#[test]
fn lease_whose_time_was_over_in_a_gap_is_not_suspended() {
    let limit = TenantLimit {
        devices: BTreeMap::from([("flex".into(), 1)]),
        ..TenantLimit::default()
    };
    let policy = TenantPolicy {
        limit,
        ..TenantPolicy::default()
    };
    let spot = request_for(
        1,
        1,
        Demand {
            is_spot: true,
            ..for_seconds(10, Durability::Auto)
        },
    );
    let policy = Policy::from([(TENANT.into(), policy)]);
    let since = Timestamp::from_millis(2_000);
    let steps = [
        (0, Event::SetPolicy { policy }, vec![]),
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1_000, spot, vec![granted_exact(1, 1, 1, 0)]),
        (1_001, restorable(1, 10, true), vec![]),
        (1_002, kept(1, &[(10, 1)]), vec![]),
        (
            2_000,
            request(1, 2, 1),
            vec![queued_for(1, 2, 1, WaitReason::TenantLimit)],
        ),
        (
            11_000,
            Event::Gap { since },
            vec![
                end_lease(1, 10),
                ended(1, 10, EndReason::TimeOver),
                queued(1, 2, 1),
            ],
        ),
    ];
    check(steps);
}

/// The client shows the scheduler how much time was left when its token was signed.
#[test]
fn time_goes_on_after_a_restart() {
    let claim = Claim {
        lease: LeaseId(10),
        lease_devices: vec![GrantedDevice {
            device_ref: device_ref(1, 0),
            grant: old_grant(10),
            share: None,
        }],
        durability: Durability::Off,
        epoch: 0,
        time_left: Some(Duration::from_secs(7)),
        is_spot: false,
        may_end: false,
    };
    let attach = client(
        1,
        ClientEvent::Attach {
            tenant: TENANT.into(),
            claims: vec![claim],
        },
    );
    let steps = [
        (0, join_holding(1, &[exact(16)], &[(10, 0)]), vec![]),
        (1_000, attach, vec![]),
        (
            8_000,
            tick(),
            vec![end_lease(1, 10), ended(1, 10, EndReason::TimeOver)],
        ),
    ];
    check(steps);
}

/// A gap extends the time in which leases from before a restart are adopted from workers that join. A lease that has ended
/// in the gap is not adopted.
#[test]
fn lease_whose_time_was_over_in_a_gap_is_not_adopted() {
    let since = Timestamp::from_millis(20_000);
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (
            20_000,
            lasting(1, 1, Durability::Off, 1),
            vec![granted_exact(1, 1, 1, 0)],
        ),
        (
            21_000,
            Event::Gap { since },
            vec![end_lease(1, 10), ended(1, 10, EndReason::TimeOver)],
        ),
        (
            21_000,
            join_holding(1, &[exact(16)], &[(10, 0)]),
            vec![end_lease(1, 10)],
        ),
    ];
    check(steps);
}
