//! Which tensors of a session exist, which are poisoned, and by what.
//!
//! Before an op reaches the backend this table decides whether it may: every
//! input must be there, of the kind and shape the op believes, and have a
//! value. An op that may not run, or that failed, leaves its outputs poisoned
//! with the first cause, and so the fault travels the dataflow to whoever
//! reads it, while everything else goes on.
//!
//! Knows no backend: it sees ops and answers with decisions. What tensors cost is in
//! `account`, and which of them share a storage in `storages`.

mod account;
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

pub(crate) use self::account::{NAME_BYTES, Storage};
use self::{
    account::{Account, Holding},
    storages::{Aliasing, Inputs, StorageLookup},
};
use crate::{
    memory::{OutOfMemory, SessionMemory, human},
    op_check::Broken,
};

/// Tensors a session may have at once, live or poisoned.
const MAX_TENSORS: usize = 1 << 22;

/// Tensors of an op that room is kept for, from one op to the next.
const KEPT: usize = 64;

#[derive(Debug)]
enum Slot {
    Live {
        shape: Shape,
        dtype: DType,
        holding: Holding,
    },
    /// Its value is on the way, under this ticket.
    Pending {
        ticket: u64,
        shape: Shape,
        dtype: DType,
        holding: Holding,
    },
    Poisoned(Arc<Fault>),
}

impl From<Broken> for Refusal {
    fn from(broken: Broken) -> Self {
        Self::New(broken.kind, broken.reason)
    }
}

/// Why an op must not run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refusal {
    /// The op itself is at fault.
    New(FaultKind, String),
    /// It reads what an earlier fault left without a value.
    Inherited(Arc<Fault>),
}

/// The tensors of one session.
#[derive(Debug)]
pub(crate) struct Dataflow {
    /// Looked up several times an op, so not by the standard library's hasher; by a
    /// seeded one all the same, as a program chooses the ids.
    tensors: HashMap<TensorId, Slot, RandomState>,
    /// Tensors whose values are on the way.
    pending: usize,
    account: Account,
    /// What the op at hand consumes, noted as it is begun: the op itself goes to the
    /// backend, and to copy it takes time.
    consumed: Vec<TensorIr>,
    /// What it makes, and what was taken for each.
    made: Vec<(TensorIr, Holding)>,
    /// Whether what it makes may use the storages of its inputs, and then these.
    shares: Aliasing,
    sources: Vec<TensorIr>,
}

/// The kinds of tensor that Burn keeps apart by type.
#[derive(Debug, PartialEq)]
enum Kind {
    Float,
    Int,
    Bool,
    Quantized,
}

fn kind(dtype: DType) -> Kind {
    match dtype {
        DType::Bool(_) => Kind::Bool,
        DType::QFloat(_) => Kind::Quantized,
        dtype if dtype.is_float() => Kind::Float,
        _ => Kind::Int,
    }
}

impl Dataflow {
    pub(crate) fn new(memory: SessionMemory) -> Self {
        Self {
            tensors: HashMap::default(),
            pending: 0,
            account: Account::new(memory),
            consumed: Vec::new(),
            made: Vec::new(),
            shares: Aliasing::No,
            sources: Vec::new(),
        }
    }

    /// Number of tensors, live or poisoned.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether `tensor` may be read.
    pub(crate) fn check(&self, tensor: &TensorIr) -> Result<(), Refusal> {
        self.find(tensor).map(drop)
    }

    /// The entry of `tensor`, if it may be read, and the bytes that it keeps.
    fn find(&self, tensor: &TensorIr) -> Result<(&Slot, u64), Refusal> {
        let slot = self.tensors.get(&tensor.id).ok_or_else(|| {
            let reason = format!("tensor {} was never made or was dropped", tensor.id.value());
            Refusal::New(FaultKind::UnknownTensor, reason)
        })?;
        let (shape, dtype, bytes) = match slot {
            Slot::Poisoned(fault) => return Err(Refusal::Inherited(fault.clone())),
            Slot::Live {
                shape,
                dtype,
                holding,
            }
            | Slot::Pending {
                shape,
                dtype,
                holding,
                ..
            } => (shape, dtype, holding.bytes()),
        };
        if *shape == tensor.shape && *dtype == tensor.dtype {
            return Ok((slot, bytes));
        }
        let reason = format!(
            "tensor {} is {shape} of {}, the op takes it for {} of {}",
            tensor.id.value(),
            dtype.name(),
            tensor.shape,
            tensor.dtype.name(),
        );
        Err(Refusal::New(FaultKind::Mismatch, reason))
    }

