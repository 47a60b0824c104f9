//! Requests that wait: the order in which they get devices, and their grants and refusals.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::command::Command;
use crate::device::Durability;
use crate::pool::Feasibility;
use crate::queue::QueuedRequest;
use crate::reason::{EndReason, RefuseReason};
use crate::tenants::{Amounts, Ranked, TenantName, order};

/// A tenant may have this many times as many requests in the queue as there is room for more. So a single
/// tenant can use three quarters of the queue, and however many tenants there are, a new one finds room
/// (dynamic thresholds: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet
/// Switches", IEEE/ACM Transactions on Networking, 1998).
const QUEUE_FACTOR: usize = 3;

impl Engine {
    /// Grants, refuses or queues the request. A repeated request that is already queued
    /// changes nothing.
    pub(super) fn request(&mut self, queued: QueuedRequest) {
        let (client, request) = (queued.client, queued.request);
        if self.queue.contains(client, request) {
            return;
        }
        if queued.demand.devices == 0 {
            return self.refuse(client, request, RefuseReason::NoDevices);
        }
        // Those that wait would not fit, so this one need not be behind them.
        let mut used = self.used_by_tenants().clone();
        let Some(waiting) = self.try_decide(queued, &mut used) else {
            return;
        };
        let max = self.options.max_waiting_per_client;
        if self.queue.len_of(client) >= max {
            return self.refuse(client, request, RefuseReason::ClientLimit { max });
        }
        let max = self.options.max_waiting;
        if self.queue.len() >= max {
            return self.refuse(client, request, RefuseReason::PoolLimit { max });
        }
        let of_tenant = self.queue.len_of_tenant(&waiting.tenant);
        if of_tenant >= QUEUE_FACTOR * (max - self.queue.len()) {
            let reason = RefuseReason::TenantQueueLimit { waiting: of_tenant };
            return self.refuse(client, request, reason);
        }
        self.queue.push(waiting);
    }

    /// Ends a lease, or refuses a request that waits.
    pub(super) fn end_by_administrator(&mut self, lease: LeaseId) {
        let waiting = self.queue.iter().find(|waiting| waiting.lease == lease);
        let waiting = waiting.map(|waiting| (waiting.client, waiting.request));
        let Some((client, request)) = waiting else {
            return self.end_lease(lease, Some(EndReason::ByAdministrator));
        };
        self.queue.remove(client, request);
        self.refuse(client, request, RefuseReason::ByAdministrator);
    }

    /// Grants or refuses every pending request that can be decided now.
    pub(super) fn process_queue(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let used = self.used_by_tenants().clone();
        let is_due = self.has_changed(&used);
        self.pool.clear_changed();
        self.queue.clear_changed();
        if is_due {
            self.decide_all(used);
        }
    }

    /// Reports changed positions to the clients of the requests that wait.
    pub(super) fn report_positions(&mut self) {
        for (waiting, position) in self.queue.moved() {
            let QueuedRequest {
                client, request, ..
            } = *waiting;
            self.commands.push(Command::Queued {
                client,
                request,
                position,
            });
        }
    }

    /// Grants or refuses every pending request that can be decided now, of tenants that have `used`.
    fn decide_all(&mut self, mut used: BTreeMap<TenantName, Amounts>) {
        self.arrange_queue(&used);
        let count = self.queue.len();
        // A grant only takes devices away, so one pass is enough.
        for waiting in self.queue.take() {
            if let Some(waiting) = self.try_decide(waiting, &mut used) {
                self.queue.put_back(waiting);
            }
        }
        if self.queue.len() < count {
            // The shares are others now.
            self.arrange_queue(&used);
        }
        self.decided_for = Some(used);
    }

    /// Puts the requests in order if something has changed on which the order depends.
    pub(super) fn arrange_if_changed(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let used = self.used_by_tenants().clone();
        if self.has_changed(&used) {
            self.arrange_queue(&used);
        }
    }

    /// Returns whether, since the requests were decided last, something has changed on which their order or
    /// the verdict on one of them depends. The tenants have `used` now.
    fn has_changed(&self, used: &BTreeMap<TenantName, Amounts>) -> bool {
        let is_as_decided = self.decided_for.as_ref() == Some(used);
        self.pool.is_changed() || self.queue.is_changed() || !is_as_decided
    }

    /// Puts the requests in the order in which they get devices, if the tenants have `used`.
    fn arrange_queue(&mut self, used: &BTreeMap<TenantName, Amounts>) {
        // Many requests are for the same kinds.
        let mut kinds = BTreeMap::<_, BTreeSet<&str>>::new();
        let pool = &self.pool;
        let ranked = self.queue.iter().map(|waiting| {
            let demand = &waiting.demand;
            let is_exact = demand.durability == Durability::Exact;
            let key = (&demand.kind, demand.memory_bytes, is_exact);
            let kinds = kinds.entry(key).or_insert_with(|| pool.kinds_for(demand));
            Ranked {
                tenant: &waiting.tenant,
                priority: waiting.priority,
                number: waiting.number,
                demand,
                kinds: kinds.clone(),
            }
        });
        let ranked: Vec<_> = ranked.collect();
        let places = order(&self.policy, used, &self.pool.amounts(), &ranked);
        self.queue.arrange(&places);
    }

    /// Grants or refuses a request, or returns it if it has to wait. Adds what is granted to what the tenants
    /// have `used`.
    fn try_decide(
        &mut self,
        waiting: QueuedRequest,
        used: &mut BTreeMap<TenantName, Amounts>,
    ) -> Option<QueuedRequest> {
        let (client, request, demand) = (waiting.client, waiting.request, &waiting.demand);
        let none = Amounts::default();
        let of_tenant = used.get(&waiting.tenant).unwrap_or(&none);
        let limit = &self.policy_of(&waiting.tenant).limit;
        let allows = |used: &Amounts, device: &_| limit.allows(used, device, demand.devices);
        let verdict = self
            .pool
            .assess(waiting.lease, demand, |device| allows(of_tenant, device));
        match verdict {
            Feasibility::Fits(lease_devices) => {
                let devices = lease_devices.iter().filter_map(|it| self.pool.device(*it));
                let granted = Amounts::of(devices);
                used.entry(waiting.tenant.clone())
                    .or_default()
                    .add(&granted);
                self.grant(waiting, lease_devices);
            }
            Feasibility::Never => {
                let (demand, pool) = (demand.clone(), self.pool.inventory());
                let reason = RefuseReason::Unsatisfiable { demand, pool };
                self.refuse(client, request, reason);
            }
            Feasibility::Busy => {
                let possible = self.pool.offers(demand, |device| allows(&none, device));
                if possible >= demand.devices as usize {
                    return Some(waiting);
                }
                let (demand, limit) = (demand.clone(), limit.clone());
                self.refuse(client, request, RefuseReason::TenantLimit { demand, limit });
            }
        }
        None
    }
}
