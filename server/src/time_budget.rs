//! Time that may be spent, and that is earned as time passes. Pure: the time is an argument.

use std::time::{Duration, Instant};

/// A budget of time: one part in `PART` of the time that passes, of which up to `MAX_MS` milliseconds can be saved up.
/// At first it has that much.
#[derive(Debug)]
pub(crate) struct TimeBudget<const PART: u32, const MAX_MS: u64> {
    available: Duration,
    /// The time at which this much was available; `None` before the first question for it.
    as_of: Option<Instant>,
}

impl<const PART: u32, const MAX_MS: u64> TimeBudget<PART, MAX_MS> {
    const MAX: Duration = Duration::from_millis(MAX_MS);

    /// Returns how much time may be spent at `now`.
    pub(crate) fn available(&mut self, now: Instant) -> Duration {
        let passed = self.as_of.map(|as_of| now.saturating_duration_since(as_of));
        let earned = passed.unwrap_or_default() / PART;
        self.available = self.available.saturating_add(earned).min(Self::MAX);
        self.as_of = self.as_of.max(Some(now));
        self.available
    }

    /// Records that this much time was spent, which may be more than was available.
    pub(crate) fn spend(&mut self, spent: Duration) {
        self.available = self.available.saturating_sub(spent);
    }
}

impl<const PART: u32, const MAX_MS: u64> Default for TimeBudget<PART, MAX_MS> {
    fn default() -> Self {
        Self {
            available: Self::MAX,
            as_of: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    const PART: u32 = 10;

    const MAX_AVAILABLE: Duration = Duration::from_millis(500);

    type Budget = TimeBudget<PART, 500>;

    #[test]
    fn a_tenth_of_the_time_may_be_spent_and_half_a_second_after_a_pause() {
        let (mut budget, start) = (Budget::default(), Instant::now());
        let mut spend = |at: u32, waited: u32| {
            let available = budget.available(start + at * MS);
            budget.spend(waited * MS);
            available.as_millis()
        };
        assert_eq!(spend(0, 450), 500);
        assert_eq!(spend(100, 60), 60);
        assert_eq!(spend(100, 0), 0);
        assert_eq!(spend(130, 0), 3);
        // More than was available.
        assert_eq!(spend(130, 50), 3);
        assert_eq!(spend(140, 0), 1);
        assert_eq!(spend(60_000, 500), 500);
        // A time that is earlier than the last one adds nothing, then or later.
        assert_eq!(spend(50_000, 0), 0);
        assert_eq!(spend(60_000, 0), 0);
    }

    #[test]
    fn what_is_spent_in_any_portions_stays_within_its_part() {
        let (mut budget, start) = (Budget::default(), Instant::now());
        let (mut now, mut waited) = (start, Duration::ZERO);
        for step in 1..10_000_u32 {
            now += (step * 7 % 13) * MS;
            let wait = budget.available(now).min((step * 5 % 101) * MS);
            budget.spend(wait);
            now += wait;
            waited += wait;
            assert!(
                waited <= MAX_AVAILABLE + (now - start) / PART,
                "step {step}"
            );
        }
        assert!(waited > (now - start) / (PART + 2));
    }
}