    /// Whether the value of `id` is on the way.
    pub(crate) fn is_pending(&self, id: TensorId) -> bool {
        self.pending > 0 && matches!(self.tensors.get(&id), Some(Slot::Pending { .. }))
    }

    /// Whether `id` has a value.
    pub(crate) fn is_live(&self, id: TensorId) -> bool {
        matches!(self.tensors.get(&id), Some(Slot::Live { .. }))
    }

    /// Whether `op` needs a value that is on the way. A drop needs none.
    pub(crate) fn must_wait(&self, op: &OperationIr) -> bool {
        self.pending > 0
            && !matches!(op, OperationIr::Drop(_))
            && op.inputs().any(|input| self.is_pending(input.id))
    }

    /// Takes memory for a tensor that is no op's output, or for as long as an op runs: what
    /// its kernel needs beside them.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<SessionMemory, Refusal> {
        let mut memory = self.account.beside();
        memory.take(bytes).map_err(out_of_memory)?;
        Ok(memory)
    }

    /// As [`check_new`](Self::check_new), and takes what the name of a new tensor costs
    /// on top of what `held` has for its elements.
    pub(crate) fn name_new(
        &mut self,
        id: TensorId,
        held: &mut SessionMemory,
    ) -> Result<(), Refusal> {
        self.check_new(id)?;
        held.take(NAME_BYTES).map_err(out_of_memory)
    }

    /// Decides whether `op` may run, and takes the memory its outputs need.
    ///
    /// If it may, [`finish`](Self::finish), [`fail`](Self::fail) or
    /// [`defer`](Self::defer) must come next, and otherwise [`poison`](Self::poison). A
    /// drop may go on all the same, as if it had not been refused.
    pub(crate) fn begin(&mut self, op: &OperationIr) -> Result<(), Refusal> {
        // First, as a drop that is refused goes on: an op that was refused before it has
        // left here what it would have made.
        self.made.clear();
        self.shares = Aliasing::No;
        let inputs = self.note_consumed(op)?;
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
            self.made.push((out.clone(), Holding::own(bytes)));
            (sum, least) = (with, least.min(bytes));
        }
        self.account.take(sum)?;
        self.note_sources(op, &inputs, least);
        Ok(())
    }

    /// Notes all that `op` consumes, and tells the first thing that is wrong with its
    /// inputs: in one pass, as Burn allocates for each.
    fn note_consumed(&mut self, op: &OperationIr) -> Result<Inputs, Refusal> {
        let is_drop = matches!(op, OperationIr::Drop(_));
        let mut consumed = std::mem::take(&mut self.consumed);
        consumed.clear();
        let mut inputs = Ok(Inputs::default());
        for input in op.inputs() {
            if is_drop || input.status == TensorStatus::ReadWrite {
                consumed.push(input.clone());
            }
            if let Ok(known) = &mut inputs
                && let Err(refusal) = self.note_input(input, known)
            {
                inputs = Err(refusal);
            }
        }
        self.consumed = consumed;
        inputs
    }

    /// Whether a tensor with a new `id` may be made.
    pub(crate) fn check_new(&mut self, id: TensorId) -> Result<(), Refusal> {
        if self.tensors.contains_key(&id) {
            let reason = format!("tensor {} exists already", id.value());
            return Err(Refusal::New(FaultKind::Mismatch, reason));
        }
        if self.tensors.len() >= MAX_TENSORS {
            let reason = format!("the session holds {MAX_TENSORS} tensors, the limit");
            return Err(Refusal::New(FaultKind::OutOfMemory, reason));
        }
        self.account
            .make_room(self.tensors.len() + self.made.len() + 1)
    }

    /// The op that was begun ran: what it consumed is gone, what it made is there.
    /// `look` says which storage a tensor uses, if the backend can tell.
    pub(crate) fn finish(&mut self, look: StorageLookup<'_>) {
        if self.shares != Aliasing::No {
            self.settle_storages(look);
        }
        let mut consumed = self.consume();
        for (out, holding) in self.made.drain(..) {
            let slot = Slot::Live {
                shape: out.shape,
                dtype: out.dtype,
                holding,
            };
            // An op that names an output twice has made one tensor.
            if let Some(Slot::Live { holding, .. }) = self.tensors.insert(out.id, slot) {
                self.account.release(&holding);
            }
        }
        // An op may have very many tensors; then their room is not kept.
        consumed.clear();
        consumed.shrink_to(KEPT);
        self.consumed = consumed;
        self.made.shrink_to(KEPT);
    }

    /// The op that was begun failed: its outputs carry `fault`. Returns the tensors that
    /// it was to consume, and those that it may have made, for the backend to forget.
    pub(crate) fn fail(&mut self, fault: &Arc<Fault>) -> Vec<TensorIr> {
        let mut left = self.consume();
        for (out, holding) in std::mem::take(&mut self.made) {
            self.account.release(&holding);
            self.insert_poisoned(out.id, fault.clone());
            left.push(out);
        }
        left
    }

    /// `op` may not run: its outputs carry `fault`. Returns the tensors that it was to
    /// consume, for the backend to forget.
    pub(crate) fn poison(&mut self, op: &OperationIr, fault: &Arc<Fault>) -> Vec<TensorIr> {
        // Why it may not run is known.
        let _ = self.note_consumed(op);
        self.made.clear();
        let consumed = self.consume();
        for out in op.outputs() {
            self.insert_poisoned(out.id, fault.clone());
        }
        consumed
    }

    /// The op that was begun goes on elsewhere: its output will come under `ticket`.
    /// Returns the tensors that it consumed, for the backend to forget.
    pub(crate) fn defer(&mut self, ticket: u64) -> Vec<TensorIr> {
        let consumed = self.consume();
        for (out, holding) in std::mem::take(&mut self.made) {
            self.insert_pending(&out, ticket, holding);
        }
        consumed
    }

    /// A tensor will come under `ticket`, for which memory was taken.
    pub(crate) fn expect(&mut self, out: &TensorIr, ticket: u64, held: SessionMemory) {
        let holding = self.account.adopt(held);
        self.insert_pending(out, ticket, holding);
    }

    fn insert_pending(&mut self, out: &TensorIr, ticket: u64, holding: Holding) {
        self.remove(out.id);
        self.pending += 1;
        let slot = Slot::Pending {
            ticket,
            shape: out.shape.clone(),
            dtype: out.dtype,
            holding,
        };
        self.tensors.insert(out.id, slot);
    }

    /// What was expected of `id` under `ticket`, unless it was dropped meanwhile.
    pub(crate) fn expected(&self, id: TensorId, ticket: u64) -> Option<(Shape, DType)> {
        match self.tensors.get(&id) {
            Some(Slot::Pending {
                ticket: of,
                shape,
                dtype,
                ..
            }) if *of == ticket => Some((shape.clone(), *dtype)),
            _ => None,
        }
    }

    /// What was expected of `id` is there, or will never be.
    pub(crate) fn settle(&mut self, id: TensorId, value: Result<(), Arc<Fault>>) {
        if !matches!(self.tensors.get(&id), Some(Slot::Pending { .. })) {
            return;
        }
        let Err(fault) = value else {
            if let Some(slot) = self.tensors.get_mut(&id)
                && let Slot::Pending {
                    shape,
                    dtype,
                    holding,
                    ..
                } = slot
            {
                self.pending -= 1;
                *slot = Slot::Live {
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

    /// A tensor from the client is there, with the memory that was taken for it and its
    /// name.
    pub(crate) fn insert(&mut self, id: TensorId, shape: Shape, dtype: DType, held: SessionMemory) {
        let holding = self.account.adopt(held);
        self.tensors.insert(
            id,
            Slot::Live {
                shape,
                dtype,
                holding,
            },
        );
    }

    /// Declares a tensor without a value. Never in the place of another, and
    /// not beyond the limit: such a tensor is unknown, which is a fault too.
    pub(crate) fn insert_poisoned(&mut self, id: TensorId, fault: Arc<Fault>) {
        if self.check_new(id).is_ok() && self.account.take_fault(&fault).is_ok() {
            self.tensors.insert(id, Slot::Poisoned(fault));
        }
    }

    /// A read used `tensor`; the last use frees it.
    pub(crate) fn release(&mut self, tensor: &TensorIr) {
        if tensor.status == TensorStatus::ReadWrite {
            self.remove(tensor.id);
        }
    }

    fn remove(&mut self, id: TensorId) {
        match self.tensors.remove(&id) {
            Some(Slot::Live { holding, .. }) => self.account.release(&holding),
            Some(Slot::Pending { holding, .. }) => {
                self.pending -= 1;
                self.account.release(&holding);
            }
            Some(Slot::Poisoned(fault)) => self.account.release_fault(&fault),
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

/// Whether Burn's interpreter could try an op on such a tensor at all.
fn check_dtype(dtype: DType) -> Result<(), Refusal> {
    if kind(dtype) == Kind::Quantized {
        let reason = "quantized tensors are not supported by Burn's router".into();
        return Err(Refusal::New(FaultKind::Unsupported, reason));
    }
    Ok(())
}

pub(crate) fn out_of_memory(e: OutOfMemory) -> Refusal {
    let (requested, free) = (human(e.requested_bytes), human(e.free_bytes));
    Refusal::New(
        FaultKind::OutOfMemory,
        format!("{requested} asked, {free} free"),
    )
}
