//! Tests of the decisions by examples, and of random events against the laws.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use tensord_proto::{grant::GrantNumber, v1};

use super::*;

const A: LeaseId = LeaseId(0xa);
const B: LeaseId = LeaseId(0xb);

fn claim(lease: LeaseId, device: u32, count: u64) -> Claim {
    Claim {
        lease,
        device,
        grant: GrantNumber { term: 1, count },
        share: None,
    }
}

/// A claim to a share of a device; lane 0 is the whole device.
fn share_claim(lease: LeaseId, device: u32, lane: u32, count: u64) -> Claim {
    let share = DeviceShare {
        permille: 50,
        memory_bytes: 100,
        lane,
    };
    Claim {
        share: (lane != WHOLE_LANE).then_some(share),
        ..claim(lease, device, count)
    }
}

/// The grants of claims, as messages that end them have them.
fn ends(claims: &[Claim]) -> Vec<DeviceGrant> {
    let end = |claim: &Claim| DeviceGrant {
        share: claim.share.map(|share| v1::DeviceShare {
            lane: share.lane,
            ..v1::DeviceShare::default()
        }),
        ..claim.to_grant()
    };
    claims.iter().map(end).collect()
}

/// A table whose devices are granted to `A` and, if there are two, `B`.
fn running(devices: u32) -> (LeaseTable, Instant) {
    let (mut table, now) = (LeaseTable::new(devices), Instant::now());
    for (device, lease) in (0..devices).zip([A, B]) {
        let actions = table.granted(now, lease, &[claim(lease, device, 1)]);
        assert_eq!(actions, [Action::Start(lease)]);
    }
    (table, now)
}

#[test]
fn a_lease_runs_until_it_is_ended_and_its_process_has_exited() {
    let (mut table, now) = running(2);
    assert_eq!(table.route(A), Route::Process);
    let ending = table.end_lease(now, A, &ends(&[claim(A, 0, 1)]));
    assert_eq!(ending, [Action::End(A, format!("lease {A} ended"))]);
    assert_eq!(table.route(A), Route::Process, "clients fetch the end");
    assert_eq!(table.unreleased_devices(A), [0]);
    assert_eq!(table.end_lease(now, A, &ends(&[claim(A, 0, 1)])), []);
    let released = [Action::Forget(A), Action::Released(A)];
    assert_eq!(table.exited(now, A, "it exited"), released);
    assert!(table.unreleased_devices(A).is_empty());
    assert_eq!(table.route(A), Route::Unknown);
    assert_eq!(table.route(B), Route::Process);
}

#[test]
fn the_end_of_earlier_grants_does_not_end_a_lease_that_its_client_has_started_again() {
    let (mut table, now) = running(1);
    table.end_lease(now, A, &ends(&[claim(A, 0, 1)]));
    table.exited(now, A, "it exited");
    // The client comes with a token for its second grant before the scheduler's messages.
    assert_eq!(table.granted(now, A, &[claim(A, 0, 2)]), [Action::Start(A)]);
    assert_eq!(table.end_lease(now, A, &ends(&[claim(A, 0, 1)])), []);
    assert_eq!(table.granted(now, A, &[claim(A, 0, 2)]), []);
    assert!(table.is_running(A));
    let ending = table.end_lease(now, A, &ends(&[claim(A, 0, 2)]));
    assert_eq!(ending, [Action::End(A, format!("lease {A} ended"))]);
}

#[test]
fn a_process_that_does_not_end_is_killed() {
    let (mut table, now) = running(1);
    table.end_lease(now, A, &ends(&[claim(A, 0, 1)]));
    assert_eq!(table.tick(now + END_TIMEOUT / 2), []);
    assert_eq!(table.tick(now + END_TIMEOUT), [Action::Kill(A)]);
    assert_eq!(table.tick(now + 2 * END_TIMEOUT), [], "once");
    assert_eq!(table.unreleased_devices(A), [0], "until it has exited");
    let released = [Action::Forget(A), Action::Released(A)];
    assert_eq!(table.exited(now, A, "killed"), released);
}

#[test]
fn a_lease_waits_for_the_processes_of_earlier_ones() {
    let (mut table, now) = running(2);
    let next = LeaseId(0xc);
    let granted = table.granted(now, next, &[claim(next, 0, 2), claim(next, 1, 2)]);
    let reason = |lease| format!("lease {lease} ended: its device was granted to another lease");
    let ends = [A, B].map(|lease| Action::End(lease, reason(lease)));
    assert_eq!(granted, ends);
    assert_eq!(table.route(next), Route::Process, "connections wait");
    assert_eq!(table.exited(now, B, "it exited"), [Action::Forget(B)]);
    let both = [Action::Forget(A), Action::Start(next)];
    assert_eq!(table.exited(now, A, "it exited"), both);
}

