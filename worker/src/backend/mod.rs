//! The interface to Burn's backends. The code above this module is the same for a CPU and
//! for any GPU.
//!
//! A [`TensorStore`] holds the tensors of one session on one device. Calls may panic, as
//! backends do on ops that they cannot execute; the executor catches these panics.

mod bounds;
#[cfg(feature = "cube")]
mod cube;
mod flex;

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use burn_backend::{BoolStore, DType, ExecutionError, IntDType, Shape, TensorData, TensorMetadata};
use burn_ir::{
    BackendIr, BaseOperationIr, BinaryOpIr, FloatOperationIr, HandleKind, ModuleOperationIr,
    NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn_router::{CustomOpRegistry, TensorInterpreter};
use burn_std::{future::DynFut, stream::Stream};
use tensord_proto::codec::DeviceProfile;
use tokio::runtime::Handle;
use tracing::warn;

use crate::{
    custom::{CustomOps, Handlers},
    locks::lock,
};

/// The memory that a tensor uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StorageInfo {
    /// Differs from the id of every other storage that exists at the same time; never 0.
    pub(crate) id: usize,
    /// Size of the whole storage, even if the tensor uses only a part.
    pub(crate) bytes: u64,
    /// Whether another tensor or value uses the storage too.
    pub(crate) is_shared: bool,
}

