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

/// A tensor of the table.
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
    /// Returns all tensors in the order of their ids, or `None` if a value is pending.
    pub(crate) fn entries(&self) -> Option<Vec<Entry>> {
        if self.pending > 0 {
            return None;
        }
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_unstable_by_key(|(id, _)| id.value());
        let entry = |(&id, state): (&TensorId, &TensorState)| match state {
            TensorState::Live {
                shape,
                dtype,
                holding,
            } => {
                let (own_bytes, shared) = holding.parts();
                let tensor = TensorIr {
                    id,
                    shape: shape.clone(),
                    status: TensorStatus::ReadOnly,
                    dtype: *dtype,
                };
                Some(Entry::Live {
                    tensor,
                    own_bytes,
                    shared: shared.cloned(),
                })
            }
            TensorState::Poisoned(fault) => Some(Entry::Poisoned(id, fault.clone())),
            TensorState::Pending { .. } => None,
        };
        tensors.into_iter().map(entry).collect()
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

    /// Adds a tensor that [`entries`](Self::entries) returned, and charges for it.
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
