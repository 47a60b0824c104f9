//! The reasons why a request is refused or a lease ends, as types for the driver with error
//! messages for people.
//!
//! A reason reveals nothing about other tenants: the message for a lease of another tenant
//! and for a lease that never existed is the same.

use std::fmt;

use tensord_proto::ids::{StoreId, WorkerId};
use thiserror::Error;

use crate::device::{Demand, Inventory};
use crate::tenants::TenantLimit;

/// The reason why a request ended without a lease.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RefuseReason {
    /// The request was for 0 devices.
    #[error("a lease request must name at least one device")]
    NoDevices,
    /// The pool could not grant the request even if nothing were leased.
    #[error("requested {demand}; {pool}")]
    Unsatisfiable {
        /// The devices requested.
        demand: Demand,
        /// The pool's devices.
        pool: Inventory,
    },
    /// The request is for more than its tenant may have.
    #[error("requested {demand}; {limit}")]
    TenantLimit {
        /// The devices requested.
        demand: Demand,
        /// What the tenant may have.
        limit: TenantLimit,
    },
    /// The request would have to wait, and the pool's queue is full.
    #[error("{max} requests are already waiting, which is the limit of the pool; try again later")]
    PoolLimit {
        /// The largest number of pending requests allowed.
        max: usize,
    },
    /// The request would have to wait, and its tenant has too many pending requests for the room that is left
    /// in the pool's queue.
    #[error(
        "{waiting} requests of the tenant are already waiting, which is the limit while the queue of the pool has little room; cancel a request, or wait until one is granted"
    )]
    TenantQueueLimit {
        /// The number of pending requests of the tenant.
        waiting: usize,
    },
    /// The request would have to wait, and this client has too many pending requests.
    #[error(
        "{max} requests of this client are already waiting, which is the limit; cancel a request, or wait until one is granted"
    )]
    ClientLimit {
        /// The largest number of pending requests allowed.
        max: usize,
    },
    /// The client cancelled the request.
    #[error("the client cancelled the request")]
    Cancelled,
    /// An administrator had the request refused.
    #[error("an administrator of the pool has ended the request")]
    ByAdministrator,
}

