//! The state of a session at a mark, which another process can go on from.
//!
//! A snapshot has all that later ops depend on: the tensors as they lie in their storages, with
//! what is charged for them; the faults of tensors without a value and those that no reply has
//! reported; the state of random ops; the op number; the kept uploads; and what the op decoder
//! knows. It has no pending values: a mark is executed when all work before it is done.
//!
//! Encoded, it is the size of the header, the header, and the bytes of all storages and kept
//! uploads, in order.

use std::io::{self, Read, Write};

use bytes::Bytes;
use prost::Message;
use tensord_proto::{aligned, bulk, content::Hash, v1::Fault};

use crate::backend::HostStorage;

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
}

/// The memory of a storage.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct StorageImage {
    #[prost(uint64, tag = "1")]
    pub(super) size_bytes: u64,
    /// What the backend has allocated.
    #[prost(uint64, tag = "2")]
    pub(super) capacity_bytes: u64,
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

    /// Sets the hashes of the uploads that the session was offered.
    pub(crate) fn set_held(&mut self, hashes: &[Hash]) {
        self.header.held = hashes.concat();
    }

    /// Returns the number of bytes that [`write`](Self::write) writes.
    pub(crate) fn size_bytes(&self) -> u64 {
        let header = size_of::<u64>() + self.header.encoded_len();
        let storages: usize = self.storages.iter().map(|storage| storage.len()).sum();
        let slots: usize = self.slots.iter().map(Bytes::len).sum();
        (header + storages + slots) as u64
    }

    /// Writes the snapshot.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let header = self.header.encode_to_vec();
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for storage in &self.storages {
            out.write_all(storage)?;
        }
        for slot in &self.slots {
            out.write_all(slot)?;
        }
        Ok(())
    }

    /// Reads a snapshot whose storages and kept uploads may take `max_bytes`. The bytes are not
    /// trusted.
    ///
    /// # Errors
    ///
    /// When the bytes are not a snapshot, or those of `from`.
    pub(crate) fn read(
        from: &mut (impl Read + ?Sized),
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
        let capacity = |storage: &StorageImage| storage.capacity_bytes.max(storage.size_bytes);
        let capacities = header.storages.iter().map(capacity);
        let slots = header.slots.iter().map(|slot| slot.size_bytes);
        let sum = capacities.chain(slots).fold(0, u64::saturating_add);
        if sum > max_bytes {
            let rule = format!("its contents need {sum} bytes, and the limit is {max_bytes}");
            return Err(SnapshotError::Malformed(rule));
        }
        let storages = header
            .storages
            .iter()
            .map(|storage| read(from, storage.size_bytes, capacity(storage)).map(HostStorage::new));
        let storages = storages.collect::<Result<_, _>>()?;
        let slots = header.slots.iter().map(|slot| {
            let bytes = read(from, slot.size_bytes, slot.size_bytes)?;
            Ok::<_, io::Error>(bulk::shared(bytes))
        });
        let slots = slots.collect::<Result<_, _>>()?;
        Ok(Self {
            header,
            storages,
            slots,
        })
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
