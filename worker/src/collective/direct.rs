//! Reduce-scatter and all-gather directly between all workers of a group.
//!
//! Each worker sends every other the slice that one is to reduce, adds up the
//! contributions to its own slice in the order of the workers, and sends the sums
//! back. That is 2 (n - 1) / n of the tensor sent by each of n workers, as in a
//! ring, which is the least there can be (Patarasuk and Yuan, "Bandwidth optimal
//! all-reduce algorithms for clusters of workstations", 2009). Against a ring it
//! takes two messages of latency however many workers there are, adds up all
//! contributions in one place, so that half types are rounded once, and everybody
//! hears from everybody, so that whoever is missing is known by name.
//!
//! Once a worker knows all arrivals of a call, the call is *decided*: it runs, or
//! it fails for everybody with the same words. Bytes flow only for calls that run,
//! so they always find their place.
//!
//! Between two workers the slices of successive calls make one stream of bytes
//! each way for each of the two halves. So small tensors that follow each other
//! travel together, and no call waits for the end of the one before.
//!
//! Several ranks of one worker are added up there, before anything is sent.

mod agree;
mod buffers;
mod layout;
mod queue;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use tensord_proto::v1::FaultKind;

use self::{agree::agree, buffers::Buffers, queue::ByteQueue};
use super::{
    algorithm::{Algorithm, Arrival, Broke, Done, Failure, Rank, Say},
    reduce::{Element, reduce},
};

/// Bytes of a piece, about: small enough that reducing one overlaps with the
/// travel of the next, and large against what a frame costs.
const PIECE_BYTES: usize = 256 << 10;

/// Arrivals in a frame, at most.
const ARRIVALS_PER_FRAME: usize = 256;

/// How much longer than the deadline a worker waits that cannot tell who is at fault:
/// time for those who can to say so.
const SECOND_HAND: Duration = Duration::from_secs(1);

/// All-reduces that a rank may be ahead of the slowest.
const MAX_AHEAD: u64 = 1 << 16;

/// A group at one worker.
#[derive(Debug)]
pub(crate) struct Direct {
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
    buffers: Buffers,
}

