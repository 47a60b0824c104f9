//! Takes leases, with the devices, or shares of devices, that the scheduler has granted to them.

use std::collections::BTreeSet;

use tensord_proto::{
    ids::LeaseId,
    share::{DeviceShare, ShareError},
    v1::{DeviceGrant, LeaseGranted},
};

use super::{
    Supervisor,
    lease_queues::{RunningLease, part_of},
    table::Route,
};
use crate::{admission::Claim, locks::lock, process_message::OfferedDevice};

/// Why a lease is not taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum GrantError {
    /// A share of a device is not valid.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// A share has more memory than its device.
    #[error(
        "a share of device {device} has {share_bytes} bytes of memory; the device has {device_bytes}"
    )]
    Memory {
        device: u32,
        share_bytes: u64,
        device_bytes: u64,
    },
    /// The lease has several shares of a device.
    #[error("a lease has device {0} twice")]
    Twice(u32),
}

impl Supervisor {
    /// Adds a lease. It starts when no process uses its devices, or its lanes of them.
    pub(super) fn admit(&self, granted: &LeaseGranted) -> Result<(), GrantError> {
        let lease = LeaseId(granted.lease_id);
        let claims = claims_of(granted, &self.devices)?;
        let kept = lock(&self.kept_for_others).take(part_of(granted));
        lock(&self.handovers).end(lease);
        if !kept.is_empty() {
            lock(&self.snapshots).adopt(lease, kept);
        }
        lock(&self.leases).entry(lease).or_insert_with(|| {
            let restarts = lock(&self.restarts).remove(&lease).unwrap_or_default();
            RunningLease::new(granted.clone(), restarts.moved(granted.epoch))
        });
        self.update(|table, now| table.granted(now, lease, &claims));
        self.clear_suspended(lease);
        // The table has not taken a lease whose grants are obsolete.
        if lock(&self.table).route(lease) == Route::Unknown {
            lock(&self.leases).remove(&lease);
        }
        self.count_granted(granted);
        self.announced.notify_waiters();
        Ok(())
    }

    /// Records that a lease that runs here is not suspended. It may have started by its client's token, before
    /// the commands arrived that suspended it earlier.
    fn clear_suspended(&self, lease: LeaseId) {
        let is_running = lock(&self.table).is_running(lease);
        if let Some(running) = lock(&self.leases).get_mut(&lease)
            && is_running
        {
            running.is_suspended = false;
        }
    }

    /// Returns the devices of a lease as its process may use them: of a share, the memory is that of
    /// the share.
    pub(super) fn granted_devices(&self, granted: &LeaseGranted) -> Vec<OfferedDevice> {
        let of_lease = |device: &OfferedDevice| {
            let mut grants = granted.grants.iter();
            let grant = grants.find(|grant| grant.device_index == device.index)?;
            let share = grant.share.map(|share| share.memory_bytes);
            Some(OfferedDevice {
                memory_bytes: device.memory_bytes.min(share.unwrap_or(u64::MAX)),
                ..device.clone()
            })
        };
        self.devices.iter().filter_map(of_lease).collect()
    }

    /// Returns the bytes for snapshots of a lease with these devices: for a whole device `per_device`,
    /// for a share as much of that as the share has of the device's memory. So the leases of a device
    /// have no more together than one with the whole device.
    pub(super) fn snapshot_bytes(&self, per_device: u64, devices: &[OfferedDevice]) -> u64 {
        let bytes = devices.iter().map(|device| {
            let mut offered = self.devices.iter();
            let offered = offered.find(|offered| offered.index == device.index);
            let whole_bytes = offered.map_or(0, |offered| offered.memory_bytes);
            part_of_bytes(per_device, device.memory_bytes, whole_bytes)
        });
        bytes.fold(0, u64::saturating_add)
    }
}

