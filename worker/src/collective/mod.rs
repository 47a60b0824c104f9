//! What sessions of one lease do together: collectives, and transfers of tensors,
//! within a worker and between workers, never through the client.
//!
//! - `members`: the devices of a lease, and groups of them.
//! - `algorithm`: what carries out a group's all-reduces, and its laws; `sliced` is
//!   the one that works everywhere, `reduce` its arithmetic.
//! - `transfer`: values that change sessions, as a pure state machine.
//! - `cohort`: sessions that were opened together, and what the state machines
//!   decide, carried out.
//! - `cell`, `peer`, `link`: a group's lock, the other workers, and the tasks that
//!   talk to them; `meter` tells what a link carries.
//!
//! It knows sessions as [`Member`]s and nothing of devices or ops: values come and
//! go as bytes.

mod algorithm;
mod cell;
mod cohort;
#[cfg(test)]
mod conformance;
mod link;
mod members;
mod meter;
mod peer;
mod reduce;
mod sliced;
mod transfer;

pub(crate) use self::{
    algorithm::{Arrival, Failure},
    cohort::{Arrived, Call, Cohort, Member, Outcome, Settings},
    link::{Accepted, accept, serve},
    members::{Members, Roster},
    transfer::{Capability, Offer, Take, Value},
};
