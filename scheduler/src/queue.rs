//! The requests that wait, in order of arrival.
//!
//! First come, first served, with one exception that keeps devices busy: a
//! request that fits now is granted even if an earlier one, which does not
//! fit, has to go on waiting. The price is that a large request can starve
//! behind a stream of small ones, since nothing is held back for it. That is
//! accepted as long as all tenants are equal: to hold devices back well takes
//! priorities and a limit on how long leases last, and to do it without them
//! only moves the harm from those who wait for much to those who wait for
//! little while devices stand idle.

use std::collections::VecDeque;

use tensord_proto::ids::{ClientId, LeaseId, RequestId};

use crate::device::Demand;

/// A request that waits.
pub(crate) struct QueuedRequest {
    pub(crate) client: ClientId,
    pub(crate) request: RequestId,
    pub(crate) demand: Demand,
    /// The id of the lease it may become.
    pub(crate) lease: LeaseId,
    /// The position its client knows, 0 for none.
    reported_position: u32,
}

impl QueuedRequest {
    pub(crate) fn new(
        client: ClientId,
        request: RequestId,
        demand: Demand,
        lease: LeaseId,
    ) -> Self {
        Self {
            client,
            request,
            demand,
            lease,
            reported_position: 0,
        }
    }

    fn is(&self, client: ClientId, request: RequestId) -> bool {
        self.client == client && self.request == request
    }
}

/// Every request that waits. The engine keeps it within its bounds.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: VecDeque<QueuedRequest>,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The client of each request, in the order they wait.
    pub(crate) fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.waiting.iter().map(|waiting| waiting.client)
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

    /// Whether the request waited.
    pub(crate) fn remove(&mut self, client: ClientId, request: RequestId) -> bool {
        let before = self.len();
        self.waiting.retain(|waiting| !waiting.is(client, request));
        self.len() < before
    }

    pub(crate) fn remove_all_of(&mut self, client: ClientId) {
        self.waiting.retain(|waiting| waiting.client != client);
    }

    /// Takes all out, in order. What goes on waiting is to be pushed again.
    pub(crate) fn take(&mut self) -> VecDeque<QueuedRequest> {
        std::mem::take(&mut self.waiting)
    }

    /// The requests whose position is not the one their client knows, with
    /// that position, which from here on is known.
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
