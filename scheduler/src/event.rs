//! The engine's input: events from workers, clients and the driver.
//!
//! An event names its sender and the stream on which it arrived. The stream is named
//! because streams end late: when a client or worker reconnects, the driver often notices
//! the end of the old stream after the start of the new one. The engine ignores every event
//! from a stream that was replaced, except a new join or attach.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, PartId, RequestId, StoreId, WorkerId};
use tensord_proto::share::{DeviceShare, lane};

use crate::device::{Demand, DeviceSpec, Durability};
use crate::tenants::{Policy, TenantName};
use crate::time::Timestamp;

/// The number of a stream between the scheduler and a client or worker. The driver uses no
/// number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(pub u64);

/// An input to [`Engine::handle`](crate::Engine::handle).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A timer fired. Deadlines take effect on this event alone, so a client or worker that
    /// comes back late, but before the tick, has lost nothing.
    Tick,
    /// The scheduler did not run for a while, for example because its host slept, and so
    /// received nothing. Workers and clients get a new deadline to come back, as after a
    /// restart. The driver must send this event before any event that it notices
    /// afterwards.
    Gap {
        /// The last time at which the scheduler ran before the gap.
        since: Timestamp,
    },
    /// A client lost its right to use the pool: its pending requests are dropped, its
    /// leases end, and it is no longer attached.
    Evict {
        /// The client.
        client: ClientId,
    },
    /// The tenants of the pool have other guarantees, limits and weights from now on.
    SetPolicy {
        /// Those of all tenants.
        policy: Policy,
    },
    /// An administrator drains a worker, or no longer: while it is drained, it gets no new leases,
    /// and durable leases move away from it. A worker that starts again is not drained.
    Drain {
        /// The worker.
        worker: WorkerId,
        /// Whether it is to be drained.
        is_drained: bool,
    },
    /// An administrator moves a lease to its keeper. It moves at once, or not at all:
    /// [`Engine::check_move`](crate::Engine::check_move) returns the reason.
    MoveLease {
        /// The lease.
        lease: LeaseId,
    },
    /// An administrator ends a lease, or has a request refused that waits.
    EndLease {
        /// The lease, or the one that the request would become.
        lease: LeaseId,
    },
    /// An administrator changes the priority of a request that waits.
    SetPriority {
        /// The lease that the request would become.
        lease: LeaseId,
        /// The new priority.
        priority: i32,
    },
    /// A lease is suspended: it gives its devices back, and keeps its state. That happens
    /// at once, or not at all: [`Engine::check_suspend`](crate::Engine::check_suspend) returns the
    /// reason.
    SuspendLease {
        /// The lease.
        lease: LeaseId,
        /// Who suspends it.
        by: Suspender,
    },
    /// A suspended lease is resumed: it goes on once there are devices for it. That happens at once,
    /// or not at all: [`Engine::check_resume`](crate::Engine::check_resume) returns the reason.
    ResumeLease {
        /// The lease.
        lease: LeaseId,
        /// Who resumes it.
        by: Suspender,
    },
    /// A worker sent a message, or its stream ended.
    Worker {
        /// The worker.
        worker: WorkerId,
        /// The stream on which the event arrived.
        stream: StreamId,
        /// The message, or the end of the stream.
        event: WorkerEvent,
    },
    /// A client sent a message, or its stream ended.
    Client {
        /// The client.
        client: ClientId,
        /// The stream on which the event arrived.
        stream: StreamId,
        /// The message, or the end of the stream.
        event: ClientEvent,
    },
}

/// Who suspends a lease, or resumes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspender {
    /// An administrator, who may resume every suspended lease.
    Administrator,
    /// The lease's client, which may resume what it has suspended.
    Client,
    /// The scheduler, as the lease is idle and others wait for its devices. A client resumes it as this one
    /// when the program uses it: only if nobody else has suspended it since.
    Idleness,
}

impl Suspender {
    /// Returns whether a lease that `before` has suspended counts as suspended by this one if this one
    /// suspends it, too.
    pub(crate) fn takes_over_from(self, before: Self) -> bool {
        match self {
            Self::Administrator => before != Self::Administrator,
            Self::Client => before == Self::Idleness,
            Self::Idleness => false,
        }
    }
}

/// The keeper of a part of a lease, as a worker knows it from a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssignedKeeper {
    /// The part of the lease.
    pub part: PartId,
    /// The worker that keeps its snapshots.
    pub worker: WorkerId,
    /// The number of the assignment. What is reported about an earlier assignment does not count, also if
    /// the worker is the same: it may have dropped what it had.
    pub assignment: u64,
}

