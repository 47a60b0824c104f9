//! The thread that writes changes, and sums up what is written.
//!
//! Reports of workers do not wait for a write. Changes that wait become one: a sum for each lease and hour,
//! and a report for each grant. If the disk takes long, sums by lease become sums by user.

use std::{
    mem::take,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::oneshot;
use tracing::{error, info, warn};

use super::{
    MAX_QUERIES, UsageError,
    accounts::Changes,
    store::Store,
    totals::{Query, Totals},
};
use crate::scheduler::access::UnixMillis;

/// How long changes wait for others, unless they are urgent. A crash loses nothing by that, as workers
/// report sums, but the memory of snapshots in this time.
const WRITE_INTERVAL: Duration = Duration::from_secs(10);

/// Pause before changes that could not be written are tried again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// How often old sums are summed up and dropped.
const TIDY_INTERVAL: Duration = Duration::from_secs(3600);

/// How much more or less time the clock may show than has passed.
const MAX_DRIFT: Duration = Duration::from_secs(60);

/// What is done once all is written that was queued before.
#[derive(Debug)]
pub(super) enum Question {
    /// Sum up what is written.
    Sum(Query, oneshot::Sender<Result<Totals, UsageError>>),
    /// Reply.
    Written(oneshot::Sender<()>),
}

/// What the thread shares with those that queue changes.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Notified when the thread has something to do.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pending: Changes,
    /// When the first of the pending changes were queued.
    pending_since: Option<Instant>,
    is_urgent: bool,
    /// The numbers of the last changes that were queued, and that are written.
    queued: u64,
    written: u64,
    questions: Vec<Question>,
    is_closed: bool,
}

/// What the thread is to do.
struct Task {
    changes: Changes,
    questions: Vec<Question>,
    /// Whether there will be no more.
    is_last: bool,
}

