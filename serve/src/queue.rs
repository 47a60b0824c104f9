//! The requests of a model that wait for a replica, and which of them make up a batch.
//!
//! A state machine: the time is an argument, and what a request is, is not known here.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::model::Batching;

/// Most different shapes of requests among which a full batch is looked for.
const MAX_SHAPES: usize = 8;

/// The weight of a batch in the average of the time that batches take.
const NEWEST_WEIGHT: f64 = 0.2;

/// After this time without a full batch, the average is forgotten: one batch that took very long must not keep requests
/// out for ever.
const FORGET_AFTER: Duration = Duration::from_secs(5);

/// The shapes of a request's inputs without the rows: requests with equal ones can be put together.
pub(crate) type RowShapes = Vec<Vec<usize>>;

/// A request that waits.
#[derive(Debug, Clone)]
pub(crate) struct Waiting<T> {
    pub(crate) request: T,
    pub(crate) rows: usize,
    pub(crate) row_shapes: RowShapes,
    pub(crate) since: Instant,
    /// After it, the request is not computed any more.
    pub(crate) deadline: Instant,
    /// Whether it must be computed alone: a batch with it has failed, maybe because of another request.
    pub(crate) is_alone: bool,
}

/// What to compute next.
#[derive(Debug)]
pub(crate) enum Next<T> {
    /// This batch, now.
    Batch(Vec<Waiting<T>>),
    /// A batch at this time, unless something changes before.
    At(Instant),
    /// Nothing, until something changes.
    Nothing,
}

/// A request for which there is no room.
#[derive(Debug)]
pub(crate) struct Full {
    /// Whether the queue is full; otherwise the request would wait beyond its deadline.
    pub(crate) is_full: bool,
    /// When there may be room.
    pub(crate) retry_after: Duration,
}

/// A batch takes very long after so many times the average of full batches.
const LONG_FACTOR: f64 = 8.0;

/// The least time after which a batch takes very long.
const LEAST_PATIENCE: Duration = Duration::from_millis(250);

/// The time after which a batch takes very long while there is no average.
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(10);

/// The requests that wait, the first first.
#[derive(Debug)]
pub(crate) struct BatchQueue<T> {
    batching: Batching,
    waiting: VecDeque<Waiting<T>>,
    rows: usize,
    /// How long full batches took, or any batches as long as none was full, in seconds.
    batch_seconds: Option<f64>,
    has_seen_full: bool,
    /// How long full batches usually take, in seconds. Unlike `batch_seconds`, it is never forgotten, and a batch that took
    /// very long hardly counts.
    usual_seconds: Option<f64>,
    /// When the last batch was computed that counts in `batch_seconds`.
    measured_at: Option<Instant>,
    /// How many replicas compute.
    replicas: usize,
}

impl<T> BatchQueue<T> {
    pub(crate) fn new(batching: Batching) -> Self {
        Self {
            batching,
            waiting: VecDeque::new(),
            rows: 0,
            batch_seconds: None,
            has_seen_full: false,
            usual_seconds: None,
            measured_at: None,
            replicas: 0,
        }
    }

    /// Returns the number of rows that wait.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns how long the first request has waited.
    pub(crate) fn oldest_wait(&self, now: Instant) -> Duration {
        let first = self.waiting.front();
        first.map_or(Duration::ZERO, |it| now.saturating_duration_since(it.since))
    }

    /// Sets how many replicas compute.
    pub(crate) fn set_replicas(&mut self, replicas: usize) {
        self.replicas = replicas;
    }

    /// Returns whether there is room for a request with so many rows.
    pub(crate) fn has_room(
        &self,
        now: Instant,
        rows: usize,
        deadline: Instant,
    ) -> Result<(), Full> {
        let wait = self.expected_wait(now, rows);
        let is_full = self.rows + rows > self.batching.max_queue;
        let is_late = now + wait > deadline;
        if !is_full && !is_late {
            return Ok(());
        }
        Err(Full {
            is_full,
            retry_after: wait / 2,
        })
    }

    /// Adds a request, for which there must be [room](Self::has_room).
    pub(crate) fn push(&mut self, request: Waiting<T>) {
        self.rows += request.rows;
        self.waiting.push_back(request);
    }

    /// Puts requests back to where they were, in front of all: they were accepted before.
    pub(crate) fn put_back(&mut self, requests: Vec<Waiting<T>>) {
        for request in requests.into_iter().rev() {
            self.rows += request.rows;
            self.waiting.push_front(request);
        }
    }

    /// Removes the requests whose deadline has passed, and those that were given up.
    pub(crate) fn remove_dead(&mut self, now: Instant, is_given_up: impl Fn(&T) -> bool) {
        let is_alive = |it: &Waiting<T>| it.deadline > now && !is_given_up(&it.request);
        self.waiting.retain(is_alive);
        self.rows = self.waiting.iter().map(|it| it.rows).sum();
    }

