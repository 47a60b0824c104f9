//! No leases take each other's place in turn between changes of demand.
//!
//! The *potential* is a pair: how many requests wait that are not for spot leases, and how many leases wait that are
//! no spot leases; without those for which leases have been suspended already. Pairs are compared by the first
//! number, then by the second.
//!
//! A request may get the devices that a lease has left for another one, for example if it is within a guarantee only
//! since that lease was suspended. Then there is one request less that waits, and one that leases may make room for
//! again: the potential stays. If the devices were left for a lease, the potential falls: one request less waits, and
//! there is one lease more for which others may make room again. And a request that comes first may hold such devices
//! back, once there will be enough for it. Each request may do so once: if it did so again and again, others would make
//! room for ever.
//!
//! Each time that the engine suspends leases, or ends them, for something that waits, the potential falls: a request
//! gets room, and its victims, which wait now, count in the second number only; or a lease gets room, and its victims
//! are spot leases, which do not count. Nothing raises it but a change of demand; time does not. So the engine does so
//! a limited number of times between changes, and never comes back to where it was.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::property::{
    CLIENTS, Op, POLICIES, WORKERS, attach_client_2, check_any, check_with_policy, share, spot,
};
use super::world::World;
use super::*;
use crate::lease::Standing;

/// What has happened since the last change of demand.
#[derive(Default)]
pub(super) struct Trades {
    /// The leases that made room, each with the request or lease for which it did.
    made_room: BTreeSet<(LeaseId, LeaseId)>,
    /// Those for which leases have made room, and which have waited since.
    awaited: BTreeSet<LeaseId>,
    /// The requests that waited after the last event.
    requests: BTreeSet<LeaseId>,
    /// How many requests may have got room that was made for other requests, or for leases, which still wait.
    overtaken: usize,
    /// How often requests that wait may have held back room that was made for others.
    held_up: usize,
    /// As it was after the last event.
    potential: (usize, usize),
}

/// The workers that leases may use, before an event, and the leases.
pub(super) struct Pool {
    pub(super) workers: Vec<(WorkerId, bool, bool)>,
    leases: BTreeSet<LeaseId>,
}

/// Returns whether an event changes the demand, or the devices that there are, by itself.
fn is_change(event: &Event) -> bool {
    match event {
        Event::Tick | Event::Gap { .. } => false,
        Event::Worker { event, .. } => !matches!(
            event,
            WorkerEvent::Heartbeat
                | WorkerEvent::SnapshotsKept { .. }
                | WorkerEvent::StoredLeases { .. }
                | WorkerEvent::Idle { .. }
                | WorkerEvent::Released { .. }
        ),
        Event::Client { event, .. } => !matches!(event, ClientEvent::Restorable { .. }),
        _ => true,
    }
}

/// Returns whether a lease was suspended, or ended, other than for something that waits: after a loss.
fn is_loss(command: &Command) -> bool {
    match command {
        Command::Suspended { cause, .. } => {
            !matches!(cause, None | Some(EndReason::Reclaimed | EndReason::Idle))
        }
        Command::Interrupted { .. } => true,
        Command::LeaseEnded { reason, .. } => *reason != EndReason::Reclaimed,
        _ => false,
    }
}

impl World {
    /// Returns what an event may change other than by the engine's decisions.
    pub(super) fn pool_now(&self) -> Pool {
        let workers = self.snapshot.workers.iter();
        Pool {
            workers: workers
                .map(|it| (it.worker, it.connected, it.draining))
                .collect(),
            leases: self.engine.leases().iter().map(|(id, _)| id).collect(),
        }
    }