/// Returns the claims of a lease.
fn claims_of(granted: &LeaseGranted, devices: &[OfferedDevice]) -> Result<Vec<Claim>, GrantError> {
    let lease = LeaseId(granted.lease_id);
    let mut seen = BTreeSet::new();
    let claim = |grant: &DeviceGrant| {
        let claim = Claim::new(lease, grant)?;
        if !seen.insert(claim.device) {
            return Err(GrantError::Twice(claim.device));
        }
        check_memory(&claim, devices)?;
        Ok(claim)
    };
    granted.grants.iter().map(claim).collect()
}

fn check_memory(claim: &Claim, devices: &[OfferedDevice]) -> Result<(), GrantError> {
    let mut devices = devices.iter();
    // The table refuses a device that does not exist.
    let Some(offered) = devices.find(|offered| offered.index == claim.device) else {
        return Ok(());
    };
    match claim.share {
        Some(DeviceShare { memory_bytes, .. }) if memory_bytes > offered.memory_bytes => {
            Err(GrantError::Memory {
                device: claim.device,
                share_bytes: memory_bytes,
                device_bytes: offered.memory_bytes,
            })
        }
        _ => Ok(()),
    }
}

/// Returns the part of `bytes` that `part` is of `whole`.
fn part_of_bytes(bytes: u64, part: u64, whole: u64) -> u64 {
    if part >= whole {
        return bytes;
    }
    let part = u128::from(bytes) * u128::from(part) / u128::from(whole);
    part.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tensord_proto::{grant::GrantNumber, share::MAX_LANES, v1};

    use super::*;

    const DEVICE_BYTES: u64 = 1000;

    fn offered() -> Vec<OfferedDevice> {
        let device = |index| OfferedDevice {
            index,
            memory_bytes: DEVICE_BYTES,
            ..OfferedDevice::default()
        };
        (0..2).map(device).collect()
    }

    fn granted(shares: &[(u32, Option<v1::DeviceShare>)]) -> LeaseGranted {
        let grant = |&(device_index, share)| DeviceGrant {
            device_index,
            grant: Some(GrantNumber { term: 1, count: 1 }.into()),
            share,
        };
        LeaseGranted {
            lease_id: 7,
            grants: shares.iter().map(grant).collect(),
            ..LeaseGranted::default()
        }
    }

    fn share(permille: u32, memory_bytes: u64, lane: u32) -> Option<v1::DeviceShare> {
        Some(v1::DeviceShare {
            permille,
            memory_bytes,
            lane,
        })
    }

    #[test]
    fn shares_that_no_device_has_are_refused() {
        let refused = |shares: &[_], words: &str| {
            let error = claims_of(&granted(shares), &offered()).unwrap_err();
            assert_eq!(error.to_string(), words);
        };
        refused(
            &[(0, share(0, 1, 1))],
            "a share has 0 thousandths of a device's time; 1 to 999 are possible",
        );
        refused(
            &[(0, share(1000, 1, 1))],
            "a share has 1000 thousandths of a device's time; 1 to 999 are possible",
        );
        refused(
            &[(0, share(500, 1, MAX_LANES + 1))],
            "a share has lane 17 of a device; there are lanes 1 to 16",
        );
        refused(
            &[(1, share(500, DEVICE_BYTES + 1, 1))],
            "a share of device 1 has 1001 bytes of memory; the device has 1000",
        );
        refused(
            &[(0, share(500, 1, 1)), (0, share(400, 1, 2))],
            "a lease has device 0 twice",
        );
        let both = [(0, share(999, DEVICE_BYTES, MAX_LANES)), (1, None)];
        let claims = claims_of(&granted(&both), &offered()).unwrap();
        let lanes: Vec<_> = claims.iter().map(Claim::lane).collect();
        assert_eq!(lanes, [MAX_LANES, 0]);
    }

    #[test]
    fn parts_of_bytes_are_no_more_than_the_bytes() {
        let parts = [0, 1, 333, 999, 1000, 2000].map(|part| part_of_bytes(600, part, 1000));
        assert_eq!(parts, [0, 0, 199, 599, 600, 600]);
        assert_eq!(
            part_of_bytes(u64::MAX, u64::MAX - 1, u64::MAX),
            u64::MAX - 1
        );
        assert_eq!(part_of_bytes(5, 0, 0), 5);
    }
}
