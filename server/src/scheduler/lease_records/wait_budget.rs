//! How long the driver may wait for the disk. Pure: the time is an argument.
//!
//! A program can suspend and resume its lease again and again, and each time changes a record that is
//! urgent. The driver handles no other input while it waits, so the total of its waits is bounded.

use std::time::{Duration, Instant};

/// The driver waits for at most one part in this many of the time.
const PART: u32 = 10;

/// The most time that can be saved up: enough for a hundred waits of 5 ms in a row, as when a worker drains.
const MAX_AVAILABLE: Duration = Duration::from_millis(500);

/// The time for which the driver may wait.
#[derive(Debug)]
pub(super) struct WaitBudget {
    available: Duration,
    /// The time at which this much was available; `None` before the first wait.
    as_of: Option<Instant>,
}

impl Default for WaitBudget {
    fn default() -> Self {
        Self {
            available: MAX_AVAILABLE,
            as_of: None,
        }
    }
}

impl WaitBudget {
    /// Returns for how long the driver may wait at `now`.
    pub(super) fn available(&mut self, now: Instant) -> Duration {
        let passed = self.as_of.map(|as_of| now.saturating_duration_since(as_of));
        let earned = passed.unwrap_or_default() / PART;
        self.available = self.available.saturating_add(earned).min(MAX_AVAILABLE);
        self.as_of = self.as_of.max(Some(now));
        self.available
    }

    /// Records that the driver has waited for this long.
    pub(super) fn spend(&mut self, waited: Duration) {
        self.available = self.available.saturating_sub(waited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn waits_are_a_tenth_of_the_time_and_half_a_second_after_a_pause() {
        let (mut budget, start) = (WaitBudget::default(), Instant::now());
        let mut spend = |at: u32, waited: u32| {
            let available = budget.available(start + at * MS);
            budget.spend(waited * MS);
            available.as_millis()
        };
        assert_eq!(spend(0, 450), 500);
        assert_eq!(spend(100, 60), 60);
        assert_eq!(spend(100, 0), 0);
        assert_eq!(spend(130, 0), 3);
        // A wait may end late.
        assert_eq!(spend(130, 50), 3);
        assert_eq!(spend(140, 0), 1);
        assert_eq!(spend(60_000, 500), 500);
        // A time that is earlier than the last one adds nothing, then or later.
        assert_eq!(spend(50_000, 0), 0);
        assert_eq!(spend(60_000, 0), 0);
    }

    #[test]
    fn waits_of_any_lengths_stay_within_their_part() {
        let (mut budget, start) = (WaitBudget::default(), Instant::now());
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
