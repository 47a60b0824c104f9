//! Decides whether a device may be leased, from observations of the device and the time.
//!
//! A pure state machine. [`DeviceSlot`](crate::device_slot::DeviceSlot) passes it the
//! observations and executes its actions:
//!
//! - A device is *released* from a lease that has ended once no session of the lease is
//!   left on it, its memory is free, and a test op has since returned the right result.
//! - A device is *out of service* while an op does not return, and while the test op fails
//!   or does not complete. It is in service again when the test op passes, which is retried
//!   every few seconds.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use tensord_proto::ids::LeaseId;

/// How long a test op may take before the device counts as broken. A driver needs time to
/// compile its kernel.
pub(crate) const PROBE: Duration = Duration::from_secs(20);

/// Delay before the next test op after one that failed.
const RETRY: Duration = Duration::from_secs(5);

/// How long memory may stay in use after the last session of a lease is gone, as queued
/// frames hold values. The connections that send these frames end before that.
const MEMORY: Duration = Duration::from_secs(15);

/// Observations of a device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// The leases of the sessions that still exist, including those about to end.
    pub(crate) sessions: BTreeSet<LeaseId>,
    /// Bytes of the device's memory that sessions hold.
    pub(crate) live_bytes: u64,
    /// Description of an op that has exceeded its time limit.
    pub(crate) overdue: Option<String>,
    /// Whether the backend has failed since the previous observation.
    pub(crate) has_failed: bool,
    /// Whether the executor's thread is still running.
    pub(crate) has_thread: bool,
    /// Number and result of the latest test op that completed.
    pub(crate) answer: Option<(u64, Result<(), String>)>,
}

/// An action for the caller to execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Make the executor's thread end as soon as its current job returns.
    Retire,
    /// Start a new executor thread after the previous one has ended.
    Restart,
    /// Make the executor run the test op with this number.
    Probe(u64),
}

/// The result of [`Health::look`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) actions: Vec<Action>,
    /// Leases from which the device is now released.
    pub(crate) released: Vec<LeaseId>,
    /// Whether [`Health::out_of_service`] has changed.
    pub(crate) has_changed: bool,
}

/// The state of one device.
#[derive(Debug, Default)]
pub(crate) struct Health {
    stage: Stage,
    /// Why the device is out of service.
    out_of_service: Option<String>,
    /// Leases that were ended but not released, each with the time since which no session
    /// of such leases is left.
    ending: BTreeMap<LeaseId, Option<Instant>>,
    /// The lease of the latest session on the device.
    latest: Option<LeaseId>,
    /// Whether the backend has failed since the last test op was started.
    has_failed: bool,
    /// Number of test ops started so far, and when the latest was started.
    probes: u64,
    probed: Option<Instant>,
}

#[derive(Debug, Default)]
enum Stage {
    /// No failure is known.
    #[default]
    Fit,
    /// An op does not return. This has been known `since` then.
    Stuck { since: Instant },
    /// A test op runs. These leases are released if it passes.
    Probing(Vec<LeaseId>),
    /// The test op failed.
    Unfit { retry_at: Instant },
}

impl Health {
    /// Records that a session of `lease` was opened.
    pub(crate) fn opened(&mut self, lease: LeaseId) {
        self.latest = Some(lease);
    }

    /// Records that `lease` was ended. `has_sessions`: whether sessions of the lease are
    /// left on the device.
    pub(crate) fn end(&mut self, lease: LeaseId, has_sessions: bool) {
        if has_sessions || self.latest == Some(lease) {
            self.ending.entry(lease).or_default();
        }
    }

    /// Returns the leases that were ended but not released.
    pub(crate) fn ending(&self) -> impl Iterator<Item = LeaseId> {
        self.ending.keys().copied()
    }

    pub(crate) fn is_ending(&self, lease: LeaseId) -> bool {
        self.ending.contains_key(&lease)
    }

    /// Returns why the device cannot be leased, if it cannot.
    pub(crate) fn out_of_service(&self) -> Option<&str> {
        self.out_of_service.as_deref()
    }

    /// Returns since when the running op has been known to exceed its time limit, if it
    /// still runs.
    pub(crate) fn stuck_since(&self) -> Option<Instant> {
        match self.stage {
            Stage::Stuck { since } => Some(since),
            Stage::Fit | Stage::Probing(_) | Stage::Unfit { .. } => None,
        }
    }

    /// Decides what to do, from what is `seen` of the device at `now`.
    pub(crate) fn look(&mut self, now: Instant, seen: &Seen) -> Outcome {
        let before = self.out_of_service.clone();
        let mut outcome = Outcome::default();
        self.has_failed |= seen.has_failed;
        let is_left = self.ending.keys().any(|l| seen.sessions.contains(l));
        for quiet in self.ending.values_mut() {
            *quiet = (!is_left).then(|| quiet.unwrap_or(now));
        }
        if let Some(overdue) = &seen.overdue {
            if !matches!(self.stage, Stage::Stuck { .. }) {
                self.stage = Stage::Stuck { since: now };
                outcome.actions.push(Action::Retire);
            }
            self.out_of_service = Some(overdue.clone());
        } else {
            self.go_on(now, seen, &mut outcome);
        }
        outcome.has_changed = before != self.out_of_service;
        outcome
    }

