//! Which tensors of a session exist, which are poisoned, and by which fault.
//!
//! Before an op reaches the backend, this table decides whether the op may run: every
//! input must exist, have the shape and dtype that the op declares, and have a value. An
//! op that may not run, or that failed, leaves its outputs poisoned with the first fault.
//! So a fault propagates along the dataflow to the reads that depend on it, and
//! everything else runs on.
//!
//! The table does not call a backend. `account` charges device memory for tensors,
//! `storages` decides which tensors share a storage, and `capture` takes the table's state
//! for a snapshot and restores it.

mod account;
mod capture;
mod refusal;
mod storages;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, sync::Arc};

use burn_backend::{DType, Shape};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use foldhash::fast::RandomState;
use tensord_proto::{
    codec::tensor_bytes,
    v1::{Fault, FaultKind},
};

use self::{
    account::{Account, Holding},
    storages::{Aliasing, InputStorages, StorageLookup},
};
pub(crate) use self::{
    account::{NAME_BYTES, Storage},
    capture::{CapturedCharge, CapturedStorage, CapturedTable, Entry},
    refusal::{Refusal, out_of_memory},
};
use crate::memory::SessionMemory;

/// Maximum number of tensors of a session at a time: live, pending or poisoned.
const MAX_TENSORS: usize = 1 << 22;

/// Capacity, in tensors, that the lists of an op's consumed tensors and outputs keep for the
/// next op.
const RETAINED_CAPACITY: usize = 64;

#[derive(Debug)]
enum TensorState {
    Live {
        shape: Shape,
        dtype: DType,
        holding: Holding,
    },
    /// The value arrives later, under this ticket.
    Pending {
        ticket: u64,
        shape: Shape,
        dtype: DType,
        holding: Holding,
    },
    Poisoned(Arc<Fault>),
}

/// The tensors of one session.
#[derive(Debug)]
pub(crate) struct Dataflow {
    /// Looked up several times per op, so the hasher is faster than the standard
    /// library's. It is seeded all the same, as a program chooses the ids.
    tensors: HashMap<TensorId, TensorState, RandomState>,
    /// Number of pending tensors.
    pending: usize,
    account: Account,
    /// The tensors that the current op consumes, recorded when it begins: the op itself
    /// goes to the backend, and copying it takes time.
    consumed: Vec<TensorIr>,
    /// The outputs of the current op, and the memory taken for each.
    outputs: Vec<(TensorIr, Holding)>,
    /// Whether the outputs may use storages of the inputs. If so, `sources` has the
    /// inputs.
    aliasing: Aliasing,
    sources: Vec<TensorIr>,
}

/// The kinds of tensors that Burn distinguishes by type.
#[derive(Debug, PartialEq)]
enum TensorKind {
    Float,
    Int,
    Bool,
    Quantized,
}

fn kind(dtype: DType) -> TensorKind {
    match dtype {
        DType::Bool(_) => TensorKind::Bool,
        DType::QFloat(_) => TensorKind::Quantized,
        dtype if dtype.is_float() => TensorKind::Float,
        _ => TensorKind::Int,
    }
}

impl Dataflow {
    pub(crate) fn new(memory: SessionMemory) -> Self {
        Self {
            tensors: HashMap::default(),
            pending: 0,
            account: Account::new(memory),
            consumed: Vec::new(),
            outputs: Vec::new(),
            aliasing: Aliasing::No,
            sources: Vec::new(),
        }
    }

    /// Returns the number of tensors: live, pending or poisoned.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Checks that `tensor` may be read.
    pub(crate) fn check(&self, tensor: &TensorIr) -> Result<(), Refusal> {
        self.find(tensor).map(drop)
    }

