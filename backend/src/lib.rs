//! The interface of a tensord worker to Burn's backends. The code above this crate is the same for a CPU
//! and for any GPU.
//!
//! - [`TensorStore`] holds the tensors of one session on one device, and executes its ops.
//! - [`Device`] is what sessions are opened on: [`flex_device`], or `cube_device` for CubeCL's runtimes.
//! - [`custom`]: custom ops, in addition to Burn's.
//! - `session_backend`: what each backend implements; `flex` and `cube` do. `burn_tensors` is the
//!   [`TensorStore`] of all of them.
//! - `bounds`: indices are clamped for backends that trust them. `lacking_dtypes`: the types that a device
//!   does not have.
//!
//! The crate knows nothing of sessions, peers or leases. It is apart from the worker because Burn's generic
//! code for these backends takes several times as long to compile as the worker itself. So no function that
//! the worker calls is generic over the backend: the worker would compile that code again.

mod bounds;
mod burn_tensors;
#[cfg(feature = "cube")]
mod cube;
pub mod custom;
mod device;
mod flex;
mod lacking_dtypes;
mod session_backend;
mod tensor_store;

use std::any::Any;

#[cfg(feature = "cube")]
pub use self::device::cube_device;
pub use self::{
    custom::{CustomOps, FailedCustomOp, OpResult, PortableOp},
    device::{Device, flex_device},
    tensor_store::{
        Deferred, DeferredTensors, DeferredValues, HostStorage, StorageInfo, StoredTensor,
        StoredTensors, TensorStore,
    },
};

/// Whether GPUs of this build are exact: no kernel of CubeCL is chosen by a measurement.
pub const ARE_GPUS_EXACT: bool = cfg!(all(feature = "cube", not(feature = "tuning")));

/// The names and versions of the crates that compute on Flex, or nothing if they are unknown.
pub const FLEX_CRATES: &str = env!("TENSORD_FLEX_CRATES");

/// The names and versions of the crates that compute on CubeCL's runtimes, or nothing if they are
/// unknown.
pub const CUBE_CRATES: &str = env!("TENSORD_CUBE_CRATES");

/// The compiler of this build: version, target, optimisation level, target features and flags.
pub const COMPILER: &str = env!("TENSORD_COMPILER");

/// Returns the message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}
