//! Tests of the decisions by examples, and of random events against the laws.

use proptest::collection::vec;
use proptest::prelude::*;
use tensord_proto::grant::GrantNumber;

use super::*;

const A: LeaseId = LeaseId(0xa);
const B: LeaseId = LeaseId(0xb);

fn claim(lease: LeaseId, device: u32, count: u64) -> Claim {
    Claim {
        lease,
        device,
        grant: GrantNumber { term: 1, count },
    }
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
    let ending = table.end_lease(now, A, &[claim(A, 0, 1)]);
    assert_eq!(ending, [Action::End(A, format!("lease {A} ended"))]);
    assert_eq!(table.route(A), Route::Process, "clients fetch the end");
    assert_eq!(table.unreleased_devices(A), [0]);
    assert_eq!(table.end_lease(now, A, &[claim(A, 0, 1)]), []);
    let released = [Action::Forget(A), Action::Released(A)];
    assert_eq!(table.exited(now, A, "it exited"), released);
    assert!(table.unreleased_devices(A).is_empty());
    assert_eq!(table.route(A), Route::Unknown);
    assert_eq!(table.route(B), Route::Process);
}

#[test]
fn a_process_that_does_not_end_is_killed() {
    let (mut table, now) = running(1);
    table.end_lease(now, A, &[claim(A, 0, 1)]);
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
    let ended = table.end_lease(now, A, &[claim(A, 0, 1)]);
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
        table.end_lease(now, lease, &[claim(lease, 0, count)]);
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
        table.end_lease(now, lease, &[claim(lease, 0, count)]);
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

#[derive(Clone, Debug)]
enum Input {
    Grant {
        devices: Vec<u32>,
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
        3 => vec(0..3_u32, 1..3).prop_map(|devices| Input::Grant { devices }),
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
    /// The process that uses each device.
    users: BTreeMap<u32, Result<LeaseId, Probing>>,
    running: BTreeMap<LeaseId, BTreeSet<u32>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probing;

impl World {
    fn apply(&mut self, table: &LeaseTable, actions: &[Action]) -> Result<(), TestCaseError> {
        for action in actions {
            match action {
                Action::Start(lease) => {
                    let devices: BTreeSet<_> = table.devices(*lease).collect();
                    for device in &devices {
                        let earlier = self.users.insert(*device, Ok(*lease));
                        prop_assert_eq!(earlier, None, "two processes use a device");
                    }
                    self.running.insert(*lease, devices);
                }
                Action::Probe(device) => {
                    let earlier = self.users.insert(*device, Err(Probing));
                    prop_assert_eq!(earlier, None, "a test runs beside a process");
                }
                Action::Kill(lease) | Action::End(lease, _) => {
                    prop_assert!(self.running.contains_key(lease));
                }
                Action::Forget(lease) | Action::Released(lease) => {
                    prop_assert!(!self.running.contains_key(lease), "its process runs");
                }
                Action::HealthChanged => {}
            }
        }
        Ok(())
    }

    fn exit(&mut self, lease: LeaseId) -> bool {
        let devices = self.running.remove(&lease);
        for device in devices.iter().flatten() {
            self.users.remove(device);
        }
        devices.is_some()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_two_processes_use_a_device_and_all_devices_come_back(inputs in vec(input(), 1..100)) {
        let (mut table, mut now) = (LeaseTable::new(3), Instant::now());
        let mut world = World::default();
        let mut granted: Vec<Vec<Claim>> = Vec::new();
        for input in inputs {
            let actions = match input {
                Input::Grant { devices } => {
                    let count = granted.len() as u64 + 1;
                    let lease = LeaseId(count);
                    let claims = devices.into_iter().map(|device| claim(lease, device, count));
                    granted.push(claims.collect());
                    table.granted(now, lease, granted.last().unwrap())
                }
                Input::End { nth } => match granted.get(nth) {
                    Some(claims) => table.end_lease(now, claims[0].lease, claims),
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
                    if world.users.get(&device) != Some(&Err(Probing)) { continue }
                    world.users.remove(&device);
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
            if world.users.get(&device) == Some(&Err(Probing)) {
                world.users.remove(&device);
                let actions = table.probed(now, device, Ok(()));
                world.apply(&table, &actions)?;
            }
        }
        for claims in &granted {
            let actions = table.end_lease(now, claims[0].lease, claims);
            world.apply(&table, &actions)?;
        }
        for lease in world.running.keys().copied().collect::<Vec<_>>() {
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
