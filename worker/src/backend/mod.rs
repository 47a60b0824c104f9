//! The seam to Burn's backends: everything above it is the same for a CPU and
//! for any GPU.
//!
//! An [`TensorStore`] is one session's set of tensors on one device. Calls may
//! panic, as backends do on ops they cannot carry out; the executor catches.

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

/// Which memory a tensor uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StorageInfo {
    /// Of no other storage that is there at the same time; never 0.
    pub(crate) id: usize,
    /// What it takes, whatever the tensor uses of it.
    pub(crate) bytes: u64,
    /// Somebody else uses it, too.
    pub(crate) is_shared: bool,
}

/// One session's tensors on one device.
pub(crate) trait TensorStore: Send {
    /// Why a custom op cannot be carried out, if it is not there.
    fn lacks(&self, custom_op: &str) -> Option<String>;
    /// Carries out an op.
    fn execute(&mut self, op: Box<OperationIr>);
    /// Carries out an op that draws random numbers, with a generator seeded by `seed`.
    fn execute_seeded(&mut self, op: Box<OperationIr>, seed: u64);
    /// Makes a tensor of `data`.
    fn upload(&mut self, id: TensorId, data: TensorData);
    /// Gives a tensor that is there a second id.
    fn alias(&mut self, id: TensorId, source: TensorId);
    /// Starts to read a tensor; the future gives its data.
    fn read(&mut self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>>;
    /// Forgets a tensor, if it is there.
    fn forget(&mut self, tensor: TensorIr);
    /// Waits until the device has done everything asked of it.
    fn sync(&mut self) -> Result<(), ExecutionError>;
    /// Whether a tensor that is there is in memory of its own and its size, where the host
    /// reads it without waiting.
    fn is_at_hand(&mut self, tensor: &TensorIr) -> bool;
    /// Whether values are in the host's memory, so that a read that copies one takes
    /// more of it.
    fn is_in_host_memory(&self) -> bool;
    /// The shape and dtype that the backend has for a tensor that is there; none if the
    /// backend cannot say.
    #[cfg(feature = "testing")]
    fn made(&mut self, _tensor: &TensorIr) -> Option<(Shape, DType)> {
        None
    }
    /// Which memory a tensor that is there uses, if the backend can tell.
    fn storage(&mut self, tensor: &TensorIr) -> Option<StorageInfo>;
}

/// Runs a small op on `device` as a session would, and checks what it gives. May take as
/// long as the device takes, and panic as backends do.
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
        false => Err(format!("{FIRST:?} + {SECOND:?} came to {read}")),
    }
}

/// What a panic said.
pub(crate) fn panic_words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it said nothing".into())
}

/// A device that sessions can be opened on.
pub(crate) trait Device: Send + Sync {
    fn open(&self) -> Box<dyn TensorStore>;
    fn profile(&self) -> DeviceProfile;
    /// Bytes that the backend holds of the device's memory for all its sessions,
    /// where it counts them. May wait for the device.
    fn reserved_bytes(&self) -> Option<u64>;
}

/// A Burn backend that sessions can run on.
pub(crate) trait SessionBackend: BackendIr {
    /// The value of a tensor in its own memory, where the host can read that. It
    /// stays as it is, whatever becomes of the tensor.
    fn borrow_value(handle: Self::Handle) -> Option<TensorData>;

    /// The worker's own ops for this backend.
    fn custom_ops(ops: &CustomOps) -> Handlers<Self>
    where
        Self: Sized;

    /// Tells whether a tensor is in memory of its own and its size, where the host reads
    /// it without waiting. `None`: none is.
    const IS_AT_HAND: Option<fn(Self::Handle) -> bool>;

    /// Whether an op may make another dtype than it declares, so that this is to be
    /// looked at: later ops are checked by what was declared.
    const TYPES_DIFFER: bool;

    /// Tells which memory a tensor uses. `None`: that is decided when kernels are
    /// launched, which may be later.
    const STORAGE: Option<fn(Self::Handle) -> Option<StorageInfo>>;

    /// Kernels address memory by what is in a tensor of indices, and do not check it.
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
        // A device that failed counts no more.
        let usage = catch_unwind(AssertUnwindSafe(|| B::memory_pool_usage(&self.device)));
        usage.ok().flatten().map(|usage| usage.bytes_reserved)
    }
}

