//! Times of the system clock, which can be stored and compared by a later process.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct UnixMillis(pub(crate) u64);

impl UnixMillis {
    /// Returns the time of the system clock.
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        // A clock before 1970 counts as 1970.
        Self(millis(since.unwrap_or_default()))
    }

    /// Returns the time `duration` later.
    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(millis(duration)))
    }
}

/// Returns a duration in milliseconds, at most what fits.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
