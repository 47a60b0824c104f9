//! The state of a session at a mark, which another process can go on from.
//!
//! A snapshot has all that later ops depend on: the tensors as they lie in their storages, with
//! what is charged for them; the faults of tensors without a value and those that no reply has
//! reported; the state of random ops; the op number; the kept uploads; and what the op decoder
//! knows. It has no pending values: a mark is executed when all work before it is done.
//!
//! Encoded, it is the size of the header, the header, and the bytes of all storages and kept
//! uploads, in order; but for those that are in the snapshot's base, which several snapshots share
//! (`snapshot_base.rs`). A base has the bytes of storages and uploads alone.

use std::io::{self, Read, Write};

use burn_ir::TensorId;
use bytes::Bytes;
use prost::Message;
use tensord_backend::HostStorage;
use tensord_proto::{aligned, bulk, content::Hash, v1::Fault};

use super::snapshot_base::Outcome;

/// Maximum size of a header: less than 200 bytes for each of the most tensors that a session has.
const MAX_HEADER_BYTES: u64 = 1 << 30;

/// The state of a session at a mark.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    pub(super) header: Header,
    /// The storages of the tensors.
    pub(super) storages: Vec<HostStorage>,
    /// The contents of the upload slots, in the order of `header.slots`.
    pub(super) slots: Vec<Bytes>,
    /// The ids of the tensors, in the order of `header.tensors`, if the snapshot was captured here.
    pub(super) tensor_ids: Vec<TensorId>,
    /// Whether the base is to be kept with this snapshot, and was not with an earlier one.
    pub(super) has_new_base: bool,
    /// Whether the snapshot is kept.
    pub(super) outcome: Outcome,
}

/// All of a snapshot but the contents: a field for each part of a session's state.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "1")]
    pub(super) seed: u64,
    /// Number of random ops since the seed was set.
    #[prost(uint64, tag = "2")]
    pub(super) draws: u64,
    #[prost(uint64, tag = "3")]
    pub(super) ops_seen: u64,
    /// See [`OpDecoder::counter`](tensord_proto::codec::OpDecoder::counter).
    #[prost(uint64, tag = "4")]
    pub(super) decoder_counter: u64,
    /// Number of tensors for which the tables are charged.
    #[prost(uint64, tag = "5")]
    pub(super) table_names: u64,
    #[prost(message, repeated, tag = "6")]
    pub(super) storages: Vec<StorageImage>,
    #[prost(message, repeated, tag = "7")]
    pub(super) charges: Vec<ChargeImage>,
    #[prost(message, repeated, tag = "8")]
    pub(super) tensors: Vec<TensorImage>,
    #[prost(message, repeated, tag = "9")]
    pub(super) faults: Vec<Fault>,
    /// Indices of the tensors that have a fault, with the index of the fault.
    #[prost(message, repeated, tag = "10")]
    pub(super) poisoned: Vec<PoisonedImage>,
    /// Indices of the faults that no reply has reported, oldest first.
    #[prost(uint32, repeated, tag = "11")]
    pub(super) unreported: Vec<u32>,
    #[prost(message, repeated, tag = "12")]
    pub(super) slots: Vec<SlotImage>,
    /// The hashes of the uploads that the session was offered, in order.
    #[prost(bytes = "vec", tag = "13")]
    pub(super) held: Vec<u8>,
    /// The id of the base in which some of the contents are; 0 if there is none.
    #[prost(uint64, tag = "14")]
    pub(super) base: u64,
    #[prost(uint64, tag = "15")]
    pub(super) base_bytes: u64,
    /// The most bytes of uploads that the session may keep.
    #[prost(uint64, tag = "16")]
    pub(super) kept_limit_bytes: u64,
}

/// The memory of a storage.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct StorageImage {
    #[prost(uint64, tag = "1")]
    pub(super) size_bytes: u64,
    /// What the backend has allocated.
    #[prost(uint64, tag = "2")]
    pub(super) capacity_bytes: u64,
    /// Where the bytes are in the base; absent if they are in the snapshot.
    #[prost(uint64, optional, tag = "3")]
    pub(super) base_offset: Option<u64>,
}

/// Memory that is charged once for several tensors.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct ChargeImage {
    /// Index of the storage that is charged, if it is known.
    #[prost(uint32, optional, tag = "1")]
    pub(super) storage: Option<u32>,
    #[prost(uint64, tag = "2")]
    pub(super) bytes: u64,
}

