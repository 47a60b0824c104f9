//! Grant numbers: they rise for each device, they identify what ends, and they decide which
//! of two leases from before a restart has ended. Also, a scheduler that was suspended.

use super::*;
use crate::EndReason::{DeviceUnavailable, Unknown};

fn number(count: u64) -> GrantNumber {
    GrantNumber { term: TERM, count }
}

fn engine() -> Engine {
    Engine::new(Options::default(), TERM, at(0))
}

/// Returns the grant numbers in `Granted` and in `EndLease` commands.
fn numbers(commands: &[Command]) -> (Vec<GrantNumber>, Vec<DeviceGrant>) {
    let mut granted = Vec::new();
    let mut ended = Vec::new();
    for command in commands {
        match command {
            Command::Granted { devices, .. } => {
                granted.extend(devices.iter().map(|device| device.grant));
            }
            Command::EndLease { grants, .. } => ended.extend(grants),
            _ => {}
        }
    }
    (granted, ended)
}

/// A join of a worker that reports these ended grants.
fn join_after(id: u64, devices: &[DeviceSpec], ended: &[(u32, GrantNumber)]) -> Event {
    let registration = Registration {
        endpoint: endpoint(id),
        devices: devices.to_vec(),
        store: None,
    };
    let ended = ended.iter().map(|&(index, grant)| DeviceGrant {
        index,
        grant,
        lane: 0,
    });
    worker(
        id,
        WorkerEvent::Join {
            registration,
            held: Vec::new(),
            ended: ended.collect(),
            suspended: Vec::new(),
            out_of_service: Outages::new(),
            leaving: false,
        },
    )
}

#[test]
fn grant_numbers_rise_and_end_lease_names_them() {
    let mut engine = engine();
    engine.handle(join(1, &[flex(1), flex(1)]), at(0));
    engine.handle(attach(9), at(0));
    for round in 1..=3 {
        let commands = engine.handle(request(9, round, 2), at(0));
        assert_eq!(numbers(&commands).0, [number(round); 2]);
        let commands = engine.handle(release(9, round * 10), at(0));
        let ended = [0, 1].map(|index| DeviceGrant {
            index,
            grant: number(round),
            lane: 0,
        });
        assert_eq!(numbers(&commands).1, ended);
        engine.handle(released(1, round * 10), at(0));
    }
}

#[test]
fn grant_number_exceeds_those_known_to_the_worker() {
    let far = GrantNumber {
        term: u64::MAX,
        count: 3,
    };
    let mut engine = engine();
    engine.handle(join_after(1, &[cuda(8)], &[(0, far)]), at(0));
    engine.handle(join(2, &[flex(1)]), at(0));
    engine.handle(attach(9), at(0));
    let commands = engine.handle(request(9, 1, 2), at(0));
    let above = GrantNumber { count: 4, ..far };
    assert_eq!(numbers(&commands).0, [above, number(1)]);
    engine.handle(release(9, 10), at(0));
    engine.handle(released(1, 10), at(0));
    engine.handle(released(2, 10), at(0));
    let commands = engine.handle(request(9, 2, 2), at(0));
    let above = GrantNumber { count: 5, ..far };
    assert_eq!(numbers(&commands).0, [above, number(2)]);
}

#[test]
fn device_with_exhausted_grant_numbers_is_never_granted() {
    let highest = GrantNumber {
        term: u64::MAX,
        count: u64::MAX,
    };
    check([
        (
            0,
            join_after(1, &[flex(1), flex(1)], &[(0, highest)]),
            vec![],
        ),
        (0, attach(9), vec![]),
        (
            0,
            request(9, 1, 2),
            vec![unsatisfiable(9, 1, 2, &[&[flex(1)]])],
        ),
        (0, request(9, 2, 1), vec![granted(9, 2, &[(1, 1, flex(1))])]),
    ]);
}

