//! Decides which lease runs in a process, from the scheduler's messages and the ends of
//! processes.
//!
//! A pure state machine. Its inputs are events and the time; its outputs are actions for the
//! [`Supervisor`](super::Supervisor):
//!
//! - A lease is started when the processes of all earlier leases of its devices have exited. Leases
//!   with shares of a device use it at the same time, each in a lane of its own; a lease with the
//!   whole device, or a test of it, uses it alone.
//! - A lease that is ended has [`END_TIMEOUT`] to end its sessions; then its process is
//!   killed. Its devices are *released* when the process has exited.
//! - When a process dies by itself and its lease does not [go on in another
//!   one](super::restarts), the lease is *dead*: it is not started again, and the reason is the
//!   error that its clients get. A dead lease of several workers may go on when the scheduler grants
//!   it devices again.
//! - A device whose processes have died [`MAX_DEATHS`] times within [`DEATH_WINDOW`] is out
//!   of service until a test in a process of its own has passed. A death while another lease uses
//!   the device does not count: a program must not take a device from others by killing its own
//!   process.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tensord_proto::{
    ids::LeaseId,
    share::{self, DeviceShare},
    v1::{DeviceGrant, HeldDevice},
};

use super::recent_deaths::{DEATH_WINDOW, RecentDeaths};
use crate::admission::{Admission, AdmissionError, Claim, Lanes, WHOLE_LANE};

/// How long a process may take to end the sessions of its lease and to send their ends to the
/// clients.
pub(crate) const END_TIMEOUT: Duration = Duration::from_secs(6);

/// A device is taken out of service after this number of deaths within [`DEATH_WINDOW`].
pub(super) const MAX_DEATHS: usize = 3;

/// Delay before the next test of a device after one that failed.
pub(super) const PROBE_RETRY_DELAY: Duration = Duration::from_secs(5);

/// What the supervisor is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Start the lease in a process.
    Start(LeaseId),
    /// Have the process of a lease end its sessions, for this reason.
    End(LeaseId, String),
    /// Kill the process of a lease.
    Kill(LeaseId),
    /// Forget a lease: it has no process.
    Forget(LeaseId),
    /// Report that devices were released from the lease.
    Released(LeaseId),
    /// Report that devices are out of service, or in service again.
    HealthChanged,
    /// Test a device in a process of its own.
    Probe(u32),
}

/// How the process of a lease is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// A device is still used by the process of an earlier lease.
    Waiting,
    /// The process runs, or is being started.
    Running,
    /// The process was asked to end.
    Ending { kill_at: Instant },
    /// The process was killed, and has not exited yet.
    Killed,
    /// There is no process: it died, or could not be started.
    Dead { reason: String },
}

#[derive(Debug)]
struct LeaseState {
    /// The lease's devices, with its shares of them.
    devices: BTreeMap<u32, Option<DeviceShare>>,
    phase: Phase,
    /// Whether the scheduler has ended the lease, and waits for the release of its devices.
    has_ended: bool,
}

/// A process that uses a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum User {
    Lease(LeaseId),
    Probe,
}

#[derive(Debug, Default)]
struct DeviceState {
    /// The processes that use the device, by their lanes: one in [`WHOLE_LANE`], or any number in
    /// others.
    users: BTreeMap<u32, User>,
    /// Deaths of processes that used the device.
    deaths: RecentDeaths,
    out_of_service: Option<OutOfService>,
}

#[derive(Debug)]
struct OutOfService {
    reason: String,
    probe_at: Instant,
}

impl DeviceState {
    /// Returns whether a process may begin to use a lane.
    fn is_free(&self, lane: u32) -> bool {
        let is_taken = |of: &u32| lane == WHOLE_LANE || *of == WHOLE_LANE || *of == lane;
        !self.users.keys().any(is_taken)
    }
}

/// The leases of a worker, and the processes that run them.
pub(super) struct LeaseTable {
    admission: Admission,
    leases: BTreeMap<LeaseId, LeaseState>,
    devices: BTreeMap<u32, DeviceState>,
    /// Why no lease is started any more.
    closed: Option<String>,
}

