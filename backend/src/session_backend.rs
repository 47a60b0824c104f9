//! What a Burn backend has beside Burn's interface, so that sessions can run on it.

use burn_backend::TensorData;
use burn_ir::{BackendIr, HandleKind, OperationIr};
use burn_router::TensorInterpreter;

use crate::{
    custom::{CustomOps, Handlers},
    tensor_store::{DeferredTensors, StorageInfo, StoredTensor},
};

/// A Burn backend that sessions can run on.
pub(crate) trait SessionBackend: BackendIr {
    /// Returns the value of a tensor without a copy, if the host can read the tensor's
    /// memory. The value stays unchanged, whatever happens to the tensor.
    fn borrow_value(handle: Self::Handle) -> Option<TensorData>;

    /// Returns the handlers of the worker's custom ops for this backend.
    fn custom_ops(ops: &CustomOps) -> Handlers<Self>
    where
        Self: Sized;

    /// Executes `op` if Burn's own kernel would give it other bits from run to run, or read beyond a tensor.
    /// Returns `false` if the op must still be executed.
    fn execute_instead(_: &mut TensorInterpreter<Self>, _: &OperationIr) -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Returns the error message if the backend does not have `op`, as its kernel could not give the same
    /// bits each time, or would read beyond a tensor.
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

    /// Whether kernels address memory by the values in a tensor of indices, and by the ranges of slices, without
    /// checking them.
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
