//! All-reduces in which each worker reduces one slice: reduce-scatter and all-gather.
//!
//! Each worker sends 2 (n - 1) / n of the tensor, which is the minimum (Patarasuk and
//! Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
//! Slices travel in one of two ways: [`Direct`] between all workers, or round a
//! [`Ring`], for large slices over links that one connection fills. Each worker
//! measures its own links and announces in its arrivals from which size on it would
//! use a ring; from these all workers draw the same conclusion.
//!
//! Once a worker knows all arrivals of a call, the call is *decided*: it runs, or it
//! fails on every rank with the same message. Only calls that run send bytes, so a
//! receiver knows by the order of the bytes which call they belong to.
//!
//! Between two workers, the slices of successive calls form one byte stream for each
//! kind of piece. So successive small tensors travel together, and no call waits for
//! the end of the previous one.
//!
//! If a worker has several ranks, their tensors are added up before it sends anything.

mod agree;
mod buffers;
mod calls;
mod direct;
mod layout;
mod queue;
mod ring;
mod send_queues;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::v1::{FaultKind, PieceKind};

use self::{
    agree::{Agreed, agree},
    buffers::BufferPool,
    calls::{Calls, Route, Running, end},
    direct::Direct,
    ring::Ring,
    send_queues::SendQueues,
};
use super::{
    algorithm::{Algorithm, Arrival, Done, Failure, GroupMessage, PeerViolation, Piece, Rank},
    reduce::{Element, reduce},
};

/// Maximum number of arrivals in a frame.
const ARRIVALS_PER_FRAME: usize = 256;

/// How much longer than the deadline a worker waits if it does not know which worker
/// is at fault. Workers that do know abort the group in that time.
const BLAME_GRACE: Duration = Duration::from_secs(1);

/// Maximum number of all-reduces by which a rank may be ahead of the slowest rank.
const MAX_AHEAD: u64 = 1 << 16;

/// One worker's part of a group whose all-reduces are computed in slices, each by one worker. It
/// has a field for each part of the algorithm, and the settings that they share.
#[derive(Debug)]
pub(crate) struct Sliced {
    ranks: Vec<Rank>,
    /// For each rank, the number of all-reduces that the rank has reached.
    arrived: Vec<u64>,
    /// This worker's number, and the number of workers.
    me: usize,
    worker_count: usize,
    calls: Calls,
    direct: Direct,
    ring: Ring,
    /// The smallest slice, in bytes, that this worker would send round a ring.
    ring_bytes: Option<u64>,
    /// By worker: pending messages other than pieces.
    arrivals: Vec<VecDeque<(usize, Arrival)>>,
    aborts: Vec<Option<Arc<str>>>,
    send_queues: SendQueues,
    /// When a call was last decided or a piece last received.
    last_progress: Option<Instant>,
    abort_reason: Option<Arc<str>>,
    done: Vec<Done>,
    buffers: BufferPool,
}

impl Sliced {
    /// Creates a group of `ranks`, of which those on worker `me` are local.
    pub(crate) fn new(ranks: Vec<Rank>, me: usize) -> Self {
        let worker_count = ranks
            .iter()
            .map(|rank| rank.worker_index + 1)
            .max()
            .unwrap_or(1);
        Self {
            arrived: vec![0; ranks.len()],
            ranks,
            me,
            worker_count,
            calls: Calls::default(),
            direct: Direct::new(me, worker_count),
            ring: Ring::new(me, worker_count),
            ring_bytes: None,
            arrivals: vec![VecDeque::new(); worker_count],
            aborts: vec![None; worker_count],
            send_queues: SendQueues::new(worker_count),
            last_progress: None,
            abort_reason: None,
            done: Vec::new(),
            buffers: BufferPool::default(),
        }
    }

    /// Returns why the group must end if others have kept local ranks waiting for
    /// `deadline`.
    ///
    /// Only the first open call shows which rank is to blame: a rank that has not
    /// reached a later call may itself be waiting for the first.
    fn timeout_reason(&self, now: Instant, deadline: Duration, silent: &[usize]) -> Option<String> {
        let call = self.calls.front()?;
        let since = call.since?;
        let since = self
            .last_progress
            .map_or(since, |last_progress| last_progress.max(since));
        let waited = now.saturating_duration_since(since);
        if waited < deadline {
            return None;
        }
        let first = self.calls.first();
        let number = first + 1;
        let (late, are_at_fault) = match call.route() {
            None => {
                let ranks = (0..self.ranks.len()).filter(|rank| call.arrivals[*rank].is_none());
                let ranks = self.describe_ranks(ranks);
                return Some(format!(
                    "{ranks} did not reach all-reduce {number} of the group within {deadline:?}"
                ));
            }
            // In a ring each worker waits for the one before it, but only one of these
            // is at fault.
            Some(Route::Ring) if silent.is_empty() => (vec![self.ring.previous()], false),
            Some(Route::Ring) => (silent.to_vec(), true),
            Some(_) => self.direct.late(first),
        };
        let timeout = match are_at_fault {
            true => deadline,
            false => deadline + BLAME_GRACE,
        };
        let ranks =
            (0..self.ranks.len()).filter(|rank| late.contains(&self.ranks[*rank].worker_index));
        let ranks = self.describe_ranks(ranks);
        (waited >= timeout).then(|| {
            format!("{ranks} sent no data of all-reduce {number} of the group for {timeout:?}")
        })
    }

