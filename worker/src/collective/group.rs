//! A group behind its lock, and its messages as the bodies of frames.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

use tensord_proto::{
    codec::{CodecError, decode_type, encode_type},
    ids::WorkerId,
    v1::{self, Fault, frame::Body},
};

use super::{
    algorithm::{Algorithm, Arrival, Done, GroupMessage, Piece, Rank},
    members::{LeaseMembers, Members},
    sliced::Sliced,
};
use crate::locks::lock;

/// Maximum number of bytes of a fault's reason that are sent to other ranks, or kept of what
/// another worker has sent.
pub(super) const REASON_BYTES: usize = 4 << 10;

/// A group at this worker.
pub(crate) struct Group {
    members: Members,
    /// The workers of the group, by number.
    workers: Vec<WorkerId>,
    state: Mutex<GroupState>,
    end_announced: AtomicBool,
}

struct GroupState {
    group: Box<dyn Algorithm>,
    /// By worker: whether its link has been notified of the pending messages.
    notified: Vec<bool>,
}

/// The effects of a change to the group.
#[derive(Default)]
pub(crate) struct GroupEffects {
    pub(crate) done: Vec<Done>,
    /// Workers for which messages are pending, and whose links were not notified yet.
    pub(crate) with_messages: Vec<usize>,
}

impl Group {
    /// Creates the group of `members`.
    pub(crate) fn new(members: Members, lease_members: &LeaseMembers) -> Self {
        let mut workers: Vec<WorkerId> = Vec::new();
        let mut ranks = Vec::new();
        for lease_rank in members.lease_ranks() {
            let worker = lease_members
                .worker(*lease_rank)
                .unwrap_or(lease_members.me());
            let known = workers.iter().position(|id| *id == worker);
            let worker_index = known.unwrap_or_else(|| {
                workers.push(worker);
                workers.len() - 1
            });
            let description = lease_members.describe(*lease_rank);
            ranks.push(Rank {
                worker_index,
                description,
            });
        }
        let me = workers.iter().position(|id| *id == lease_members.me());
        let state = GroupState {
            notified: vec![false; workers.len()],
            group: open(ranks, me.unwrap_or_default()),
        };
        Self {
            members,
            workers,
            state: Mutex::new(state),
            end_announced: AtomicBool::new(false),
        }
    }

    pub(crate) fn members(&self) -> &Members {
        &self.members
    }

    /// Returns the worker with this index in the group;
    /// [`worker_index`](Self::worker_index) is the inverse.
    pub(crate) fn worker(&self, worker_index: usize) -> WorkerId {
        self.workers[worker_index]
    }

    pub(crate) fn worker_index(&self, worker: WorkerId) -> Option<usize> {
        self.workers.iter().position(|id| *id == worker)
    }

    /// Returns whether the end of the group still has to be reported. Returns true once.
    pub(crate) fn announce_end(&self) -> bool {
        !self.end_announced.swap(true, Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
        lock(&self.state)
    }

    /// Applies `change` to the group's state machine. Returns the result of `change`, and the
    /// effects, which the caller must execute.
    pub(crate) fn change<T>(
        &self,
        change: impl FnOnce(&mut dyn Algorithm) -> T,
    ) -> (T, GroupEffects) {
        let mut state = self.state();
        let GroupState { group, notified } = &mut *state;
        let changed = change(&mut **group);
        let mut with_messages = Vec::new();
        for (worker_index, notified) in notified.iter_mut().enumerate() {
            if !*notified && group.has_message(worker_index) {
                *notified = true;
                with_messages.push(worker_index);
            }
        }
        let done = group.take_done();
        (
            changed,
            GroupEffects {
                done,
                with_messages,
            },
        )
    }

    /// Takes the next message for worker `worker_index`. Returns the message, whether
    /// another one is ready, and how many bytes more than the other workers this worker was
    /// sent ([`Algorithm::lead_bytes`]).
    pub(crate) fn next(&self, worker_index: usize) -> (Option<Body>, bool, Option<i64>) {
        let mut state = self.state();
        let message = state
            .group
            .next(worker_index)
            .map(|message| self.body(message));
        let more = state.group.has_message(worker_index);
        state.notified[worker_index] = more;
        (message, more, state.group.lead_bytes(worker_index))
    }

    fn body(&self, message: GroupMessage) -> Body {
        let group = self.members.lease_ranks().to_vec();
        match message {
            GroupMessage::Arrivals(arrivals) => {
                let arrivals = arrivals.into_iter();
                let arrivals = arrivals.map(|(rank, arrival)| encode(rank, arrival));
                Body::Arrivals(v1::Arrivals {
                    group,
                    arrivals: arrivals.collect(),
                })
            }
            GroupMessage::Piece(Piece { kind, bytes }) => Body::Piece(v1::Piece {
                group,
                kind: kind.into(),
                bytes,
            }),
            GroupMessage::Abort(reason) => Body::Abort(v1::Abort {
                group,
                reason: reason.to_string(),
            }),
        }
    }
}

/// Chooses the algorithm of a group. A group whose devices all reach each other by a
/// vendor's library would get another one here.
fn open(ranks: Vec<Rank>, me: usize) -> Box<dyn Algorithm> {
    Box::new(Sliced::new(ranks, me))
}

fn encode(rank: usize, arrival: Arrival) -> v1::Arrival {
    v1::Arrival {
        rank: rank as u32,
        r#type: Some(encode_type(&arrival.shape, arrival.dtype)),
        mean: arrival.mean,
        ring_bytes: arrival.ring_bytes,
        fault: arrival.fault.map(|fault| fault.bounded(REASON_BYTES)),
    }
}

/// Returns what is kept of a fault that another worker has sent.
pub(super) fn received_fault(fault: &Fault) -> Arc<Fault> {
    Arc::new(fault.bounded(REASON_BYTES))
}

/// Decodes an arrival that another worker has announced, and its rank.
pub(crate) fn decode(arrival: v1::Arrival) -> Result<(usize, Arrival), CodecError> {
    let (shape, dtype, _) = decode_type(arrival.r#type.as_ref())?;
    let fault = arrival.fault.as_ref().map(received_fault);
    let arrival_of = Arrival {
        shape,
        dtype,
        mean: arrival.mean,
        fault,
        ring_bytes: arrival.ring_bytes,
    };
    Ok((arrival.rank as usize, arrival_of))
}
