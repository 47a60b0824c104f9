//! Time limits of a connection.

use std::time::Duration;

/// The time limits of a pump, which exchanges a channel's frames on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A connection on which nothing is received for this long counts as lost. It must be
    /// several times the peer's `ping`.
    pub silence: Duration,
    /// How long a writer without anything to send waits before it sends a ping.
    pub ping: Duration,
    /// How long an acknowledgement or credit waits for a frame that can carry it.
    pub ack_delay: Duration,
}

impl Timing {
    /// The limits between processes of tensord. Both ends of a connection must use them.
    ///
    /// Silence is five pings, and short enough that a session goes on elsewhere about 3 s after its worker's host has
    /// stopped responding.
    pub const DEFAULT: Self = Self {
        silence: Duration::from_millis(2500),
        ping: Duration::from_millis(500),
        ack_delay: Duration::from_millis(20),
    };
}

impl Default for Timing {
    fn default() -> Self {
        Self::DEFAULT
    }
}
