//! Where the bytes of uploads are.
//!
//! An upload is an `Init` op in the op stream, which costs nothing in a loop that makes
//! similar uploads in each iteration. The frame also has a list that gives, for each
//! upload among its ops, in order, where the upload's bytes are: in the list itself, in
//! the next payload on the track for bulk bytes, or already with the worker. The sender
//! decides what the worker keeps, and where: a *slot* holds one upload, and keeping
//! another one in the slot drops the first. So no negotiation is needed, and both ends
//! have the same state.
//!
//! Each entry is a varint, a number with the kind in its low bits:
//!
//! | kind | meaning | the number |
//! | --- | --- | --- |
//! | 0 | the tensor's bytes follow | 0, or the slot to keep them in, plus 1 |
//! | 1 | the next payload | the same |
//! | 2 | the upload in a slot | the slot |
//! | 3 | an upload that the worker kept of an earlier session | its index in `Held` |
//! | 4 | no upload: a slot is no longer needed | the slot |

use bytes::{Buf, Bytes};
use prost::encoding::{decode_varint, encode_varint};

use crate::codec::CodecError;

/// Number of slots of a session.
pub const MAX_SLOTS: u32 = 1 << 17;

/// Maximum number of uploads of earlier sessions that a worker lists in `Held`.
pub const MAX_HELD: usize = 1 << 13;

/// Bytes of one hash in `Held`.
pub const HASH_BYTES: usize = 16;

/// A BLAKE3 hash, truncated to 128 bits, by which both ends identify an upload.
pub type Hash = [u8; HASH_BYTES];

/// Returns the hash of an upload's bytes.
pub fn hash(bytes: &[u8]) -> Hash {
    *blake3::hash(bytes)
        .as_bytes()
        .first_chunk()
        .expect("a hash has more bytes than this")
}

/// Returns the [`hash`] of all bytes that `reader` returns.
///
/// # Errors
///
/// When `reader` fails.
pub fn hash_reader(reader: impl std::io::Read) -> std::io::Result<Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(reader)?;
    Ok(*hasher
        .finalize()
        .as_bytes()
        .first_chunk()
        .expect("a hash has more bytes than this"))
}

/// Returns how much of a session's limit for kept bytes an upload of `size` bytes takes:
/// its bytes and an overhead for bookkeeping.
pub const fn kept_cost(size: usize) -> u64 {
    size as u64 + 64
}

/// Where the bytes of an upload are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// In the list itself.
    Inline {
        /// The bytes.
        bytes: Bytes,
        /// Slot to keep the bytes in.
        keep: Option<u32>,
    },
    /// In the next payload.
    Payload {
        /// Slot to keep the payload in.
        keep: Option<u32>,
    },
    /// In a slot.
    Slot(u32),
    /// Among the uploads kept of earlier sessions, at this index of `Held`.
    Held(u32),
}

/// An entry of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// An upload.
    Upload(Content),
    /// A slot that is no longer needed.
    Forget(u32),
}

const INLINE: u64 = 0;
const PAYLOAD: u64 = 1;
const SLOT: u64 = 2;
const HELD: u64 = 3;
const FORGET: u64 = 4;
const KIND_BITS: u32 = 3;

/// Appends an entry to a frame's list.
pub fn put(out: &mut Vec<u8>, entry: &Entry) {
    let kept = |keep: &Option<u32>| keep.map_or(0, |slot| u64::from(slot) + 1);
    let (kind, number) = match entry {
        Entry::Upload(Content::Inline { keep, .. }) => (INLINE, kept(keep)),
        Entry::Upload(Content::Payload { keep }) => (PAYLOAD, kept(keep)),
        Entry::Upload(Content::Slot(slot)) => (SLOT, u64::from(*slot)),
        Entry::Upload(Content::Held(place)) => (HELD, u64::from(*place)),
        Entry::Forget(slot) => (FORGET, u64::from(*slot)),
    };
    encode_varint(number << KIND_BITS | kind, out);
    if let Entry::Upload(Content::Inline { bytes, .. }) = entry {
        out.extend_from_slice(bytes);
    }
}

/// Decodes a frame's list.
#[derive(Debug, Default)]
pub struct Contents {
    left: Bytes,
    size: usize,
}

impl Contents {
    /// Creates a decoder at the start of `list`.
    pub fn new(list: Bytes) -> Self {
        Self {
            size: list.len(),
            left: list,
        }
    }

    /// Creates an error at the current position.
    pub fn error(&self, rule: impl Into<String>) -> CodecError {
        CodecError::new("contents", self.size - self.left.len(), rule)
    }

