//! How many replicas a model should have: a state machine, in which the time is an argument.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

/// Requests must have waited for too long for this time before there is one replica more.
const GROW_AFTER: Duration = Duration::from_secs(1);

/// The highest utilisation that the remaining replicas may have after one is given back.
const MOST_BUSY: f64 = 0.6;

/// What the replicas have to do at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// How long the first request has waited.
    pub(crate) oldest_wait: Duration,
    /// How long a request may wait before a replica is missing.
    pub(crate) most_wait: Duration,
    /// For which part of the time since the last decision the replicas computed, summed over all.
    pub(crate) busy: f64,
}

/// Decides how many replicas there should be.
#[derive(Debug)]
pub(crate) struct Scaling {
    bounds: RangeInclusive<usize>,
    idle_after: Duration,
    /// Since when requests have waited for too long.
    slow_since: Option<Instant>,
    /// Since when one replica less would be enough.
    idle_since: Option<Instant>,
}

impl Scaling {
    /// `idle_after` is for how long a replica must not have been needed before it is given back.
    pub(crate) fn new(bounds: RangeInclusive<usize>, idle_after: Duration) -> Self {
        Self {
            bounds,
            idle_after,
            slow_since: None,
            idle_since: None,
        }
    }

    /// Returns how many replicas there should be, where there are `present` ones, of which `ready` compute.
    pub(crate) fn wanted(
        &mut self,
        now: Instant,
        present: usize,
        ready: usize,
        load: Load,
    ) -> usize {
        let (least, most) = (*self.bounds.start(), *self.bounds.end());
        let is_slow = load.oldest_wait > load.most_wait && ready == present;
        let is_idle = load.oldest_wait.is_zero() && is_enough(present.saturating_sub(1), load.busy);
        since(&mut self.slow_since, is_slow, now);
        since(&mut self.idle_since, is_idle, now);
        let lasts =
            |since: Option<Instant>, long: Duration| since.is_some_and(|it| now >= it + long);
        let is_needed_now = present == 0 && !load.oldest_wait.is_zero();
        let wanted = if is_needed_now {
            1
        } else if lasts(self.slow_since, GROW_AFTER) {
            self.slow_since = None;
            present + 1
        } else if lasts(self.idle_since, self.idle_after) {
            self.idle_since = None;
            present.saturating_sub(1)
        } else {
            present
        };
        wanted.clamp(least, most)
    }
}

/// Returns whether so many replicas are enough for what all did together. None are enough only if there was no work.
fn is_enough(replicas: usize, busy: f64) -> bool {
    busy <= MOST_BUSY * replicas as f64
}

/// Sets or clears the time since which something holds.
fn since(since: &mut Option<Instant>, holds: bool, now: Instant) {
    *since = holds.then(|| since.unwrap_or(now));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    struct Check {
        scaling: Scaling,
        start: Instant,
    }

    impl Check {
        fn new(bounds: RangeInclusive<usize>) -> Self {
            Self {
                scaling: Scaling::new(bounds, 10 * SECOND),
                start: Instant::now(),
            }
        }

        /// Asserts how many replicas there should be at a second, where there are `present` and the first request has
        /// waited for `waited` ms.
        #[track_caller]
        fn at(&mut self, second: u32, present: usize, waited: u64, busy: f64, wanted: usize) {
            let load = Load {
                oldest_wait: Duration::from_millis(waited),
                most_wait: Duration::from_millis(100),
                busy,
            };
            let now = self.start + second * SECOND;
            assert_eq!(self.scaling.wanted(now, present, present, load), wanted);
        }
    }

    #[test]
    fn there_are_at_least_the_least() {
        Check::new(2..=4).at(0, 0, 0, 0.0, 2);
        Check::new(0..=4).at(0, 0, 0, 0.0, 0);
        Check::new(1..=4).at(0, 6, 0, 6.0, 4);
    }

    #[test]
    fn a_request_without_a_replica_gets_one_at_once() {
        Check::new(0..=4).at(0, 0, 1, 0.0, 1);
    }

    #[test]
    fn slow_requests_add_one_replica_after_another() {
        let mut check = Check::new(1..=3);
        check.at(0, 1, 101, 1.0, 1);
        check.at(1, 1, 500, 1.0, 2);
        check.at(2, 2, 500, 2.0, 2);
        check.at(3, 2, 500, 2.0, 3);
        check.at(5, 3, 500, 3.0, 3);
    }

    #[test]
    fn a_moment_of_slow_requests_adds_none() {
        let mut check = Check::new(1..=3);
        check.at(0, 1, 500, 1.0, 1);
        check.at(1, 1, 0, 1.0, 1);
        check.at(2, 1, 500, 1.0, 1);
    }

    #[test]
    fn none_is_added_while_one_starts() {
        let mut scaling = Scaling::new(1..=3, SECOND);
        let load = Load {
            oldest_wait: SECOND,
            most_wait: Duration::ZERO,
            busy: 1.0,
        };
        let start = Instant::now();
        for second in 0..5 {
            assert_eq!(scaling.wanted(start + second * SECOND, 2, 1, load), 2);
        }
    }

    #[test]
    fn a_replica_that_is_not_needed_goes() {
        let mut check = Check::new(0..=4);
        check.at(0, 2, 0, 0.5, 2);
        check.at(9, 2, 0, 0.5, 2);
        check.at(10, 2, 0, 0.5, 1);
        // One has too much to do to be without.
        check.at(11, 1, 0, 0.5, 1);
        check.at(99, 1, 0, 0.5, 1);
        check.at(100, 1, 0, 0.0, 1);
        check.at(110, 1, 0, 0.0, 0);
    }
}
