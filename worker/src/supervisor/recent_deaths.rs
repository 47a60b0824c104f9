//! How many processes have died within the last minute.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Deaths longer ago than this do not count.
pub(super) const DEATH_WINDOW: Duration = Duration::from_secs(60);

/// When processes died, within [`DEATH_WINDOW`] of the last death.
#[derive(Debug, Default)]
pub(super) struct RecentDeaths(VecDeque<Instant>);

impl RecentDeaths {
    /// Records a death. Returns the number of deaths within [`DEATH_WINDOW`], with this one.
    pub(super) fn record(&mut self, now: Instant) -> usize {
        let is_old = |death: &Instant| now.saturating_duration_since(*death) > DEATH_WINDOW;
        self.0.push_back(now);
        while self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
        self.0.len()
    }

    /// Forgets all deaths.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
