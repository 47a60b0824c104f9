//! What a session has its device do at the moment, and for how long.
//!
//! An executor's thread notes each step in passing, without a look at the clock. Somebody
//! else looks from time to time: a step that is the same as at an earlier look has run
//! for at least as long as between the two.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tensord_proto::codec::OpName;
use tokio::sync::Notify;

use crate::locks::lock;

/// What the sessions of a device tell those who look after it.
#[derive(Debug)]
pub(crate) struct Signals {
    /// The worker's name.
    pub(crate) worker: Arc<str>,
    /// How long an op may take.
    pub(crate) op_timeout: Duration,
    has_failed: AtomicBool,
    /// Wakes who looks after all devices.
    wake: Arc<Notify>,
}

impl Signals {
    pub(crate) fn new(worker: Arc<str>, op_timeout: Duration, wake: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            worker,
            op_timeout,
            has_failed: AtomicBool::new(false),
            wake,
        })
    }

    /// Something has changed that is worth a look.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// The backend has failed, by a program's fault or its own.
    pub(crate) fn note_failure(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Whether the backend has failed since this was called before.
    pub(crate) fn take_failure(&self) -> bool {
        self.has_failed.swap(false, Ordering::Relaxed)
    }
}

/// What one session has its device do.
#[derive(Debug)]
pub(crate) struct AtHand {
    pub(crate) signals: Arc<Signals>,
    /// Steps so far, and whether one is being taken. Written by who has the runner.
    steps: AtomicU64,
    is_running: AtomicBool,
    op: Mutex<(u64, OpName)>,
    /// Reads that are awaited aside and have not been answered in time.
    late_reads: AtomicUsize,
    watch: Mutex<Watch>,
}

/// What has taken too long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overdue {
    op_number: u64,
    op_name: OpName,
    limit: Duration,
}

impl fmt::Display for Overdue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op_number,
            op_name,
            limit,
        } = self;
        write!(
            f,
            "op {op_number} ({op_name}) has not ended within {limit:?}, the limit that --op-timeout of the worker sets"
        )
    }
}

impl AtHand {
    pub(crate) fn new(signals: Arc<Signals>) -> Arc<Self> {
        Arc::new(Self {
            watch: Mutex::new(Watch::new(signals.op_timeout)),
            signals,
            steps: AtomicU64::new(0),
            is_running: AtomicBool::new(false),
            op: Mutex::new((0, OpName::from("Open"))),
            late_reads: AtomicUsize::new(0),
        })
    }

    /// The next step begins.
    pub(crate) fn step(&self) {
        let steps = self.steps.load(Ordering::Relaxed);
        self.steps.store(steps.wrapping_add(1), Ordering::Relaxed);
        self.is_running.store(true, Ordering::Relaxed);
    }

    /// The step is this op.
    pub(crate) fn begin(&self, op_number: u64, op_name: OpName) {
        *lock(&self.op) = (op_number, op_name);
        self.step();
    }

    /// Nothing is being done.
    pub(crate) fn rest(&self) {
        self.is_running.store(false, Ordering::Relaxed);
    }

    /// An awaited read of this op has taken too long.
    pub(crate) fn late(self: &Arc<Self>) -> LateRead {
        self.late_reads.fetch_add(1, Ordering::Relaxed);
        LateRead(self.clone())
    }

    /// Whether reads have been awaited for too long, and still are.
    pub(crate) fn has_late_reads(&self) -> bool {
        self.late_reads.load(Ordering::Relaxed) > 0
    }

    /// What has taken too long and still goes on.
    pub(crate) fn look(&self, now: Instant) -> Option<Overdue> {
        let running = self.is_running.load(Ordering::Relaxed);
        let step = running.then(|| self.steps.load(Ordering::Relaxed));
        let is_late = lock(&self.watch).look(now, step);
        if is_late {
            Some(self.overdue())
        } else {
            self.has_late_reads().then(|| self.late_read())
        }
    }

    fn overdue(&self) -> Overdue {
        let (op_number, op_name) = *lock(&self.op);
        let limit = self.signals.op_timeout;
        Overdue {
            op_number,
            op_name,
            limit,
        }
    }

    /// What a read is called that takes too long.
    pub(crate) fn late_read(&self) -> Overdue {
        Overdue {
            op_name: OpName::from("Read"),
            ..self.overdue()
        }
    }
}

/// Counts as a late read until it is dropped.
pub(crate) struct LateRead(Arc<AtHand>);

impl Drop for LateRead {
    fn drop(&mut self) {
        self.0.late_reads.fetch_sub(1, Ordering::Relaxed);
        self.0.signals.wake();
    }
}

/// Decides whether a step has taken too long.
#[derive(Debug)]
struct Watch {
    limit: Duration,
    /// The step that was seen last, and when it was seen first.
    since: Option<(u64, Instant)>,
}

impl Watch {
    fn new(limit: Duration) -> Self {
        Self { limit, since: None }
    }

    /// Whether `step`, which is being taken at `now`, is known to take longer than the
    /// limit.
    fn look(&mut self, now: Instant, step: Option<u64>) -> bool {
        let Some(step) = step else {
            self.since = None;
            return false;
        };
        match self.since {
            Some((seen, since)) if seen == step => now >= since + self.limit,
            _ => {
                self.since = Some((step, now));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_late_when_it_was_seen_so_long_ago() {
        let start = Instant::now();
        let mut watch = Watch::new(Duration::from_secs(2));
        // Time in ms, the step, and whether it is late.
        let looks = [
            (0, Some(1), false),
            (1_999, Some(1), false),
            (2_000, Some(1), true),
            (9_000, Some(1), true),
            // Another step at every look: each is as good as new.
            (9_100, Some(2), false),
            (99_000, Some(3), false),
            (100_000, None, false),
            // The same step, with a rest in between: nobody is at it any more.
            (101_000, Some(4), false),
            (102_000, None, false),
            (102_500, Some(4), false),
            (104_499, Some(4), false),
            (104_500, Some(4), true),
        ];
        for (at, step, is_late) in looks {
            let now = start + Duration::from_millis(at);
            assert_eq!(watch.look(now, step), is_late, "{step:?} at {at} ms");
        }
    }

    #[test]
    fn what_is_late_is_named_with_the_limit_and_the_setting() {
        let signals = Signals::new("w".into(), Duration::from_secs(1), Arc::default());
        let hand = AtHand::new(signals);
        let start = Instant::now();
        hand.begin(41, OpName::from("Matmul"));
        assert_eq!(hand.look(start), None);
        let overdue = hand.look(start + Duration::from_secs(1)).unwrap();
        assert_eq!(
            overdue.to_string(),
            "op 41 (Matmul) has not ended within 1s, the limit that --op-timeout of the worker sets"
        );
        hand.step();
        assert_eq!(hand.look(start + Duration::from_secs(2)), None);
        hand.rest();
        assert_eq!(hand.look(start + Duration::from_secs(9)), None);
    }

    #[test]
    fn a_read_that_is_awaited_aside_is_late_until_it_comes() {
        let signals = Signals::new("w".into(), Duration::from_secs(1), Arc::default());
        let hand = AtHand::new(signals);
        let now = Instant::now();
        let late = hand.late();
        let overdue = hand.look(now).unwrap().to_string();
        assert!(
            overdue.starts_with("op 0 (Read) has not ended"),
            "{overdue}"
        );
        drop(late);
        assert_eq!(hand.look(now), None);
    }
}
