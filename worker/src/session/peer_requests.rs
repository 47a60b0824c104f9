//! The requests of a session to its peers, the other sessions of the lease, in order.
//!
//! A tensor that is to be reduced or moved must be read first, which takes time on a
//! device. Later requests are queued behind that one: the n-th all-reduce of a group must
//! be the n-th on every rank.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
};

use super::{
    Session, lock,
    runner::{Request, Runner},
};

/// Requests that wait to be passed on. The runner's limit on results in flight bounds the
/// all-reduces and takes among them. Offers hold device memory for their values.
#[derive(Default)]
pub(super) struct PeerRequests {
    queued: VecDeque<Request>,
    /// Whether a thread or task is passing requests on. It checks `queued` again before
    /// it stops.
    is_sending: bool,
}

impl Session {
    /// Passes on the runner's requests to peers: all of them, or those that the runner
    /// does not hold back.
    pub(super) fn send_requests(self: &Arc<Self>, runner: &mut Runner, all: bool) {
        let requests = runner.take_requests(all);
        if requests.is_empty() {
            return;
        }
        {
            let mut peer_requests = lock(&self.peer_requests);
            peer_requests.queued.extend(requests);
            if std::mem::replace(&mut peer_requests.is_sending, true) {
                return;
            }
        }
        self.send_queued_requests();
    }

    /// Passes on the queued requests. When a value has not been read yet, a task waits
    /// for it and continues after that.
    fn send_queued_requests(self: &Arc<Self>) {
        loop {
            let (mut ready, mut in_flight) = (Vec::new(), None);
            {
                let mut peer_requests = lock(&self.peer_requests);
                while let Some(request) = peer_requests.queued.pop_front() {
                    match request {
                        Request::InFlight(request) => {
                            in_flight = Some(request);
                            break;
                        }
                        request => ready.push(request),
                    }
                }
                if ready.is_empty() && in_flight.is_none() {
                    peer_requests.is_sending = false;
                    return;
                }
            }
            self.send_batch(ready);
            if let Some(in_flight) = in_flight {
                let session = self.clone();
                self.device_context.runtime.spawn(async move {
                    let request = session.with_op_timeout(in_flight).await;
                    session.send_batch(vec![request]);
                    session.send_queued_requests();
                });
                return;
            }
        }
    }

    fn send_batch(&self, requests: Vec<Request>) {
        if self.ending.load(Ordering::Acquire) {
            // The cohort notifies the peers that the session has ended.
            return;
        }
        let mut calls = Vec::new();
        for request in requests {
            match request {
                Request::Call(call) => calls.push(call),
                Request::Offer(capability, offer) => self.cohort.offer(capability, offer),
                Request::Take(capability, take) => self.cohort.take(capability, take),
                Request::InFlight(_) => unreachable!("deferred requests have their values here"),
            }
        }
        if !calls.is_empty() {
            self.cohort.call(self.lease_rank, calls);
        }
    }
}
