//! The bytes of an op stream: their grammar, and functions to read and write them.
//!
//! Numbers are LEB128 varints; `±` marks a signed one, which is zigzag-encoded first.
//! Everything is decoded against the model that both ends keep (`model`): a cursor into
//! the past ops, and a dictionary of templates (`template`).
//!
//! ```text
//! frame    = record*                     until the frame's count of ops is full
//! record   = varint(n << 3 | kind), then by kind:
//!   0 RUN    n ≥ 1 ops equal those at the cursor and after it, as predicted
//!   1 MOVE   the cursor moves by ±n, to an op that is remembered; adds no op
//!   2 PATCH  the op at the cursor, but where bit i of n is set, value i is new:
//!            value{ones in n}
//!   3 KNOWN  an op of template n:        value{holes}
//!   4 NEW    an op of a new template, which is n bytes long:
//!            byte{n} holes:varint hole{holes} value{holes}
//! hole     = varint(gap << 2 | kind)     gap: template bytes since the last hole
//!                                        kind: 0 id, 1 scalar, 2 index
//! value    = by the kind of its hole:
//!   id       varint(±back << 1 | 0)      back = the id counter − id
//!            varint(id << 1 | 1)         or the id itself
//!   scalar   0 f64:8 bytes | 1 f64 that is an f32:4 bytes | 2 ±i64 | 3 u64
//!            | 4 false | 5 true          a byte for the variant, then its value
//!   index    ±i64
//! ```
//!
//! The *prediction* for the op at the cursor is its template and its values: ids in the
//! form in which they were encoded, other values replaced by their successor where one is
//! known. A PATCH makes the new scalars and indices the successors of those that the op at
//! the cursor had.
//!
//! Each op, however it was encoded, then becomes the newest op of the history, the cursor
//! advances by one, and the id counter is moved past the op's ids. The template of a NEW
//! takes the next number, unless it is too large to keep; if the dictionary is full,
//! everything but the id counter is forgotten first.

use std::iter;

use super::CodecError;

/// Maximum length of a varint in bytes: an id with its mark has 65 bits.
const MAX_VARINT_BYTES: usize = 10;

/// Kind of a record, in the low bits of its head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordKind {
    Run,
    Move,
    Patch,
    Known,
    New,
}

const RECORD_KINDS: [RecordKind; 5] = [
    RecordKind::Run,
    RecordKind::Move,
    RecordKind::Patch,
    RecordKind::Known,
    RecordKind::New,
];

const KIND_BITS: u32 = 3;

/// Width in bits of the largest number that a record's head can carry.
pub(super) const HEAD_BITS: u32 = u64::BITS - KIND_BITS;

/// Writes the head of a record.
pub(super) fn put_head(out: &mut Vec<u8>, kind: RecordKind, n: u64) {
    debug_assert!(n >> HEAD_BITS == 0);
    put_varint(out, n << KIND_BITS | kind as u64);
}

/// Writes a number, seven bits per byte, low bits first.
pub(super) fn put_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Writes a number and a flag as one integer: the flag is the lowest bit, and the number is
/// the rest.
pub(super) fn put_marked(out: &mut Vec<u8>, n: u64, mark: bool) {
    let marked = u128::from(n) << 1 | u128::from(mark);
    if marked < 0x80 {
        return out.push(marked as u8);
    }
    out.push(marked as u8 | 0x80);
    put_varint(out, (marked >> 7) as u64);
}

/// Moves the sign into the lowest bit, so that small numbers of either sign are short.
pub(super) fn zigzag(n: i64) -> u64 {
    (n << 1 ^ n >> 63) as u64
}

/// Undoes [`zigzag`].
pub(super) fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

/// Returns the positions of the bits that are set, the lowest first.
pub(super) fn ones(bits: u64) -> impl Iterator<Item = usize> {
    let rest = iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)));
    rest.take_while(|&bits| bits != 0)
        .map(|bits| bits.trailing_zeros() as usize)
}

/// Reads a frame and tracks its position in it.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the number of bytes not read yet.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns an error for the breach of `rule` at the current position.
    pub(super) fn error(&self, rule: impl Into<String>) -> CodecError {
        CodecError::new("ops", self.at, rule)
    }

    pub(super) fn take(&mut self, n: u64) -> Result<&'a [u8], CodecError> {
        let taken = usize::try_from(n)
            .ok()
            .and_then(|n| self.bytes[self.at..].get(..n))
            .ok_or_else(|| {
                self.error(format!(
                    "{n} bytes are needed, but {} are left",
                    self.left()
                ))
            })?;
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let bytes = self.take(N as u64)?;
        Ok(bytes
            .try_into()
            .expect("the slice has the requested length"))
    }

    pub(super) fn varint(&mut self) -> Result<u64, CodecError> {
        let n = self.wide()?;
        u64::try_from(n).map_err(|_| self.error("a number has more than 64 bits"))
    }

    /// Reads a number and a flag that were written as one integer: the flag is the lowest bit,
    /// and the number is the rest.
    pub(super) fn marked(&mut self) -> Result<(u64, bool), CodecError> {
        let n = self.wide()?;
        match u64::try_from(n >> 1) {
            Ok(number) => Ok((number, n & 1 == 1)),
            Err(_) => Err(self.error("a number has more than 64 bits")),
        }
    }

    fn wide(&mut self) -> Result<u128, CodecError> {
        let mut n = 0;
        for i in 0..MAX_VARINT_BYTES {
            let [byte] = self.array()?;
            n |= u128::from(byte & 0x7f) << (7 * i);
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(self.error(format!("a number is longer than {MAX_VARINT_BYTES} bytes")))
    }

    pub(super) fn head(&mut self) -> Result<(RecordKind, u64), CodecError> {
        let head = self.varint()?;
        let kind = head & ((1 << KIND_BITS) - 1);
        match RECORD_KINDS.get(kind as usize) {
            Some(&kind) => Ok((kind, head >> KIND_BITS)),
            None => Err(self.error(format!("there is no record kind {kind}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_the_round_trip() {
        for n in [0, 1, 127, 128, 1 << 63, u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, n);
            put_marked(&mut bytes, n, true);
            put_marked(&mut bytes, n, false);
            let mut reader = Reader::new(&bytes);
            assert_eq!(reader.varint().unwrap(), n);
            assert_eq!(reader.marked().unwrap(), (n, true));
            assert_eq!(reader.marked().unwrap(), (n, false));
            assert_eq!(zigzag(unzigzag(n)), n);
        }
        assert_eq!([0, -1, 1, -2].map(zigzag), [0, 1, 2, 3]);
    }

    #[test]
    fn ones_returns_positions_of_set_bits() {
        assert!(ones(0).next().is_none());
        assert!(ones(1 << 63 | 0b101).eq([0, 2, 63]));
        assert!(ones(u64::MAX).eq(0..64));
    }

    #[test]
    fn the_end_of_the_bytes_is_an_error() {
        assert!(Reader::new(&[0x80]).varint().is_err());
        assert!(Reader::new(&[0xff; 11]).varint().is_err());
        assert!(Reader::new(&[1, 2]).take(3).is_err());
        assert!(Reader::new(&[1, 2]).take(u64::MAX).is_err());
        assert!(Reader::new(&[7]).head().is_err());
    }
}