/// Another worker of the group; this worker's own entry is not used.
#[derive(Debug, Default)]
struct Peer {
    arrivals: VecDeque<(usize, Arrival)>,
    pieces: VecDeque<(bool, Bytes)>,
    /// Bytes of pieces that were said, since there last were none for anybody.
    said_bytes: u64,
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

impl Direct {
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
            buffers: Buffers::default(),
        }
    }

    /// Why the group is over, if others have kept local ranks waiting for `deadline`.
    ///
    /// Only the first call that is not over says who is to blame: a rank that has not
    /// come to a later one may itself wait for the first.
    fn overdue(&self, now: Instant, deadline: Duration) -> Option<String> {
        let call = self.calls.front()?;
        let since = call.since?;
        let since = self.progress.map_or(since, |progress| progress.max(since));
        let waited = now.saturating_duration_since(since);
        let number = self.first + 1;
        if self.decided == self.first {
            let ranks = (0..self.ranks.len()).filter(|rank| call.arrivals[*rank].is_none());
            let ranks = self.name(ranks);
            return (waited >= deadline).then(|| {
                format!(
                    "{ranks} did not come to all-reduce {number} of the group within {deadline:?}"
                )
            });
        }
        // Who owes a slice that it was to reduce may wait for somebody's part of it,
        // and knows better whose.
        let patience = match self.reducing == self.first {
            true => deadline,
            false => deadline + SECOND_HAND,
        };
        let late = self.late();
        let ranks = (0..self.ranks.len()).filter(|rank| late.contains(&self.ranks[*rank].node));
        let ranks = self.name(ranks);
        (waited >= patience).then(|| {
            format!("{ranks} sent nothing of all-reduce {number} of the group for {patience:?}")
        })
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

    /// Counts bytes of a piece that is said to `node`.
    fn count(&mut self, node: usize, bytes: usize) {
        self.peers[node].said_bytes += bytes as u64;
        if self.peers.iter().all(|peer| peer.pieces.is_empty()) {
            self.peers.iter_mut().for_each(|peer| peer.said_bytes = 0);
        }
    }

    fn name(&self, ranks: impl Iterator<Item = usize>) -> String {
        let name = |rank: usize| format!("rank {rank} ({})", self.ranks[rank].place);
        ranks.map(name).collect::<Vec<_>>().join(", ")
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
            result: match nodes {
                1 => Vec::new(),
                _ => self.buffers.take(size),
            },
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
                _ => self.buffers.lend(running.result),
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

impl Algorithm for Direct {
    fn arrive(&mut self, rank: usize, ticket: u64, arrival: Arrival, bytes: Bytes, now: Instant) {
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

    fn heard(
        &mut self,
        node: usize,
        rank: usize,
        arrival: Arrival,
        now: Instant,
    ) -> Result<(), Broke> {
        if self.ranks.get(rank).is_none_or(|rank| rank.node != node) {
            let ranks = self.ranks.len();
            return Err(Broke::new(format!(
                "worker {node} speaks for rank {rank} of {ranks}, which is not there"
            )));
        }
        if self.broken.is_some() {
            return Ok(());
        }
        if self.arrived[rank] >= self.first + MAX_AHEAD {
            let rule = format!("rank {rank} is more than {MAX_AHEAD} all-reduces ahead");
            return Err(Broke::new(rule));
        }
        self.note(rank, arrival);
        self.advance(now);
        Ok(())
    }

    fn piece(
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
            return Err(Broke::new(rule));
        }
        self.progress = Some(now);
        self.advance(now);
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
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

    fn aborted(&mut self, node: usize, reason: &str) {
        self.abort(reason);
        // It knows.
        self.peers[node].abort = None;
    }

    fn tick(&mut self, now: Instant, deadline: Duration) {
        if let Some(reason) = self.overdue(now, deadline) {
            self.abort(&reason);
        }
    }

    fn has_news(&self, node: usize) -> bool {
        let peer = &self.peers[node];
        peer.abort.is_some() || !peer.arrivals.is_empty() || !peer.pieces.is_empty()
    }

    fn next(&mut self, node: usize) -> Option<Say> {
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
        self.count(node, bytes.len());
        Some(Say::Piece { reduced, bytes })
    }

    fn lead_bytes(&self, node: usize) -> i64 {
        let said = |peer: &Peer| peer.said_bytes as i64;
        let others = self.peers.len().max(2) as i64 - 1;
        let mean = self.peers.iter().map(said).sum::<i64>() / others;
        said(&self.peers[node]) - mean
    }

    fn take_done(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.done)
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

#[cfg(test)]
mod tests {
    use burn_backend::{DType, Shape};

    use super::{super::conformance, *};

    fn direct(ranks: Vec<Rank>, me: usize) -> Box<dyn Algorithm> {
        Box::new(Direct::new(ranks, me))
    }

    #[test]
    fn it_keeps_the_laws() {
        conformance::run(direct);
    }

    #[test]
    fn who_was_sent_more_than_the_others_leads() {
        let rank = |node| Rank {
            node,
            place: String::new(),
        };
        let mut group = Direct::new((0..3).map(rank).collect(), 0);
        let size = 3 * PIECE_BYTES;
        let arrival = Arrival {
            shape: Shape::new([size / 4]),
            dtype: DType::F32,
            mean: false,
            fault: None,
        };
        let now = Instant::now();
        group.arrive(0, 0, arrival.clone(), vec![0; size].into(), now);
        for node in 1..3 {
            group.heard(node, node, arrival.clone(), now).unwrap();
        }
        let mut say = |node| while !matches!(group.next(node), None | Some(Say::Piece { .. })) {};
        say(1);
        let piece = PIECE_BYTES as i64;
        assert_eq!(
            [1, 2].map(|node| group.lead_bytes(node)),
            [piece / 2, -piece / 2]
        );
        // Nothing waits for anybody then: what comes next begins anew.
        let mut say = |node| while group.next(node).is_some() {};
        say(2);
        assert_eq!([1, 2].map(|node| group.lead_bytes(node)), [0, 0]);
    }

    #[test]
    fn nothing_is_left_of_calls_that_are_over() {
        let rank = |node| Rank {
            node,
            place: String::new(),
        };
        let mut group = Direct::new(vec![rank(0), rank(0)], 0);
        let arrival = |size| Arrival {
            shape: Shape::new([size]),
            dtype: DType::F32,
            mean: false,
            fault: None,
        };
        let now = Instant::now();
        for call in 0..3 {
            for rank in 0..2 {
                // The second is a mismatch.
                let size = if call == 1 { 1 + rank } else { 1 };
                let bytes = vec![0; 4 * size].into();
                group.arrive(rank, call, arrival(size), bytes, now);
            }
        }
        assert_eq!(group.take_done().len(), 6);
        assert!(group.calls.is_empty());
        assert_eq!((group.open_bytes, group.first), (0, 3));
    }
}
