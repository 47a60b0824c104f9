//! The tensors of a session on a Burn backend.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use burn_backend::{
    BoolStore, DType, ExecutionError, IntDType, Shape, Slice, TensorData, TensorMetadata,
};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, HandleKind, ModuleOperationIr, NumericOperationIr,
    OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn_router::{CustomOpRegistry, TensorInterpreter};
use burn_std::{future::DynFut, stream::Stream};
use tracing::warn;

use crate::{
    bounds,
    lacking_dtypes::LackingDtypes,
    session_backend::SessionBackend,
    tensor_store::{Deferred, DeferredValues, StorageInfo, StoredTensor, TensorStore},
};

/// Each Burn backend has one random generator per process. This lock is held from seeding
/// until drawing has ended, so that no other session draws in between.
static RNG_LOCK: Mutex<()> = Mutex::new(());

/// The tensors of a session on a Burn backend. Each session has its own stream of the
/// device, so that waiting for one session's work does not wait for the others'.
pub(super) struct BurnTensors<B: SessionBackend> {
    /// `None` only while the value is dropped.
    interpreter: Option<TensorInterpreter<B>>,
    custom_names: Arc<[String]>,
    lacking_dtypes: Arc<LackingDtypes>,
    device: B::Device,
    stream: Stream,
    /// The tensors whose elements may share memory with each other, as they may be views of expanded ones. Empty on backends
    /// that do not [trust indices](SessionBackend::TRUSTS_INDICES).
    expanded: HashSet<TensorId>,
}

impl<B: SessionBackend> BurnTensors<B> {
    pub(super) fn new(
        device: B::Device,
        custom_ops: CustomOpRegistry<B>,
        custom_names: Arc<[String]>,
        lacking_dtypes: Arc<LackingDtypes>,
    ) -> Self {
        Self {
            interpreter: Some(TensorInterpreter::with_custom_ops(
                device.clone(),
                custom_ops,
            )),
            custom_names,
            lacking_dtypes,
            device,
            stream: Stream::new(),
            expanded: HashSet::new(),
        }
    }

    pub(super) fn run<T>(&mut self, call: impl FnOnce(&mut TensorInterpreter<B>) -> T) -> T {
        let interpreter = self
            .interpreter
            .as_mut()
            .expect("the interpreter is taken only on drop");
        self.stream.enter(|| call(interpreter))
    }

    /// Verifies that `out` has the declared shape and dtype, because later ops are checked
    /// against these. Converts the dtype if it differs and can be converted.
    ///
    /// # Panics
    ///
    /// If the shape differs, or the dtype differs and cannot be converted. The panic, which
    /// names `who`, becomes the fault of the op.
    fn verify_output(&mut self, out: &TensorIr, who: &str) {
        let (shape, dtype) = self.type_of(out);
        let is_as_declared = (&shape, dtype) == (&out.shape, out.dtype);
        if is_as_declared
            || (B::DTYPES_MAY_DIFFER && shape == out.shape && self.convert_dtype(out, dtype))
        {
            return;
        }
        panic!(
            "the {who} returned {shape} of {}, but the call declares {} of {}",
            dtype.name(),
            out.shape,
            out.dtype.name()
        );
    }

    /// Converts `out` from the dtype that the backend `made` to the declared one, if both
    /// are integers or both booleans (or bytes). Returns false if they are not.
    fn convert_dtype(&mut self, out: &TensorIr, made: DType) -> bool {
        use BoolStore::{Native, U8};
        let is_int = |dtype: DType| dtype.is_int() || dtype.is_uint();
        if is_int(out.dtype) && is_int(made) {
            let HandleKind::Int(tensor) =
                self.run(|interpreter| interpreter.get_tensor(&as_shared(out)))
            else {
                return false;
            };
            let cast = HandleKind::Int(B::int_cast(tensor, IntDType::from(out.dtype)));
            self.forget(out.clone());
            self.run(|interpreter| interpreter.register_tensor_to_device(out.id, cast));
            return true;
        }
        let is_declared = matches!(out.dtype, DType::Bool(Native | U8));
        if !is_declared || !matches!(made, DType::U8 | DType::Bool(Native | U8)) {
            return false;
        }
        let shared = as_shared(out);
        let borrowed =
            self.run(|interpreter| B::borrow_value(interpreter.get_tensor_handle(&shared)));
        let Some((bytes, shape, _)) = borrowed.map(TensorData::into_parts) else {
            return false;
        };
        let Ok(data) = TensorData::try_from_bytes(bytes, shape, out.dtype) else {
            return false;
        };
        self.forget(out.clone());
        self.upload(out.id, data);
        true
    }

