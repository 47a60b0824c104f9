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
use tensord_proto::{
    codec::tensor_bytes,
    v1::{Fault, FaultKind},
};

use crate::memory::{OutOfMemory, SessionMemory, human};

/// Tensors a session may have at once, live or poisoned.
const MAX_TENSORS: usize = 1 << 22;

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
    tensors: HashMap<TensorId, Slot>,
    /// Tensors whose values are on the way.
    pending: usize,
    memory: SessionMemory,
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
            tensors: HashMap::new(),
            pending: 0,
            memory,
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
                if *shape == tensor.shape && kind(*dtype) == kind(tensor.dtype) {
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
    /// Must be followed by [`finish`](Self::finish) or [`poison`](Self::poison).
    pub(crate) fn begin(&mut self, op: &OperationIr) -> Result<(), Refusal> {
        op.inputs().try_for_each(|input| self.check(input))?;
        self.check_outputs(op)?;
        let bytes = op.outputs().try_fold(0u64, |sum, out| {
            sum.checked_add(tensor_bytes(&out.shape, out.dtype)? as u64)
        });
        let bytes = bytes.ok_or_else(|| {
            let reason = "an output has more bytes than can be addressed".into();
            Refusal::New(FaultKind::OutOfMemory, reason)
        })?;
        self.memory.take(bytes).map_err(out_of_memory)
    }

    fn check_outputs(&self, op: &OperationIr) -> Result<(), Refusal> {
        op.outputs().try_for_each(|out| self.check_new(out.id))
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

    /// `op` ran: what it consumed is gone, what it made is there.
    pub(crate) fn finish(&mut self, op: &OperationIr) {
        self.consume(op);
        for out in op.outputs() {
            // Taken in `begin`; a Drop and the like have no outputs.
            let bytes = tensor_bytes(&out.shape, out.dtype).unwrap_or(0) as u64;
            let slot = Slot::Live {
                shape: out.shape.clone(),
                dtype: out.dtype,
                bytes,
            };
            self.tensors.insert(out.id, slot);
        }
    }

    /// `op` did not run or failed: its outputs carry `fault`. Returns the
    /// tensors it was to consume, for the backend to forget.
    pub(crate) fn poison(
        &mut self,
        op: &OperationIr,
        fault: &Arc<Fault>,
        began: bool,
    ) -> Vec<TensorIr> {
        if began {
            let taken = |out: &TensorIr| tensor_bytes(&out.shape, out.dtype).unwrap_or(0) as u64;
            self.memory.give_back(op.outputs().map(taken).sum());
        }
        let consumed = self.consume(op);
        for out in op.outputs() {
            self.insert_poisoned(out.id, fault.clone());
        }
        consumed
    }

    /// `op` was begun elsewhere: its output will come under `ticket`. Returns the
    /// tensors that it consumed, for the backend to forget.
    pub(crate) fn defer(&mut self, op: &OperationIr, ticket: u64) -> Vec<TensorIr> {
        let consumed = self.consume(op);
        for out in op.outputs() {
            let bytes = tensor_bytes(&out.shape, out.dtype).unwrap_or(0) as u64;
            self.insert_pending(out, ticket, bytes);
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

    fn consume(&mut self, op: &OperationIr) -> Vec<TensorIr> {
        let is_drop = matches!(op, OperationIr::Drop(_));
        let last_use = |t: &&TensorIr| is_drop || t.status == TensorStatus::ReadWrite;
        let consumed: Vec<TensorIr> = op.inputs().filter(last_use).cloned().collect();
        for tensor in &consumed {
            self.remove(tensor.id);
        }
        consumed
    }
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
        flow.finish(&op);
        assert_eq!((flow.len(), device.live_bytes()), (2, 32));
        let drop = OperationIr::Drop(tensor(3, TensorStatus::ReadWrite));
        flow.begin(&drop).unwrap();
        flow.finish(&drop);
        assert_eq!((flow.len(), device.live_bytes()), (1, 16));
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
        flow.poison(&op, &fault("full"), false);
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
        flow.poison(&bad, &first, false);
        let next = add(1, tensor(3, TensorStatus::ReadWrite), 4);
        assert_eq!(flow.begin(&next), Err(Refusal::Inherited(first.clone())));
        flow.poison(&next, &first, false);
        assert_eq!(
            flow.check(&tensor(4, TensorStatus::ReadOnly)),
            Err(Refusal::Inherited(first))
        );
        let good = add(1, tensor(2, TensorStatus::ReadOnly), 5);
        flow.begin(&good).unwrap();
        flow.finish(&good);
        assert_eq!(device.live_bytes(), 48);
    }

    #[test]
    fn a_failed_op_gives_its_memory_back_and_names_what_to_forget() {
        let (mut flow, device) = flow(1000);
        let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
        flow.begin(&op).unwrap();
        let consumed = flow.poison(&op, &fault("panic"), true);
        assert_eq!(consumed, [tensor(2, TensorStatus::ReadWrite)]);
        assert_eq!(device.live_bytes(), 16);
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
