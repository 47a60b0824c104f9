//! One group at one worker, as a pure state machine: all-reduces of local ranks
//! and what other workers say go in, what to say to them and results come out.
//!
//! The ranks' k-th all-reduces of a group belong together. A rank that has come
//! to one *arrives*: it says of what kind its tensor is, and the workers tell each
//! other. Once a worker knows all arrivals of a call, the call is *decided*: it
//! runs, or it fails for everybody with the same words. Bytes flow only for calls
//! that run, so they always find their place, and a mistake of one rank costs its
//! call and not the group.
//!
//! A call that runs is a reduce-scatter and an all-gather, directly between all
//! workers: each sends every other the slice that one is to reduce, adds up the
//! contributions to its own slice in the order of the workers, and sends the sums
//! back. That is 2 (n - 1) / n of the tensor sent by each of n workers, as in a
//! ring, which is the least there can be (Patarasuk and Yuan, "Bandwidth optimal
//! all-reduce algorithms for clusters of workstations", 2009). Against a ring it
//! takes two messages of latency however many workers there are, adds up all
//! contributions in one place, so that half types are rounded once, and everybody
//! hears from everybody, so that whoever is missing is known by name.
//!
//! Between two workers the slices of successive calls make one stream of bytes
//! each way for each of the two halves. So small tensors that follow each other
//! travel together, and no call waits for the end of the one before.
//!
//! Several ranks of one worker are added up there, before anything is sent.

mod layout;
mod queue;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use burn_backend::{DType, Shape};
use bytes::{Bytes, BytesMut};
use tensord_proto::{
    codec::tensor_bytes,
    v1::{Fault, FaultKind},
};

use self::queue::ByteQueue;
use super::reduce::{Element, reduce};

/// Bytes of a piece, about: small enough that reducing one overlaps with the
/// travel of the next, and large against what a frame costs.
const PIECE_BYTES: usize = 256 << 10;

/// Arrivals in a frame, at most.
const ARRIVALS_PER_FRAME: usize = 256;

/// All-reduces that a rank may be ahead of the slowest.
const MAX_AHEAD: u64 = 1 << 16;

/// A tensor that a rank brings to an all-reduce.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// The mean is asked for; else the sum.
    pub(crate) mean: bool,
    /// The rank has no value to give, because of this.
    pub(crate) fault: Option<Arc<Fault>>,
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
    Piece { reduced: bool, bytes: Bytes },
    Abort(Arc<str>),
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

#[derive(Debug)]
pub(crate) struct Group {
    ranks: Vec<Rank>,
    /// All-reduces that each rank has come to.
    arrived: Vec<u64>,
    /// This worker's number.
    me: usize,
    peers: Vec<Peer>,
    /// Calls that are not over, from number `first`.
    calls: VecDeque<Call>,
    first: u64,
    /// Calls before this one are decided.
    decided: u64,
    /// The first call whose own slice is not reduced to the end.
    reducing: u64,
    /// Bytes of the calls that are not over: what peers may send at most.
    open_bytes: usize,
    /// When something last went on.
    progress: Option<Instant>,
    broken: Option<Arc<str>>,
    done: Vec<Done>,
}

/// Another worker of the group; this worker's own entry is not used.
#[derive(Debug, Default)]
struct Peer {
    arrivals: VecDeque<(usize, Arrival)>,
    pieces: VecDeque<(bool, Bytes)>,
    abort: Option<Arc<str>>,
    /// Its contributions to slices that are reduced here.
    contributed: ByteQueue,
    /// Slices that it reduced.
    reduced: ByteQueue,
    /// The first call whose slice from there is not complete, and how much is.
    gathering: u64,
    gathered: usize,
}

#[derive(Debug)]
struct Call {
    arrivals: Vec<Option<Arrival>>,
    /// Of local ranks: rank, ticket and bytes.
    local: Vec<(usize, u64, Bytes)>,
    /// Bytes in `local` before it was decided.
    open_bytes: usize,
    /// When the first local rank came.
    since: Option<Instant>,
    running: Option<Running>,
}