/// Where a connection for a lease goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route {
    /// To the lease's process.
    Process,
    /// Nowhere, for this reason: the lease runs no more.
    Dead(String),
    /// Nowhere, for this reason: the worker stops.
    Closed(String),
    /// The worker does not run the lease.
    Unknown,
}

/// Messages of the scheduler, and claims of tokens.
impl LeaseTable {
    pub(super) fn new(devices: u32) -> Self {
        Self {
            admission: Admission::new((0..devices).map(|index| (index, Lanes::All))),
            leases: BTreeMap::new(),
            devices: (0..devices)
                .map(|index| (index, DeviceState::default()))
                .collect(),
            closed: None,
        }
    }

    /// Records that a lease has these devices of the worker.
    pub(super) fn granted(
        &mut self,
        now: Instant,
        lease: LeaseId,
        claims: &[Claim],
    ) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut devices = BTreeMap::new();
        for &claim in claims {
            for earlier in self.admission.granted(claim) {
                let reason =
                    format!("lease {earlier} ended: its device was granted to another lease");
                actions.extend(self.end(now, earlier, reason));
            }
            if self.admission.check(claim).is_ok() {
                devices.insert(claim.device, claim.share);
            }
        }
        if !devices.is_empty() && !self.leases.contains_key(&lease) && self.closed.is_none() {
            let state = LeaseState {
                devices,
                phase: Phase::Waiting,
                has_ended: false,
            };
            self.leases.insert(lease, state);
            actions.extend(self.start_waiting());
        }
        actions
    }

    /// Checks a claim whose token has a valid signature and expires at `expires_at_ms`, for a
    /// lease of which the scheduler's announcement has not arrived.
    pub(super) fn check(
        &self,
        now: Instant,
        claim: Claim,
        expires_at_ms: u64,
    ) -> Result<(), AdmissionError> {
        self.admission.check_new(claim, expires_at_ms, now)
    }

    /// Ends a lease, and invalidates every token up to these grants, each in its lane. If the lease runs by
    /// later grants, it goes on: its client came with a token for these before the scheduler's messages.
    pub(super) fn end_lease(
        &mut self,
        now: Instant,
        lease: LeaseId,
        grants: &[DeviceGrant],
    ) -> Vec<Action> {
        grants.iter().for_each(|ended| self.admission.end(ended));
        let goes_on = self
            .admission
            .active_claims()
            .any(|claim| claim.lease == lease);
        if goes_on && !grants.is_empty() {
            return Vec::new();
        }
        if let Some(state) = self.leases.get_mut(&lease) {
            state.has_ended = true;
        }
        self.end(now, lease, format!("lease {lease} ended"))
    }

    /// Ends all leases' sessions, because the worker leaves its pool.
    pub(super) fn end_all(&mut self, now: Instant, reason: &str) -> Vec<Action> {
        self.closed = Some(reason.to_owned());
        let leases: Vec<_> = self.leases.keys().copied().collect();
        let ends = leases.into_iter();
        ends.flat_map(|lease| self.end(now, lease, reason.to_owned()))
            .collect()
    }

    fn end(&mut self, now: Instant, lease: LeaseId, reason: String) -> Vec<Action> {
        let Some(state) = self.leases.get_mut(&lease) else {
            return Vec::new();
        };
        match state.phase {
            Phase::Waiting | Phase::Dead { .. } => {
                self.leases.remove(&lease);
                vec![Action::Forget(lease)]
            }
            Phase::Running => {
                let kill_at = now + END_TIMEOUT;
                state.phase = Phase::Ending { kill_at };
                vec![Action::End(lease, reason)]
            }
            Phase::Ending { .. } | Phase::Killed => Vec::new(),
        }
    }

    /// Starts the leases whose devices are free.
    fn start_waiting(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (&lease, state) in &mut self.leases {
            let devices = &mut self.devices;
            let is_free = |(device, share): (&u32, &Option<DeviceShare>)| {
                let device = devices.get(device);
                // One that is out of service is tested as soon as nothing uses it.
                let in_service = |device: &&DeviceState| device.out_of_service.is_none();
                let device = device.filter(in_service);
                device.is_some_and(|device| device.is_free(share::lane(*share)))
            };
            if state.phase == Phase::Waiting && state.devices.iter().all(is_free) {
                for (device, share) in &state.devices {
                    if let Some(device) = devices.get_mut(device) {
                        device.users.insert(share::lane(*share), User::Lease(lease));
                    }
                }
                state.phase = Phase::Running;
                actions.push(Action::Start(lease));
            }
        }
        actions
    }

    /// Records the scheduler's clock.
    pub(super) fn set_time(&mut self, time_ms: u64, now: Instant) {
        self.admission.set_time(time_ms, now);
    }

    /// Records that the scheduler is unreachable.
    pub(super) fn mark_unreachable(&mut self) {
        self.admission.mark_unreachable();
    }
}

