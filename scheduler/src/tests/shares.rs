//! Several leases on one device, each with a share of its time and memory.

use tensord_proto::share::DeviceShare;

use super::tenants::{attach_of, kinds, queued_guaranteed, set_policy};
use super::*;
use crate::device::Share;

pub(super) const GIB: u64 = 1 << 30;

/// A request for a share of a flex device, in thousandths.
pub(super) fn request_share(id: u64, number: u64, permille: u32) -> Event {
    request_part(id, number, permille, 0, Durability::Off)
}

pub(super) fn request_part(
    id: u64,
    number: u64,
    permille: u32,
    gib: u64,
    durability: Durability,
) -> Event {
    let demand = Demand {
        share_permille: Some(permille),
        memory_bytes: gib * GIB,
        durability,
        ..demand_of(1, Some("flex"))
    };
    request_for(id, number, demand)
}

pub(super) fn request_whole(id: u64, number: u64) -> Event {
    request_for(id, number, demand_of(1, Some("flex")))
}

/// A share of a device of 16 GiB, whose memory is in proportion.
pub(super) fn part(permille: u32, lane: u32) -> Option<DeviceShare> {
    let memory_bytes = 16 * GIB * u64::from(permille) / 1000;
    Some(DeviceShare {
        permille,
        memory_bytes,
        lane,
    })
}

/// A grant of a share of an exact device of 16 GiB.
pub(super) fn granted_share(
    id: u64,
    number: u64,
    index: u32,
    share: Option<DeviceShare>,
) -> Command {
    with_share(granted(id, number, &[(1, index, exact(16))]), share)
}

/// Returns a command that gives a lease a device, with a share of it instead.
pub(super) fn with_share(mut command: Command, share: Option<DeviceShare>) -> Command {
    match &mut command {
        Command::Granted { devices, .. } | Command::Moved { devices, .. } => {
            devices[0].share = share;
        }
        other => panic!("{other:?} gives no device"),
    }
    command
}

/// Two devices, and three clients.
fn start() -> Vec<Step> {
    let clients = (1..=3).map(|id| (0, attach(id), vec![]));
    let join = (0, join(1, &[exact(16), exact(16)]), vec![]);
    [join].into_iter().chain(clients).collect()
}

#[test]
fn shares_are_put_together_on_the_device_with_the_least_room() {
    let steps = [
        (
            1,
            request_share(1, 1, 250),
            vec![granted_share(1, 1, 0, part(250, 1))],
        ),
        (
            1,
            request_share(2, 2, 800),
            vec![granted_share(2, 2, 1, part(800, 1))],
        ),
        // Both have room; the second has less.
        (
            1,
            request_share(3, 3, 200),
            vec![granted_share(3, 3, 1, part(200, 2))],
        ),
        (
            1,
            request_share(3, 4, 700),
            vec![granted_share(3, 4, 0, part(700, 2))],
        ),
        (1, request_share(3, 5, 51), vec![queued(3, 5, 1)]),
        (
            1,
            request_share(1, 6, 50),
            vec![granted_share(1, 6, 0, part(50, 3))],
        ),
    ];
    check(start().into_iter().chain(steps));
}

#[test]
fn what_an_ended_lease_had_is_free_once_it_is_released() {
    let steps = [
        (
            1,
            request_share(1, 1, 600),
            vec![granted_share(1, 1, 0, part(600, 1))],
        ),
        (
            1,
            request_share(2, 2, 600),
            vec![granted_share(2, 2, 1, part(600, 1))],
        ),
        (
            1,
            request_share(3, 3, 400),
            vec![granted_share(3, 3, 0, part(400, 2))],
        ),
        (2, request_share(3, 4, 600), vec![queued(3, 4, 1)]),
        (3, release(1, 10), vec![end_lease(1, 10)]),
        (
            4,
            released(1, 10),
            vec![granted_share(3, 4, 0, part(600, 1))],
        ),
    ];
    check(start().into_iter().chain(steps));
}

#[test]
fn a_shared_device_is_for_nobody_who_needs_all_of_it() {
    let whole = |number, index| granted(1, number, &[(1, index, exact(16))]);
    let steps = [
        (
            1,
            request_share(1, 1, 100),
            vec![granted_share(1, 1, 0, part(100, 1))],
        ),
        (1, request_whole(1, 2), vec![whole(2, 1)]),
        (1, request_whole(1, 3), vec![queued(1, 3, 1)]),
        // Nor is a device of which a lease has all for one who needs a share.
        (1, request_share(2, 4, 901), vec![queued(2, 4, 2)]),
        (2, release(1, 10), vec![end_lease(1, 10)]),
        (3, released(1, 10), vec![whole(3, 0), queued(2, 4, 1)]),
    ];
    check(start().into_iter().chain(steps));
}