    fn go_on(&mut self, now: Instant, seen: &Seen, outcome: &mut Outcome) {
        match &mut self.stage {
            Stage::Stuck { .. } if !seen.has_thread => {
                outcome.actions.push(Action::Restart);
                self.probe(now, seen, outcome);
            }
            Stage::Stuck { .. } => {}
            Stage::Probing(leases) => {
                let leases = std::mem::take(leases);
                let answer = seen.answer.as_ref();
                match answer.filter(|(number, _)| *number == self.probes) {
                    None => {
                        self.stage = Stage::Probing(leases);
                        if self.probed.is_some_and(|began| now >= began + PROBE) {
                            let words = format!("a test op has not completed within {PROBE:?}");
                            self.out_of_service = Some(words);
                        }
                    }
                    Some((_, Ok(()))) => {
                        self.stage = Stage::Fit;
                        self.out_of_service = None;
                        self.ending.retain(|lease, _| !leases.contains(lease));
                        outcome.released = leases;
                    }
                    Some((_, Err(reason))) => {
                        let retry_at = now + RETRY;
                        self.stage = Stage::Unfit { retry_at };
                        self.out_of_service = Some(format!("a test op failed: {reason}"));
                    }
                }
            }
            Stage::Unfit { retry_at } if now >= *retry_at => self.probe(now, seen, outcome),
            Stage::Unfit { .. } => {}
            Stage::Fit => {}
        }
        let may_check = self.probed.is_none_or(|began| now >= began + RETRY);
        let is_due = self.has_failed && may_check || !self.due(now, seen).is_empty();
        if matches!(self.stage, Stage::Fit) && is_due {
            self.probe(now, seen, outcome);
        }
    }

    fn probe(&mut self, now: Instant, seen: &Seen, outcome: &mut Outcome) {
        self.probes += 1;
        self.probed = Some(now);
        self.has_failed = false;
        self.stage = Stage::Probing(self.due(now, seen));
        outcome.actions.push(Action::Probe(self.probes));
    }

