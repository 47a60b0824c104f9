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
    waiting: VecDeque<Request>,
    /// Whether a thread or task is passing requests on. It checks `waiting` again before
    /// it stops.
    busy: bool,
}

impl Session {
    /// Passes on the runner's requests to peers: all of them, or those that the runner
    /// does not hold back.
    pub(super) fn ask(self: &Arc<Self>, runner: &mut Runner, all: bool) {
        let requests = runner.take_requests(all);
        if requests.is_empty() {
            return;
        }
        {
            let mut peer_requests = lock(&self.peer_requests);
            peer_requests.waiting.extend(requests);
            if std::mem::replace(&mut peer_requests.busy, true) {
                return;
            }
        }
        self.pass_on();
    }

    /// Passes on the queued requests. When a value has not been read yet, a task waits
    /// for it and continues after that.
    fn pass_on(self: &Arc<Self>) {
        loop {
            let (mut ready, mut later) = (Vec::new(), None);
            {
                let mut peer_requests = lock(&self.peer_requests);
                while let Some(request) = peer_requests.waiting.pop_front() {
                    match request {
                        Request::Later(request) => {
                            later = Some(request);
                            break;
                        }
                        request => ready.push(request),
                    }
                }
                if ready.is_empty() && later.is_none() {
                    peer_requests.busy = false;
                    return;
                }
            }
            self.pass(ready);
            if let Some(later) = later {
                let session = self.clone();
                self.device_context.runtime.spawn(async move {
                    let request = session.in_time(later).await;
                    session.pass(vec![request]);
                    session.pass_on();
                });
                return;
            }
        }
    }

    fn pass(&self, requests: Vec<Request>) {
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
                Request::Later(_) => unreachable!("deferred requests have their values here"),
            }
        }
        if !calls.is_empty() {
            self.cohort.call(self.lease_rank, calls);
        }
    }
}
