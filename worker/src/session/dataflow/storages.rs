//! Which tensors of a session share a storage.
//!
//! The outputs of most ops have storages of their own, of their declared size, and need
//! no lookup. The outputs of views may use an input's storage, and so may the outputs of
//! ops on views, as backends work in place where they can. For these the backend is
//! queried for the storage that an output uses. If it cannot report that, all that the
//! output may use is charged.

use std::sync::Arc;

use burn_backend::{DType, Shape};
use burn_ir::{
    BaseOperationIr, BoolOperationIr, FloatOperationIr, IntOperationIr, ModuleOperationIr,
    OperationIr, TensorId, TensorIr, TensorStatus,
};
use tensord_backend::StorageInfo;
use tensord_proto::{codec::tensor_bytes, v1::FaultKind};

use super::{
    Dataflow, Refusal, TensorState,
    account::{Holding, Storage},
    check_dtype,
};

/// Returns the storage that a tensor uses, if the backend reports it.
pub(crate) type StorageLookup<'a> = &'a mut dyn FnMut(&TensorIr) -> Option<StorageInfo>;

/// Maximum number of an op's tensors that are searched for the storage of an output.
/// Views have one input. If the storage is not found, the output is charged for one of
/// its own.
const MAX_SEARCHED: usize = 64;

/// Bytes by which an input must exceed an output for the output's storage to be looked up, as
/// the output may keep the input's larger storage. The lookup costs little compared with
/// reading so many bytes.
const MIN_LOOKUP_BYTES: u64 = 64 << 10;

/// Whether an op's outputs may use the storages of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aliasing {
    /// Each output has a storage of its own, of its declared size.
    No,
    /// An output may reuse the storage of a consumed input, which may be larger, or have
    /// other users.
    InPlace,
    /// An output may be a view of the first input.
    View,
    /// An output may be a view of a larger tensor, which is no input.
    Part,
}

/// What an op's inputs imply for the storages of its outputs.
#[derive(Debug, Default)]
pub(super) struct InputStorages {
    /// Maximum of the bytes that an input keeps from being freed.
    largest_bytes: u64,
    /// Whether the storage of an input may be shared, or does not have the input's size.
    irregular: bool,
}

impl Dataflow {
    /// Checks an input, and records its storage in `known`.
    pub(super) fn check_input(
        &self,
        input: &TensorIr,
        known: &mut InputStorages,
    ) -> Result<(), Refusal> {
        check_dtype(input.dtype)?;
        let (state, bytes) = self.find(input)?;
        known.largest_bytes = known.largest_bytes.max(bytes);
        if let TensorState::Live { holding, .. } = state {
            known.irregular |= holding.is_shared()
                || Some(bytes) != tensor_bytes(&input.shape, input.dtype).map(|b| b as u64);
        }
        Ok(())
    }

    /// Records the inputs of `op` if its outputs may use their storages. `least_bytes` is
    /// the size of the smallest output.
    pub(super) fn record_sources(
        &mut self,
        op: &OperationIr,
        inputs: &InputStorages,
        least_bytes: u64,
    ) {
        let is_much_smaller = inputs.largest_bytes >= least_bytes.saturating_add(MIN_LOOKUP_BYTES);
        self.aliasing = match may_view(op) {
            true => Aliasing::View,
            false if inputs.irregular || is_much_smaller => Aliasing::InPlace,
            false if may_be_part(op) => Aliasing::Part,
            false => return,
        };
        self.sources.clear();
        self.sources.extend(op.inputs().take(MAX_SEARCHED).cloned());
    }

    /// Charges for the storages that the current op's outputs use, in place of what was
    /// taken for them.
    pub(super) fn charge_storages(&mut self, lookup: StorageLookup<'_>) {
        for at in 0..self.outputs.len() {
            let Some(info) = lookup(&self.outputs[at].0) else {
                self.charge_possible_alias(at);
                continue;
            };
            let storage = match info.is_shared {
                true => self.storage_among_sources(&info, lookup),
                false => None,
            };
            let storage = storage.or_else(|| self.storage_among_outputs(at, &info, lookup));
            let holding = &mut self.outputs[at].1;
            match storage {
                Some(storage) => self.account.join(holding, storage),
                None => self.account.resize(holding, &info),
            }
        }
    }

    /// Returns the storage of `info`, if an input of the current op uses it.
    fn storage_among_sources(
        &mut self,
        info: &StorageInfo,
        lookup: StorageLookup<'_>,
    ) -> Option<Arc<Storage>> {
        let consumed = &self.consumed;
        self.sources.iter().find_map(|source| {
            let Some(TensorState::Live { holding, .. }) = self.tensors.get_mut(&source.id) else {
                return None;
            };
            // A consumed input is not looked up, as the backend has dropped it. If it was the
            // only user of its storage, only outputs can use that storage now.
            let is_consumed = consumed.iter().any(|gone| gone.id == source.id);
            let lookup = || (!is_consumed).then(|| lookup(source)).flatten();
            self.account.find(holding, info, lookup)
        })
    }

    /// Returns the storage of `info`, if an output before the one at `at` uses it.
    fn storage_among_outputs(
        &mut self,
        at: usize,
        info: &StorageInfo,
        lookup: StorageLookup<'_>,
    ) -> Option<Arc<Storage>> {
        if !info.is_shared {
            return None;
        }
        let mut before = self.outputs[..at].iter_mut().take(MAX_SEARCHED);
        before.find_map(|(out, holding)| self.account.find(holding, info, || lookup(out)))
    }

