//! How the all-reduces of one group are carried out at one worker: the seam between
//! what a group is and what reduces its tensors.
//!
//! An [`Algorithm`] is a pure state machine: what local ranks bring and what other
//! workers say goes in, what to say to them and results come out. Laws, checked on
//! every algorithm by one suite (`conformance`):
//!
//! 1. The ranks' k-th calls belong together, in whatever order they come and
//!    messages are carried. Messages between two workers keep their order.
//! 2. Every rank of a call gets the same bits, which depend on what the ranks bring
//!    and on nothing else; half types are added up in `f32`.
//! 3. A call to which ranks bring different types, a type that is not reduced, or no
//!    value because of a fault, fails on every rank with the same words, which name
//!    the ranks. The group goes on.
//! 4. A rank that keeps others waiting until the deadline is named to all. The group
//!    is over then: what comes after fails with the same words.
//! 5. A worker that breaks a rule is told which; nothing it says makes this one panic
//!    or hold more than the tensors of its own ranks.
//!
//! [`Sliced`](super::sliced::Sliced) works everywhere. One for devices that reach
//! each other by a library of their vendor's (NCCL) has its place beside it, where
//! `cell` opens groups.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use burn_backend::{DType, Shape};
use bytes::Bytes;
use tensord_proto::v1::{Fault, FaultKind, PieceKind};

/// See the module's documentation for the laws.
pub(crate) trait Algorithm: Send {
    /// A local rank comes to its next all-reduce with `bytes`, or with the fault in
    /// `arrival`. The end of it will have `ticket`.
    fn arrive(&mut self, rank: usize, ticket: u64, arrival: Arrival, bytes: Bytes, now: Instant);

    /// Another worker says that `rank` has come to its next all-reduce.
    fn heard(
        &mut self,
        node: usize,
        rank: usize,
        arrival: Arrival,
        now: Instant,
    ) -> Result<(), Broke>;

    /// Another worker sends bytes of a slice.
    fn piece(&mut self, node: usize, piece: Piece, now: Instant) -> Result<(), Broke>;

    /// Ends the group: every call that is not over fails for `reason`, and so does
    /// whatever comes after.
    fn abort(&mut self, reason: &str);

    /// Another worker has ended the group.
    fn aborted(&mut self, node: usize, reason: &str);

    /// Ends the group if others have kept local ranks waiting for `deadline`. Nothing at
    /// all has been heard of the workers that are `silent`.
    fn tick(&mut self, now: Instant, deadline: Duration, silent: &[usize]);

    /// From so many bytes on slices better travel one after the other, as one link of this
    /// worker carries as much as all together. `None`: it does not, as far as is known.
    fn set_ring_bytes(&mut self, slice_bytes: Option<u64>);

    /// Whether there is something to say to `node`.
    fn has_news(&self, node: usize) -> bool;

    /// The next thing to say to `node`.
    fn next(&mut self, node: usize) -> Option<Say>;

    /// How many bytes more `node` was sent than the other workers on average, of what is
    /// under way: all links of an exchange are to end together. `None`: the others are
    /// sent nothing meanwhile.
    fn lead_bytes(&self, node: usize) -> Option<i64>;

    /// The calls of local ranks that came to an end since this was last asked.
    fn take_done(&mut self) -> Vec<Done>;
}

/// A tensor that a rank brings to an all-reduce.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// The mean is asked for; else the sum.
    pub(crate) mean: bool,
    /// The rank has no value to give, because of this.
    pub(crate) fault: Option<Arc<Fault>>,
    /// Bytes of a slice from which on its worker would have it go round a ring.
    pub(crate) ring_bytes: Option<u64>,
}

/// Why a call has no result.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Failure {
    /// Some rank had no value, because of this fault.
    Inherited(Arc<Fault>),
    /// The call itself failed.
    New(FaultKind, String),
}

/// The end of an all-reduce for one local rank.
#[derive(Debug)]
pub(crate) struct Done {
    /// The rank.
    pub(crate) rank: usize,
    /// What the rank called it.
    pub(crate) ticket: u64,
    /// The reduced tensor's bytes, shared by all local ranks.
    pub(crate) result: Result<Bytes, Failure>,
}

/// Something to say to another worker of the group.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Say {
    Arrivals(Vec<(usize, Arrival)>),
    Piece(Piece),
    Abort(Arc<str>),
}

/// The next bytes of one kind between two workers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub(crate) kind: PieceKind,
    pub(crate) bytes: Bytes,
}

/// A rule that another worker broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("in a collective, {0}")]
pub(crate) struct Broke(String);

impl Broke {
    pub(super) fn new(rule: String) -> Self {
        Self(rule)
    }
}

/// A rank of a group.
#[derive(Debug, Clone)]
pub(crate) struct Rank {
    /// The number of its worker among the workers of the group.
    pub(crate) node: usize,
    /// Where it is, in words.
    pub(crate) place: String,
}
