//! The engine's notion of time: a number passed in by the driver.

use std::ops::Add;
use std::time::Duration;

/// Milliseconds since an origin chosen by the driver, on a clock that never goes back.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Returns the time `millis` milliseconds after the driver's origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Returns the milliseconds since the driver's origin.
    pub const fn as_millis(self) -> u64 {
        self.0
    }
}

impl Timestamp {
    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub(crate) fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time this long ago, if that is not before the driver's origin.
    pub(crate) fn checked_sub(self, duration: Duration) -> Option<Self> {
        let millis = u64::try_from(duration.as_millis()).ok()?;
        self.0.checked_sub(millis).map(Self)
    }

    /// Returns the time this long ago, or the driver's origin if that is later.
    pub(crate) fn saturating_sub(self, duration: Duration) -> Self {
        self.checked_sub(duration).unwrap_or_default()
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// Adds a delay. Saturates: a deadline beyond the largest timestamp never comes.
    fn add(self, delay: Duration) -> Self {
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(millis))
    }
}