/// A call that runs.
#[derive(Debug)]
struct Running {
    element: Element,
    divisor: Option<u32>,
    own: Bytes,
    result: Vec<u8>,
    /// Bytes of the own slice that are reduced.
    reduced: usize,
}

impl Group {
    /// A group of `ranks`, of which those on node `me` are here.
    pub(crate) fn new(ranks: Vec<Rank>, me: usize) -> Self {
        let nodes = ranks.iter().map(|rank| rank.node + 1).max().unwrap_or(1);
        Self {
            arrived: vec![0; ranks.len()],
            ranks,
            me,
            peers: (0..nodes).map(|_| Peer::default()).collect(),
            calls: VecDeque::new(),
            first: 0,
            decided: 0,
            reducing: 0,
            open_bytes: 0,
            progress: None,
            broken: None,
            done: Vec::new(),
        }
    }

    /// A local rank comes to its next all-reduce with `bytes`, or with the fault in
    /// `arrival`.
    pub(crate) fn arrive(
        &mut self,
        rank: usize,
        ticket: u64,
        arrival: Arrival,
        bytes: Bytes,
        now: Instant,
    ) {
        if let Some(reason) = &self.broken {
            let result = Err(Failure::New(FaultKind::Peer, reason.to_string()));
            return self.done.push(Done {
                rank,
                ticket,
                result,
            });
        }
        let me = self.me;
        for (node, peer) in self.peers.iter_mut().enumerate() {
            if node != me {
                peer.arrivals.push_back((rank, arrival.clone()));
            }
        }
        self.open_bytes += bytes.len();
        let call = self.note(rank, arrival);
        call.open_bytes += bytes.len();
        call.local.push((rank, ticket, bytes));
        call.since.get_or_insert(now);
        self.advance(now);
    }

    /// Another worker says that `rank` has come to its next all-reduce.
    pub(crate) fn heard(
        &mut self,
        node: usize,
        rank: usize,
        arrival: Arrival,
        now: Instant,
    ) -> Result<(), Broke> {
        if self.ranks.get(rank).is_none_or(|rank| rank.node != node) {
            let ranks = self.ranks.len();
            return Err(Broke(format!(
                "worker {node} speaks for rank {rank} of {ranks}, which is not there"
            )));
        }
        if self.broken.is_some() {
            return Ok(());
        }
        if self.arrived[rank] >= self.first + MAX_AHEAD {
            let rule = format!("rank {rank} is more than {MAX_AHEAD} all-reduces ahead");
            return Err(Broke(rule));
        }
        self.note(rank, arrival);
        self.advance(now);
        Ok(())
    }

    /// Another worker sends bytes of a slice that it `reduced`, or is to be here.
    pub(crate) fn piece(
        &mut self,
        node: usize,
        reduced: bool,
        bytes: Bytes,
        now: Instant,
    ) -> Result<(), Broke> {
        if self.broken.is_some() {
            return Ok(());
        }
        let open_bytes = self.open_bytes;
        let peer = &mut self.peers[node];
        let queue = match reduced {
            true => &mut peer.reduced,
            false => &mut peer.contributed,
        };
        queue.push(bytes);
        if queue.len() > open_bytes {
            let rule = format!("worker {node} sends more bytes than were asked for");
            return Err(Broke(rule));
        }
        self.progress = Some(now);
        self.advance(now);
        Ok(())
    }

    /// Ends the group: every call that is not over fails for `reason`, and so does
    /// whatever comes after.
    pub(crate) fn abort(&mut self, reason: &str) {
        if self.broken.is_some() {
            return;
        }
        let reason: Arc<str> = reason.into();
        for call in self.calls.drain(..) {
            let failure = Failure::New(FaultKind::Peer, reason.to_string());
            fail(&mut self.done, call.local, &failure);
        }
        for peer in &mut self.peers {
            *peer = Peer {
                abort: Some(reason.clone()),
                ..Peer::default()
            };
        }
        self.broken = Some(reason);
    }

