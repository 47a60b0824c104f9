//! Tracks what a session's device is executing, and for how long.
//!
//! The thread that runs a session counts each step (an op, or other work of the session)
//! without reading the clock. Another thread checks the counter from time to time: if the
//! counter has not changed since an earlier check, the step has run for at least the time
//! between the two checks.

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
#[cfg(target_os = "linux")]
use crate::op_record::OpRecord;

/// Signals from the sessions of a device to the task that checks all devices.
#[derive(Debug)]
pub(crate) struct Signals {
    /// The worker's name.
    pub(crate) worker: Arc<str>,
    /// Time limit for an op.
    pub(crate) op_timeout: Duration,
    has_failed: AtomicBool,
    /// Wakes the task that checks all devices.
    wake: Arc<Notify>,
    /// Where the worker finds the current op if this process dies.
    #[cfg(target_os = "linux")]
    op_record: Option<OpRecord>,
}

impl Signals {
    pub(crate) fn new(worker: Arc<str>, op_timeout: Duration, wake: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            worker,
            op_timeout,
            has_failed: AtomicBool::new(false),
            wake,
            #[cfg(target_os = "linux")]
            op_record: None,
        })
    }

    /// Returns these signals, which then also record the device's current op in `op_record`,
    /// if there is one. Panics if they are already shared.
    #[cfg(target_os = "linux")]
    pub(crate) fn with_record(self: Arc<Self>, op_record: Option<OpRecord>) -> Arc<Self> {
        let signals = Arc::into_inner(self).expect("new signals have one owner");
        Arc::new(Self {
            op_record,
            ..signals
        })
    }

    /// Wakes the task that checks all devices, because something has changed.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Records that the backend has failed, whether the program or the backend caused it.
    pub(crate) fn record_failure(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether the backend has failed since the last call.
    pub(crate) fn take_failure(&self) -> bool {
        self.has_failed.swap(false, Ordering::Relaxed)
    }
}

/// What one session is executing on its device.
#[derive(Debug)]
pub(crate) struct OpProgress {
    pub(crate) signals: Arc<Signals>,
    /// Number of steps so far, and whether one is running. Written only by the thread that
    /// holds the session's runner.
    steps: AtomicU64,
    is_running: AtomicBool,
    op: Mutex<(u64, OpName)>,
    /// Number of reads awaited on another thread that have exceeded the time limit.
    late_reads: AtomicUsize,
    step_timer: Mutex<StepTimer>,
}

/// An op or read that has exceeded its time limit.
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

impl OpProgress {
    pub(crate) fn new(signals: Arc<Signals>) -> Arc<Self> {
        Arc::new(Self {
            step_timer: Mutex::new(StepTimer::new(signals.op_timeout)),
            signals,
            steps: AtomicU64::new(0),
            is_running: AtomicBool::new(false),
            op: Mutex::new((0, OpName::from("Open"))),
            late_reads: AtomicUsize::new(0),
        })
    }

    /// Returns the number of steps so far.
    #[cfg(target_os = "linux")]
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Records that the next step begins.
    pub(crate) fn begin_step(&self) {
        let steps = self.steps.load(Ordering::Relaxed);
        self.steps.store(steps.wrapping_add(1), Ordering::Relaxed);
        self.is_running.store(true, Ordering::Relaxed);
    }

    /// Records that the next step begins, which is this op.
    pub(crate) fn begin_op(&self, op_number: u64, op_name: OpName) {
        *lock(&self.op) = (op_number, op_name);
        #[cfg(target_os = "linux")]
        if let Some(record) = &self.signals.op_record {
            record.begin(op_number, op_name);
        }
        self.begin_step();
    }

    /// Records that no step is running.
    pub(crate) fn end_step(&self) {
        self.is_running.store(false, Ordering::Relaxed);
        #[cfg(target_os = "linux")]
        if let Some(record) = &self.signals.op_record {
            record.end();
        }
    }

    /// Records that an awaited read has exceeded the time limit, until the guard is
    /// dropped.
    pub(crate) fn begin_late_read(self: &Arc<Self>) -> LateReadGuard {
        self.late_reads.fetch_add(1, Ordering::Relaxed);
        LateReadGuard(self.clone())
    }