impl Shared {
    /// Creates the state after the changes with the number `written`.
    pub(super) fn new(written: u64) -> Self {
        let state = State {
            queued: written,
            written,
            ..State::default()
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Returns new changes, which have the next number. They must be queued before others are made.
    pub(super) fn new_changes(&self) -> Changes {
        Changes {
            number: self.lock().queued + 1,
            ..Changes::default()
        }
    }

    /// Has changes written: soon if they are urgent, otherwise with later ones.
    pub(super) fn queue(&self, changes: Changes, is_urgent: bool) {
        if changes.is_empty() {
            return;
        }
        let mut state = self.lock();
        state.queued = changes.number;
        state.pending.append(changes);
        state.is_urgent |= is_urgent;
        if state.pending_since.is_none() || is_urgent {
            state.pending_since.get_or_insert_with(Instant::now);
            self.changed.notify_one();
        }
    }

    /// Has a question answered, after all that was queued so far is written or has failed.
    pub(super) fn ask(&self, question: Question) -> Result<(), UsageError> {
        let mut state = self.lock();
        // Whoever ends the process asks whether all is written, and has no time to ask again.
        let is_bounded = matches!(question, Question::Sum(..));
        if is_bounded && state.questions.len() >= MAX_QUERIES {
            return Err(UsageError::Busy);
        }
        state.questions.push(question);
        self.changed.notify_one();
        Ok(())
    }

    /// Returns the number of the last changes that are on disk.
    pub(super) fn written(&self) -> u64 {
        self.lock().written
    }

    /// Has the thread write what is pending, and end.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is something to do, or until `deadline`.
    fn take(&self, deadline: Instant) -> Task {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let write_at = state.pending_since.map(|since| since + WRITE_INTERVAL);
            let is_due = write_at.is_some_and(|at| now >= at);
            let has_work = state.is_urgent || state.is_closed || !state.questions.is_empty();
            if is_due || has_work || now >= deadline {
                break;
            }
            let until = write_at.map_or(deadline, |at| at.min(deadline));
            let waited = self.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        (state.is_urgent, state.pending_since) = (false, None);
        Task {
            changes: take(&mut state.pending),
            questions: take(&mut state.questions),
            is_last: state.is_closed,
        }
    }
}

/// The thread.
pub(super) struct Writer {
    shared: Arc<Shared>,
    store: Store,
    /// Changes that could not be written, as far as is known. They are tried again as they are, as the disk
    /// may have them.
    failed: Option<Changes>,
    /// Those that follow.
    later: Changes,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, store: Store) -> Self {
        Self {
            shared,
            store,
            failed: None,
            later: Changes::default(),
        }
    }

    /// Writes changes until there will be no more.
    pub(super) fn run(mut self) {
        // Not at once: a host that has just started may have a wrong time for a moment.
        let mut tidy_at = Instant::now() + TIDY_INTERVAL;
        let mut clock = (Instant::now(), UnixMillis::now());
        loop {
            let wake_at = match self.failed.is_some() {
                true => tidy_at.min(Instant::now() + RETRY_DELAY),
                false => tidy_at,
            };
            let Task {
                changes,
                questions,
                is_last,
            } = self.shared.take(wake_at);
            self.later.append(changes);
            self.write();
            for question in questions {
                self.answer(question);
            }
            if is_last {
                return;
            }
            if Instant::now() >= tidy_at {
                let now = (Instant::now(), UnixMillis::now());
                let before = std::mem::replace(&mut clock, now);
                tidy_at = now.0 + TIDY_INTERVAL;
                // What is summed up or dropped by a wrong time is lost.
                if is_steady(before, now)
                    && let Err(reason) = self.store.tidy(now.1)
                {
                    warn!("old records of usage cannot be summed up: {reason}");
                }
            }
        }
    }

    /// Writes all changes so far, or fails at the first of them.
    fn write(&mut self) {
        let had_failed = self.failed.is_some();
        loop {
            let next = self.failed.take().or_else(|| {
                let is_empty = self.later.is_empty();
                (!is_empty).then(|| take(&mut self.later))
            });
            let Some(changes) = next else {
                break;
            };
            match self.store.write(&changes) {
                Ok(()) => self.shared.lock().written = changes.number,
                Err(reason) => {
                    if !had_failed {
                        error!("usage cannot be written, and is tried again: {reason}");
                    }
                    self.failed = Some(changes);
                    return;
                }
            }
        }
        if had_failed {
            info!("usage is written again");
        }
    }

    fn answer(&mut self, question: Question) {
        // An error means that nobody waits for the reply any more.
        match question {
            Question::Sum(query, reply) => drop(reply.send(self.sum(&query))),
            Question::Written(reply) => drop(reply.send(())),
        }
    }

    fn sum(&mut self, query: &Query) -> Result<Totals, UsageError> {
        if self.failed.is_some() {
            let reason = "the latest usage cannot be written; the scheduler's log has the reason";
            return Err(UsageError::Unreadable(reason.into()));
        }
        let totals = self.store.sum(query);
        totals.map_err(|reason| UsageError::Unreadable(reason.to_string()))
    }
}

/// Returns whether the clock has shown as much time between two moments as has passed, within a minute: if not, the
/// system has set it.
fn is_steady(before: (Instant, UnixMillis), now: (Instant, UnixMillis)) -> bool {
    let passed = now.0.saturating_duration_since(before.0).as_millis();
    let shown = i128::from(now.1.0) - i128::from(before.1.0);
    let difference = shown - i128::try_from(passed).unwrap_or(i128::MAX);
    difference.unsigned_abs() <= MAX_DRIFT.as_millis()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_that_was_set_is_not_steady() {
        let start = Instant::now();
        let hour_ms = 3_600_000;
        let is_steady = |shown_ms: u64| {
            let before = (start, UnixMillis(10 * hour_ms));
            let now = (start + TIDY_INTERVAL, UnixMillis(shown_ms));
            is_steady(before, now)
        };
        assert!(is_steady(11 * hour_ms) && is_steady(11 * hour_ms + 60_000));
        for set in [
            11 * hour_ms + 60_001,
            1000 * hour_ms,
            10 * hour_ms,
            0,
            u64::MAX,
        ] {
            assert!(!is_steady(set), "{set}");
        }
    }
}
