//! The tensors of a session: what executes its ops, whatever the device.

use std::sync::Arc;

use burn_backend::{DType, ExecutionError, Shape, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr};
use burn_std::future::DynFut;

/// The memory that a tensor uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageInfo {
    /// Differs from the id of every other storage that exists at the same time; never 0.
    pub id: usize,
    /// Size of the whole storage, even if the tensor uses only a part.
    pub bytes: u64,
    /// Whether another tensor or value uses the storage too.
    pub is_shared: bool,
}

/// Host memory that holds the elements of one or more tensors.
pub type HostStorage = Arc<burn_backend::Bytes>;

/// A tensor's storage and its layout there. A backend may choose kernels by the layout, so the
/// bits of a result may depend on it.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Where the elements are.
    pub storage: HostStorage,
    /// The size of each axis, in elements.
    pub shape: Shape,
    /// The type of the elements.
    pub dtype: DType,
    /// Distance of neighbouring elements along each axis, in elements.
    pub strides: Vec<isize>,
    /// Position of the first element in the storage, in elements.
    pub offset: usize,
    /// Bytes from the first element on that the tensor may use, if not all.
    pub range_bytes: Option<u64>,
}

/// Tensors as they lie in their storages; of one without a value, as an op has failed on the device,
/// the reason.
pub type StoredTensors = Vec<Result<StoredTensor, String>>;

/// Tensors that a backend has captured, from which another thread can find out later how they lie in their storages.
pub struct Deferred<T> {
    /// Returns that. Any thread may call this, while the session goes on.
    pub stored: Box<dyn FnOnce() -> T + Send>,
    /// Bytes of the host's memory into which the device has copied the tensors.
    pub copied_bytes: u64,
}

/// Captured tensors of a backend.
pub type DeferredTensors = Deferred<StoredTensors>;

/// Captured tensors of a session, with their names and declared types; see [`TensorStore::stored`].
pub type DeferredValues = Deferred<Vec<(TensorIr, Result<StoredTensor, String>)>>;

impl StoredTensor {
    /// Returns whether all elements are within the storage.
    pub fn is_within_storage(&self) -> bool {
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

/// The tensors of one session on one device. Calls may panic, as backends do on ops that they cannot
/// execute; the caller catches that.
pub trait TensorStore: Send {
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
