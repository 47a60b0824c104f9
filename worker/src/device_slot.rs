//! One device of the worker, with its executor and its health.
//!
//! [`Health`] makes the decisions; this module collects its observations and executes its
//! actions.

use std::{
    collections::{BTreeSet, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tensord_backend::{Device, panic_message};
use tensord_proto::{codec::DeviceProfile, ids::LeaseId};
use tokio::runtime::Handle;
use tracing::{error, info, warn};

use crate::{
    executor::Executor,
    health::{DeviceAction, Health, HealthUpdate, Observation},
    locks::lock,
    probe::probe,
    session::{DeviceContext, Session},
    usage::{LeaseMeter, ledger::ProcessCounters},
};

/// Number of leases whose meters a device keeps. One lease has the device at a time, and a few earlier
/// ones may not be released yet.
const MAX_LEASE_METERS: usize = 8;

/// A device with its executor.
pub(crate) struct DeviceSlot {
    index: u32,
    executor: Executor<Session>,
    pub(crate) device_context: DeviceContext,
    pub(crate) profile: DeviceProfile,
    reserved: Arc<ReservedMemory>,
    health: Mutex<Health>,
    /// The meters of the latest leases, the last one at the end.
    lease_meters: Mutex<VecDeque<(LeaseId, Arc<LeaseMeter>)>>,
    /// Number and result of the latest test op.
    probe_result: Arc<Mutex<ProbeResult>>,
}

type ProbeResult = Option<(u64, Result<(), String>)>;

/// Device memory that the backend holds, as of the latest query. A query may block for as
/// long as the device's current work.
#[derive(Default)]
struct ReservedMemory {
    bytes: Mutex<Option<u64>>,
    is_querying: AtomicBool,
}

impl ReservedMemory {
    /// Queries the backend again, unless a query is running. May block.
    fn query(&self, device: &dyn Device) {
        if !self.is_querying.swap(true, Ordering::AcqRel) {
            let bytes = device.reserved_bytes();
            *lock(&self.bytes) = bytes;
            self.is_querying.store(false, Ordering::Release);
        }
    }
}

impl DeviceSlot {
    pub(crate) fn new(
        index: u32,
        executor: Executor<Session>,
        device_context: DeviceContext,
    ) -> Self {
        Self {
            index,
            executor,
            profile: device_context.device.profile(),
            device_context,
            reserved: Arc::default(),
            health: Mutex::default(),
            lease_meters: Mutex::default(),
            probe_result: Arc::default(),
        }
    }

    /// Returns the bytes of device memory that the backend holds, as of the latest query.
    pub(crate) fn reserved_bytes(&self) -> Option<u64> {
        *lock(&self.reserved.bytes)
    }

    /// Queries the backend's memory in the background.
    pub(crate) fn query_memory(&self) {
        let (reserved, device) = (self.reserved.clone(), self.device_context.device.clone());
        let query = move || reserved.query(&*device);
        self.device_context.runtime.spawn_blocking(query);
    }

    /// Records that a session of `lease` opens, and returns what it needs of the device.
    ///
    /// # Errors
    ///
    /// If the device is out of service: the reason.
    pub(crate) fn open(&self, lease: LeaseId) -> Result<DeviceContext, String> {
        let mut health = lock(&self.health);
        match health.out_of_service() {
            Some(reason) => Err(format!(
                "device {} of this worker is out of service: {reason}",
                self.index
            )),
            None => {
                health.opened(lease);
                let meters = &self.device_context.meters;
                Ok(DeviceContext {
                    meters: meters.for_lease(self.lease_meter(lease)),
                    ..self.device_context.clone()
                })
            }
        }
    }

    /// Returns the meter of `lease`, which is the latest lease from now on.
    fn lease_meter(&self, lease: LeaseId) -> Arc<LeaseMeter> {
        let mut meters = lock(&self.lease_meters);
        let known = meters.iter().position(|(known, _)| *known == lease);
        let known = known.and_then(|at| meters.remove(at));
        let (_, meter) =
            known.unwrap_or_else(|| (lease, LeaseMeter::new(self.device_context.memory.clone())));
        if meters.len() >= MAX_LEASE_METERS {
            meters.pop_front();
        }
        meters.push_back((lease, meter.clone()));
        meter
    }

    /// Returns the number of ops processed for the latest lease. Those for earlier leases are not
    /// revealed to it.
    pub(crate) fn ops(&self) -> u64 {
        let latest = lock(&self.lease_meters).back().cloned();
        latest.map_or(0, |(_, meter)| meter.ops())
    }

    /// Returns what `lease` has used of the device up to `now`.
    pub(crate) fn used_by(&self, lease: LeaseId, now: Instant) -> ProcessCounters {
        let meters = lock(&self.lease_meters);
        let mut meters = meters.iter();
        let meter = meters.find(|(known, _)| *known == lease);
        let used = meter.map(|(_, meter)| meter.used(now));
        ProcessCounters {
            used: used.unwrap_or_default(),
            device_busy_us: self.busy_us(now),
        }
    }

    /// Returns how long the device has worked up to `now`, in microseconds.
    pub(crate) fn busy_us(&self, now: Instant) -> u64 {
        self.device_context.meters.device.busy_us(now)
    }

    /// Records that `lease` was ended. `has_sessions`: whether sessions of the lease are left
    /// on the device.
    pub(crate) fn end_lease(&self, lease: LeaseId, has_sessions: bool) {
        lock(&self.health).end(lease, has_sessions);
    }

    /// Returns whether `lease` was ended but the device is not released from it.
    pub(crate) fn is_ending(&self, lease: LeaseId) -> bool {
        lock(&self.health).is_ending(lease)
    }

    /// Returns the leases that were ended but from which the device is not released.
    pub(crate) fn ending(&self) -> Vec<LeaseId> {
        lock(&self.health).ending().collect()
    }

    /// Returns why the device is out of service, if it is.
    pub(crate) fn out_of_service(&self) -> Option<String> {
        lock(&self.health).out_of_service().map(Into::into)
    }

    /// Returns since when an op has been known to exceed its time limit, if it still runs.
    pub(crate) fn stuck_since(&self) -> Option<Instant> {
        lock(&self.health).stuck_since()
    }

    /// Checks the device and executes what its [`Health`] decides. `sessions` are the
    /// sessions on the device that are not gone.
    pub(crate) fn check(&self, now: Instant, sessions: &[&Arc<Session>]) -> HealthUpdate {
        let overdue: Vec<_> = sessions.iter().filter_map(|s| s.overdue(now)).collect();
        let leases = sessions.iter().map(|session| session.grant.lease);
        let observation = Observation {
            sessions: leases.collect::<BTreeSet<_>>(),
            live_bytes: self.device_context.memory.live_bytes(),
            overdue: overdue.into_iter().next(),
            has_failed: self.device_context.signals.take_failure(),
            has_thread: self.executor.has_thread(),
            waits_for_turn: self.executor.waits_for_turn(),
            probe_result: lock(&self.probe_result).clone(),
        };
        let (outcome, out_of_service) = {
            let mut health = lock(&self.health);
            let outcome = health.update(now, &observation);
            (outcome, health.out_of_service().map(ToOwned::to_owned))
        };
        if outcome.has_changed {
            let device = self.index;
            match out_of_service {
                Some(reason) => warn!(device, "the device is out of service: {reason}"),
                None => info!(device, "the device is in service again"),
            }
        }
        for action in &outcome.actions {
            match action {
                DeviceAction::Retire => self.executor.retire(),
                DeviceAction::Restart => self.restart(),
                DeviceAction::Probe(number) => self.probe(*number),
            }
        }
        outcome
    }

    fn restart(&self) {
        match self.executor.restart() {
            Ok(()) => info!(device = self.index, "restarted the device's executor"),
            // The test op then does not complete, which puts the device out of service.
            Err(e) => error!(
                device = self.index,
                "cannot restart the device's executor: {e}"
            ),
        }
    }

    /// Queues a test op behind all jobs of the executor.
    fn probe(&self, number: u64) {
        let (device, runtime) = (
            self.device_context.device.clone(),
            self.device_context.runtime.clone(),
        );
        let (probe_result, signals) = (
            self.probe_result.clone(),
            self.device_context.signals.clone(),
        );
        self.device_context.queue.push_task(Box::new(move || {
            let result = run_probe(&*device, &runtime);
            *lock(&probe_result) = Some((number, result));
            signals.wake();
        }));
    }
}

/// Runs a test op on a device.
pub(crate) fn run_probe(device: &dyn Device, runtime: &Handle) -> Result<(), String> {
    let tested = catch_unwind(AssertUnwindSafe(|| probe(device, runtime)));
    tested.unwrap_or_else(|panic| Err(panic_message(panic.as_ref())))
}

#[cfg(test)]
mod tests;
