//! What leases have used of a worker's devices, for the scheduler.
//!
//! A pure data structure: the time is an argument. The counters of a grant never fall. A lease may
//! run in one process after the other, each of which counts from zero; the ledger adds them up. The
//! counters of a released grant are kept until the scheduler has them on disk, so that it loses
//! none when it, or the connection to it, ends in between.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use tensord_proto::{
    grant::{GrantNumber, number},
    ids::LeaseId,
    share::WHOLE_PERMILLE,
    v1::{DeviceGrant, DeviceShare, GrantUsage, UsageCounters},
};

use super::micros;

/// Most released grants that are kept for the scheduler. It records them within seconds, and while
/// it is unreachable there are no new leases.
const MAX_RELEASED: usize = 1024;

/// More bytes than a lease can move to or from a device in a second: networks have a tenth of that. At
/// this rate, false reports of one device take five years to reach the largest sum.
const MAX_MOVED_PER_S: u64 = 100_000_000_000;

/// More ops than a device executes in a second: each takes some microseconds at least.
const MAX_OPS_PER_S: u64 = 1_000_000_000;

/// What one process has counted of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ProcessCounters {
    /// What the lease has used, by the lease's meter.
    pub(crate) used: UsageCounters,
    /// How long the device has worked, by its own meter.
    pub(crate) device_busy_us: u64,
}

/// A grant that is not released.
#[derive(Debug)]
struct HeldGrant {
    number: GrantNumber,
    /// `None` if the lease has the whole device.
    share: Option<DeviceShare>,
    since: Instant,
    /// The sum of the lease's processes that have exited.
    exited: UsageCounters,
    /// The latest report of the process that runs.
    current: ProcessCounters,
    /// When that process began to count.
    process_since: Instant,
}

/// What leases have used of a worker's devices.
#[derive(Debug, Default)]
pub(crate) struct UsageLedger {
    held: BTreeMap<(LeaseId, u32), HeldGrant>,
    released: VecDeque<GrantUsage>,
    /// How long each device has worked in processes that have exited.
    device_busy_us: BTreeMap<u32, u64>,
}

impl UsageLedger {
    /// Records that a lease has a device. Does nothing if the ledger knows this grant.
    pub(crate) fn granted(&mut self, now: Instant, lease: LeaseId, grant: &DeviceGrant) {
        let (device, number) = (grant.device_index, number(grant.grant));
        let known = self.held.get(&(lease, device));
        if known.is_some_and(|known| known.number == number) {
            return;
        }
        self.release_device(now, lease, device);
        let held = HeldGrant {
            number,
            share: grant.share,
            since: now,
            exited: UsageCounters::default(),
            current: ProcessCounters::default(),
            process_since: now,
        };
        self.held.insert((lease, device), held);
    }

    /// Records what the process of a lease has counted so far. It is not trusted: its counters do
    /// not fall, it cannot have used a device for longer than it has had it, nor have held more
    /// than its memory, and bytes and ops have a largest rate.
    pub(crate) fn reported(
        &mut self,
        now: Instant,
        lease: LeaseId,
        device: u32,
        memory_bytes: u64,
        counters: ProcessCounters,
    ) {
        let Some(held) = self.held.get_mut(&(lease, device)) else {
            return;
        };
        let elapsed = now.saturating_duration_since(held.process_since);
        let most_us = micros(elapsed);
        let ProcessCounters {
            used,
            device_busy_us,
        } = counters;
        let (moved_bytes, ops) = (most(MAX_MOVED_PER_S, elapsed), most(MAX_OPS_PER_S, elapsed));
        let current = &mut held.current;
        current.used = UsageCounters {
            held_us: 0,
            busy_us: used.busy_us.min(most_us).max(current.used.busy_us),
            byte_seconds: used
                .byte_seconds
                .min(most(memory_bytes, elapsed))
                .max(current.used.byte_seconds),
            moved_bytes: used
                .moved_bytes
                .min(moved_bytes)
                .max(current.used.moved_bytes),
            ops: used.ops.min(ops).max(current.used.ops),
        };
        current.device_busy_us = device_busy_us.min(most_us).max(current.device_busy_us);
    }

    /// Records that the process of a lease has exited. The next one counts from zero.
    #[cfg(any(target_os = "linux", test))]
    pub(crate) fn process_exited(&mut self, now: Instant, lease: LeaseId) {
        for (&(_, device), held) in self.held.range_mut((lease, 0)..=(lease, u32::MAX)) {
            let counted = std::mem::take(&mut held.current);
            held.exited = sum(&held.exited, &counted.used);
            held.process_since = now;
            let device_busy_us = self.device_busy_us.entry(device).or_default();
            *device_busy_us = device_busy_us.saturating_add(counted.device_busy_us);
        }
    }