/// A tensor with a value.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorImage {
    /// Burn's `TensorIr` in postcard form.
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) tensor: Bytes,
    /// Index of the storage.
    #[prost(uint32, tag = "2")]
    pub(super) storage: u32,
    #[prost(sint64, repeated, tag = "3")]
    pub(super) strides: Vec<i64>,
    #[prost(uint64, tag = "4")]
    pub(super) offset: u64,
    /// Bytes that are charged for this tensor alone.
    #[prost(uint64, tag = "5")]
    pub(super) own_bytes: u64,
    /// Index of the charge that the tensor shares with others.
    #[prost(uint32, optional, tag = "6")]
    pub(super) charge: Option<u32>,
    /// Bytes of the storage that the tensor may use, from its first element on; absent if all.
    #[prost(uint64, optional, tag = "7")]
    pub(super) range_bytes: Option<u64>,
}

/// A tensor that has a fault instead of a value.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct PoisonedImage {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    /// Index of the fault.
    #[prost(uint32, tag = "2")]
    pub(super) fault: u32,
}

/// An upload that the session keeps.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct SlotImage {
    #[prost(uint32, tag = "1")]
    pub(super) slot: u32,
    #[prost(uint64, tag = "2")]
    pub(super) size_bytes: u64,
    /// Where the bytes are in the base; absent if they are in the snapshot.
    #[prost(uint64, optional, tag = "3")]
    pub(super) base_offset: Option<u64>,
}

/// Why a session cannot be captured or restored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    /// The device could not copy the tensors.
    #[error("the device cannot copy the tensors: {0}")]
    Device(String),
    /// A value has not arrived.
    #[error("a value is pending")]
    Pending,
    /// The device has no room for the tensors.
    #[error("the device has no room for the snapshot: {0}")]
    OutOfMemory(String),
    /// The bytes are not a snapshot that fits this session.
    #[error("the snapshot is malformed: {0}")]
    Malformed(String),
    /// The snapshot cannot be read.
    #[error("the snapshot cannot be read: {0}")]
    Io(#[from] io::Error),
}

impl SnapshotError {
    pub(super) fn malformed(rule: impl Into<String>) -> Self {
        Self::Malformed(rule.into())
    }
}

impl Snapshot {
    /// Returns the hashes of the uploads that the session was offered, in order.
    pub(crate) fn held(&self) -> &[Hash] {
        self.header.held.as_chunks().0
    }

    /// Returns the id of the base in which some of the contents are.
    pub(crate) fn base_id(&self) -> Option<u64> {
        (self.header.base != 0).then_some(self.header.base)
    }

    /// Returns the size of the base.
    pub(crate) fn base_bytes(&self) -> Option<u64> {
        self.base_id().map(|_| self.header.base_bytes)
    }

    /// Returns the number of bytes that [`write_base`](Self::write_base) writes, if the base is new.
    pub(crate) fn new_base_bytes(&self) -> Option<u64> {
        self.has_new_base.then_some(self.header.base_bytes)
    }

    /// Drops the contents that are in a base which is kept already. The device may reuse their memory.
    pub(super) fn drop_contents_in_base(&mut self) {
        let storages = self.header.storages.iter().zip(&mut self.storages);
        for (_, storage) in storages.filter(|(image, _)| image.base_offset.is_some()) {
            *storage = HostStorage::new(burn_backend::Bytes::from_bytes_vec(Vec::new()));
        }
        let slots = self.header.slots.iter().zip(&mut self.slots);
        for (_, slot) in slots.filter(|(image, _)| image.base_offset.is_some()) {
            *slot = Bytes::new();
        }
    }

    /// Returns the number of bytes that [`write`](Self::write) writes.
    pub(crate) fn size_bytes(&self) -> u64 {
        let header = size_of::<u64>() + self.header.encoded_len();
        let contents = self.contents().filter(|(at, _)| at.is_none());
        let contents: usize = contents.map(|(_, bytes)| bytes.len()).sum();
        (header + contents) as u64
    }

