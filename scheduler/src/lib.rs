//! The scheduler's engine: events in, commands out.
//!
//! [`Engine`] decides which client may use which devices of the pool, and until when. It is
//! a pure state machine: time arrives with every event, new lease ids arrive with the
//! requests that may need them, and decisions leave as [`Command`]s for a driver to carry
//! out. So every rule can be tested as a list of events and the exact commands they lead
//! to, and a recorded list of events always replays to the same state.
//!
//! The driver's loop is: take the next event, or [`Event::Tick`] once
//! [`Engine::next_deadline`] has passed; call [`Engine::handle`]; carry out
//! the commands in order.
//!
//! This crate must not depend on an async runtime, a clock, a source of randomness, I/O,
//! tokens and their signatures, or the wire format of messages.

mod by_key;
mod command;
mod device;
mod engine;
mod event;
mod lease;
mod leases;
mod options;
mod placement;
mod pool;
mod queue;
mod reason;
mod record;
mod snapshot;
mod tenants;
mod time;
mod wait_reason;
mod waiting;

#[cfg(test)]
mod tests;

pub use command::{Command, LeasedDevice, Peer};
pub use device::{
    Demand, DeviceFingerprint, DeviceSpec, Durability, Inventory, Requirement, Share,
};
pub use engine::Engine;
pub use event::{
    AssignedKeeper, Claim, ClientEvent, DeviceGrant, DeviceRef, Endpoint, Event, GrantedDevice,
    HandedOver, HandoverOutcome, HeldDevice, Outages, Registration, StreamId, Suspender,
    WorkerEvent,
};
pub use lease::SuspendedPart;
pub use options::{Options, RequestOrder};
pub use reason::{CannotMove, CannotResume, EndReason, RefuseReason, SnapshotPlaces};
pub use record::{LeaseRecord, RecordChange, RecordedKeeper, RecordedStanding, RecordedStore};
pub use snapshot::{DeviceSnapshot, LeaseSnapshot, Snapshot, SuspensionSnapshot, WorkerSnapshot};
pub use tenants::{Amounts, Policy, TenantCounts, TenantLimit, TenantName, TenantPolicy};
pub use time::Timestamp;
pub use wait_reason::WaitReason;
pub use waiting::{LeftWorker, NeededDevices, SuitableDevices, Waiter, Waiting};
