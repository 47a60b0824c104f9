//! The queue of pending requests.
//!
//! [`crate::tenants`] has the rules for their order. A request that fits now is granted even if an earlier
//! one does not fit and stays pending (backfill), which keeps devices busy. A large request beyond its tenant's
//! guarantee would starve behind a stream of small ones; so it gets a reservation after a while
//! (`engine/reservations.rs`).
//!
//! Whether a request beyond guarantees fits depends on its tenant and its shape alone, and of all that have both
//! in common, the first is next. So the queue has the requests by tenant and shape, and an event costs as much as
//! there are tenants and shapes, however many requests wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Bound;

use tensord_proto::ids::{ClientId, LeaseId, RequestId};

use crate::by_key;
use crate::device::{Demand, Shape};
use crate::tenants::{Guaranteed, TenantName};
use crate::time::Timestamp;
use crate::wait_reason::WaitReason;

/// A pending request.
pub(crate) struct QueuedRequest {
    pub(crate) client: ClientId,
    pub(crate) tenant: TenantName,
    pub(crate) request: RequestId,
    pub(crate) demand: Demand,
    /// Requests with a higher one come before others of the tenant.
    pub(crate) priority: i32,
    /// The id of the lease if the request is granted.
    pub(crate) lease: LeaseId,
    /// When it arrived.
    pub(crate) since: Timestamp,
    /// Rises with each request that was queued.
    number: u64,
    /// The position and the reason last reported to the client.
    reported: Option<(u32, WaitReason)>,
}

impl QueuedRequest {
    pub(crate) fn new(
        client: ClientId,
        tenant: TenantName,
        request: RequestId,
        demand: Demand,
        priority: i32,
        lease: LeaseId,
        since: Timestamp,
    ) -> Self {
        Self {
            client,
            tenant,
            request,
            demand,
            priority,
            lease,
            since,
            // Until it is queued, it comes after all others of its priority.
            number: u64::MAX,
            reported: None,
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        Rank {
            is_spot: self.demand.is_spot,
            priority: Reverse(self.priority),
            number: self.number,
            lease: self.lease,
        }
    }
}

/// The place of a request among those of its tenant: the lowest is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// Whether it comes after all that are not.
    pub(crate) is_spot: bool,
    priority: Reverse<i32>,
    /// Rises with each request of the pool.
    pub(crate) number: u64,
    /// The lease that the request would become.
    pub(crate) lease: LeaseId,
}

/// The requests of a tenant that wait.
#[derive(Debug, Default)]
pub(crate) struct TenantRequests {
    len: usize,
    by_shape: BTreeMap<Shape, BTreeSet<Rank>>,
    /// The next request beyond its guarantee of each shape, other than those for spot leases.
    heads: BTreeMap<Rank, Shape>,
    head_of_shape: BTreeMap<Shape, Rank>,
    /// Rises with each change, and is never that of other requests of the pool.
    version: u64,
}

impl TenantRequests {
    /// Returns the requests of each shape, the next first.
    pub(crate) fn by_shape(&self) -> impl Iterator<Item = (&Shape, &BTreeSet<Rank>)> {
        self.by_shape.iter()
    }

    /// Returns the shape of a demand, if there are requests of it.
    pub(crate) fn shape_of(&self, demand: &Demand) -> Option<&Shape> {
        let known = self.by_shape.get_key_value(&Shape::of(demand));
        known.map(|(shape, _)| shape)
    }

    /// Returns the next request beyond its guarantee of each shape, other than those for spot leases, in order.
    pub(crate) fn heads(&self) -> &BTreeMap<Rank, Shape> {
        &self.heads
    }

    /// Returns a number that is another one whenever these are other requests.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Finds the next request of a shape that is not `guaranteed`.
    fn find_head(&mut self, shape: &Shape, guaranteed: &Guaranteed) {
        let ranks = self.by_shape.get(shape).filter(|_| !shape.is_spot);
        let mut ranks = ranks.into_iter().flatten();
        let head = ranks.find(|it| !guaranteed.contains(it.lease)).copied();
        let before = match head {
            Some(head) => self.head_of_shape.insert(shape.clone(), head),
            None => self.head_of_shape.remove(shape),
        };
        if before != head {
            before.and_then(|before| self.heads.remove(&before));
            self.heads.extend(head.map(|head| (head, shape.clone())));
        }
    }

    /// Returns the number of different shapes.
    pub(crate) fn shape_count(&self) -> usize {
        self.by_shape.len()
    }

    /// Returns the requests of a shape, the next first.
    pub(crate) fn of_shape(&self, shape: &Shape) -> impl Iterator<Item = Rank> {
        self.by_shape.get(shape).into_iter().flatten().copied()
    }

    fn insert(&mut self, shape: Shape, rank: Rank) {
        let of_shape = self.by_shape.entry(shape).or_default();
        self.len += usize::from(of_shape.insert(rank));
    }

