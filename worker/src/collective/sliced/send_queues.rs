//! Bytes queued for other workers.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use tensord_proto::v1::PieceKind;

use super::super::algorithm::Piece;

/// Most bytes of a piece: small enough that one is reduced while the next one is on
/// the wire, and large compared with the overhead of a frame.
pub(super) const PIECE_BYTES: usize = 256 << 10;

/// The pieces queued for each worker of a group.
#[derive(Debug)]
pub(super) struct SendQueues(Vec<SendQueue>);

#[derive(Debug, Default)]
struct SendQueue {
    pieces: VecDeque<Piece>,
    /// Bytes sent, except in rings, since the queues of all workers were last empty.
    sent_bytes: u64,
    /// The last piece sent was one of a ring.
    in_ring: bool,
}

impl SendQueues {
    pub(super) fn new(worker_count: usize) -> Self {
        Self((0..worker_count).map(|_| SendQueue::default()).collect())
    }

    pub(super) fn push(&mut self, worker_index: usize, kind: PieceKind, bytes: Bytes) {
        if !bytes.is_empty() {
            self.0[worker_index].pieces.push_back(Piece { kind, bytes });
        }
    }

    pub(super) fn has_pending(&self, worker_index: usize) -> bool {
        !self.0[worker_index].pieces.is_empty()
    }

    /// Takes the next piece for `worker_index`. Small pieces of one kind are joined.
    pub(super) fn next(&mut self, worker_index: usize) -> Option<Piece> {
        let queue = &mut self.0[worker_index];
        let Piece { kind, mut bytes } = queue.pieces.pop_front()?;
        if bytes.len() > PIECE_BYTES {
            let bytes = bytes.split_off(PIECE_BYTES);
            queue.pieces.push_front(Piece { kind, bytes });
        }
        let fits = |bytes: usize, next: &Piece| {
            next.kind == kind && bytes + next.bytes.len() <= PIECE_BYTES
        };
        if queue.pieces.front().is_some_and(|n| fits(bytes.len(), n)) {
            let mut joined = BytesMut::from(&bytes[..]);
            while let Some(next) = queue.pieces.pop_front_if(|n| fits(joined.len(), n)) {
                joined.extend_from_slice(&next.bytes);
            }
            bytes = joined.freeze();
        }
        queue.in_ring = kind == PieceKind::Ring;
        if !queue.in_ring {
            queue.sent_bytes += bytes.len() as u64;
        }
        if self.0.iter().all(|queue| queue.pieces.is_empty()) {
            self.0.iter_mut().for_each(|queue| queue.sent_bytes = 0);
        }
        Some(Piece { kind, bytes })
    }

    /// Returns how many bytes more (or fewer, if negative) `worker_index` was sent in the
    /// current exchange than the other workers on average. `None` if its last piece was one of
    /// a ring, where the others are sent nothing.
    pub(super) fn lead_bytes(&self, worker_index: usize) -> Option<i64> {
        let sent = |queue: &SendQueue| queue.sent_bytes as i64;
        let others = self.0.len().max(2) as i64 - 1;
        let mean = self.0.iter().map(sent).sum::<i64>() / others;
        let queue = &self.0[worker_index];
        (!queue.in_ring).then(|| sent(queue) - mean)
    }

    pub(super) fn clear(&mut self) {
        self.0
            .iter_mut()
            .for_each(|queue| *queue = SendQueue::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_with_most_bytes_sent_leads() {
        let mut send_queues = SendQueues::new(3);
        for worker_index in [1, 2] {
            send_queues.push(worker_index, PieceKind::Part, vec![0; PIECE_BYTES].into());
        }
        send_queues.next(1);
        let piece = PIECE_BYTES as i64;
        assert_eq!(
            [1, 2].map(|worker_index| send_queues.lead_bytes(worker_index)),
            [Some(piece / 2), Some(-piece / 2)]
        );
        // All queues are empty after this, so the counts start again.
        send_queues.next(2);
        assert_eq!(
            [1, 2].map(|worker_index| send_queues.lead_bytes(worker_index)),
            [Some(0); 2]
        );
        send_queues.push(1, PieceKind::Ring, vec![0; PIECE_BYTES].into());
        send_queues.next(1);
        assert_eq!(
            [1, 2].map(|worker_index| send_queues.lead_bytes(worker_index)),
            [None, Some(0)]
        );
    }

    #[test]
    fn bytes_are_sent_in_order_in_pieces_of_one_kind() {
        let mut send_queues = SendQueues::new(2);
        let large = vec![1; PIECE_BYTES + 5];
        for (kind, bytes) in [
            (PieceKind::Part, vec![0; 3]),
            (PieceKind::Part, vec![]),
            (PieceKind::Part, vec![1; 2]),
            (PieceKind::Sum, vec![2; 4]),
            (PieceKind::Ring, large.clone()),
        ] {
            send_queues.push(1, kind, bytes.into());
        }
        let mut next = || {
            let piece = send_queues.next(1)?;
            Some((piece.kind, piece.bytes.to_vec()))
        };
        assert_eq!(next(), Some((PieceKind::Part, vec![0, 0, 0, 1, 1])));
        assert_eq!(next(), Some((PieceKind::Sum, vec![2; 4])));
        assert_eq!(
            next(),
            Some((PieceKind::Ring, large[..PIECE_BYTES].to_vec()))
        );
        assert_eq!(next(), Some((PieceKind::Ring, vec![1; 5])));
        assert_eq!(next(), None);
    }
}