/// The reason why a lease ended without its client's doing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EndReason {
    /// A worker of the lease was lost, or joined again with a different registration.
    #[error("worker {name} ({worker}) was lost")]
    WorkerLost {
        /// The worker's id.
        worker: WorkerId,
        /// The worker's name.
        name: String,
    },
    /// The worker of a durable lease was lost or has left, and the lease could not go on where its
    /// snapshots are.
    #[error("{gone}, and no like device became free for the lease, at {places}, or elsewhere")]
    NotReplaced {
        /// What happened to the worker of the lease.
        gone: Box<EndReason>,
        /// Where the snapshots are.
        places: SnapshotPlaces,
    },
    /// The last worker that kept the snapshots of the lease was lost or has left.
    #[error(
        "worker {name} ({worker}), which kept the snapshots of the lease, is gone; a lease with a snapshot store (`tensord worker --snapshots`) outlives that"
    )]
    SnapshotsLost {
        /// The worker's id.
        worker: WorkerId,
        /// The worker's name.
        name: String,
    },
    /// The scheduler restarted, and the last worker that kept the snapshots of the lease did not join in time.
    #[error(
        "worker {worker}, which kept the snapshots of the lease, did not join again after the scheduler had restarted"
    )]
    HolderMissing {
        /// The worker's id.
        worker: WorkerId,
    },
    /// The lease has lost its devices, and also the last worker that kept its snapshots.
    #[error("{cause}, and {gone}")]
    NothingLeft {
        /// Why the lease has lost its devices.
        cause: Box<EndReason>,
        /// What happened to its snapshots.
        gone: Box<EndReason>,
    },
    /// What an earlier scheduler of the pool has recorded as the reason.
    #[error("{text}")]
    BeforeRestart {
        /// The reason in words.
        text: String,
    },
    /// The lease's process on one of its workers has died.
    #[error("{how}")]
    ProcessDied {
        /// How it has ended, with the names of the lease and the worker.
        how: String,
    },
    /// A process of a lease on several workers has died, and the lease could not go on from
    /// snapshots.
    #[error("{how}; the lease could not go on: {why}")]
    NotRestored {
        /// How the process has ended, with the names of the lease and the worker.
        how: String,
        /// Why the lease could not go on.
        why: CannotMove,
    },
    /// A worker of a lease on several workers drains, so the lease goes on elsewhere.
    #[error("worker {name} ({worker}) drains")]
    WorkerDrains {
        /// The worker's id.
        worker: WorkerId,
        /// The worker's name.
        name: String,
    },
    /// Neither the scheduler nor the client of a lease on several workers can reach one of these.
    #[error("worker {name} ({worker}) cannot be reached")]
    WorkerUnreachable {
        /// The worker's id.
        worker: WorkerId,
        /// The worker's name.
        name: String,
    },
    /// The client of a lease on several workers, or one of these, cannot reach a worker of it, although the scheduler
    /// can.
    #[error("{by} cannot reach worker {name} ({worker})")]
    WorkerMissed {
        /// The worker's id.
        worker: WorkerId,
        /// The worker's name.
        name: String,
        /// Who cannot reach it, in words.
        by: String,
        /// The other worker, if it is one.
        other: Option<WorkerId>,
    },
    /// A lease on several workers was interrupted, and there were too few devices for it to go on.
    #[error(
        "{cause}, and too few devices became free for the lease, at the workers that have its snapshots ({workers}) or at others like them"
    )]
    NotResumed {
        /// What has interrupted the lease.
        cause: Box<EndReason>,
        /// The names of the workers that have the snapshots.
        workers: String,
    },
    /// The lease had devices beyond its tenant's guarantee, and a request that was entitled to them needed them, or,
    /// if it was a spot lease, another lease that waited.
    #[error(
        "its devices were beyond the guarantee of its tenant, and are needed by what comes first: a request within the guarantee of another tenant, one that this lease had passed in the queue, or, as this is a spot lease, any other request or lease that waits"
    )]
    Reclaimed,
    /// The lease was idle for a while, and others waited for its devices.
    #[error("it computed nothing for a while, and others waited for its devices")]
    Idle,
    /// A worker of the lease stopped, as it had announced.
    #[error("worker {name} ({worker}) left the pool")]
    WorkerLeft {
        /// The worker's id.
        worker: WorkerId,
        /// The worker's name.
        name: String,
    },
    /// The scheduler restarted, and a worker of the lease did not join in time.
    #[error("worker {worker} did not join again after the scheduler had restarted")]
    WorkerMissing {
        /// The worker's id.
        worker: WorkerId,
    },
    /// The scheduler restarted, and a device of the lease is not available to it.
    #[error("device {index} of worker {worker} is no longer available to this lease")]
    DeviceUnavailable {
        /// The worker.
        worker: WorkerId,
        /// The device's position in the worker's list.
        index: u32,
    },
    /// The lease has had devices for as long as its request allows.
    #[error(
        "it has had its devices for as long as its request declared (`LeaseRequest::max_duration`)"
    )]
    TimeOver,
    /// An administrator has ended the lease.
    #[error("an administrator of the pool has ended the lease")]
    ByAdministrator,
    /// The token that the client presented was revoked.
    #[error("the token that this lease was requested with was revoked")]
    TokenRevoked,
    /// The client holds no such lease: it ended or expired earlier, belongs to another
    /// client, or never existed.
    #[error("this client has no such lease; the lease ended, expired or never existed")]
    Unknown,
}

