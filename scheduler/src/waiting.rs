//! The leases and requests that wait for devices, and how the suitable devices are used meanwhile, for
//! people who ask why.

use std::collections::BTreeMap;

use tensord_proto::ids::{ClientId, LeaseId};

use crate::device::Demand;
use crate::reason::EndReason;
use crate::tenants::TenantName;
use crate::time::Timestamp;

/// A request that is not granted yet, or a lease that has no devices and is to go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The lease; of a request, the one that it becomes.
    pub lease: LeaseId,
    /// The client; `None` of a lease until a client claims it.
    pub client: Option<ClientId>,
    /// The client's tenant, if it is known.
    pub tenant: Option<TenantName>,
    /// Whether its tenant would have more than its limit with these devices, so that it waits although there
    /// may be enough. Earlier requests of the tenant count, too, if there will be devices for them, and for spot leases
    /// all other requests.
    pub is_at_limit: bool,
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
        /// Among the requests of one tenant, those with a higher one come first.
        priority: i32,
        /// Whether it is within its tenant's guarantee, and so before those that are not.
        is_guaranteed: bool,
        /// Whether later requests get devices for which it is next only if their leases can be suspended.
        has_reservation: bool,
        /// The request that has such a reservation of devices which this one could get, if its own lease could
        /// not be suspended.
        reserved_for: Option<LeaseId>,
        /// When enough suitable devices will be free, if that is known, as leases that declare how long they take
        /// will have ended. Others may get these devices first.
        enough_at: Option<Timestamp>,
    },
    /// A lease.
    Lease {
        /// Why it has no devices; `None` if an administrator or its client has suspended and resumed it.
        cause: Option<EndReason>,
        /// When it was resumed, or suspended for a request; `None` if it was interrupted.
        resumed_at: Option<Timestamp>,
        /// Whether its client is attached. It gets no devices before that.
        is_client_attached: bool,
        /// When it ends if it still waits then, or its client is not attached.
        ends_at: Option<Timestamp>,
        /// The names of the workers that have devices for it, which are held back, and get its snapshots at
        /// the moment.
        receivers: Vec<String>,
        /// The workers of the pool that it has left because they could not be reached, or could not reach others, and
        /// to which it does not come back yet.
        left_workers: Vec<LeftWorker>,
    },
}

/// What others learn of a worker that a lease has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftWorker {
    /// The worker's name.
    pub name: String,
    /// Until when the lease does not come back.
    pub until: Timestamp,
}

/// A number of devices that something waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeededDevices {
    /// The number.
    pub count: usize,
    /// The part of the device's time that is needed, in thousandths; `None` for whole devices.
    pub share_permille: Option<u32>,
    /// Whether all must be of one worker.
    pub at_one_worker: bool,
    /// The suitable devices of the pool.
    pub suitable: SuitableDevices,
}

/// How the devices are used that are suitable for a lease or request that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuitableDevices {
    /// The number of devices that are free for what waits.
    pub free: usize,
    /// The largest number of these at one worker.
    pub free_at_one_worker: usize,
    /// The number of devices that leases have, or have shares of.
    pub leased_devices: usize,
    /// The number of devices that each lease has, or has a share of.
    pub leased: BTreeMap<LeaseId, usize>,
    /// The number of free devices that are held back for each lease or request which waits for more.
    pub held_back: BTreeMap<LeaseId, usize>,
    /// The number of devices that an earlier lease, or an earlier process of the same one, has not
    /// released yet.
    pub ending: usize,
    /// The number of devices that their worker cannot offer at the moment.
    pub out_of_service: usize,
    /// The number of free devices whose worker has no connection to the scheduler.
    pub unreachable: usize,
    /// The number of devices, leased or free, whose worker gets no new leases, as it drains.
    pub draining: usize,
}
