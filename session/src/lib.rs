//! A client's session with a worker, without I/O: what it sends and when, what it expects, and what
//! it keeps so that another process can go on with it.
//!
//! [`State`] has everything; the client has it behind a lock, and passes it what the program
//! records and the frames that arrive. Time is an argument.
//!
//! - [`send_policy`] decides when to send and when to wake the sender; `op_buffer` has the recorded
//!   items, and [`FrameEncoder`] encodes them. [`frames`] makes the frames that are not about ops.
//! - `upload_cache` knows which uploads the worker keeps.
//! - [`Requests`] has the reads and syncs without a reply, `pending_reads` assembles the values of
//!   the reads, and `answered` checks those that another process repeats.
//! - `journal` decides from where the session goes on if its process dies, and [`Cohort`] has what
//!   the sessions of a lease decide together. A [`JournalBudget`] bounds the journals of a process.
//! - [`ConnectionEnd`]: the ways in which a connection ends.
//!
//! This crate opens no connection, reads no clock and needs no runtime: of Tokio it has channels and
//! notifications only, which run in a browser, too.

mod answered;
mod cohort;
mod connection_end;
pub mod frames;
mod journal;
mod journal_budget;
mod op_buffer;
mod pending_reads;
mod requests;
pub mod send_policy;
mod state;
mod upload_cache;

pub use self::{
    cohort::{Cohort, CohortMember, LEASE_DROPPED},
    connection_end::{ConnectionEnd, accepted_profile, after_pump, broken, rejected_by},
    journal_budget::JournalBudget,
    op_buffer::{FrameEncoder, Item, OpBuffer, check_size},
    pending_reads::Delivery,
    requests::{Answer, Requests},
    state::{GoesOn, MAX_RECORDED_ITEMS, NextStep, Receipt, SessionEnd, State, Track},
};

/// The secret that entitles a session to take one offered value, once.
pub type Capability = [u8; 16];
