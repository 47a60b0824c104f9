//! Time as the engine sees it: a number the driver passes in.

use std::ops::Add;
use std::time::Duration;

/// Milliseconds since a moment the driver chose, on a clock that never goes
/// back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The moment `millis` after the driver's zero.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the driver's zero.
    pub const fn as_millis(self) -> u64 {
        self.0
    }
}

impl Timestamp {
    /// How long after `earlier` this is; nothing if it is not.
    pub(crate) fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// Saturates: a deadline beyond the end of time never comes.
    fn add(self, delay: Duration) -> Self {
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(millis))
    }
}
