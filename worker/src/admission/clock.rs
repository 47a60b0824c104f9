//! Estimates the scheduler's clock.

use std::time::{Duration, Instant};

/// After this long without a message, the scheduler counts as unreachable even if no
/// connection broke, as its process may have stopped. This is a few heartbeats.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// The scheduler's clock, extrapolated with the local monotonic clock.
#[derive(Default)]
pub(super) struct SchedulerClock {
    /// The latest time received, in milliseconds since 1970, and when it was received. The
    /// scheduler's clock is ahead of this by the latency of the message, so a token is
    /// accepted for that much longer.
    latest: Option<(u64, Instant)>,
}

impl SchedulerClock {
    /// Records that the scheduler's clock was at `time_ms` at `now`.
    pub(super) fn set(&mut self, time_ms: u64, now: Instant) {
        self.latest = Some((time_ms, now));
    }

    /// Discards the time, which is then unknown until the next message.
    pub(super) fn mark_unreachable(&mut self) {
        self.latest = None;
    }

    /// Returns the scheduler's time in milliseconds since 1970, or `None` while the
    /// scheduler is unreachable.
    pub(super) fn time_ms(&self, now: Instant) -> Option<u64> {
        let (time_ms, at) = self.latest?;
        let since = now.saturating_duration_since(at);
        let passed = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        (since < SILENCE_TIMEOUT).then_some(time_ms.saturating_add(passed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_runs_between_messages_and_is_unknown_without_them() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut clock = SchedulerClock::default();
        assert_eq!(clock.time_ms(start), None);
        clock.set(1_000_000, start);
        assert_eq!(clock.time_ms(after(1_500)), Some(1_001_500));
        assert_eq!(clock.time_ms(after(4_999)), Some(1_004_999));
        assert_eq!(clock.time_ms(after(5_000)), None);
        clock.set(900_000, after(6_000));
        assert_eq!(clock.time_ms(after(6_001)), Some(900_001));
        clock.mark_unreachable();
        assert_eq!(clock.time_ms(after(6_002)), None);
    }
}