    /// Returns whether the whole list was read.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Returns the next entry. `size` is the size in bytes of the next upload's tensor:
    /// an inline upload has that many bytes in the list.
    ///
    /// # Errors
    ///
    /// When the list ends, or the entry breaks a rule; the error names the position.
    pub fn next(&mut self, size: usize) -> Result<Entry, CodecError> {
        let offset = self.size - self.left.len();
        let error = |rule: String| CodecError::new("contents", offset, rule);
        let head =
            decode_varint(&mut self.left).map_err(|_| error("an entry is missing".into()))?;
        let number = head >> KIND_BITS;
        let slot = |number: u64| match u32::try_from(number) {
            Ok(slot) if slot < MAX_SLOTS => Ok(slot),
            _ => Err(error(format!(
                "slot {number} does not exist; there are {MAX_SLOTS} slots"
            ))),
        };
        let keep = |number: u64| number.checked_sub(1).map(slot).transpose();
        let content = match head & ((1 << KIND_BITS) - 1) {
            INLINE if size > self.left.len() => {
                let left = self.left.len();
                return Err(error(format!(
                    "the list has {left} bytes left, but an upload needs {size}"
                )));
            }
            INLINE => Content::Inline {
                keep: keep(number)?,
                bytes: self.left.copy_to_bytes(size),
            },
            PAYLOAD => Content::Payload {
                keep: keep(number)?,
            },
            SLOT => Content::Slot(slot(number)?),
            HELD if number < MAX_HELD as u64 => Content::Held(number as u32),
            HELD => {
                return Err(error(format!(
                    "place {number} does not exist; there are {MAX_HELD} places"
                )));
            }
            FORGET => return Ok(Entry::Forget(slot(number)?)),
            kind => return Err(error(format!("there is no entry kind {kind}"))),
        };
        Ok(Entry::Upload(content))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slots() -> impl Strategy<Value = u32> {
        prop_oneof![0u32..3, Just(MAX_SLOTS - 1)]
    }

    fn entries() -> impl Strategy<Value = Entry> {
        let bytes = prop::collection::vec(any::<u8>(), 0..9).prop_map(Bytes::from);
        let keep = || prop::option::of(slots());
        prop_oneof![
            (bytes, keep()).prop_map(|(bytes, keep)| Content::Inline { bytes, keep }),
            keep().prop_map(|keep| Content::Payload { keep }),
            slots().prop_map(Content::Slot),
            (0..MAX_HELD as u32).prop_map(Content::Held),
        ]
        .prop_map(Entry::Upload)
        .boxed()
        .prop_union(slots().prop_map(Entry::Forget).boxed())
    }

    proptest! {
        #[test]
        fn entries_survive_the_round_trip(entries in prop::collection::vec(entries(), 0..20)) {
            let mut list = Vec::new();
            entries.iter().for_each(|entry| put(&mut list, entry));
            let mut contents = Contents::new(list.into());
            for entry in entries {
                let size = match &entry {
                    Entry::Upload(Content::Inline { bytes, .. }) => bytes.len(),
                    _ => 1000,
                };
                prop_assert_eq!(contents.next(size), Ok(entry));
            }
            prop_assert!(contents.is_empty());
        }

        #[test]
        fn malformed_list_error_names_the_offset(
            list in prop::collection::vec(any::<u8>(), 0..40),
            size in 0usize..50,
        ) {
            let mut contents = Contents::new(list.clone().into());
            while !contents.is_empty() {
                let Err(e) = contents.next(size) else { continue };
                prop_assert!(e.offset < list.len() && !e.rule.is_empty());
                return Ok(());
            }
        }
    }

    #[test]
    fn each_rule_is_named() {
        let error = |list: &[u8]| Contents::new(Bytes::copy_from_slice(list)).next(5);
        let rule = |list: &[u8]| error(list).unwrap_err().to_string();
        assert!(rule(&[]).contains("at byte 0: an entry is missing"));
        assert!(rule(&[0x80]).contains("an entry is missing"));
        assert!(rule(&[0, 1, 2]).contains("the list has 2 bytes left, but an upload needs 5"));
        assert!(rule(&[7]).contains("no entry kind 7"));
        let mut far = Vec::new();
        encode_varint(u64::from(MAX_SLOTS) << KIND_BITS | SLOT, &mut far);
        assert!(rule(&far).contains("slot 131072 does not exist; there are 131072 slots"));
        far.clear();
        encode_varint((MAX_HELD as u64) << KIND_BITS | HELD, &mut far);
        assert!(rule(&far).contains("place 8192 does not exist; there are 8192 places"));
    }
}