    /// Records that the devices of a lease are released.
    #[cfg(any(target_os = "linux", test))]
    pub(crate) fn released(&mut self, now: Instant, lease: LeaseId) {
        self.process_exited(now, lease);
        let devices = self.held.range((lease, 0)..=(lease, u32::MAX));
        let devices: Vec<_> = devices.map(|((_, device), _)| *device).collect();
        for device in devices {
            self.release_device(now, lease, device);
        }
    }

    /// Records that one device of a lease is released.
    pub(crate) fn release_device(&mut self, now: Instant, lease: LeaseId, device: u32) {
        if let Some(held) = self.held.remove(&(lease, device)) {
            let busy_us = self.device_busy_us.entry(device).or_default();
            *busy_us = busy_us.saturating_add(held.current.device_busy_us);
            if self.released.len() >= MAX_RELEASED {
                self.released.pop_front();
            }
            let released = held.usage(now, lease, device, true);
            self.released.push_back(released);
        }
    }

    /// Forgets released grants, which the scheduler has on disk.
    pub(crate) fn recorded(&mut self, grants: &[DeviceGrant]) {
        if grants.is_empty() {
            return;
        }
        self.released.retain(|released| {
            // No two grants of a device have the same number, whatever shares they are of.
            let key = |grant: &DeviceGrant| (grant.device_index, grant.grant);
            let is_same =
                |grant: &DeviceGrant| Some(key(grant)) == released.grant.as_ref().map(key);
            !grants.iter().any(is_same)
        });
    }

    /// Returns the leases that have a device each, and which.
    pub(crate) fn held(&self) -> Vec<(LeaseId, u32)> {
        self.held.keys().copied().collect()
    }

    /// Returns what leases have used up to `now`.
    pub(crate) fn usage(&self, now: Instant) -> Vec<GrantUsage> {
        let held = self.held.iter();
        let held = held.map(|(&(lease, device), held)| held.usage(now, lease, device, false));
        held.chain(self.released.iter().copied()).collect()
    }

    /// Returns how long a device has worked in all processes. Those of leases that share it take
    /// turns, so no time counts twice but that in which one awaits a read while another works.
    #[cfg(any(target_os = "linux", test))]
    pub(crate) fn device_busy_us(&self, device: u32) -> u64 {
        let exited = self.device_busy_us.get(&device).copied();
        let on_device = self.held.iter().filter(|((_, index), _)| *index == device);
        let current = on_device.map(|(_, held)| held.current.device_busy_us);
        current.fold(exited.unwrap_or_default(), u64::saturating_add)
    }
}

impl HeldGrant {
    fn usage(&self, now: Instant, lease: LeaseId, device: u32, released: bool) -> GrantUsage {
        let had_us = micros(now.saturating_duration_since(self.since));
        let held_us = part_of(had_us, self.share);
        let used = sum(&self.exited, &self.current.used);
        GrantUsage {
            lease_id: lease.0,
            grant: Some(DeviceGrant {
                device_index: device,
                grant: Some(self.number.into()),
                share: self.share,
            }),
            used: Some(UsageCounters { held_us, ..used }),
            released,
        }
    }
}

/// Returns the part of a time for which a lease with this share is counted as having the device:
/// all leases of a device have it for no longer together than one that has the whole.
fn part_of(time_us: u64, share: Option<DeviceShare>) -> u64 {
    let permille = share.map_or(WHOLE_PERMILLE, |share| share.permille.min(WHOLE_PERMILLE));
    let part = u128::from(time_us) * u128::from(permille) / u128::from(WHOLE_PERMILLE);
    part.try_into().unwrap_or(u64::MAX)
}

/// Returns the sum of two processes' counters.
fn sum(a: &UsageCounters, b: &UsageCounters) -> UsageCounters {
    UsageCounters {
        held_us: 0,
        busy_us: a.busy_us.saturating_add(b.busy_us),
        byte_seconds: a.byte_seconds.saturating_add(b.byte_seconds),
        moved_bytes: a.moved_bytes.saturating_add(b.moved_bytes),
        ops: a.ops.saturating_add(b.ops),
    }
}

/// Returns what adds up in a time at a rate. The bytes of a full device are the rate of its memory over time.
fn most(per_s: u64, elapsed: Duration) -> u64 {
    let most = u128::from(per_s) * elapsed.as_millis() / 1000;
    most.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