    fn remove(&mut self, shape: &Shape, rank: Rank) {
        if let Some(of_shape) = self.by_shape.get_mut(shape) {
            self.len -= usize::from(of_shape.remove(&rank));
            if of_shape.is_empty() {
                self.by_shape.remove(shape);
            }
        }
    }
}

/// The requests of each tenant that wait.
pub(crate) type Requests = BTreeMap<TenantName, TenantRequests>;

/// When a request arrived, and its number, which rises with each request.
pub(crate) type Arrival = (Timestamp, u64);

/// All pending requests. The engine enforces the bounds.
#[derive(Default)]
pub(crate) struct Queue {
    requests: BTreeMap<LeaseId, QueuedRequest>,
    by_client: BTreeMap<(ClientId, RequestId), LeaseId>,
    /// The requests in the order of their arrival.
    by_arrival: BTreeMap<Arrival, LeaseId>,
    by_tenant: Requests,
    /// The number of requests of each shape.
    shapes: BTreeMap<Shape, usize>,
    /// The requests within the guarantees of their tenants, as of the last
    /// [`set_guaranteed`](Self::set_guaranteed).
    guaranteed: Guaranteed,
    /// Whether some of them have come within since the last
    /// [`clear_newly_guaranteed`](Self::clear_newly_guaranteed).
    has_newly_guaranteed: bool,
    /// The number of requests that were queued so far.
    queued: u64,
    /// Whether requests were added or removed, or have another priority, since
    /// [`clear_changed`](Self::clear_changed).
    changed: bool,
    /// Rises whenever requests are added or removed, or have another priority.
    requests_version: u64,
    /// Rises whenever `requests_version` does, or others are within guarantees.
    version: u64,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns the requests, in any order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueuedRequest> {
        self.requests.values()
    }

    /// Returns the request that would become this lease, if it is pending.
    pub(crate) fn get(&self, lease: LeaseId) -> Option<&QueuedRequest> {
        self.requests.get(&lease)
    }

    /// Returns the leases that the requests would become, in the order of their arrival.
    pub(crate) fn in_order_of_arrival(&self) -> Vec<LeaseId> {
        self.by_arrival.values().copied().collect()
    }

    /// Returns the latest of the requests that arrived by this time.
    pub(crate) fn latest_arrival_until(&self, time: Timestamp) -> Option<Arrival> {
        let mut until = self.by_arrival.range(..=(time, u64::MAX));
        until.next_back().map(|(arrival, _)| *arrival)
    }

    /// Returns when the first of the requests arrived that did so after this time; of all if it is `None`.
    pub(crate) fn first_arrival_after(&self, time: Option<Timestamp>) -> Option<Timestamp> {
        let after = match time {
            Some(time) => Bound::Excluded((time, u64::MAX)),
            None => Bound::Unbounded,
        };
        let mut later = self.by_arrival.range((after, Bound::Unbounded));
        later.next().map(|((arrived_at, _), _)| *arrived_at)
    }

    /// Returns the request that arrived first.
    pub(crate) fn oldest(&self) -> Option<&QueuedRequest> {
        let (_, lease) = self.by_arrival.first_key_value()?;
        self.get(*lease)
    }

    /// Returns the requests by tenant and shape.
    pub(crate) fn by_tenant(&self) -> &Requests {
        &self.by_tenant
    }

