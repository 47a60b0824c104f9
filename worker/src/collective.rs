//! What the sessions of one lease do together: collectives, and transfers of tensors,
//! within a worker and between workers, never through the client.
//!
//! - `members`: the devices of a lease, and groups of them.
//! - `algorithm`: the trait that executes a group's all-reduces, and its laws;
//!   `sliced` is the implementation that works everywhere, `reduce` its arithmetic.
//! - `transfer`: moves values between sessions, as a pure state machine.
//! - `cohort`: the sessions that were opened together; executes what the state
//!   machines decide. `sessions` are its members on this worker, `peers` the other workers.
//! - `group`, `peer`, `link`: a group behind its lock, another worker, and the tasks
//!   that exchange frames with it, which `peer_frame` decodes; `meter` measures what a link
//!   carries.
//!
//! The module sees sessions as [`Member`]s and does not know devices or ops: values
//! are plain bytes here.

mod algorithm;
mod cohort;
#[cfg(test)]
mod conformance;
mod group;
mod link;
mod members;
mod meter;
mod peer;
mod peer_frame;
mod peers;
mod reduce;
mod sessions;
mod sliced;
mod transfer;

#[cfg(all(feature = "testing", target_os = "linux"))]
pub(crate) use self::link::simulated::{SimulatedLinkEnd, join_requests};
pub(crate) use self::{
    algorithm::{Arrival, Failure},
    cohort::{AllReduceCall, Cohort, CollectiveSettings},
    link::{AcceptedLink, accept, serve},
    members::{LeaseMembers, Members},
    sessions::{Member, Outcome, ReceivedValue},
    transfer::{Capability, Offer, Take, Value},
};
