//! How many entries a tenant or a worker may cause. Pure: the time is an argument.
//!
//! A program can attach and detach again and again, and the log keeps a bounded number of bytes. So a tenant or worker
//! may cause a number of entries at once. Further ones are written at a bounded rate, and the rest is only counted.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::time_budget::TimeBudget;

/// Time after which a tenant or worker may cause another entry.
const INTERVAL: Duration = Duration::from_millis(INTERVAL_MS);
const INTERVAL_MS: u64 = 100;

/// The most entries at once after a pause: a thousand programs that start at the same time cause two each.
const MAX_AVAILABLE: u32 = 2000;

/// Each entry takes an [`INTERVAL`] of it.
type EntryBudget = TimeBudget<1, { MAX_AVAILABLE as u64 * INTERVAL_MS }>;

/// Who has caused an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Actor {
    /// A program of the tenant of this name.
    Tenant(String),
    /// The worker of this name.
    Worker(String),
}

/// The entries that each tenant and worker may still cause. There are as many of these as tenants and workers have
/// been admitted, whose numbers are bounded.
#[derive(Debug, Default)]
pub(super) struct FloodLimit(HashMap<Actor, Entries>);

#[derive(Debug, Default)]
struct Entries {
    budget: EntryBudget,
    skipped: u64,
}

impl FloodLimit {
    /// Returns whether an entry may be written at `now`, and counts it otherwise.
    pub(super) fn admit(&mut self, actor: Actor, now: Instant) -> bool {
        let entries = self.0.entry(actor).or_default();
        let is_admitted = entries.budget.available(now) >= INTERVAL;
        match is_admitted {
            true => entries.budget.spend(INTERVAL),
            false => entries.skipped += 1,
        }
        is_admitted
    }

    /// Returns the number of entries that were counted since the last call, with who has caused them.
    pub(super) fn take_skipped(&mut self) -> Vec<(Actor, u64)> {
        let skipped = self.0.iter_mut();
        let skipped = skipped.filter(|(_, entries)| entries.skipped > 0);
        let take = |(actor, entries): (&Actor, &mut Entries)| {
            (actor.clone(), std::mem::take(&mut entries.skipped))
        };
        skipped.map(take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_actor_is_counted_and_others_are_written() {
        let (mut limit, start) = (FloodLimit::default(), Instant::now());
        let [a, b] = [Actor::Tenant("a".into()), Actor::Worker("a".into())];
        let mut admitted = |actor: &Actor, count: u32, at| {
            let at = start + Duration::from_millis(at);
            let all = (0..count).filter(|_| limit.admit(actor.clone(), at));
            all.count() as u32
        };
        assert_eq!(admitted(&a, MAX_AVAILABLE + 7, 0), MAX_AVAILABLE);
        assert_eq!(admitted(&b, 1, 0), 1);
        assert_eq!(admitted(&a, 5, 99), 0);
        assert_eq!(admitted(&a, 5, 250), 2);
        // The half interval from before counts.
        assert_eq!(admitted(&a, 5, 300), 1);
        // Not a time at which nothing has passed.
        assert_eq!(admitted(&a, 5, 200), 0);
        let later = 300 + 100 * u64::from(MAX_AVAILABLE) + 99_999;
        assert_eq!(admitted(&a, 2 * MAX_AVAILABLE, later), MAX_AVAILABLE);
        let skipped = 7 + 5 + 3 + 4 + 5 + u64::from(MAX_AVAILABLE);
        assert_eq!(limit.take_skipped(), [(a, skipped)]);
        assert_eq!(limit.take_skipped(), []);
    }
}
