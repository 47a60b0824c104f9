//! What tenants have had: the past counts in whose request is next, and is forgotten by and by.
//!
//! For each tenant there is an average of its dominant share in which what was a half-life ago counts half as
//! much as the present: the integral of `share(t) · 2^(-(now - t) / half_life)`, divided by the integral of the
//! weights alone. A tenant that has had all devices of a kind for a half-life has an average of 0.5.

use std::collections::BTreeMap;
use std::time::Duration;

use super::TenantName;
use crate::time::Timestamp;

/// Averages are rounded down to multiples of this, so that tenants that have had nearly the same take turns as
/// they would without a past.
const RESOLUTION: f64 = 1e-3;

/// An average below this is forgotten.
const NEGLIGIBLE: f64 = 1e-6;

/// The averages of the shares that tenants have had.
#[derive(Debug)]
pub(crate) struct PastUse {
    /// `None` if the past does not count.
    half_life: Option<Duration>,
    averages: BTreeMap<TenantName, Average>,
}

/// The average of one tenant.
#[derive(Clone, Copy, Debug)]
struct Average {
    /// The average at `since`.
    value: f64,
    /// The share that the tenant has had since then.
    share: f64,
    since: Timestamp,
}

impl Average {
    fn at(&self, now: Timestamp, half_life: Duration) -> f64 {
        let age = now.saturating_since(self.since).as_secs_f64();
        let kept = 0.5_f64.powf(age / half_life.as_secs_f64());
        self.value * kept + self.share * (1.0 - kept)
    }
}

impl PastUse {
    /// Creates the averages of tenants that have had nothing. With a half-life of zero, the past does not
    /// count.
    pub(crate) fn new(half_life: Duration) -> Self {
        Self {
            half_life: Some(half_life).filter(|half_life| !half_life.is_zero()),
            averages: BTreeMap::new(),
        }
    }

    /// Records that a tenant has this share from `now` on.
    pub(crate) fn set_share(&mut self, tenant: &TenantName, share: f64, now: Timestamp) {
        let Some(half_life) = self.half_life else {
            return;
        };
        let before = self.averages.get(tenant);
        let value = before.map_or(0.0, |average| average.at(now, half_life));
        if share == 0.0 && value < NEGLIGIBLE {
            self.averages.remove(tenant);
            return;
        }
        let average = Average {
            value,
            share,
            since: now,
        };
        self.averages.insert(tenant.clone(), average);
    }

    /// Sets the average that a tenant had this long before `now`, if it has had nothing since.
    pub(crate) fn restore(
        &mut self,
        tenant: &TenantName,
        share: f64,
        age: Duration,
        now: Timestamp,
    ) {
        let Some(half_life) = self.half_life.filter(|_| share.is_finite()) else {
            return;
        };
        let kept = 0.5_f64.powf(age.as_secs_f64() / half_life.as_secs_f64());
        let average = Average {
            value: share.clamp(0.0, 1.0) * kept,
            share: 0.0,
            since: now,
        };
        self.averages.insert(tenant.clone(), average);
    }

    /// Returns the average of a tenant's share, as far as it counts.
    pub(crate) fn of(&self, tenant: &TenantName, now: Timestamp) -> f64 {
        let average = self.half_life.zip(self.averages.get(tenant));
        average.map_or(0.0, |(half_life, average)| {
            (average.at(now, half_life) / RESOLUTION).floor() * RESOLUTION
        })
    }

    /// Returns whether the average of a tenant was set after a time.
    #[cfg(test)]
    pub(crate) fn is_set_after(&self, time: Timestamp) -> bool {
        self.averages.values().any(|average| average.since > time)
    }

    /// Returns the tenants that have had something.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = &TenantName> {
        self.averages.keys()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::tests::at;

    const HOUR: u64 = 3_600_000;

    fn past(half_life: u64) -> PastUse {
        PastUse::new(Duration::from_millis(half_life))
    }

    #[test]
    fn half_of_the_past_counts_after_a_half_life() {
        let mut past = past(HOUR);
        let red = TenantName::from("red");
        let expect = |past: &PastUse, hours: u64, expected: f64| {
            let found = past.of(&red, at(hours * HOUR));
            assert!(
                (found - expected).abs() < 1.01 * RESOLUTION,
                "{found} at {hours} h"
            );
        };
        expect(&past, 0, 0.0);
        past.set_share(&red, 1.0, at(0));
        expect(&past, 0, 0.0);
        expect(&past, 1, 0.5);
        expect(&past, 2, 0.75);
        expect(&past, 30, 1.0);
        past.set_share(&red, 0.0, at(30 * HOUR));
        expect(&past, 31, 0.5);
        expect(&past, 33, 0.125);
        expect(&past, 60, 0.0);
        past.set_share(&red, 0.0, at(60 * HOUR));
        assert_eq!(past.tenants().count(), 0);
    }

    #[test]
    fn what_is_restored_has_its_age() {
        let mut past = past(HOUR);
        let [red, blue] = ["red", "blue"].map(TenantName::from);
        past.restore(&red, 0.5, Duration::from_millis(HOUR), at(0));
        past.restore(&blue, f64::NAN, Duration::ZERO, at(0));
        assert!((past.of(&red, at(0)) - 0.25).abs() < 1.01 * RESOLUTION);
        assert!((past.of(&red, at(HOUR)) - 0.125).abs() < 1.01 * RESOLUTION);
        past.restore(&blue, 7.0, Duration::ZERO, at(0));
        assert_eq!(past.of(&blue, at(0)), 1.0);
    }

    #[test]
    fn without_a_half_life_the_past_does_not_count() {
        let mut past = past(0);
        let red = TenantName::from("red");
        past.set_share(&red, 1.0, at(0));
        assert_eq!(past.of(&red, at(HOUR)), 0.0);
    }

    proptest! {
        /// The average is the one that the definition gives, in small steps.
        #[test]
        fn the_average_is_that_of_the_definition(
            shares in vec((0.0..1.0_f64, 1..HOUR), 1..10),
            half_life in HOUR / 2..4 * HOUR,
        ) {
            let mut past = past(half_life);
            let red = TenantName::from("red");
            let end: u64 = shares.iter().map(|(_, duration)| duration).sum();
            let weight = |time: f64| 0.5_f64.powf((end as f64 - time) / half_life as f64);
            let (mut now, mut sum, steps) = (0, 0.0, 200);
            for (share, duration) in shares {
                past.set_share(&red, share, at(now));
                let step = duration as f64 / f64::from(steps);
                let times = (0..steps).map(|n| now as f64 + (f64::from(n) + 0.5) * step);
                sum += times.map(|time| share * weight(time) * step).sum::<f64>();
                now += duration;
            }
            let all = half_life as f64 / std::f64::consts::LN_2;
            let found = past.of(&red, at(end));
            prop_assert!((found - sum / all).abs() < 2.0 * RESOLUTION, "{found}, {}", sum / all);
        }
    }
}
