//! The open all-reduces of a group: those that are not over yet.

use std::{collections::VecDeque, ops::Range, time::Instant};

use bytes::Bytes;

use super::{
    super::{
        algorithm::{Arrival, Done, Failure},
        reduce::{Element, reduce},
    },
    layout,
};

/// Calls in order, by number.
#[derive(Debug, Default)]
pub(super) struct Calls {
    open: VecDeque<Call>,
    /// The number of the first open call.
    first: u64,
    /// Calls before this number are decided: they run, or have failed.
    decided: u64,
    /// Bytes of the local ranks' tensors in open calls. Also the limit for the bytes of each
    /// kind that are queued from another worker.
    open_bytes: usize,
}

/// An all-reduce.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) arrivals: Vec<Option<Arrival>>,
    /// The local ranks that have arrived: rank, ticket and bytes.
    pub(super) local: Vec<(usize, u64, Bytes)>,
    open_bytes: usize,
    /// When the first local rank arrived.
    pub(super) since: Option<Instant>,
    running: Option<Running>,
}

/// A call that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) number: u64,
    pub(super) route: Route,
    pub(super) element: Element,
    pub(super) divisor: Option<u32>,
    /// This worker's contribution: the sum of its ranks' tensors.
    pub(super) own: Bytes,
    /// The result, as far as it is known.
    pub(super) result: Vec<u8>,
}

/// How slices travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// The slices stay here, as all ranks are on this worker.
    Local,
    Direct,
    Ring,
}

impl Running {
    /// Returns the range of bytes that `worker_index` of `worker_count` reduces.
    pub(super) fn slice(&self, worker_index: usize, worker_count: usize) -> Range<usize> {
        let (size, element) = (self.own.len(), self.element.bytes());
        layout::slice(size, element, self.number, worker_count, worker_index)
    }

    /// Returns the sum of `parts`. If this is the last addition, divides for a mean.
    pub(super) fn sum(&self, parts: &[&[u8]], is_last: bool) -> Bytes {
        let divisor = self.divisor.filter(|_| is_last);
        reduce(self.element, parts, divisor).into()
    }

    /// Copies a part of the result to its place, from the byte `at` on.
    pub(super) fn copy_to_result(&mut self, at: usize, bytes: &[u8]) {
        self.result[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Calls {
    /// Returns the number of the first open call.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn decided(&self) -> u64 {
        self.decided
    }

    pub(super) fn open_bytes(&self) -> usize {
        self.open_bytes
    }

    /// Returns the first open call.
    pub(super) fn front(&self) -> Option<&Call> {
        self.open.front()
    }

    /// Returns the call with this number, if it runs: it is decided, has not failed and is
    /// not over.
    pub(super) fn running(&mut self, number: u64) -> Option<&mut Running> {
        let at = number.checked_sub(self.first)?;
        self.open.get_mut(at as usize)?.running.as_mut()
    }

    /// Records that `rank` of `ranks` has reached the call with this number.
    pub(super) fn record_arrival(
        &mut self,
        number: u64,
        rank: usize,
        ranks: usize,
        arrival: Arrival,
    ) {
        let at = (number - self.first) as usize;
        while self.open.len() <= at {
            self.open.push_back(Call {
                arrivals: vec![None; ranks],
                local: Vec::new(),
                open_bytes: 0,
                since: None,
                running: None,
            });
        }
        self.open[at].arrivals[rank] = Some(arrival);
    }

    /// Records that the local `rank` has reached the call with this number.
    pub(super) fn record_local_arrival(
        &mut self,
        number: u64,
        rank: usize,
        ticket: u64,
        bytes: Bytes,
        now: Instant,
    ) {
        self.open_bytes += bytes.len();
        let call = &mut self.open[(number - self.first) as usize];
        call.open_bytes += bytes.len();
        call.local.push((rank, ticket, bytes));
        call.since.get_or_insert(now);
    }

    /// Takes the next call to decide, and its number, if all its arrivals are known.
    pub(super) fn next_to_decide(&mut self) -> Option<(u64, &mut Call)> {
        let number = self.decided;
        let call = self.open.get_mut((number - self.first) as usize)?;
        if call.arrivals.iter().any(Option::is_none) {
            return None;
        }
        self.decided += 1;
        Some((number, call))
    }

    /// Removes the first open call.
    pub(super) fn pop(&mut self) -> Option<Call> {
        let call = self.open.pop_front()?;
        self.first += 1;
        self.open_bytes -= call.open_bytes;
        Some(call)
    }
}

impl Call {
    pub(super) fn run(&mut self, running: Running) -> &Running {
        self.running.insert(running)
    }

    /// Returns how the call's slices travel, if it runs.
    pub(super) fn route(&self) -> Option<Route> {
        self.running.as_ref().map(|running| running.route)
    }

    /// Returns the running part, if the call runs, and its local ranks.
    pub(super) fn into_parts(self) -> (Option<Running>, Vec<(usize, u64, Bytes)>) {
        (self.running, self.local)
    }
}

/// Ends a call: appends `result` for each of its `local` ranks to `done`.
pub(super) fn end(
    done: &mut Vec<Done>,
    local: Vec<(usize, u64, Bytes)>,
    result: &Result<Bytes, Failure>,
) {
    for (rank, ticket, _) in local {
        let result = result.clone();
        done.push(Done {
            rank,
            ticket,
            result,
        });
    }
}