#[test]
fn a_dead_process_is_not_started_again_and_its_reason_is_kept() {
    let (mut table, now) = running(1);
    assert_eq!(table.exited(now, A, "signal 11"), []);
    assert_eq!(table.route(A), Route::Dead("signal 11".into()));
    assert_eq!(table.granted(now, A, &[claim(A, 0, 1)]), []);
    assert_eq!(table.route(A), Route::Dead("signal 11".into()));
    assert_eq!(table.unreleased_devices(A), [0]);
    let ended = table.end_lease(now, A, &ends(&[claim(A, 0, 1)]));
    assert_eq!(ended, [Action::Forget(A)]);
    assert!(table.unreleased_devices(A).is_empty());
    let next = table.granted(now, B, &[claim(B, 0, 2)]);
    assert_eq!(next, [Action::Start(B)], "one death does not count");
}

#[test]
fn a_device_with_three_deaths_in_a_minute_is_out_until_a_test_passes() {
    let (mut table, mut now) = (LeaseTable::new(1), Instant::now());
    let die = |table: &mut LeaseTable, now, count| {
        let lease = LeaseId(count);
        table.granted(now, lease, &[claim(lease, 0, count)]);
        let died = table.exited(now, lease, "signal 6");
        table.end_lease(now, lease, &ends(&[claim(lease, 0, count)]));
        died
    };
    assert_eq!(die(&mut table, now, 1), []);
    now += DEATH_WINDOW + Duration::from_secs(1);
    assert_eq!(die(&mut table, now, 2), []);
    assert_eq!(die(&mut table, now, 3), [], "the first one is forgotten");
    assert_eq!(die(&mut table, now, 4), [Action::HealthChanged]);
    let reason = "3 processes that used the device have died within 60s; the last one: signal 6";
    assert_eq!(table.out_of_service().collect::<Vec<_>>(), [(0, reason)]);
    assert_eq!(table.tick(now), [Action::Probe(0)]);
    assert_eq!(table.tick(now), [], "one at a time");
    let failed = table.probed(now, 0, Err("no memory".into()));
    assert_eq!(failed, [Action::HealthChanged]);
    assert_eq!(table.out_of_service().count(), 1);
    assert_eq!(table.tick(now), []);
    now += PROBE_RETRY_DELAY;
    assert_eq!(table.tick(now), [Action::Probe(0)]);
    assert_eq!(table.probed(now, 0, Ok(())), [Action::HealthChanged]);
    assert_eq!(table.out_of_service().count(), 0);
    assert_eq!(die(&mut table, now, 5), [], "the count begins anew");
}

#[test]
fn a_failed_start_does_not_count_against_the_device() {
    let (mut table, now) = (LeaseTable::new(1), Instant::now());
    for count in 1..10 {
        let lease = LeaseId(count);
        let started = table.granted(now, lease, &[claim(lease, 0, count)]);
        assert_eq!(started, [Action::Start(lease)]);
        assert_eq!(table.stopped(lease, "no memory"), []);
        assert_eq!(table.route(lease), Route::Dead("no memory".into()));
        table.end_lease(now, lease, &ends(&[claim(lease, 0, count)]));
    }
    assert_eq!(table.out_of_service().count(), 0);
}

#[test]
fn a_leaving_worker_starts_nothing_more() {
    let (mut table, now) = running(1);
    let ends = table.end_all(now, "the worker leaves");
    assert_eq!(ends, [Action::End(A, "the worker leaves".into())]);
    assert_eq!(table.exited(now, A, "it exited"), [Action::Forget(A)]);
    let closed = Route::Closed("the worker leaves".into());
    assert_eq!(table.route(A), closed);
    assert_eq!(table.granted(now, B, &[claim(B, 0, 2)]), []);
    assert_eq!(table.route(B), closed);
}

/// A table whose device is granted to `A` and `B`, a share each.
fn sharing() -> (LeaseTable, Instant) {
    let (mut table, now) = (LeaseTable::new(1), Instant::now());
    for (lane, lease) in [(1, A), (2, B)] {
        let actions = table.granted(now, lease, &[share_claim(lease, 0, lane, lane.into())]);
        assert_eq!(actions, [Action::Start(lease)]);
    }
    (table, now)
}

const C: LeaseId = LeaseId(0xc);

