//! What tests look at.

use std::collections::BTreeMap;

use tensord_proto::ids::LeaseId;
use tensord_proto::share::DeviceShare;

use super::Engine;
use crate::device::Requirement;
use crate::event::DeviceRef;
use crate::lease::Standing;
use crate::leases::Leases;
use crate::pool::Holds;
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

impl Engine {
    /// Returns the leases that made room since the last call, each with the request or lease for which it did.
    pub(crate) fn take_made_room(&mut self) -> Vec<(LeaseId, LeaseId)> {
        std::mem::take(&mut self.made_room)
    }

    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Asserts that the indexes are right, and that no keeper would be another one if all were chosen again.
    pub(crate) fn check_indexes(&self) {
        self.leases.check_index();
        self.pool.check_index();
        self.check_borrowed();
        self.queue.check_heads();
        for worker in self.pool.ids() {
            let kept = self.pool.get(worker).map(|worker| worker.kept());
            assert_eq!(kept, Some(self.leases.index().kept(worker)), "{worker}");
        }
        for (id, lease) in self.leases.iter() {
            let is_running = lease.standing == Standing::Running;
            let is_due = self.unstable_keepers.is_due(id, self.now);
            if !lease.durability.is_durable() || !is_running || is_due {
                continue;
            }
            for source in lease.workers() {
                let Some(chosen) = self.choose_keeper(id, source) else {
                    continue;
                };
                let chosen = chosen.keeper.map(|keeper| keeper.worker);
                let keeper = lease.keepers.get(&source).map(|keeper| keeper.worker);
                assert_eq!(chosen, keeper, "keeper of {id} at {source}");
            }
        }
    }

    /// Returns what devices must be like for leases to go on that wait and come before requests for which spot leases
    /// make room.
    pub(crate) fn needed_before_spot(&self) -> Vec<Requirement> {
        let waiting = self.leases.iter().filter(|(_, lease)| !lease.is_spot);
        waiting.flat_map(|(id, _)| self.needed_by(id)).collect()
    }

    /// Returns whether a request of a tenant with a limit can count on devices.
    pub(crate) fn counts_on_devices(&self, request: LeaseId) -> bool {
        let tenant = self.queue.get(request).map(|it| &it.tenant);
        tenant.is_some_and(|tenant| self.counting.contains(tenant, request))
    }

    /// Returns what is held back of devices, each with the leases that wait for more.
    pub(crate) fn held_back(&self) -> &Holds {
        self.pool.held_back()
    }

    /// Returns what ended leases had of a device that have not left it.
    pub(crate) fn ending_shares(&self, device_ref: DeviceRef) -> Vec<Option<DeviceShare>> {
        self.pool.ending_shares(device_ref)
    }

    /// Returns what counts of the shares that a tenant has had in the order of the requests.
    pub(crate) fn ranked_past_share(&self, tenant: &TenantName) -> f64 {
        self.past.of(tenant, self.ranked_at)
    }

    /// Returns whether the past counts otherwise now than when the requests were put in order last, as the devices
    /// of the pool have changed since.
    pub(crate) fn is_past_newer_than_order(&self) -> bool {
        self.past.is_set_after(self.ranked_at)
    }

    pub(crate) fn used_for_spot(&self) -> &BTreeMap<TenantName, Amounts> {
        self.leases.index().used_for_spot()
    }

    pub(crate) fn has_spot(&self) -> bool {
        self.leases.index().has_spot()
    }

    pub(crate) fn reclaim_at(&self) -> Option<Timestamp> {
        self.reclaim_at
    }

    pub(crate) fn idle_at(&self) -> Option<Timestamp> {
        self.idle_at
    }

    pub(crate) fn attached_clients(&self) -> usize {
        self.clients.len()
    }
}
