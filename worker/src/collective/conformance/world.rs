//! A group whose workers exchange messages in memory.

use std::time::Instant;

use burn_backend::{DType, Shape};

use super::{
    super::algorithm::{Algorithm, Arrival, Failure, GroupMessage, Rank},
    Make,
};

/// The result of an all-reduce of `f32`.
pub(super) type Sum = Result<Vec<f32>, Failure>;

/// A group spread over workers, with one state machine for each worker.
pub(super) struct World {
    pub(super) groups: Vec<Box<dyn Algorithm>>,
    pub(super) worker_of_rank: Vec<usize>,
    pub(super) now: Instant,
    /// Bytes sent by each worker.
    pub(super) sent: Vec<usize>,
    /// By rank: tickets and results.
    pub(super) done: Vec<Vec<(u64, Sum)>>,
}

impl World {
    /// Creates a group with one rank for each entry of `worker_of_rank`, on the worker of that
    /// number.
    pub(super) fn new(make: Make, worker_of_rank: &[usize]) -> Self {
        let rank = |&worker_index: &usize| Rank {
            worker_index,
            description: format!("device 0 of worker w{worker_index}"),
        };
        let ranks: Vec<Rank> = worker_of_rank.iter().map(rank).collect();
        let workers = worker_of_rank.iter().max().unwrap() + 1;
        let group = |me| make(ranks.clone(), me);
        Self {
            groups: (0..workers).map(group).collect(),
            worker_of_rank: worker_of_rank.to_vec(),
            now: Instant::now(),
            sent: vec![0; workers],
            done: vec![Vec::new(); worker_of_rank.len()],
        }
    }

    pub(super) fn arrive(&mut self, rank: usize, ticket: u64, values: &[f32]) {
        let arrival = Arrival {
            shape: Shape::new([values.len()]),
            dtype: DType::F32,
            mean: false,
            fault: None,
            ring_bytes: None,
        };
        self.arrive_as(rank, ticket, arrival, values);
    }

    pub(super) fn arrive_as(&mut self, rank: usize, ticket: u64, arrival: Arrival, values: &[f32]) {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let worker_index = self.worker_of_rank[rank];
        self.groups[worker_index].arrive(rank, ticket, arrival, bytes, self.now);
    }

    /// Delivers one message of `from` to `to`. Returns false if there is none.
    pub(super) fn deliver(&mut self, from: usize, to: usize) -> bool {
        let Some(message) = self.groups[from].next(to) else {
            return false;
        };
        let (group, now) = (&mut self.groups[to], self.now);
        match message {
            GroupMessage::Arrivals(arrivals) => arrivals
                .into_iter()
                .for_each(|(rank, arrival)| group.on_arrival(from, rank, arrival, now).unwrap()),
            GroupMessage::Piece(piece) => {
                self.sent[from] += piece.bytes.len();
                group.piece(from, piece, now).unwrap();
            }
            GroupMessage::Abort(reason) => group.aborted(from, &reason),
        }
        true
    }

    pub(super) fn pairs(&self) -> Vec<(usize, usize)> {
        let workers = 0..self.groups.len();
        let pairs = workers
            .clone()
            .flat_map(|a| workers.clone().map(move |b| (a, b)));
        pairs.filter(|(a, b)| a != b).collect()
    }

    pub(super) fn deliver_all(&mut self) {
        while self
            .pairs()
            .into_iter()
            .any(|(from, to)| self.deliver(from, to))
        {}
        self.collect();
    }

    pub(super) fn collect(&mut self) {
        for group in &mut self.groups {
            for done in group.take_done() {
                let result = done.result.map(|bytes| {
                    let values = bytes.as_chunks::<4>().0.iter();
                    values.map(|v| f32::from_le_bytes(*v)).collect()
                });
                self.done[done.rank].push((done.ticket, result));
            }
        }
    }

    /// Returns the failure of `ticket`, which must be the same on every rank.
    pub(super) fn failure(&self, ticket: u64) -> Failure {
        let of = |done: &Vec<(u64, Result<_, Failure>)>| {
            let (_, result) = done.iter().find(|(t, _)| *t == ticket).unwrap();
            result.clone().unwrap_err()
        };
        let failures: Vec<Failure> = self.done.iter().map(of).collect();
        assert!(failures.iter().all(|f| f == &failures[0]), "{failures:?}");
        failures[0].clone()
    }
}