/// The dtypes a profile tells about. Quantized ones are not among them: Burn's
/// router has no quantized ops.
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

/// Burn's backends keep one random generator per process. Seeding it and
/// drawing from it must not be torn apart by another session.
static GENERATOR: Mutex<()> = Mutex::new(());

/// One stream of the device for each session: what one waits for, the others do not.
struct BurnTensors<B: SessionBackend> {
    /// Taken when the session is over.
    interpreter: Option<TensorInterpreter<B>>,
    custom_names: Arc<[String]>,
    device: B::Device,
    stream: Stream,
}

impl<B: SessionBackend> BurnTensors<B> {
    fn run<T>(&mut self, call: impl FnOnce(&mut TensorInterpreter<B>) -> T) -> T {
        let interpreter = self.interpreter.as_mut().expect("the session is on");
        self.stream.enter(|| call(interpreter))
    }

    /// Sees to it that `out` is what was declared: later ops are checked by that.
    ///
    /// # Panics
    ///
    /// When it is something else, which makes a fault of the op.
    fn hold_to(&mut self, out: &TensorIr, who: &str) {
        let (shape, dtype) = self.type_of(out);
        let is_as_declared = (&shape, dtype) == (&out.shape, out.dtype);
        if is_as_declared || (B::TYPES_DIFFER && shape == out.shape && self.mend(out, dtype)) {
            return;
        }
        panic!(
            "the {who} made {shape} of {}, the call declares {} of {}",
            dtype.name(),
            out.shape,
            out.dtype.name()
        );
    }

    /// Gives `out` the dtype that was declared, where the backend has `made` another of
    /// the same kind. False: it is something else.
    fn mend(&mut self, out: &TensorIr, made: DType) -> bool {
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
        let lent = self.run(|interpreter| B::borrow_value(interpreter.get_tensor_handle(&shared)));
        let Some((bytes, shape, _)) = lent.map(TensorData::into_parts) else {
            return false;
        };
        let Ok(data) = TensorData::try_from_bytes(bytes, shape, out.dtype) else {
            return false;
        };
        self.forget(out.clone());
        self.upload(out.id, data);
        true
    }

    /// The shape and dtype that the backend has for a tensor that is there.
    fn type_of(&mut self, tensor: &TensorIr) -> (Shape, DType) {
        match self.run(|interpreter| interpreter.get_tensor(&as_shared(tensor))) {
            HandleKind::Float(made) => (made.shape(), made.dtype()),
            HandleKind::Int(made) => (made.shape(), made.dtype()),
            HandleKind::Bool(made) => (made.shape(), made.dtype()),
            HandleKind::Quantized(made) => (made.shape(), made.dtype()),
        }
    }

    /// Has `op` take indices that are within bounds, if its kernel does not look. Returns
    /// tensors that `op` uses for the last time, and that are to be dropped after it.
    fn keep_in_bounds(&mut self, op: &mut OperationIr) -> Vec<TensorIr> {
        let mut after = Vec::new();
        if !B::TRUSTS_INDICES || bounds::indices(op).is_empty() {
            return after;
        }
        let ids: Vec<_> = op.nodes().iter().map(|tensor| tensor.id).collect();
        // Ids that a program has no reason to use. If it does, it loses its own tensor, and
        // later uses of that are faults.
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
                    unreachable!("indices that are no integers are refused");
                };
                let clamped = bounds::clamped::<B>(values, &taken, &range);
                interpreter.register_tensor_to_device(id, HandleKind::Int(clamped));
            });
            (tensor.id, tensor.status) = (id, TensorStatus::ReadWrite);
        }
        after
    }
}

impl<B: SessionBackend> TensorStore for BurnTensors<B> {
    fn lacks(&self, custom_op: &str) -> Option<String> {
        if self.custom_names.iter().any(|name| name == custom_op) {
            return None;
        }
        let has = match self.custom_names.is_empty() {
            true => "none".into(),
            false => self.custom_names.join(", "),
        };
        Some(format!(
            "this worker has no custom op {custom_op:?} for this device, of those it has ({has})"
        ))
    }

