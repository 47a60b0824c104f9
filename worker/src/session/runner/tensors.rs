//! The tensors of a session: the backend that has their values, and the table that has
//! their states. Both change together, so they are one type.
//!
//! A reply to a read takes memory, as it uses the tensor's storage or is a copy. If tensors
//! are in host memory, either is charged to the session, except for small values, until the
//! client has acknowledged the reply, even if the tensor is dropped before. So a client
//! that reads no replies makes the worker keep no more than its device has. Copies of a
//! GPU's tensors are in host memory and not charged to the device; the limits on reads in
//! flight in `session/work_queue.rs` bound them.

use std::{
    any::Any,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use burn_backend::{AllocationProperty, ExecutionError, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use burn_std::future::DynFut;
use tensord_backend::{DeferredValues, FailedCustomOp, StoredTensor, TensorStore, panic_message};
use tensord_proto::{
    bulk::{INLINE_BYTES, shared},
    codec::tensor_bytes,
    v1::{Fault, FaultKind},
};

use super::super::{
    dataflow::{CapturedTable, Dataflow, Entry, NAME_BYTES, Refusal, Storage},
    snapshot::SnapshotError,
};
use crate::{memory::SessionMemory, op_check};

/// Maximum bytes of reads that the connection's reader executes itself, in some
/// microseconds.
const MAX_DIRECT_READ_BYTES: usize = 16 << 10;

/// A read that has begun.
pub(super) enum StartedRead {
    /// The value, or the backend's error.
    Value(Result<TensorData, ExecutionError>),
    /// The device is still reading the value.
    InFlight(DynFut<Result<TensorData, ExecutionError>>),
}

/// The session's memory that a reply holds.
#[expect(dead_code, reason = "held for what happens when it is dropped")]
pub(super) enum ReplyMemory {
    /// The storage that the reply shares with a tensor.
    Storage(Arc<Storage>),
    /// The memory taken for a copy.
    Copy(SessionMemory),
}

/// The bytes of a reply, with the memory that they hold.
struct Charged {
    bytes: bytes::Bytes,
    _held: ReplyMemory,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The tensors of a session, with their values.
pub(super) struct Tensors {
    store: Box<dyn TensorStore>,
    flow: Dataflow,
}

impl Tensors {
    pub(super) fn new(store: Box<dyn TensorStore>, memory: SessionMemory) -> Self {
        Self {
            store,
            flow: Dataflow::new(memory),
        }
    }

    /// Returns whether `id` has a value.
    pub(super) fn is_live(&self, id: TensorId) -> bool {
        self.flow.is_live(id)
    }

    /// Returns whether the value of `id` is pending.
    pub(super) fn is_pending(&self, id: TensorId) -> bool {
        self.flow.is_pending(id)
    }

    /// Returns whether `op` needs a pending value.
    pub(super) fn must_wait(&self, op: &OperationIr) -> bool {
        self.flow.must_wait(op)
    }

    /// Checks that `tensor` may be read.
    pub(super) fn check(&self, tensor: &TensorIr) -> Result<(), Refusal> {
        self.flow.check(tensor)
    }

    /// Takes memory that is not for an op's outputs.
    pub(super) fn reserve(&self, bytes: u64) -> Result<SessionMemory, Refusal> {
        self.flow.reserve(bytes)
    }

    /// Captures the table, and the values of its tensors in the order of the table's charges; see
    /// [`TensorStore::stored`]. The list of the tensors that have values is with these.
    ///
    /// # Errors
    ///
    /// When a value is pending, or the backend's error or panic.
    pub(super) fn capture(
        &mut self,
        max_copied_bytes: u64,
    ) -> Result<(CapturedTable, DeferredValues), SnapshotError> {
        let mut table = self.flow.capture().ok_or(SnapshotError::Pending)?;
        let (store, live) = (&mut self.store, mem::take(&mut table.live));
        let values = caught(|| store.stored(live, max_copied_bytes));
        let values = values.map_err(SnapshotError::Device)?;
        Ok((table, values))
    }

    /// Returns the number of tensors for which the tables are charged.
    pub(super) fn table_names(&self) -> usize {
        self.flow.table_names()
    }

    /// Charges for tables with room for `names` tensors.
    pub(super) fn restore_table(&mut self, names: usize) -> Result<(), Refusal> {
        self.flow.restore_table(names)
    }

    /// Charges for a storage that restored tensors share; see [`Dataflow::restore_storage`].
    pub(super) fn restore_storage(
        &mut self,
        id: usize,
        bytes: u64,
    ) -> Result<Arc<Storage>, Refusal> {
        self.flow.restore_storage(id, bytes)
    }

    /// Adds a tensor of a snapshot to the table.
    pub(super) fn restore(&mut self, entry: Entry) -> Result<(), Refusal> {
        self.flow.restore(entry)
    }

    /// Gives restored tensors their values.
    ///
    /// # Errors
    ///
    /// The backend's error or panic.
    pub(super) fn restore_values(
        &mut self,
        tensors: Vec<(TensorId, StoredTensor)>,
    ) -> Result<(), SnapshotError> {
        let store = &mut self.store;
        caught(|| store.restore(tensors)).map_err(SnapshotError::Device)
    }

    /// Decides whether the device and the op rules allow `op`, and takes the memory that
    /// its kernel needs in addition to inputs and outputs.
    pub(super) fn check_op(&self, op: &OperationIr) -> Result<Option<SessionMemory>, Refusal> {
        if let OperationIr::Custom(call) = op
            && let Some(reason) = self.store.custom_op_error(&call.id)
        {
            return Err(Refusal::New(FaultKind::Unsupported, reason));
        }
        #[cfg(feature = "testing")]
        if crate::testing::are_op_checks_off() {
            return Ok(None);
        }
        if let Some(reason) = self.store.unsupported(op) {
            return Err(Refusal::New(FaultKind::Unsupported, reason));
        }
        let mut bytes = op_check::check(op)?;
        if !self.store.is_in_host_memory() {
            bytes = bytes.saturating_add(op_check::additional_gpu_bytes(op));
        }
        match bytes {
            0 => Ok(None),
            bytes => self.flow.reserve(bytes).map(Some),
        }
    }

    /// Decides whether `op` may run, and takes the memory that its outputs need; see
    /// [`Dataflow::begin`].
    pub(super) fn begin(&mut self, op: &OperationIr) -> Result<(), Refusal> {
        self.flow.begin(op)
    }

    /// Executes the op that was begun, and makes its outputs live. `seed` is given for an op
    /// that draws random numbers; `scratch`, from [`check_op`](Self::check_op), is freed once
    /// the backend returns.
    ///
    /// # Errors
    ///
    /// The backend's panic or the custom op's error; [`fail`](Self::fail) must follow.
    pub(super) fn execute(
        &mut self,
        op: Box<OperationIr>,
        seed: Option<u64>,
        scratch: Option<SessionMemory>,
    ) -> Result<(), Refusal> {
        let store = &mut self.store;
        let ran = catch_unwind(AssertUnwindSafe(|| match seed {
            Some(seed) => store.execute_seeded(op, seed),
            None => store.execute(op),
        }));
        drop(scratch);
        ran.map_err(panicked)?;
        self.flow.finish(&mut |tensor| self.store.storage(tensor));
        Ok(())
    }

    /// Poisons the outputs of the op that was begun and failed. It may have made some of
    /// them.
    pub(super) fn fail(&mut self, fault: &Arc<Fault>) {
        for tensor in self.flow.fail(fault) {
            self.store.forget(tensor);
        }
    }

    /// Poisons the outputs of `op`, which is not executed.
    pub(super) fn poison_outputs(&mut self, op: &OperationIr, fault: &Arc<Fault>) {
        for tensor in self.flow.poison(op, fault) {
            self.store.forget(tensor);
        }
    }

    /// Makes the outputs of the op that was begun pending: they arrive under `ticket`.
    pub(super) fn make_outputs_pending(&mut self, ticket: u64) {
        for consumed in self.flow.make_outputs_pending(ticket) {
            self.store.forget(consumed);
        }
    }

    /// Adds a tensor without a value.
    pub(super) fn insert_poisoned(&mut self, id: TensorId, fault: Arc<Fault>) {
        self.flow.insert_poisoned(id, fault);
    }

    /// Gives the tensor `source` a second id.
    pub(super) fn alias(&mut self, id: TensorId, source: TensorId) -> Result<(), Refusal> {
        let store = &mut self.store;
        self.flow.alias(id, source, &mut |t| store.storage(t))?;
        self.store.alias(id, source);
        Ok(())
    }

    /// Waits until the device has executed everything.
    ///
    /// # Errors
    ///
    /// The backend's error or panic.
    pub(super) fn sync(&mut self) -> Result<(), Refusal> {
        let store = &mut self.store;
        match catch_unwind(AssertUnwindSafe(|| store.sync())).map_err(panicked)? {
            Ok(()) => Ok(()),
            Err(e) => Err(Refusal::New(FaultKind::Backend, e.reason().to_owned())),
        }
    }

    /// Waits until the device has executed everything, before tensors are copied.
    ///
    /// # Errors
    ///
    /// The backend's error or panic.
    pub(super) fn wait(&mut self) -> Result<(), SnapshotError> {
        let store = &mut self.store;
        let synced = caught(|| store.sync().map_err(|e| e.reason().to_owned()));
        synced.map_err(SnapshotError::Device)
    }

    /// Removes `tensor` from the table, if this is its last use. The backend drops the value
    /// itself when it [reads](Self::begin_read) the tensor.
    pub(super) fn release(&mut self, tensor: &TensorIr) {
        self.flow.release(tensor);
    }

    /// Drops `tensor` without reading it, if this is its last use.
    pub(super) fn discard(&mut self, tensor: &TensorIr) {
        if tensor.status == TensorStatus::ReadWrite {
            self.flow.release(tensor);
            self.store.forget(tensor.clone());
        }
    }

    /// Begins to read a tensor that has a value. A value that is returned at once keeps `held`
    /// until it is dropped.
    ///
    /// # Errors
    ///
    /// The backend's panic.
    pub(super) fn begin_read(
        &mut self,
        tensor: TensorIr,
        held: Option<ReplyMemory>,
    ) -> Result<StartedRead, Refusal> {
        let store = &mut self.store;
        let started = catch_unwind(AssertUnwindSafe(|| {
            let mut read = store.read(tensor);
            match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(value) => StartedRead::Value(value),
                Poll::Pending => StartedRead::InFlight(read),
            }
        }));
        match started.map_err(panicked)? {
            StartedRead::Value(value) => {
                Ok(StartedRead::Value(value.map(|data| charged(data, held))))
            }
            in_flight => Ok(in_flight),
        }
    }

    /// Takes or shares the memory that a reply with the value of `tensor` holds until it is
    /// dropped. Returns `None` for a small value, which is copied into the reply's frame and
    /// bounded by the outbox, and for a device whose memory is not host memory.
    pub(super) fn hold(&mut self, tensor: &TensorIr) -> Result<Option<ReplyMemory>, Refusal> {
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        if bytes <= INLINE_BYTES || !self.store.is_in_host_memory() {
            return Ok(None);
        }
        let store = &mut self.store;
        if store.is_host_readable(tensor) {
            let storage = self
                .flow
                .share_storage(tensor.id, &mut |t| store.storage(t));
            return Ok(storage.map(ReplyMemory::Storage));
        }
        let copy = self.flow.reserve(bytes as u64)?;
        Ok(Some(ReplyMemory::Copy(copy)))
    }

    /// Returns whether the values of `tensors` are small and in host memory, so that they
    /// can be read in some microseconds.
    pub(super) fn can_read_directly(&mut self, tensors: &[TensorIr]) -> bool {
        let bytes = tensors.iter().try_fold(0usize, |sum, tensor| {
            sum.checked_add(tensor_bytes(&tensor.shape, tensor.dtype)?)
        });
        let (flow, store) = (&self.flow, &mut self.store);
        let is_host_readable =
            |tensor: &TensorIr| flow.is_live(tensor.id) && store.is_host_readable(tensor);
        bytes.is_some_and(|bytes| bytes <= MAX_DIRECT_READ_BYTES)
            && tensors.iter().all(is_host_readable)
    }

    /// Adds the tensor `out` with the value `data`. `memory` is the memory taken for the
    /// tensor and its name.
    pub(super) fn insert(
        &mut self,
        out: &TensorIr,
        data: TensorData,
        memory: SessionMemory,
    ) -> Result<(), Refusal> {
        self.set_value(out.id, data)?;
        self.flow
            .insert(out.id, out.shape.clone(), out.dtype, memory);
        Ok(())
    }

    /// Checks that `out` is new, of a valid shape and dtype, and adds the cost of a name to
    /// `memory`, the memory already taken for its elements.
    pub(super) fn charge_name(
        &mut self,
        out: &TensorIr,
        memory: &mut SessionMemory,
    ) -> Result<(), Refusal> {
        op_check::check_tensor(out)?;
        self.flow.charge_name(out.id, memory)
    }

    /// Checks that `out` is new, of a valid shape and dtype, and takes the memory for it and
    /// its name before its value arrives.
    pub(super) fn reserve_pending(&mut self, out: &TensorIr) -> Result<SessionMemory, Refusal> {
        op_check::check_tensor(out)?;
        self.flow.check_new(out.id)?;
        let size = tensor_bytes(&out.shape, out.dtype).unwrap_or(usize::MAX);
        self.flow.reserve((size as u64).saturating_add(NAME_BYTES))
    }

    /// Adds a pending tensor that arrives under `ticket`. `memory` is the memory taken for
    /// the tensor and its name.
    pub(super) fn add_pending(&mut self, out: &TensorIr, ticket: u64, memory: SessionMemory) {
        self.flow.add_pending(out, ticket, memory);
    }

    /// Returns the pending tensor `id` with this `ticket`, or `None` if it was dropped
    /// meanwhile.
    pub(super) fn pending(&self, id: TensorId, ticket: u64) -> Option<TensorIr> {
        let (shape, dtype) = self.flow.pending_type(id, ticket)?;
        Some(TensorIr {
            id,
            shape,
            dtype,
            status: TensorStatus::NotInit,
        })
    }

    /// Uploads `data` to the backend as the value of `id`, which must be pending or new.
    pub(super) fn set_value(&mut self, id: TensorId, data: TensorData) -> Result<(), Refusal> {
        let store = &mut self.store;
        catch_unwind(AssertUnwindSafe(|| store.upload(id, data))).map_err(panicked)
    }

    /// Makes the pending tensor `id` live, or poisons it with the fault in `value`.
    pub(super) fn resolve_pending(&mut self, id: TensorId, value: Result<(), Arc<Fault>>) {
        self.flow.resolve_pending(id, value);
    }
}

#[cfg(any(test, feature = "testing"))]
impl Tensors {
    /// Returns the number of tensors in the table.
    pub(super) fn len(&self) -> usize {
        self.flow.len()
    }
}

#[cfg(feature = "testing")]
impl Tensors {
    /// Returns the shape and dtype that the backend has for `tensor`, if the tensor is
    /// live and the backend can report them.
    pub(super) fn actual_type(
        &mut self,
        tensor: &TensorIr,
    ) -> Option<(burn_backend::Shape, burn_backend::DType)> {
        match self.flow.is_live(tensor.id) {
            true => self.store.actual_type(tensor),
            false => None,
        }
    }
}

#[cfg(test)]
impl Tensors {
    pub(super) fn store(&mut self) -> &mut dyn TensorStore {
        &mut *self.store
    }
}

/// Returns the result of a call of the backend, or the message of its panic.
fn caught<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let called = catch_unwind(AssertUnwindSafe(call));
    called.unwrap_or_else(|panic| Err(panic_message(panic.as_ref())))
}

/// Returns the refusal for a panic of the backend, or for the error of a custom op.
fn panicked(panic: Box<dyn Any + Send>) -> Refusal {
    match panic.downcast::<FailedCustomOp>() {
        Ok(failed) => Refusal::New(FaultKind::Backend, failed.0),
        Err(panic) => Refusal::New(FaultKind::Panic, panic_message(panic.as_ref())),
    }
}

/// Returns `data` with the memory `held`, which is freed with the data.
fn charged(data: TensorData, held: Option<ReplyMemory>) -> TensorData {
    let Some(held) = held else {
        return data;
    };
    let (bytes, shape, dtype) = data.into_parts();
    let bytes = bytes::Bytes::from_owner(Charged {
        bytes: shared(bytes),
        _held: held,
    });
    let bytes = burn_backend::Bytes::from_shared(bytes, AllocationProperty::Native);
    TensorData::from_bytes(bytes, shape, dtype)
}
