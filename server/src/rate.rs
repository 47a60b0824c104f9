//! Rate limit for lines by their kind, with a count of the skipped ones. Pure: the time is
//! an argument.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// The most lines of a kind that may be written in a second.
const MAX_LINES_PER_SECOND: u64 = 10;

/// The period over which lines are counted.
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// The decision on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The line may be written.
    Write,
    /// The line is skipped and counted.
    Skip,
}

/// The lines of a kind in a period of at least a second.
#[derive(Debug)]
struct Window {
    until: Instant,
    lines: u64,
    /// The first skipped line, if one was skipped.
    sample: Option<String>,
}

/// Counts lines by their kind.
#[derive(Debug)]
pub(crate) struct Limiter<K> {
    windows: HashMap<K, Window>,
}

impl<K> Default for Limiter<K> {
    fn default() -> Self {
        Self {
            windows: HashMap::new(),
        }
    }
}

impl<K: Eq + Hash> Limiter<K> {
    /// Counts a line of `kind` and decides whether it may be written. `text` returns the
    /// line, to be kept if it is the first that is skipped.
    pub(crate) fn line(
        &mut self,
        kind: K,
        now: Instant,
        text: impl FnOnce() -> String,
    ) -> Decision {
        let window = self.windows.entry(kind).or_insert_with(|| Window::new(now));
        if window.until <= now && window.sample.is_none() {
            *window = Window::new(now);
        }
        window.lines += 1;
        if window.lines <= MAX_LINES_PER_SECOND {
            return Decision::Write;
        }
        window.sample.get_or_insert_with(text);
        Decision::Skip
    }

    /// Returns, for each kind with skipped lines whose period is over by `now`, their number
    /// and the first of them. The caller must call this once a second while lines are
    /// skipped: no further line of such a kind is written before.
    pub(crate) fn skipped(&mut self, now: Instant) -> Vec<(u64, String)> {
        let mut skipped = Vec::new();
        self.windows.retain(|_, window| {
            if window.until > now {
                return true;
            }
            let sample = window.sample.take();
            skipped.extend(sample.map(|sample| (window.lines - MAX_LINES_PER_SECOND, sample)));
            false
        });
        skipped
    }

    /// Returns whether skipped lines were counted but not returned by
    /// [`skipped`](Self::skipped) yet.
    pub(crate) fn has_skipped(&self) -> bool {
        self.windows.values().any(|window| window.sample.is_some())
    }
}

impl Window {
    fn new(now: Instant) -> Self {
        Self {
            until: now + SECOND,
            lines: 0,
            sample: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds lines at these milliseconds after `start`, and returns how many are written.
    fn written(limiter: &mut Limiter<u8>, kind: u8, start: Instant, at: &[u64]) -> usize {
        let mut line = |&millis: &u64| {
            let now = start + Duration::from_millis(millis);
            limiter.line(kind, now, || format!("at {millis}")) == Decision::Write
        };
        at.iter().map(&mut line).filter(|written| *written).count()
    }

    #[test]
    fn ten_lines_a_second_of_each_kind_are_written_and_the_rest_counted() {
        let (mut limiter, start) = (Limiter::default(), Instant::now());
        let at: Vec<u64> = (0..500).collect();
        assert_eq!(written(&mut limiter, 1, start, &at), 10);
        assert_eq!(written(&mut limiter, 2, start, &[0, 1, 2]), 3);
        assert!(limiter.has_skipped());
        assert_eq!(limiter.skipped(start + SECOND / 2), []);
        let skipped = limiter.skipped(start + SECOND);
        assert_eq!(skipped, [(490, "at 10".to_owned())]);
        assert!(!limiter.has_skipped());
        assert_eq!(limiter.skipped(start + 2 * SECOND), []);
        assert!(
            limiter.windows.is_empty(),
            "nothing is kept of seconds that have passed"
        );
    }

    #[test]
    fn lines_below_the_limit_are_all_written() {
        let (mut limiter, start) = (Limiter::default(), Instant::now());
        let at: Vec<u64> = (0..100).map(|line| line * 150).collect();
        assert_eq!(written(&mut limiter, 1, start, &at), 100);
        assert!(!limiter.has_skipped());
    }

    #[test]
    fn lines_are_skipped_until_the_count_is_reported() {
        let (mut limiter, start) = (Limiter::default(), Instant::now());
        assert_eq!(written(&mut limiter, 1, start, &[0; 12]), 10);
        assert_eq!(written(&mut limiter, 1, start, &[1500; 5]), 0);
        let skipped = limiter.skipped(start + 2 * SECOND);
        assert_eq!(skipped, [(7, "at 0".to_owned())]);
        assert_eq!(written(&mut limiter, 1, start, &[2000; 12]), 10);
    }
}
