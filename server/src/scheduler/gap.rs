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
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// The longest normal time between two calls of [`GapWatch::look`]; a longer one is a gap.
/// It is far more than a busy machine delays a timer, and together with the preceding
/// heartbeat interval still less than the silence allowed to a worker.
const LONGEST: Duration = Duration::from_secs(2);

/// The clocks at the last call of [`look`](Self::look).
pub(super) struct GapWatch {
    looked: Instant,
    clock: SystemTime,
}

/// A period in which the process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// The length by the clock that advanced more.
    pub(super) asleep: Duration,
    /// The length by the monotonic clock.
    pub(super) stood: Duration,
}

impl GapWatch {
    pub(super) fn new(now: Instant, clock: SystemTime) -> Self {
        Self { looked: now, clock }
    }

    /// Returns the gap since the last call, if there was one. Must be called at least every
    /// [`LOOK`].
    pub(super) fn look(&mut self, now: Instant, clock: SystemTime) -> Option<Gap> {
        let stood = now.saturating_duration_since(self.looked);
        // A system clock that was set back shows no gap.
        let passed = clock.duration_since(self.clock).unwrap_or_default();
        (self.looked, self.clock) = (now, clock);
        let asleep = stood.max(passed);
        (asleep > LONGEST).then_some(Gap { asleep, stood })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ms by which the monotonic clock and the system clock advance, and the expected
    /// gap.
    type Step = (u64, i64, Option<(u64, u64)>);

    /// Advances the clocks by each step and checks the result of `look`.
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
