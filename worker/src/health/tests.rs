use super::*;

const LEASE: LeaseId = LeaseId(7);

fn idle() -> Observation {
    Observation {
        has_thread: true,
        ..Observation::default()
    }
}

fn busy() -> Observation {
    Observation {
        sessions: [LEASE].into(),
        live_bytes: 8,
        ..idle()
    }
}

fn with_probe_result(number: u64, probe_result: Result<(), String>) -> Observation {
    Observation {
        probe_result: Some((number, probe_result)),
        ..idle()
    }
}

fn probe_failure() -> Result<(), String> {
    Err("1 + 1 is 3".into())
}

fn outcome_with(actions: &[DeviceAction], has_changed: bool) -> HealthUpdate {
    HealthUpdate {
        actions: actions.to_vec(),
        released: Vec::new(),
        has_changed,
    }
}

/// Passes observations at times in ms, and checks each outcome.
fn check(health: &mut Health, steps: &[(u64, Observation, HealthUpdate)]) {
    let start = Instant::now();
    for (step, (at, observation, expected)) in steps.iter().enumerate() {
        let outcome = health.update(start + Duration::from_millis(*at), observation);
        assert_eq!(
            outcome, *expected,
            "step {step}: {observation:?} at {at} ms"
        );
    }
}

fn released() -> HealthUpdate {
    HealthUpdate {
        released: vec![LEASE],
        ..HealthUpdate::default()
    }
}

fn ended() -> Health {
    let mut health = Health::default();
    health.opened(LEASE);
    health.end(LEASE, true);
    health
}

#[test]
fn device_is_released_after_its_sessions_end_and_a_probe_passes() {
    let mut health = ended();
    let mut frames_out = idle();
    frames_out.live_bytes = 8;
    check(
        &mut health,
        &[
            (0, busy(), HealthUpdate::default()),
            (9_000, busy(), HealthUpdate::default()),
            (9_100, frames_out, HealthUpdate::default()),
            (
                9_200,
                idle(),
                outcome_with(&[DeviceAction::Probe(1)], false),
            ),
            (9_300, idle(), HealthUpdate::default()),
            (9_400, with_probe_result(1, Ok(())), released()),
            (9_500, with_probe_result(1, Ok(())), HealthUpdate::default()),
        ],
    );
    assert_eq!(health.out_of_service(), None);
    assert!(!health.is_ending(LEASE));
}

#[test]
fn wait_for_freed_memory_is_bounded() {
    let mut leaked = idle();
    leaked.live_bytes = 8;
    let late = MEMORY_TIMEOUT.as_millis() as u64;
    check(
        &mut ended(),
        &[
            (100, leaked.clone(), HealthUpdate::default()),
            (late + 99, leaked.clone(), HealthUpdate::default()),
            (
                late + 100,
                leaked,
                outcome_with(&[DeviceAction::Probe(1)], false),
            ),
        ],
    );
}

#[test]
fn unknown_lease_is_released_at_once() {
    let mut health = Health::default();
    health.opened(LeaseId(8));
    health.end(LEASE, false);
    assert!(!health.is_ending(LEASE));
    check(&mut health, &[(0, idle(), HealthUpdate::default())]);
    // The sessions of lease 8 have ended before the lease.
    health.end(LeaseId(8), false);
    assert!(health.is_ending(LeaseId(8)));
    check(
        &mut health,
        &[(0, idle(), outcome_with(&[DeviceAction::Probe(1)], false))],
    );
}

#[test]
fn device_is_out_of_service_from_a_failed_probe_until_one_passes() {
    let mut health = ended();
    check(
        &mut health,
        &[
            (0, idle(), outcome_with(&[DeviceAction::Probe(1)], false)),
            (
                10,
                with_probe_result(1, probe_failure()),
                outcome_with(&[], true),
            ),
        ],
    );
    let reason = "a test op failed: 1 + 1 is 3";
    assert_eq!(health.out_of_service(), Some(reason));
    assert!(health.is_ending(LEASE), "nobody gets it");
    let mut back = released();
    back.has_changed = true;
    check(
        &mut health,
        &[
            (
                0,
                with_probe_result(1, probe_failure()),
                HealthUpdate::default(),
            ),
            (
                6_000,
                with_probe_result(1, probe_failure()),
                outcome_with(&[DeviceAction::Probe(2)], false),
            ),
            (6_100, with_probe_result(1, Ok(())), HealthUpdate::default()),
            (
                6_200,
                with_probe_result(2, probe_failure()),
                outcome_with(&[], false),
            ),
            (11_100, idle(), HealthUpdate::default()),
            (
                11_300,
                idle(),
                outcome_with(&[DeviceAction::Probe(3)], false),
            ),
            (11_400, with_probe_result(3, Ok(())), back),
        ],
    );
    assert_eq!(health.out_of_service(), None);
}

