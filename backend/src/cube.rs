//! Burn's CubeCL backend: one type for CUDA, ROCm, Metal, Vulkan, WebGPU and the CPU; the
//! device selects the runtime. Ops are fused with each other, except in a build whose devices are
//! exact.

mod exact;
mod interpolation;
mod layout;

use std::{fmt, sync::Arc};

use burn_backend::{ExecutionError, TensorData};
use burn_cubecl::{Cube, CubeBackend, CubeDevice};
use burn_fusion::{FusionRuntime, get_client, stream::Operation};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, HandleKind, OperationIr, TensorIr};
use burn_router::TensorInterpreter;
use burn_std::stream::StreamId;

use crate::{
    ARE_GPUS_EXACT,
    custom::{CustomOps, Handler, Handlers, OpResult},
    session_backend::SessionBackend,
    tensor_store::{DeferredTensors, StorageInfo, StoredTensor},
};

type Runtime = burn_cubecl::fusion::FusionCubeRuntime;

impl SessionBackend for Cube {
    const IS_HOST_READABLE: Option<fn(Self::Handle) -> bool> = None;

    // A lazy backend does not know the actual dtype before it runs the op.
    const DTYPES_MAY_DIFFER: bool = false;

    // Buffers of fused ops are assigned when their kernel is launched.
    const STORAGE: Option<fn(Self::Handle) -> Option<StorageInfo>> = None;

    // The kernels of index ops are launched unchecked. The setting `compilation.check_mode`,
    // which should enforce checks, has no effect in CubeCL 0.11.3.
    const TRUSTS_INDICES: bool = true;

    fn execute_instead(interpreter: &mut TensorInterpreter<Self>, op: &OperationIr) -> bool {
        interpolation::execute(interpreter, op) || ARE_GPUS_EXACT && exact::execute(interpreter, op)
    }

    fn unsupported(op: &OperationIr) -> Option<String> {
        let exact = ARE_GPUS_EXACT.then(|| exact::unsupported(op)).flatten();
        exact.or_else(|| interpolation::unsupported(op))
    }

    fn finish_op(device: &CubeDevice) {
        if ARE_GPUS_EXACT {
            execute_queue(device);
        }
    }

    fn borrow_value(_handle: <Self as BackendIr>::Handle) -> Option<TensorData> {
        None
    }

    fn custom_ops(ops: &CustomOps) -> Handlers<Self> {
        let deferred = |(name, run): (&String, &Handler<CubeBackend>)| {
            let run = run.clone();
            let deferred: Handler<Self> =
                Arc::new(move |tensors, call, device| queue_custom_op(&run, tensors, call, device));
            (name.clone(), deferred)
        };
        ops.cube.iter().map(deferred).collect()
    }

    fn stored(
        tensors: Vec<HandleKind<Self>>,
        max_copied_bytes: u64,
    ) -> Result<DeferredTensors, String> {
        let stored = layout::stored(tensors, max_copied_bytes)?;
        Ok(DeferredTensors {
            copied_bytes: layout::copied_bytes(&stored),
            stored: Box::new(move || stored),
        })
    }

    fn restored(
        device: &CubeDevice,
        tensors: Vec<StoredTensor>,
    ) -> Result<Vec<HandleKind<Self>>, String> {
        layout::restored(device, tensors)
    }
}

/// Executes the ops that wait to be fused with later ones.
fn execute_queue(device: &CubeDevice) {
    get_client::<CubeBackend>(device).sync(|| ());
}

/// Queues a custom op, which is not fused, in order with the ops that are.
fn queue_custom_op(
    run: &Handler<CubeBackend>,
    tensors: &mut HandleContainer<<Cube as BackendIr>::Handle>,
    call: &CustomOpIr,
    device: &CubeDevice,
) -> OpResult {
    let client = get_client::<CubeBackend>(device);
    let inputs = call.inputs.iter();
    let inputs = inputs.map(|input| tensors.get_float_tensor::<Cube>(input).into_ir());
    let outputs = call.outputs.iter().map(|out| {
        let id = client.create_empty_handle();
        TensorIr::uninit(id, out.shape.clone(), out.dtype)
    });
    let queued = CustomOpIr {
        id: call.id.clone(),
        inputs: inputs.collect(),
        outputs: outputs.collect(),
        scalars: call.scalars.clone(),
    };
    let deferred = QueuedCustomOp {
        run: run.clone(),
        call: queued.clone(),
        device: device.clone(),
    };
    let handles = client.register(StreamId::current(), OperationIr::Custom(queued), deferred);
    for (out, handles) in call.outputs.iter().zip(handles) {
        // Float, int and bool tensors have the same type of handle.
        tensors.register_float_tensor::<Cube>(&out.id, handles);
    }
    Ok(())
}

/// A custom op that runs when the device's queue reaches it.
struct QueuedCustomOp {
    run: Handler<CubeBackend>,
    call: CustomOpIr,
    device: CubeDevice,
}

impl Operation<Runtime> for QueuedCustomOp {
    fn execute(
        &self,
        tensors: &mut HandleContainer<<Runtime as FusionRuntime>::FusionHandle>,
    ) -> Result<(), ExecutionError> {
        (self.run)(tensors, &self.call, &self.device)
            .map_err(|error| ExecutionError::with_context(error.to_string()))
    }
}

impl fmt::Debug for QueuedCustomOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Deferred").field(&self.call.id).finish()
    }
}
