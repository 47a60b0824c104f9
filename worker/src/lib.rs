//! The worker: offers a host's devices to a pool and runs sessions on them.
//!
//! - [`devices`](parse_devices): the devices of this host.
//! - `session`: an op stream with its tensors; failures of ops are values (faults).
//! - `collective`: all-reduces and transfers between sessions of one lease, on one worker
//!   or several.
//! - `blobs`: uploads kept for later sessions.
//! - `executor`: a thread per device, shared fairly by its sessions. `device_turn`: the turn
//!   of this process, where processes of several leases use the device.
//! - `admission`: which grant of a device is the current one.
//! - `registry`, `connection`: who may open a session, and the session's connections.
//! - `probe`: a test op, by which a device shows that it works.
//! - `op_progress`, `op_record`: which op a device executes, and for how long.
//! - `usage`: how long devices work for leases, and what else leases use of them.
//! - `restart`: whether a device is lost until the process is started again.
//! - `supervisor`: runs each lease in a process of its own, on Linux. `lease_process` is that
//!   process, and `process_message` has the messages between the two.
//! - `worker`, `options`, `store_location`, `start`: a running worker, its configuration, and how it
//!   starts.
//! - `lease_host`: what the registration needs of the part that runs the leases.
//! - `registration`: joins the pool and keeps the worker registered.
//! - `testing`: a session without a network; needs the feature `testing`.
//!
//! Burn's backends are behind `tensord-backend`, which also has the custom ops. The crate does not depend
//! on the scheduler or the client, only on the messages of `tensord-proto`.

mod admission;
mod blobs;
mod cgroup;
mod collective;
mod connection;
mod device_fingerprint;
mod device_slot;
mod device_turn;
mod devices;
mod executor;
mod health;
mod lease_host;
#[cfg(target_os = "linux")]
mod lease_process;
mod lease_tokens;
mod locks;
mod memory;
#[cfg(target_os = "linux")]
mod memory_file;
mod op_check;
mod op_progress;
#[cfg(target_os = "linux")]
mod op_record;
mod options;
mod probe;
#[cfg(target_os = "linux")]
mod process_message;
mod registration;
mod registry;
mod restart;
mod session;
mod start;
mod store_location;
#[cfg(target_os = "linux")]
mod supervisor;
#[cfg(feature = "testing")]
pub mod testing;
mod usage;
mod worker;

pub use tensord_backend::{CustomOps, OpResult, PortableOp, custom};

pub use self::{
    device_fingerprint::{DeviceFingerprint, HASH_BYTES as FINGERPRINT_BYTES},
    devices::{
        AUTO, DeviceParseError, DeviceSelection, FoundDevice, KINDS, MissingDevice, discover,
        parse_devices, resolve_devices,
    },
    options::{Isolation, WorkerOptions},
    registration::RefusedError,
    restart::LostDevice,
    start::StartError,
    store_location::StoreLocation,
    worker::Worker,
};
#[cfg(target_os = "linux")]
pub use self::{
    lease_process::run_lease_process, options::ProcessProgram, supervisor::OpenStoreError,
};
