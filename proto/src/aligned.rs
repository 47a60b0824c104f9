//! Memory for tensor bytes that are received or copied.
//!
//! Burn considers the alignment with which memory was allocated, not its address: it
//! copies the contents of a `Vec<u8>`, whose alignment is 1. So memory is allocated in
//! larger units.

use burn_backend::Bytes;

/// A unit aligned at least as strictly as any of Burn's bytes (`MAX_ALIGN` in CubeCL).
type Unit = u128;

/// Returns empty bytes with capacity for `size_bytes`.
pub fn with_capacity(size_bytes: usize) -> Bytes {
    let room = Vec::<Unit>::with_capacity(size_bytes.div_ceil(size_of::<Unit>()));
    Bytes::from_elems(room)
}

/// Returns a copy of `bytes`.
pub fn copy(bytes: &[u8]) -> Bytes {
    let mut copy = with_capacity(bytes.len());
    copy.extend_from_byte_slice(bytes);
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_not_moved() {
        for size in [0, 1, 15, 16, 17, 100_000] {
            let bytes: Vec<u8> = (0..size).map(|i| i as u8).collect();
            let mut room = with_capacity(size);
            let at = room.as_ptr();
            assert!(room.is_empty() && room.align() == align_of::<Unit>());
            for part in bytes.chunks(7) {
                room.extend_from_byte_slice(part);
            }
            assert_eq!((room.as_ptr(), &*room), (at, bytes.as_slice()));
        }
    }

    #[test]
    fn a_copy_is_aligned() {
        for bytes in [&b""[..], b"a", b"sixteen bytes it", b"and seventeen too"] {
            let copy = copy(bytes);
            assert_eq!((copy.align(), &*copy), (align_of::<Unit>(), bytes));
        }
    }
}
