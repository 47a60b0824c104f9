//! At most so many lines a second of each kind, and then a count of the rest: pure, with
//! the time as an argument.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// Lines of a kind in a second.
const LINES: u64 = 10;

/// What lines are counted over.
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// Whether a line may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may.
    Write,
    /// It is counted.
    Skip,
}

/// A second in which there were lines of a kind.
#[derive(Debug)]
struct Window {
    until: Instant,
    lines: u64,
    /// The first line that was skipped.
    like: Option<String>,
}

/// Counts lines by their kind. Time comes with each call.
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
    /// A line of `kind` is there; `text` is what it says.
    pub(crate) fn line(&mut self, kind: K, now: Instant, text: impl FnOnce() -> String) -> Verdict {
        let window = self.windows.entry(kind).or_insert_with(|| Window::new(now));
        if window.until <= now && window.like.is_none() {
            *window = Window::new(now);
        }
        window.lines += 1;
        if window.lines <= LINES {
            return Verdict::Write;
        }
        window.like.get_or_insert_with(text);
        Verdict::Skip
    }

    /// How many lines were skipped in the seconds that are over by `now`, each with one
    /// of them. To be called once a second while lines are skipped.
    pub(crate) fn skipped(&mut self, now: Instant) -> Vec<(u64, String)> {
        let mut skipped = Vec::new();
        self.windows.retain(|_, window| {
            if window.until > now {
                return true;
            }
            let like = window.like.take();
            skipped.extend(like.map(|like| (window.lines - LINES, like)));
            false
        });
        skipped
    }

    /// Whether there are lines that are counted and not told of.
    pub(crate) fn owes(&self) -> bool {
        self.windows.values().any(|window| window.like.is_some())
    }
}

impl Window {
    fn new(now: Instant) -> Self {
        Self {
            until: now + SECOND,
            lines: 0,
            like: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines at these milliseconds after a start, and when somebody asks for the counts.
    fn written(limiter: &mut Limiter<u8>, kind: u8, start: Instant, at: &[u64]) -> usize {
        let mut line = |&millis: &u64| {
            let now = start + Duration::from_millis(millis);
            limiter.line(kind, now, || format!("at {millis}")) == Verdict::Write
        };
        at.iter().map(&mut line).filter(|written| *written).count()
    }

    #[test]
    fn ten_lines_a_second_of_each_kind_are_written_and_the_rest_counted() {
        let (mut limiter, start) = (Limiter::default(), Instant::now());
        let at: Vec<u64> = (0..500).collect();
        assert_eq!(written(&mut limiter, 1, start, &at), 10);
        assert_eq!(written(&mut limiter, 2, start, &[0, 1, 2]), 3);
        assert!(limiter.owes());
        assert_eq!(limiter.skipped(start + SECOND / 2), []);
        let told = limiter.skipped(start + SECOND);
        assert_eq!(told, [(490, "at 10".to_owned())]);
        assert!(!limiter.owes());
        assert_eq!(limiter.skipped(start + 2 * SECOND), []);
        assert!(
            limiter.windows.is_empty(),
            "nothing is kept of what is over"
        );
    }

    #[test]
    fn a_slow_trickle_is_written_whole() {
        let (mut limiter, start) = (Limiter::default(), Instant::now());
        let at: Vec<u64> = (0..100).map(|line| line * 150).collect();
        assert_eq!(written(&mut limiter, 1, start, &at), 100);
        assert!(!limiter.owes());
    }

    #[test]
    fn nothing_more_is_written_before_the_count_was_told() {
        let (mut limiter, start) = (Limiter::default(), Instant::now());
        assert_eq!(written(&mut limiter, 1, start, &[0; 12]), 10);
        assert_eq!(written(&mut limiter, 1, start, &[1500; 5]), 0);
        let told = limiter.skipped(start + 2 * SECOND);
        assert_eq!(told, [(7, "at 0".to_owned())]);
        assert_eq!(written(&mut limiter, 1, start, &[2000; 12]), 10);
    }
}
