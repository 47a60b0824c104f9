//! Tensor bytes on the wire: a few bytes go in the frame that announces them. More bytes
//! go as a *payload* on the session's track for bulk bytes, in chunks that share the
//! payload's memory.

use bytes::Bytes;

use crate::{CHUNK_BYTES, aligned, v1::Chunk};

/// Size up to which tensors go in the frame that announces them: copying so few bytes
/// costs less than a frame.
pub const INLINE_BYTES: usize = 16 << 10;

/// Converts Burn's bytes to [`Bytes`] without a copy.
pub fn shared(bytes: burn_backend::Bytes) -> Bytes {
    Bytes::from_owner(Shared(bytes))
}

/// Returns the chunks of a payload.
pub fn chunks(payload: Bytes) -> impl Iterator<Item = Chunk> {
    (0..payload.len()).step_by(CHUNK_BYTES).map(move |start| {
        let end = payload.len().min(start + CHUNK_BYTES);
        Chunk {
            size_bytes: if start == 0 { payload.len() as u64 } else { 0 },
            bytes: payload.slice(start..end),
        }
    })
}

/// A rule of payloads that the peer broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// The first chunk of a payload has no size.
    #[error("the first chunk of a payload has no size")]
    MissingSize,
    /// A chunk within a payload has a size.
    #[error("a payload of {size} bytes begins {left} bytes before the end of the previous one")]
    UnexpectedSize {
        /// Size of the second payload in bytes.
        size: u64,
        /// Bytes missing of the first payload.
        left: u64,
    },
    /// A chunk has more bytes than its payload has left.
    #[error("a chunk extends {excess} bytes beyond the end of its payload")]
    TooLong {
        /// Number of bytes beyond the end.
        excess: u64,
    },
}

/// Result of adding a chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum ChunkResult<T> {
    /// The payload is not complete yet.
    More,
    /// The payload is complete: the receiver's record of it, and its bytes, which are
    /// empty if they were not kept.
    Whole(T, burn_backend::Bytes),
}

/// Assembles a payload from its chunks. `T` is what the receiver records about the
/// payload.
#[derive(Debug)]
pub struct PayloadAssembler<T> {
    payload: Option<Payload<T>>,
}

#[derive(Debug)]
struct Payload<T> {
    context: T,
    left: u64,
    /// `None` if there is no room for the bytes.
    bytes: Option<burn_backend::Bytes>,
}

impl<T> Default for PayloadAssembler<T> {
    fn default() -> Self {
        Self { payload: None }
    }
}

impl<T> PayloadAssembler<T> {
    /// Adds the next chunk. When a payload begins, `begin` is called with its size in
    /// bytes, and returns the receiver's record of the payload and whether to keep its
    /// bytes.
    ///
    /// # Errors
    ///
    /// When the chunk does not fit the chunks before it.
    pub fn take(
        &mut self,
        chunk: &Chunk,
        begin: impl FnOnce(u64) -> (T, bool),
    ) -> Result<ChunkResult<T>, PayloadError> {
        let payload = match (&mut self.payload, chunk.size_bytes) {
            (None, 0) => return Err(PayloadError::MissingSize),
            (None, size) => {
                let (context, keep) = begin(size);
                self.payload.insert(Payload {
                    context,
                    left: size,
                    bytes: keep.then(|| aligned::with_capacity(size as usize)),
                })
            }
            (Some(payload), 0) => payload,
            (Some(Payload { left, .. }), size) => {
                return Err(PayloadError::UnexpectedSize { size, left: *left });
            }
        };
        let bytes = chunk.bytes.len() as u64;
        payload.left = payload
            .left
            .checked_sub(bytes)
            .ok_or(PayloadError::TooLong {
                excess: bytes.saturating_sub(payload.left),
            })?;
        if let Some(kept) = &mut payload.bytes {
            kept.extend_from_byte_slice(&chunk.bytes);
        }
        let whole = self.payload.take_if(|payload| payload.left == 0);
        Ok(match whole {
            Some(payload) => {
                let bytes = payload.bytes.unwrap_or_else(|| aligned::with_capacity(0));
                ChunkResult::Whole(payload.context, bytes)
            }
            None => ChunkResult::More,
        })
    }
}

/// Makes Burn's bytes the owner of a [`Bytes`].
struct Shared(burn_backend::Bytes);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_is_assembled_from_chunks() {
        for size in [1, CHUNK_BYTES, CHUNK_BYTES + 5, 3 * CHUNK_BYTES] {
            let payload = Bytes::from((0..size).map(|i| i as u8).collect::<Vec<_>>());
            let mut gathering = PayloadAssembler::default();
            let mut whole = None;
            for chunk in chunks(payload.clone()) {
                assert!(whole.is_none() && chunk.bytes.len() <= CHUNK_BYTES);
                match gathering.take(&chunk, |size| (size, true)).unwrap() {
                    ChunkResult::More => {}
                    ChunkResult::Whole(context, bytes) => whole = Some((context, bytes)),
                }
            }
            let (context, bytes) = whole.expect("the payload is complete");
            assert_eq!((context, &*bytes), (size as u64, &payload[..]));
            // Burn would copy bytes of another alignment.
            assert_eq!(bytes.align(), aligned::with_capacity(0).align());
        }
    }

    #[test]
    fn bytes_without_room_are_counted_and_dropped() {
        let mut gathering = PayloadAssembler::default();
        let mut taken = None;
        for chunk in chunks(Bytes::from(vec![1; CHUNK_BYTES + 1])) {
            taken = Some(gathering.take(&chunk, |_| ("no room", false)));
        }
        assert_eq!(
            taken,
            Some(Ok(ChunkResult::Whole("no room", aligned::with_capacity(0))))
        );
    }

    #[test]
    fn payload_errors_name_the_broken_rule() {
        let chunk = |size_bytes, bytes: &'static [u8]| Chunk {
            size_bytes,
            bytes: Bytes::from_static(bytes),
        };
        let mut gathering = PayloadAssembler::default();
        let mut take = |chunk| gathering.take(&chunk, |_| ((), true)).map(drop);
        assert_eq!(take(chunk(0, b"a")), Err(PayloadError::MissingSize));
        assert_eq!(take(chunk(3, b"a")), Ok(()));
        let begun = PayloadError::UnexpectedSize { size: 9, left: 2 };
        assert_eq!(take(chunk(9, b"a")), Err(begun));
        let long = PayloadError::TooLong { excess: 1 };
        assert_eq!(take(chunk(0, b"abc")), Err(long));
    }
}
