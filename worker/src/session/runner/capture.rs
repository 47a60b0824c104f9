//! Takes a session's state for a snapshot, and restores it.

use std::{collections::HashMap, sync::Arc};

use burn_ir::{TensorId, TensorIr};
use tensord_proto::{
    codec::{decode_tensor, encode_tensor},
    v1::{Fault, FaultKind},
};

use super::{
    super::{
        dataflow::{Entry, Refusal, Storage},
        snapshot::{
            ChargeImage, Header, PoisonedImage, Snapshot, SnapshotError, StorageImage, TensorImage,
        },
    },
    fault::REASON_BYTES,
    tensors::Tensors,
};
use crate::backend::{HostStorage, StoredTensor};

/// A snapshot that is being made.
#[derive(Default)]
pub(super) struct Capture {
    header: Header,
    storages: Vec<HostStorage>,
    /// The ids of the tensors in the header, in order.
    tensor_ids: Vec<TensorId>,
    /// Indices of the storages, by address.
    storage_indices: HashMap<usize, u32>,
    /// Indices of the charges, by the address of the charged storage's record.
    charges: HashMap<usize, u32>,
    /// Indices of the faults, by address.
    faults: HashMap<usize, u32>,
    /// The charged storages, whose ids are known once all tensors are captured.
    charged: Vec<Arc<Storage>>,
}

impl Capture {
    /// Adds all tensors. If the device must copy them, it copies up to `max_copied_bytes`.
    ///
    /// # Errors
    ///
    /// When a value is pending, there is more to copy, or the device cannot copy it.
    pub(super) fn tensors(
        &mut self,
        tensors: &mut Tensors,
        max_copied_bytes: u64,
    ) -> Result<(), SnapshotError> {
        self.header.table_names = tensors.table_names() as u64;
        let entries = tensors.entries().ok_or(SnapshotError::Pending)?;
        let live = entries.iter().filter_map(|entry| match entry {
            Entry::Live { tensor, .. } => Some(tensor.clone()),
            Entry::Poisoned(..) => None,
        });
        let live: Vec<_> = live.collect();
        let mut stored = tensors.stored(&live, max_copied_bytes)?.into_iter();
        for entry in entries {
            match entry {
                Entry::Live {
                    tensor,
                    own_bytes,
                    shared,
                } => {
                    let missing = || SnapshotError::Device("a tensor is missing".into());
                    let stored = match stored.next().ok_or_else(missing)? {
                        Ok(stored) => stored,
                        Err(reason) => {
                            self.without_value(&tensor, reason);
                            continue;
                        }
                    };
                    let image = TensorImage {
                        tensor: encode_tensor(&tensor),
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
                Entry::Poisoned(id, fault) => self.poisoned(id, &fault),
            }
        }
        Ok(())
    }

    /// Adds a tensor that has no value, as an op has failed on the device and nobody has read the
    /// tensor since.
    fn without_value(&mut self, tensor: &TensorIr, mut reason: String) {
        reason.truncate(reason.floor_char_boundary(REASON_BYTES));
        let Header {
            faults, poisoned, ..
        } = &mut self.header;
        faults.push(Fault {
            kind: FaultKind::Backend.into(),
            reason,
            ..Fault::default()
        });
        let (id, fault) = (tensor.id.value(), faults.len() as u32 - 1);
        poisoned.push(PoisonedImage { id, fault });
    }

    fn poisoned(&mut self, id: TensorId, fault: &Arc<Fault>) {
        let fault = self.fault(fault);
        let id = id.value();
        self.header.poisoned.push(PoisonedImage { id, fault });
    }

    /// Adds a fault that no reply has reported.
    pub(super) fn unreported(&mut self, fault: &Arc<Fault>) {
        let index = self.fault(fault);
        self.header.unreported.push(index);
    }

    /// Returns the snapshot, without the state that is not the interpreter's.
    pub(super) fn finish(mut self, seed: u64, draws: u64) -> Snapshot {
        (self.header.seed, self.header.draws) = (seed, draws);
        let charges = self.charged.iter().map(|storage| ChargeImage {
            storage: self.storage_indices.get(&storage.id()).copied(),
            bytes: storage.bytes(),
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

    fn charge(&mut self, storage: Arc<Storage>) -> u32 {
        let charged = &mut self.charged;
        let address = Arc::as_ptr(&storage) as usize;
        *self.charges.entry(address).or_insert_with(|| {
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

/// Adds the tensors of a snapshot to a session that has none. Returns the faults that no reply has
/// reported.
///
/// # Errors
///
/// When the snapshot is malformed, or the device has no room for it.
pub(super) fn restore_tensors(
    tensors: &mut Tensors,
    snapshot: &Snapshot,
) -> Result<Vec<Arc<Fault>>, SnapshotError> {
    let Header {
        table_names,
        charges,
        tensors: images,
        faults,
        poisoned,
        unreported,
        ..
    } = &snapshot.header;
    tensors
        .restore_table(*table_names as usize)
        .map_err(refused)?;
    let storages = &snapshot.storages;
    let address = |at: u32| storages.get(at as usize).map(|it| Arc::as_ptr(it) as usize);
    let charges = charges.iter().map(|charge| {
        let id = charge.storage.and_then(address).unwrap_or(0);
        tensors.restore_storage(id, charge.bytes).map_err(refused)
    });
    let charges = charges.collect::<Result<Vec<_>, _>>()?;
    let mut values = Vec::with_capacity(images.len());
    for image in images {
        let tensor = decode_tensor(&image.tensor);
        let tensor = tensor.map_err(|e| SnapshotError::malformed(e.to_string()))?;
        let shared = image.charge.map(|at| found(&charges, at)).transpose()?;
        let stored = StoredTensor {
            storage: found(storages, image.storage)?,
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            strides: image
                .strides
                .iter()
                .map(|&stride| stride as isize)
                .collect(),
            offset: usize::try_from(image.offset).unwrap_or(usize::MAX),
            range_bytes: image.range_bytes,
        };
        if !stored.is_within_storage() {
            let id = tensor.id.value();
            let rule = format!("tensor {id} is not within its storage");
            return Err(SnapshotError::Malformed(rule));
        }
        let id = tensor.id;
        let entry = Entry::Live {
            tensor,
            own_bytes: image.own_bytes,
            shared,
        };
        tensors.restore(entry).map_err(refused)?;
        values.push((id, stored));
    }
    tensors.restore_values(values)?;
    let faults: Vec<_> = faults.iter().cloned().map(Arc::new).collect();
    for image in poisoned {
        let entry = Entry::Poisoned(TensorId::new(image.id), found(&faults, image.fault)?);
        tensors.restore(entry).map_err(refused)?;
    }
    unreported.iter().map(|&at| found(&faults, at)).collect()
}

fn found<T: Clone>(items: &[T], at: u32) -> Result<T, SnapshotError> {
    let item = items.get(at as usize).cloned();
    item.ok_or_else(|| SnapshotError::malformed(format!("index {at} is out of range")))
}

fn refused(refusal: Refusal) -> SnapshotError {
    match refusal {
        Refusal::New(_, reason) => SnapshotError::OutOfMemory(reason),
        Refusal::Inherited(fault) => SnapshotError::Malformed(fault.to_string()),
    }
}
