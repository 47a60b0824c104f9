//! Takes a session's state for a snapshot, in two steps.
//!
//! The session's thread takes the state ([`CapturedTensors`], [`Captured`]) and goes on: the names of tensors, and
//! handles of their values, which never change. Another thread makes the [`Snapshot`] of it, which for thousands of
//! tensors takes several times as long.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use burn_ir::{TensorId, TensorIr};
use bytes::Bytes;
use tensord_backend::{DeferredValues, HostStorage, StoredTensor};
use tensord_proto::{
    codec::encode_tensor,
    content::Hash,
    v1::{Fault, FaultKind},
};

use super::{
    super::{
        dataflow::{CapturedCharge, CapturedStorage},
        snapshot::{
            ChargeImage, Header, PoisonedImage, SlotImage, Snapshot, SnapshotError, StorageImage,
            TensorImage,
        },
        snapshot_base::{BaseTracker, Outcome},
    },
    fault::REASON_BYTES,
};
use crate::locks::lock;

/// A session's state at a mark.
pub(crate) struct Captured {
    pub(super) tensors: CapturedTensors,
    pub(super) ops_seen: u64,
    pub(super) decoder_counter: u64,
    /// The upload slots that are in use.
    pub(super) slots: Vec<CapturedSlot>,
    /// The most bytes of uploads that the session may keep.
    pub(super) kept_limit_bytes: u64,
    /// The hashes of the uploads that the session was offered, in order.
    pub(super) held: Vec<u8>,
    /// The id of the base if a new one is made.
    pub(super) new_base_id: u64,
    /// Decides what is in the base, of one snapshot of the session after the other.
    pub(super) base: Arc<Mutex<BaseTracker>>,
    pub(super) outcome: Outcome,
}

/// An upload slot in use.
pub(crate) struct CapturedSlot {
    pub(crate) slot: u32,
    /// A number that changes with its contents.
    pub(crate) version: u64,
    pub(crate) bytes: Bytes,
}

impl Captured {
    /// Sets the hashes of the uploads that the session was offered.
    pub(crate) fn set_held(&mut self, hashes: &[Hash]) {
        self.held = hashes.concat();
    }

    /// Returns what is set when it is known whether the snapshot is kept.
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome.clone()
    }

    /// Returns the bytes of the host's memory into which the device has copied the tensors.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.tensors.values.copied_bytes
    }

    /// Returns the snapshot. Those of a session must be made one after the other, in the order of their marks.
    ///
    /// # Errors
    ///
    /// When the device has returned other tensors than it was asked for.
    pub(crate) fn into_snapshot(mut self) -> Result<Snapshot, SnapshotError> {
        let mut snapshot = self.tensors.into_snapshot()?;
        self.slots.sort_unstable_by_key(|it| it.slot);
        let Snapshot { header, slots, .. } = &mut snapshot;
        (header.ops_seen, header.decoder_counter) = (self.ops_seen, self.decoder_counter);
        header.held = self.held;
        header.kept_limit_bytes = self.kept_limit_bytes;
        let images = self.slots.iter().map(|captured| SlotImage {
            slot: captured.slot,
            size_bytes: captured.bytes.len() as u64,
            base_offset: None,
        });
        header.slots = images.collect();
        let versions: Vec<_> = self.slots.iter().map(|it| it.version).collect();
        *slots = self.slots.into_iter().map(|it| it.bytes).collect();
        snapshot.outcome = self.outcome;
        lock(&self.base).assign(&mut snapshot, &versions, self.new_base_id);
        Ok(snapshot)
    }
}

/// The state of a session's tensors and of its random ops, and the faults that no reply has reported.
pub(super) struct CapturedTensors {
    /// The tensors that have values, in no order.
    pub(super) values: DeferredValues,
    /// What is charged for each of these.
    pub(super) charges: Vec<CapturedCharge>,
    /// The tensors that have a fault instead of a value.
    pub(super) poisoned: Vec<(TensorId, Arc<Fault>)>,
    pub(super) table_names: usize,
    pub(super) unreported: Vec<Arc<Fault>>,
    pub(super) seed: u64,
    pub(super) draws: u64,
}

