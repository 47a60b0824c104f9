//! What sessions of one lease do together: collectives, and transfers of tensors,
//! within a worker and between workers, never through the client.
//!
//! - `members`: the devices of a lease, and groups of them.
//! - `group`: one group's all-reduces, as a pure state machine; `reduce` is its
//!   arithmetic.
//! - `transfer`: values that change sessions, as a pure state machine.
//! - `cohort`: sessions that were opened together, and what the state machines
//!   decide, carried out.
//! - `cell`, `peer`, `link`: a group's lock, the other workers, and the tasks that
//!   talk to them.
//!
//! It knows sessions as [`Member`]s and nothing of devices or ops: values come and
//! go as bytes.

mod cell;
mod cohort;
mod group;
mod link;
mod members;
mod peer;
mod reduce;
mod transfer;

pub(crate) use self::{
    cohort::{Arrived, Call, Cohort, Member, Outcome, Settings},
    group::{Arrival, Failure},
    link::{Accepted, accept, serve},
    members::{Members, Roster},
    transfer::{Capability, Offer, Take, Value},
};