/// What has become of a handover of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedOver {
    /// The worker that was to get the snapshots.
    pub to: AssignedKeeper,
    /// What has become of it.
    pub outcome: HandoverOutcome,
}

/// What has become of a handover of snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoverOutcome {
    /// The keeper has the snapshots.
    Done,
    /// The keeper will not get them from this worker.
    Failed,
    /// This worker does not have them.
    Missing,
}

/// A message from a worker, or the end of its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// The first message of a stream, from a worker that is new or back.
    Join {
        /// The worker's endpoint and devices.
        registration: Registration,
        /// The devices that live leases use, or that are not free of ended leases yet.
        held: Vec<HeldDevice>,
        /// For each device that was ever granted, the latest grant that has ended; all
        /// earlier grants of the device have ended, too.
        ended: Vec<DeviceGrant>,
        /// The suspended leases whose snapshots the worker holds.
        suspended: Vec<LeaseId>,
        /// The devices that the worker cannot offer at the moment.
        out_of_service: Outages,
        /// Whether the worker is about to stop, as [`Leaving`](Self::Leaving) announces.
        leaving: bool,
    },
    /// A heartbeat.
    Heartbeat,
    /// Where the snapshots are of the worker's leases.
    SnapshotsKept {
        /// The keepers that have the snapshots. All others of the worker have not.
        at_keepers: Vec<AssignedKeeper>,
        /// The keepers that have refused a snapshot, and stored none since.
        refused: Vec<AssignedKeeper>,
        /// The parts of suspended leases that the worker has handed over, or could not.
        handed_over: Vec<HandedOver>,
        /// The leases whose snapshots the worker itself has, and whether it also has room to hold
        /// them for a suspended lease.
        here: BTreeMap<LeaseId, bool>,
        /// The leases whose snapshots the worker's snapshot store has.
        in_store: BTreeSet<LeaseId>,
    },
    /// The worker's snapshot store has snapshots of leases that the worker does not run.
    StoredLeases {
        /// The leases.
        leases: Vec<LeaseId>,
    },
    /// The leases that are idle on the worker. All others of the worker have something to do, or had a moment
    /// ago.
    Idle {
        /// The leases, and how long each has been idle.
        leases: BTreeMap<LeaseId, Duration>,
    },
    /// The worker has dialled other workers of its leases in vain for a while. Sent again with each heartbeat.
    PeersMissing {
        /// The leases, each with such a worker.
        missing: Vec<(LeaseId, WorkerId)>,
    },
    /// A process has died in which the worker ran its part of these leases, which have devices of
    /// other workers, too. The worker has snapshots of their sessions here, and keeps these until the
    /// lease ends. Sent again until then.
    Interrupted {
        /// The leases, each with how the process has ended.
        leases: Vec<(LeaseId, String)>,
    },
    /// The worker has ended a lease and released its devices, except for the busy ones.
    /// Sent in reply to every [`EndLease`](crate::Command::EndLease), and again when the
    /// list of busy devices becomes shorter.
    Released {
        /// The lease.
        lease: LeaseId,
        /// The devices that the lease has not left yet.
        busy: BTreeSet<u32>,
    },
    /// The set of devices that the worker cannot offer has changed.
    OutOfService {
        /// All devices that are out of service now.
        devices: Outages,
    },
    /// The worker is about to stop: it gets no new leases, and its current ones go on.
    Leaving,
    /// The worker announced that it has stopped.
    Left,
    /// The worker's stream ended without an announcement. The driver also ends streams that
    /// are silent, as the engine does not measure silence of streams.
    Disconnected,
}

impl WorkerEvent {
    /// Returns the first message of a worker that has had no lease yet.
    pub fn join_new(registration: Registration) -> Self {
        Self::Join {
            registration,
            held: Vec::new(),
            ended: Vec::new(),
            suspended: Vec::new(),
            out_of_service: Outages::new(),
            leaving: false,
        }
    }
}

/// What a worker offers. It stays the same for the life of a worker, because clients that
/// hold leases received it. A worker that joins with a different registration is treated as
/// a new worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The address and certificate for clients to connect to.
    pub endpoint: Endpoint,
    /// The worker's devices; a device's index is its position in this list.
    pub devices: Vec<DeviceSpec>,
    /// The snapshot store that the worker has open.
    pub store: Option<StoreId>,
}

