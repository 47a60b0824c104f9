//! What the rest of the client requests of the control task, and the replies.

use tensord_proto::v1::{ChangeStanding, Error, Granted, LeaseRequest};
use tokio::sync::{oneshot, watch};

use super::lease_watch::LeaseWatch;
use crate::{error::StandingError, lease::LeaseEvents};

/// A request for a lease, as the rest of the client makes it.
pub(crate) struct LeaseCall {
    pub(crate) request: LeaseRequest,
    pub(crate) replies: RequestReplies,
}

/// Where this task reports what happens to a request for a lease.
pub(crate) struct RequestReplies {
    /// Where in the queue the request is: 1 is next; 0 until the pool has sent it.
    pub(crate) position: watch::Sender<u32>,
    pub(crate) outcome: oneshot::Sender<RequestOutcome>,
    pub(crate) events: LeaseEvents,
}

/// A request of the program to the control task.
pub(crate) enum Call {
    Lease(LeaseCall),
    Standing(StandingCall),
}

/// A request to suspend a lease, to resume it, or to move it.
pub(crate) struct StandingCall {
    pub(crate) change: ChangeStanding,
    /// Receives the pool's reason if it refuses.
    pub(crate) outcome: oneshot::Sender<Result<(), StandingError>>,
}

/// What becomes of a request for a lease.
pub(crate) enum RequestOutcome {
    Granted(Granted, LeaseWatch),
    Refused(Error),
}
