//! A channel: an ordered stream of frames in each direction that survives its connections.
//!
//! Clients' sessions, the worker's side of them and the links between workers are channels.
//! A channel has at most one connection at a time, the latest. Nothing may be sent on an
//! earlier one, and frames received on it are ignored.
//!
//! - [`Channel`]: numbers, acknowledgements, credit, and which connection is the latest.
//! - [`duplex`], [`resume`]: the numbering, acknowledgement and credit of frames, on which
//!   [`Channel`] is built.
//! - [`Look`], [`Next`], [`Broken`], [`Ended`]: what passes between a channel's owner and the pump,
//!   which exchanges the channel's frames on a connection. The pump is in `tensord-transport`.
//! - [`Timing`]: the pump's time limits, which tests choose.
//!
//! This crate does no I/O and reads no clock: time is an argument. A channel does not know what
//! its frames mean, and does not dial: its owners differ in how long they dial again, and in
//! what they end when they give up.

pub mod duplex;
mod exchange;
pub mod resume;
mod state;
mod timing;

pub use exchange::{Broken, Ended, Look, Next};
pub use state::{Attached, Channel, Connection, Received};
pub use timing::Timing;

use bytes::Bytes;

/// The parts of a frame, which are sent one after the other without a copy.
pub type FrameParts = [Bytes; 3];