impl EndReason {
    /// Returns the reason of a lease that has lost its devices because of `cause`, and its snapshots because of `gone`.
    pub(crate) fn nothing_left(cause: Self, gone: Self) -> Self {
        Self::NothingLeft {
            cause: Box::new(cause),
            gone: Box::new(gone),
        }
    }
}

/// Where the snapshots of a lease on one worker are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotPlaces {
    /// In the memory of the worker with this name.
    Keeper(String),
    /// In a snapshot store.
    Store(StoreId),
    /// In both.
    Both(String, StoreId),
}

impl fmt::Display for SnapshotPlaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keeper(name) => write!(f, "worker {name}, which has its snapshots"),
            Self::Store(store) => write!(
                f,
                "a worker with snapshot store {store}, which has its snapshots"
            ),
            Self::Both(name, store) => write!(
                f,
                "worker {name}, which has its snapshots, or at a worker with snapshot store {store}, which has them, too"
            ),
        }
    }
}

/// The reason why a lease cannot move to another worker now, or be suspended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CannotMove {
    /// There is no such lease.
    #[error("there is no such lease")]
    Unknown,
    /// It has no devices from which it could move.
    #[error("it is suspended")]
    Suspended,
    /// Its worker is gone, and it waits for other devices.
    #[error("its worker is gone, and it waits for devices of another one")]
    Lost,
    /// Its client has suspended as many leases as it may.
    #[error("its program has suspended {max} leases, which is the limit; resume one")]
    ClientLimit {
        /// The largest number of leases.
        max: usize,
    },
    /// A process of it has died, and it waits until it can go on where it was.
    #[error("a process of it has died, and it waits to go on")]
    Interrupted,
    /// The scheduler has no connection from its worker, or from one of them.
    #[error("a worker of it is not connected")]
    WorkerAway,
    /// No worker has its snapshots, or a part of them, or those that have them do not stay.
    #[error(
        "its snapshots, or a part of them, are at no worker that stays and has room for them within --snapshot-memory"
    )]
    NoHolder,
    /// The client requested that the lease end with its worker.
    #[error("it ends with its worker, as its program requested")]
    NotDurable,
    /// The lease has devices of several workers.
    #[error("it has devices of several workers")]
    SeveralWorkers,
    /// No other devices could take the place of its devices: these differ from each other, or the lease
    /// must give the same bits and a device does not, or the fingerprint of one is not known.
    #[error(
        "its devices are of different kinds, or the lease must give the same bits and they do not, or a worker has not reported a fingerprint"
    )]
    NotReplaceable,
    /// There is no other worker.
    #[error("there is no other worker, apart from those that drain or still end the lease")]
    NoKeeper,
    /// The lease's client is not attached, and nobody else could open its sessions.
    #[error("its program is not connected")]
    ClientAway,
    /// The client could not go on from snapshots.
    #[error(
        "its program has no snapshot to go on from yet, or has sent more than 128 MiB since the last one"
    )]
    NotRestorable,
    /// The keeper lacks a snapshot, so the sessions could not go on there.
    #[error("worker {keeper} does not have its snapshots yet")]
    NoSnapshots {
        /// The name of the keeper.
        keeper: String,
    },
    /// Too few devices are free where its snapshots are.
    #[error("too few devices are free at {places}")]
    NoFreeDevice {
        /// Where the snapshots are.
        places: SnapshotPlaces,
    },
}

/// The reason why a lease cannot be resumed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CannotResume {
    /// There is no such lease.
    #[error("there is no such lease")]
    Unknown,
    /// It has devices, or its worker was lost and it waits for others.
    #[error("it is not suspended")]
    NotSuspended,
    /// Its client wants to resume it, and did not suspend it.
    #[error("an administrator has suspended it")]
    ByAdministrator,
    /// It is to be resumed only if it was suspended because it was idle, and its client has suspended it.
    #[error("its client has suspended it")]
    ByClient,
    /// It was resumed before.
    #[error("it is resumed already, and waits for devices")]
    Resumed,
}