    fn execute(&mut self, mut op: Box<OperationIr>) {
        let may_differ = B::TYPES_DIFFER && types_may_differ(&op);
        let declared = match &*op {
            OperationIr::Custom(call) => call.outputs.clone(),
            op if may_differ => op.outputs().cloned().collect(),
            _ => Vec::new(),
        };
        let after = self.keep_in_bounds(&mut op);
        self.run(|interpreter| interpreter.register_op(*op));
        for tensor in after {
            self.forget(tensor);
        }
        // What it makes is up to its handler, and later ops were checked by this.
        let who = if may_differ { "backend" } else { "custom op" };
        for out in &declared {
            self.hold_to(out, who);
        }
    }

    fn execute_seeded(&mut self, op: Box<OperationIr>, seed: u64) {
        // A backend that panicked while drawing leaves nothing half-done here.
        let _drawing = lock(&GENERATOR);
        let device = self.device.clone();
        let declared: Vec<_> = match B::TYPES_DIFFER {
            true => op.outputs().cloned().collect(),
            false => Vec::new(),
        };
        self.run(|interpreter| {
            interpreter.seed(seed);
            interpreter.register_op(*op);
            // A lazy backend would draw later, when the seed is another's. Should it
            // fail, whoever reads the tensor hears why.
            let _ = B::flush(&device);
        });
        for out in &declared {
            self.hold_to(out, "backend");
        }
    }

    fn upload(&mut self, id: TensorId, mut data: TensorData) {
        let device = self.device.clone();
        self.run(|interpreter| {
            // From where the device fetches it by itself, if it has such memory.
            B::staging(std::iter::once(&mut data), &device);
            interpreter.register_tensor_data_id(id, data);
        });
    }

    fn alias(&mut self, id: TensorId, source: TensorId) {
        self.run(|interpreter| interpreter.register_alias(id, source));
    }

    fn read(&mut self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let shared = as_shared(&tensor);
        let lent = self.run(|interpreter| B::borrow_value(interpreter.get_tensor_handle(&shared)));
        if let Some(data) = lent {
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

    fn is_at_hand(&mut self, tensor: &TensorIr) -> bool {
        let Some(is_at_hand) = B::IS_AT_HAND else {
            return false;
        };
        let shared = as_shared(tensor);
        let look = || self.run(|interpreter| is_at_hand(interpreter.get_tensor_handle(&shared)));
        // Whoever reads it hears what is wrong with it.
        catch_unwind(AssertUnwindSafe(look)).unwrap_or(false)
    }

    fn is_in_host_memory(&self) -> bool {
        B::IS_AT_HAND.is_some()
    }

    #[cfg(feature = "testing")]
    fn made(&mut self, tensor: &TensorIr) -> Option<(Shape, DType)> {
        catch_unwind(AssertUnwindSafe(|| self.type_of(tensor))).ok()
    }

    fn storage(&mut self, tensor: &TensorIr) -> Option<StorageInfo> {
        let storage = B::STORAGE?;
        let shared = as_shared(tensor);
        let look = || self.run(|interpreter| storage(interpreter.get_tensor_handle(&shared)));
        // An op that made less than it said has no storage there.
        catch_unwind(AssertUnwindSafe(look)).ok().flatten()
    }
}

/// Whether `op` may be one where Flex makes another dtype than is declared: it selects
/// booleans as bytes, chooses the dtype of indices by itself, and takes dtypes that it does
/// not have for others. What training steps are full of keeps the dtype of its input.
fn types_may_differ(op: &OperationIr) -> bool {
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

/// A look at `tensor` that leaves it there.
fn as_shared(tensor: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadOnly,
        ..tensor.clone()
    }
}

impl<B: SessionBackend> Drop for BurnTensors<B> {
    /// Gives the session's memory back to the device: backends keep it by stream.
    fn drop(&mut self) {
        let interpreter = self.interpreter.take();
        let device = &self.device;
        let give_back = || {
            drop(interpreter);
            // Whoever had to do with what failed here has gone.
            let _ = B::sync(device);
            B::memory_cleanup(device);
        };
        let given = catch_unwind(AssertUnwindSafe(|| self.stream.enter(give_back)));
        if given.is_err() {
            warn!("a device panicked as it was to take back the memory of a session");
        }
    }
}
