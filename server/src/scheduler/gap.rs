//! Notices that this process did not run for a while: it was stopped, its host slept, or
//! the machine was so busy that nothing got its turn.
//!
//! Whoever seems silent after that may have sent all the time, so the engine gets an
//! event.
//! Pure: both clocks are arguments. The clock that never goes back stands still on some
//! systems while the host sleeps, and so the system's clock is looked at, too. When that
//! is put forward by hand, workers and programs get time that they do not need.

use std::time::{Duration, Instant, SystemTime};

/// How often the driver looks.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// Longer between two looks is a gap: far more than a busy machine delays a timer, and
/// with the beat before it still less than a worker may be silent.
const LONGEST: Duration = Duration::from_secs(2);

/// When the driver last looked.
pub(super) struct GapWatch {
    looked: Instant,
    clock: SystemTime,
}

/// A time in which the process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// How long it was, by the clock that moved more.
    pub(super) asleep: Duration,
    /// How long it was by the clock that never goes back.
    pub(super) stood: Duration,
}

impl GapWatch {
    pub(super) fn new(now: Instant, clock: SystemTime) -> Self {
        Self { looked: now, clock }
    }

    /// To be called at least every [`LOOK`]: whether there was a gap since the last call.
    pub(super) fn look(&mut self, now: Instant, clock: SystemTime) -> Option<Gap> {
        let stood = now.saturating_duration_since(self.looked);
        // A clock that was put back shows nothing.
        let passed = clock.duration_since(self.clock).unwrap_or_default();
        (self.looked, self.clock) = (now, clock);
        let asleep = stood.max(passed);
        (asleep > LONGEST).then_some(Gap { asleep, stood })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the clock that never goes back and the system's clock moved by, in ms, and the
    /// gap to be seen after that, if any.
    type Step = (u64, i64, Option<(u64, u64)>);

    /// Looks after each of these.
    fn check(steps: &[Step]) {
        let mut now = Instant::now();
        let mut clock = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let mut watch = GapWatch::new(now, clock);
        for (i, &(moved, clock_moved, expected)) in steps.iter().enumerate() {
            now += Duration::from_millis(moved);
            let by = Duration::from_millis(clock_moved.unsigned_abs());
            clock = if clock_moved < 0 {
                clock - by
            } else {
                clock + by
            };
            let gap = watch.look(now, clock);
            let expected = expected.map(|(asleep, stood)| Gap {
                asleep: Duration::from_millis(asleep),
                stood: Duration::from_millis(stood),
            });
            assert_eq!(gap, expected, "step {i}");
        }
    }

    #[test]
    fn a_process_that_was_stopped_sees_one_gap() {
        check(&[
            (500, 500, None),
            (1_900, 1_900, None),
            (12_000, 12_000, Some((12_000, 12_000))),
            (1, 1, None),
            (500, 500, None),
        ]);
    }

    #[test]
    fn a_host_that_slept_is_seen_by_its_clock() {
        check(&[(500, 3_600_000, Some((3_600_000, 500))), (500, 500, None)]);
    }

    #[test]
    fn a_clock_that_was_put_back_is_no_gap() {
        check(&[(500, -3_600_000, None), (500, 500, None)]);
    }
}
