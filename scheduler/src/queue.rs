//! The queue of pending requests, in order of arrival.
//!
//! First come, first served, with one exception that keeps devices busy (backfill): a
//! request that fits now is granted even if an earlier one does not fit and stays pending.
//! The price is that a large request can starve behind a stream of small ones, since no
//! devices are held back for it. That is accepted as long as all tenants are equal: holding
//! devices back well requires priorities and a limit on the duration of leases; without
//! them, it would only shift the delay from large requests to small ones while devices stay
//! idle.

use std::collections::VecDeque;

use tensord_proto::ids::{ClientId, LeaseId, RequestId};

use crate::device::Demand;
use crate::time::Timestamp;

/// A pending request.
pub(crate) struct QueuedRequest {
    pub(crate) client: ClientId,
    pub(crate) request: RequestId,
    pub(crate) demand: Demand,
    /// The id of the lease if the request is granted.
    pub(crate) lease: LeaseId,
    /// When it arrived.
    pub(crate) since: Timestamp,
    /// The position last reported to the client, or 0 if none was.
    reported_position: u32,
}

impl QueuedRequest {
    pub(crate) fn new(
        client: ClientId,
        request: RequestId,
        demand: Demand,
        lease: LeaseId,
        since: Timestamp,
    ) -> Self {
        Self {
            client,
            request,
            demand,
            lease,
            since,
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
    waiting: VecDeque<QueuedRequest>,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
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

    pub(crate) fn contains(&self, client: ClientId, request: RequestId) -> bool {
        self.waiting
            .iter()
            .any(|waiting| waiting.is(client, request))
    }

    pub(crate) fn push(&mut self, waiting: QueuedRequest) {
        self.waiting.push_back(waiting);
    }

    /// Removes a request and returns whether it was pending.
    pub(crate) fn remove(&mut self, client: ClientId, request: RequestId) -> bool {
        let before = self.len();
        self.waiting.retain(|waiting| !waiting.is(client, request));
        self.len() < before
    }

    pub(crate) fn remove_all_of(&mut self, client: ClientId) {
        self.waiting.retain(|waiting| waiting.client != client);
    }

    /// Removes and returns all requests, in order. The caller pushes back those that stay
    /// pending.
    pub(crate) fn take(&mut self) -> VecDeque<QueuedRequest> {
        std::mem::take(&mut self.waiting)
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
