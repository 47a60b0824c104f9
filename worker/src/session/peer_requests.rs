//! The requests of a session to its peers, the other sessions of the lease, in order.
//!
//! A tensor that is to be reduced or moved must be read first, which takes time on a
//! device. Later requests are queued behind that one: the n-th all-reduce of a group must
//! be the n-th on every rank.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use burn_std::future::DynFut;

use super::runner::Request;
use crate::{collective::Cohort, locks::lock};

/// Number of queued requests at which the session pauses. Behind a value that the device is
/// still reading, a client could queue any number of offers of empty tensors, which take no
/// memory of the device.
pub(super) const MAX_QUEUED_REQUESTS: usize = 1 << 15;

/// Requests that wait to be passed on.
#[derive(Default)]
pub(super) struct PeerRequests(Mutex<State>);

#[derive(Default)]
struct State {
    queued: VecDeque<Request>,
    /// Whether a thread or task is passing requests on. It checks `queued` again before
    /// it stops.
    is_sending: bool,
}

/// Requests to pass on now.
pub(super) struct Batch {
    /// Requests with their values.
    pub(super) ready: Vec<Request>,
    /// The request after those, whose value the device is still reading. The caller must
    /// pass it on before it takes the next batch.
    pub(super) in_flight: Option<DynFut<Request>>,
}

impl PeerRequests {
    /// Queues requests. Returns whether the caller must pass them on: take
    /// [batches](Self::next_batch) until there is none.
    #[must_use]
    pub(super) fn push(&self, requests: Vec<Request>) -> bool {
        if requests.is_empty() {
            return false;
        }
        let mut state = lock(&self.0);
        state.queued.extend(requests);
        !std::mem::replace(&mut state.is_sending, true)
    }

    /// Returns whether the session must pause until requests were passed on. A batch that was
    /// pushed at once may exceed the limit.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.0).queued.len() >= MAX_QUEUED_REQUESTS
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        lock(&self.0).queued.len()
    }

    /// Returns the next requests to pass on, or `None` if there are none left.
    pub(super) fn next_batch(&self) -> Option<Batch> {
        let mut state = lock(&self.0);
        let mut batch = Batch {
            ready: Vec::new(),
            in_flight: None,
        };
        while let Some(request) = state.queued.pop_front() {
            match request {
                Request::InFlight(request) => {
                    batch.in_flight = Some(request);
                    break;
                }
                request => batch.ready.push(request),
            }
        }
        if batch.ready.is_empty() && batch.in_flight.is_none() {
            state.is_sending = false;
            return None;
        }
        Some(batch)
    }
}

/// Passes the `requests` of the session with rank `lease_rank` to `cohort`. All of them have
/// their values.
pub(super) fn pass_on(requests: Vec<Request>, cohort: &Arc<Cohort>, lease_rank: u32) {
    let mut calls = Vec::new();
    for request in requests {
        match request {
            Request::Call(call) => calls.push(call),
            Request::Offer(capability, offer) => cohort.offer(capability, offer),
            Request::Take(capability, take) => cohort.take(capability, take),
            Request::InFlight(_) => unreachable!("requests are passed on with their values"),
        }
    }
    if !calls.is_empty() {
        cohort.call(lease_rank, calls);
    }
}
