//! The registry as the [`LeaseHost`] of its worker.

use std::{collections::BTreeMap, pin::Pin, sync::Arc, time::Instant};

use tensord_proto::{
    ids::LeaseId,
    v1::{
        DeviceGrant, DeviceUsage, Error, ErrorCode, GrantUsage, HeldDevice, LeaseGranted,
        OutOfService,
    },
};
use tracing::{debug, warn};

use super::Registry;
use crate::{
    admission::Claim, device_slot::DeviceSlot, lease_host::LeaseHost, locks::lock, session::Session,
};

impl LeaseHost for Registry {
    fn set_lease_key(&self, key: Vec<u8>) {
        self.lease_tokens.set_key(key);
    }

    fn set_time(&self, time_ms: u64) {
        lock(&self.admission).set_time(time_ms, Instant::now());
    }

    fn mark_unreachable(&self) {
        lock(&self.admission).mark_unreachable();
    }

    fn end_all(&self, error: &Error) {
        Session::end_together(self.all_sessions(), error);
    }

    fn granted(&self, granted: &LeaseGranted) {
        let lease = LeaseId(granted.lease_id);
        for device_grant in &granted.grants {
            let claim = match Claim::new(lease, device_grant) {
                Ok(claim) => claim,
                Err(e) => {
                    warn!(%lease, "refused a grant of the scheduler: {e}");
                    continue;
                }
            };
            let mut admission = lock(&self.admission);
            let earlier = admission.granted(claim);
            let admitted = admission.check(claim);
            drop(admission);
            for earlier in earlier {
                self.end_superseded(earlier, claim.device);
            }
            match admitted {
                Ok(()) => lock(&self.usage).granted(Instant::now(), lease, device_grant),
                Err(e) => debug!(%lease, "a grant of the scheduler is not admitted: {e}"),
            }
        }
    }

    fn end_lease(&self, lease: LeaseId, grants: &[DeviceGrant]) {
        let mut admission = lock(&self.admission);
        grants.iter().for_each(|ended| admission.end(ended));
        drop(admission);
        let mut sessions = self.all_sessions();
        sessions.retain(|s| s.grant.lease == lease && !s.is_torn_down());
        let error = Error::new(ErrorCode::Lease, format!("lease {lease} ended"));
        Session::end_together(sessions.clone(), &error);
        for (index, device_slot) in &self.device_slots {
            let is_here = |s: &Arc<Session>| s.grant.device_index == *index;
            device_slot.end_lease(lease, sessions.iter().any(is_here));
            // Otherwise, a check of the device releases it.
            if !device_slot.is_ending(lease) {
                self.count_released(Instant::now(), lease, *index);
            }
        }
        self.wake.notify_one();
    }

    fn live_session_count(&self) -> usize {
        self.sessions
            .iter()
            .filter(|session| !session.has_ended())
            .count()
    }

    fn query_memory(&self) {
        let device_slots = self.device_slots.values();
        device_slots.for_each(DeviceSlot::query_memory);
    }

    fn held_devices(&self) -> Vec<HeldDevice> {
        let mut sessions = self.all_sessions();
        sessions.retain(|session| !session.is_torn_down());
        let left = sessions.iter();
        let left = left.map(|s| (s.grant.lease, s.grant.device_index));
        // A host of several leases has no shares, and the process of one reports no devices.
        let ending = self.device_slots.iter().flat_map(|(&index, device_slot)| {
            let ending = device_slot.ending().into_iter();
            ending.map(move |lease| (lease, index))
        });
        let left = left.chain(ending).map(|left| (left, None)).collect();
        lock(&self.admission).held_devices(left)
    }

    fn ended_grants(&self) -> Vec<DeviceGrant> {
        lock(&self.admission).ended_grants()
    }

    fn unreleased_devices(&self, lease: LeaseId) -> Vec<u32> {
        let device_slots = self.device_slots.iter();
        let busy = device_slots.filter(|(_, device_slot)| device_slot.is_ending(lease));
        busy.map(|(&index, _)| index).collect()
    }

    fn out_of_service(&self) -> Vec<OutOfService> {
        let out = |(&device_index, device_slot): (&u32, &DeviceSlot)| {
            let reason = device_slot.out_of_service()?;
            Some(OutOfService {
                device_index,
                reason,
            })
        };
        self.device_slots.iter().filter_map(out).collect()
    }

    fn usage(&self) -> (Vec<DeviceUsage>, Vec<GrantUsage>) {
        let now = Instant::now();
        let held = lock(&self.usage).held();
        for (lease, device) in held {
            self.count(now, lease, device);
        }
        let devices = self.usage_by_device(now).into_values();
        (devices.collect(), lock(&self.usage).usage(now))
    }

    fn usage_recorded(&self, grants: &[DeviceGrant]) {
        lock(&self.usage).recorded(grants);
    }

    fn wait_for_reports(&self) -> Pin<Box<dyn Future<Output = Vec<LeaseId>> + Send + '_>> {
        Box::pin(async {
            self.reports.notified().await;
            std::mem::take(&mut *lock(&self.released))
        })
    }
}

impl Registry {
    /// Returns the number of steps that the present sessions have executed, and whether one has something to
    /// do.
    #[cfg(target_os = "linux")]
    pub(crate) fn activity(&self) -> (u64, bool) {
        let sessions = self.all_sessions();
        let steps = sessions.iter().map(|session| session.steps());
        let steps = steps.fold(0, u64::wrapping_add);
        (steps, sessions.iter().any(|session| !session.is_idle()))
    }

    /// Returns the usage of each device up to `now`, by its index.
    pub(crate) fn usage_by_device(&self, now: Instant) -> BTreeMap<u32, DeviceUsage> {
        let usage = |(&index, device_slot): (&u32, &DeviceSlot)| {
            let usage = DeviceUsage {
                sessions: 0,
                live_bytes: device_slot.device_context.memory.live_bytes(),
                reserved_bytes: device_slot.reserved_bytes(),
                ops_executed: device_slot.ops(),
                busy_us: device_slot.busy_us(now),
            };
            (index, usage)
        };
        let mut usage: BTreeMap<_, _> = self.device_slots.iter().map(usage).collect();
        for session in &self.sessions {
            if !session.is_torn_down()
                && let Some(usage) = usage.get_mut(&session.grant.device_index)
            {
                usage.sessions += 1;
            }
        }
        usage
    }

    /// Returns what `lease` has used of each device in this process.
    #[cfg(target_os = "linux")]
    pub(crate) fn used_by(
        &self,
        lease: LeaseId,
        now: Instant,
    ) -> BTreeMap<u32, tensord_proto::v1::UsageCounters> {
        let devices = self.device_slots.iter();
        let used = devices.map(|(&index, device)| (index, device.used_by(lease, now).used));
        used.collect()
    }

    /// Has the ledger know what a lease has used of a device up to `now`.
    fn count(&self, now: Instant, lease: LeaseId, device: u32) {
        if let Some(device_slot) = self.device_slots.get(&device) {
            let counters = device_slot.used_by(lease, now);
            let memory_bytes = device_slot.device_context.memory.capacity_bytes();
            lock(&self.usage).reported(now, lease, device, memory_bytes, counters);
        }
    }

    /// Records that a device is released from a lease.
    pub(super) fn count_released(&self, now: Instant, lease: LeaseId, device: u32) {
        self.count(now, lease, device);
        lock(&self.usage).release_device(now, lease, device);
    }
}
