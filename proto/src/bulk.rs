//! Tensor bytes on the wire: in the frame that announces them where they are
//! few, else in chunks that share their memory.

use bytes::Bytes;

use crate::{CHUNK_BYTES, v1::Chunk};

/// Tensors up to this size go in the frame that announces them: a copy of so
/// few bytes costs less than a frame.
const INLINE_BYTES: usize = 16 << 10;

/// A tensor's bytes, divided for the wire.
#[derive(Debug, Clone)]
pub struct Bulk {
    /// Bytes in all.
    pub size_bytes: u64,
    /// What the announcing frame carries: all or nothing.
    pub inline: Bytes,
    rest: Bytes,
}

impl Bulk {
    /// Divides `bytes` without a copy.
    pub fn new(bytes: burn_backend::Bytes) -> Self {
        let bytes = Bytes::from_owner(Shared(bytes));
        let size_bytes = bytes.len() as u64;
        let (inline, rest) = match bytes.len() {
            0..=INLINE_BYTES => (bytes, Bytes::new()),
            _ => (Bytes::new(), bytes),
        };
        Self {
            size_bytes,
            inline,
            rest,
        }
    }

    /// The frames that follow the announcing one, before any other.
    pub fn chunks(self) -> impl Iterator<Item = Chunk> {
        let rest = self.rest;
        (0..rest.len()).step_by(CHUNK_BYTES).map(move |start| {
            let end = rest.len().min(start + CHUNK_BYTES);
            Chunk {
                bytes: rest.slice(start..end),
            }
        })
    }
}

/// Lets Burn's bytes be the owner of ours.
struct Shared(burn_backend::Bytes);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(size: usize) -> (usize, Vec<usize>) {
        let bulk = Bulk::new(burn_backend::Bytes::from_bytes_vec(vec![7; size]));
        assert_eq!(bulk.size_bytes, size as u64);
        let inline = bulk.inline.len();
        (
            inline,
            bulk.chunks().map(|chunk| chunk.bytes.len()).collect(),
        )
    }

    #[test]
    fn few_bytes_go_inline_and_many_in_chunks() {
        assert_eq!(divided(0), (0, vec![]));
        assert_eq!(divided(INLINE_BYTES), (INLINE_BYTES, vec![]));
        assert_eq!(divided(INLINE_BYTES + 1), (0, vec![INLINE_BYTES + 1]));
        assert_eq!(divided(2 * CHUNK_BYTES), (0, vec![CHUNK_BYTES; 2]));
        assert_eq!(divided(CHUNK_BYTES + 5), (0, vec![CHUNK_BYTES, 5]));
    }
}