    fn describe_ranks(&self, ranks: impl Iterator<Item = usize>) -> String {
        let name = |rank: usize| format!("rank {rank} ({})", self.ranks[rank].description);
        ranks.map(name).collect::<Vec<_>>().join(", ")
    }

    /// Records that `rank` has reached its next call. Returns the call's number.
    fn record_arrival(&mut self, rank: usize, arrival: Arrival) -> u64 {
        let number = self.arrived[rank];
        self.arrived[rank] += 1;
        self.calls
            .record_arrival(number, rank, self.ranks.len(), arrival);
        number
    }

    /// Advances every call as far as the received data allows.
    fn advance(&mut self, now: Instant) {
        while self.decide() {
            self.last_progress = Some(now);
        }
        self.direct.advance(&mut self.calls, &mut self.send_queues);
        self.ring.advance(&mut self.calls, &mut self.send_queues);
        self.finish();
    }

    /// Decides the next call, if all its arrivals are known. Returns whether it did.
    fn decide(&mut self) -> bool {
        let Some((number, call)) = self.calls.next_to_decide() else {
            return false;
        };
        let arrivals: Vec<&Arrival> = call.arrivals.iter().flatten().collect();
        let agreed = match agree(&arrivals, &self.ranks) {
            Ok(agreed) => agreed,
            Err(failure) => {
                let local = std::mem::take(&mut call.local);
                end(&mut self.done, local, &Err(failure));
                return true;
            }
        };
        let Agreed { element, size, .. } = agreed;
        let route = route(&agreed, self.worker_count);
        let divisor = agreed.mean.then_some(self.ranks.len() as u32);
        call.local.sort_unstable_by_key(|(rank, ..)| *rank);
        let parts: Vec<&[u8]> = call.local.iter().map(|(_, _, bytes)| &bytes[..]).collect();
        let own = match &parts[..] {
            _ if route == Route::Local => reduce(element, &parts, divisor).into(),
            [_] => call.local[0].2.clone(),
            parts => reduce(element, parts, None).into(),
        };
        let result = match route {
            Route::Local => Vec::new(),
            Route::Direct | Route::Ring => self.buffers.take(size),
        };
        let running = call.run(Running {
            number,
            route,
            element,
            divisor,
            own,
            result,
        });
        if route == Route::Direct {
            self.direct.begin(running, &mut self.send_queues);
        }
        true
    }

    /// Removes calls that are over and delivers their results.
    fn finish(&mut self) {
        let over = self
            .direct
            .finished_before()
            .min(self.ring.finished_before());
        while self.calls.first() < over
            && let Some(call) = self.calls.pop()
        {
            let (Some(running), local) = call.into_parts() else {
                continue;
            };
            let result = match running.route {
                Route::Local => running.own,
                Route::Direct | Route::Ring => self.buffers.wrap(running.result),
            };
            end(&mut self.done, local, &Ok(result));
        }
    }
}

/// Returns how the slices of a call travel between `worker_count` workers: round a ring if all
/// workers would use one for slices of this size. Half types never use a ring, which would
/// round them at each step, and tensors that are not cut have no slices.
fn route(agreed: &Agreed, worker_count: usize) -> Route {
    let is_rounded_once = matches!(agreed.element, Element::F32 | Element::F64);
    let can_use_ring = is_rounded_once && layout::is_cut(agreed.size);
    let slice_bytes = (agreed.size / worker_count) as u64;
    match agreed.ring_bytes {
        _ if worker_count == 1 => Route::Local,
        Some(least) if worker_count > 2 && can_use_ring && slice_bytes >= least => Route::Ring,
        _ => Route::Direct,
    }
}

