//! What waits for devices, and what the devices that would do are doing, for people who ask why.

use std::collections::BTreeMap;

use tensord_proto::ids::{ClientId, LeaseId};

use crate::device::Demand;
use crate::reason::EndReason;
use crate::time::Timestamp;

/// A request that is not granted yet, or a lease that has no devices and is to go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The lease; of a request, the one that it becomes.
    pub lease: LeaseId,
    /// The client; `None` of a lease until a client claims it.
    pub client: Option<ClientId>,
    /// Which of the two it is.
    pub waiter: Waiter,
    /// The devices that it needs, of which it gets all or none. A lease that ran on several workers needs
    /// some for each of its parts, each at a worker of its own.
    pub needs: Vec<NeededDevices>,
}

/// What waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waiter {
    /// A request.
    Request {
        /// What the client requested.
        demand: Demand,
        /// When it arrived.
        since: Timestamp,
    },
    /// A lease.
    Lease {
        /// Why it has no devices; `None` if it was suspended and resumed.
        cause: Option<EndReason>,
        /// When it was resumed, if it was.
        resumed_at: Option<Timestamp>,
        /// When it ends if it has no devices by then.
        ends_at: Option<Timestamp>,
        /// The names of the workers that get its snapshots at the moment. Their devices are held back for
        /// it.
        receivers: Vec<String>,
    },
}

/// A number of devices that something waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeededDevices {
    /// The number.
    pub count: usize,
    /// Whether all must be of one worker.
    pub at_one_worker: bool,
    /// The devices of the pool that would do.
    pub suitable: SuitableDevices,
}

/// What those devices of the pool are doing that would do for something that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuitableDevices {
    /// The number of devices that are free for what waits.
    pub free: usize,
    /// The number of devices that each lease has.
    pub leased: BTreeMap<LeaseId, usize>,
    /// The number of free devices that are held back for each lease which waits for more.
    pub held_back: BTreeMap<LeaseId, usize>,
    /// The number of devices that an ended lease has not left yet.
    pub ending: usize,
    /// The number of devices that their worker cannot offer at the moment.
    pub out_of_service: usize,
    /// The number of free devices whose worker has no connection to the scheduler.
    pub unreachable: usize,
    /// The number of free devices whose worker gets no new leases, as it drains.
    pub draining: usize,
}
