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
//! - [`Pool`], [`Lease`]: where devices come from.
//! - [`data`]: tensors from and to host memory, the fast way.
//! - [`custom`]: ops that workers have beside Burn's.
//! - [`Tensord`]: Burn's `Backend`, for code that is generic over backends.
//! - `session`: an op stream to one leased device, over connections that may break.
//! - `bridge`: makes Burn `Device`s out of leased devices.
//!
//! It knows no scheduler and no worker, only the messages of `tensord-proto`.

mod backend;
mod bridge;
mod cohort;
pub mod custom;
pub mod data;
mod error;
mod lease;
mod pool;
mod session;

pub use self::{
    backend::{Tensord, TensordChannel, TensordClient, TensordDevice},
    custom::{CustomOp, CustomOutputs},
    error::{ConnectError, LeaseError},
    lease::{Lease, LeaseRequest, LeasedDevice, Traffic},
    pool::{Options, Pool},
};
pub use tensord_transport::{PoolUrl, Secret};
