//! A connection of a track: frames on their way in both directions.

use std::collections::VecDeque;

use bytes::Bytes;
use tensord_proto::v1::Opened;

/// The connection of a track.
#[derive(Debug, Default)]
pub(crate) enum Link {
    /// There is none.
    #[default]
    Down,
    /// The worker's reply to the opening is on its way.
    Opening(Box<Opened>, Frames),
    Up(Frames),
}

/// Frames on their way, each direction in order.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    pub(crate) to_host: VecDeque<Bytes>,
    pub(crate) to_client: VecDeque<Bytes>,
}

impl Link {
    /// Returns whether the client may send.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self, Self::Up(_))
    }

    /// Returns the frames of a connection that the worker has accepted.
    pub(crate) fn accepted(&mut self) -> Option<&mut Frames> {
        match self {
            Self::Down => None,
            Self::Opening(_, frames) | Self::Up(frames) => Some(frames),
        }
    }

    /// Removes the next frame for the worker.
    pub(crate) fn next_for_host(&mut self) -> Option<Bytes> {
        self.accepted()?.to_host.pop_front()
    }

    /// Removes the next frame for the client.
    pub(crate) fn next_for_client(&mut self) -> Option<Bytes> {
        match self {
            Self::Up(frames) => frames.to_client.pop_front(),
            _ => None,
        }
    }

    /// Removes the worker's reply to the opening, which arrives now.
    pub(crate) fn establish(&mut self) -> Option<Box<Opened>> {
        match std::mem::take(self) {
            Self::Opening(opened, frames) => {
                *self = Self::Up(frames);
                Some(opened)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}
