//! Slices that travel round a ring: each worker sends only to the next one.
//!
//! Worker i sends its part of slice i. To each slice it receives, it adds its own part and
//! passes the slice on, until all workers have added theirs; the worker that adds the last
//! part has the sum, and the sum goes round the ring too. Parts are added in the same
//! order as in [`Direct`](super::direct::Direct), so both ways give the same bits. The
//! k-th slice that worker i sends is i - k, for k up to 2 n - 3, and every received slice
//! but the last is passed on (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
//! for clusters of workstations", 2009).
//!
//! A ring gives each link to one connection. Connections between all pairs get unequal
//! shares of a link, end one after the other, and leave it half empty in the end. In a ring
//! a worker that is delayed for a moment delays no other, as the next one has a slice to
//! send meanwhile. But sums are rounded at each step, so half types do not use a ring, and
//! it takes the latency of one message per step, which large slices hide.

use bytes::Bytes;
use tensord_proto::v1::PieceKind;

use super::{
    calls::{Calls, Route, Running},
    queue::ByteQueue,
    send_queues::{PIECE_BYTES, SendQueues},
};

/// What has been received from the worker before `me` in the ring.
#[derive(Debug)]
pub(super) struct Ring {
    me: usize,
    worker_count: usize,
    incoming: ByteQueue,
    /// The first call that is not over in this ring, whether this worker's slice of it was
    /// queued, how many of its slices were received, and how many bytes of the next one.
    call: u64,
    has_begun: bool,
    slices_received: usize,
    bytes: usize,
}

impl Ring {
    pub(super) fn new(me: usize, worker_count: usize) -> Self {
        Self {
            me,
            worker_count,
            incoming: ByteQueue::default(),
            call: 0,
            has_begun: false,
            slices_received: 0,
            bytes: 0,
        }
    }

    /// Returns the worker that sends to this one.
    pub(super) fn previous(&self) -> usize {
        (self.me + self.worker_count - 1) % self.worker_count
    }

    /// Returns the worker that this one sends to.
    fn next(&self) -> usize {
        (self.me + 1) % self.worker_count
    }

    /// Queues what the worker before has sent. Returns how many bytes are queued.
    pub(super) fn take(&mut self, bytes: Bytes) -> usize {
        self.incoming.push(bytes);
        self.incoming.len()
    }

    /// Returns the number before which all ring calls are over.
    pub(super) fn finished_before(&self) -> u64 {
        self.call
    }

    /// Advances the calls as far as the received bytes allow.
    pub(super) fn advance(&mut self, calls: &mut Calls, send_queues: &mut SendQueues) {
        while self.call < calls.decided() {
            if let Some(running) = calls.running(self.call)
                && running.route == Route::Ring
                && !self.forward_slices(running, send_queues)
            {
                return;
            }
            self.call += 1;
        }
    }

    /// Adds to the received slices of a call and passes them on. Returns whether the call
    /// is over.
    fn forward_slices(&mut self, running: &mut Running, send_queues: &mut SendQueues) -> bool {
        if !std::mem::replace(&mut self.has_begun, true) {
            // This follows the last slice of the previous call, as one stream carries
            // both.
            let own = running.own.slice(running.slice(self.me, self.worker_count));
            send_queues.push(self.next(), PieceKind::Ring, own);
        }
        let all = 2 * (self.worker_count - 1);
        while self.slices_received < all {
            // Slices come in the order in which the worker before sends them.
            let slice_owner = (self.previous() + 2 * self.worker_count - self.slices_received)
                % self.worker_count;
            let slice = running.slice(slice_owner, self.worker_count);
            while self.bytes < slice.len() {
                let at = slice.start + self.bytes;
                let Some(bytes) = self.next_bytes(running, at, slice.end) else {
                    return false;
                };
                self.bytes += bytes.len();
                // All parts are in these bytes: the last was added here or before.
                if self.slices_received + 2 >= self.worker_count {
                    running.copy_to_result(at, &bytes);
                }
                if self.slices_received + 1 < all {
                    send_queues.push(self.next(), PieceKind::Ring, bytes);
                }
            }
            self.bytes = 0;
            self.slices_received += 1;
        }
        (self.slices_received, self.has_begun) = (0, false);
        true
    }

    /// Returns the next received bytes of the range from `at` to `end`, with this worker's
    /// part added if it is missing. `None` if no whole element was received.
    fn next_bytes(&mut self, running: &Running, at: usize, end: usize) -> Option<Bytes> {
        let element = running.element.bytes();
        let count = self.incoming.front(element).len();
        let count = count.min(end - at).min(PIECE_BYTES) / element * element;
        if count == 0 {
            return None;
        }
        let bytes = self.incoming.take(count);
        if self.slices_received + 1 >= self.worker_count {
            return Some(bytes);
        }
        let own = &running.own[at..at + count];
        Some(running.sum(
            &[&bytes, own],
            self.slices_received + 2 == self.worker_count,
        ))
    }
}