impl CapturedTensors {
    /// Returns the snapshot, without the state that is not the interpreter's.
    ///
    /// # Errors
    ///
    /// When the device has returned other tensors than it was asked for.
    pub(super) fn into_snapshot(self) -> Result<Snapshot, SnapshotError> {
        let mut builder = Builder::default();
        let (charges, mut poisoned) = (self.charges, self.poisoned);
        let values = (self.values.stored)();
        if values.len() != charges.len() {
            let (returned, tensors) = (values.len(), charges.len());
            let reason = format!("it has returned {returned} tensors of {tensors}");
            return Err(SnapshotError::Device(reason));
        }
        let mut live: Vec<_> = values.into_iter().zip(charges).collect();
        live.sort_unstable_by_key(|((tensor, _), _)| tensor.id.value());
        for ((tensor, stored), charge) in live {
            match stored {
                Ok(stored) => builder.live(&tensor, stored, charge),
                Err(reason) => builder.without_value(tensor.id, reason),
            }
        }
        poisoned.sort_unstable_by_key(|(id, _)| id.value());
        for (id, fault) in &poisoned {
            let (id, fault) = (id.value(), builder.fault(fault));
            builder.header.poisoned.push(PoisonedImage { id, fault });
        }
        for fault in &self.unreported {
            let index = builder.fault(fault);
            builder.header.unreported.push(index);
        }
        builder.header.table_names = self.table_names as u64;
        (builder.header.seed, builder.header.draws) = (self.seed, self.draws);
        Ok(builder.finish())
    }
}

/// A snapshot that is being made.
#[derive(Default)]
struct Builder {
    header: Header,
    storages: Vec<HostStorage>,
    /// The ids of the tensors in the header, in order.
    tensor_ids: Vec<TensorId>,
    /// Indices of the storages, by address.
    storage_indices: HashMap<usize, u32>,
    /// Indices of the charges, by [`CapturedStorage::address`].
    charges: HashMap<usize, u32>,
    /// Indices of the faults, by address.
    faults: HashMap<usize, u32>,
    /// The charged storages, in order. The index of a storage is known once all tensors are added.
    charged: Vec<CapturedStorage>,
}

impl Builder {
    fn live(&mut self, tensor: &TensorIr, stored: StoredTensor, charge: CapturedCharge) {
        let CapturedCharge { own_bytes, shared } = charge;
        let image = TensorImage {
            tensor: encode_tensor(tensor),
            strides: stored.strides.iter().map(|&stride| stride as i64).collect(),
            offset: stored.offset as u64,
            storage: self.storage(stored.storage),
            range_bytes: stored.range_bytes,
            own_bytes,
            charge: shared.map(|storage| self.charge(storage)),
        };
        self.header.tensors.push(image);
        self.tensor_ids.push(tensor.id);
    }

    /// Adds a tensor that has no value, as an op has failed on the device and nobody has read the
    /// tensor since.
    fn without_value(&mut self, id: TensorId, mut reason: String) {
        reason.truncate(reason.floor_char_boundary(REASON_BYTES));
        let Header {
            faults, poisoned, ..
        } = &mut self.header;
        faults.push(Fault {
            kind: FaultKind::Backend.into(),
            reason,
            ..Fault::default()
        });
        let (id, fault) = (id.value(), faults.len() as u32 - 1);
        poisoned.push(PoisonedImage { id, fault });
    }

    fn finish(mut self) -> Snapshot {
        let charges = self.charged.iter().map(|storage| ChargeImage {
            storage: self.storage_indices.get(&storage.id).copied(),
            bytes: storage.bytes,
        });
        self.header.charges = charges.collect();
        Snapshot {
            header: self.header,
            storages: self.storages,
            tensor_ids: self.tensor_ids,
            ..Snapshot::default()
        }
    }

    fn storage(&mut self, storage: HostStorage) -> u32 {
        let Self {
            header, storages, ..
        } = self;
        let address = Arc::as_ptr(&storage) as usize;
        *self.storage_indices.entry(address).or_insert_with(|| {
            header.storages.push(StorageImage {
                size_bytes: storage.len() as u64,
                capacity_bytes: storage.capacity() as u64,
                base_offset: None,
            });
            storages.push(storage);
            storages.len() as u32 - 1
        })
    }

    fn charge(&mut self, storage: CapturedStorage) -> u32 {
        let charged = &mut self.charged;
        *self.charges.entry(storage.address).or_insert_with(|| {
            charged.push(storage);
            charged.len() as u32 - 1
        })
    }

    fn fault(&mut self, fault: &Arc<Fault>) -> u32 {
        let faults = &mut self.header.faults;
        let address = Arc::as_ptr(fault) as usize;
        *self.faults.entry(address).or_insert_with(|| {
            faults.push(Fault::clone(fault));
            faults.len() as u32 - 1
        })
    }
}
