//! Requests that wait: the order in which they get devices, and their grants and refusals.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::reservations::Reservations;
use crate::command::Command;
use crate::device::{Demand, DeviceSpec, Shape};
use crate::options::RequestOrder;
use crate::pool::Feasibility;
use crate::queue::{QueuedRequest, Rank};
use crate::reason::{EndReason, RefuseReason};
use crate::tenants::{Amounts, Guaranteed, Kinds, NOTHING, TenantLimit, TenantName, order};
use crate::time::Timestamp;
use crate::wait_reason::WaitReason;

/// If more requests wait than these, their positions are reported every
/// [`Options::position_interval`](crate::Options::position_interval) only.
const MAX_REPORTED_AT_ONCE: usize = 64;

/// After this time, what tenants have had counts anew in the order, although nothing else has changed.
pub(super) const RANK_INTERVAL: Duration = Duration::from_secs(10);

/// The next request of a tenant, in the order in which these get devices: whether it is for a spot lease, the
/// tenant's share, the number of the request, the tenant, and the lease that the request would become.
type Next = (bool, u64, u64, TenantName, LeaseId);

/// A tenant may have this many times as many requests in the queue as there is room for more. So a single
/// tenant can use three quarters of the queue, and however many tenants there are, a new one finds room
/// (dynamic thresholds: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet
/// Switches", IEEE/ACM Transactions on Networking, 1998).
const QUEUE_FACTOR: usize = 3;

