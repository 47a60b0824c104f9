//! One device with its executor, and who looks after it.
//!
//! [`Health`] decides; here is what it is shown, and what is done.

use std::{
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tensord_proto::{codec::DeviceProfile, ids::LeaseId};
use tokio::runtime::Handle;
use tracing::{error, info, warn};

use crate::{
    backend::{Device, panic_words, probe},
    executor::Executor,
    health::{Action, Health, Outcome, Seen},
    locks::lock,
    session::{DeviceContext, Session},
};

/// A device with its executor.
pub(crate) struct DeviceSlot {
    index: u32,
    executor: Executor,
    pub(crate) device_context: DeviceContext,
    pub(crate) profile: DeviceProfile,
    reserved: Arc<Reserved>,
    health: Mutex<Health>,
    /// The lease whose ops are counted.
    counted: Mutex<Option<LeaseId>>,
    /// What came of the latest test op.
    answer: Arc<Mutex<Answer>>,
}

type Answer = Option<(u64, Result<(), String>)>;

/// What a device's backend holds of its memory, as it was last seen: to look may take
/// as long as what the device is at.
#[derive(Default)]
struct Reserved {
    bytes: Mutex<Option<u64>>,
    looking: AtomicBool,
}

impl Reserved {
    /// Looks again, unless somebody does already. May block.
    fn look(&self, device: &dyn Device) {
        if !self.looking.swap(true, Ordering::AcqRel) {
            let bytes = device.reserved_bytes();
            *lock(&self.bytes) = bytes;
            self.looking.store(false, Ordering::Release);
        }
    }
}

impl DeviceSlot {
    pub(crate) fn new(index: u32, executor: Executor, device_context: DeviceContext) -> Self {
        Self {
            index,
            executor,
            profile: device_context.device.profile(),
            device_context,
            reserved: Arc::default(),
            health: Mutex::default(),
            counted: Mutex::default(),
            answer: Arc::default(),
        }
    }

    /// What the backend holds of the device's memory, as of the latest look.
    pub(crate) fn reserved_bytes(&self) -> Option<u64> {
        *lock(&self.reserved.bytes)
    }

    /// Has the device looked at in the background.
    pub(crate) fn look_at_memory(&self) {
        let (reserved, device) = (self.reserved.clone(), self.device_context.device.clone());
        let look = move || reserved.look(&*device);
        self.device_context.runtime.spawn_blocking(look);
    }

    /// Notes that a session of `lease` opens.
    ///
    /// # Errors
    ///
    /// Why the device cannot be used at the moment.
    pub(crate) fn open(&self, lease: LeaseId) -> Result<(), String> {
        let mut health = lock(&self.health);
        match health.out_of_service() {
            Some(reason) => Err(format!(
                "device {} of this worker is out of service: {reason}",
                self.index
            )),
            None => {
                health.opened(lease);
                self.count_for(lease);
                Ok(())
            }
        }
    }

    /// A session of `lease` begins: the count of another lease is forgotten, as whoever has
    /// the device now is not to learn of it.
    fn count_for(&self, lease: LeaseId) {
        if lock(&self.counted).replace(lease) != Some(lease) {
            self.device_context.ops.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that `lease` was ended.
    pub(crate) fn end_lease(&self, lease: LeaseId, has_sessions: bool) {
        lock(&self.health).end(lease, has_sessions);
    }

    /// Whether the device is not free of `lease`, which was ended.
    pub(crate) fn is_ending(&self, lease: LeaseId) -> bool {
        lock(&self.health).is_ending(lease)
    }

    /// The leases that were ended and of which the device is not free.
    pub(crate) fn ending(&self) -> Vec<LeaseId> {
        lock(&self.health).ending().collect()
    }

    /// Why the device cannot be used at the moment, if so.
    pub(crate) fn out_of_service(&self) -> Option<String> {
        lock(&self.health).out_of_service().map(Into::into)
    }

    /// Since when an op has been known to take too long, while that goes on.
    pub(crate) fn stuck_since(&self) -> Option<Instant> {
        lock(&self.health).stuck_since()
    }

    /// Looks after the device, on which `sessions` are, as far as they are not gone.
    pub(crate) fn tend(&self, now: Instant, sessions: &[&Arc<Session>]) -> Outcome {
        let overdue: Vec<_> = sessions.iter().filter_map(|s| s.overdue(now)).collect();
        let leases = sessions.iter().map(|session| session.grant.lease);
        let seen = Seen {
            sessions: leases.collect::<BTreeSet<_>>(),
            live_bytes: self.device_context.memory.live_bytes(),
            overdue: overdue.into_iter().next(),
            has_failed: self.device_context.signals.take_failure(),
            has_thread: self.executor.has_thread(),
            answer: lock(&self.answer).clone(),
        };
        let (outcome, out_of_service) = {
            let mut health = lock(&self.health);
            let outcome = health.look(now, &seen);
            (outcome, health.out_of_service().map(ToOwned::to_owned))
        };
        if outcome.has_changed {
            let device = self.index;
            match out_of_service {
                Some(reason) => warn!(device, "out of service: {reason}"),
                None => info!(device, "in service again"),
            }
        }
        for action in &outcome.actions {
            match action {
                Action::Retire => self.executor.retire(),
                Action::Restart => self.restart(),
                Action::Probe(number) => self.probe(*number),
            }
        }
        outcome
    }

    fn restart(&self) {
        match self.executor.restart() {
            Ok(()) => info!(device = self.index, "started its executor anew"),
            // The test op will not be answered, which is then the reason.
            Err(e) => error!(device = self.index, "cannot start its executor anew: {e}"),
        }
    }

    /// Has the executor run a test op, behind all that it has to do.
    fn probe(&self, number: u64) {
        let (device, runtime) = (
            self.device_context.device.clone(),
            self.device_context.runtime.clone(),
        );
        let (answer, signals) = (self.answer.clone(), self.device_context.signals.clone());
        self.device_context.queue.push_task(Box::new(move || {
            let result = test(&*device, &runtime);
            *lock(&answer) = Some((number, result));
            signals.wake();
        }));
    }
}

fn test(device: &dyn Device, runtime: &Handle) -> Result<(), String> {
    let tested = catch_unwind(AssertUnwindSafe(|| probe(device, runtime)));
    tested.unwrap_or_else(|panic| Err(panic_words(panic.as_ref())))
}

#[cfg(test)]
mod tests;
