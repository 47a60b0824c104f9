//! How one worker executes the all-reduces of one group: the interface between a
//! group and the code that reduces its tensors.
//!
//! An [`Algorithm`] is a pure state machine. Its inputs are the tensors of local ranks
//! and the messages of other workers; its outputs are messages to those workers, and
//! results. One suite (`conformance`) checks these laws for every algorithm:
//!
//! 1. The ranks' k-th calls belong together, whatever the order in which ranks arrive
//!    and messages are delivered. Messages between two workers keep their order.
//! 2. Every rank of a call gets the same bits, which depend only on the ranks'
//!    tensors; half types are added up in `f32`.
//! 3. A call fails on every rank, with the same message that names the ranks, if their
//!    tensors have different types or a type that cannot be reduced, or if a rank has
//!    no value because of a fault. Later calls of the group still run.
//! 4. If a rank keeps others waiting until the deadline, the group ends with an error
//!    that names this rank. Later calls fail with the same message.
//! 5. A worker that breaks a rule gets an error that names the rule. No message of
//!    another worker makes this one panic, or buffer more bytes (from each worker, of
//!    each kind of piece) than the tensors of this worker's ranks have.
//!
//! [`Sliced`](super::sliced::Sliced) works everywhere. An algorithm for devices that
//! reach each other by a vendor's library (NCCL) would be added beside it, where
//! `group` opens groups.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use burn_backend::{DType, Shape};
use bytes::Bytes;
use tensord_proto::v1::{Fault, FaultKind, PieceKind};

/// Executes a group's all-reduces by the laws in the module's documentation.
pub(crate) trait Algorithm: Send {
    /// Records that a local rank has reached its next all-reduce, with `bytes` or with the
    /// fault in `arrival`. The rank's [`Done`] will have this `ticket`.
    fn arrive(&mut self, rank: usize, ticket: u64, arrival: Arrival, bytes: Bytes, now: Instant);

    /// Handles the announcement of another worker that its `rank` has reached its next
    /// all-reduce.
    fn on_arrival(
        &mut self,
        worker_index: usize,
        rank: usize,
        arrival: Arrival,
        now: Instant,
    ) -> Result<(), PeerViolation>;

    /// Handles bytes of a slice that another worker has sent.
    fn piece(
        &mut self,
        worker_index: usize,
        piece: Piece,
        now: Instant,
    ) -> Result<(), PeerViolation>;

    /// Ends the group: every open call fails with `reason`, and so do all later ones.
    fn abort(&mut self, reason: &str);

    /// Handles the message of another worker that it has ended the group.
    fn aborted(&mut self, worker_index: usize, reason: &str);

    /// Ends the group if others have kept local ranks waiting for `deadline`. From the
    /// `silent` workers not even heartbeats have been received.
    fn tick(&mut self, now: Instant, deadline: Duration, silent: &[usize]);

    /// Sets the smallest slice, in bytes, that this worker would send round a ring. `None` if
    /// it would use no ring: its sending rate is not known yet, or one connection may not
    /// carry it.
    fn set_ring_bytes(&mut self, slice_bytes: Option<u64>);

    /// Returns whether a message for `worker_index` is pending.
    fn has_message(&self, worker_index: usize) -> bool;

    /// Takes the next message for `worker_index`.
    fn next(&mut self, worker_index: usize) -> Option<GroupMessage>;

    /// Returns how many bytes more (or fewer, if negative) `worker_index` was sent in the
    /// current exchange than the other workers on average. Links use this to finish at the
    /// same time. `None` in a ring, where the other workers are sent nothing.
    fn lead_bytes(&self, worker_index: usize) -> Option<i64>;

    /// Takes the calls of local ranks that ended since the last time this was called.
    fn take_done(&mut self) -> Vec<Done>;
}

/// The type of the tensor with which a rank has reached an all-reduce.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// The rank requests the mean instead of the sum.
    pub(crate) mean: bool,
    /// Why the rank has no value, if it has none.
    pub(crate) fault: Option<Arc<Fault>>,
    /// The smallest slice, in bytes, that the rank's worker would send round a ring; `None` if
    /// it would use no ring.
    pub(crate) ring_bytes: Option<u64>,
}

/// Why a call has no result.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Failure {
    /// Some rank had no value, because of this fault.
    Inherited(Arc<Fault>),
    /// The call failed for another reason.
    New(FaultKind, String),
}

/// The end of an all-reduce for one local rank.
#[derive(Debug)]
pub(crate) struct Done {
    /// The rank.
    pub(crate) rank: usize,
    /// The ticket that [`arrive`](Algorithm::arrive) was given.
    pub(crate) ticket: u64,
    /// The bytes of the reduced tensor, shared by all local ranks.
    pub(crate) result: Result<Bytes, Failure>,
}

/// A message to another worker of the group.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum GroupMessage {
    Arrivals(Vec<(usize, Arrival)>),
    Piece(Piece),
    Abort(Arc<str>),
}

/// A section of a byte stream from one worker to another; each kind has its own stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub(crate) kind: PieceKind,
    pub(crate) bytes: Bytes,
}

/// A rule that another worker broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("in a collective, {0}")]
pub(crate) struct PeerViolation(String);

impl PeerViolation {
    pub(super) fn new(rule: String) -> Self {
        Self(rule)
    }
}

/// A rank of a group.
#[derive(Debug, Clone)]
pub(crate) struct Rank {
    /// The number of the rank's worker among the workers of the group.
    pub(crate) worker_index: usize,
    /// A description of the rank's device and worker, for messages.
    pub(crate) description: String,
}