    /// Returns the shape and dtype that the backend holds for an existing tensor.
    fn type_of(&mut self, tensor: &TensorIr) -> (Shape, DType) {
        match self.run(|interpreter| interpreter.get_tensor(&as_shared(tensor))) {
            HandleKind::Float(made) => (made.shape(), made.dtype()),
            HandleKind::Int(made) => (made.shape(), made.dtype()),
            HandleKind::Bool(made) => (made.shape(), made.dtype()),
            HandleKind::Quantized(made) => (made.shape(), made.dtype()),
        }
    }

    /// Replaces what the backend's kernels do not check in `op`: ranges of slices, index tensors, and biases
    /// whose elements share memory. Returns the tensors that `op` uses for the last time and that the caller must drop
    /// after it.
    fn make_safe(&mut self, op: &mut OperationIr) -> Vec<TensorIr> {
        bounds::resolve_ranges(op);
        if !B::TRUSTS_INDICES {
            return Vec::new();
        }
        let mut after = self.clamp_indices(op);
        if !self.expanded.is_empty() {
            after.extend(self.copy_biases(op));
        }
        after
    }

    /// Records which outputs of `op` may be views of expanded tensors. An op on one tensor may return a view of it, as
    /// one to the power of 1 does.
    fn record_expanded(&mut self, op: &OperationIr) {
        if !B::TRUSTS_INDICES {
            return;
        }
        let mut may_be_expanded = bounds::is_expansion(op);
        if !self.expanded.is_empty() {
            let is_expanded = |tensor: &TensorIr| self.expanded.contains(&tensor.id);
            let may_be_view = matches!(op, OperationIr::Custom(_)) || op.inputs().count() == 1;
            may_be_expanded |= may_be_view && op.inputs().any(is_expanded);
            let last_uses = op
                .inputs()
                .filter(|it| it.status == TensorStatus::ReadWrite);
            for tensor in last_uses {
                self.expanded.remove(&tensor.id);
            }
        }
        if may_be_expanded {
            self.expanded.extend(op.outputs().map(|out| out.id));
        }
    }

    /// Replaces the index tensors of `op` by clamped copies. Returns the tensors that `op` uses for the last time and
    /// that the caller must drop after it.
    fn clamp_indices(&mut self, op: &mut OperationIr) -> Vec<TensorIr> {
        let mut after = Vec::new();
        if bounds::indices(op).is_empty() {
            return after;
        }
        let ids = ids_of(op);
        let mut unused = unused_ids(&ids);
        for (tensor, range) in bounds::indices(op) {
            let taken = take_input(tensor, &ids, &mut after);
            let id = unused.next().expect("more ids than an op has tensors");
            self.run(|interpreter| {
                let HandleKind::Int(values) = interpreter.get_tensor(&taken) else {
                    unreachable!("indices that are not integers are refused");
                };
                let clamped = bounds::clamp_to_range::<B>(values, &taken, &range);
                interpreter.register_tensor_to_device(id, HandleKind::Int(clamped));
            });
            (tensor.id, tensor.status) = (id, TensorStatus::ReadWrite);
        }
        after
    }