    /// Returns whether an awaited read has exceeded the time limit and is still pending.
    pub(crate) fn has_late_reads(&self) -> bool {
        self.late_reads.load(Ordering::Relaxed) > 0
    }

    /// Returns the op or read that has exceeded its time limit and has not ended.
    pub(crate) fn check(&self, now: Instant) -> Option<Overdue> {
        let running = self.is_running.load(Ordering::Relaxed);
        let step = running.then(|| self.steps.load(Ordering::Relaxed));
        let is_late = lock(&self.step_timer).check(now, step);
        if is_late {
            Some(self.overdue())
        } else {
            self.has_late_reads().then(|| self.overdue_read())
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

    /// Returns the description of a read that exceeds the time limit.
    pub(crate) fn overdue_read(&self) -> Overdue {
        Overdue {
            op_name: OpName::from("Read"),
            ..self.overdue()
        }
    }
}

/// A guard that counts as a late read until it is dropped.
pub(crate) struct LateReadGuard(Arc<OpProgress>);

impl Drop for LateReadGuard {
    fn drop(&mut self) {
        self.0.late_reads.fetch_sub(1, Ordering::Relaxed);
        self.0.signals.wake();
    }
}

/// Decides whether a step has exceeded the time limit.
#[derive(Debug)]
struct StepTimer {
    limit: Duration,
    /// The step seen at the last check, and when it was first seen.
    since: Option<(u64, Instant)>,
}

impl StepTimer {
    fn new(limit: Duration) -> Self {
        Self { limit, since: None }
    }

    /// Returns whether `step`, which is running at `now`, is known to have exceeded the
    /// limit.
    fn check(&mut self, now: Instant, step: Option<u64>) -> bool {
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
    fn step_is_overdue_after_the_limit() {
        let start = Instant::now();
        let mut step_timer = StepTimer::new(Duration::from_secs(2));
        // Time in ms, the step, and whether it is late.
        let checks = [
            (0, Some(1), false),
            (1_999, Some(1), false),
            (2_000, Some(1), true),
            (9_000, Some(1), true),
            // Each check sees another step, so none is late.
            (9_100, Some(2), false),
            (99_000, Some(3), false),
            (100_000, None, false),
            // Step 4 does not run at the second of these checks, so its time starts again.
            (101_000, Some(4), false),
            (102_000, None, false),
            (102_500, Some(4), false),
            (104_499, Some(4), false),
            (104_500, Some(4), true),
        ];
        for (at, step, is_late) in checks {
            let now = start + Duration::from_millis(at);
            assert_eq!(step_timer.check(now, step), is_late, "{step:?} at {at} ms");
        }
    }

    #[test]
    fn overdue_op_names_the_limit_and_the_setting() {
        let signals = Signals::new("w".into(), Duration::from_secs(1), Arc::default());
        let op_progress = OpProgress::new(signals);
        let start = Instant::now();
        op_progress.begin_op(41, OpName::from("Matmul"));
        assert_eq!(op_progress.check(start), None);
        let overdue = op_progress.check(start + Duration::from_secs(1)).unwrap();
        assert_eq!(
            overdue.to_string(),
            "op 41 (Matmul) has not ended within 1s, the limit that --op-timeout of the worker sets"
        );
        op_progress.begin_step();
        assert_eq!(op_progress.check(start + Duration::from_secs(2)), None);
        op_progress.end_step();
        assert_eq!(op_progress.check(start + Duration::from_secs(9)), None);
    }

    #[test]
    fn late_read_is_overdue_until_it_completes() {
        let signals = Signals::new("w".into(), Duration::from_secs(1), Arc::default());
        let op_progress = OpProgress::new(signals);
        let now = Instant::now();
        let late = op_progress.begin_late_read();
        let overdue = op_progress.check(now).unwrap().to_string();
        assert!(
            overdue.starts_with("op 0 (Read) has not ended"),
            "{overdue}"
        );
        drop(late);
        assert_eq!(op_progress.check(now), None);
    }
}