    /// Returns the leases that can be released after a test op: no session is left, and
    /// memory is free or has been waited for long enough.
    fn due(&self, now: Instant, seen: &Seen) -> Vec<LeaseId> {
        let is_due = |quiet: Instant| seen.live_bytes == 0 || now >= quiet + MEMORY;
        let due = self.ending.iter();
        due.filter(|(_, quiet)| quiet.is_some_and(is_due))
            .map(|(lease, _)| *lease)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: LeaseId = LeaseId(7);

    fn idle() -> Seen {
        Seen {
            has_thread: true,
            ..Seen::default()
        }
    }

    fn busy() -> Seen {
        Seen {
            sessions: [LEASE].into(),
            live_bytes: 8,
            ..idle()
        }
    }

    fn answered(number: u64, answer: Result<(), String>) -> Seen {
        Seen {
            answer: Some((number, answer)),
            ..idle()
        }
    }

    fn broken() -> Result<(), String> {
        Err("1 + 1 is 3".into())
    }

    fn acts(actions: &[Action], has_changed: bool) -> Outcome {
        Outcome {
            actions: actions.to_vec(),
            released: Vec::new(),
            has_changed,
        }
    }

    /// Passes observations at times in ms, and checks each outcome.
    fn check(health: &mut Health, steps: &[(u64, Seen, Outcome)]) {
        let start = Instant::now();
        for (step, (at, seen, expected)) in steps.iter().enumerate() {
            let outcome = health.look(start + Duration::from_millis(*at), seen);
            assert_eq!(outcome, *expected, "step {step}: {seen:?} at {at} ms");
        }
    }

    fn released() -> Outcome {
        Outcome {
            released: vec![LEASE],
            ..Outcome::default()
        }
    }

    fn ended() -> Health {
        let mut health = Health::default();
        health.opened(LEASE);
        health.end(LEASE, true);
        health
    }

    #[test]
    fn a_device_is_released_once_its_sessions_are_gone_and_a_test_op_has_passed() {
        let mut health = ended();
        let mut frames_out = idle();
        frames_out.live_bytes = 8;
        check(
            &mut health,
            &[
                (0, busy(), Outcome::default()),
                (9_000, busy(), Outcome::default()),
                (9_100, frames_out, Outcome::default()),
                (9_200, idle(), acts(&[Action::Probe(1)], false)),
                (9_300, idle(), Outcome::default()),
                (9_400, answered(1, Ok(())), released()),
                (9_500, answered(1, Ok(())), Outcome::default()),
            ],
        );
        assert_eq!(health.out_of_service(), None);
        assert!(!health.is_ending(LEASE));
    }

    #[test]
    fn memory_that_does_not_come_back_is_not_waited_for_for_ever() {
        let mut leaked = idle();
        leaked.live_bytes = 8;
        let late = MEMORY.as_millis() as u64;
        check(
            &mut ended(),
            &[
                (100, leaked.clone(), Outcome::default()),
                (late + 99, leaked.clone(), Outcome::default()),
                (late + 100, leaked, acts(&[Action::Probe(1)], false)),
            ],
        );
    }

    #[test]
    fn a_lease_that_never_was_here_is_not_waited_for() {
        let mut health = Health::default();
        health.opened(LeaseId(8));
        health.end(LEASE, false);
        assert!(!health.is_ending(LEASE));
        check(&mut health, &[(0, idle(), Outcome::default())]);
        // The sessions of lease 8 have ended before the lease.
        health.end(LeaseId(8), false);
        assert!(health.is_ending(LeaseId(8)));
        check(
            &mut health,
            &[(0, idle(), acts(&[Action::Probe(1)], false))],
        );
    }

    #[test]
    fn a_device_that_fails_its_test_op_is_out_of_service_until_one_passes() {
        let mut health = ended();
        check(
            &mut health,
            &[
                (0, idle(), acts(&[Action::Probe(1)], false)),
                (10, answered(1, broken()), acts(&[], true)),
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
                (0, answered(1, broken()), Outcome::default()),
                (
                    6_000,
                    answered(1, broken()),
                    acts(&[Action::Probe(2)], false),
                ),
                (6_100, answered(1, Ok(())), Outcome::default()),
                (6_200, answered(2, broken()), acts(&[], false)),
                (11_100, idle(), Outcome::default()),
                (11_300, idle(), acts(&[Action::Probe(3)], false)),
                (11_400, answered(3, Ok(())), back),
            ],
        );
        assert_eq!(health.out_of_service(), None);
    }

    #[test]
    fn a_test_op_without_an_answer_takes_the_device_out_of_service() {
        let mut health = ended();
        let late = PROBE.as_millis() as u64;
        let mut back = released();
        back.has_changed = true;
        check(
            &mut health,
            &[
                (0, idle(), acts(&[Action::Probe(1)], false)),
                (late - 1, idle(), Outcome::default()),
                (late, idle(), acts(&[], true)),
                (late + 9_000, idle(), Outcome::default()),
                (late + 9_100, answered(1, Ok(())), back),
            ],
        );
    }

    #[test]
    fn an_op_that_does_not_return_takes_the_device_out_of_service_until_it_does() {
        let mut health = Health::default();
        health.opened(LEASE);
        let stuck = |has_thread| Seen {
            overdue: Some("an op has run for too long".into()),
            has_thread,
            ..busy()
        };
        let mut gone = idle();
        gone.has_thread = false;
        check(
            &mut health,
            &[
                (0, stuck(true), acts(&[Action::Retire], true)),
                (100, stuck(true), Outcome::default()),
                // A read that another thread waits for is late.
                (200, stuck(false), Outcome::default()),
            ],
        );
        assert_eq!(health.out_of_service(), Some("an op has run for too long"));
        health.end(LEASE, true);
        let mut back = released();
        back.has_changed = true;
        check(
            &mut health,
            &[
                (300, stuck(true), Outcome::default()),
                // The op has returned, and its thread is about to end.
                (400, idle(), Outcome::default()),
                (500, gone, acts(&[Action::Restart, Action::Probe(1)], false)),
                (600, answered(1, Ok(())), back),
            ],
        );
    }

    #[test]
    fn an_answer_from_before_a_device_was_stuck_means_nothing() {
        let mut health = ended();
        let mut stuck = idle();
        stuck.overdue = Some("stuck".into());
        let mut gone = answered(1, Ok(()));
        gone.has_thread = false;
        check(
            &mut health,
            &[
                (0, idle(), acts(&[Action::Probe(1)], false)),
                (100, stuck, acts(&[Action::Retire], true)),
                (200, gone, acts(&[Action::Restart, Action::Probe(2)], false)),
                (300, answered(1, Ok(())), Outcome::default()),
            ],
        );
        assert!(health.is_ending(LEASE) && health.out_of_service().is_some());
    }

    #[test]
    fn a_backend_that_failed_is_tested_now_and_then() {
        let failed = Seen {
            has_failed: true,
            ..busy()
        };
        let mut health = Health::default();
        check(
            &mut health,
            &[
                (0, failed.clone(), acts(&[Action::Probe(1)], false)),
                (10, answered(1, Ok(())), Outcome::default()),
                // A program whose ops all fail does not cause a test op each time.
                (20, failed.clone(), Outcome::default()),
                (4_999, failed, Outcome::default()),
                (5_000, busy(), acts(&[Action::Probe(2)], false)),
                (5_010, answered(2, broken()), acts(&[], true)),
            ],
        );
    }
}
