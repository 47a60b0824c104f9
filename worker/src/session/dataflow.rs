//! Which tensors of a session exist, which are poisoned, and by what.
//!
//! Before an op reaches the backend this table decides whether it may: every
//! input must be there, of the kind and shape the op believes, and have a
//! value. An op that may not run, or that failed, leaves its outputs poisoned
//! with the first cause, and so the fault travels the dataflow to whoever
//! reads it, while everything else goes on.
//!
//! Knows no backend: it sees ops and answers with decisions.

use std::{collections::HashMap, sync::Arc};

use burn_backend::{DType, Shape};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use foldhash::fast::RandomState;
use tensord_proto::{
    codec::tensor_bytes,
    v1::{Fault, FaultKind},
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
        bytes: u64,
    },
    /// Its value is on the way, under this ticket.
    Pending {
        ticket: u64,
        shape: Shape,
        dtype: DType,
        bytes: u64,
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
    memory: SessionMemory,
    /// What the op at hand consumes, noted as it is begun: the op itself goes to the
    /// backend, and to copy it takes time.
    consumed: Vec<TensorIr>,
    /// What it makes, and the bytes taken for each.
    made: Vec<(TensorIr, u64)>,
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
            memory,
            consumed: Vec::new(),
            made: Vec::new(),
        }
    }

    /// Number of tensors, live or poisoned.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether `tensor` may be read.
    pub(crate) fn check(&self, tensor: &TensorIr) -> Result<(), Refusal> {
        match self.tensors.get(&tensor.id) {
            None => Err(Refusal::New(
                FaultKind::UnknownTensor,
                format!("tensor {} was never made or was dropped", tensor.id.value()),
            )),
            Some(Slot::Poisoned(fault)) => Err(Refusal::Inherited(fault.clone())),
            Some(Slot::Live { shape, dtype, .. } | Slot::Pending { shape, dtype, .. }) => {
                if *shape == tensor.shape && *dtype == tensor.dtype {
                    return Ok(());
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
        }
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

    /// Takes memory for a tensor that is no op's output.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<SessionMemory, Refusal> {
        let mut memory = self.memory.beside();
        memory.take(bytes).map_err(out_of_memory)?;
        Ok(memory)
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
        self.note_consumed(op)?;
        let mut sum = 0u64;
        for out in op.outputs() {
            check_dtype(out.dtype)?;
            self.check_new(out.id)?;
            let bytes = tensor_bytes(&out.shape, out.dtype).map(|bytes| bytes as u64);
            let added = bytes.and_then(|bytes| Some((bytes, sum.checked_add(bytes)?)));
            let Some((bytes, with)) = added else {
                let reason = "an output has more bytes than can be addressed".into();
                return Err(Refusal::New(FaultKind::OutOfMemory, reason));
            };
            self.made.push((out.clone(), bytes));
            sum = with;
        }
        self.memory.take(sum).map_err(out_of_memory)
    }

    /// Notes all that `op` consumes, and tells the first thing that is wrong with its
    /// inputs: in one pass, as Burn allocates for each.
    fn note_consumed(&mut self, op: &OperationIr) -> Result<(), Refusal> {
        let is_drop = matches!(op, OperationIr::Drop(_));
        self.consumed.clear();
        let mut checked = Ok(());
        for input in op.inputs() {
            if is_drop || input.status == TensorStatus::ReadWrite {
                self.consumed.push(input.clone());
            }
            if checked.is_ok() {
                checked = check_dtype(input.dtype).and_then(|()| self.check(input));
            }
        }
        checked
    }

    /// Whether a tensor with a new `id` may be made.
    pub(crate) fn check_new(&self, id: TensorId) -> Result<(), Refusal> {
        if self.tensors.contains_key(&id) {
            let reason = format!("tensor {} exists already", id.value());
            return Err(Refusal::New(FaultKind::Mismatch, reason));
        }
        if self.tensors.len() >= MAX_TENSORS {
            let reason = format!("the session holds {MAX_TENSORS} tensors, the limit");
            return Err(Refusal::New(FaultKind::OutOfMemory, reason));
        }
        Ok(())
    }

    /// The op that was begun ran: what it consumed is gone, what it made is there.
    pub(crate) fn finish(&mut self) {
        let mut consumed = self.consume();
        for (out, bytes) in self.made.drain(..) {
            let slot = Slot::Live {
                shape: out.shape,
                dtype: out.dtype,
                bytes,
            };
            self.tensors.insert(out.id, slot);
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
        for (out, bytes) in std::mem::take(&mut self.made) {
            self.memory.give_back(bytes);
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
        for (out, bytes) in std::mem::take(&mut self.made) {
            self.insert_pending(&out, ticket, bytes);
        }
        consumed
    }

    /// A tensor will come under `ticket`, for which memory was taken.
    pub(crate) fn expect(&mut self, out: &TensorIr, ticket: u64, held: SessionMemory) {
        let bytes = self.memory.adopt(held);
        self.insert_pending(out, ticket, bytes);
    }

    fn insert_pending(&mut self, out: &TensorIr, ticket: u64, bytes: u64) {
        self.pending += 1;
        let slot = Slot::Pending {
            ticket,
            shape: out.shape.clone(),
            dtype: out.dtype,
            bytes,
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
        let Some(slot) = self.tensors.get_mut(&id) else {
            return;
        };
        let Slot::Pending {
            shape,
            dtype,
            bytes,
            ..
        } = slot
        else {
            return;
        };
        self.pending -= 1;
        match value {
            Ok(()) => {
                *slot = Slot::Live {
                    shape: shape.clone(),
                    dtype: *dtype,
                    bytes: *bytes,
                }
            }
            Err(fault) => {
                self.memory.give_back(*bytes);
                *slot = Slot::Poisoned(fault);
            }
        }
    }

    /// A tensor from the client is there, with the memory that was taken for it.
    pub(crate) fn insert(&mut self, id: TensorId, shape: Shape, dtype: DType, held: SessionMemory) {
        let bytes = self.memory.adopt(held);
        self.tensors.insert(
            id,
            Slot::Live {
                shape,
                dtype,
                bytes,
            },
        );
    }

    /// Gives the value of `source` a second id. The two share memory, which
    /// stays counted with the first.
    pub(crate) fn alias(&mut self, id: TensorId, source: TensorId) -> Result<(), Refusal> {
        let unknown = || format!("tensor {} was never made or was dropped", source.value());
        let slot = match self.tensors.get(&source) {
            None => return Err(Refusal::New(FaultKind::UnknownTensor, unknown())),
            Some(Slot::Poisoned(fault)) => return Err(Refusal::Inherited(fault.clone())),
            // Whoever gives it a second name waits for it first.
            Some(Slot::Live { shape, dtype, .. } | Slot::Pending { shape, dtype, .. }) => {
                Slot::Live {
                    shape: shape.clone(),
                    dtype: *dtype,
                    bytes: 0,
                }
            }
        };
        self.check_new(id)?;
        self.tensors.insert(id, slot);
        Ok(())
    }

    /// Declares a tensor without a value. Never in the place of another, and
    /// not beyond the limit: such a tensor is unknown, which is a fault too.
    pub(crate) fn insert_poisoned(&mut self, id: TensorId, fault: Arc<Fault>) {
        if self.check_new(id).is_ok() {
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
            Some(Slot::Live { bytes, .. }) => self.memory.give_back(bytes),
            Some(Slot::Pending { bytes, .. }) => {
                self.pending -= 1;
                self.memory.give_back(bytes);
            }
            Some(Slot::Poisoned(_)) | None => {}
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
    let (asked, free) = (human(e.asked_bytes), human(e.free_bytes));
    Refusal::New(
        FaultKind::OutOfMemory,
        format!("{asked} asked, {free} free"),
    )
}

#[cfg(test)]
mod tests {
    use burn_ir::{BinaryOpIr, NumericOperationIr};

    use super::*;
    use crate::memory::DeviceMemory;

    fn tensor(id: u64, status: TensorStatus) -> TensorIr {
        TensorIr {
            id: TensorId::new(id),
            shape: Shape::new([4]),
            status,
            dtype: DType::F32,
        }
    }

    fn add(lhs: u64, rhs: TensorIr, out: u64) -> OperationIr {
        let lhs = tensor(lhs, TensorStatus::ReadOnly);
        let out = tensor(out, TensorStatus::NotInit);
        let op = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
        OperationIr::NumericFloat(DType::F32, op)
    }

    fn flow(capacity: u64) -> (Dataflow, Arc<DeviceMemory>) {
        let device = DeviceMemory::new(capacity);
        let mut flow = Dataflow::new(device.open());
        for id in [1, 2] {
            let mut held = device.open();
            held.take(16).unwrap();
            flow.insert(TensorId::new(id), Shape::new([4]), DType::F32, held);
        }
        (flow, device)
    }

    fn fault(reason: &str) -> Arc<Fault> {
        Arc::new(Fault {
            reason: reason.into(),
            ..Fault::default()
        })
    }

    #[test]
    fn memory_follows_the_tensors() {
        let (mut flow, device) = flow(64);
        let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
        flow.begin(&op).unwrap();
        assert_eq!(device.live_bytes(), 48);
        flow.finish();
        assert_eq!((flow.len(), device.live_bytes()), (2, 32));
        let drop = OperationIr::Drop(tensor(3, TensorStatus::ReadWrite));
        flow.begin(&drop).unwrap();
        flow.finish();
        assert_eq!((flow.len(), device.live_bytes()), (1, 16));
    }

    #[test]
    fn what_an_op_that_was_refused_would_have_made_does_not_come_to_be() {
        let (mut flow, device) = flow(40);
        let op = add(1, tensor(2, TensorStatus::ReadOnly), 3);
        flow.begin(&op).unwrap_err();
        flow.poison(&op, &fault("full"));
        let on = add(1, tensor(3, TensorStatus::ReadOnly), 4);
        flow.begin(&on).unwrap_err();
        flow.poison(&on, &fault("full"));
        // Drops go on, whatever became of the tensor.
        for id in [4, 3] {
            let drop = OperationIr::Drop(tensor(id, TensorStatus::ReadWrite));
            assert!(matches!(flow.begin(&drop), Err(Refusal::Inherited(_))));
            flow.finish();
        }
        assert_eq!((flow.len(), device.live_bytes()), (2, 32));
    }

    #[test]
    fn an_op_over_the_capacity_is_refused_with_both_numbers() {
        let (mut flow, device) = flow(40);
        let op = add(1, tensor(2, TensorStatus::ReadOnly), 3);
        let refusal = flow.begin(&op).unwrap_err();
        assert_eq!(
            refusal,
            Refusal::New(FaultKind::OutOfMemory, "16 B asked, 8 B free".into())
        );
        flow.poison(&op, &fault("full"));
        assert_eq!(device.live_bytes(), 32);
    }

    #[test]
    fn the_first_cause_travels_and_the_rest_is_untouched() {
        let (mut flow, device) = flow(1000);
        let bad = add(1, tensor(9, TensorStatus::ReadWrite), 3);
        let refusal = flow.begin(&bad).unwrap_err();
        assert!(
            matches!(&refusal, Refusal::New(FaultKind::UnknownTensor, _)),
            "{refusal:?}"
        );
        let first = fault("first");
        flow.poison(&bad, &first);
        let next = add(1, tensor(3, TensorStatus::ReadWrite), 4);
        assert_eq!(flow.begin(&next), Err(Refusal::Inherited(first.clone())));
        flow.poison(&next, &first);
        assert_eq!(
            flow.check(&tensor(4, TensorStatus::ReadOnly)),
            Err(Refusal::Inherited(first))
        );
        let good = add(1, tensor(2, TensorStatus::ReadOnly), 5);
        flow.begin(&good).unwrap();
        flow.finish();
        assert_eq!(device.live_bytes(), 48);
    }

    #[test]
    fn a_failed_op_gives_its_memory_back_and_names_what_to_forget() {
        let (mut flow, device) = flow(1000);
        let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
        flow.begin(&op).unwrap();
        let left = flow.fail(&fault("panic"));
        let made = tensor(3, TensorStatus::NotInit);
        assert_eq!(left, [tensor(2, TensorStatus::ReadWrite), made]);
        assert_eq!(device.live_bytes(), 16);
    }

    #[test]
    fn an_op_on_what_burn_cannot_run_is_refused() {
        let (mut flow, device) = flow(1000);
        let quantized = TensorIr {
            dtype: DType::QFloat(burn_std::QuantScheme::default()),
            ..tensor(2, TensorStatus::ReadWrite)
        };
        let op = add(1, quantized, 3);
        let refusal = flow.begin(&op).unwrap_err();
        assert!(
            matches!(&refusal, Refusal::New(FaultKind::Unsupported, _)),
            "{refusal:?}"
        );
        let consumed = flow.poison(&op, &fault("unsupported"));
        assert_eq!(consumed.len(), 1);
        assert_eq!((flow.len(), device.live_bytes()), (2, 16));
    }

    #[test]
    fn a_wrong_belief_about_a_tensor_is_refused() {
        let (mut flow, _) = flow(1000);
        let wrong = TensorIr {
            shape: Shape::new([5]),
            ..tensor(2, TensorStatus::ReadOnly)
        };
        let op = add(1, wrong, 3);
        assert!(matches!(
            flow.begin(&op),
            Err(Refusal::New(FaultKind::Mismatch, _))
        ));
        let wrong = TensorIr {
            dtype: DType::I32,
            ..tensor(2, TensorStatus::ReadOnly)
        };
        assert!(matches!(
            flow.check(&wrong),
            Err(Refusal::New(FaultKind::Mismatch, _))
        ));
        let twice = add(1, tensor(2, TensorStatus::ReadOnly), 1);
        assert!(matches!(
            flow.begin(&twice),
            Err(Refusal::New(FaultKind::Mismatch, _))
        ));
    }
}