#[test]
fn memory_is_as_demanded_or_in_proportion() {
    let with_memory = |permille, gib, lane| {
        let share = Share {
            permille,
            memory_bytes: gib * GIB,
        };
        Some(share.in_lane(lane))
    };
    let steps = [
        (
            1,
            request_part(1, 1, 100, 12, Durability::Off),
            vec![granted_share(1, 1, 0, with_memory(100, 12, 1))],
        ),
        // There is time for half of the first device, and too little memory.
        (
            1,
            request_share(2, 2, 500),
            vec![granted_share(2, 2, 1, part(500, 1))],
        ),
        (
            1,
            request_share(3, 3, 250),
            vec![granted_share(3, 3, 1, part(250, 2))],
        ),
        (
            1,
            request_part(3, 4, 800, 4, Durability::Off),
            vec![granted_share(3, 4, 0, with_memory(800, 4, 2))],
        ),
        (
            2,
            request_part(2, 5, 10, 5, Durability::Off),
            vec![queued(2, 5, 1)],
        ),
    ];
    check(start().into_iter().chain(steps));
}

#[test]
fn a_device_has_16_leases_at_most() {
    let mut steps = vec![(0, join(1, &[exact(16)]), vec![]), (0, attach(1), vec![])];
    for number in 1..=16 {
        let share = part(10, number as u32);
        steps.push((
            1,
            request_share(1, number, 10),
            vec![granted_share(1, number, 0, share)],
        ));
    }
    steps.push((1, request_share(1, 17, 10), vec![queued(1, 17, 1)]));
    check(steps);
}

/// A worker that runs leases in its own process, say.
#[test]
fn a_worker_that_takes_no_shares_gets_none() {
    let device = DeviceSpec {
        takes_shares: false,
        ..exact(16)
    };
    let demand = Demand {
        share_permille: Some(500),
        ..demand_of(1, Some("flex"))
    };
    let pool = crate::Inventory::new(1, [(&device, 1)].into_iter());
    let reason = RefuseReason::Unsatisfiable { demand, pool };
    check([
        (0, join(1, &[device]), vec![]),
        (0, attach(1), vec![]),
        (1, request_share(1, 1, 500), vec![refused(1, 1, reason)]),
    ]);
}

/// Tenant `b` may have one device, or several shares of devices that are as much together.
#[test]
fn shares_count_as_parts_of_a_device() {
    let limited = TenantPolicy {
        limit: TenantLimit {
            devices: kinds(&[("flex", 1)]),
            memory_bytes: None,
        },
        ..TenantPolicy::default()
    };
    let at_limit = |number, position| queued_for(2, number, position, WaitReason::TenantLimit);
    let steps = [
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, set_policy([("b", limited)]), vec![]),
        (
            1,
            request_share(2, 1, 700),
            vec![granted_share(2, 1, 0, part(700, 1))],
        ),
        (1, request_share(2, 2, 301), vec![at_limit(2, 1)]),
        (
            1,
            request_share(2, 3, 300),
            vec![granted_share(2, 3, 0, part(300, 2))],
        ),
        (1, request_share(2, 4, 1), vec![at_limit(4, 2)]),
    ];
    check(steps);
}

/// Tenant `b` may have one device, and wants all memory of both with little of their time.
#[test]
fn a_share_with_much_memory_counts_as_that() {
    let limited = TenantPolicy {
        limit: TenantLimit {
            devices: kinds(&[("flex", 1)]),
            memory_bytes: None,
        },
        ..TenantPolicy::default()
    };
    let request = |number, gib| request_part(2, number, 1, gib, Durability::Off);
    let share = |gib, lane| {
        let share = Share {
            permille: 1,
            memory_bytes: gib * GIB,
        };
        Some(share.in_lane(lane))
    };
    let at_limit = queued_for(2, 2, 1, WaitReason::TenantLimit);
    let steps = [
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, set_policy([("b", limited)]), vec![]),
        (
            1,
            request(1, 12),
            vec![granted_share(2, 1, 0, share(12, 1))],
        ),
        (1, request(2, 5), vec![at_limit]),
        (1, request(3, 4), vec![granted_share(2, 3, 0, share(4, 2))]),
    ];
    let engine = check(steps);
    let used = &engine.used_by_tenants()["b"];
    assert_eq!(used.all_permille, 1000);
}

