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

/// How long a test op may take before the device counts as broken. This includes the time in
/// which a driver compiles the op's kernel.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// Delay before the next test op after one that failed.
const PROBE_RETRY_DELAY: Duration = Duration::from_secs(5);

/// How long memory may stay in use after the last session of a lease is gone, as queued
/// frames hold values. The connections that send these frames end before that.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(15);

/// Observations of a device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observation {
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
    /// Whether the executor waits while another process uses the device.
    pub(crate) waits_for_turn: bool,
    /// Number and result of the latest test op that completed.
    pub(crate) probe_result: Option<(u64, Result<(), String>)>,
}

/// An action for the caller to execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceAction {
    /// Make the executor's thread end as soon as its current job returns.
    Retire,
    /// Start a new executor thread, as the previous one has ended.
    Restart,
    /// Make the executor run the test op with this number.
    Probe(u64),
}

/// The result of [`Health::update`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HealthUpdate {
    pub(crate) actions: Vec<DeviceAction>,
    /// Leases from which the device is now released.
    pub(crate) released: Vec<LeaseId>,
    /// Whether [`Health::out_of_service`] has changed.
    pub(crate) has_changed: bool,
}

/// The state of one device.
#[derive(Debug, Default)]
pub(crate) struct Health {
    state: HealthState,
    /// Why the device is out of service.
    out_of_service: Option<String>,
    /// Leases that were ended but not released, each with the time since which no session
    /// of such leases is left.
    ending: BTreeMap<LeaseId, Option<Instant>>,
    /// The lease of the latest session on the device.
    latest: Option<LeaseId>,
    /// Whether the backend has failed since the last test op was started.
    has_failed: bool,
    /// Number of test ops started so far.
    probe_count: u64,
    /// From when on the time of the latest test op counts: its start, or when another process last had the device.
    probed_at: Option<Instant>,
}

#[derive(Debug, Default)]
enum HealthState {
    /// No failure is known.
    #[default]
    Healthy,
    /// An op exceeds its time limit, which was first observed at `since`.
    Stuck { since: Instant },
    /// A test op runs. These leases are released if it passes.
    Probing(Vec<LeaseId>),
    /// The test op failed.
    Failed { retry_at: Instant },
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
        match self.state {
            HealthState::Stuck { since } => Some(since),
            HealthState::Healthy | HealthState::Probing(_) | HealthState::Failed { .. } => None,
        }
    }

    /// Decides what to do, from the `observation` of the device at `now`.
    pub(crate) fn update(&mut self, now: Instant, observation: &Observation) -> HealthUpdate {
        let before = self.out_of_service.clone();
        let mut outcome = HealthUpdate::default();
        self.has_failed |= observation.has_failed;
        let is_left = self.ending.keys().any(|l| observation.sessions.contains(l));
        for idle_since in self.ending.values_mut() {
            *idle_since = (!is_left).then(|| idle_since.unwrap_or(now));
        }
        if let Some(overdue) = &observation.overdue {
            if !matches!(self.state, HealthState::Stuck { .. }) {
                self.state = HealthState::Stuck { since: now };
                outcome.actions.push(DeviceAction::Retire);
            }
            self.out_of_service = Some(overdue.clone());
        } else {
            self.advance(now, observation, &mut outcome);
        }
        outcome.has_changed = before != self.out_of_service;
        outcome
    }

    fn advance(&mut self, now: Instant, observation: &Observation, outcome: &mut HealthUpdate) {
        match &mut self.state {
            HealthState::Stuck { .. } if !observation.has_thread => {
                outcome.actions.push(DeviceAction::Restart);
                self.probe(now, observation, outcome);
            }
            HealthState::Stuck { .. } => {}
            HealthState::Probing(leases) => {
                let leases = std::mem::take(leases);
                let probe_result = observation.probe_result.as_ref();
                match probe_result.filter(|(number, _)| *number == self.probe_count) {
                    None => {
                        self.state = HealthState::Probing(leases);
                        if observation.waits_for_turn {
                            // The time of other processes does not count.
                            self.probed_at = Some(now);
                        } else if self
                            .probed_at
                            .is_some_and(|began| now >= began + PROBE_TIMEOUT)
                        {
                            let words =
                                format!("a test op has not completed within {PROBE_TIMEOUT:?}");
                            self.out_of_service = Some(words);
                        }
                    }
                    Some((_, Ok(()))) => {
                        self.state = HealthState::Healthy;
                        self.out_of_service = None;
                        self.ending.retain(|lease, _| !leases.contains(lease));
                        outcome.released = leases;
                    }
                    Some((_, Err(reason))) => {
                        let retry_at = now + PROBE_RETRY_DELAY;
                        self.state = HealthState::Failed { retry_at };
                        self.out_of_service = Some(format!("a test op failed: {reason}"));
                    }
                }
            }
            HealthState::Failed { retry_at } if now >= *retry_at => {
                self.probe(now, observation, outcome)
            }
            HealthState::Failed { .. } => {}
            HealthState::Healthy => {}
        }
        let may_check = self
            .probed_at
            .is_none_or(|began| now >= began + PROBE_RETRY_DELAY);
        let is_due = self.has_failed && may_check || !self.releasable(now, observation).is_empty();
        if matches!(self.state, HealthState::Healthy) && is_due {
            self.probe(now, observation, outcome);
        }
    }

    fn probe(&mut self, now: Instant, observation: &Observation, outcome: &mut HealthUpdate) {
        self.probe_count += 1;
        self.probed_at = Some(now);
        self.has_failed = false;
        self.state = HealthState::Probing(self.releasable(now, observation));
        outcome.actions.push(DeviceAction::Probe(self.probe_count));
    }

    /// Returns the leases that can be released after a test op: no session is left, and
    /// memory is free or has been waited for long enough.
    fn releasable(&self, now: Instant, observation: &Observation) -> Vec<LeaseId> {
        let is_due =
            |idle_since: Instant| observation.live_bytes == 0 || now >= idle_since + MEMORY_TIMEOUT;
        let releasable = self.ending.iter();
        releasable
            .filter(|(_, idle_since)| idle_since.is_some_and(is_due))
            .map(|(lease, _)| *lease)
            .collect()
    }
}

#[cfg(test)]
mod tests;
