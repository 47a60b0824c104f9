//! The seam to Burn's backends: everything above it is the same for a CPU and
//! for any GPU.
//!
//! An [`Engine`] is one session's set of tensors on one device. Calls may
//! panic, as backends do on ops they cannot carry out; the executor catches.

use std::sync::{Arc, Mutex, PoisonError};

use burn_backend::{BoolStore, DType, ExecutionError, TensorData};
use burn_ir::{BackendIr, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::TensorInterpreter;
use burn_std::future::DynFut;
use tensord_proto::codec::DeviceProfile;

/// One session's tensors on one device.
pub(crate) trait Engine: Send {
    /// Carries out an op.
    fn execute(&mut self, op: OperationIr);
    /// Carries out an op that draws random numbers, with a generator seeded by `seed`.
    fn execute_seeded(&mut self, op: OperationIr, seed: u64);
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
}

/// A device that sessions can be opened on.
pub(crate) trait Device: Send + Sync {
    fn open(&self) -> Box<dyn Engine>;
    fn profile(&self) -> DeviceProfile;
    /// Gives memory that no tensor uses back to the system.
    fn clean_up(&self);
}

/// A device of Burn backend `B`.
pub(crate) struct BurnDevice<B: BackendIr> {
    device: B::Device,
}

impl<B: BackendIr> BurnDevice<B> {
    pub(crate) fn shared(device: B::Device) -> Arc<dyn Device> {
        Arc::new(Self { device })
    }
}

impl<B: BackendIr> Device for BurnDevice<B> {
    fn open(&self) -> Box<dyn Engine> {
        Box::new(BurnEngine::<B>(TensorInterpreter::new(self.device.clone())))
    }

    fn profile(&self) -> DeviceProfile {
        let usage = |dtype| (dtype, B::dtype_usage(&self.device, dtype).as_u8());
        DeviceProfile {
            settings: burn_backend::DeviceOps::defaults(&self.device),
            dtypes: DTYPES.map(usage).to_vec(),
        }
    }

    fn clean_up(&self) {
        B::memory_cleanup(&self.device);
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

struct BurnEngine<B: BackendIr>(TensorInterpreter<B>);

impl<B: BackendIr> Engine for BurnEngine<B> {
    fn execute(&mut self, op: OperationIr) {
        self.0.register_op(op);
    }

    fn execute_seeded(&mut self, op: OperationIr, seed: u64) {
        // A backend that panicked while drawing leaves nothing half-done here.
        let _drawing = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.seed(seed);
        self.0.register_op(op);
    }

    fn upload(&mut self, id: TensorId, data: TensorData) {
        self.0.register_tensor_data_id(id, data);
    }

    fn alias(&mut self, id: TensorId, source: TensorId) {
        self.0.register_alias(id, source);
    }

    fn read(&mut self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        self.0.read_tensor_async(tensor)
    }

    fn forget(&mut self, tensor: TensorIr) {
        let last = TensorIr {
            status: TensorStatus::ReadWrite,
            ..tensor
        };
        self.0.register_op(OperationIr::Drop(last));
    }

    fn sync(&mut self) -> Result<(), ExecutionError> {
        self.0.sync()
    }
}
