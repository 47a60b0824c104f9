//! Why a request was refused and why a lease ended, in types for the driver
//! and in words for people.
//!
//! A reason says nothing about other tenants: whether a lease is another's or
//! never was reads the same.

use tensord_proto::ids::WorkerId;
use thiserror::Error;

use crate::device::{Demand, Inventory};

/// Why a request ended without a lease.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RefuseReason {
    /// It asked for nothing.
    #[error("asked for 0 devices; a lease has at least one")]
    NoDevices,
    /// The pool could not grant it even if nothing were leased.
    #[error("asked for {demand}; {pool}")]
    Unsatisfiable {
        /// What was asked.
        demand: Demand,
        /// What there is.
        pool: Inventory,
    },
    /// It would have to wait, and too many of all clients do.
    #[error("{max} requests wait already, which is the most the pool allows; try again later")]
    PoolLimit {
        /// The bound.
        max: usize,
    },
    /// It would have to wait, and too many of this client do.
    #[error(
        "{max} requests of this client wait already, which is the most it may have; cancel one or wait for one"
    )]
    ClientLimit {
        /// The bound.
        max: usize,
    },
    /// Its client gave it up.
    #[error("cancelled by the client")]
    Cancelled,
}

/// Why a lease ended without its client's doing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EndReason {
    /// One of its workers went silent, or came back as another.
    #[error("worker {name} ({worker}) was lost")]
    WorkerLost {
        /// Its id.
        worker: WorkerId,
        /// Its name.
        name: String,
    },
    /// One of its workers stopped, as it had announced.
    #[error("worker {name} ({worker}) left the pool")]
    WorkerLeft {
        /// Its id.
        worker: WorkerId,
        /// Its name.
        name: String,
    },
    /// The scheduler restarted, and one of the workers was not back in time.
    #[error("worker {worker} did not join again after the scheduler had restarted")]
    WorkerMissing {
        /// Its id.
        worker: WorkerId,
    },
    /// The scheduler restarted, and a device of the lease is not to be had.
    #[error("device {index} of worker {worker} is no longer available to this lease")]
    DeviceUnavailable {
        /// The worker.
        worker: WorkerId,
        /// The device's position in its list.
        index: u32,
    },
    /// The token that its client showed was revoked.
    #[error("the token that this lease was asked for with was revoked")]
    TokenRevoked,
    /// It ended earlier, expired, is another client's, or never was.
    #[error("this client holds no such lease; it ended, expired or never was")]
    Unknown,
}
