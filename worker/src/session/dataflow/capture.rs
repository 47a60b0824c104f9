//! The table's state, as a snapshot has it.
//!
//! A restored table charges exactly what the captured one did, so that the same later ops
//! are refused for memory.

use std::sync::Arc;

use burn_ir::{TensorId, TensorIr, TensorStatus};
use tensord_proto::v1::Fault;

use super::{
    Dataflow, Refusal, TensorState,
    account::{Holding, NAME_BYTES, Storage},
    check_dtype,
};

/// All tensors of a table, in no order. Nothing of it keeps the session's memory charged, so it may be kept while
/// the session goes on.
pub(crate) struct CapturedTable {
    /// The tensors with a value.
    pub(crate) live: Vec<TensorIr>,
    /// What is charged for each of these.
    pub(crate) charges: Vec<CapturedCharge>,
    /// The tensors that have a fault instead of a value.
    pub(crate) poisoned: Vec<(TensorId, Arc<Fault>)>,
}

/// What is charged for a tensor.
#[derive(Clone, Copy)]
pub(crate) struct CapturedCharge {
    /// Bytes that are charged for this tensor alone.
    pub(crate) own_bytes: u64,
    /// The storage that other tensors may share.
    pub(crate) shared: Option<CapturedStorage>,
}

/// A storage that several tensors may share.
#[derive(Clone, Copy)]
pub(crate) struct CapturedStorage {
    /// The address of its [`Storage`], which distinguishes it from the others of the table.
    pub(crate) address: usize,
    /// The backend's id of the storage, or 0 if it is not known.
    pub(crate) id: usize,
    /// Bytes that are charged for it.
    pub(crate) bytes: u64,
}

impl CapturedStorage {
    fn of(storage: &Arc<Storage>) -> Self {
        Self {
            address: Arc::as_ptr(storage) as usize,
            id: storage.id(),
            bytes: storage.bytes(),
        }
    }
}

/// A tensor of the table, as it is restored.
pub(crate) enum Entry {
    /// A tensor with a value.
    Live {
        tensor: TensorIr,
        /// Bytes that are charged for this tensor alone.
        own_bytes: u64,
        /// The storage that other tensors may share.
        shared: Option<Arc<Storage>>,
    },
    /// A tensor that has a fault instead of a value.
    Poisoned(TensorId, Arc<Fault>),
}

impl Dataflow {
    /// Returns all tensors, or `None` if a value is pending.
    pub(crate) fn capture(&self) -> Option<CapturedTable> {
        let mut captured = CapturedTable {
            live: Vec::with_capacity(self.tensors.len()),
            charges: Vec::with_capacity(self.tensors.len()),
            poisoned: Vec::new(),
        };
        for (&id, state) in &self.tensors {
            match state {
                TensorState::Live {
                    shape,
                    dtype,
                    holding,
                } => {
                    let (own_bytes, shared) = holding.parts();
                    captured.live.push(TensorIr {
                        id,
                        shape: shape.clone(),
                        status: TensorStatus::ReadOnly,
                        dtype: *dtype,
                    });
                    let shared = shared.map(CapturedStorage::of);
                    captured.charges.push(CapturedCharge { own_bytes, shared });
                }
                TensorState::Poisoned(fault) => captured.poisoned.push((id, fault.clone())),
                TensorState::Pending { .. } => return None,
            }
        }
        Some(captured)
    }

    /// Returns the number of tensors for which the session's tables are charged.
    pub(crate) fn table_names(&self) -> usize {
        self.account.table_names()
    }

    /// Charges for tables with room for `names` tensors, as [`table_names`](Self::table_names)
    /// returned.
    pub(crate) fn restore_table(&mut self, names: usize) -> Result<(), Refusal> {
        self.account.make_room(names)
    }

    /// Charges for a storage of `bytes` that tensors share. `id` is the backend's id of it, or 0 if
    /// it is not known.
    pub(crate) fn restore_storage(
        &mut self,
        id: usize,
        bytes: u64,
    ) -> Result<Arc<Storage>, Refusal> {
        self.account.restore_storage(id, bytes)
    }

    /// Adds a tensor of a snapshot, and charges for it.
    pub(crate) fn restore(&mut self, entry: Entry) -> Result<(), Refusal> {
        match entry {
            Entry::Live {
                tensor,
                own_bytes,
                shared,
            } => {
                check_dtype(tensor.dtype)?;
                self.check_new(tensor.id)?;
                self.account.take(own_bytes.saturating_add(NAME_BYTES))?;
                let state = TensorState::Live {
                    shape: tensor.shape,
                    dtype: tensor.dtype,
                    holding: Holding::restored(own_bytes, shared),
                };
                self.tensors.insert(tensor.id, state);
            }
            Entry::Poisoned(id, fault) => {
                self.check_new(id)?;
                self.account.take_fault(&fault)?;
                self.tensors.insert(id, TensorState::Poisoned(fault));
            }
        }
        Ok(())
    }
}
