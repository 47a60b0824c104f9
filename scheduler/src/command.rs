//! What the engine decided, for the driver to carry out.
//!
//! A command to a client is only given while the client is attached, one to a
//! worker only while its stream is up. A driver that cannot deliver one any
//! more may drop it: what the other side missed is settled when it comes back
//! and says what it holds.

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, RequestId, WorkerId};

use crate::device::DeviceSpec;
use crate::event::{DeviceGrant, DeviceRef, Endpoint};
use crate::reason::{EndReason, RefuseReason};

/// Something for the driver to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Tell a client where its request stands. Given once it waits, and again
    /// whenever its position has changed.
    Queued {
        /// Whom to tell.
        client: ClientId,
        /// Its request.
        request: RequestId,
        /// 1 is next.
        position: u32,
    },
    /// Give a client its lease: sign a token and send it. Ends the request.
    Granted {
        /// Whom to tell.
        client: ClientId,
        /// Its request.
        request: RequestId,
        /// The id that came with the request.
        lease: LeaseId,
        /// Its devices, those of one worker next to each other.
        devices: Vec<LeasedDevice>,
    },
    /// Tell a client that its request came to nothing. Ends the request.
    Refused {
        /// Whom to tell.
        client: ClientId,
        /// Its request.
        request: RequestId,
        /// Why.
        reason: RefuseReason,
    },
    /// Tell a client that it has a lease no more.
    LeaseEnded {
        /// Whom to tell.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// Why.
        reason: EndReason,
    },
    /// Tell a worker to end every session of a lease. Given again when the worker joins
    /// while devices of it are not known to be released.
    EndLease {
        /// Whom to tell.
        worker: WorkerId,
        /// The lease.
        lease: LeaseId,
        /// The grants by which the lease has, or had, devices of this worker. None up to
        /// these is good any more.
        grants: Vec<DeviceGrant>,
    },
}

/// One device of a granted lease, and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasedDevice {
    /// Which device of which worker.
    pub share: DeviceRef,
    /// The number of this grant: higher than that of any grant of the device before.
    pub grant: GrantNumber,
    /// What it is.
    pub device: DeviceSpec,
    /// Where its worker is.
    pub worker: Endpoint,
}
