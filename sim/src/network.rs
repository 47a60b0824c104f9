//! A connection: frames on their way in both directions.

use std::{collections::VecDeque, mem};

use bytes::Bytes;

/// A connection that one side dials, and on which the other one replies at first with an `R`.
#[derive(Debug, Default)]
pub(crate) enum Link<R> {
    /// There is none.
    #[default]
    Down,
    /// The reply to the dialling side is on its way.
    Opening(R, Frames),
    Up(Frames),
}

/// Frames on their way, each direction in order.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    pub(crate) to_acceptor: VecDeque<Bytes>,
    pub(crate) to_dialler: VecDeque<Bytes>,
}

impl<R> Link<R> {
    /// Returns whether there is no connection, nor one on its way.
    pub(crate) fn is_down(&self) -> bool {
        matches!(self, Self::Down)
    }

    /// Returns whether the dialling side may send.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self, Self::Up(_))
    }

    /// Records that the other side has accepted a connection with this reply.
    pub(crate) fn accept(&mut self, reply: R) {
        *self = Self::Opening(reply, Frames::default());
    }

    /// Returns the frames of a connection that the other side has accepted.
    pub(crate) fn accepted(&mut self) -> Option<&mut Frames> {
        match self {
            Self::Down => None,
            Self::Opening(_, frames) | Self::Up(frames) => Some(frames),
        }
    }

    /// Removes the next frame for the side that has accepted the connection.
    pub(crate) fn next_for_acceptor(&mut self) -> Option<Bytes> {
        self.accepted()?.to_acceptor.pop_front()
    }

    /// Removes the next frame for the side that has dialled.
    pub(crate) fn next_for_dialler(&mut self) -> Option<Bytes> {
        match self {
            Self::Up(frames) => frames.to_dialler.pop_front(),
            _ => None,
        }
    }

    /// Removes the reply to the opening, which arrives now.
    pub(crate) fn establish(&mut self) -> Option<R> {
        match mem::take(self) {
            Self::Opening(reply, frames) => {
                *self = Self::Up(frames);
                Some(reply)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}
