//! What the engine is told.
//!
//! An event names who it is from and on which stream it came. The stream is
//! there because streams end late: when a client or worker reconnects, the
//! driver often notices the end of the old stream after the start of the new
//! one. The engine ignores whatever comes from a stream that was replaced.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, RequestId, WorkerId};

use crate::device::{Demand, DeviceSpec};
use crate::time::Timestamp;

/// One stream between the scheduler and a client or worker. The driver
/// numbers them and uses no number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(pub u64);

/// Something that happened outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed. Deadlines are acted upon on this event alone, so a
    /// client or worker that comes back late but before it has lost nothing.
    Tick,
    /// The scheduler itself did not run, as when its host slept, and so received
    /// nothing. What waits for a worker or a client waits anew, as after a restart. The
    /// driver must send this before any event that it notices afterwards.
    Suspended {
        /// When it last ran before.
        since: Timestamp,
    },
    /// A client has no right to be here any more: what it waits for is dropped, what it
    /// holds ends, and it is not attached from here on.
    Evict {
        /// Who.
        client: ClientId,
    },
    /// A worker said something, or its stream broke.
    Worker {
        /// Who.
        worker: WorkerId,
        /// The stream it came on.
        stream: StreamId,
        /// What.
        event: WorkerEvent,
    },
    /// A client said something, or its stream broke.
    Client {
        /// Who.
        client: ClientId,
        /// The stream it came on.
        stream: StreamId,
        /// What.
        event: ClientEvent,
    },
}

/// What a worker says, or its stream says by ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// The first message of a stream: a worker that is new, or back.
    Join {
        /// What it offers.
        registration: Registration,
        /// What still runs there.
        held: Vec<HeldDevice>,
        /// For each of its devices that was ever granted: every grant up to this one has
        /// ended.
        ended: Vec<DeviceGrant>,
        /// The devices that it cannot offer at the moment.
        out_of_service: Outages,
        /// Whether it is about to stop, as [`Leaving`](Self::Leaving) says.
        leaving: bool,
    },
    /// It is alive.
    Beat,
    /// A lease that it was to end has left its devices, but for some. Said in answer to
    /// every [`EndLease`](crate::Command::EndLease), and again when the list is shorter.
    Released {
        /// The lease.
        lease: LeaseId,
        /// The devices that are not free of it yet.
        busy: BTreeSet<u32>,
    },
    /// These are the devices that it cannot offer from now on.
    OutOfService {
        /// All of them.
        devices: Outages,
    },
    /// It is about to stop: nothing new goes to it, and what it has goes on.
    Leaving,
    /// It has stopped.
    Left,
    /// Its stream ended. A stream that stays open but silent is for the
    /// driver to break.
    Gone,
}

/// What a worker offers. The same worker never changes it, because clients
/// that hold leases were told so: a worker that comes back with another one
/// is a new worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Where clients find it.
    pub endpoint: Endpoint,
    /// Its devices. Their order gives them their index.
    pub devices: Vec<DeviceSpec>,
}

/// Where a worker's data plane is, and the certificate that proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// For people.
    pub name: String,
    /// host:port.
    pub address: String,
    /// SHA-256 of its certificate, DER.
    pub certificate_sha256: [u8; 32],
}

/// The devices that a worker cannot offer, by their position in its list, and why.
pub type Outages = BTreeMap<u32, String>;

/// A device which, as far as its worker knows, a lease has that has used it, or which is not
/// free of a lease that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldDevice {
    /// The lease.
    pub lease: LeaseId,
    /// The device's position in the worker's list.
    pub index: u32,
    /// The grant by which the lease has it. If it has ended, the worker may give a later one
    /// that has ended, too.
    pub grant: GrantNumber,
    /// The lease has ended, and the device is not free of it yet.
    pub ended: bool,
}

/// A grant of one of a worker's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGrant {
    /// The device's position in the worker's list.
    pub index: u32,
    /// The grant's number.
    pub grant: GrantNumber,
}

/// What a client says, or its stream says by ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The first message of a stream: a client that is new, or back.
    Attach {
        /// Every lease it holds, from tokens the driver has verified. A lease
        /// that is not among them is one the client gave up, or never heard
        /// of, while it was away.
        claims: Vec<Claim>,
    },
    /// It asks for a lease.
    Request {
        /// The client's name for the request.
        request: RequestId,
        /// What it asks for.
        demand: Demand,
        /// The id the lease will have if granted: random, used for no other.
        lease: LeaseId,
    },
    /// It gives up a request that waits.
    Cancel {
        /// Which.
        request: RequestId,
    },
    /// It gives up a lease.
    Release {
        /// Which.
        lease: LeaseId,
    },
    /// Its stream ended.
    Gone,
}

/// A lease a client holds, as its token tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The lease.
    pub lease: LeaseId,
    /// All its devices.
    pub shares: Vec<GrantedShare>,
}

/// One device of a lease, and the grant by which the lease has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedShare {
    /// The device.
    pub share: DeviceRef,
    /// The grant's number.
    pub grant: GrantNumber,
}

/// One device of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRef {
    /// The worker that offers it.
    pub worker: WorkerId,
    /// Its position in the worker's list.
    pub index: u32,
}
