//! Burn over a tensord pool.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tensord_client::{LeaseRequest, Pool};
//!
//! let pool = Pool::connect_env()?; // the URL in TENSORD_URL
//! let lease = pool.lease(LeaseRequest::devices(2))?;
//! let devices = lease.devices(); // ordinary Burn devices
//! # Ok(()) }
//! ```
//!
//! - [`Pool`], [`Lease`], [`LeaseRequest`]: connect to a pool and lease devices.
//! - [`Durability`], [`LeaseEvent`]: what a lease does after a loss, and what the program learns
//!   of it.
//! - [`ConnectError`], [`LeaseError`], [`StandingError`]: why a call to the pool failed.
//! - [`PoolStatus`]: the workers and devices of a pool.
//! - [`data`]: copies tensors from and to host memory, faster than Burn does.
//! - `weights` (feature `store`): weights of models, from files onto leased devices and back.
//! - [`custom`]: ops that workers have in addition to Burn's.
//! - [`LockstepBatcher`]: makes the ranks of a data-parallel training wait for each other
//!   before each step.
//! - [`Tensord`]: Burn's `Backend`, for code that is generic over backends.
//!
//! Cargo features: `store` adds `weights`, and `ndarray` adds tensors from arrays, and arrays from
//! tensors, to [`data`].
//!
//! # Settings of the process
//!
//! Burn has one configuration for a process. The first lease raises the number of ops that
//! Burn's remote client sends at a time (`remote.flush_threshold`) from 4 to 64, unless the
//! program, its `burn.toml` or Burn's environment variables have set it, or Burn has read its
//! configuration before. Nothing else outside this crate changes: it installs no logger and no
//! panic hook, and a signal handler only for [`Lease::end_on_ctrl_c`].
//!
//! The crate depends on no code of the scheduler or the worker, only on the
//! messages of `tensord-proto`.

mod backend;
mod blocking;
mod bridge;
mod control;
pub mod custom;
pub mod data;
mod error;
mod lease;
mod lockstep;
mod pool;
mod session;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "store")]
pub mod weights;

pub use self::{
    backend::{Tensord, TensordChannel, TensordClient, TensordDevice},
    custom::{CustomOp, CustomOutputs},
    error::{ConnectError, LeaseError, RefusalKind, StandingError},
    lease::{
        DeviceFingerprint, Durability, DurabilityStatus, Lease, LeaseEvent, LeaseRequest,
        LeasedDevice, Traffic,
    },
    lockstep::LockstepBatcher,
    pool::{DeviceStatus, Pool, PoolStatus, WorkerStatus},
};
pub use tensord_transport::{PoolUrl, Secret, dial::DialError, url::UrlError};