    /// Writes the snapshot without its base.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let header = self.header.encode_to_vec();
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (at, bytes) in self.contents() {
            if at.is_none() {
                out.write_all(bytes)?;
            }
        }
        Ok(())
    }

    /// Writes the base, which is new.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub(crate) fn write_base(&self, out: &mut impl Write) -> io::Result<()> {
        // A new base has these contents and no others, in this order.
        for (at, bytes) in self.contents() {
            if at.is_some() {
                out.write_all(bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of all storages and slots, in order, with their offsets in the base.
    fn contents(&self) -> impl Iterator<Item = (Option<u64>, &[u8])> {
        let storages = self.header.storages.iter().zip(&self.storages);
        let storages = storages.map(|(image, storage)| (image.base_offset, &storage[..]));
        let slots = self.header.slots.iter().zip(&self.slots);
        let slots = slots.map(|(image, slot)| (image.base_offset, &slot[..]));
        storages.chain(slots)
    }

    /// Reads a snapshot whose storages and kept uploads may take `max_bytes`. `open_base` returns the
    /// base with an id. The bytes are not trusted.
    ///
    /// # Errors
    ///
    /// When the bytes are not a snapshot, or those of `from` and the base.
    pub(crate) fn read<B: Read>(
        from: &mut (impl Read + ?Sized),
        open_base: impl FnOnce(u64) -> io::Result<B>,
        max_bytes: u64,
    ) -> Result<Self, SnapshotError> {
        let mut size = [0; size_of::<u64>()];
        from.read_exact(&mut size)?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER_BYTES {
            return Err(SnapshotError::malformed(format!(
                "the header has {size} bytes"
            )));
        }
        let header = read(from, size, size)?;
        let header = Header::decode(&*header);
        let header = header.map_err(|e| SnapshotError::malformed(e.to_string()))?;
        let storages = header.storages.iter().map(StorageImage::content);
        let contents: Vec<_> = storages
            .chain(header.slots.iter().map(SlotImage::content))
            .collect();
        let capacities = contents.iter().map(|content| content.capacity_bytes);
        let sum = capacities.fold(0, u64::saturating_add);
        if sum > max_bytes {
            let rule = format!("its contents need {sum} bytes, and the limit is {max_bytes}");
            return Err(SnapshotError::Malformed(rule));
        }
        let mut bytes = vec![None; contents.len()];
        for (content, bytes) in contents.iter().zip(&mut bytes) {
            if content.base_offset.is_none() {
                *bytes = Some(read(from, content.size_bytes, content.capacity_bytes)?);
            }
        }
        let in_base = (0..contents.len()).filter_map(|at| Some((contents[at].base_offset?, at)));
        let mut in_base: Vec<_> = in_base.collect();
        in_base.sort_unstable();
        if !in_base.is_empty() {
            let mut base = BaseReader::new(open_base(header.base)?);
            for (offset, at) in in_base {
                bytes[at] = Some(base.read(offset, contents[at])?);
            }
        }
        let mut bytes: Vec<_> = bytes.into_iter().flatten().collect();
        let slots = bytes.split_off(header.storages.len());
        Ok(Self {
            header,
            storages: bytes.into_iter().map(HostStorage::new).collect(),
            slots: slots.into_iter().map(bulk::shared).collect(),
            ..Self::default()
        })
    }
}

/// The bytes of a storage or a slot.
#[derive(Clone, Copy)]
struct Content {
    size_bytes: u64,
    capacity_bytes: u64,
    base_offset: Option<u64>,
}

impl StorageImage {
    fn content(&self) -> Content {
        Content {
            size_bytes: self.size_bytes,
            capacity_bytes: self.capacity_bytes.max(self.size_bytes),
            base_offset: self.base_offset,
        }
    }
}

impl SlotImage {
    fn content(&self) -> Content {
        Content {
            size_bytes: self.size_bytes,
            capacity_bytes: self.size_bytes,
            base_offset: self.base_offset,
        }
    }
}

/// Reads contents from a base, in ascending order of their offsets.
struct BaseReader<R> {
    from: R,
    at: u64,
}

impl<R: Read> BaseReader<R> {
    fn new(from: R) -> Self {
        Self { from, at: 0 }
    }

    fn read(
        &mut self,
        offset: u64,
        content: Content,
    ) -> Result<burn_backend::Bytes, SnapshotError> {
        let skipped = offset.checked_sub(self.at);
        let skipped =
            skipped.ok_or_else(|| SnapshotError::malformed("its contents overlap in its base"))?;
        let passed = io::copy(&mut (&mut self.from).take(skipped), &mut io::sink())?;
        if passed < skipped {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let bytes = read(&mut self.from, content.size_bytes, content.capacity_bytes)?;
        self.at = offset.saturating_add(content.size_bytes);
        Ok(bytes)
    }
}

/// Reads `size_bytes` into memory with room for `capacity_bytes`. Memory is allocated before the
/// bytes are known to be there, so the caller bounds it.
fn read(
    from: &mut (impl Read + ?Sized),
    size_bytes: u64,
    capacity_bytes: u64,
) -> io::Result<burn_backend::Bytes> {
    let size = usize::try_from(size_bytes).map_err(io::Error::other)?;
    let capacity = usize::try_from(capacity_bytes).map_err(io::Error::other)?;
    let mut bytes = aligned::with_exact_capacity(capacity);
    aligned::fill(&mut bytes, from, size)?;
    Ok(bytes)
}
