//! What passes between a channel's owner and the pump, which exchanges the channel's frames on a
//! connection.

use std::{fmt, time::Duration};

use crate::FrameParts;

/// What a writer knows when it looks for frames to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Whether frames that may be batched with later ones may still wait for them: the
    /// delay of [`Next::Later`] has not passed.
    pub patient: bool,
    /// Whether the writer has had nothing to send for
    /// [`Timing::ack_delay`](crate::Timing::ack_delay); after [`Next::Nothing`] it then waits for
    /// [`Timing::ping`](crate::Timing::ping).
    pub rested: bool,
}

/// What a writer is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Send these frames.
    Frames(Vec<FrameParts>),
    /// Look again once this time has passed since the first look with this result: there is
    /// something to send, and more of it may come.
    Later(Duration),
    /// Wait to be woken; if that takes [`Timing::ack_delay`](crate::Timing::ack_delay), send the
    /// pending acknowledgement in a ping.
    PendingAck,
    /// Wait to be woken; a writer that stays idle sends a ping every
    /// [`Timing::ping`](crate::Timing::ping).
    Nothing,
    /// Finish the link: everything was sent, and acknowledged as far as the owner
    /// requires.
    Done,
    /// Everything was sent: give the peer this time to close the connection.
    Linger(Duration),
    /// End: a later connection has replaced this one.
    Replaced,
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended<R> {
    /// The connection was lost, for this reason. Another one can resume the channel.
    Lost(String),
    /// A later connection has replaced this one.
    Replaced,
    /// Everything was sent.
    Done,
    /// The owner ended the channel; holds the reason that it gave.
    Over(R),
}

impl<R: fmt::Display> fmt::Display for Ended<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(reason) => f.write_str(reason),
            Self::Over(reason) => reason.fmt(f),
            Self::Replaced => f.write_str("a later connection replaced this one"),
            Self::Done => f.write_str("everything was sent"),
        }
    }
}

/// Why a channel's owner does not accept a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Broken<R> {
    /// Frames are missing; holds a description. A new connection repairs this.
    Loss(String),
    /// A later connection has replaced this one.
    Replaced,
    /// The channel is over, for this reason. The writer gets this time to send its last
    /// frames.
    Over(R, Duration),
}