#[test]
fn probe_timeout_takes_the_device_out_of_service() {
    let mut health = ended();
    let late = PROBE_TIMEOUT.as_millis() as u64;
    let mut back = released();
    back.has_changed = true;
    check(
        &mut health,
        &[
            (0, idle(), outcome_with(&[DeviceAction::Probe(1)], false)),
            (late - 1, idle(), HealthUpdate::default()),
            (late, idle(), outcome_with(&[], true)),
            (late + 9_000, idle(), HealthUpdate::default()),
            (late + 9_100, with_probe_result(1, Ok(())), back),
        ],
    );
}

#[test]
fn stuck_op_takes_the_device_out_of_service_until_it_returns() {
    let mut health = Health::default();
    health.opened(LEASE);
    let stuck = |has_thread| Observation {
        overdue: Some("an op has run for too long".into()),
        has_thread,
        ..busy()
    };
    let mut gone = idle();
    gone.has_thread = false;
    check(
        &mut health,
        &[
            (0, stuck(true), outcome_with(&[DeviceAction::Retire], true)),
            (100, stuck(true), HealthUpdate::default()),
            // A read that another thread waits for is late.
            (200, stuck(false), HealthUpdate::default()),
        ],
    );
    assert_eq!(health.out_of_service(), Some("an op has run for too long"));
    health.end(LEASE, true);
    let mut back = released();
    back.has_changed = true;
    check(
        &mut health,
        &[
            (300, stuck(true), HealthUpdate::default()),
            // The op has returned, and its thread is about to end.
            (400, idle(), HealthUpdate::default()),
            (
                500,
                gone,
                outcome_with(&[DeviceAction::Restart, DeviceAction::Probe(1)], false),
            ),
            (600, with_probe_result(1, Ok(())), back),
        ],
    );
}

#[test]
fn probe_result_from_before_a_stuck_op_is_ignored() {
    let mut health = ended();
    let mut stuck = idle();
    stuck.overdue = Some("stuck".into());
    let mut gone = with_probe_result(1, Ok(()));
    gone.has_thread = false;
    check(
        &mut health,
        &[
            (0, idle(), outcome_with(&[DeviceAction::Probe(1)], false)),
            (100, stuck, outcome_with(&[DeviceAction::Retire], true)),
            (
                200,
                gone,
                outcome_with(&[DeviceAction::Restart, DeviceAction::Probe(2)], false),
            ),
            (300, with_probe_result(1, Ok(())), HealthUpdate::default()),
        ],
    );
    assert!(health.is_ending(LEASE) && health.out_of_service().is_some());
}

#[test]
fn time_of_other_processes_does_not_count_for_a_probe() {
    let waiting = Observation {
        waits_for_turn: true,
        ..idle()
    };
    let mut health = ended();
    check(
        &mut health,
        &[
            (0, idle(), outcome_with(&[DeviceAction::Probe(1)], false)),
            (15_000, waiting.clone(), HealthUpdate::default()),
            (30_000, waiting, HealthUpdate::default()),
            (49_999, idle(), HealthUpdate::default()),
            (50_000, idle(), outcome_with(&[], true)),
        ],
    );
}

#[test]
fn failed_backend_is_probed_periodically() {
    let failed = Observation {
        has_failed: true,
        ..busy()
    };
    let mut health = Health::default();
    check(
        &mut health,
        &[
            (
                0,
                failed.clone(),
                outcome_with(&[DeviceAction::Probe(1)], false),
            ),
            (10, with_probe_result(1, Ok(())), HealthUpdate::default()),
            // A program whose ops all fail does not cause a test op each time.
            (20, failed.clone(), HealthUpdate::default()),
            (4_999, failed, HealthUpdate::default()),
            (
                5_000,
                busy(),
                outcome_with(&[DeviceAction::Probe(2)], false),
            ),
            (
                5_010,
                with_probe_result(2, probe_failure()),
                outcome_with(&[], true),
            ),
        ],
    );
}