    /// No two leases have made room for each other since the last change of demand, and the potential has not risen
    /// by this event; it has fallen if leases made room.
    pub(super) fn check_trades(&mut self, event: &Event, commands: &[Command], before: &Pool) {
        let made_room = self.made_room_for.clone();
        if self.leases.is_none() {
            return;
        }
        let now = self.pool_now();
        let victims: BTreeSet<_> = made_room.iter().map(|(victim, _)| *victim).collect();
        let mut ended = before.leases.difference(&now.leases);
        let is_ended = ended.any(|id| !victims.contains(id));
        let has_changed = is_change(event)
            || commands.iter().any(is_loss)
            || is_ended
            || now.workers != before.workers;
        let requests = self.waiting.iter().filter(|it| !it.demand.is_spot);
        let requests = requests.map(|it| it.lease).collect();
        let leases = self.engine.leases().iter().filter(|(_, lease)| {
            let waits = matches!(
                lease.standing,
                Standing::Lost(_) | Standing::Resuming { .. }
            );
            waits && !lease.is_spot
        });
        let leases = leases.map(|(id, _)| id).collect();
        self.trades
            .check(has_changed, made_room, &requests, &leases);
    }
}

impl Trades {
    /// Checks an event that may have changed the demand, and in which leases `made_room`. These requests and leases
    /// wait now that are not for spot leases.
    fn check(
        &mut self,
        has_changed: bool,
        made_room: Vec<(LeaseId, LeaseId)>,
        requests: &BTreeSet<LeaseId>,
        leases: &BTreeSet<LeaseId>,
    ) {
        if has_changed {
            *self = Self::default();
        }
        let has_made_room = !made_room.is_empty();
        let waited = self.requests.len();
        let mut newly = BTreeSet::new();
        for (victim, by) in made_room {
            let is_mutual = self.made_room.contains(&(by, victim));
            assert!(!is_mutual, "{victim} and {by} make room for each other");
            self.made_room.insert((victim, by));
            if newly.insert(by) && !self.awaited.insert(by) {
                self.overtaken = self.overtaken.saturating_sub(1);
            }
        }
        let is_other = |it: &&LeaseId| !requests.contains(it) && !self.awaited.contains(it);
        self.overtaken += self.requests.iter().filter(is_other).count();
        self.requests.clone_from(requests);
        let waits = |it: &LeaseId| requests.contains(it) || leases.contains(it);
        self.awaited.retain(waits);
        self.overtaken = self.overtaken.min(self.awaited.len());
        let requests_awaited = self.awaited.intersection(requests).count();
        let requests_overtaken = self.overtaken.min(requests_awaited);
        let leases_overtaken = self.overtaken - requests_overtaken;
        let others = |all: &BTreeSet<LeaseId>| all.difference(&self.awaited).count();
        let potential = (
            others(requests) + requests_overtaken,
            others(leases) + leases_overtaken,
        );
        let before = std::mem::replace(&mut self.potential, potential);
        if has_changed {
            return;
        }
        assert!(
            potential <= before,
            "the potential rises from {before:?} to {potential:?}"
        );
        if has_made_room && potential == before {
            self.held_up += 1;
            let others = waited.saturating_sub(newly.len());
            assert!(
                self.held_up <= others,
                "leases make room, and the potential stays {before:?}"
            );
        }
    }
}

/// A request of a client, for one kind of devices, whose lease can be suspended; or a lease that its client releases.
fn change() -> impl Strategy<Value = Op> {
    let client = || 0..CLIENTS;
    let kind = prop_oneof![2 => Just("flex"), 1 => Just("vulkan")];
    let demand = (1..4_u32, kind, spot(), share()).prop_map(|(devices, kind, is_spot, share)| {
        let devices = if share.is_some() { 1 } else { devices };
        Demand {
            durability: Durability::Auto,
            is_spot,
            share_permille: share,
            ..demand_of(devices, Some(kind))
        }
    });
    prop_oneof![
        5 => (client(), demand, -1..2).prop_map(
            |(client, demand, priority)| Op::Request { client, demand, priority }
        ),
        1 => (client(), 0..64_usize).prop_map(|(client, nth)| Op::Release { client, nth }),
        1 => (1..POLICIES).prop_map(|which| Op::SetPolicy { which }),
    ]
}