fn superseded(lease: LeaseId) -> Action {
    let reason = format!("lease {lease} ended: its device was granted to another lease");
    Action::End(lease, reason)
}

#[test]
fn leases_with_shares_run_beside_each_other() {
    let (mut table, now) = sharing();
    assert_eq!(table.share(A, 0), share_claim(A, 0, 1, 1).share);
    let ending = table.end_lease(now, A, &ends(&[share_claim(A, 0, 1, 1)]));
    assert_eq!(ending, [Action::End(A, format!("lease {A} ended"))]);
    // The next lease of the lane waits for the process of the earlier one, and for no other.
    assert_eq!(table.granted(now, C, &[share_claim(C, 0, 1, 3)]), []);
    let held = table.held_devices();
    let held: Vec<_> = held
        .iter()
        .map(|held| (held.lease_id, held.ended))
        .collect();
    assert_eq!(held, [(B.0, false), (C.0, false), (A.0, true)]);
    let next = [Action::Forget(A), Action::Released(A), Action::Start(C)];
    assert_eq!(table.exited(now, A, "it exited"), next);
    assert_eq!(table.route(B), Route::Process);
}

#[test]
fn a_whole_device_waits_for_all_its_shares() {
    let (mut table, now) = sharing();
    let ended = table.granted(now, C, &[claim(C, 0, 3)]);
    assert_eq!(ended, [superseded(A), superseded(B)]);
    assert_eq!(table.exited(now, B, "it exited"), [Action::Forget(B)]);
    let both = [Action::Forget(A), Action::Start(C)];
    assert_eq!(table.exited(now, A, "it exited"), both);
    // And a share for the whole device.
    let shares = table.granted(now, A, &[share_claim(A, 0, 7, 4)]);
    assert_eq!(shares, [superseded(C)]);
    assert_eq!(table.granted(now, B, &[share_claim(B, 0, 8, 5)]), []);
    let all = [Action::Forget(C), Action::Start(A), Action::Start(B)];
    assert_eq!(table.exited(now, C, "it exited"), all);
}

#[test]
fn deaths_beside_another_lease_do_not_count() {
    let (mut table, now) = sharing();
    for count in 3..13 {
        // Its own process, or one after the other of a durable lease.
        table.restarted(now, A);
        assert_eq!(table.exited(now, A, "signal 9"), []);
        table.end_lease(now, A, &ends(&[share_claim(A, 0, 1, count - 1)]));
        let next = table.granted(now, A, &[share_claim(A, 0, 1, count)]);
        assert_eq!(next, [Action::Start(A)]);
    }
    assert_eq!(table.out_of_service().count(), 0);
    // Alone it does. The device is tested when nothing uses it.
    table.exited(now, B, "signal 6");
    table.restarted(now, A);
    table.restarted(now, A);
    assert_eq!(table.exited(now, A, "signal 6"), [Action::HealthChanged]);
    table.end_lease(now, A, &ends(&[share_claim(A, 0, 1, 12)]));
    assert_eq!(table.granted(now, A, &[share_claim(A, 0, 1, 13)]), []);
    assert_eq!(table.tick(now), [Action::Probe(0)]);
    assert_eq!(table.granted(now, C, &[share_claim(C, 0, 9, 14)]), []);
    let started = [Action::HealthChanged, Action::Start(A), Action::Start(C)];
    assert_eq!(table.probed(now, 0, Ok(())), started);
}

#[derive(Clone, Debug)]
enum Input {
    /// A device, and a lane of it, each.
    Grant {
        devices: Vec<(u32, u32)>,
    },
    /// The nth lease ends.
    End {
        nth: usize,
    },
    Exit {
        nth: usize,
    },
    StartFails {
        nth: usize,
    },
    Probed {
        device: u32,
        passes: bool,
    },
    Tick {
        seconds: u64,
    },
}

fn input() -> impl Strategy<Value = Input> {
    let nth = || 0..20_usize;
    prop_oneof![
        4 => vec((0..3_u32, 0..4_u32), 1..3).prop_map(|devices| Input::Grant { devices }),
        3 => nth().prop_map(|nth| Input::End { nth }),
        4 => nth().prop_map(|nth| Input::Exit { nth }),
        1 => nth().prop_map(|nth| Input::StartFails { nth }),
        1 => (0..3_u32, any::<bool>()).prop_map(|(device, passes)| Input::Probed { device, passes }),
        2 => (0..8_u64).prop_map(|seconds| Input::Tick { seconds }),
    ]
}

