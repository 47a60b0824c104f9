//! What is counted, and for whom.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tensord_proto::{ids::LeaseId, v1::UsageCounters};

/// Milliseconds in an hour.
pub(super) const HOUR_MS: u64 = 3_600_000;

/// Hours in a day.
pub(super) const HOURS_A_DAY: u32 = 24;

/// The longest time for which one report is counted. It bounds the hours among which a false report, or
/// one after the clock was set, is divided.
pub(super) const MAX_SPAN_MS: u64 = 7 * 24 * HOUR_MS;

/// More bytes than a lease can move to or from a device in a second: networks have a tenth of that. At
/// this rate, false reports of one device take five years to reach the largest number.
const MAX_MOVED_PER_S: u64 = 100_000_000_000;

/// More ops than a device executes in a second: each takes some microseconds at least.
const MAX_OPS_PER_S: u64 = 1_000_000_000;

/// An amount of what leases use of devices. Sums stay at the largest number that fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::scheduler) struct Amount {
    /// How long devices were had, in microseconds.
    pub(in crate::scheduler) held_us: u64,
    /// How long they worked, in microseconds.
    pub(in crate::scheduler) busy_us: u64,
    /// Bytes of live tensors, summed up over time.
    pub(in crate::scheduler) byte_seconds: u128,
    /// Bytes to and from clients and other devices.
    pub(in crate::scheduler) moved_bytes: u64,
    pub(in crate::scheduler) ops: u64,
}

impl Amount {
    /// Returns the work of a device, by its own count.
    pub(super) fn of_device(busy_us: u64) -> Self {
        Self {
            busy_us,
            ..Self::default()
        }
    }

    /// Adds `other`.
    pub(super) fn add(&mut self, other: &Self) {
        *self = self.zip(other, u64::saturating_add, u128::saturating_add);
    }

    /// Returns by how much this exceeds `earlier`, and nothing where it does not.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        self.zip(earlier, u64::saturating_sub, u128::saturating_sub)
    }

    /// Returns this, limited to what can be used of one device in a time. A 64th more is possible, as
    /// clocks differ. The device may have worked for `unreported_us` before that time, which no earlier
    /// report has told.
    pub(super) fn at_most_in(&self, elapsed_ms: u64, unreported_us: u64) -> Self {
        // The time may have been rounded down.
        let most_ms = elapsed_ms.saturating_add(elapsed_ms / 64 + 1);
        let at_rate = |per_s: u64| {
            let most = u128::from(most_ms) * u128::from(per_s) / 1000;
            u64::try_from(most).unwrap_or(u64::MAX)
        };
        let most = Self {
            held_us: at_rate(1_000_000),
            busy_us: at_rate(1_000_000).saturating_add(unreported_us),
            // The sums of this are long enough for any report.
            byte_seconds: u128::MAX,
            moved_bytes: at_rate(MAX_MOVED_PER_S),
            ops: at_rate(MAX_OPS_PER_S),
        };
        self.zip(&most, u64::min, u128::min)
    }

    /// Returns the part of this that is `of` out of `all`, rounded down. `of` is at most `all`, which is
    /// not zero.
    pub(super) fn part(&self, of: u64, all: u64) -> Self {
        let part = |whole: u64| {
            let part = u128::from(whole) * u128::from(of) / u128::from(all);
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        Self {
            held_us: part(self.held_us),
            busy_us: part(self.busy_us),
            byte_seconds: self.byte_seconds / u128::from(all) * u128::from(of)
                + self.byte_seconds % u128::from(all) * u128::from(of) / u128::from(all),
            moved_bytes: part(self.moved_bytes),
            ops: part(self.ops),
        }
    }

    /// Returns whether nothing was used.
    pub(super) fn is_zero(&self) -> bool {
        *self == Self::default()
    }

    fn zip(
        &self,
        other: &Self,
        combine: impl Fn(u64, u64) -> u64,
        combine_long: impl Fn(u128, u128) -> u128,
    ) -> Self {
        Self {
            held_us: combine(self.held_us, other.held_us),
            busy_us: combine(self.busy_us, other.busy_us),
            byte_seconds: combine_long(self.byte_seconds, other.byte_seconds),
            moved_bytes: combine(self.moved_bytes, other.moved_bytes),
            ops: combine(self.ops, other.ops),
        }
    }
}

impl From<&UsageCounters> for Amount {
    fn from(used: &UsageCounters) -> Self {
        Self {
            held_us: used.held_us,
            busy_us: used.busy_us,
            byte_seconds: used.byte_seconds.into(),
            moved_bytes: used.moved_bytes,
            ops: used.ops,
        }
    }
}

/// Who has a lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::scheduler) struct Owner {
    pub(in crate::scheduler) tenant: Arc<str>,
    /// The user of the token; may be empty.
    pub(in crate::scheduler) user: Arc<str>,
}

/// For whom something is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::scheduler) enum Subject {
    /// A lease. 0: leases whose usage is summed up.
    Lease(Owner, LeaseId),
    /// A lease that nobody has claimed since the scheduler has restarted.
    Unknown,
    /// The devices themselves: how long they have worked, for all leases.
    Devices,
}

impl Subject {
    /// Returns for whom the sums of a day are kept that are not by lease.
    pub(super) fn without_lease(&self) -> Self {
        match self {
            Self::Lease(owner, _) => Self::Lease(owner.clone(), LeaseId(0)),
            Self::Unknown => Self::Unknown,
            Self::Devices => Self::Devices,
        }
    }
}

/// What a sum is of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SumKey {
    /// Hours or days since 1970, in UTC.
    pub(super) time: u32,
    pub(super) subject: Subject,
    /// The kind of device.
    pub(super) kind: Arc<str>,
}

/// Divides an amount that was used from `from_ms` to `to_ms`, milliseconds since 1970, among the hours in
/// between: those of the last [`MAX_SPAN_MS`]. The parts add up to the amount.
pub(super) fn by_hours(from_ms: u64, to_ms: u64, amount: &Amount) -> Vec<(u32, Amount)> {
    let from_ms = from_ms.max(to_ms.saturating_sub(MAX_SPAN_MS));
    let hour_of = |ms: u64| u32::try_from(ms / HOUR_MS).unwrap_or(u32::MAX);
    if from_ms >= to_ms {
        return vec![(hour_of(to_ms), *amount)];
    }
    let (all, mut counted) = (to_ms - from_ms, Amount::default());
    let hours = hour_of(from_ms)..=hour_of(to_ms - 1);
    let parts = hours.map(|hour| {
        let end_ms = (u64::from(hour) + 1) * HOUR_MS;
        let so_far = amount.part(end_ms.min(to_ms) - from_ms, all);
        let part = so_far.since(&counted);
        counted = so_far;
        (hour, part)
    });
    parts.filter(|(_, part)| !part.is_zero()).collect()
}
