//! The engine's output: commands for the driver to carry out.
//!
//! The engine issues a command for a client only while the client is attached, and a
//! command for a worker only while its stream is up. A driver that can no longer deliver a
//! command may drop it: the difference is settled when the peer comes back and reports what
//! it holds.

use std::collections::BTreeSet;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, PartId, RequestId, WorkerId};
use tensord_proto::share::DeviceShare;

use crate::device::DeviceSpec;
use crate::event::{AssignedKeeper, DeviceGrant, DeviceRef, Endpoint};
use crate::reason::{EndReason, RefuseReason};
use crate::wait_reason::WaitReason;

/// An action for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Report a pending request's position in the queue to its client, and why it waits. Issued when the
    /// request is queued and whenever one of the two changes.
    Queued {
        /// The recipient.
        client: ClientId,
        /// The request.
        request: RequestId,
        /// The position in the queue; 1 is the next in line.
        position: u32,
        /// Why it waits.
        reason: WaitReason,
    },
    /// Grant a lease: sign a token and send it to the client. Ends the request.
    Granted {
        /// The recipient.
        client: ClientId,
        /// The request.
        request: RequestId,
        /// The id that came with the request.
        lease: LeaseId,
        /// The lease's devices; those of one worker are next to each other.
        devices: Vec<LeasedDevice>,
    },
    /// Report to its client that a lease goes on at another worker: have that worker start the
    /// lease, sign a new token and send it to the client. Issued again when the client attaches
    /// with an earlier token.
    Moved {
        /// The recipient.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// How often the lease has moved.
        epoch: u64,
        /// The lease's devices.
        devices: Vec<LeasedDevice>,
        /// The workers of the lease that must load the snapshots of its sessions from their snapshot
        /// store, as they do not have all in memory.
        load_stored: BTreeSet<WorkerId>,
    },
    /// Report to its client that the worker of a lease was lost, and the lease waits to go on.
    /// [`Moved`](Self::Moved) or [`LeaseEnded`](Self::LeaseEnded) follows, or the worker is back.
    /// Issued again when the client attaches meanwhile.
    Interrupted {
        /// The recipient.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// Why the lease ends unless it goes on in time.
        reason: EndReason,
    },
    /// Report to its client that a lease is suspended and has no devices. [`Moved`](Self::Moved) or
    /// [`LeaseEnded`](Self::LeaseEnded) follows, however long it takes. Issued again when the lease
    /// is resumed and has to wait for devices, and when the client attaches meanwhile.
    Suspended {
        /// The recipient.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// If the lease is resumed: the names of the workers that have its snapshots, for whose
        /// devices it waits. Otherwise empty.
        waits_for: Vec<String>,
        /// Whether it waits for devices of each of these.
        needs_all: bool,
        /// Why it was suspended, if neither an administrator nor its client did it.
        cause: Option<EndReason>,
    },
    /// Have a worker send the snapshots of a lease's sessions to another worker, and have that
    /// one keep them. Issued again when one of the two has joined again.
    KeepSnapshots {
        /// The part of the lease.
        part: PartId,
        /// The worker that runs it.
        source: Peer,
        /// The worker that keeps the snapshots.
        keeper: Peer,
        /// The number of this assignment of a keeper, which the worker reports.
        assignment: u64,
    },
    /// Have a worker keep what it has of the snapshots of a suspended lease until
    /// [`DropSnapshots`](Self::DropSnapshots), or until the lease goes on there. Issued again when
    /// the worker has joined again.
    HoldSnapshots {
        /// The recipient.
        holder: WorkerId,
        /// The lease.
        lease: LeaseId,
        /// The part of the lease whose snapshots to hold; `None` for all.
        part: Option<u32>,
    },
    /// Have a worker drop the snapshots that it keeps of a lease.
    DropSnapshots {
        /// The recipient.
        keeper: WorkerId,
        /// The lease.
        lease: LeaseId,
        /// The part of the lease whose snapshots to drop; `None` for all.
        part: Option<u32>,
    },
    /// Have a worker delete what its snapshot store has of leases that have ended.
    DropStored {
        /// The recipient.
        worker: WorkerId,
        /// The leases.
        leases: Vec<LeaseId>,
    },
    /// Refuse a request. Ends the request.
    Refused {
        /// The recipient.
        client: ClientId,
        /// The request.
        request: RequestId,
        /// The reason.
        reason: RefuseReason,
    },
    /// Report the end of a lease to its client.
    LeaseEnded {
        /// The recipient.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// The reason.
        reason: EndReason,
    },
    /// Have a worker end every session of a lease. Issued again when the worker joins while
    /// some of the lease's devices are not known to be released.
    EndLease {
        /// The recipient.
        worker: WorkerId,
        /// The lease.
        lease: LeaseId,
        /// The grants by which the lease has, or had, devices of this worker. These and all
        /// earlier grants of the devices are void.
        grants: Vec<DeviceGrant>,
        /// Whether the worker is to keep the snapshots of the lease's sessions, from which the lease
        /// is to go on, until [`DropSnapshots`](Self::DropSnapshots).
        hold_snapshots: bool,
    },
}

/// A worker, and how another one reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The worker.
    pub worker: WorkerId,
    /// The worker's address and certificate.
    pub endpoint: Endpoint,
}

impl Peer {
    /// Returns what the source of a part's snapshots calls this worker as their keeper.
    #[must_use]
    pub fn as_keeper(&self, part: PartId, assignment: u64) -> AssignedKeeper {
        AssignedKeeper {
            part,
            worker: self.worker,
            assignment,
        }
    }
}

/// One device of a granted lease, and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasedDevice {
    /// The worker and the device's index.
    pub device_ref: DeviceRef,
    /// The number of this grant: higher than that of any earlier grant of the device.
    pub grant: GrantNumber,
    /// The part of the device that the lease has; `None` for all of it.
    pub share: Option<DeviceShare>,
    /// The device's kind, name and memory.
    pub device: DeviceSpec,
    /// The worker's address and certificate.
    pub worker: Endpoint,
}