    /// Another worker has ended the group.
    pub(crate) fn aborted(&mut self, node: usize, reason: &str) {
        self.abort(reason);
        // It knows.
        self.peers[node].abort = None;
    }

    /// Ends the group if others keep local ranks waiting for `deadline`.
    pub(crate) fn tick(&mut self, now: Instant, deadline: Duration) {
        if let Some(reason) = self.overdue(now, deadline) {
            self.abort(&reason);
        }
    }

    fn overdue(&self, now: Instant, deadline: Duration) -> Option<String> {
        let waits = |since: Instant| {
            let since = self.progress.map_or(since, |progress| progress.max(since));
            now.saturating_duration_since(since) >= deadline
        };
        let undecided = self.calls.get((self.decided - self.first) as usize);
        if let Some(call) = undecided
            && call.since.is_some_and(waits)
        {
            let ranks = (0..self.ranks.len()).filter(|rank| call.arrivals[*rank].is_none());
            let ranks = self.name(ranks);
            let number = self.decided + 1;
            return Some(format!(
                "{ranks} did not come to all-reduce {number} of the group within {deadline:?}"
            ));
        }
        let call = self.calls.front()?;
        if call.since.is_some_and(waits) {
            let late = self.late();
            let ranks = (0..self.ranks.len()).filter(|rank| late.contains(&self.ranks[*rank].node));
            let (ranks, number) = (self.name(ranks), self.first + 1);
            return Some(format!(
                "{ranks} sent nothing of all-reduce {number} of the group for {deadline:?}"
            ));
        }
        None
    }

    /// The workers that the first call waits for.
    fn late(&self) -> Vec<usize> {
        let others = (0..self.peers.len()).filter(|node| *node != self.me);
        let reducing = self.reducing == self.first;
        let is_late = |node: &usize| match reducing {
            true => self.peers[*node].contributed.len() == 0,
            false => self.peers[*node].gathering == self.first,
        };
        others.filter(is_late).collect()
    }

    fn name(&self, ranks: impl Iterator<Item = usize>) -> String {
        let name = |rank: usize| format!("rank {rank} ({})", self.ranks[rank].place);
        ranks.map(name).collect::<Vec<_>>().join(", ")
    }

    /// Whether there is something to say to `node`.
    pub(crate) fn has_news(&self, node: usize) -> bool {
        let peer = &self.peers[node];
        peer.abort.is_some() || !peer.arrivals.is_empty() || !peer.pieces.is_empty()
    }

    /// The next thing to say to `node`.
    pub(crate) fn next(&mut self, node: usize) -> Option<Say> {
        let peer = &mut self.peers[node];
        if let Some(reason) = peer.abort.take() {
            return Some(Say::Abort(reason));
        }
        if !peer.arrivals.is_empty() {
            let count = peer.arrivals.len().min(ARRIVALS_PER_FRAME);
            return Some(Say::Arrivals(peer.arrivals.drain(..count).collect()));
        }
        let (reduced, mut bytes) = peer.pieces.pop_front()?;
        if bytes.len() > PIECE_BYTES {
            let rest = bytes.split_off(PIECE_BYTES);
            peer.pieces.push_front((reduced, rest));
        }
        let fits = |bytes: usize, next: &(bool, Bytes)| {
            next.0 == reduced && bytes + next.1.len() <= PIECE_BYTES
        };
        if peer.pieces.front().is_some_and(|n| fits(bytes.len(), n)) {
            let mut joined = BytesMut::from(&bytes[..]);
            while let Some((_, next)) = peer.pieces.pop_front_if(|n| fits(joined.len(), n)) {
                joined.extend_from_slice(&next);
            }
            bytes = joined.freeze();
        }
        Some(Say::Piece { reduced, bytes })
    }

