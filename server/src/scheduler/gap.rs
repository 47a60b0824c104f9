//! Detects that this process did not run for a while: it was stopped, its host slept, or
//! the machine was too busy to run it.
//!
//! After a gap, peers that seem silent may have been sending all the time, so the engine
//! gets an event. This module is pure: both clocks are arguments. On some systems the
//! monotonic clock stands still while the host sleeps, so the system clock is compared,
//! too. If the system clock is set forward by hand, workers and programs get extra time
//! that they do not need.

use std::time::{Duration, Instant, SystemTime};

/// The interval at which the driver compares the clocks.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The longest normal time between two calls of [`GapDetector::check`]; a longer one is a gap.
/// It is far more than a busy machine delays a timer, and together with the preceding
/// heartbeat interval still less than the silence allowed to a worker.
const GAP_THRESHOLD: Duration = Duration::from_millis(1750);

/// The clocks at the last call of [`check`](Self::check).
pub(super) struct GapDetector {
    last_check: Instant,
    wall_clock: SystemTime,
}

/// A period in which the process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// The length by the clock that advanced more.
    pub(super) longest: Duration,
    /// The length by the monotonic clock.
    pub(super) monotonic: Duration,
}

impl GapDetector {
    pub(super) fn new(now: Instant, wall_clock: SystemTime) -> Self {
        Self {
            last_check: now,
            wall_clock,
        }
    }

    /// Returns the gap since the last call, if there was one. Must be called at least every
    /// [`CHECK_INTERVAL`].
    pub(super) fn check(&mut self, now: Instant, wall_clock: SystemTime) -> Option<Gap> {
        let monotonic = now.saturating_duration_since(self.last_check);
        // A system clock that was set back shows no gap.
        let passed = wall_clock
            .duration_since(self.wall_clock)
            .unwrap_or_default();
        (self.last_check, self.wall_clock) = (now, wall_clock);
        let longest = monotonic.max(passed);
        (longest > GAP_THRESHOLD).then_some(Gap { longest, monotonic })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ms by which the monotonic clock and the system clock advance, and the expected
    /// gap.
    type Step = (u64, i64, Option<(u64, u64)>);

    /// Advances the clocks by each step and checks the result of [`GapDetector::check`].
    fn check(steps: &[Step]) {
        let mut now = Instant::now();
        let mut wall_clock = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let mut watch = GapDetector::new(now, wall_clock);
        for (i, &(moved, clock_moved, expected)) in steps.iter().enumerate() {
            now += Duration::from_millis(moved);
            let by = Duration::from_millis(clock_moved.unsigned_abs());
            wall_clock = if clock_moved < 0 {
                wall_clock - by
            } else {
                wall_clock + by
            };
            let gap = watch.check(now, wall_clock);
            let expected = expected.map(|(longest, monotonic)| Gap {
                longest: Duration::from_millis(longest),
                monotonic: Duration::from_millis(monotonic),
            });
            assert_eq!(gap, expected, "step {i}");
        }
    }

    #[test]
    fn stopped_process_detects_one_gap() {
        check(&[
            (500, 500, None),
            (1_700, 1_700, None),
            (12_000, 12_000, Some((12_000, 12_000))),
            (1, 1, None),
            (500, 500, None),
        ]);
    }

    #[test]
    fn host_suspension_is_detected_by_the_wall_clock() {
        check(&[(500, 3_600_000, Some((3_600_000, 500))), (500, 500, None)]);
    }

    #[test]
    fn clock_set_back_is_not_a_gap() {
        check(&[(500, -3_600_000, None), (500, 500, None)]);
    }
}
