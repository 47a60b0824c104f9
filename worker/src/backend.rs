//! The interface to Burn's backends. The code above this module is the same for a CPU and
//! for any GPU.
//!
//! A [`TensorStore`] holds the tensors of one session on one device. Calls may panic, as
//! backends do on ops that they cannot execute; `session/runner/tensors.rs` catches that.

mod bounds;
mod burn_tensors;
#[cfg(feature = "cube")]
mod cube;
mod flex;
mod lacking_dtypes;

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, OnceLock},
};

use burn_backend::{BoolStore, DType, DTypeUsage, ExecutionError, Shape, TensorData};
use burn_ir::{
    BackendIr, BinaryOpIr, HandleKind, NumericOperationIr, OperationIr, TensorId, TensorIr,
    TensorStatus,
};
use burn_router::{CustomOpRegistry, TensorInterpreter};
use burn_std::future::DynFut;
use tensord_proto::codec::DeviceProfile;
use tokio::runtime::Handle;

use self::{burn_tensors::BurnTensors, lacking_dtypes::LackingDtypes};
use crate::custom::{CustomOps, FailedCustomOp, Handlers};

/// Whether GPUs of this build are exact: no kernel of CubeCL is chosen by a measurement.
pub(crate) const ARE_GPUS_EXACT: bool = cfg!(all(feature = "cube", not(feature = "tuning")));

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

/// Host memory that holds the elements of one or more tensors.
pub(crate) type HostStorage = Arc<burn_backend::Bytes>;

/// A tensor's storage and its layout there. A backend may choose kernels by the layout, so the
/// bits of a result may depend on it.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub(crate) storage: HostStorage,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// Distance of neighbouring elements along each axis, in elements.
    pub(crate) strides: Vec<isize>,
    /// Position of the first element in the storage, in elements.
    pub(crate) offset: usize,
    /// Bytes from the first element on that the tensor may use, if not all.
    pub(crate) range_bytes: Option<u64>,
}

/// Tensors as they lie in their storages; of one without a value, as an op has failed on the device,
/// the reason.
pub(crate) type StoredTensors = Vec<Result<StoredTensor, String>>;

/// Tensors that a backend has captured, from which another thread can find out later how they lie in their storages.
pub(crate) struct Deferred<T> {
    /// Returns that. Any thread may call this, while the session goes on.
    pub(crate) stored: Box<dyn FnOnce() -> T + Send>,
    /// Bytes of the host's memory into which the device has copied the tensors.
    pub(crate) copied_bytes: u64,
}

/// Captured tensors of a backend.
pub(crate) type DeferredTensors = Deferred<StoredTensors>;

/// Captured tensors of a session, with their names and declared types; see [`TensorStore::stored`].
pub(crate) type DeferredValues = Deferred<Vec<(TensorIr, Result<StoredTensor, String>)>>;

impl StoredTensor {
    /// Returns whether all elements are within the storage.
    pub(crate) fn is_within_storage(&self) -> bool {
        let dims = self.shape.as_slice();
        let size = self.dtype.size();
        if dims.len() != self.strides.len() || size == 0 || !self.storage.len().is_multiple_of(size)
        {
            return false;
        }
        let elements = self.storage.len() / size;
        if dims.contains(&0) {
            return self.offset <= elements;
        }
        let (mut first, mut last) = (self.offset as i128, self.offset as i128);
        for (&dim, &stride) in dims.iter().zip(&self.strides) {
            let reach = (dim as i128 - 1) * stride as i128;
            match reach < 0 {
                true => first += reach,
                false => last += reach,
            }
        }
        first >= 0 && last < elements as i128
    }
}

/// The tensors of one session on one device.
pub(crate) trait TensorStore: Send {
    /// Returns the error message if `custom_op` is not installed for this device.
    fn custom_op_error(&self, custom_op: &str) -> Option<String>;
    /// Returns the error message if the device does not have `op`, or the type of one of its inputs
    /// or outputs.
    fn unsupported(&self, _op: &OperationIr) -> Option<String> {
        None
    }
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
    /// Captures existing tensors, in order, as they lie in their storages. Tensors in host memory are shared, as they
    /// never change. The others are copied before this returns, which waits for the device.
    ///
    /// # Errors
    ///
    /// The device's error, or that more than `max_copied_bytes` would have to be copied; then nothing
    /// is copied.
    fn stored(
        &mut self,
        tensors: Vec<TensorIr>,
        max_copied_bytes: u64,
    ) -> Result<DeferredValues, String>;
    /// Creates tensors as they lie in their storages, of which several may share one. The caller
    /// has checked that the elements are [within them](StoredTensor::is_within_storage).
    ///
    /// # Errors
    ///
    /// If the backend has no tensor of that layout, or the device has no room.
    fn restore(&mut self, tensors: Vec<(TensorId, StoredTensor)>) -> Result<(), String>;
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
    /// Returns whether ops may still run on the device when their calls have returned.
    fn is_asynchronous(&self) -> bool {
        false
    }
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