    /// Replaces biases of `op` whose elements share memory by copies. Returns the tensors that `op` uses for the last
    /// time and that the caller must drop after it.
    fn copy_biases(&mut self, op: &mut OperationIr) -> Vec<TensorIr> {
        let mut after = Vec::new();
        let ids = ids_of(op);
        let mut unused = unused_ids(&ids);
        for bias in bounds::biases(op) {
            if !self.expanded.contains(&bias.id) {
                continue;
            }
            let taken = take_input(bias, &ids, &mut after);
            if taken.status == TensorStatus::ReadWrite {
                self.expanded.remove(&taken.id);
            }
            let id = unused.next().expect("more ids than an op has tensors");
            let device = self.device.clone();
            self.run(|interpreter| {
                let HandleKind::Float(values) = interpreter.get_tensor(&taken) else {
                    unreachable!("a bias that is not of floats is refused");
                };
                let zeros = B::float_zeros(taken.shape.clone(), &device, taken.dtype.into());
                let all: Vec<_> = taken.shape.iter().map(|&dim| Slice::from(0..dim)).collect();
                let copy = B::float_slice_assign(zeros, &all, values);
                interpreter.register_tensor_to_device(id, HandleKind::Float(copy));
            });
            (bias.id, bias.status) = (id, TensorStatus::ReadWrite);
        }
        after
    }
}

/// Returns the ids of all tensors of `op`.
fn ids_of(op: &OperationIr) -> Vec<TensorId> {
    op.nodes().iter().map(|tensor| tensor.id).collect()
}

/// Returns the highest ids that are not among `ids`, for copies of inputs. A program has no reason to use such ids. One
/// that does loses its own tensor, and later uses of it are faults.
fn unused_ids(ids: &[TensorId]) -> impl Iterator<Item = TensorId> {
    let all = (0..=u64::MAX).rev().map(TensorId::new);
    all.filter(|id| !ids.contains(id))
}

/// Returns `tensor`, an input of an op with these `ids`, so that it can be taken before the op. If the op has it as
/// another input, too, and uses it for the last time, adds it to those to drop `after` the op.
fn take_input(tensor: &TensorIr, ids: &[TensorId], after: &mut Vec<TensorIr>) -> TensorIr {
    if ids.iter().filter(|id| **id == tensor.id).count() == 1 {
        return tensor.clone();
    }
    if tensor.status == TensorStatus::ReadWrite {
        after.push(tensor.clone());
    }
    as_shared(tensor)
}

impl<B: SessionBackend> TensorStore for BurnTensors<B> {
    fn custom_op_error(&self, custom_op: &str) -> Option<String> {
        if self.custom_names.iter().any(|name| name == custom_op) {
            return None;
        }
        let has = match self.custom_names.is_empty() {
            true => "none".into(),
            false => self.custom_names.join(", "),
        };
        Some(format!(
            "this worker has no custom op {custom_op:?} for this device; it has: {has}"
        ))
    }

    fn unsupported(&self, op: &OperationIr) -> Option<String> {
        let lacking = self.lacking_dtypes.error(op);
        lacking.or_else(|| B::unsupported(op))
    }

    fn execute(&mut self, mut op: Box<OperationIr>) {
        let may_differ = B::DTYPES_MAY_DIFFER && may_change_dtype(&op);
        let declared = match &*op {
            OperationIr::Custom(call) => call.outputs.clone(),
            op if may_differ => op.outputs().cloned().collect(),
            _ => Vec::new(),
        };
        let after = self.make_safe(&mut op);
        self.record_expanded(&op);
        let device = self.device.clone();
        self.run(|interpreter| {
            if !cast_int(interpreter, &op) && !B::execute_instead(interpreter, &op) {
                interpreter.register_op(*op);
            }
            B::finish_op(&device);
        });
        for tensor in after {
            self.forget(tensor);
        }
        // A custom op's handler decides what it makes, but later ops were checked against
        // the declaration.
        let who = if may_differ { "backend" } else { "custom op" };
        for out in &declared {
            self.verify_output(out, who);
        }
    }

    fn execute_seeded(&mut self, op: Box<OperationIr>, seed: u64) {
        // A lock poisoned by a panic is fine: each draw seeds the generator anew.
        // A panic of a backend leaves nothing that the next session depends on, as it seeds anew.
        let _drawing = RNG_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let device = self.device.clone();
        let declared: Vec<_> = match B::DTYPES_MAY_DIFFER {
            true => op.outputs().cloned().collect(),
            false => Vec::new(),
        };
        self.run(|interpreter| {
            interpreter.seed(seed);
            interpreter.register_op(*op);
            // A lazy backend would otherwise draw later, with another session's seed. An
            // error of the flush is reported when the tensor is read.
            let _ = B::flush(&device);
        });
        for out in &declared {
            self.verify_output(out, "backend");
        }
    }