    /// Returns the shapes of the requests.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = &Shape> {
        self.shapes.keys()
    }

    pub(crate) fn len_of(&self, client: ClientId) -> usize {
        self.of_client(client).count()
    }

    pub(crate) fn len_of_tenant(&self, tenant: &TenantName) -> usize {
        self.by_tenant
            .get(tenant)
            .map_or(0, |requests| requests.len)
    }

    pub(crate) fn contains(&self, client: ClientId, request: RequestId) -> bool {
        self.lease_of(client, request).is_some()
    }

    /// Returns the lease that a request of a client would become, if it is pending.
    pub(crate) fn lease_of(&self, client: ClientId, request: RequestId) -> Option<LeaseId> {
        self.by_client.get(&(client, request)).copied()
    }

    /// Adds a request, behind all others of the same priority.
    pub(crate) fn push(&mut self, waiting: QueuedRequest) {
        self.queued += 1;
        let number = self.queued;
        self.insert(QueuedRequest { number, ..waiting });
    }

    /// Removes a request and returns it, if it was pending.
    pub(crate) fn remove(&mut self, lease: LeaseId) -> Option<QueuedRequest> {
        let removed = self.requests.remove(&lease)?;
        self.changed = true;
        self.requests_version += 1;
        self.version += 1;
        self.by_client.remove(&(removed.client, removed.request));
        self.by_arrival.remove(&(removed.since, removed.number));
        let shape = Shape::of(&removed.demand);
        if let Some(requests) = self.by_tenant.get_mut(&removed.tenant) {
            requests.remove(&shape, removed.rank());
            requests.find_head(&shape, &self.guaranteed);
            requests.version = self.requests_version;
            if requests.len == 0 {
                self.by_tenant.remove(&removed.tenant);
            }
        }
        by_key::decrement(&mut self.shapes, &shape);
        Some(removed)
    }

    /// Removes a request of a client and returns whether it was pending.
    pub(crate) fn cancel(&mut self, client: ClientId, request: RequestId) -> bool {
        let lease = self.lease_of(client, request);
        lease.is_some_and(|lease| self.remove(lease).is_some())
    }

    pub(crate) fn remove_all_of(&mut self, client: ClientId) {
        for lease in self.of_client(client).collect::<Vec<_>>() {
            self.remove(lease);
        }
    }

    /// Changes the priority of the request that would become this lease, if it is pending.
    pub(crate) fn set_priority(&mut self, lease: LeaseId, priority: i32) {
        if let Some(waiting) = self.remove(lease) {
            self.insert(QueuedRequest {
                priority,
                ..waiting
            });
        }
    }

    /// Returns whether the requests or their priorities have changed since
    /// [`clear_changed`](Self::clear_changed).
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    /// Returns a number that rises whenever the requests, their priorities, or those within guarantees change.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns a number that rises whenever the requests or their priorities change.
    pub(crate) fn requests_version(&self) -> u64 {
        self.requests_version
    }

    pub(crate) fn clear_changed(&mut self) {
        self.changed = false;
    }

    /// Returns the requests within the guarantees of their tenants.
    pub(crate) fn guaranteed(&self) -> &Guaranteed {
        &self.guaranteed
    }

    /// Sets the requests within the guarantees of their tenants. Returns whether some were not among them before.
    pub(crate) fn set_guaranteed(&mut self, guaranteed: Guaranteed) -> bool {
        let mut leases = guaranteed.order.iter();
        let has_new = leases.any(|lease| !self.guaranteed.contains(*lease));
        self.has_newly_guaranteed |= has_new;
        self.version += u64::from(self.guaranteed != guaranteed);
        let before = mem::replace(&mut self.guaranteed, guaranteed);
        let differing = before.differing(&self.guaranteed).into_iter();
        let differing = differing.filter_map(|lease| self.requests.get(&lease));
        let shapes = differing.map(|it| (it.tenant.clone(), Shape::of(&it.demand)));
        for (tenant, shape) in shapes.collect::<BTreeSet<_>>() {
            if let Some(requests) = self.by_tenant.get_mut(&tenant) {
                requests.find_head(&shape, &self.guaranteed);
            }
        }
        has_new
    }

    /// Returns whether requests have come within guarantees since the last
    /// [`clear_newly_guaranteed`](Self::clear_newly_guaranteed).
    pub(crate) fn has_newly_guaranteed(&self) -> bool {
        self.has_newly_guaranteed && !self.guaranteed.order.is_empty()
    }

    pub(crate) fn clear_newly_guaranteed(&mut self) {
        self.has_newly_guaranteed = false;
    }

    /// Sets the position and the reason that are reported for a request. Returns whom to report them to if they
    /// are others than before.
    pub(crate) fn set_reported(
        &mut self,
        lease: LeaseId,
        place: (u32, WaitReason),
    ) -> Option<(ClientId, RequestId)> {
        let waiting = self.requests.get_mut(&lease)?;
        let before = waiting.reported.replace(place);
        (before != Some(place)).then_some((waiting.client, waiting.request))
    }

    fn of_client(&self, client: ClientId) -> impl Iterator<Item = LeaseId> {
        let all = (client, RequestId(u64::MIN))..=(client, RequestId(u64::MAX));
        self.by_client.range(all).map(|(_, lease)| *lease)
    }

    fn insert(&mut self, waiting: QueuedRequest) {
        self.changed = true;
        self.requests_version += 1;
        self.version += 1;
        let (lease, shape) = (waiting.lease, Shape::of(&waiting.demand));
        by_key::increment(&mut self.shapes, shape.clone());
        let of_tenant = self.by_tenant.entry(waiting.tenant.clone()).or_default();
        of_tenant.insert(shape.clone(), waiting.rank());
        of_tenant.find_head(&shape, &self.guaranteed);
        of_tenant.version = self.requests_version;
        self.by_client
            .insert((waiting.client, waiting.request), lease);
        self.by_arrival
            .insert((waiting.since, waiting.number), lease);
        let replaced = self.requests.insert(lease, waiting);
        assert!(replaced.is_none(), "lease id {lease} was used twice");
    }
}

#[cfg(test)]
impl Queue {
    /// Asserts that the next requests are those of each tenant and shape.
    pub(crate) fn check_heads(&self) {
        for requests in self.by_tenant.values() {
            let heads = requests.by_shape().filter_map(|(shape, ranks)| {
                let mut beyond = ranks
                    .iter()
                    .filter(|it| !self.guaranteed.contains(it.lease));
                let head = beyond.next().filter(|it| !it.is_spot)?;
                Some((*head, shape.clone()))
            });
            assert_eq!(requests.heads, heads.collect());
        }
    }
}