/// Tenant `b` is guaranteed one device of the kind, of which one has 16 GiB and one has 32 GiB, and wants little of
/// their time. Each of its requests counts as what it would have at most: 8 GiB are half of the smaller device. With
/// 20 GiB, a request can only get the larger one, of which that is 62.5 %.
#[test]
fn a_request_for_a_share_with_much_memory_counts_as_that_for_a_guarantee() {
    let guaranteed = TenantPolicy {
        guaranteed: kinds(&[("flex", 1)]),
        ..TenantPolicy::default()
    };
    let request = |number, gib| request_part(2, number, 1, gib, Durability::Off);
    let beyond = |number, position| queued_for(2, number, position, WaitReason::TooFewFree);
    let on_both = granted(1, 1, &[(1, 0, exact(16)), (2, 0, exact(32))]);
    let both = request_for(1, 1, demand_of(2, Some("flex")));
    let drain = Event::Drain {
        worker: WorkerId(1),
        is_drained: true,
    };
    let steps = [
        (0, join(1, &[exact(16)]), vec![]),
        (0, join(2, &[exact(32)]), vec![]),
        (0, attach_of("a", 1), vec![]),
        (0, attach_of("b", 2), vec![]),
        (0, set_policy([("b", guaranteed)]), vec![]),
        (1, both, vec![on_both]),
        (1, request(2, 8), vec![queued_guaranteed(2, 2, 1)]),
        (1, request(3, 9), vec![beyond(3, 2)]),
        (1, request(4, 20), vec![beyond(4, 3)]),
        (
            1,
            request(5, 8),
            vec![queued_guaranteed(2, 5, 2), beyond(3, 3), beyond(4, 4)],
        ),
        (1, request(6, 0), vec![beyond(6, 5)]),
        // Without the smaller device, 8 GiB are a quarter: only request 4 is beyond the guarantee.
        (
            2,
            drain,
            vec![
                queued_guaranteed(2, 3, 2),
                queued_guaranteed(2, 5, 3),
                queued_guaranteed(2, 6, 4),
                beyond(4, 5),
            ],
        ),
    ];
    check(steps);
}

/// Clients 1 and 2 have shares of the only device that were there before the scheduler.
#[test]
fn shares_are_adopted_after_a_restart() {
    let devices = [exact(16)];
    let shares = [(10, part(500, 2)), (20, part(250, 1))];
    let mut join = join_holding(1, &devices, &[(10, 0), (20, 0)]);
    if let Event::Worker {
        event: WorkerEvent::Join { held, .. },
        ..
    } = &mut join
    {
        for (held, (_, share)) in held.iter_mut().zip(shares) {
            held.share = share;
        }
    }
    let claim = |client: u64, at: usize| {
        let (lease, share) = shares[at];
        let mut attach = attach_claiming(client, &[(lease, &[(1, 0)])]);
        if let Event::Client {
            event: ClientEvent::Attach { claims, .. },
            ..
        } = &mut attach
        {
            claims[0].lease_devices[0].share = share;
        }
        attach
    };
    let steps = [
        (1, claim(1, 0), vec![]),
        (2, join, vec![]),
        (3, attach(3), vec![]),
        (3, request_share(3, 3, 251), vec![queued(3, 3, 1)]),
        (
            3,
            request_share(3, 4, 200),
            vec![granted_share(3, 4, 0, part(200, 3))],
        ),
        (4, claim(2, 1), vec![]),
        (5, release(1, 10), vec![end_lease(1, 10)]),
        (
            6,
            released(1, 10),
            vec![granted_share(3, 3, 0, part(251, 2))],
        ),
    ];
    let engine = check(steps);
    assert_eq!(engine.snapshot().leases, 3);
}

/// An end names the lane, so that the other leases of the device go on.
#[test]
fn the_end_of_a_lease_is_that_of_its_lane() {
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    let mut handle = |event| engine.handle(event, at(1));
    handle(join(1, &[exact(16)]));
    handle(attach(1));
    handle(request_share(1, 1, 250));
    handle(request_share(1, 2, 250));
    let commands = handle(release(1, 20));
    let grant = GrantNumber {
        term: TERM,
        count: 2,
    };
    let ended = DeviceGrant {
        index: 0,
        lane: 2,
        grant,
    };
    let Command::EndLease { grants, .. } = &commands[0] else {
        panic!("{commands:?}");
    };
    assert_eq!(*grants, [ended]);
}
