//! The queue of pending requests.
//!
//! [`crate::tenants`] has the rules for their order. A request that fits now is granted even if an earlier
//! one does not fit and stays pending (backfill), which keeps devices busy. The price is that a large request
//! beyond its tenant's guarantee can starve behind a stream of small ones, since no devices are held back for
//! it. To hold devices back well requires limits on the duration of leases, or leases that can be suspended;
//! without these, it would only shift the delay from large requests to small ones while devices stay idle.

use tensord_proto::ids::{ClientId, LeaseId, RequestId};

use crate::device::Demand;
use crate::tenants::{Place, TenantName};
use crate::time::Timestamp;

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
    /// Whether it is within its tenant's guarantee, as of the last order.
    pub(crate) is_guaranteed: bool,
    /// Rises with each request that was queued.
    pub(crate) number: u64,
    /// The position last reported to the client, or 0 if none was.
    reported_position: u32,
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
            is_guaranteed: false,
            number: 0,
            reported_position: 0,
        }
    }

    fn is(&self, client: ClientId, request: RequestId) -> bool {
        self.client == client && self.request == request
    }
}

/// All pending requests. The engine enforces the bounds.
#[derive(Default)]
pub(crate) struct Queue {
    /// In the order in which they get devices.
    waiting: Vec<QueuedRequest>,
    /// The number of requests that were queued so far.
    queued: u64,
    /// Whether requests were added or removed, or have another priority, since
    /// [`clear_changed`](Self::clear_changed).
    changed: bool,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the client of each request, in queue order.
    pub(crate) fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.waiting.iter().map(|waiting| waiting.client)
    }

    /// Returns the requests, in queue order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueuedRequest> {
        self.waiting.iter()
    }

    pub(crate) fn len_of(&self, client: ClientId) -> usize {
        self.waiting
            .iter()
            .filter(|waiting| waiting.client == client)
            .count()
    }

    pub(crate) fn len_of_tenant(&self, tenant: &TenantName) -> usize {
        let waiting = self.waiting.iter();
        waiting.filter(|waiting| waiting.tenant == *tenant).count()
    }

    pub(crate) fn contains(&self, client: ClientId, request: RequestId) -> bool {
        self.waiting
            .iter()
            .any(|waiting| waiting.is(client, request))
    }

    /// Adds a request, behind all others until the next [`arrange`](Self::arrange).
    pub(crate) fn push(&mut self, waiting: QueuedRequest) {
        self.queued += 1;
        self.changed = true;
        let number = self.queued;
        self.waiting.push(QueuedRequest { number, ..waiting });
    }

    /// Removes a request and returns whether it was pending.
    pub(crate) fn remove(&mut self, client: ClientId, request: RequestId) -> bool {
        let before = self.len();
        self.waiting.retain(|waiting| !waiting.is(client, request));
        let is_removed = self.len() < before;
        self.changed |= is_removed;
        is_removed
    }

    /// Changes the priority of the request that would become this lease, if it is pending.
    pub(crate) fn set_priority(&mut self, lease: LeaseId, priority: i32) {
        let mut waiting = self.waiting.iter_mut();
        if let Some(waiting) = waiting.find(|waiting| waiting.lease == lease) {
            waiting.priority = priority;
            self.changed = true;
        }
    }

    pub(crate) fn remove_all_of(&mut self, client: ClientId) {
        let before = self.len();
        self.waiting.retain(|waiting| waiting.client != client);
        self.changed |= self.len() < before;
    }

    /// Returns whether the requests or their priorities have changed since
    /// [`clear_changed`](Self::clear_changed).
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    pub(crate) fn clear_changed(&mut self) {
        self.changed = false;
    }

    /// Removes and returns all requests, in order. The caller puts back those that stay pending, in the same
    /// order.
    pub(crate) fn take(&mut self) -> Vec<QueuedRequest> {
        std::mem::take(&mut self.waiting)
    }

    /// Puts back a request that was taken.
    pub(crate) fn put_back(&mut self, waiting: QueuedRequest) {
        self.waiting.push(waiting);
    }

    /// Puts the requests in this order, which has each of them once.
    pub(crate) fn arrange(&mut self, order: &[Place]) {
        let mut waiting: Vec<_> = self.take().into_iter().map(Some).collect();
        let arranged = order.iter().filter_map(|place| {
            let request = waiting.get_mut(place.index)?.take()?;
            let is_guaranteed = place.is_guaranteed;
            Some(QueuedRequest {
                is_guaranteed,
                ..request
            })
        });
        self.waiting = arranged.collect();
    }

    /// Returns the requests whose position has changed since it was last reported, with the
    /// new position, and records it as reported.
    pub(crate) fn moved(&mut self) -> impl Iterator<Item = (&QueuedRequest, u32)> {
        (1..)
            .zip(&mut self.waiting)
            .filter_map(|(position, waiting)| {
                let moved = waiting.reported_position != position;
                waiting.reported_position = position;
                moved.then_some((&*waiting, position))
            })
    }
}