/// What the actions have led to.
#[derive(Default)]
struct World {
    /// The processes that use each device, and in which lane.
    users: BTreeMap<(u32, u32), Result<LeaseId, Probing>>,
    running: BTreeSet<LeaseId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probing;

impl World {
    /// Begins the use of a device, which no process may use that excludes it.
    fn begin(
        &mut self,
        device: u32,
        lane: u32,
        user: Result<LeaseId, Probing>,
    ) -> Result<(), TestCaseError> {
        let of_device = self.users.range((device, 0)..=(device, u32::MAX));
        for (&(_, used), other) in of_device {
            let is_beside = used != WHOLE_LANE && lane != WHOLE_LANE && used != lane;
            prop_assert!(is_beside, "{:?} begins beside {:?}", user, other);
        }
        self.users.insert((device, lane), user);
        Ok(())
    }

    fn is_probing(&self, device: u32) -> bool {
        self.users.get(&(device, WHOLE_LANE)) == Some(&Err(Probing))
    }

    fn apply(&mut self, table: &LeaseTable, actions: &[Action]) -> Result<(), TestCaseError> {
        for action in actions {
            match action {
                Action::Start(lease) => {
                    for device in table.devices(*lease) {
                        let lane = share::lane(table.share(*lease, device));
                        self.begin(device, lane, Ok(*lease))?;
                    }
                    self.running.insert(*lease);
                }
                Action::Probe(device) => self.begin(*device, WHOLE_LANE, Err(Probing))?,
                Action::Kill(lease) | Action::End(lease, _) => {
                    prop_assert!(self.running.contains(lease));
                }
                Action::Forget(lease) | Action::Released(lease) => {
                    prop_assert!(!self.running.contains(lease), "its process runs");
                }
                Action::HealthChanged => {}
            }
        }
        Ok(())
    }

    fn exit(&mut self, lease: LeaseId) -> bool {
        self.users.retain(|_, user| *user != Ok(lease));
        self.running.remove(&lease)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn processes_use_a_device_only_in_lanes_of_their_own_and_all_come_back(inputs in vec(input(), 1..100)) {
        let (mut table, mut now) = (LeaseTable::new(3), Instant::now());
        let mut world = World::default();
        let mut granted: Vec<Vec<Claim>> = Vec::new();
        for input in inputs {
            let actions = match input {
                Input::Grant { devices } => {
                    let count = granted.len() as u64 + 1;
                    let lease = LeaseId(count);
                    // A lease has a device once.
                    let devices = BTreeMap::from_iter(devices).into_iter();
                    let claims = devices.map(|(device, lane)| share_claim(lease, device, lane, count));
                    granted.push(claims.collect());
                    table.granted(now, lease, granted.last().unwrap())
                }
                Input::End { nth } => match granted.get(nth) {
                    Some(claims) => table.end_lease(now, claims[0].lease, &ends(claims)),
                    None => continue,
                },
                Input::Exit { nth } => {
                    let lease = LeaseId(nth as u64 + 1);
                    if !world.exit(lease) { continue }
                    table.exited(now, lease, "signal 9")
                }
                Input::StartFails { nth } => {
                    let lease = LeaseId(nth as u64 + 1);
                    if !world.exit(lease) { continue }
                    table.stopped(lease, "no memory")
                }
                Input::Probed { device, passes } => {
                    if !world.is_probing(device) { continue }
                    world.users.remove(&(device, WHOLE_LANE));
                    let result = if passes { Ok(()) } else { Err("no".into()) };
                    table.probed(now, device, result)
                }
                Input::Tick { seconds } => {
                    now += Duration::from_secs(seconds);
                    table.tick(now)
                }
            };
            world.apply(&table, &actions)?;
        }
        // All tests pass, all leases end, and all processes exit.
        for device in 0..3 {
            if world.is_probing(device) {
                world.users.remove(&(device, WHOLE_LANE));
                let actions = table.probed(now, device, Ok(()));
                world.apply(&table, &actions)?;
            }
        }
        for claims in &granted {
            let actions = table.end_lease(now, claims[0].lease, &ends(claims));
            world.apply(&table, &actions)?;
        }
        for lease in world.running.clone() {
            world.exit(lease);
            let actions = table.exited(now, lease, "killed");
            world.apply(&table, &actions)?;
        }
        prop_assert!(world.users.is_empty());
        for claims in &granted {
            prop_assert_eq!(table.route(claims[0].lease), Route::Unknown);
            prop_assert!(table.unreleased_devices(claims[0].lease).is_empty());
        }
        prop_assert!(table.held_devices().is_empty());
    }
}