impl Algorithm for Sliced {
    fn arrive(
        &mut self,
        rank: usize,
        ticket: u64,
        mut arrival: Arrival,
        bytes: Bytes,
        now: Instant,
    ) {
        if let Some(reason) = &self.abort_reason {
            let failure = Failure::New(FaultKind::Peer, reason.to_string());
            return end(&mut self.done, vec![(rank, ticket, bytes)], &Err(failure));
        }
        arrival.ring_bytes = self.ring_bytes;
        for worker_index in (0..self.worker_count).filter(|worker_index| *worker_index != self.me) {
            self.arrivals[worker_index].push_back((rank, arrival.clone()));
        }
        let number = self.record_arrival(rank, arrival);
        self.calls
            .record_local_arrival(number, rank, ticket, bytes, now);
        self.advance(now);
    }

    fn on_arrival(
        &mut self,
        worker_index: usize,
        rank: usize,
        arrival: Arrival,
        now: Instant,
    ) -> Result<(), PeerViolation> {
        if self
            .ranks
            .get(rank)
            .is_none_or(|rank| rank.worker_index != worker_index)
        {
            let ranks = self.ranks.len();
            return Err(PeerViolation::new(format!(
                "worker {worker_index} announced rank {rank} of {ranks}, which is not a rank of that worker"
            )));
        }
        if self.abort_reason.is_some() {
            return Ok(());
        }
        if self.arrived[rank] >= self.calls.first() + MAX_AHEAD {
            let rule = format!("rank {rank} is more than {MAX_AHEAD} all-reduces ahead");
            return Err(PeerViolation::new(rule));
        }
        self.record_arrival(rank, arrival);
        self.advance(now);
        Ok(())
    }

    fn piece(
        &mut self,
        worker_index: usize,
        piece: Piece,
        now: Instant,
    ) -> Result<(), PeerViolation> {
        // Pieces keep a call from its deadline.
        if piece.bytes.is_empty() {
            let rule = format!("worker {worker_index} sent a piece without bytes");
            return Err(PeerViolation::new(rule));
        }
        if self.abort_reason.is_some() {
            return Ok(());
        }
        let unused = match piece.kind {
            PieceKind::Part => self.direct.take(worker_index, false, piece.bytes),
            PieceKind::Sum => self.direct.take(worker_index, true, piece.bytes),
            PieceKind::Ring if worker_index == self.ring.previous() => self.ring.take(piece.bytes),
            PieceKind::Ring => {
                let (me, previous) = (self.me, self.ring.previous());
                let rule = format!(
                    "worker {worker_index} sent a ring piece to worker {me}, but worker {previous} is \
                     before it in the ring"
                );
                return Err(PeerViolation::new(rule));
            }
        };
        if unused > self.calls.open_bytes() {
            let rule = format!("worker {worker_index} sent more bytes than the open calls have");
            return Err(PeerViolation::new(rule));
        }
        self.last_progress = Some(now);
        self.advance(now);
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        if self.abort_reason.is_some() {
            return;
        }
        let reason: Arc<str> = reason.into();
        let failure = Err(Failure::New(FaultKind::Peer, reason.to_string()));
        while let Some(call) = self.calls.pop() {
            let (_, local) = call.into_parts();
            end(&mut self.done, local, &failure);
        }
        self.direct = Direct::new(self.me, self.worker_count);
        self.ring = Ring::new(self.me, self.worker_count);
        self.send_queues.clear();
        self.arrivals.iter_mut().for_each(VecDeque::clear);
        self.aborts.fill(Some(reason.clone()));
        self.abort_reason = Some(reason);
    }

    fn aborted(&mut self, worker_index: usize, reason: &str) {
        self.abort(reason);
        // No need to send the abort back to `worker_index`.
        self.aborts[worker_index] = None;
    }

    fn tick(&mut self, now: Instant, deadline: Duration, silent: &[usize]) {
        if let Some(reason) = self.timeout_reason(now, deadline, silent) {
            self.abort(&reason);
        }
    }

    fn set_ring_bytes(&mut self, slice_bytes: Option<u64>) {
        self.ring_bytes = slice_bytes;
    }

    fn has_message(&self, worker_index: usize) -> bool {
        self.aborts[worker_index].is_some()
            || !self.arrivals[worker_index].is_empty()
            || self.send_queues.has_pending(worker_index)
    }

    fn next(&mut self, worker_index: usize) -> Option<GroupMessage> {
        if let Some(reason) = self.aborts[worker_index].take() {
            return Some(GroupMessage::Abort(reason));
        }
        let arrivals = &mut self.arrivals[worker_index];
        if !arrivals.is_empty() {
            let count = arrivals.len().min(ARRIVALS_PER_FRAME);
            return Some(GroupMessage::Arrivals(arrivals.drain(..count).collect()));
        }
        self.send_queues.next(worker_index).map(GroupMessage::Piece)
    }

    fn lead_bytes(&self, worker_index: usize) -> Option<i64> {
        self.send_queues.lead_bytes(worker_index)
    }

    fn take_done(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.done)
    }
}

#[cfg(test)]
mod tests;