    /// Returns the entry of `tensor`, if it may be read, and the bytes that the tensor
    /// keeps from being freed.
    fn find(&self, tensor: &TensorIr) -> Result<(&TensorState, u64), Refusal> {
        let state = self.tensors.get(&tensor.id).ok_or_else(|| {
            let reason = format!(
                "tensor {} was never created or has been dropped",
                tensor.id.value()
            );
            Refusal::New(FaultKind::UnknownTensor, reason)
        })?;
        let (shape, dtype, bytes) = match state {
            TensorState::Poisoned(fault) => return Err(Refusal::Inherited(fault.clone())),
            TensorState::Live {
                shape,
                dtype,
                holding,
            }
            | TensorState::Pending {
                shape,
                dtype,
                holding,
                ..
            } => (shape, dtype, holding.bytes()),
        };
        if *shape == tensor.shape && *dtype == tensor.dtype {
            return Ok((state, bytes));
        }
        let reason = format!(
            "tensor {} is {shape} of {}, but the op declares {} of {}",
            tensor.id.value(),
            dtype.name(),
            tensor.shape,
            tensor.dtype.name(),
        );
        Err(Refusal::New(FaultKind::Mismatch, reason))
    }

    /// Returns whether the value of `id` is pending.
    pub(crate) fn is_pending(&self, id: TensorId) -> bool {
        self.pending > 0 && matches!(self.tensors.get(&id), Some(TensorState::Pending { .. }))
    }

    /// Returns whether `id` has a value.
    pub(crate) fn is_live(&self, id: TensorId) -> bool {
        matches!(self.tensors.get(&id), Some(TensorState::Live { .. }))
    }

    /// Returns whether `op` needs a pending value. A drop needs none.
    pub(crate) fn must_wait(&self, op: &OperationIr) -> bool {
        self.pending > 0
            && !matches!(op, OperationIr::Drop(_))
            && op.inputs().any(|input| self.is_pending(input.id))
    }