/// The tensors of one session on one device.
pub(crate) trait TensorStore: Send {
    /// Returns the error message if `custom_op` is not installed for this device.
    fn custom_op_error(&self, custom_op: &str) -> Option<String>;
    /// Executes an op.
    fn execute(&mut self, op: Box<OperationIr>);
    /// Executes an op that draws random numbers, with a generator seeded by `seed`.
    fn execute_seeded(&mut self, op: Box<OperationIr>, seed: u64);
    /// Creates a tensor from `data`.
    fn upload(&mut self, id: TensorId, data: TensorData);
    /// Adds `id` as another id of the existing tensor `source`.
    fn alias(&mut self, id: TensorId, source: TensorId);
    /// Starts to read a tensor; the future returns its data. Drops the tensor if its status
    /// is `ReadWrite`.
    fn read(&mut self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>>;
    /// Drops a tensor, if it exists.
    fn forget(&mut self, tensor: TensorIr);
    /// Waits until the device has completed all work submitted so far.
    fn sync(&mut self) -> Result<(), ExecutionError>;
    /// Returns whether an existing tensor has a storage of exactly its own size in host
    /// memory, so that it can be read without waiting.
    fn is_host_readable(&mut self, tensor: &TensorIr) -> bool;
    /// Returns whether tensors are in host memory, so that copying one for a read takes
    /// more host memory.
    fn is_in_host_memory(&self) -> bool;
    /// Returns the shape and dtype that the backend holds for an existing tensor, or `None`
    /// if the backend cannot determine them.
    #[cfg(feature = "testing")]
    fn actual_type(&mut self, _tensor: &TensorIr) -> Option<(Shape, DType)> {
        None
    }
    /// Returns the storage of an existing tensor, or `None` if the backend cannot determine
    /// it.
    fn storage(&mut self, tensor: &TensorIr) -> Option<StorageInfo>;
}

/// Runs a small op on `device` as a session would, and checks the result. Blocks for as
/// long as the device takes, and may panic as backends do.
pub(crate) fn probe(device: &dyn Device, runtime: &Handle) -> Result<(), String> {
    const FIRST: [f32; 3] = [1.0, 2.0, 3.0];
    const SECOND: [f32; 3] = [4.0, 8.0, 16.0];
    const SUM: [f32; 3] = [5.0, 10.0, 19.0];
    let tensor = |id, status| TensorIr {
        id: TensorId::new(id),
        shape: Shape::new([SUM.len()]),
        status,
        dtype: DType::F32,
    };
    let mut store = device.open();
    store.upload(TensorId::new(1), TensorData::from(FIRST));
    store.upload(TensorId::new(2), TensorData::from(SECOND));
    let add = NumericOperationIr::Add(BinaryOpIr {
        lhs: tensor(1, TensorStatus::ReadWrite),
        rhs: tensor(2, TensorStatus::ReadWrite),
        out: tensor(3, TensorStatus::NotInit),
    });
    store.execute(Box::new(OperationIr::NumericFloat(DType::F32, add)));
    let read = store.read(tensor(3, TensorStatus::ReadWrite));
    let read = runtime.block_on(read).map_err(|e| e.reason().to_owned())?;
    store.sync().map_err(|e| e.reason().to_owned())?;
    match read == TensorData::from(SUM) {
        true => Ok(()),
        false => Err(format!("{FIRST:?} + {SECOND:?} gave {read}")),
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

/// A device that sessions can be opened on.
pub(crate) trait Device: Send + Sync {
    fn open(&self) -> Box<dyn TensorStore>;
    fn profile(&self) -> DeviceProfile;
    /// Returns the bytes of device memory that the backend holds for all its sessions, or
    /// `None` if the backend does not count them. May wait for the device.
    fn reserved_bytes(&self) -> Option<u64>;
}

/// A Burn backend that sessions can run on.
pub(crate) trait SessionBackend: BackendIr {
    /// Returns the value of a tensor without a copy, if the host can read the tensor's
    /// memory. The value stays unchanged, whatever happens to the tensor.
    fn borrow_value(handle: Self::Handle) -> Option<TensorData>;

    /// Returns the handlers of the worker's custom ops for this backend.
    fn custom_ops(ops: &CustomOps) -> Handlers<Self>
    where
        Self: Sized;

    /// The function that returns whether a tensor has a storage of exactly its own size in
    /// host memory, so that it can be read without waiting. `None` if no tensor of this
    /// backend has.
    const IS_HOST_READABLE: Option<fn(Self::Handle) -> bool>;

    /// Whether an op may make an output of another dtype than declared. Outputs are then
    /// verified after the op, because later ops are checked against the declared dtype.
    const DTYPES_MAY_DIFFER: bool;

    /// The function that returns the storage that a tensor uses. `None` if the backend
    /// assigns storages when kernels are launched, which may be later.
    const STORAGE: Option<fn(Self::Handle) -> Option<StorageInfo>>;

    /// Whether kernels address memory by the values in a tensor of indices without checking
    /// them.
    const TRUSTS_INDICES: bool;
}

/// A device of Burn backend `B`.
pub(crate) struct BurnDevice<B: SessionBackend> {
    device: B::Device,
    custom_ops: CustomOpRegistry<B>,
    custom_names: Arc<[String]>,
}

impl<B: SessionBackend> BurnDevice<B> {
    pub(crate) fn shared(device: B::Device, custom_ops: &CustomOps) -> Arc<dyn Device> {
        let handlers = B::custom_ops(custom_ops);
        let custom_names = handlers.keys().cloned().collect();
        let mut registry = CustomOpRegistry::new();
        for (name, run) in handlers {
            registry.register(&name, move |tensors, call, device| {
                run(tensors, call, device);
            });
        }
        Arc::new(Self {
            device,
            custom_ops: registry,
            custom_names,
        })
    }
}

impl<B: SessionBackend> Device for BurnDevice<B> {
    fn open(&self) -> Box<dyn TensorStore> {
        let device = self.device.clone();
        Box::new(BurnTensors::<B> {
            interpreter: Some(TensorInterpreter::with_custom_ops(
                device.clone(),
                self.custom_ops.clone(),
            )),
            custom_names: self.custom_names.clone(),
            device,
            stream: Stream::new(),
        })
    }

    fn profile(&self) -> DeviceProfile {
        let usage = |dtype| (dtype, B::dtype_usage(&self.device, dtype).as_u8());
        DeviceProfile {
            settings: burn_backend::DeviceOps::defaults(&self.device),
            dtypes: DTYPES.map(usage).to_vec(),
        }
    }

    fn reserved_bytes(&self) -> Option<u64> {
        // The call panics if the device has failed.
        let usage = catch_unwind(AssertUnwindSafe(|| B::memory_pool_usage(&self.device)));
        usage.ok().flatten().map(|usage| usage.bytes_reserved)
    }
}

/// The dtypes listed in a profile. Quantized ones are not among them: Burn's router has no
/// quantized ops.
const DTYPES: [DType; 16] = [
    DType::F64,
    DType::F32,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
    DType::Bool(BoolStore::U32),
];

/// Each Burn backend has one random generator per process. This lock is held from seeding
/// until drawing has ended, so that no other session draws in between.
static RNG_LOCK: Mutex<()> = Mutex::new(());

/// The tensors of a session on a Burn backend. Each session has its own stream of the
/// device, so that waiting for one session's work does not wait for the others'.
struct BurnTensors<B: SessionBackend> {
    /// `None` only while the value is dropped.
    interpreter: Option<TensorInterpreter<B>>,
    custom_names: Arc<[String]>,
    device: B::Device,
    stream: Stream,
}

impl<B: SessionBackend> BurnTensors<B> {
    fn run<T>(&mut self, call: impl FnOnce(&mut TensorInterpreter<B>) -> T) -> T {
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
    /// If they differ and the dtype cannot be converted. The op then fails with a fault.
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
        // A program has no reason to use such high ids. One that does loses its own tensor,
        // and later uses of that tensor are faults.
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

    fn execute(&mut self, mut op: Box<OperationIr>) {
        let may_differ = B::DTYPES_MAY_DIFFER && may_change_dtype(&op);
        let declared = match &*op {
            OperationIr::Custom(call) => call.outputs.clone(),
            op if may_differ => op.outputs().cloned().collect(),
            _ => Vec::new(),
        };
        let after = self.clamp_indices(&mut op);
        self.run(|interpreter| interpreter.register_op(*op));
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
        let _drawing = lock(&RNG_LOCK);
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
            // Moves the data to memory from which the device can copy by itself, if it has
            // such memory.
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
fn as_shared(tensor: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadOnly,
        ..tensor.clone()
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
