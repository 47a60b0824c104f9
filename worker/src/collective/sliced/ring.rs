//! Slices that travel round a ring: each worker sends to the next alone.
//!
//! Worker i sends its part of slice i. Of each slice that comes it adds its own part and
//! sends it on, until the slice has been everywhere; who adds the last part has the sum
//! and sends that round. Parts are added in the same order as directly, so both ways give
//! the same bits. So the k-th slice that worker i sends is i - k, for k up to
//! 2 n - 3, and whatever comes in is sent on but the last (Patarasuk and Yuan, "Bandwidth
//! optimal all-reduce algorithms for clusters of workstations", 2009).
//!
//! One connection has a link for itself, where those of all pairs get unequal parts of
//! it, end one after the other, and leave it half empty in the end. A worker that was held
//! up for a moment holds up nobody: the next has a slice to send meanwhile. But sums are
//! rounded at each step, so half types do not go this way, and it takes as many messages
//! of latency as there are steps, which large slices hide.

use bytes::Bytes;
use tensord_proto::v1::PieceKind;

use super::{
    calls::{Calls, Running, Way},
    outgoing::{Outgoing, PIECE_BYTES},
    queue::ByteQueue,
};

/// What has come from the worker before `me` in the ring.
#[derive(Debug)]
pub(super) struct Ring {
    me: usize,
    nodes: usize,
    incoming: ByteQueue,
    /// The first call that is not over here, whether the own slice of it is on its way, how
    /// many slices of it have come, and how many bytes of the next.
    call: u64,
    has_begun: bool,
    slices: usize,
    bytes: usize,
}

impl Ring {
    pub(super) fn new(me: usize, nodes: usize) -> Self {
        Self {
            me,
            nodes,
            incoming: ByteQueue::default(),
            call: 0,
            has_begun: false,
            slices: 0,
            bytes: 0,
        }
    }

    /// The worker that sends to this one.
    pub(super) fn previous(&self) -> usize {
        (self.me + self.nodes - 1) % self.nodes
    }

    /// The worker that this one sends to.
    fn next(&self) -> usize {
        (self.me + 1) % self.nodes
    }

    /// Takes in what the worker before sent. Returns how many bytes have found no use yet.
    pub(super) fn take(&mut self, bytes: Bytes) -> usize {
        self.incoming.push(bytes);
        self.incoming.len()
    }

    /// Calls before this one are over, as far as they travel like this.
    pub(super) fn over(&self) -> u64 {
        self.call
    }

    /// Does whatever can be done.
    pub(super) fn advance(&mut self, calls: &mut Calls, outgoing: &mut Outgoing) {
        while self.call < calls.decided() {
            if let Some(running) = calls.running(self.call)
                && running.way == Way::Ring
                && !self.pass(running, outgoing)
            {
                return;
            }
            self.call += 1;
        }
    }

    /// Takes what has come of a call, and sends it on. True: that was all.
    fn pass(&mut self, running: &mut Running, outgoing: &mut Outgoing) -> bool {
        if !std::mem::replace(&mut self.has_begun, true) {
            // Not before the last slice of the call before has gone out: one stream
            // carries both.
            let own = running.own.slice(running.slice(self.me, self.nodes));
            outgoing.push(self.next(), PieceKind::Ring, own);
        }
        let all = 2 * (self.nodes - 1);
        while self.slices < all {
            // Slices come in the order in which the worker before sends them.
            let whose = (self.previous() + 2 * self.nodes - self.slices) % self.nodes;
            let slice = running.slice(whose, self.nodes);
            while self.bytes < slice.len() {
                let at = slice.start + self.bytes;
                let Some(bytes) = self.next_bytes(running, at, slice.end) else {
                    return false;
                };
                self.bytes += bytes.len();
                // What has been everywhere is known: the sum, added up here or before.
                if self.slices + 2 >= self.nodes {
                    running.put(at, &bytes);
                }
                if self.slices + 1 < all {
                    outgoing.push(self.next(), PieceKind::Ring, bytes);
                }
            }
            self.bytes = 0;
            self.slices += 1;
        }
        (self.slices, self.has_begun) = (0, false);
        true
    }

    /// The next bytes of what has come, of those from `at` to `end`, with the own part of
    /// them if that is missing.
    fn next_bytes(&mut self, running: &Running, at: usize, end: usize) -> Option<Bytes> {
        let element = running.element.bytes();
        let count = self.incoming.front(element).len();
        let count = count.min(end - at).min(PIECE_BYTES) / element * element;
        if count == 0 {
            return None;
        }
        let bytes = self.incoming.take(count);
        if self.slices + 1 >= self.nodes {
            return Some(bytes);
        }
        let own = &running.own[at..at + count];
        Some(running.sum(&[&bytes, own], self.slices + 2 == self.nodes))
    }
}