/// The address of a worker's data plane, and the certificate whose key the worker proves
/// to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The worker's display name.
    pub name: String,
    /// The address as `host:port`.
    pub address: String,
    /// The SHA-256 of the worker's DER certificate.
    pub certificate_sha256: [u8; 32],
}

/// The devices that a worker cannot offer: index in the worker's list, and reason.
pub type Outages = BTreeMap<u32, String>;

/// A device that, according to its worker, a live lease has used or an ended lease has not
/// left yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldDevice {
    /// The lease.
    pub lease: LeaseId,
    /// The device's position in the worker's list.
    pub index: u32,
    /// The grant by which the lease has the device. If that grant has ended, the worker may
    /// report a later one that has ended, too.
    pub grant: GrantNumber,
    /// Whether the lease has ended and the device is not free of it yet.
    pub ended: bool,
    /// The part of the device that the lease has; `None` for all of it.
    pub share: Option<DeviceShare>,
}

/// A grant of one of a worker's devices, or of a share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGrant {
    /// The device's position in the worker's list.
    pub index: u32,
    /// The lane of the share; 0 for the whole device.
    pub lane: u32,
    /// The grant's number.
    pub grant: GrantNumber,
}

/// A message from a client, or the end of its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The first message of a stream, from a client that is new or back.
    Attach {
        /// The tenant of the client.
        tenant: TenantName,
        /// All leases that the client holds, from tokens that the driver has verified. If
        /// the engine has a lease of this client that is not in the list, the client gave
        /// it up while it was away, or never received its grant.
        claims: Vec<Claim>,
    },
    /// The client requests a lease.
    Request {
        /// The request's id, chosen by the client.
        request: RequestId,
        /// The devices requested.
        demand: Demand,
        /// Among the requests of one tenant, those with a higher one come first.
        priority: i32,
        /// The id of the lease if it is granted: random and unique.
        lease: LeaseId,
    },
    /// The client cancels a pending request.
    Cancel {
        /// The request.
        request: RequestId,
    },
    /// The client cannot reach a worker of a lease. Sent again several times a second.
    Unreachable {
        /// The lease.
        lease: LeaseId,
        /// The worker; `None` for the only one of the lease.
        worker: Option<WorkerId>,
    },
    /// Whether the client could go on from snapshots with a lease. It could not at first, on each
    /// stream.
    Restorable {
        /// The lease.
        lease: LeaseId,
        /// Whether it could.
        is_restorable: bool,
    },
    /// The client releases a lease.
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// The client's stream ended.
    Disconnected,
}

/// A lease that a client holds, according to its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The lease.
    pub lease: LeaseId,
    /// All devices of the lease.
    pub lease_devices: Vec<GrantedDevice>,
    /// Whether the lease goes on from snapshots if a process of it dies, or at another worker if its
    /// worker is lost.
    pub durability: Durability,
    /// How often the lease had moved to another worker when the token was signed.
    pub epoch: u64,
    /// For how long it may still have devices, by the token; `None` for any time.
    pub time_left: Option<Duration>,
    /// Whether it is a spot lease.
    pub is_spot: bool,
    /// Whether it may end if its devices are reclaimed and it cannot be suspended.
    pub may_end: bool,
}

/// One device of a lease, and the grant by which the lease has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedDevice {
    /// The device.
    pub device_ref: DeviceRef,
    /// The grant's number.
    pub grant: GrantNumber,
    /// The part of the device that the lease has; `None` for all of it.
    pub share: Option<DeviceShare>,
}

impl DeviceRef {
    /// The first of all.
    pub(crate) const FIRST: Self = Self {
        worker: WorkerId(0),
        index: 0,
    };
}

impl HeldDevice {
    /// Returns what the lease has of the device of a worker.
    pub(crate) fn granted_at(&self, worker: WorkerId) -> GrantedDevice {
        let index = self.index;
        GrantedDevice {
            device_ref: DeviceRef { worker, index },
            grant: self.grant,
            share: self.share,
        }
    }
}

impl GrantedDevice {
    /// Returns the grant, as the device's worker knows it.
    pub(crate) fn device_grant(&self) -> DeviceGrant {
        DeviceGrant {
            index: self.device_ref.index,
            lane: lane(self.share),
            grant: self.grant,
        }
    }
}

/// One device of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceRef {
    /// The worker that offers the device.
    pub worker: WorkerId,
    /// The device's position in the worker's list.
    pub index: u32,
}
