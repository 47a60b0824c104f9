//! The test's own model of devices that leases share: it adds up what each lease has of a device.

use std::collections::BTreeSet;

use tensord_proto::share::{DeviceShare, lane};

use super::world::{SimRequest, World};
use super::*;
use crate::device::Share;

/// What a request or lease needs of a device that it shares; `None` if it needs all of it.
pub(super) type Needs<'a> = &'a dyn Fn(&DeviceSpec) -> Option<Share>;

/// Returns what a request needs of a device.
pub(super) fn needs_of(waiting: &SimRequest) -> impl Fn(&DeviceSpec) -> Option<Share> {
    let demand = waiting.demand.clone();
    move |device| {
        let permille = demand.share_permille?;
        let (whole, rest) = (device.memory_bytes / 1000, device.memory_bytes % 1000);
        let memory_bytes = match demand.memory_bytes {
            0 => whole * u64::from(permille) + rest * u64::from(permille) / 1000,
            bytes => bytes,
        };
        Some(Share {
            permille,
            memory_bytes,
        })
    }
}

/// Returns what a share counts as, of the time or the memory.
pub(super) fn counted(device: &DeviceSpec, share: Option<Share>) -> u64 {
    let Some(Share {
        permille,
        memory_bytes,
    }) = share
    else {
        return 1000;
    };
    let counts_more = |it: &u64| {
        u128::from(*it) * u128::from(device.memory_bytes) >= u128::from(memory_bytes) * 1000
    };
    (u64::from(permille)..).find(counts_more).unwrap()
}

/// Asserts that leases with these shares of a device do not have more than there is, nor the same lane.
pub(super) fn check_shares(device: &DeviceSpec, shares: &[Option<DeviceShare>]) {
    if shares.contains(&None) {
        assert_eq!(shares.len(), 1, "{shares:?}");
        return;
    }
    let lanes: BTreeSet<_> = shares.iter().map(|share| lane(*share)).collect();
    assert_eq!(lanes.len(), shares.len(), "{shares:?}");
    let shares = shares.iter().flatten();
    assert!(shares.clone().map(|it| it.permille).sum::<u32>() <= 1000);
    assert!(shares.map(|it| it.memory_bytes).sum::<u64>() <= device.memory_bytes);
}

impl World {
    /// No device has more leases than there is of it, ended ones included that have not left it.
    pub(super) fn check_sharing(&self) {
        for worker in &self.snapshot.workers {
            for (index, device) in (0..).zip(&worker.devices) {
                let shares = device.leases.iter().map(|(_, share)| *share);
                let shares: Vec<_> = shares.collect();
                check_shares(&device.device, &shares);
                let ending = self
                    .engine
                    .ending_shares(device_ref(worker.worker.0, index));
                let all = [shares, ending].concat();
                // A worker that has come back with other devices may report ended leases of those before.
                if self.leases.is_some() && !all.contains(&None) {
                    let memory_bytes = u64::MAX;
                    let of_any_memory = DeviceSpec {
                        memory_bytes,
                        ..device.device.clone()
                    };
                    check_shares(&of_any_memory, &all);
                }
            }
        }
    }

    /// Returns the devices that a lease could get now that needs so much of one, beside others if these have shares
    /// or some are held back for them.
    pub(super) fn available(&self, needs: Needs<'_>, lease: LeaseId) -> BTreeSet<DeviceRef> {
        let mut available = self.free();
        available.retain(|it| self.is_held_for_none_but(lease, *it));
        available.extend(self.with_room(needs, &BTreeSet::new(), true, lease));
        available
    }

    /// Returns what is held back of a device for others than a lease; `None` for all of it.
    fn held_for_others(&self, device_ref: DeviceRef, lease: LeaseId) -> Vec<Option<Share>> {
        let held = self.engine.held_back().get(&device_ref);
        let others = held.into_iter().flatten().filter(|(of, _)| *of != lease);
        others.map(|(_, share)| *share).collect()
    }

    /// Returns what is held back of a device for those that come before a lease; for all others if nothing is held
    /// back for this one.
    fn held_before(&self, device_ref: DeviceRef, lease: LeaseId) -> Vec<Option<Share>> {
        let held = self.engine.held_back().get(&device_ref);
        let before = held.into_iter().flatten();
        let before = before.take_while(|(of, _)| *of != lease);
        before.map(|(_, share)| *share).collect()
    }

    pub(super) fn is_held_for_none_but(&self, lease: LeaseId, device_ref: DeviceRef) -> bool {
        self.held_for_others(device_ref, lease).is_empty()
    }

    pub(super) fn is_held_for(&self, lease: LeaseId, device_ref: DeviceRef) -> bool {
        let held = self.engine.held_back().get(&device_ref);
        held.is_some_and(|held| held.iter().any(|(of, _)| *of == lease))
    }

    /// Returns the devices that leases share, or of which shares are held back for others, which have so much left
    /// for a lease: beside what is held back for others, all leases but those that are `gone`, and the ended ones that
    /// have not left it if `with_ending`.
    pub(super) fn with_room(
        &self,
        needs: Needs<'_>,
        gone: &BTreeSet<LeaseId>,
        with_ending: bool,
        lease: LeaseId,
    ) -> BTreeSet<DeviceRef> {
        let workers = self.snapshot.workers.iter();
        let workers = workers.filter(|worker| worker.connected && !worker.draining);
        let devices = workers.flat_map(|worker| {
            let devices = (0..).zip(&worker.devices);
            devices.map(move |(index, it)| (device_ref(worker.worker.0, index), it))
        });
        let with_room = devices.filter(|(at, it)| {
            let Some(needed) = needs(&it.device) else {
                return false;
            };
            let ending = self.engine.ending_shares(*at).into_iter();
            let ending = ending.filter(|_| with_ending);
            let rest = it.leases.iter().filter(|(lease, _)| !gone.contains(lease));
            let rest = rest.map(|(_, share)| *share).chain(ending);
            let rest = rest.map(|share| share.map(Share::from));
            let held = self.held_for_others(*at, lease);
            let is_shared = !it.leases.is_empty() || !held.is_empty();
            let before = self.held_before(*at, lease);
            let Some(shares) = rest.chain(before).collect::<Option<Vec<_>>>() else {
                return false;
            };
            let permille: u32 = shares.iter().map(|it| it.permille).sum();
            let bytes: u64 = shares.iter().map(|it| it.memory_bytes).sum();
            let is_enough = permille + needed.permille <= 1000
                && bytes + needed.memory_bytes <= it.device.memory_bytes
                && shares.len() < 16;
            is_enough && is_shared && it.out_of_service.is_none()
        });
        with_room.map(|(at, _)| at).collect()
    }

    /// Returns whether all leases that have a device, or shares of it, are among these.
    pub(super) fn has_only(&self, device_ref: DeviceRef, leases: &BTreeSet<LeaseId>) -> bool {
        let workers = self.snapshot.workers.iter();
        let mut devices = workers
            .filter(|it| it.worker == device_ref.worker)
            .flat_map(|it| it.devices.get(device_ref.index as usize));
        devices.any(|it| it.leases.iter().all(|(lease, _)| leases.contains(lease)))
    }
}