    fn upload(&mut self, id: TensorId, mut data: TensorData) {
        let device = self.device.clone();
        self.run(|interpreter| {
            // Moves the data to pinned memory, from which the device copies faster, if the
            // backend has such memory.
            B::staging(std::iter::once(&mut data), &device);
            interpreter.register_tensor_data_id(id, data);
        });
    }

    fn alias(&mut self, id: TensorId, source: TensorId) {
        if self.expanded.contains(&source) {
            self.expanded.insert(id);
        }
        self.run(|interpreter| interpreter.register_alias(id, source));
    }

    fn read(&mut self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let shared = as_shared(&tensor);
        let borrowed =
            self.run(|interpreter| B::borrow_value(interpreter.get_tensor_handle(&shared)));
        if let Some(data) = borrowed {
            if tensor.status == TensorStatus::ReadWrite {
                self.forget(tensor);
            }
            return Box::pin(std::future::ready(Ok(data)));
        }
        if tensor.status == TensorStatus::ReadWrite {
            self.expanded.remove(&tensor.id);
        }
        let read = self.run(|interpreter| interpreter.read_tensor_async(tensor));
        Box::pin(self.stream.attach(read))
    }

    fn forget(&mut self, tensor: TensorIr) {
        self.expanded.remove(&tensor.id);
        let last = TensorIr {
            status: TensorStatus::ReadWrite,
            ..tensor
        };
        self.run(|interpreter| interpreter.register_op(OperationIr::Drop(last)));
    }

    fn sync(&mut self) -> Result<(), ExecutionError> {
        self.run(|interpreter| interpreter.sync())
    }

    fn is_host_readable(&mut self, tensor: &TensorIr) -> bool {
        let Some(is_host_readable) = B::IS_HOST_READABLE else {
            return false;
        };
        let shared = as_shared(tensor);
        let look =
            || self.run(|interpreter| is_host_readable(interpreter.get_tensor_handle(&shared)));
        // A failure is reported when the tensor is read.
        catch_unwind(AssertUnwindSafe(look)).unwrap_or(false)
    }

    fn is_in_host_memory(&self) -> bool {
        B::IS_HOST_READABLE.is_some()
    }

    #[cfg(feature = "testing")]
    fn actual_type(&mut self, tensor: &TensorIr) -> Option<(Shape, DType)> {
        catch_unwind(AssertUnwindSafe(|| self.type_of(tensor))).ok()
    }

    fn storage(&mut self, tensor: &TensorIr) -> Option<StorageInfo> {
        let storage = B::STORAGE?;
        let shared = as_shared(tensor);
        let look = || self.run(|interpreter| storage(interpreter.get_tensor_handle(&shared)));
        // An output that the op declared but did not make has no storage.
        catch_unwind(AssertUnwindSafe(look)).ok().flatten()
    }

    fn stored(
        &mut self,
        mut tensors: Vec<TensorIr>,
        max_copied_bytes: u64,
    ) -> Result<DeferredValues, String> {
        let stored = self.run(|interpreter| {
            let handles = tensors.iter_mut().map(|tensor| {
                // Others go on using it.
                tensor.status = TensorStatus::ReadOnly;
                interpreter.get_tensor(tensor)
            });
            B::stored(handles.collect(), max_copied_bytes)
        })?;
        let Deferred {
            stored,
            copied_bytes,
        } = stored;
        let stored = Box::new(move || {
            let stored = tensors.into_iter().zip(stored());
            let checked = stored.map(|(tensor, stored)| {
                let stored = stored.and_then(|stored| check_declared::<B>(&tensor, stored));
                (tensor, stored)
            });
            checked.collect()
        });
        Ok(Deferred {
            stored,
            copied_bytes,
        })
    }