    /// Executes `op` if Burn's own kernel would give it other bits from run to run. Returns
    /// `false` if the op must still be executed.
    fn execute_exactly(_: &mut TensorInterpreter<Self>, _: &OperationIr) -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Returns the error message if the backend does not have `op`, as it could not give the same
    /// bits each time.
    fn unsupported(_: &OperationIr) -> Option<String> {
        None
    }

    /// Is called after each op. A backend that queues ops to fuse them executes those in the queue if
    /// their bits may depend on what is fused, and must be the same each time.
    fn finish_op(_: &Self::Device) {}

    /// The function that returns whether a tensor can be read without waiting, because its
    /// storage is in host memory and exactly as large as the tensor. `None` if that is true
    /// for no tensor of this backend.
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

    /// Captures tensors as they lie in their storages; see [`TensorStore::stored`].
    fn stored(
        tensors: Vec<HandleKind<Self>>,
        max_copied_bytes: u64,
    ) -> Result<DeferredTensors, String>
    where
        Self: Sized;

    /// Returns tensors of `device` that lie in their storages in this way; see
    /// [`TensorStore::restore`].
    fn restored(
        device: &Self::Device,
        tensors: Vec<StoredTensor>,
    ) -> Result<Vec<HandleKind<Self>>, String>
    where
        Self: Sized;
}

/// A device of Burn backend `B`.
pub(crate) struct BurnDevice<B: SessionBackend> {
    device: B::Device,
    custom_ops: CustomOpRegistry<B>,
    custom_names: Arc<[String]>,
    /// Made when the first session is opened.
    lacking_dtypes: OnceLock<Arc<LackingDtypes>>,
}

impl<B: SessionBackend> BurnDevice<B> {
    pub(crate) fn shared(device: B::Device, custom_ops: &CustomOps) -> Arc<dyn Device> {
        let handlers = B::custom_ops(custom_ops);
        let custom_names = handlers.keys().cloned().collect();
        let mut registry = CustomOpRegistry::new();
        for (name, run) in handlers {
            registry.register(&name, move |tensors, call, device| {
                if let Err(error) = run(tensors, call, device) {
                    resume_unwind(Box::new(FailedCustomOp(error.to_string())));
                }
            });
        }
        Arc::new(Self {
            device,
            custom_ops: registry,
            custom_names,
            lacking_dtypes: OnceLock::new(),
        })
    }
}

impl<B: SessionBackend> BurnDevice<B> {
    fn lacking_dtypes(&self) -> Arc<LackingDtypes> {
        let lacking = self.lacking_dtypes.get_or_init(|| {
            let name = format!("{} {:?}", B::name(&self.device), self.device);
            // A type that can be stored but not computed with may be one for matrix products only.
            let is_there =
                |dtype| B::dtype_usage(&self.device, dtype).contains(DTypeUsage::Storage);
            Arc::new(LackingDtypes::new(name, &DTYPES, is_there))
        });
        lacking.clone()
    }
}

impl<B: SessionBackend> Device for BurnDevice<B> {
    fn open(&self) -> Box<dyn TensorStore> {
        Box::new(BurnTensors::new(
            self.device.clone(),
            self.custom_ops.clone(),
            self.custom_names.clone(),
            self.lacking_dtypes(),
        ))
    }

    fn profile(&self) -> DeviceProfile {
        let usage = |dtype| (dtype, B::dtype_usage(&self.device, dtype).as_u8());
        DeviceProfile {
            settings: burn_backend::DeviceOps::defaults(&self.device),
            dtypes: DTYPES.map(usage).to_vec(),
        }
    }

    fn is_asynchronous(&self) -> bool {
        // The host executes ops on its own memory in the call.
        B::IS_HOST_READABLE.is_none()
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