/// Changes of demand, and a time after these in which leases get snapshots, run for long enough and are released.
fn phase() -> impl Strategy<Value = Vec<Op>> {
    let rest = vec(prop_oneof![3 => Just(10_000), 1 => 0..12_000_u64], 1..6);
    (vec(change(), 1..6), rest).prop_map(|(mut ops, rest)| {
        for millis in rest {
            ops.extend([Op::AllKept, Op::Wait { millis }]);
            let devices = u32::MAX;
            ops.extend((0..WORKERS).map(|worker| Op::Finish { worker, devices }));
        }
        ops
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Between changes of demand, leases make room for others a limited number of times: the potential falls each time.
    #[test]
    fn leases_do_not_trade_places(phases in vec(phase(), 1..6), which in 1..POLICIES) {
        check_with_policy(which, phases.into_iter().flatten());
    }
}

/// A request of a client for devices of a kind, whose lease can be suspended.
fn request(client: usize, devices: u32, kind: &str) -> Demanded {
    let demand = Demand {
        durability: Durability::Auto,
        ..demand_of(devices, Some(kind))
    };
    Demanded { client, demand }
}

struct Demanded {
    client: usize,
    demand: Demand,
}

impl Demanded {
    fn op(self) -> Op {
        let Self { client, demand } = self;
        Op::Request {
            client,
            demand,
            priority: 0,
        }
    }

    fn spot(mut self) -> Op {
        self.demand.is_spot = true;
        self.op()
    }

    fn spot_share(mut self, permille: u32) -> Op {
        self.demand.share_permille = Some(permille);
        self.spot()
    }

    fn share(mut self, permille: u32) -> Op {
        self.demand.share_permille = Some(permille);
        self.op()
    }
}

/// Leases get snapshots, time passes in which they run for long enough to be suspended, and devices are released.
fn rest() -> impl Iterator<Item = Op> {
    rest_of(10_000)
}

/// As [`rest`], but so many milliseconds pass.
fn rest_of(millis: u64) -> impl Iterator<Item = Op> {
    let devices = u32::MAX;
    let finish = (0..WORKERS).map(move |worker| Op::Finish { worker, devices });
    [Op::AllKept, Op::Wait { millis }].into_iter().chain(finish)
}

/// A request of tenant `a` is within its guarantee, and waits for a lease of tenant `b` to leave its devices. A spot
/// lease of `a` was suspended because of the limit of the tenant, and there is a device for it elsewhere. It does not
/// go on before the request has got its devices: it would keep the request from them.
#[test]
fn a_spot_lease_does_not_come_back_before_the_request_for_which_it_made_room() {
    let start = [
        attach_client_2(),
        request(2, 1, "flex").op(),
        request(2, 3, "flex").op(),
        request(0, 1, "flex").spot(),
        request(0, 2, "flex").op(),
        request(0, 1, "vulkan").spot(),
    ];
    let policy = [Op::SetPolicy { which: 3 }];
    let ops = start
        .into_iter()
        .chain(rest())
        .chain(policy)
        .chain(rest())
        .chain(rest());
    check_any(ops.collect());
}

/// Tenant `a` has a spot lease, and two requests that wait because of its limit: one for another spot lease, and one
/// for which the first is suspended. The former gets no devices before the latter.
#[test]
fn a_request_for_a_spot_lease_does_not_take_the_limit_from_another_one() {
    let start = [
        attach_client_2(),
        Op::SetPolicy { which: 1 },
        request(0, 2, "flex").spot(),
        request(2, 1, "vulkan").op(),
        Op::SetPolicy { which: 3 },
    ];
    let beyond_limit = [request(0, 3, "flex").op()];
    let at_limit = [request(0, 2, "flex").spot(), request(0, 2, "vulkan").op()];
    let ops = start
        .into_iter()
        .chain(rest())
        .chain(beyond_limit)
        .chain(rest())
        .chain(at_limit)
        .chain(rest());
    check_any(ops.collect());
}

/// A spot lease that was suspended goes on at a device with more memory. It still counts as the device that it was
/// granted, so it need not make room again within the limit of its tenant.
#[test]
fn a_lease_at_a_larger_device_is_within_the_limit_of_its_tenant() {
    let ops = [
        Op::SetPolicy { which: 3 },
        attach_client_2(),
        request(0, 1, "flex").spot(),
        Op::Wait { millis: 10_000 },
        request(0, 1, "flex").spot(),
        request(0, 1, "vulkan").op(),
        request(0, 1, "flex").share(250),
        Op::AllKept,
        Op::Finish {
            worker: 1,
            devices: u32::MAX,
        },
        request(0, 1, "flex").op(),
        Op::Wait { millis: 10_000 },
        Op::Wait { millis: 10_000 },
        Op::AllKept,
    ];
    check_any(ops.into());
}

/// Two requests of a tenant for any device wait because of its limit for memory, which three spot leases of it use up.
/// The first has its reservation before these make room: none does for the second, which that reservation keeps from the
/// devices.
#[test]
fn a_request_has_its_reservation_before_spot_leases_make_room() {
    let any_device = || {
        let mut request = request(0, 1, "flex");
        request.demand.kind = None;
        request.demand.durability = Durability::Off;
        request.op()
    };
    let ops = [
        Op::SetPolicy { which: 3 },
        attach_client_2(),
        request(0, 1, "vulkan").share(250),
        request(1, 1, "vulkan").share(250),
        request(1, 1, "flex").share(250),
        request(0, 1, "vulkan").share(250),
        request(0, 1, "vulkan").op(),
        request(2, 1, "vulkan").op(),
        request(0, 1, "flex").spot(),
        Op::Join {
            worker: 3,
            changed: false,
        },
        request(0, 1, "flex").spot_share(500),
        request(0, 1, "flex").spot(),
        request(0, 1, "flex").spot(),
        Op::Release { client: 0, nth: 37 },
        any_device(),
        any_device(),
        Op::Wait { millis: 10_000 },
        Op::AllKept,
    ];
    check_any(ops.into());
}

/// A lease that was suspended for a request of another tenant waits for the devices that this one has released, and
/// comes before a request for which a spot lease would have to make room.
#[test]
fn a_reclaimed_lease_comes_before_a_request_that_needs_devices_of_spot_leases() {
    let start = [
        Op::SetPolicy { which: 2 },
        attach_client_2(),
        request(0, 1, "vulkan").op(),
        request(0, 1, "flex").op(),
        request(0, 1, "flex").op(),
        request(0, 2, "flex").op(),
        request(0, 1, "flex").spot(),
    ];
    let reclaims = [request(2, 2, "flex").op()];
    let released = [
        Op::Release { client: 2, nth: 17 },
        request(0, 3, "flex").op(),
    ];
    let ops = start
        .into_iter()
        .chain((0..4).flat_map(|_| rest()))
        .chain(reclaims)
        .chain((0..3).flat_map(|_| rest()))
        .chain(released)
        .chain(rest());
    check_any(ops.collect());
}

/// A request of tenant `a` counts on a device with 8 GiB, and gets one with 16. A spot lease that was suspended for it
/// does not go on before another request of `a` has its devices: it would be within the limit for memory only with the
/// smaller device.
#[test]
fn a_spot_lease_does_not_count_on_a_request_to_get_a_small_device() {
    let start = [
        request(2, 2, "flex").op(),
        request(2, 1, "flex").op(),
        request(0, 2, "flex").spot(),
    ];
    let waiting = [
        request(0, 1, "vulkan").spot(),
        request(0, 1, "flex").share(501),
    ];
    let Demanded { client, demand } = request(0, 1, "flex");
    let first = Op::Request {
        client,
        demand,
        priority: 1,
    };
    let ops = start
        .into_iter()
        .chain((0..4).flat_map(|_| rest()))
        .chain(waiting)
        .chain((0..2).flat_map(|_| rest()))
        .chain([Op::SetPolicy { which: 3 }, first])
        .chain((0..2).flat_map(|_| rest()));
    check_with_policy(1, ops);
}

/// A lease that was suspended for a request within a guarantee waits, and a spot lease makes room for it. The request
/// gets that device, as it is released first. No further spot lease makes room: the lease will get back the device that
/// it had.
#[test]
fn a_lease_counts_on_the_device_that_it_leaves() {
    let flex = || request(0, 1, "flex");
    let ops = [Op::SetPolicy { which: 3 }]
        .into_iter()
        .chain(rest())
        .chain([flex().op()])
        .chain(rest())
        .chain([request(0, 2, "vulkan").op()])
        .chain(rest())
        .chain([flex().spot(), flex().spot(), flex().op()])
        .chain(rest())
        .chain([
            Op::SetPolicy { which: 1 },
            flex().op(),
            request(2, 1, "flex").op(),
        ])
        .chain(rest());
    check_with_policy(1, ops);
}

/// A lease is suspended for a request within a guarantee, and a spot lease makes room for that lease. A second request
/// gets a reservation once the first request has its devices, and takes that room. So another spot lease makes room for
/// the lease.
#[test]
fn a_request_with_a_reservation_gets_the_room_that_was_made_for_a_lease() {
    let flex = || request(0, 1, "flex");
    let ops = [
        request(0, 1, "vulkan").op(),
        request(2, 1, "flex").op(),
        Op::SetPolicy { which: 1 },
    ]
    .into_iter()
    .chain(rest())
    .chain([
        request(0, 1, "vulkan").op(),
        request(0, 3, "flex").spot(),
        flex().op(),
    ])
    .chain((0..2).flat_map(|_| rest()))
    .chain([flex().spot(), flex().op(), request(2, 1, "flex").op()])
    .chain((0..5).flat_map(|_| rest()));
    check_with_policy(3, ops);
}

/// A request of a tenant counts on a device with 8 GiB that is being released, and could get a free one with 16 as soon
/// as the limit of the tenant for memory allows that. A second request has spot leases make room within the limit only
/// when they are enough for it beside the larger device.
#[test]
fn a_request_that_counts_on_a_small_device_counts_as_a_large_one() {
    let flex = || request(0, 1, "flex");
    let ops = [request(2, 1, "flex").op(), request(1, 1, "flex").spot()]
        .into_iter()
        .chain(rest())
        .chain([Op::SetPolicy { which: 3 }])
        .chain(rest())
        .chain([flex().spot(), flex().op(), flex().share(501)])
        .chain(rest());
    check_with_policy(1, ops);
}

/// A spot lease makes room for a request within the limit of its tenant. Then an earlier request of the tenant gets a
/// reservation. The limit allows what both could get together, so the request still counts on its device, and the spot
/// lease does not come back before it has got that.
#[test]
fn a_request_counts_on_a_device_although_its_tenant_gets_a_reservation() {
    let Demanded { client, demand } = request(0, 2, "flex");
    let earlier = Op::Request {
        client,
        demand,
        priority: 1,
    };
    let start = [
        request(0, 1, "vulkan").spot_share(250),
        request(1, 1, "flex").op(),
    ];
    let waiting = [
        request(0, 2, "flex").spot(),
        Op::Release { client: 1, nth: 1 },
        earlier,
        request(0, 1, "flex").op(),
    ];
    let ops = start
        .into_iter()
        .chain(rest())
        .chain(waiting)
        .chain((0..2).flat_map(|_| rest()));
    check_with_policy(3, ops);
}

/// A spot lease makes room on a device for a request for a share. Then an earlier request of the tenant for three devices
/// gets a reservation, and counts on three others. The limit of the tenant is one of another kind of devices, so the
/// share still counts on that room, and the spot lease does not come back before.
#[test]
fn a_limit_of_another_kind_does_not_keep_a_share_from_passing_a_reservation() {
    let start = [
        request(0, 1, "flex").share(500),
        request(0, 1, "vulkan").op(),
        request(0, 1, "flex").spot_share(500),
        request(1, 3, "flex").spot(),
    ];
    let waiting = [request(0, 3, "flex").op(), request(0, 1, "flex").share(250)];
    let rests = |millis: [u64; 4]| millis.into_iter().flat_map(rest_of);
    let ops = start
        .into_iter()
        .chain(rests([10_000, 10_000, 10_000, 1_280]))
        .chain(rest())
        .chain([Op::SetPolicy { which: 1 }])
        .chain(rest())
        .chain(waiting)
        .chain(rests([10_000, 8_455, 265, 10_000]));
    check_with_policy(1, ops);
}

/// An event: the leases that make room, each with what for, and the requests and leases that wait after it.
type Step<'a> = (&'a [(u64, u64)], &'a [u64], &'a [u64]);

/// Checks events, of which only the first changes the demand.
fn check_steps(steps: &[Step<'_>]) {
    let mut trades = Trades::default();
    let ids = |ids: &[u64]| ids.iter().copied().map(LeaseId).collect();
    for (index, (made_room, requests, leases)) in steps.iter().enumerate() {
        let made_room = made_room.iter();
        let made_room = made_room.map(|(victim, by)| (LeaseId(*victim), LeaseId(*by)));
        trades.check(
            index == 0,
            made_room.collect(),
            &ids(requests),
            &ids(leases),
        );
    }
}

#[test]
fn the_potential_falls_when_leases_make_room() {
    // Leases 1 and 2 do for requests 8 and 9, and a spot lease 3 for lease 1 before it makes room again.
    check_steps(&[
        (&[], &[8, 9], &[]),
        (&[(1, 8)], &[8, 9], &[1]),
        (&[], &[9], &[1]),
        (&[(3, 1)], &[9], &[1]),
        (&[], &[9], &[]),
        (&[(1, 9), (2, 9)], &[9], &[1, 2]),
        (&[(3, 1)], &[9], &[1, 2]),
    ]);
}

#[test]
#[should_panic(expected = "make room for each other")]
fn two_leases_that_trade_places_are_found() {
    check_steps(&[(&[(1, 8)], &[8], &[1]), (&[(8, 1)], &[], &[1, 8])]);
}

#[test]
#[should_panic(expected = "the potential stays (0, 2)")]
fn a_lease_that_takes_the_place_of_another_is_found() {
    check_steps(&[(&[], &[], &[1, 2]), (&[(3, 1)], &[], &[1, 2, 3])]);
}

#[test]
#[should_panic(expected = "the potential stays (0, 0)")]
fn leases_that_make_room_for_a_request_in_vain_are_found() {
    check_steps(&[(&[(1, 8)], &[8], &[]), (&[(2, 8)], &[8], &[])]);
}

#[test]
#[should_panic(expected = "the potential rises from (1, 0) to (1, 1)")]
fn a_lease_that_waits_without_a_change_of_demand_is_found() {
    check_steps(&[(&[], &[9], &[]), (&[], &[9], &[1])]);
}

#[test]
fn a_request_may_get_the_room_that_was_made_for_another_one() {
    // Lease 1 makes room for request 8, of which request 9 gets the devices.
    check_steps(&[
        (&[], &[8, 9], &[]),
        (&[(1, 8)], &[8], &[1]),
        (&[(2, 8)], &[8], &[1]),
    ]);
}

#[test]
fn a_request_may_get_the_room_that_was_made_for_a_lease() {
    check_steps(&[
        (&[], &[9], &[1]),
        (&[(3, 1)], &[9], &[1]),
        (&[], &[], &[1]),
        (&[(4, 1)], &[], &[1]),
    ]);
}

#[test]
#[should_panic(expected = "the potential stays (0, 0)")]
fn leases_that_make_room_twice_for_a_lease_that_one_request_overtook_are_found() {
    check_steps(&[
        (&[], &[9], &[1]),
        (&[(3, 1)], &[9], &[1]),
        (&[], &[], &[1]),
        (&[(4, 1)], &[], &[1]),
        (&[(5, 1)], &[], &[1]),
    ]);
}

#[test]
#[should_panic(expected = "the potential stays (1, 0)")]
fn a_request_that_holds_back_the_room_of_another_again_is_found() {
    // Leases 1, 2 and 3 make room for request 8, and request 9 comes first each time.
    check_steps(&[
        (&[], &[8, 9], &[]),
        (&[(1, 8)], &[8, 9], &[]),
        (&[(2, 8)], &[8, 9], &[]),
        (&[(3, 8)], &[8, 9], &[]),
    ]);
}

#[test]
#[should_panic(expected = "the potential stays (0, 1)")]
fn leases_that_make_room_again_and_again_are_found() {
    check_steps(&[
        (&[], &[8, 9], &[]),
        (&[(1, 8)], &[8], &[1]),
        (&[(2, 8)], &[8], &[1]),
        (&[(3, 8)], &[8], &[1]),
    ]);
}
