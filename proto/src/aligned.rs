//! Memory for tensor bytes that are received or copied.
//!
//! Burn considers the alignment with which memory was allocated, not its address: it
//! copies the contents of a `Vec<u8>`, whose alignment is 1. So memory is allocated in
//! larger units.

use std::io::{self, Read};

use burn_backend::Bytes;

/// Bytes to read at a time.
const READ_BYTES: usize = 1 << 20;

/// A unit aligned at least as strictly as any of Burn's bytes (`MAX_ALIGN` in CubeCL).
type Unit = u128;

/// Returns empty bytes with capacity for `size_bytes`.
pub fn with_capacity(size_bytes: usize) -> Bytes {
    let room = Vec::<Unit>::with_capacity(size_bytes.div_ceil(size_of::<Unit>()));
    Bytes::from_elems(room)
}

/// Returns empty bytes with capacity for exactly `size_bytes`, aligned to the largest power of two
/// up to 16 that divides `size_bytes`.
pub fn with_exact_capacity(size_bytes: usize) -> Bytes {
    match size_bytes.trailing_zeros() {
        4.. => with_capacity(size_bytes),
        3 => Bytes::from_elems(Vec::<u64>::with_capacity(size_bytes / 8)),
        2 => Bytes::from_elems(Vec::<u32>::with_capacity(size_bytes / 4)),
        1 => Bytes::from_elems(Vec::<u16>::with_capacity(size_bytes / 2)),
        0 => Bytes::from_elems(Vec::<u8>::with_capacity(size_bytes)),
    }
}

/// Appends `size_bytes` that `from` yields.
///
/// # Errors
///
/// Those of `from`, also when it ends before.
pub fn fill(
    bytes: &mut Bytes,
    from: &mut (impl Read + ?Sized),
    size_bytes: usize,
) -> io::Result<()> {
    let end = bytes.len() + size_bytes;
    let mut buffer = vec![0; READ_BYTES.min(size_bytes)];
    while bytes.len() < end {
        let most = buffer.len().min(end - bytes.len());
        from.read_exact(&mut buffer[..most])?;
        bytes.extend_from_byte_slice(&buffer[..most]);
    }
    Ok(())
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
    fn bytes_are_read_to_the_last() {
        let source: Vec<u8> = (0..READ_BYTES + 7).map(|i| i as u8).collect();
        let mut bytes = copy(b"x");
        fill(&mut bytes, &mut source.as_slice(), source.len()).unwrap();
        assert!(bytes[0] == b'x' && bytes[1..] == source);
        let ended = fill(&mut bytes, &mut source.as_slice(), source.len() + 1);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn capacity_is_exact() {
        for (size, align) in [
            (0, 16),
            (4, 4),
            (24, 8),
            (30, 2),
            (33, 1),
            (48, 16),
            (1004, 4),
        ] {
            let room = with_exact_capacity(size);
            assert_eq!((room.capacity(), room.align()), (size, align));
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
