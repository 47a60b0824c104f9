//! The supervisor as the [`LeaseHost`] of its worker.

use std::{pin::Pin, time::Instant};

use tensord_proto::{
    grant::number,
    ids::LeaseId,
    v1::{DeviceGrant, DeviceUsage, Error, HeldDevice, LeaseGranted, OutOfService},
};

use super::Supervisor;
use crate::{
    admission::Claim,
    lease_host::LeaseHost,
    locks::lock,
    process_message::{Empty, Task},
};

impl LeaseHost for Supervisor {
    fn set_lease_key(&self, key: Vec<u8>) {
        lock(&self.scheduler).lease_key = Some(key.clone());
        self.lease_tokens.set_key(key.clone());
        self.broadcast(&Task::LeaseKey(key));
    }

    fn set_time(&self, time_ms: u64) {
        lock(&self.scheduler).time_ms = Some((time_ms, Instant::now()));
        lock(&self.table).set_time(time_ms, Instant::now());
        self.broadcast(&Task::Time(time_ms));
    }

    fn mark_unreachable(&self) {
        lock(&self.scheduler).time_ms = None;
        lock(&self.table).mark_unreachable();
        self.broadcast(&Task::Unreachable(Empty {}));
    }

    fn granted(&self, granted: &LeaseGranted) {
        self.admit(granted);
    }

    fn end_lease(&self, lease: LeaseId, grants: &[DeviceGrant]) {
        let claim = |grant: &DeviceGrant| Claim {
            lease,
            device: grant.device_index,
            grant: number(grant.grant),
        };
        let claims: Vec<_> = grants.iter().map(claim).collect();
        self.update(|table, now| table.end_lease(now, lease, &claims));
    }

    fn end_all(&self, error: &Error) {
        self.update(|table, now| table.end_all(now, &error.message));
    }

    fn live_session_count(&self) -> usize {
        let leases = lock(&self.leases);
        let live = leases.values();
        live.map(|lease| lock(&lease.report).live_sessions as usize)
            .fold(0, usize::saturating_add)
    }

    fn query_memory(&self) {
        self.broadcast(&Task::QueryMemory(Empty {}));
    }

    fn usage(&self) -> Vec<DeviceUsage> {
        let mut usage = vec![DeviceUsage::default(); self.devices.len()];
        for lease in lock(&self.leases).values() {
            for (&device, reported) in &lock(&lease.report).usage {
                if let Some(usage) = usage.get_mut(device as usize) {
                    *usage = *reported;
                }
            }
        }
        usage
    }

    fn out_of_service(&self) -> Vec<OutOfService> {
        let own = |(device_index, reason): (u32, &str)| OutOfService {
            device_index,
            reason: reason.to_owned(),
        };
        let mut out: Vec<_> = lock(&self.table).out_of_service().map(own).collect();
        for lease in lock(&self.leases).values() {
            let reported = lock(&lease.report).out_of_service.clone();
            out.extend(reported);
        }
        out.sort_by_key(|out| out.device_index);
        out.dedup_by_key(|out| out.device_index);
        out
    }

    fn held_devices(&self) -> Vec<HeldDevice> {
        lock(&self.table).held_devices()
    }

    fn ended_grants(&self) -> Vec<DeviceGrant> {
        lock(&self.table).ended_grants()
    }

    fn unreleased_devices(&self, lease: LeaseId) -> Vec<u32> {
        lock(&self.table).unreleased_devices(lease)
    }

    fn wait_for_reports(&self) -> Pin<Box<dyn Future<Output = Vec<LeaseId>> + Send + '_>> {
        Box::pin(async {
            self.reports.notified().await;
            std::mem::take(&mut *lock(&self.released))
        })
    }
}