impl Engine {
    /// Grants, refuses or queues the request. A repeated request that is already queued
    /// changes nothing.
    pub(super) fn request(&mut self, mut queued: QueuedRequest) {
        let order = self.options.order;
        if order != RequestOrder::Fair {
            (queued.priority, queued.demand.is_spot) = (0, false);
        }
        let (client, request) = (queued.client, queued.request);
        if self.queue.contains(client, request) {
            return;
        }
        if queued.demand.devices == 0 {
            return self.refuse(client, request, RefuseReason::NoDevices);
        }
        self.find_reservations();
        // Those that wait would not fit, so this one need not be behind them unless the order or a reservation
        // demands it.
        let is_behind = match order {
            RequestOrder::Fair => self.is_any_reserved(&queued.demand),
            RequestOrder::Backfill => false,
            RequestOrder::Fifo => !self.queue.is_empty(),
        };
        let undecided = match is_behind {
            true => Some(queued),
            false => self.try_decide(queued),
        };
        let Some(waiting) = undecided else {
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

    /// Changes the priority of a request that waits, if priorities count.
    pub(super) fn set_priority(&mut self, lease: LeaseId, priority: i32) {
        if self.options.order == RequestOrder::Fair {
            self.queue.set_priority(lease, priority);
        }
    }

    /// Ends a lease, or refuses a request that waits.
    pub(super) fn end_by_administrator(&mut self, lease: LeaseId) {
        let Some(waiting) = self.queue.remove(lease) else {
            return self.end_lease(lease, Some(EndReason::ByAdministrator));
        };
        self.refuse(
            waiting.client,
            waiting.request,
            RefuseReason::ByAdministrator,
        );
    }

    /// Grants or refuses every pending request that can be decided now.
    pub(super) fn process_queue(&mut self) {
        if self.queue.is_empty() {
            self.queue.set_guaranteed(Guaranteed::default());
            self.guaranteed_basis = None;
            self.reservations = Reservations::default();
            self.reservations_basis = None;
            self.decided_reservations = Reservations::default();
            self.positions_changed = false;
            return;
        }
        self.find_reservations();
        let is_due = self.has_changed() || self.reservations != self.decided_reservations;
        self.pool.clear_changed();
        if is_due || self.now >= self.ranked_at + RANK_INTERVAL {
            self.ranked_at = self.now;
            self.positions_changed = true;
            self.find_reservations();
        }
        if is_due || self.reservations != self.decided_reservations {
            self.decide_all();
        }
    }

    /// Reports changed positions and reasons to the clients of the requests that wait: at once if there are few requests,
    /// and otherwise from time to time, as each grant changes the positions of all.
    pub(super) fn report_positions(&mut self) {
        let is_due = self.positions_due_at().is_some_and(|at| at <= self.now);
        if !is_due {
            return;
        }
        (self.positions_changed, self.positions_reported_at) = (false, self.now);
        let order = self.queue_order();
        let places: Vec<_> = (1..).zip(self.wait_reasons(&order)).collect();
        for (lease, place) in order.into_iter().zip(places) {
            let Some((client, request)) = self.queue.set_reported(lease, place) else {
                continue;
            };
            let (position, reason) = place;
            self.commands.push(Command::Queued {
                client,
                request,
                position,
                reason,
            });
        }
    }

    /// Returns why each of these requests waits.
    fn wait_reasons(&self, requests: &[LeaseId]) -> Vec<WaitReason> {
        // Of most, it depends on the tenant, the shape, and the reservations of the tenant and its requests that can
        // count on devices before it.
        let mut known = BTreeMap::<(&TenantName, Shape, usize, usize), WaitReason>::new();
        let waiting = requests.iter().filter_map(|lease| self.queue.get(*lease));
        let reasons = waiting.map(|waiting| {
            let lease = waiting.lease;
            let before = self.own_reservations_before(waiting);
            let counting = self.counting_before(&waiting.tenant, waiting.rank());
            let shape = Shape::of(&waiting.demand);
            let key = (&waiting.tenant, shape, before, counting);
            let is_guaranteed = self.queue.guaranteed().contains(lease);
            if is_guaranteed || self.reservation_of(lease).is_some() {
                return match (self.is_at_limit(waiting), is_guaranteed) {
                    (true, _) => WaitReason::TenantLimit,
                    (false, true) => WaitReason::Guaranteed,
                    (false, false) => WaitReason::HasReservation,
                };
            }
            let reason = known.entry(key);
            *reason.or_insert_with(|| match self.is_at_limit(waiting) {
                true => WaitReason::TenantLimit,
                false if self.reservation_before(waiting).is_some() => WaitReason::Reserved,
                false => WaitReason::TooFewFree,
            })
        });
        reasons.collect()
    }

    /// Returns when positions are to be reported, if some may have changed.
    pub(super) fn positions_due_at(&self) -> Option<Timestamp> {
        let is_short = self.queue.len() <= MAX_REPORTED_AT_ONCE;
        let at = match is_short {
            true => self.now,
            false => self.positions_reported_at + self.options.position_interval,
        };
        let is_waiting = self.positions_changed && !self.queue.is_empty();
        is_waiting.then_some(at)
    }

    /// Returns the requests that wait, in the order in which they get devices if there are enough for each.
    pub(super) fn queue_order(&self) -> Vec<LeaseId> {
        if self.options.order != RequestOrder::Fair {
            return self.queue.in_order_of_arrival();
        }
        let (used, pool) = (self.used_by_tenants(), self.pool.amounts());
        let (requests, guaranteed) = (self.queue.by_tenant(), self.queue.guaranteed());
        let shares = self.shares(&pool);
        let spot = self.leases.index().used_for_spot();
        order(shares, used, spot, &self.kinds(), requests, guaranteed)
    }

    /// Returns whether, since the requests were decided last, something has changed on which their order or
    /// the verdict on one of them depends.
    pub(super) fn has_changed(&self) -> bool {
        let version = self.leases.index().used_version();
        let is_as_decided = self.decided_version == Some(version);
        self.pool.is_changed() || self.queue.is_changed() || !is_as_decided
    }

    /// Returns the kinds of devices that requests of each shape could get, with what one counts as at most.
    pub(super) fn kinds(&self) -> Kinds<'_> {
        let shapes = self.queue.shapes();
        shapes
            .map(|shape| (shape, self.pool.kinds_for(shape)))
            .collect()
    }

    /// Grants or refuses every pending request that can be decided now.
    fn decide_all(&mut self) {
        self.refuse_impossible();
        self.grant_guaranteed();
        match self.options.order {
            RequestOrder::Fair | RequestOrder::Backfill => {
                self.find_reservations();
                loop {
                    self.pool.clear_changed();
                    self.grant_fitting();
                    // A request that is not within a guarantee any more may get a reservation, and what was
                    // held back for a request and is not used by it may do for another one.
                    self.grant_newly_guaranteed();
                    let mut may_fit = self.find_reservations();
                    if self.grant_with_held_back() {
                        self.grant_newly_guaranteed();
                        self.find_reservations();
                        may_fit = true;
                    }
                    if !may_fit && !self.pool.is_changed() {
                        break;
                    }
                }
            }
            RequestOrder::Fifo => {
                while self.grant_oldest() {}
                self.find_guaranteed();
            }
        }
        self.decided_reservations.clone_from(&self.reservations);
        self.queue.clear_changed();
        self.decided_version = Some(self.leases.index().used_version());
    }

    /// Grants the request that arrived first if it fits. Returns whether it does.
    fn grant_oldest(&mut self) -> bool {
        let oldest = self.queue.oldest().map(|it| it.lease);
        oldest.is_some_and(|lease| self.try_grant(lease))
    }

    /// Grants a request that has all the devices which it needs with those that are held back for it. Returns
    /// whether there is one.
    fn grant_with_held_back(&mut self) -> bool {
        let holders: BTreeSet<_> = self.pool.holders().collect();
        let entitled = match holders.is_empty() {
            true => Vec::new(),
            false => self.entitled_requests(),
        };
        let mut holding = entitled
            .into_iter()
            .filter(|it| holders.contains(&it.lease));
        holding.any(|it| self.try_grant(it.lease))
    }

    /// Grants requests beyond guarantees, as far as there are devices: each time the next of the tenant that
    /// has the smallest share of those with a request that fits, or of the one with the earliest such request
    /// if the order is by arrival.
    fn grant_fitting(&mut self) {
        let pool = self.pool.amounts();
        let mut fitting: BTreeSet<_> = self.queue.shapes().cloned().collect();
        fitting.retain(|shape| self.has_free(shape));
        let mut next = self.next_of_tenants(&pool, &fitting);
        while let Some((.., tenant, lease)) = next.pop_first() {
            let is_granted = self.try_grant(lease);
            let has_other_reservations = self.find_reservations();
            let before = fitting.len();
            fitting.retain(|shape| self.has_free(shape));
            if fitting.len() < before || has_other_reservations {
                // The next of other tenants may be others now.
                next = self.next_of_tenants(&pool, &fitting);
                continue;
            }
            let head = self.next_of(&tenant, &pool, &fitting);
            let is_other = |(.., other): &Next| is_granted || *other != lease;
            next.extend(head.filter(is_other));
        }
    }

    /// Returns the next request of each tenant, of these shapes, that is beyond its guarantee and fits.
    fn next_of_tenants(&self, pool: &Amounts, shapes: &BTreeSet<Shape>) -> BTreeSet<Next> {
        if shapes.is_empty() {
            return BTreeSet::new();
        }
        let tenants = self.queue.by_tenant().keys();
        let heads = tenants.filter_map(|tenant| self.next_of(tenant, pool, shapes));
        heads.collect()
    }

    /// Returns whether enough devices are free for a request of this shape of any tenant.
    pub(super) fn has_free(&self, shape: &Shape) -> bool {
        self.pool.free_for(shape, |_| true) >= shape.devices as usize
    }

    /// Returns the next request of a tenant, of these shapes, that is beyond its guarantee and fits.
    fn next_of(
        &self,
        tenant: &TenantName,
        pool: &Amounts,
        shapes: &BTreeSet<Shape>,
    ) -> Option<Next> {
        let requests = self.queue.by_tenant().get(tenant)?;
        let (used, limit) = (self.used_by(tenant), &self.policy_of(tenant).limit);
        let guaranteed = self.queue.guaranteed();
        let is_allowed = |rank: Rank, shape: &Shape| {
            let counts = self.counts_for(tenant, rank);
            let may_have = |device: &DeviceSpec| {
                limit.allows(&counts, device, shape) && self.may_pass(rank.lease, shape, device)
            };
            self.pool.free_for(shape, may_have) >= shape.devices as usize
        };
        let head = |shape: &Shape| {
            let mut of_shape = requests.of_shape(shape);
            let first = of_shape.find(|rank| !guaranteed.contains(rank.lease));
            first.filter(|rank| is_allowed(*rank, shape))
        };
        // There may be many shapes that fit, and many of the tenant.
        let first = match shapes.len() <= requests.shape_count() {
            true => shapes.iter().filter_map(head).min(),
            false => {
                let own = requests.by_shape().map(|(shape, _)| shape);
                let fitting = own.filter(|shape| shapes.contains(*shape));
                fitting.filter_map(head).min()
            }
        }?;
        let share = match self.options.order {
            RequestOrder::Fair => {
                self.shares(pool)
                    .key(tenant, &guaranteed.with(used, tenant), self.spot_by(tenant))
            }
            RequestOrder::Backfill | RequestOrder::Fifo => 0,
        };
        Some((
            first.is_spot,
            share,
            first.number,
            tenant.clone(),
            first.lease,
        ))
    }

    /// Grants the request that would become this lease if it fits. Returns whether it does.
    pub(super) fn try_grant(&mut self, lease: LeaseId) -> bool {
        let Some(waiting) = self.queue.get(lease) else {
            return false;
        };
        let Feasibility::Fits(devices) = self.assess(waiting) else {
            return false;
        };
        let waiting = self.queue.remove(lease);
        waiting
            .map(|waiting| self.grant(waiting, devices))
            .is_some()
    }

    /// Refuses the requests that could never be granted.
    fn refuse_impossible(&mut self) {
        let shapes = self.queue.shapes();
        let is_impossible =
            |shape: &&Shape| self.pool.offers(shape, |_| true) < shape.devices as usize;
        let impossible = shapes.filter(is_impossible);
        let impossible: BTreeSet<_> = impossible.collect();
        let mut refused = BTreeSet::new();
        for (tenant, requests) in self.queue.by_tenant() {
            let limit = &self.policy_of(tenant).limit;
            let is_limited = *limit != TenantLimit::default();
            if !is_limited && impossible.is_empty() {
                continue;
            }
            for (shape, ranks) in requests.by_shape() {
                if impossible.contains(shape) || is_limited && !self.is_within_limit(shape, limit) {
                    refused.extend(ranks.iter().map(|rank| (rank.number, rank.lease)));
                }
            }
        }
        for (_, lease) in refused {
            if let Some(waiting) = self.queue.remove(lease) {
                self.try_decide(waiting);
            }
        }
    }

    /// Returns whether a tenant with this limit may have as many devices as requests of this shape need, if it
    /// has no others.
    fn is_within_limit(&self, demand: &Demand, limit: &TenantLimit) -> bool {
        let may_have = |device: &DeviceSpec| limit.allows(&NOTHING, device, demand);
        self.pool.offers(demand, may_have) >= demand.devices as usize
    }

    /// Returns whether a request can be granted, and with which devices.
    fn assess(&self, waiting: &QueuedRequest) -> Feasibility {
        let counts = self.counts_for(&waiting.tenant, waiting.rank());
        let may_get = self.may_get(waiting, &counts);
        self.pool.assess(waiting.lease, &waiting.demand, may_get)
    }

    /// Returns a check of whether a request, whose tenant has `used`, may get a device if it is free: the device
    /// meets the demand, and neither the limit of the tenant nor a reservation is against it.
    pub(super) fn may_get<'a>(
        &'a self,
        request: &'a QueuedRequest,
        used: &'a Amounts,
    ) -> impl Fn(&DeviceSpec) -> bool + 'a {
        let (lease, demand) = (request.lease, &request.demand);
        let limit = &self.policy_of(&request.tenant).limit;
        move |device| {
            let is_within_limit = limit.allows(used, device, demand);
            is_within_limit && demand.accepts(device) && self.may_pass(lease, demand, device)
        }
    }

    /// Grants or refuses a request, or returns it if it has to wait.
    fn try_decide(&mut self, waiting: QueuedRequest) -> Option<QueuedRequest> {
        let (client, request, demand) = (waiting.client, waiting.request, &waiting.demand);
        match self.assess(&waiting) {
            Feasibility::Fits(lease_devices) => self.grant(waiting, lease_devices),
            Feasibility::Never => {
                let (demand, pool) = (demand.clone(), self.pool.inventory());
                let reason = RefuseReason::Unsatisfiable { demand, pool };
                self.refuse(client, request, reason);
            }
            Feasibility::Busy => {
                let limit = &self.policy_of(&waiting.tenant).limit;
                if self.is_within_limit(demand, limit) {
                    return Some(waiting);
                }
                let (demand, limit) = (demand.clone(), limit.clone());
                self.refuse(client, request, RefuseReason::TenantLimit { demand, limit });
            }
        }
        None
    }
}