    /// Removes all requests.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
        self.rows = 0;
    }

    /// Takes the next batch for a replica, which is idle or computes a batch already.
    pub(crate) fn take(&mut self, now: Instant, is_idle: bool) -> Next<T> {
        let mut first_at = 0;
        for _ in 0..MAX_SHAPES {
            let Some(first) = self.waiting.get(first_at) else {
                break;
            };
            let (chosen, is_full) = self.batch_from(first_at);
            let due_at = first.since + self.batching.max_delay;
            if is_full && first_at > 0 && self.is_first_due(now) {
                // Otherwise full batches of another shape could keep the first request waiting for ever.
                let (chosen, _) = self.batch_from(0);
                return Next::Batch(self.remove(&chosen));
            }
            if is_full || is_idle && due_at <= now {
                return Next::Batch(self.remove(&chosen));
            }
            let shapes = &first.row_shapes;
            let mut others = self.waiting.iter().skip(first_at);
            match others.position(|it| it.row_shapes != *shapes) {
                Some(further) => first_at += further,
                None => break,
            }
        }
        match self.waiting.front().filter(|_| is_idle) {
            Some(first) => Next::At(first.since + self.batching.max_delay),
            None => Next::Nothing,
        }
    }

    /// Records that a replica has computed a batch of so many rows. `took` is the time of the device since the batch
    /// before had ended.
    pub(crate) fn computed(&mut self, now: Instant, padded_rows: usize, took: Duration) {
        let is_full = padded_rows >= self.batching.max_size;
        if is_full {
            self.full_took(took);
        }
        let took = took.as_secs_f64();
        let known = self.known_batch_seconds(now);
        self.batch_seconds = match known {
            Some(average) if is_full == self.has_seen_full => {
                Some(average + NEWEST_WEIGHT * (took - average))
            }
            // The time of a smaller batch is no measure of a full one.
            Some(_) if self.has_seen_full => return,
            Some(_) | None => Some(took),
        };
        self.has_seen_full = is_full;
        self.measured_at = Some(now);
    }

    /// Records how long a full batch took, also one of no requests.
    pub(crate) fn full_took(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.usual_seconds = Some(self.usual_seconds.map_or(took, |usual| {
            usual + NEWEST_WEIGHT * (took.min(LONG_FACTOR * usual) - usual)
        }));
    }

    /// Returns how long a batch may take before another replica computes its requests, too.
    pub(crate) fn patience(&self) -> Duration {
        self.usual_seconds.map_or(UNKNOWN_PATIENCE, |usual| {
            Duration::from_secs_f64(LONG_FACTOR * usual).max(LEAST_PATIENCE)
        })
    }

    fn known_batch_seconds(&self, now: Instant) -> Option<f64> {
        let measured_at = self.measured_at?;
        let is_known = now.saturating_duration_since(measured_at) < FORGET_AFTER;
        self.batch_seconds.filter(|_| is_known)
    }

    /// Returns whether the first request has waited for long enough for others.
    fn is_first_due(&self, now: Instant) -> bool {
        self.oldest_wait(now) >= self.batching.max_delay
    }

    /// Returns how long a request with so many rows would wait, and be computed; nothing if none wait before it, so that
    /// there is always one from which it is known how long batches take.
    fn expected_wait(&self, now: Instant, rows: usize) -> Duration {
        if self.rows == 0 {
            return Duration::ZERO;
        }
        let batches = (self.rows + rows).div_ceil(self.batching.max_size);
        let rounds = batches.div_ceil(self.replicas.max(1));
        Duration::from_secs_f64(self.known_batch_seconds(now).unwrap_or(0.0) * rounds as f64)
    }

    /// Returns the places of the requests that make up a batch with the one at `first`, and whether it is full.
    fn batch_from(&self, first: usize) -> (Vec<usize>, bool) {
        let head = &self.waiting[first];
        if head.is_alone {
            return (vec![first], true);
        }
        let (mut chosen, mut rows) = (Vec::new(), 0);
        for (index, it) in self.waiting.iter().enumerate().skip(first) {
            if it.is_alone || it.row_shapes != head.row_shapes {
                continue;
            }
            if rows + it.rows > self.batching.max_size {
                return (chosen, true);
            }
            rows += it.rows;
            chosen.push(index);
        }
        (chosen, rows >= self.batching.max_size)
    }

    /// Removes the requests at these places, which are in order.
    fn remove(&mut self, places: &[usize]) -> Vec<Waiting<T>> {
        let mut taken = Vec::with_capacity(places.len());
        for place in places.iter().rev() {
            taken.extend(self.waiting.remove(*place));
        }
        taken.reverse();
        self.rows -= taken.iter().map(|it| it.rows).sum::<usize>();
        taken
    }
}

/// Returns how many rows a batch with so many has: the next power of two, and at most `most`.
pub(crate) fn padded(rows: usize, most: usize) -> usize {
    rows.next_power_of_two().min(most).max(rows)
}

#[cfg(test)]
mod tests;
