//! What time it is at the scheduler, as far as that can be known.

use std::time::{Duration, Instant};

/// After so long without a message the scheduler counts as out of reach, though no connection
/// has broken: it may have stopped. Some heartbeats long.
const SILENCE: Duration = Duration::from_secs(5);

/// The scheduler's clock, carried on by this process's own.
#[derive(Default)]
pub(super) struct SchedulerClock {
    /// Its latest time, and when that came. A message takes its time, so the scheduler's clock is
    /// ahead of this by that much, which is to the token's favour.
    latest: Option<(u64, Instant)>,
}

impl SchedulerClock {
    /// It was `time_ms` there at `now`.
    pub(super) fn set(&mut self, time_ms: u64, now: Instant) {
        self.latest = Some((time_ms, now));
    }

    /// Nothing is known of it until its next message.
    pub(super) fn cut_off(&mut self) {
        self.latest = None;
    }

    /// Milliseconds since 1970; `None` while the scheduler is out of reach.
    pub(super) fn time_ms(&self, now: Instant) -> Option<u64> {
        let (time_ms, at) = self.latest?;
        let since = now.saturating_duration_since(at);
        let passed = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        (since < SILENCE).then_some(time_ms.saturating_add(passed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_between_two_messages_and_is_unknown_without_them() {
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
        clock.cut_off();
        assert_eq!(clock.time_ms(after(6_002)), None);
    }
}
