//! Channels on links: [`pump`] exchanges the frames of an [`Endpoint`] on a link, until the link
//! ends.
//!
//! The channel itself, which does no I/O, is in [`tensord_channel`]. Its items are here as well,
//! so that crates that have links need one path.

mod pump;

#[cfg(test)]
mod tests;

pub use pump::{Endpoint, pump};
pub use tensord_channel::{
    Attached, Broken, Channel, Connection, Ended, FrameParts, Look, Next, Received, Timing, duplex,
    resume,
};
