//! What a session asks of other sessions, in the order in which it asks.
//!
//! A tensor that is to be reduced or moved has to be read first, and a device takes
//! its time. Whatever is asked meanwhile waits behind it: the n-th all-reduce of a
//! group is the n-th on every rank.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
};

use super::{
    Session, lock,
    runner::{Request, Runner},
};

/// What waits to be passed on. As much as a runner has on the way at most, which is
/// bounded there.
#[derive(Default)]
pub(super) struct PeerRequests {
    waiting: VecDeque<Request>,
    /// Somebody passes on, and will look here again before it stops.
    busy: bool,
}

impl Session {
    /// Passes on what the runner asks of other sessions: all, or what it does not hold
    /// back.
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

    /// Passes on what waits, up to a value that is not there yet.
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
            // Others have heard, or hear soon, that it is gone.
            return;
        }
        let mut calls = Vec::new();
        for request in requests {
            match request {
                Request::Call(call) => calls.push(call),
                Request::Offer(capability, offer) => self.cohort.offer(capability, offer),
                Request::Take(capability, take) => self.cohort.take(capability, take),
                Request::Later(_) => unreachable!("what is passed on is there"),
            }
        }
        if !calls.is_empty() {
            self.cohort.call(self.lease_rank, calls);
        }
    }
}