    /// The calls of local ranks that came to an end since this was last asked.
    pub(crate) fn take_done(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.done)
    }

    /// Notes that `rank` came to its next call.
    fn note(&mut self, rank: usize, arrival: Arrival) -> &mut Call {
        let at = (self.arrived[rank] - self.first) as usize;
        self.arrived[rank] += 1;
        while self.calls.len() <= at {
            self.calls.push_back(Call {
                arrivals: vec![None; self.ranks.len()],
                local: Vec::new(),
                open_bytes: 0,
                since: None,
                running: None,
            });
        }
        let call = &mut self.calls[at];
        call.arrivals[rank] = Some(arrival);
        call
    }

    /// Does whatever can be done.
    fn advance(&mut self, now: Instant) {
        while let Some(call) = self.calls.get((self.decided - self.first) as usize)
            && call.arrivals.iter().all(Option::is_some)
        {
            self.decide();
            self.progress = Some(now);
        }
        self.reduce_own();
        self.gather();
        self.finish();
    }

    /// Decides the next call, of which all arrivals are known.
    fn decide(&mut self) {
        let number = self.decided;
        self.decided += 1;
        let call = &mut self.calls[(number - self.first) as usize];
        let arrivals: Vec<&Arrival> = call.arrivals.iter().flatten().collect();
        let (element, size, mean) = match agree(&arrivals, &self.ranks) {
            Ok(agreed) => agreed,
            Err(failure) => return fail(&mut self.done, std::mem::take(&mut call.local), &failure),
        };
        call.local.sort_unstable_by_key(|(rank, ..)| *rank);
        let divisor = mean.then_some(self.ranks.len() as u32);
        let nodes = self.peers.len();
        let parts: Vec<&[u8]> = call.local.iter().map(|(_, _, bytes)| &bytes[..]).collect();
        let own = match &parts[..] {
            _ if nodes == 1 => reduce(element, &parts, divisor).into(),
            [_] => call.local[0].2.clone(),
            parts => reduce(element, parts, None).into(),
        };
        for (node, peer) in self.peers.iter_mut().enumerate() {
            let slice = layout::slice(size, element.bytes(), number, nodes, node);
            if node != self.me && !slice.is_empty() {
                peer.pieces.push_back((false, own.slice(slice)));
            }
        }
        call.running = Some(Running {
            element,
            divisor,
            result: vec![0; if nodes == 1 { 0 } else { size }],
            own,
            reduced: 0,
        });
    }

    /// Reduces as much of the own slices as has come from all.
    fn reduce_own(&mut self) {
        let nodes = self.peers.len();
        while self.reducing < self.decided && nodes > 1 {
            let call = &mut self.calls[(self.reducing - self.first) as usize];
            if let Some(running) = &mut call.running {
                let (size, element) = (running.result.len(), running.element.bytes());
                let slice = layout::slice(size, element, self.reducing, nodes, self.me);
                while running.reduced < slice.len() {
                    let left = slice.start + running.reduced..slice.end;
                    let Some(sum) = running.reduce_more(left.clone(), self.me, &mut self.peers)
                    else {
                        return;
                    };
                    running.reduced += sum.len();
                    running.result[left.start..left.start + sum.len()].copy_from_slice(&sum);
                    for (_, peer) in others(&mut self.peers, self.me) {
                        peer.pieces.push_back((true, sum.clone()));
                    }
                }
            }
            self.reducing += 1;
        }
    }

    /// Takes slices that others have reduced.
    fn gather(&mut self) {
        let nodes = self.peers.len();
        for (node, peer) in others(&mut self.peers, self.me) {
            while peer.gathering < self.decided {
                let call = &mut self.calls[(peer.gathering - self.first) as usize];
                if let Some(running) = &mut call.running {
                    let (size, element) = (running.result.len(), running.element.bytes());
                    let slice = layout::slice(size, element, peer.gathering, nodes, node);
                    while peer.gathered < slice.len() && peer.reduced.len() > 0 {
                        let left = &mut running.result[slice.start + peer.gathered..slice.end];
                        let front = peer.reduced.front(1);
                        let count = front.len().min(left.len());
                        left[..count].copy_from_slice(&front[..count]);
                        peer.reduced.advance(count);
                        peer.gathered += count;
                    }
                    if peer.gathered < slice.len() {
                        break;
                    }
                    peer.gathered = 0;
                }
                peer.gathering += 1;
            }
        }
    }

    /// Lets go of calls that are over.
    fn finish(&mut self) {
        let nodes = self.peers.len();
        let gathered = others(&mut self.peers, self.me).map(|(_, peer)| peer.gathering);
        let over = match nodes {
            1 => self.decided,
            _ => gathered.min().unwrap_or(self.decided).min(self.reducing),
        };
        while self.first < over
            && let Some(call) = self.calls.pop_front()
        {
            self.first += 1;
            self.open_bytes -= call.open_bytes;
            let Some(running) = call.running else {
                continue;
            };
            let result = match nodes {
                1 => running.own,
                _ => running.result.into(),
            };
            for (rank, ticket, _) in call.local {
                let result = Ok(result.clone());
                self.done.push(Done {
                    rank,
                    ticket,
                    result,
                });
            }
        }
        if nodes == 1 {
            self.reducing = self.first;
        }
    }
}

