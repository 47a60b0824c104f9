//! The pace at which requests are refused that are too many.
//!
//! Some clients ignore `Retry-After` and try again at once. A thousand of them would leave little time for the model on a
//! host that has few cores. So refusals beyond [`PER_SECOND`] wait, and such a client waits with them.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How many requests are refused per second without waiting.
const PER_SECOND: u32 = 2000;

/// How long a refusal waits at most.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// The pace of a server's refusals.
#[derive(Debug, Default)]
pub(crate) struct RefusalPace {
    /// When the next refusal is due.
    next: Mutex<Option<Instant>>,
}

impl RefusalPace {
    /// Waits until a refusal is due.
    pub(crate) async fn wait(&self) {
        let wait = self.wait_of_next(Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }

    /// Returns how long a refusal waits that is decided now.
    fn wait_of_next(&self, now: Instant) -> Duration {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        // A second's worth of refusals need not wait after a time without any.
        let least = now.checked_sub(Duration::from_secs(1));
        let due = next.max(least).unwrap_or(now).min(now + LONGEST_WAIT);
        *next = Some(due + Duration::from_secs(1) / PER_SECOND);
        due.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_beyond_the_pace_wait() {
        let pace = RefusalPace::default();
        let start = Instant::now() + Duration::from_secs(10);
        // Those of a second may come at once.
        for _ in 0..PER_SECOND {
            assert_eq!(pace.wait_of_next(start), Duration::ZERO);
        }
        let interval = Duration::from_secs(1) / PER_SECOND;
        for number in 0..PER_SECOND {
            let expected = (interval * number).min(LONGEST_WAIT);
            assert_eq!(pace.wait_of_next(start), expected);
        }
        // The waits were cut to the longest, so later refusals need not wait to make up for these.
        let later = start + LONGEST_WAIT + interval;
        assert_eq!(pace.wait_of_next(later), Duration::ZERO);
        assert_eq!(pace.wait_of_next(later), interval);
    }

    #[test]
    fn a_refusal_now_and_then_does_not_wait() {
        let pace = RefusalPace::default();
        let start = Instant::now() + Duration::from_secs(10);
        for number in 0..10 * PER_SECOND {
            let now = start + Duration::from_secs(1) * number / PER_SECOND;
            assert_eq!(pace.wait_of_next(now), Duration::ZERO);
        }
    }
}