    /// Makes the output at `at` hold the storage that it may use, for a backend that does
    /// not report storages. For a view, that is the storage of the first input.
    /// Otherwise, it is the shared storage of a consumed input that is at least as large.
    fn charge_possible_alias(&mut self, at: usize) {
        if self.aliasing == Aliasing::Part {
            return;
        }
        let (out, holding) = &mut self.outputs[at];
        let out_bytes = tensor_bytes(&out.shape, out.dtype);
        for source in &self.sources {
            let is_last_use = self.consumed.iter().any(|gone| gone.id == source.id);
            let Some(TensorState::Live { holding: kept, .. }) = self.tensors.get_mut(&source.id)
            else {
                continue;
            };
            let in_place = is_last_use
                && kept.is_shared()
                && out_bytes <= tensor_bytes(&source.shape, source.dtype);
            if self.aliasing == Aliasing::View || in_place {
                return self.account.view_of(holding, kept, is_last_use);
            }
        }
    }

    /// Gives the value of `source` a second id. The two tensors share a storage, which is
    /// charged until both are gone. `lookup` is as for [`finish`](Self::finish).
    pub(crate) fn alias(
        &mut self,
        id: TensorId,
        source: TensorId,
        lookup: StorageLookup<'_>,
    ) -> Result<(), Refusal> {
        match self.tensors.get(&source) {
            Some(TensorState::Live { .. }) => {}
            Some(TensorState::Poisoned(fault)) => return Err(Refusal::Inherited(fault.clone())),
            Some(TensorState::Pending { .. }) => {
                let reason = format!("the value of tensor {} is pending", source.value());
                return Err(Refusal::New(FaultKind::Mismatch, reason));
            }
            None => {
                let reason = format!(
                    "tensor {} was never created or has been dropped",
                    source.value()
                );
                return Err(Refusal::New(FaultKind::UnknownTensor, reason));
            }
        }
        self.check_new(id)?;
        let Some(TensorState::Live {
            shape,
            dtype,
            holding,
        }) = self.tensors.get_mut(&source)
        else {
            unreachable!("the tensor is live");
        };
        let (shape, dtype) = (shape.clone(), *dtype);
        let storage_id = storage_id(source, &shape, dtype, holding, lookup);
        let holding = self.account.alias(holding, storage_id)?;
        let state = TensorState::Live {
            shape,
            dtype,
            holding,
        };
        self.tensors.insert(id, state);
        Ok(())
    }

    /// Returns the storage of the tensor `id` for a reply that uses it, or `None` if the tensor
    /// has no value. The storage stays charged until both the tensor and the reply are
    /// dropped. `lookup` is as for [`finish`](Self::finish).
    pub(crate) fn share_storage(
        &mut self,
        id: TensorId,
        lookup: StorageLookup<'_>,
    ) -> Option<Arc<Storage>> {
        let Some(TensorState::Live {
            shape,
            dtype,
            holding,
        }) = self.tensors.get_mut(&id)
        else {
            return None;
        };
        let storage_id = storage_id(id, shape, *dtype, holding, lookup);
        Some(self.account.share(holding, storage_id))
    }
}

/// Returns the backend's id of a tensor's storage, for when the storage is shared for the
/// first time. Returns 0 if the backend does not report it, or the storage is shared and
/// has its id already.
fn storage_id(
    id: TensorId,
    shape: &Shape,
    dtype: DType,
    holding: &Holding,
    lookup: StorageLookup<'_>,
) -> usize {
    if holding.is_shared() {
        return 0;
    }
    let tensor = TensorIr {
        id,
        shape: shape.clone(),
        status: TensorStatus::ReadOnly,
        dtype,
    };
    lookup(&tensor).map_or(0, |info| info.id)
}

/// Returns whether an output of `op` may be a view of a larger tensor that the backend has made for it: Flex pads the
/// input of a convolution, and takes the gradients of input and weight as parts of those with the padding.
fn may_be_part(op: &OperationIr) -> bool {
    use ModuleOperationIr as Op;
    matches!(
        op,
        OperationIr::Module(
            Op::Conv1dXBackward(_)
                | Op::Conv2dXBackward(_)
                | Op::Conv3dXBackward(_)
                | Op::Conv1dWeightBackward(_)
                | Op::Conv2dWeightBackward(_)
                | Op::Conv3dWeightBackward(_)
                | Op::ConvTranspose1dWeightBackward(_)
                | Op::ConvTranspose2dWeightBackward(_)
                | Op::ConvTranspose3dWeightBackward(_)
        )
    )
}

/// Returns whether an output of `op` may be a view of its first input, or that input
/// itself.
fn may_view(op: &OperationIr) -> bool {
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            match op {
                BaseOperationIr::Reshape(_)
                | BaseOperationIr::SwapDims(_)
                | BaseOperationIr::Permute(_)
                | BaseOperationIr::Flip(_)
                | BaseOperationIr::Expand(_)
                | BaseOperationIr::Unfold(_)
                | BaseOperationIr::Slice(_)
                | BaseOperationIr::Cast(_) => true,
                BaseOperationIr::RepeatDim(repeat) => repeat.times == 1,
                BaseOperationIr::Cat(cat) => cat.tensors.len() == 1,
                _ => false,
            }
        }
        OperationIr::Bool(op) => matches!(
            op,
            BoolOperationIr::IntoFloat(_) | BoolOperationIr::IntoInt(_)
        ),
        OperationIr::Int(op) => matches!(op, IntOperationIr::IntoFloat(_)),
        OperationIr::Float(_, op) => matches!(op, FloatOperationIr::IntoInt(_)),
        OperationIr::Custom(_) => true,
        _ => false,
    }
}