    /// Takes memory that is not for an op's outputs: for a tensor that no op makes, or
    /// for what a kernel needs in addition while its op runs.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<SessionMemory, Refusal> {
        let mut memory = self.account.new_account();
        memory.take(bytes).map_err(out_of_memory)?;
        Ok(memory)
    }

    /// Checks `id` as [`check_new`](Self::check_new) does, and adds the cost of a name to
    /// `held`, the memory already taken for the tensor's elements.
    pub(crate) fn charge_name(
        &mut self,
        id: TensorId,
        held: &mut SessionMemory,
    ) -> Result<(), Refusal> {
        self.check_new(id)?;
        held.take(NAME_BYTES).map_err(out_of_memory)
    }

    /// Decides whether `op` may run, and takes the memory its outputs need.
    ///
    /// If `op` may run, [`finish`](Self::finish), [`fail`](Self::fail) or
    /// [`make_outputs_pending`](Self::make_outputs_pending) must follow, otherwise
    /// [`poison`](Self::poison). A refused drop may be finished as if it had been accepted.
    pub(crate) fn begin(&mut self, op: &OperationIr) -> Result<(), Refusal> {
        // Cleared before the checks: a refused drop is finished too, and must not make the
        // outputs live that are left over from an earlier refused op.
        self.outputs.clear();
        self.aliasing = Aliasing::No;
        let inputs = self.record_consumed(op)?;
        let (mut sum, mut least) = (0u64, u64::MAX);
        for out in op.outputs() {
            check_dtype(out.dtype)?;
            self.check_new(out.id)?;
            let bytes = tensor_bytes(&out.shape, out.dtype).map(|bytes| bytes as u64);
            let with = |bytes: u64| sum.checked_add(NAME_BYTES)?.checked_add(bytes);
            let Some((bytes, with)) = bytes.and_then(|bytes| Some((bytes, with(bytes)?))) else {
                let reason = "an output has more bytes than can be addressed".into();
                return Err(Refusal::New(FaultKind::OutOfMemory, reason));
            };
            self.outputs.push((out.clone(), Holding::own(bytes)));
            (sum, least) = (with, least.min(bytes));
        }
        self.account.take(sum)?;
        self.record_sources(op, &inputs, least);
        Ok(())
    }

    /// Records the tensors that `op` consumes, and checks its inputs. Returns what the inputs
    /// imply for the outputs' storages, or the first refusal. One pass does both, as each call
    /// of [`OperationIr::inputs`] allocates.
    fn record_consumed(&mut self, op: &OperationIr) -> Result<InputStorages, Refusal> {
        let is_drop = matches!(op, OperationIr::Drop(_));
        let mut consumed = std::mem::take(&mut self.consumed);
        consumed.clear();
        let mut inputs = Ok(InputStorages::default());
        for input in op.inputs() {
            if is_drop || input.status == TensorStatus::ReadWrite {
                consumed.push(input.clone());
            }
            if let Ok(known) = &mut inputs
                && let Err(refusal) = self.check_input(input, known)
            {
                inputs = Err(refusal);
            }
        }
        self.consumed = consumed;
        inputs
    }

    /// Checks that a tensor may be made under `id`, and charges for its place in the
    /// tables.
    pub(crate) fn check_new(&mut self, id: TensorId) -> Result<(), Refusal> {
        if self.tensors.contains_key(&id) {
            let reason = format!("tensor {} already exists", id.value());
            return Err(Refusal::New(FaultKind::Mismatch, reason));
        }
        if self.tensors.len() >= MAX_TENSORS {
            let reason = format!("the session has {MAX_TENSORS} tensors, which is the limit");
            return Err(Refusal::New(FaultKind::OutOfMemory, reason));
        }
        self.account
            .make_room(self.tensors.len() + self.outputs.len() + 1)
    }

    /// Completes the op that was begun: removes the tensors that it consumed, and makes
    /// its outputs live. `lookup` returns the storage of a tensor, if the backend reports
    /// it.
    pub(crate) fn finish(&mut self, lookup: StorageLookup<'_>) {
        if self.aliasing != Aliasing::No {
            self.charge_storages(lookup);
        }
        let mut consumed = self.consume();
        for (out, holding) in self.outputs.drain(..) {
            let state = TensorState::Live {
                shape: out.shape,
                dtype: out.dtype,
                holding,
            };
            // An op that names an output twice has made one tensor.
            if let Some(TensorState::Live { holding, .. }) = self.tensors.insert(out.id, state) {
                self.account.release(&holding);
            }
        }
        // An op may have very many tensors. The capacity for those is not kept.
        consumed.clear();
        consumed.shrink_to(RETAINED_CAPACITY);
        self.consumed = consumed;
        self.outputs.shrink_to(RETAINED_CAPACITY);
    }

    /// Poisons the outputs of the op that was begun, which failed with `fault`. Returns
    /// the tensors that it was to consume, and those that it may have made, for the
    /// backend to forget.
    pub(crate) fn fail(&mut self, fault: &Arc<Fault>) -> Vec<TensorIr> {
        let mut left = self.consume();
        for (out, holding) in std::mem::take(&mut self.outputs) {
            self.account.release(&holding);
            self.insert_poisoned(out.id, fault.clone());
            left.push(out);
        }
        left
    }

    /// Poisons the outputs of `op`, which may not run, with `fault`. Returns the tensors
    /// that it was to consume, for the backend to forget.
    pub(crate) fn poison(&mut self, op: &OperationIr, fault: &Arc<Fault>) -> Vec<TensorIr> {
        // The caller has the refusal already.
        let _ = self.record_consumed(op);
        self.outputs.clear();
        let consumed = self.consume();
        for out in op.outputs() {
            self.insert_poisoned(out.id, fault.clone());
        }
        consumed
    }

    /// Makes the outputs of the op that was begun pending: they arrive under `ticket`.
    /// Returns the tensors that the op consumed, for the backend to forget.
    pub(crate) fn make_outputs_pending(&mut self, ticket: u64) -> Vec<TensorIr> {
        let consumed = self.consume();
        for (out, holding) in std::mem::take(&mut self.outputs) {
            self.insert_pending(&out, ticket, holding);
        }
        consumed
    }

    /// Adds a pending tensor that arrives under `ticket`. `held` is the memory taken for
    /// the tensor and its name.
    pub(crate) fn add_pending(&mut self, out: &TensorIr, ticket: u64, held: SessionMemory) {
        let holding = self.account.merge(held);
        self.insert_pending(out, ticket, holding);
    }

    fn insert_pending(&mut self, out: &TensorIr, ticket: u64, holding: Holding) {
        self.remove(out.id);
        self.pending += 1;
        let state = TensorState::Pending {
            ticket,
            shape: out.shape.clone(),
            dtype: out.dtype,
            holding,
        };
        self.tensors.insert(out.id, state);
    }

    /// Returns the shape and dtype of the pending tensor `id` with this `ticket`, or
    /// `None` if it was dropped meanwhile.
    pub(crate) fn pending_type(&self, id: TensorId, ticket: u64) -> Option<(Shape, DType)> {
        match self.tensors.get(&id) {
            Some(TensorState::Pending {
                ticket: of,
                shape,
                dtype,
                ..
            }) if *of == ticket => Some((shape.clone(), *dtype)),
            _ => None,
        }
    }

    /// Makes the pending tensor `id` live, or poisons it with the fault in `value`.
    pub(crate) fn resolve_pending(&mut self, id: TensorId, value: Result<(), Arc<Fault>>) {
        if !matches!(self.tensors.get(&id), Some(TensorState::Pending { .. })) {
            return;
        }
        let Err(fault) = value else {
            if let Some(state) = self.tensors.get_mut(&id)
                && let TensorState::Pending {
                    shape,
                    dtype,
                    holding,
                    ..
                } = state
            {
                self.pending -= 1;
                *state = TensorState::Live {
                    shape: shape.clone(),
                    dtype: *dtype,
                    holding: std::mem::take(holding),
                };
            }
            return;
        };
        self.remove(id);
        self.insert_poisoned(id, fault);
    }

    /// Adds an uploaded tensor. `held` is the memory taken for the tensor and its name.
    pub(crate) fn insert(&mut self, id: TensorId, shape: Shape, dtype: DType, held: SessionMemory) {
        let holding = self.account.merge(held);
        self.tensors.insert(
            id,
            TensorState::Live {
                shape,
                dtype,
                holding,
            },
        );
    }

    /// Adds a poisoned tensor. Does nothing if `id` exists, which then keeps its state, or if
    /// there is no room for another tensor: `id` then stays unknown, and ops that use an
    /// unknown tensor are refused too.
    pub(crate) fn insert_poisoned(&mut self, id: TensorId, fault: Arc<Fault>) {
        if self.check_new(id).is_ok() && self.account.take_fault(&fault).is_ok() {
            self.tensors.insert(id, TensorState::Poisoned(fault));
        }
    }

    /// Removes `tensor` after a read, if the read was its last use.
    pub(crate) fn release(&mut self, tensor: &TensorIr) {
        if tensor.status == TensorStatus::ReadWrite {
            self.remove(tensor.id);
        }
    }

    fn remove(&mut self, id: TensorId) {
        match self.tensors.remove(&id) {
            Some(TensorState::Live { holding, .. }) => self.account.release(&holding),
            Some(TensorState::Pending { holding, .. }) => {
                self.pending -= 1;
                self.account.release(&holding);
            }
            Some(TensorState::Poisoned(fault)) => self.account.release_fault(&fault),
            None => {}
        }
    }

    fn consume(&mut self) -> Vec<TensorIr> {
        let consumed = std::mem::take(&mut self.consumed);
        for tensor in &consumed {
            self.remove(tensor.id);
        }
        consumed
    }
}

/// Refuses the dtypes that Burn's interpreter cannot process at all.
fn check_dtype(dtype: DType) -> Result<(), Refusal> {
    if kind(dtype) == TensorKind::Quantized {
        let reason = "quantized tensors are not supported by Burn's router".into();
        return Err(Refusal::New(FaultKind::Unsupported, reason));
    }
    Ok(())
}
