//! Gives a session the tensors of a snapshot.

use std::sync::Arc;

use burn_ir::TensorId;
use tensord_backend::StoredTensor;
use tensord_proto::{codec::decode_tensor, v1::Fault};

use super::{
    super::{
        dataflow::{Entry, Refusal},
        snapshot::{Header, Snapshot, SnapshotError},
    },
    tensors::Tensors,
};

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
