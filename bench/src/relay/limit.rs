//! One direction of a host's link, which all its connections share.
//!
//! Bytes are sent one after the other. A link that was idle has not accumulated credit.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

/// Megabits per byte.
const BITS: f64 = 8e-6;

/// The rate limit of one direction of a link.
#[derive(Debug)]
pub(super) struct RateLimit {
    rate_mbit: f64,
    free_at: Mutex<Option<Instant>>,
}

impl RateLimit {
    /// Creates a limit of `rate_mbit` Mbit/s.
    pub(super) fn new(rate_mbit: u64) -> Self {
        Self {
            rate_mbit: rate_mbit as f64,
            free_at: Mutex::new(None),
        }
    }

    /// Reserves the link for `bytes` from the moment it is free, and returns when they are
    /// through.
    pub(super) fn reserve(&self, bytes: usize, now: Instant) -> Instant {
        let took = Duration::from_secs_f64(bytes as f64 * BITS / self.rate_mbit);
        let mut free_at = self.free_at.lock().expect("nothing panics under this lock");
        let begins = free_at.map_or(now, |free_at| free_at.max(now));
        *free_at.insert(begins + took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_rate_is_shared_in_turn() {
        let limit = RateLimit::new(8);
        let start = Instant::now();
        let ms = Duration::from_millis;
        assert_eq!(limit.reserve(1000, start), start + ms(1));
        assert_eq!(limit.reserve(2000, start), start + ms(3));
        assert_eq!(limit.reserve(1000, start + ms(1)), start + ms(4));
        assert_eq!(limit.reserve(1000, start + ms(10)), start + ms(11));
    }
}