impl Running {
    /// The next bytes of the sum, of the `left` part of the own slice.
    fn reduce_more(
        &self,
        left: std::ops::Range<usize>,
        me: usize,
        peers: &mut [Peer],
    ) -> Option<Bytes> {
        let element = self.element.bytes();
        let fronts = others(peers, me).map(|(_, peer)| peer.contributed.front(element).len());
        let count = fronts.min()?.min(left.len()).min(PIECE_BYTES) / element * element;
        if count == 0 {
            return None;
        }
        let own = &self.own[left.start..left.start + count];
        let mut parts: Vec<&[u8]> = Vec::with_capacity(peers.len());
        for (node, peer) in peers.iter_mut().enumerate() {
            match node == me {
                true => parts.push(own),
                false => parts.push(&peer.contributed.front(element)[..count]),
            }
        }
        let sum = reduce(self.element, &parts, self.divisor);
        for (_, peer) in others(peers, me) {
            peer.contributed.advance(count);
        }
        Some(sum.into())
    }
}

fn others(peers: &mut [Peer], me: usize) -> impl Iterator<Item = (usize, &mut Peer)> {
    peers
        .iter_mut()
        .enumerate()
        .filter(move |(node, _)| *node != me)
}

fn fail(done: &mut Vec<Done>, local: Vec<(usize, u64, Bytes)>, failure: &Failure) {
    for (rank, ticket, _) in local {
        let result = Err(failure.clone());
        done.push(Done {
            rank,
            ticket,
            result,
        });
    }
}

/// What all ranks bring, if they bring the same: element type, bytes, and whether
/// the mean is asked for. Every worker comes to the same answer.
fn agree(arrivals: &[&Arrival], ranks: &[Rank]) -> Result<(Element, usize, bool), Failure> {
    if let Some(fault) = arrivals.iter().find_map(|arrival| arrival.fault.clone()) {
        return Err(Failure::Inherited(fault));
    }
    let mismatch = |reason: String| Err(Failure::New(FaultKind::Mismatch, reason));
    let kind = |arrival: &Arrival| {
        let what = if arrival.mean { "mean" } else { "sum" };
        format!(
            "{} of {} for the {what}",
            arrival.shape,
            arrival.dtype.name()
        )
    };
    let (first, rest) = arrivals.split_first().expect("a group has ranks");
    if let Some(at) = rest.iter().position(|arrival| arrival != first) {
        let other = at + 1;
        let (one, two) = (&ranks[0].place, &ranks[other].place);
        return mismatch(format!(
            "rank 0 ({one}) brings {}, rank {other} ({two}) {}",
            kind(first),
            kind(rest[at])
        ));
    }
    let Some(element) = Element::of(first.dtype) else {
        let count = ranks.len();
        return mismatch(format!(
            "an all-reduce takes f64, f32, f16 or bf16, and ranks 0 to {} bring {}",
            count - 1,
            kind(first)
        ));
    };
    match tensor_bytes(&first.shape, first.dtype) {
        Some(size) => Ok((element, size, first.mean)),
        None => mismatch(format!("{} is beyond what can be addressed", kind(first))),
    }
}