#[test]
fn claim_by_an_ended_grant_is_rejected() {
    let unavailable = DeviceUnavailable {
        worker: WorkerId(1),
        index: 0,
    };
    check([
        (0, join_after(1, &[flex(1)], &[(0, old_grant(10))]), vec![]),
        (
            0,
            attach_claiming(9, &[(10, &[(1, 0)])]),
            vec![end_lease(1, 10), ended(9, 10, unavailable.clone())],
        ),
        // The same, but the claim comes first.
        (0, attach_claiming(8, &[(20, &[(2, 0)])]), vec![]),
        (
            0,
            join_after(2, &[flex(1)], &[(0, old_grant(20))]),
            vec![
                end_lease(2, 20),
                ended(
                    8,
                    20,
                    DeviceUnavailable {
                        worker: WorkerId(2),
                        index: 0,
                    },
                ),
            ],
        ),
        // A later grant of the same device has not ended.
        (0, attach_claiming(7, &[(11, &[(1, 0)])]), vec![]),
        (0, request(7, 3, 2), vec![queued(7, 3, 1)]),
    ]);
}

#[test]
fn later_grant_wins_between_two_claims() {
    let unavailable = || DeviceUnavailable {
        worker: WorkerId(1),
        index: 0,
    };
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach_claiming(8, &[(10, &[(1, 0)])]), vec![]),
        (
            0,
            attach_claiming(9, &[(20, &[(1, 0)])]),
            vec![end_lease(1, 10), ended(8, 10, unavailable())],
        ),
        (
            0,
            attach_claiming(7, &[(15, &[(1, 0)])]),
            vec![end_lease(1, 15), ended(7, 15, unavailable())],
        ),
        (0, release(9, 20), vec![end_lease(1, 20)]),
    ]);
}

#[test]
fn lease_snapshot_has_devices_once_all_workers_joined() {
    let mut engine = engine();
    engine.handle(join(1, &[flex(1)]), at(0));
    engine.handle(attach_claiming(9, &[(10, &[(1, 0), (2, 0)])]), at(0));
    let lease = engine.lease(LeaseId(10)).unwrap();
    assert_eq!((lease.owner, lease.devices), (Some(ClientId(9)), None));
    engine.handle(join(2, &[flex(2)]), at(0));
    let lease = engine.lease(LeaseId(10)).unwrap();
    let devices = lease.devices.unwrap();
    let lease_devices: Vec<_> = devices.iter().map(|d| (d.device_ref, d.grant)).collect();
    assert_eq!(
        lease_devices,
        [
            (device_ref(1, 0), old_grant(10)),
            (device_ref(2, 0), old_grant(10))
        ]
    );
    assert_eq!(engine.leases_of(ClientId(9)), [LeaseId(10)]);
    engine.handle(release(9, 10), at(0));
    assert_eq!(engine.lease(LeaseId(10)), None);
}

fn suspended(since: u64) -> Event {
    Event::Gap { since: at(since) }
}

#[test]
fn peers_lost_during_suspension_can_reconnect() {
    let engine = check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (90_000, beat(1), vec![]),
        // Twelve seconds later, the driver notices that all streams have ended.
        (102_000, suspended(90_000), vec![]),
        (102_000, worker_disconnected(1), vec![]),
        (102_000, client_disconnected(9), vec![]),
        (
            121_000,
            on_stream(11, join_holding(1, &[flex(1)], &[(10, 0)])),
            vec![],
        ),
        (
            131_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![],
        ),
    ]);
    assert_eq!(engine.snapshot().leases, 1);
    assert_eq!(engine.next_deadline(), None);
}

#[test]
fn peers_that_do_not_reconnect_after_suspension_are_lost() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, join(2, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (0, request(9, 2, 1), vec![granted(9, 2, &[(2, 0, flex(1))])]),
        (90_000, beat(1), vec![]),
        (90_000, beat(2), vec![]),
        (102_000, suspended(90_000), vec![]),
        (102_000, worker_disconnected(1), vec![]),
        (102_000, client_disconnected(9), vec![]),
        (132_000, tick(), vec![end_lease(2, 20)]),
    ]);
}

