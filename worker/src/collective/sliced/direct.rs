//! Slices that travel directly between all workers.
//!
//! Each worker sends every other worker its part of the slice that the other reduces, adds up
//! the parts of its own slice, and sends the sums to all. A worker starts with its own part
//! and adds the others in the order of the workers, as in a [`Ring`](super::ring::Ring); the parts
//! of a tensor that is not cut are added from the first worker's on. A direct all-reduce takes the
//! latency of two messages for any number of workers. It adds up all parts of a slice in one place,
//! so that half types are rounded once.

use bytes::Bytes;
use tensord_proto::v1::PieceKind;

use super::{
    calls::{Calls, Route, Running},
    layout::is_cut,
    queue::ByteQueue,
    send_queues::{PIECE_BYTES, SendQueues},
};

/// What the worker `me` has received from other workers.
#[derive(Debug)]
pub(super) struct Direct {
    me: usize,
    peers: Vec<ReceiveState>,
    /// The first call whose slice at this worker is not fully reduced, and how many bytes
    /// of the slice are.
    reducing: u64,
    reduced: usize,
}

/// What was received from one worker of the group; this worker's own entry is not used.
#[derive(Debug, Default)]
struct ReceiveState {
    /// The peer's parts of the slices that this worker reduces.
    parts: ByteQueue,
    /// The slices that the peer has reduced.
    sums: ByteQueue,
    /// The first call whose slice from that worker is incomplete, and how many bytes of
    /// the slice have been received.
    gathering: u64,
    gathered: usize,
}

impl Direct {
    pub(super) fn new(me: usize, worker_count: usize) -> Self {
        Self {
            me,
            peers: (0..worker_count).map(|_| ReceiveState::default()).collect(),
            reducing: 0,
            reduced: 0,
        }
    }

    /// Begins a call: queues this worker's parts for the other workers.
    pub(super) fn begin(&self, running: &Running, send_queues: &mut SendQueues) {
        let worker_count = self.peers.len();
        for worker_index in others(self.me, worker_count) {
            let part = running.own.slice(running.slice(worker_index, worker_count));
            send_queues.push(worker_index, PieceKind::Part, part);
        }
    }

    /// Queues what `worker_index` has sent: sums, or parts. Returns how many bytes of this
    /// kind are queued.
    pub(super) fn take(&mut self, worker_index: usize, are_sums: bool, bytes: Bytes) -> usize {
        let peer = &mut self.peers[worker_index];
        let queue = match are_sums {
            true => &mut peer.sums,
            false => &mut peer.parts,
        };
        queue.push(bytes);
        queue.len()
    }

    /// Advances the calls as far as the received bytes allow.
    pub(super) fn advance(&mut self, calls: &mut Calls, send_queues: &mut SendQueues) {
        self.reduce_own(calls, send_queues);
        self.gather(calls);
    }

    /// Returns the number before which all direct calls are over.
    pub(super) fn finished_before(&self) -> u64 {
        let gathering = others(self.me, self.peers.len())
            .map(|worker_index| self.peers[worker_index].gathering);
        gathering.fold(self.reducing, u64::min)
    }

    /// Returns the workers that call `first` waits for, and whether they are known to be at
    /// fault. A worker that owes a reduced slice may not be: it may itself be waiting for the
    /// part of another worker, and only it knows which one.
    pub(super) fn late(&self, first: u64) -> (Vec<usize>, bool) {
        let is_reducing = self.reducing == first;
        let is_late = |worker_index: &usize| match is_reducing {
            true => self.peers[*worker_index].parts.len() == 0,
            false => self.peers[*worker_index].gathering == first,
        };
        let late = others(self.me, self.peers.len()).filter(is_late);
        (late.collect(), is_reducing)
    }

    /// Reduces this worker's slices as far as parts from all workers have been received.
    fn reduce_own(&mut self, calls: &mut Calls, send_queues: &mut SendQueues) {
        let worker_count = self.peers.len();
        while self.reducing < calls.decided() {
            if let Some(running) = calls.running(self.reducing)
                && running.route == Route::Direct
            {
                let slice = running.slice(self.me, worker_count);
                while self.reduced < slice.len() {
                    let left = slice.start + self.reduced..slice.end;
                    let Some(sum) = self.sum(running, left.clone()) else {
                        return;
                    };
                    self.reduced += sum.len();
                    running.copy_to_result(left.start, &sum);
                    for worker_index in others(self.me, worker_count) {
                        send_queues.push(worker_index, PieceKind::Sum, sum.clone());
                    }
                }
            }
            self.reducing += 1;
            self.reduced = 0;
        }
    }

    /// Returns the sums for the first bytes of `left`, the range of this worker's slice that is
    /// not reduced yet. `None` if another worker's part of the next element is missing.
    fn sum(&mut self, running: &Running, left: std::ops::Range<usize>) -> Option<Bytes> {
        let (me, worker_count) = (self.me, self.peers.len());
        let element = running.element.bytes();
        let mut count = left.len().min(PIECE_BYTES);
        for worker_index in others(me, worker_count) {
            count = count.min(self.peers[worker_index].parts.front(element).len());
        }
        let count = count / element * element;
        if count == 0 {
            return None;
        }
        let own = &running.own[left.start..left.start + count];
        let peers = self.peers.iter_mut().enumerate();
        let parts = peers.map(|(worker_index, peer)| match worker_index == me {
            true => own,
            false => &peer.parts.front(element)[..count],
        });
        let mut parts: Vec<&[u8]> = parts.collect();
        // Which worker adds up a tensor that is not cut depends on the number of the call, and the
        // bits must not.
        if is_cut(running.own.len()) {
            parts.rotate_left(me);
        }
        let sum = running.sum(&parts, true);
        for worker_index in others(me, worker_count) {
            self.peers[worker_index].parts.advance(count);
        }
        Some(sum)
    }

    /// Copies slices that other workers have reduced into the results.
    fn gather(&mut self, calls: &mut Calls) {
        let worker_count = self.peers.len();
        for worker_index in others(self.me, worker_count) {
            let peer = &mut self.peers[worker_index];
            while peer.gathering < calls.decided() {
                if let Some(running) = calls.running(peer.gathering)
                    && running.route == Route::Direct
                {
                    let slice = running.slice(worker_index, worker_count);
                    while peer.gathered < slice.len() && peer.sums.len() > 0 {
                        let sums = peer.sums.take(slice.len() - peer.gathered);
                        running.copy_to_result(slice.start + peer.gathered, &sums);
                        peer.gathered += sums.len();
                    }
                    if peer.gathered < slice.len() {
                        break;
                    }
                    peer.gathered = 0;
                }
                peer.gathering += 1;
            }
        }
    }
}

fn others(me: usize, worker_count: usize) -> impl Iterator<Item = usize> {
    (0..worker_count).filter(move |worker_index| *worker_index != me)
}
