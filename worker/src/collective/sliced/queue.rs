//! A queue of received bytes that keeps their order and their pieces.

use std::collections::VecDeque;

use bytes::{Buf, Bytes};

/// A queue of bytes that does not copy them.
#[derive(Debug, Default)]
pub(super) struct ByteQueue {
    pieces: VecDeque<Bytes>,
    len: usize,
}

impl ByteQueue {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if !piece.is_empty() {
            self.pieces.push_back(piece);
        }
    }

    /// Returns the first contiguous bytes: at least `least` if the queue has so many.
    pub(super) fn front(&mut self, least: usize) -> &[u8] {
        let short = |pieces: &VecDeque<Bytes>| pieces.front().is_some_and(|p| p.len() < least);
        if short(&self.pieces) && self.len >= least {
            // An element was cut in two, which is rare: joins the pieces.
            let mut joined = Vec::with_capacity(least);
            while joined.len() < least
                && let Some(piece) = self.pieces.pop_front()
            {
                joined.extend_from_slice(&piece);
            }
            self.pieces.push_front(joined.into());
        }
        self.pieces.front().map_or(&[], |piece| piece)
    }

    /// Takes the first contiguous bytes, up to `most`.
    pub(super) fn take(&mut self, most: usize) -> Bytes {
        let Some(front) = self.pieces.front_mut() else {
            return Bytes::new();
        };
        let taken = front.split_to(most.min(front.len()));
        self.len -= taken.len();
        if front.is_empty() {
            self.pieces.pop_front();
        }
        taken
    }

    /// Drops the first `count` of the bytes that [`front`](Self::front) returned.
    pub(super) fn advance(&mut self, count: usize) {
        let Some(front) = self.pieces.front_mut() else {
            return;
        };
        front.advance(count);
        self.len -= count;
        if front.is_empty() {
            self.pieces.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_element_is_reassembled() {
        let mut queue = ByteQueue::default();
        for piece in [&b"abc"[..], b"", b"d", b"efgh"] {
            queue.push(Bytes::from_static(piece));
        }
        assert_eq!((queue.len(), queue.front(1)), (8, &b"abc"[..]));
        assert_eq!(queue.front(4), b"abcd");
        queue.advance(3);
        assert_eq!(queue.front(2), b"defgh");
        assert_eq!(queue.take(2), b"de"[..]);
        queue.advance(3);
        assert_eq!((queue.len(), queue.front(4)), (0, &b""[..]));
    }
}
