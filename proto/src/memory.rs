//! Memory for tensor bytes that come from elsewhere.

use burn_backend::Bytes;

/// What any element type may be put at.
type Aligned = u128;

/// Empty, with memory for `bytes` bytes, aligned for every element type: Burn copies
/// those that are not.
pub fn room(bytes: usize) -> Bytes {
    let room = Vec::<Aligned>::with_capacity(bytes.div_ceil(size_of::<Aligned>()));
    Bytes::from_elems(room)
}

/// A copy of `bytes`, aligned for every element type.
pub fn copy(bytes: &[u8]) -> Bytes {
    let mut copy = room(bytes.len());
    copy.extend_from_byte_slice(bytes);
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_put_there_stay_where_they_are() {
        for size in [0, 1, 15, 16, 17, 100_000] {
            let bytes: Vec<u8> = (0..size).map(|i| i as u8).collect();
            let mut room = room(size);
            let (at, align) = (room.as_ptr(), room.align());
            assert!(room.is_empty() && align == align_of::<Aligned>());
            for part in bytes.chunks(7) {
                room.extend_from_byte_slice(part);
            }
            assert_eq!((room.as_ptr(), &*room), (at, bytes.as_slice()));
            assert_eq!(*copy(&bytes), *bytes);
        }
    }
}
