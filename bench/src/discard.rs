//! A Burn backend that discards every op. It measures the cost of Burn's router alone.
//!
//! It also counts a program's ops. One of its devices first hands the ops to another
//! thread, as a client must that encodes and sends ops while the program goes on.

use std::{
    sync::{
        Condvar, Mutex, Once, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use burn_backend::{
    BoolStore, DType, DTypeUsage, DTypeUsageSet, DeviceId, DeviceOps, DeviceSettings,
    ExecutionError, Shape, TensorData,
};
use burn_ir::{GraphBindings, GraphId, OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterChannel, RouterClient, RouterTensor};
use burn_std::future::DynFut;

/// The backend.
pub(crate) type Discard = BackendRouter<DiscardChannel>;

static OPS: AtomicU64 = AtomicU64::new(0);
static NEXT_TENSOR: AtomicU64 = AtomicU64::new(0);

/// Ops queued for the other thread.
static QUEUED_OPS: Mutex<Vec<OperationIr>> = Mutex::new(Vec::new());
static BATCH_READY: Condvar = Condvar::new();

/// Number of queued ops at which the other thread is woken.
const BATCH_OPS: usize = 512;

/// Returns the number of ops discarded so far by the whole process.
pub(crate) fn ops() -> u64 {
    OPS.load(Ordering::Relaxed)
}

/// A device of the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum DiscardDevice {
    /// Discards ops at once.
    #[default]
    SameThread,
    /// Discards ops on another thread.
    OtherThread,
}

impl burn_std::device::Device for DiscardDevice {
    fn from_id(id: DeviceId) -> Self {
        match id.index_id {
            0 => Self::SameThread,
            _ => Self::OtherThread,
        }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(0x7e51, u16::from(*self == Self::OtherThread))
    }
}

/// Discards queued ops as long as the process lives. Fewer than [`BATCH_OPS`] wait for more.
fn discard_queued() {
    let mut taken = Vec::new();
    loop {
        let queued = QUEUED_OPS.lock().unwrap_or_else(PoisonError::into_inner);
        let few = |queued: &mut Vec<OperationIr>| queued.len() < BATCH_OPS;
        let waited = BATCH_READY.wait_while(queued, few);
        let mut queued = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *queued, &mut taken);
        drop(queued);
        taken.clear();
    }
}

impl DeviceOps for DiscardDevice {
    fn defaults(&self) -> DeviceSettings {
        DeviceSettings::with_dtypes(DType::F32, DType::I32, DType::Bool(BoolStore::Native))
    }
}

/// A client that counts ops and discards them.
#[derive(Debug, Clone)]
pub(crate) struct DiscardClient(DiscardDevice);

impl RouterClient for DiscardClient {
    type Device = DiscardDevice;

    fn register_op(&self, op: OperationIr) {
        OPS.fetch_add(1, Ordering::Relaxed);
        if self.0 == DiscardDevice::OtherThread {
            let mut queued = QUEUED_OPS.lock().unwrap_or_else(PoisonError::into_inner);
            queued.push(op);
            if queued.len() == BATCH_OPS {
                BATCH_READY.notify_one();
            }
        }
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let bytes = vec![0; tensor.shape.num_elements() * tensor.dtype.size()];
        let zeros = TensorData::from_bytes_vec(bytes, tensor.shape, tensor.dtype);
        Box::pin(async move { Ok(zeros) })
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn flush(&self) {}

    fn create_empty_handle(&self) -> TensorId {
        TensorId::new(NEXT_TENSOR.fetch_add(1, Ordering::Relaxed))
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        RouterTensor::new(self.create_empty_handle(), shape, dtype, self.clone())
    }

    fn device(&self) -> DiscardDevice {
        self.0
    }

    fn seed(&self, _seed: u64) {}

    fn dtype_usage(&self, _dtype: DType) -> DTypeUsageSet {
        DTypeUsage::general()
    }

    fn register_and_execute_graph(
        &self,
        _graph_id: GraphId,
        _relative_graph: Vec<OperationIr>,
        _bindings: GraphBindings,
    ) {
    }

    fn execute_graph(&self, _graph_id: GraphId, _bindings: GraphBindings) {}

    fn register_alias(&self, _new_id: TensorId, _src_id: TensorId) {}
}

/// The channel type that makes Burn's router a [`Discard`].
#[derive(Debug, Clone)]
pub(crate) struct DiscardChannel;

impl RouterChannel for DiscardChannel {
    type Device = DiscardDevice;
    type Bridge = NoBridge;
    type Client = DiscardClient;

    fn name(_device: &DiscardDevice) -> String {
        "discard".into()
    }

    fn init_client(device: &DiscardDevice) -> DiscardClient {
        static SPAWN_ONCE: Once = Once::new();
        if *device == DiscardDevice::OtherThread {
            SPAWN_ONCE.call_once(|| drop(thread::spawn(discard_queued)));
        }
        DiscardClient(*device)
    }

    fn get_tensor_handle(_tensor: &TensorIr, _client: &DiscardClient) {}

    fn register_tensor(
        client: &DiscardClient,
        _handle: (),
        shape: Shape,
        dtype: DType,
    ) -> RouterTensor<DiscardClient> {
        RouterTensor::new(client.create_empty_handle(), shape, dtype, client.clone())
    }
}

/// A bridge for tensors between devices, which is never used.
#[derive(Debug)]
pub(crate) struct NoBridge;

impl MultiBackendBridge for NoBridge {
    type TensorHandle = ();
    type Device = DiscardDevice;

    fn change_backend_float(_tensor: (), _shape: Shape, _target: &DiscardDevice) {}
    fn change_backend_int(_tensor: (), _shape: Shape, _target: &DiscardDevice) {}
    fn change_backend_bool(_tensor: (), _shape: Shape, _target: &DiscardDevice) {}
}

#[cfg(test)]
mod tests {
    use burn_backend::ops::FloatTensorOps;

    use super::*;

    #[test]
    fn ops_are_counted() {
        for device in [DiscardDevice::SameThread, DiscardDevice::OtherThread] {
            let data = TensorData::from([1f32, 2.0]);
            let tensor = <Discard as FloatTensorOps<Discard>>::float_from_data(data, &device);
            let before = ops();
            let tensor = Discard::float_add_scalar(tensor, 1.0.into());
            let data = burn_std::future::block_on(Discard::float_into_data(tensor)).unwrap();
            assert!(ops() > before);
            assert_eq!(data, TensorData::from([0f32, 0.0]));
        }
    }
}