    fn restore(&mut self, tensors: Vec<(TensorId, StoredTensor)>) -> Result<(), String> {
        let device = self.device.clone();
        if B::TRUSTS_INDICES {
            let shares_memory = |stored: &StoredTensor| stored.strides.contains(&0);
            let expanded = tensors.iter().filter(|(_, stored)| shares_memory(stored));
            self.expanded.extend(expanded.map(|(id, _)| *id));
        }
        let (ids, stored): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
        self.run(|interpreter| {
            for (id, tensor) in ids.into_iter().zip(B::restored(&device, stored)?) {
                interpreter.register_tensor_to_device(id, tensor);
            }
            Ok(())
        })
    }
}

/// Executes `op` if it is a cast between integers, which Burn's interpreter takes for
/// unreachable. Returns `false` if the op must still be executed.
fn cast_int<B: SessionBackend>(interpreter: &mut TensorInterpreter<B>, op: &OperationIr) -> bool {
    let OperationIr::BaseInt(BaseOperationIr::Cast(cast)) = op else {
        return false;
    };
    let HandleKind::Int(input) = interpreter.get_tensor(&cast.input) else {
        unreachable!("a cast between integers with an input of another kind is refused");
    };
    let out = B::int_cast(input, IntDType::from(cast.out.dtype));
    interpreter.register_tensor_to_device(cast.out.id, HandleKind::Int(out));
    true
}

/// Returns whether Flex may make an output of another dtype than `op` declares: Flex
/// selects booleans as bytes, chooses the dtype of indices by itself, and replaces dtypes
/// that it does not have. The ops that training steps mostly consist of keep the dtype of
/// their input.
fn may_change_dtype(op: &OperationIr) -> bool {
    use NumericOperationIr as Op;
    match op {
        OperationIr::BaseBool(_)
        | OperationIr::BaseInt(_)
        | OperationIr::NumericInt(..)
        | OperationIr::Bool(_)
        | OperationIr::Int(_) => true,
        OperationIr::BaseFloat(op) => matches!(
            op,
            BaseOperationIr::Cast(_)
                | BaseOperationIr::Empty(_)
                | BaseOperationIr::Ones(_)
                | BaseOperationIr::Zeros(_)
        ),
        OperationIr::NumericFloat(_, op) => matches!(
            op,
            Op::Full(_)
                | Op::ArgMax(_)
                | Op::ArgMin(_)
                | Op::ArgTopK(_)
                | Op::ArgSort(_)
                | Op::TopKWithIndices(_)
                | Op::MaxDimWithIndices(_)
                | Op::MinDimWithIndices(_)
                | Op::SortWithIndices(_)
        ),
        OperationIr::Float(_, op) => matches!(op, FloatOperationIr::IntoInt(_)),
        OperationIr::Module(op) => matches!(
            op,
            ModuleOperationIr::MaxPool1dWithIndices(_) | ModuleOperationIr::MaxPool2dWithIndices(_)
        ),
        _ => false,
    }
}

/// Returns a reference to `tensor` that does not consume it.
pub(super) fn as_shared(tensor: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadOnly,
        ..tensor.clone()
    }
}

/// Checks that a tensor has the declared type, with which it is restored; a lazy backend may not have it.
fn check_declared<B: SessionBackend>(
    tensor: &TensorIr,
    stored: StoredTensor,
) -> Result<StoredTensor, String> {
    let is_declared = match B::DTYPES_MAY_DIFFER {
        true => stored.dtype.size() == tensor.dtype.size(),
        false => stored.dtype == tensor.dtype,
    };
    match is_declared && stored.shape == tensor.shape {
        true => Ok(stored),
        false => Err(format!(
            "it is {} of {}, and was declared as {} of {}",
            stored.shape,
            stored.dtype.name(),
            tensor.shape,
            tensor.dtype.name()
        )),
    }
}

impl<B: SessionBackend> Drop for BurnTensors<B> {
    /// Frees the session's memory on the device: backends keep memory per stream.
    fn drop(&mut self) {
        let interpreter = self.interpreter.take();
        let device = &self.device;
        let give_back = || {
            drop(interpreter);
            // The session that an error would concern has ended.
            let _ = B::sync(device);
            B::memory_cleanup(device);
        };
        let given = catch_unwind(AssertUnwindSafe(|| self.stream.enter(give_back)));
        if given.is_err() {
            warn!("a device panicked while it freed the memory of a session");
        }
    }
}