/// Ends of processes, and the passing of time.
impl LeaseTable {
    /// Records that the process of a lease has exited. `how` describes the end.
    pub(super) fn exited(&mut self, now: Instant, lease: LeaseId, how: &str) -> Vec<Action> {
        let Some(state) = self.leases.get_mut(&lease) else {
            return Vec::new();
        };
        let mut actions = Vec::new();
        let devices: Vec<_> = state.devices.keys().copied().collect();
        match state.phase {
            Phase::Ending { .. } | Phase::Killed => actions.extend(self.remove(lease)),
            Phase::Running => {
                let reason = how.to_owned();
                state.phase = Phase::Dead { reason };
                // Before the deaths are recorded: a device is tested as soon as nothing uses it.
                self.free(User::Lease(lease), &devices);
                for device in &devices {
                    actions.extend(self.record_death(now, *device, how));
                }
            }
            Phase::Waiting | Phase::Dead { .. } => return Vec::new(),
        }
        self.free(User::Lease(lease), &devices);
        actions.extend(self.start_waiting());
        actions
    }

    /// Records that the process of a lease has died, and the lease goes on in another one. The death is counted for
    /// each device that no other lease was using. It takes no device out of service: only [`exited`](Self::exited)
    /// does, which counts it, too.
    pub(super) fn restarted(&mut self, now: Instant, lease: LeaseId) {
        let devices: Vec<_> = self.devices(lease).collect();
        for device in devices {
            if let Some(device) = self.devices.get_mut(&device)
                && device
                    .users
                    .values()
                    .all(|user| *user == User::Lease(lease))
            {
                device.deaths.record(now);
            }
        }
    }

    /// Records that a lease has no process, for this reason: none could be started, or the last one has
    /// died and the lease is to go on elsewhere. That is no fault of its devices.
    pub(super) fn stopped(&mut self, lease: LeaseId, reason: &str) -> Vec<Action> {
        let Some(state) = self.leases.get_mut(&lease) else {
            return Vec::new();
        };
        let devices: Vec<_> = state.devices.keys().copied().collect();
        let mut actions = Vec::new();
        match state.phase {
            Phase::Running => {
                let reason = reason.to_owned();
                state.phase = Phase::Dead { reason };
            }
            Phase::Ending { .. } | Phase::Killed => actions.extend(self.remove(lease)),
            Phase::Waiting | Phase::Dead { .. } => return Vec::new(),
        }
        self.free(User::Lease(lease), &devices);
        actions.extend(self.start_waiting());
        actions
    }

    /// Removes a lease that has ended and has no process any more.
    fn remove(&mut self, lease: LeaseId) -> Vec<Action> {
        let mut actions = vec![Action::Forget(lease)];
        let removed = self.leases.remove(&lease);
        if removed.is_some_and(|state| state.has_ended) {
            actions.push(Action::Released(lease));
        }
        actions
    }

    fn free(&mut self, user: User, devices: &[u32]) {
        for index in devices {
            if let Some(device) = self.devices.get_mut(index) {
                device.users.retain(|_, uses| *uses != user);
            }
        }
    }

    /// Records a death of a process that used a device, unless others use the device still.
    fn record_death(&mut self, now: Instant, index: u32, how: &str) -> Option<Action> {
        let device = self.devices.get_mut(&index)?;
        if !device.users.is_empty() {
            return None;
        }
        let deaths = device.deaths.record(now);
        if deaths < MAX_DEATHS || device.out_of_service.is_some() {
            return None;
        }
        let reason = format!(
            "{deaths} processes that used the device have died within {DEATH_WINDOW:?}; the last one: {how}"
        );
        device.out_of_service = Some(OutOfService {
            reason,
            probe_at: now,
        });
        Some(Action::HealthChanged)
    }

