//! A group behind its lock, and its messages as the bodies of frames.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

use tensord_proto::{
    codec::{CodecError, decode_type, encode_type},
    ids::WorkerId,
    v1::{self, frame::Body},
};

use super::{
    algorithm::{Algorithm, Arrival, Done, Piece, Rank, Say},
    members::{Members, Roster},
    sliced::Sliced,
};
use crate::locks::lock;

/// Most bytes of a fault's reason that are sent to other ranks.
const REASON_BYTES: usize = 4 << 10;

/// A group at this worker.
pub(crate) struct Cell {
    members: Members,
    /// The workers of the group, by number.
    nodes: Vec<WorkerId>,
    state: Mutex<State>,
    told: AtomicBool,
}

struct State {
    group: Box<dyn Algorithm>,
    /// By worker: whether its link has been notified of the pending messages.
    announced: Vec<bool>,
}

/// The effects of a change to the group.
#[derive(Default)]
pub(crate) struct Changed {
    pub(crate) done: Vec<Done>,
    /// Workers for which messages are pending, and whose links were not notified yet.
    pub(crate) news_for: Vec<usize>,
}

impl Cell {
    /// The group of `members`.
    pub(crate) fn new(members: Members, roster: &Roster) -> Self {
        let mut nodes: Vec<WorkerId> = Vec::new();
        let mut ranks = Vec::new();
        for place in members.places() {
            let worker = roster.worker(*place).unwrap_or(roster.me());
            let known = nodes.iter().position(|node| *node == worker);
            let node = known.unwrap_or_else(|| {
                nodes.push(worker);
                nodes.len() - 1
            });
            let place = roster.describe(*place);
            ranks.push(Rank { node, place });
        }
        let me = nodes.iter().position(|node| *node == roster.me());
        let state = State {
            announced: vec![false; nodes.len()],
            group: open(ranks, me.unwrap_or_default()),
        };
        Self {
            members,
            nodes,
            state: Mutex::new(state),
            told: AtomicBool::new(false),
        }
    }

    pub(crate) fn members(&self) -> &Members {
        &self.members
    }

    /// The worker with this number in the group; [`node`](Self::node) is the inverse.
    pub(crate) fn worker(&self, node: usize) -> WorkerId {
        self.nodes[node]
    }

    pub(crate) fn node(&self, worker: WorkerId) -> Option<usize> {
        self.nodes.iter().position(|node| *node == worker)
    }

    /// Whether the end of the group still has to be reported. Returns true once.
    pub(crate) fn is_news(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Changes the group and returns the effects.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut dyn Algorithm) -> T) -> (T, Changed) {
        let mut state = self.state();
        let State { group, announced } = &mut *state;
        let changed = change(&mut **group);
        let mut news_for = Vec::new();
        for (node, announced) in announced.iter_mut().enumerate() {
            if !*announced && group.has_news(node) {
                *announced = true;
                news_for.push(node);
            }
        }
        let done = group.take_done();
        (changed, Changed { done, news_for })
    }

    /// The next message for `node`, whether more are pending, and the
    /// [lead](Algorithm::lead_bytes) of `node` after it.
    pub(crate) fn next(&self, node: usize) -> (Option<Body>, bool, Option<i64>) {
        let mut state = self.state();
        let said = state.group.next(node).map(|say| self.body(say));
        let more = state.group.has_news(node);
        state.announced[node] = more;
        (said, more, state.group.lead_bytes(node))
    }

    fn body(&self, say: Say) -> Body {
        let group = self.members.places().to_vec();
        match say {
            Say::Arrivals(arrivals) => {
                let arrivals = arrivals.into_iter();
                let arrivals = arrivals.map(|(rank, arrival)| encode(rank, arrival));
                Body::Arrivals(v1::Arrivals {
                    group,
                    arrivals: arrivals.collect(),
                })
            }
            Say::Piece(Piece { kind, bytes }) => Body::Piece(v1::Piece {
                group,
                kind: kind.into(),
                bytes,
            }),
            Say::Abort(reason) => Body::Abort(v1::Abort {
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
        fault: arrival.fault.map(|fault| fault.told(REASON_BYTES)),
    }
}

/// Decodes an arrival that another worker has announced, and its rank.
pub(crate) fn decode(arrival: v1::Arrival) -> Result<(usize, Arrival), CodecError> {
    let (shape, dtype, _) = decode_type(arrival.r#type.as_ref())?;
    let fault = arrival.fault.map(Arc::new);
    let arrival_of = Arrival {
        shape,
        dtype,
        mean: arrival.mean,
        fault,
        ring_bytes: arrival.ring_bytes,
    };
    Ok((arrival.rank as usize, arrival_of))
}
