//! Devices, on which sessions are opened.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, OnceLock},
};

use burn_backend::{BoolStore, DType, DTypeUsage};
#[cfg(feature = "cube")]
use burn_cubecl::{Cube, CubeDevice};
use burn_flex::{Flex, FlexDevice};
use burn_router::CustomOpRegistry;
use tensord_proto::codec::DeviceProfile;

use crate::{
    burn_tensors::BurnTensors,
    custom::{CustomOps, FailedCustomOp},
    lacking_dtypes::LackingDtypes,
    session_backend::SessionBackend,
    tensor_store::TensorStore,
};

/// A device that sessions can be opened on.
pub trait Device: Send + Sync {
    /// Opens an empty store for the tensors of a session.
    fn open(&self) -> Box<dyn TensorStore>;
    /// Returns what programs must know of the device.
    fn profile(&self) -> DeviceProfile;
    /// Returns whether ops may still run on the device when their calls have returned.
    fn is_asynchronous(&self) -> bool {
        false
    }
    /// Returns the bytes of device memory that the backend holds for all its sessions, or
    /// `None` if the backend does not count them. May wait for the device.
    fn reserved_bytes(&self) -> Option<u64>;
}

/// Returns the CPU as a device that computes by Burn's Flex.
pub fn flex_device(custom_ops: &CustomOps) -> Arc<dyn Device> {
    BurnDevice::<Flex>::shared(FlexDevice, custom_ops)
}

/// Returns a device of one of CubeCL's runtimes, which the caller has found to work.
#[cfg(feature = "cube")]
pub fn cube_device(device: CubeDevice, custom_ops: &CustomOps) -> Arc<dyn Device> {
    BurnDevice::<Cube>::shared(device, custom_ops)
}

/// A device of Burn backend `B`.
struct BurnDevice<B: SessionBackend> {
    device: B::Device,
    custom_ops: CustomOpRegistry<B>,
    custom_names: Arc<[String]>,
    /// Made when the first session is opened.
    lacking_dtypes: OnceLock<Arc<LackingDtypes>>,
}

impl<B: SessionBackend> BurnDevice<B> {
    fn shared(device: B::Device, custom_ops: &CustomOps) -> Arc<dyn Device> {
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
            let chooses_bools = B::IS_HOST_READABLE.is_none();
            Arc::new(LackingDtypes::new(name, &DTYPES, chooses_bools, is_there))
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