    /// Records the result of the test of a device.
    pub(super) fn probed(
        &mut self,
        now: Instant,
        index: u32,
        result: Result<(), String>,
    ) -> Vec<Action> {
        self.free(User::Probe, &[index]);
        let mut actions = Vec::new();
        if let Some(device) = self.devices.get_mut(&index) {
            device.out_of_service = match result {
                Ok(()) => {
                    device.deaths.clear();
                    None
                }
                Err(reason) => Some(OutOfService {
                    reason,
                    probe_at: now + PROBE_RETRY_DELAY,
                }),
            };
            actions.push(Action::HealthChanged);
        }
        actions.extend(self.start_waiting());
        actions
    }

    /// Kills the processes that have not ended in time, and tests devices that are due.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        for (&lease, state) in &mut self.leases {
            if matches!(state.phase, Phase::Ending { kill_at } if now >= kill_at) {
                state.phase = Phase::Killed;
                actions.push(Action::Kill(lease));
            }
        }
        for (&index, device) in &mut self.devices {
            let is_due = |out: &OutOfService| now >= out.probe_at;
            if device.users.is_empty() && device.out_of_service.as_ref().is_some_and(is_due) {
                device.users.insert(WHOLE_LANE, User::Probe);
                actions.push(Action::Probe(index));
            }
        }
        actions
    }
}

/// Views of the state.
impl LeaseTable {
    /// Returns where connections for a lease go.
    pub(super) fn route(&self, lease: LeaseId) -> Route {
        match self.leases.get(&lease).map(|state| &state.phase) {
            None => match &self.closed {
                Some(reason) => Route::Closed(reason.clone()),
                None => Route::Unknown,
            },
            Some(Phase::Dead { reason }) => Route::Dead(reason.clone()),
            Some(Phase::Waiting | Phase::Running | Phase::Ending { .. } | Phase::Killed) => {
                Route::Process
            }
        }
    }

    /// Returns whether a lease has a process that was not asked to end.
    pub(super) fn is_running(&self, lease: LeaseId) -> bool {
        let state = self.leases.get(&lease);
        state.is_some_and(|state| state.phase == Phase::Running)
    }

    /// Returns the devices of a lease, also if its process has died. None if the lease is unknown.
    pub(super) fn devices(&self, lease: LeaseId) -> impl Iterator<Item = u32> {
        let state = self.leases.get(&lease).into_iter();
        state.flat_map(|state| state.devices.keys().copied())
    }

    /// Returns what share of a device a lease has; `None` if it has the whole device or none of it.
    pub(super) fn share(&self, lease: LeaseId, device: u32) -> Option<DeviceShare> {
        let state = self.leases.get(&lease)?;
        state.devices.get(&device).copied().flatten()
    }

    /// Returns the devices that are out of service, with the reasons.
    pub(super) fn out_of_service(&self) -> impl Iterator<Item = (u32, &str)> {
        self.devices.iter().filter_map(|(&index, device)| {
            let out = device.out_of_service.as_ref()?;
            Some((index, out.reason.as_str()))
        })
    }

    /// Returns the devices that are not released from a lease that was ended.
    pub(super) fn unreleased_devices(&self, lease: LeaseId) -> Vec<u32> {
        self.devices(lease).collect()
    }

    /// Returns which devices leases hold, including those of processes that have not exited.
    pub(super) fn held_devices(&self) -> Vec<HeldDevice> {
        let left = self.leases.iter().flat_map(|(&lease, state)| {
            let devices = state.devices.iter();
            devices.map(move |(&device, &share)| ((lease, device), share))
        });
        self.admission.held_devices(left.collect())
    }

    /// Returns, for each lane of a device, the number up to which all its grants have ended.
    pub(super) fn ended_grants(&self) -> Vec<DeviceGrant> {
        self.admission.ended_grants()
    }
}

#[cfg(test)]
mod tests;
