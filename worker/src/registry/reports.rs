//! Reports to the scheduler: which leases hold devices, which grants have ended, what is
//! left of them, and how the devices are used.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
};

use tensord_proto::{
    grant::GrantNumber,
    ids::LeaseId,
    v1::{DeviceGrant, DeviceUsage, HeldDevice, OutOfService},
};

use super::Registry;
use crate::{device_slot::DeviceSlot, locks::lock};

impl Registry {
    /// Returns which devices leases hold here, including devices that are not released from
    /// a lease that has ended.
    pub(crate) fn held_devices(&self) -> Vec<HeldDevice> {
        let mut sessions = self.all_sessions();
        sessions.retain(|session| !session.is_torn_down());
        let left = sessions.iter();
        let left = left.map(|s| (s.grant.lease, s.grant.device_index));
        let ending = (0..)
            .zip(&self.device_slots)
            .flat_map(|(index, device_slot)| {
                let ending = device_slot.ending().into_iter();
                ending.map(move |lease| (lease, index))
            });
        let left: BTreeSet<_> = left.chain(ending).collect();
        let admission = lock(&self.admission);
        let held: BTreeMap<_, _> = admission
            .active_claims()
            .map(|claim| ((claim.lease, claim.device), claim.grant))
            .collect();
        let ended: BTreeMap<_, _> = admission.ended().collect();
        drop(admission);
        let over = left.into_iter().filter(|left| !held.contains_key(left));
        let over = over.map(|(lease, index)| {
            let grant = ended.get(&index).copied().unwrap_or_default();
            ((lease, index), grant, true)
        });
        let held = held.iter().map(|(&of, &grant)| (of, grant, false));
        let device =
            |((lease, device_index), grant, ended): ((LeaseId, u32), GrantNumber, bool)| {
                HeldDevice {
                    lease_id: lease.0,
                    device_index,
                    grant: Some(grant.into()),
                    ended,
                }
            };
        held.chain(over).map(device).collect()
    }

    /// Returns, for each device, the number up to which all its grants have ended.
    pub(crate) fn ended_grants(&self) -> Vec<DeviceGrant> {
        let device = |(device_index, grant): (u32, GrantNumber)| DeviceGrant {
            device_index,
            grant: Some(grant.into()),
        };
        lock(&self.admission).ended().map(device).collect()
    }

    /// Returns the devices that are not released from a lease that was ended.
    pub(crate) fn unreleased_devices(&self, lease: LeaseId) -> Vec<u32> {
        let device_slots = (0..).zip(&self.device_slots);
        let busy = device_slots.filter(|(_, device_slot)| device_slot.is_ending(lease));
        busy.map(|(index, _)| index).collect()
    }

    /// Returns the devices that are out of service, with the reasons.
    pub(crate) fn out_of_service(&self) -> Vec<OutOfService> {
        let out = |(device_index, device_slot): (u32, &DeviceSlot)| {
            let reason = device_slot.out_of_service()?;
            Some(OutOfService {
                device_index,
                reason,
            })
        };
        (0..).zip(&self.device_slots).filter_map(out).collect()
    }

    /// Waits until there is something to report to the scheduler. Returns the leases from
    /// which devices were released since the last call.
    pub(crate) async fn wait_for_reports(&self) -> Vec<LeaseId> {
        self.reports.notified().await;
        std::mem::take(&mut *lock(&self.released))
    }

    /// Returns the usage of each device, in order.
    pub(crate) fn usage(&self) -> Vec<DeviceUsage> {
        let mut usage: Vec<DeviceUsage> = self
            .device_slots
            .iter()
            .map(|device_slot| DeviceUsage {
                sessions: 0,
                live_bytes: device_slot.device_context.memory.live_bytes(),
                reserved_bytes: device_slot.reserved_bytes(),
                ops_executed: device_slot.device_context.ops.load(Ordering::Relaxed),
            })
            .collect();
        for session in self
            .sessions
            .iter()
            .filter(|session| !session.is_torn_down())
        {
            usage[session.grant.device_index as usize].sessions += 1;
        }
        usage
    }
}
