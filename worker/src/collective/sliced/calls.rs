//! The all-reduces of a group that are not over.

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
    /// The number of the first.
    first: u64,
    /// Calls before this one are decided: they run, or have failed.
    decided: u64,
    /// Bytes that local ranks brought to them: what others may send at most.
    open_bytes: usize,
}

/// An all-reduce.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) arrivals: Vec<Option<Arrival>>,
    /// Of local ranks: rank, ticket and bytes.
    pub(super) local: Vec<(usize, u64, Bytes)>,
    open_bytes: usize,
    /// When the first local rank came.
    pub(super) since: Option<Instant>,
    running: Option<Running>,
}

/// A call that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) number: u64,
    pub(super) way: Way,
    pub(super) element: Element,
    pub(super) divisor: Option<u32>,
    /// What this worker brings.
    pub(super) own: Bytes,
    /// What comes of it, as far as that is known.
    pub(super) result: Vec<u8>,
}

/// How slices travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Nowhere: there is one worker.
    Home,
    Direct,
    Ring,
}

impl Running {
    /// The bytes that `node` of `nodes` reduces.
    pub(super) fn slice(&self, node: usize, nodes: usize) -> Range<usize> {
        let (size, element) = (self.own.len(), self.element.bytes());
        layout::slice(size, element, self.number, nodes, node)
    }

    /// The sum of `parts`, divided if it is to be and the last.
    pub(super) fn sum(&self, parts: &[&[u8]], is_last: bool) -> Bytes {
        let divisor = self.divisor.filter(|_| is_last);
        reduce(self.element, parts, divisor).into()
    }

    /// Puts a part of the result, from the byte `at` on, where it belongs.
    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.result[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Calls {
    /// The number of the first call that is not over.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn decided(&self) -> u64 {
        self.decided
    }

    pub(super) fn open_bytes(&self) -> usize {
        self.open_bytes
    }

    /// The first call that is not over.
    pub(super) fn front(&self) -> Option<&Call> {
        self.open.front()
    }

    /// The call of that number if it runs; none that is over or undecided does.
    pub(super) fn running(&mut self, number: u64) -> Option<&mut Running> {
        let at = number.checked_sub(self.first)?;
        self.open.get_mut(at as usize)?.running.as_mut()
    }

    /// Notes that `rank` of `ranks` came to the call of that number.
    pub(super) fn note(&mut self, number: u64, rank: usize, ranks: usize, arrival: Arrival) {
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

    /// Notes that `rank`, which is here, came to the call of that number.
    pub(super) fn note_local(
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

    /// The next call to decide, and its number, if all arrivals are known.
    pub(super) fn next_to_decide(&mut self) -> Option<(u64, &mut Call)> {
        let number = self.decided;
        let call = self.open.get_mut((number - self.first) as usize)?;
        if call.arrivals.iter().any(Option::is_none) {
            return None;
        }
        self.decided += 1;
        Some((number, call))
    }

    /// Takes the first call.
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

    /// How it travels, if it runs.
    pub(super) fn way(&self) -> Option<Way> {
        self.running.as_ref().map(|running| running.way)
    }

    /// What runs, and whose.
    pub(super) fn into_parts(self) -> (Option<Running>, Vec<(usize, u64, Bytes)>) {
        (self.running, self.local)
    }
}

/// Ends a call of `local` ranks.
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
