//! Since when a lease has been idle: it has nothing to do.
//!
//! A lease's process counts the steps of its sessions without a clock, and reports the count when it has
//! changed. A report does not have the time of the work. So a lease counts as busy until the last report whose
//! count differs from the one before, in which a session is busy, or that follows a report in which one was. Pure state: time is an argument.

use std::time::{Duration, Instant};

/// A lease that has been idle for less than this counts as busy.
const MIN_IDLE: Duration = Duration::from_secs(1);

/// What the processes of a lease have reported of their work.
#[derive(Debug)]
pub(super) struct Activity {
    steps: u64,
    is_busy: bool,
    /// When there was something to do last, as far as was reported.
    busy_at: Instant,
}

impl Activity {
    /// Creates the activity of a lease that is about to be used.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            steps: 0,
            is_busy: false,
            busy_at: now,
        }
    }

    /// Records a report: how many steps the sessions have executed, and whether one has something to do.
    pub(super) fn on_report(&mut self, now: Instant, steps: u64, is_busy: bool) {
        if steps != self.steps || is_busy || self.is_busy {
            self.busy_at = now;
        }
        (self.steps, self.is_busy) = (steps, is_busy);
    }

    /// Returns for how long the lease has been idle, if that is [`MIN_IDLE`] or longer.
    pub(super) fn idle_for(&self, now: Instant) -> Option<Duration> {
        let idle_for = now.saturating_duration_since(self.busy_at);
        (!self.is_busy && idle_for >= MIN_IDLE).then_some(idle_for)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_begins_with_the_last_report_of_work() {
        let start = Instant::now();
        let mut activity = Activity::new(start);
        let at = |millis| start + Duration::from_millis(millis);
        // Time in ms; the steps and whether there is more to do, if that is reported then; for how long the lease
        // is idle.
        let cases = [
            (999, None, None),
            (1_000, None, Some(1_000)),
            (2_000, Some((5, true)), None),
            // One op that takes long.
            (9_000, None, None),
            (10_000, Some((5, false)), None),
            (11_500, None, Some(1_500)),
            // Something else in the report has changed.
            (12_000, Some((5, false)), Some(2_000)),
            (13_000, Some((6, false)), None),
            (14_000, None, Some(1_000)),
            // A session has ended.
            (20_000, Some((2, false)), None),
            (22_000, None, Some(2_000)),
        ];
        for (millis, report, expected) in cases {
            if let Some((steps, is_busy)) = report {
                activity.on_report(at(millis), steps, is_busy);
            }
            let idle_for = activity.idle_for(at(millis));
            let expected = expected.map(Duration::from_millis);
            assert_eq!(idle_for, expected, "at {millis} ms");
        }
    }
}
