//! Requests to the other sessions of the lease, in buckets.
//!
//! All-reduces are held back while the ops between them are executed, until the bucket is
//! full, the program syncs, an op needs a result, or the session's turn is over.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn_std::future::DynFut;

use crate::collective::{AllReduceCall, Capability, Offer, Take};

/// A request of a session to its peers.
pub(crate) enum Request {
    Call(AllReduceCall),
    Offer(Capability, Offer),
    Take(Capability, Take),
    /// The device is still reading the request's value. The future then returns the request,
    /// as one of the other variants.
    InFlight(DynFut<Request>),
}

impl Request {
    /// Returns the bytes of the tensor that the request passes on.
    pub(crate) fn size_bytes(&self) -> usize {
        match self {
            Self::Call(call) => call.bytes.len(),
            Self::Offer(_, offer) => offer.value.as_ref().map_or(0, |value| value.bytes.len()),
            Self::Take(..) | Self::InFlight(_) => 0,
        }
    }
}

/// Requests that have not been passed on.
pub(super) struct RequestBucket {
    requests: Vec<Request>,
    /// Bytes of the all-reduces in `requests`.
    bytes: usize,
    /// Bytes of all-reduces at which the bucket is full.
    capacity_bytes: Arc<AtomicUsize>,
    /// Whether `requests` must be passed on without waiting for more.
    must_flush: bool,
}

impl RequestBucket {
    pub(super) fn new(capacity_bytes: Arc<AtomicUsize>) -> Self {
        Self {
            requests: Vec::new(),
            bytes: 0,
            capacity_bytes,
            must_flush: false,
        }
    }

    /// Adds a request. `reduced_bytes` is the size of the tensor of an all-reduce, and 0 for
    /// other requests.
    pub(super) fn push(&mut self, request: Request, reduced_bytes: usize) {
        // The tensor may be declared larger than it is.
        self.bytes = self.bytes.saturating_add(reduced_bytes);
        self.requests.push(request);
    }

    /// Makes the next [`take`](Self::take) return the requests without waiting for more.
    pub(super) fn flush(&mut self) {
        self.must_flush = true;
    }

    /// Returns the requests to pass on. Unless `all` is true, they are held back until the
    /// bucket is full or must be flushed.
    pub(super) fn take(&mut self, all: bool) -> Vec<Request> {
        let capacity = || self.capacity_bytes.load(Ordering::Relaxed);
        let is_small = self.bytes == 0 || self.bytes < capacity();
        if !all && !self.must_flush && is_small {
            return Vec::new();
        }
        (self.must_flush, self.bytes) = (false, 0);
        std::mem::take(&mut self.requests)
    }
}
