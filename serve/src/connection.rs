//! What a connection does: whether it has requests, and for how long its client has not taken an answer.
//!
//! HTTP's libraries have no time limit for a connection without a request, nor for a client that reads no answer. Either
//! would hold a place among the connections for ever.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};

/// How long a connection may be without a request after it has had one.
const IDLE: Duration = Duration::from_secs(120);

/// The requests of a connection. A state machine: the time is an argument.
#[derive(Debug)]
pub(crate) struct Activity {
    /// The number of the next request.
    next: u64,
    /// The requests that have no complete answer, each with since when there is one to take.
    open: BTreeMap<u64, Option<Instant>>,
    /// Since when there are none.
    idle_since: Instant,
    has_had_any: bool,
}

/// How long a connection may do what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Until its first request.
    pub(crate) first: Duration,
    /// For the taking of an answer.
    pub(crate) answer: Duration,
}

impl Activity {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            next: 0,
            open: BTreeMap::new(),
            idle_since: now,
            has_had_any: false,
        }
    }

    /// Adds a request and returns its number.
    fn begin(&mut self) -> u64 {
        self.has_had_any = true;
        self.next += 1;
        self.open.insert(self.next, None);
        self.next
    }

    /// The answer of a request is there to be taken.
    fn answered(&mut self, now: Instant, number: u64) {
        if let Some(since) = self.open.get_mut(&number) {
            since.get_or_insert(now);
        }
    }

    fn end(&mut self, now: Instant, number: u64) {
        self.open.remove(&number);
        self.idle_since = now;
    }

    /// Returns when the connection is to be closed, unless something changes.
    fn closes_at(&self, patience: Patience) -> Option<Instant> {
        if self.open.is_empty() {
            let most = if self.has_had_any {
                IDLE
            } else {
                patience.first
            };
            return Some(self.idle_since + most);
        }
        let first = self.open.values().flatten().min();
        first.map(|since| *since + patience.answer)
    }
}

/// The [`Activity`] of a connection that is served.
#[derive(Debug, Clone)]
pub(crate) struct Watched(Arc<Mutex<Activity>>);

impl Watched {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Activity::new(Instant::now()))))
    }

    /// Adds a request, which ends when the [`Request`] is dropped.
    pub(crate) fn begin(&self) -> Request {
        Request {
            number: self.lock().begin(),
            activity: self.clone(),
        }
    }

    /// Waits until the connection is to be closed.
    pub(crate) async fn expired(&self, patience: Patience) {
        // Often enough for limits of some seconds.
        let pause = patience
            .first
            .min(patience.answer)
            .min(Duration::from_secs(4))
            / 4;
        loop {
            let closes_at = self.lock().closes_at(patience);
            if closes_at.is_some_and(|at| Instant::now() >= at) {
                return;
            }
            tokio::time::sleep(pause.max(Duration::from_millis(10))).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Activity> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request of a connection, until its answer is complete.
#[derive(Debug)]
pub(crate) struct Request {
    number: u64,
    activity: Watched,
}

impl Request {
    /// Returns the body of the answer, with which the request ends.
    pub(crate) fn answered_with(self, body: Body) -> Body {
        self.activity.lock().answered(Instant::now(), self.number);
        Body::new(Answer {
            body,
            _request: self,
        })
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.activity.lock().end(Instant::now(), self.number);
    }
}

/// The body of an answer.
struct Answer {
    body: Body,
    _request: Request,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    const PATIENCE: Patience = Patience {
        first: Duration::from_secs(10),
        answer: Duration::from_secs(30),
    };

    /// Asserts after how many seconds the connection is closed.
    #[track_caller]
    fn check(activity: &Activity, start: Instant, expected: Option<u64>) {
        let at = activity.closes_at(PATIENCE);
        assert_eq!(at.map(|at| (at - start).as_secs()), expected);
    }

    #[test]
    fn a_connection_without_a_request_is_closed() {
        let start = Instant::now();
        let mut activity = Activity::new(start);
        check(&activity, start, Some(10));
        let first = activity.begin();
        check(&activity, start, None);
        activity.answered(start + 3 * SECOND, first);
        activity.end(start + 4 * SECOND, first);
        check(&activity, start, Some(4 + 120));
    }

    #[test]
    fn an_answer_that_is_not_taken_closes_the_connection() {
        let start = Instant::now();
        let mut activity = Activity::new(start);
        let (first, second) = (activity.begin(), activity.begin());
        activity.answered(start + 5 * SECOND, second);
        activity.answered(start + 7 * SECOND, second);
        check(&activity, start, Some(35));
        activity.end(start + 6 * SECOND, second);
        check(&activity, start, None);
        activity.answered(start + 8 * SECOND, first);
        check(&activity, start, Some(38));
    }
}
