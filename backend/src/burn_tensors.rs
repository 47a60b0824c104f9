//! The tensors of a session on a Burn backend.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use burn_backend::{BoolStore, DType, ExecutionError, IntDType, Shape, TensorData, TensorMetadata};
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

    /// Replaces the index tensors of `op` by clamped copies if the backend's kernels do not
    /// check indices. Returns the tensors that `op` uses for the last time and that the
    /// caller must drop after it.
    fn clamp_indices(&mut self, op: &mut OperationIr) -> Vec<TensorIr> {
        let mut after = Vec::new();
        if !B::TRUSTS_INDICES || bounds::indices(op).is_empty() {
            return after;
        }
        let ids: Vec<_> = op.nodes().iter().map(|tensor| tensor.id).collect();
        // The copies get the highest ids that `op` does not use. A program has no reason to use
        // such ids. One that does loses its own tensor, and later uses of it are faults.
        let all = (0..=u64::MAX).rev().map(TensorId::new);
        let mut unused = all.filter(|id| !ids.contains(id));
        for (tensor, range) in bounds::indices(op) {
            let mut taken = tensor.clone();
            if ids.iter().filter(|id| **id == tensor.id).count() > 1 {
                taken = as_shared(tensor);
                if tensor.status == TensorStatus::ReadWrite {
                    after.push(tensor.clone());
                }
            }
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
        let after = self.clamp_indices(&mut op);
        let device = self.device.clone();
        self.run(|interpreter| {
            if !cast_int(interpreter, &op) && !B::execute_exactly(interpreter, &op) {
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
        let read = self.run(|interpreter| interpreter.read_tensor_async(tensor));
        Box::pin(self.stream.attach(read))
    }

    fn forget(&mut self, tensor: TensorIr) {
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