#[test]
fn deadlines_that_passed_during_suspension_are_extended() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (1_000, client_disconnected(9), vec![]),
        // The lease would have expired at 31 s.
        (31_000, suspended(20_000), vec![]),
        (61_000, tick(), vec![end_lease(1, 10)]),
    ]);
}

#[test]
fn leases_ended_before_suspension_stay_ended() {
    check([
        (0, join(1, &[flex(1)]), vec![]),
        (0, attach(9), vec![]),
        (0, request(9, 1, 1), vec![granted(9, 1, &[(1, 0, flex(1))])]),
        (70_000, release(9, 10), vec![end_lease(1, 10)]),
        (100_000, suspended(80_000), vec![]),
        (
            100_000,
            on_stream(19, attach_claiming(9, &[(10, &[(1, 0)])])),
            vec![ended(9, 10, Unknown)],
        ),
    ]);
}

#[test]
fn suspension_does_not_use_up_the_adoption_window() {
    check([
        (70_000, suspended(10_000), vec![]),
        (110_000, join_holding(1, &[flex(1)], &[(10, 0)]), vec![]),
        (
            120_000,
            join_holding(2, &[flex(1)], &[(20, 0)]),
            vec![end_lease(2, 20)],
        ),
    ]);
}

/// A join of a worker with one device that is not free of an ended lease.
fn join_leaving_behind(id: u64, lease: u64, grant: GrantNumber) -> Event {
    let mut join = join_ending(id, &[flex(1)], &[(lease, 0)]);
    if let Event::Worker {
        event: WorkerEvent::Join { held, .. },
        ..
    } = &mut join
    {
        held[0].grant = grant;
    }
    join
}

#[test]
fn repeated_end_lease_names_the_same_grants() {
    let mut engine = engine();
    engine.handle(join(1, &[flex(1), flex(1)]), at(0));
    engine.handle(attach(9), at(0));
    engine.handle(request(9, 1, 2), at(0));
    let first = numbers(&engine.handle(release(9, 10), at(0))).1;
    let ended = [0, 1].map(|index| DeviceGrant {
        index,
        grant: number(1),
        lane: 0,
    });
    assert_eq!(first, ended);
    let again = on_stream(11, join(1, &[flex(1), flex(1)]));
    assert_eq!(numbers(&engine.handle(again, at(0))).1, ended);
    engine.handle(on_stream(11, released_but(1, 10, &[1])), at(0));
    let again = on_stream(12, join(1, &[flex(1), flex(1)]));
    assert_eq!(numbers(&engine.handle(again, at(0))).1, ended[1..]);
}

#[test]
fn unreleased_grants_count_as_ended() {
    let mut engine = engine();
    engine.handle(attach(9), at(0));
    let far = GrantNumber {
        term: TERM + 5,
        count: 3,
    };
    let commands = engine.handle(join_leaving_behind(1, 10, far), at(0));
    let ended = DeviceGrant {
        index: 0,
        grant: far,
        lane: 0,
    };
    assert_eq!(numbers(&commands).1, [ended]);
    engine.handle(request(9, 2, 1), at(0));
    let commands = engine.handle(released(1, 10), at(0));
    assert_eq!(numbers(&commands).0, [far.next().unwrap()]);
}

#[test]
fn claim_by_a_later_grant_gets_a_device_still_ending() {
    check([
        (
            0,
            join_leaving_behind(1, 10, old_grant(10)),
            vec![end_lease(1, 10)],
        ),
        (0, attach_claiming(9, &[(20, &[(1, 0)])]), vec![]),
        (1_000, released(1, 10), vec![]),
        (1_000, release(9, 20), vec![end_lease(1, 20)]),
    ]);
}
