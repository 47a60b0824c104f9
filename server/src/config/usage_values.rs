//! The arguments of `tensord usage`, with their parsers and error messages.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, SystemTime},
};

use tensord_proto::v1::UsageColumn;

use super::values::Period;
use crate::dates;

/// Seconds in a day.
const DAY: u64 = 86_400;

/// A time from which on usage counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Since {
    /// So long ago.
    Ago(Duration),
    /// The beginning of a day, in days since 1970-01-01 in UTC.
    Day(u32),
}

impl Since {
    /// Returns the time in milliseconds since 1970.
    pub(crate) fn unix_ms(self, now: SystemTime) -> u64 {
        let since = match self {
            Self::Ago(period) => since_1970(now).saturating_sub(period),
            Self::Day(days) => Duration::from_secs(u64::from(days) * DAY),
        };
        since.as_millis().try_into().unwrap_or(u64::MAX)
    }

    fn parse(text: &str, now: SystemTime) -> Result<Self, String> {
        if let Ok(Period(period)) = text.parse() {
            return Ok(Self::Ago(period));
        }
        let day = dates::parse(text).ok_or_else(|| {
            format!(
                "{text:?} is neither a duration, such as 12h or 7d, nor a date, such as 2026-11-01"
            )
        })?;
        match u64::from(day) * DAY > since_1970(now).as_secs() {
            true => Err(format!(
                "{text} is in the future; give the date of today or an earlier one, in UTC"
            )),
            false => Ok(Self::Day(day)),
        }
    }
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text, SystemTime::now())
    }
}

fn since_1970(now: SystemTime) -> Duration {
    now.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

/// A column by which usage is grouped into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Column {
    /// The tenant of the lease.
    Tenant,
    /// The user of the token that the lease was requested with.
    User,
    /// The lease.
    Lease,
    /// The kind of device.
    Kind,
    /// The day, in UTC.
    Day,
}

impl Column {
    const ALL: [Self; 5] = [Self::Tenant, Self::User, Self::Lease, Self::Kind, Self::Day];

    /// Returns the name of the column in arguments, JSON and CSV.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::User => "user",
            Self::Lease => "lease",
            Self::Kind => "kind",
            Self::Day => "day",
        }
    }

    /// Returns the column in messages.
    pub(crate) fn message(self) -> UsageColumn {
        match self {
            Self::Tenant => UsageColumn::Tenant,
            Self::User => UsageColumn::User,
            Self::Lease => UsageColumn::Lease,
            Self::Kind => UsageColumn::Kind,
            Self::Day => UsageColumn::Day,
        }
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Column {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|column| column.name() == text);
        known.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("{text:?} is no column of usage; choose from {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begin_is_a_duration_or_a_date_that_has_begun() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(20_758 * DAY);
        let day_ms = |day: u64| day * DAY * 1000;
        let cases = [
            ("7d", Ok(day_ms(20_751))),
            (
                "99999d",
                Err(
                    "\"99999d\" is neither a duration, such as 12h or 7d, nor a date, such as 2026-11-01",
                ),
            ),
            ("36500d", Ok(0)),
            ("2026-11-01", Ok(day_ms(20_758))),
            ("2026-10-31", Ok(day_ms(20_757))),
            (
                "2026-11-02",
                Err(
                    "2026-11-02 is in the future; give the date of today or an earlier one, in UTC",
                ),
            ),
            (
                "2026-11-31",
                Err(
                    "\"2026-11-31\" is neither a duration, such as 12h or 7d, nor a date, such as 2026-11-01",
                ),
            ),
        ];
        for (text, expected) in cases {
            let since = Since::parse(text, now).map(|since| since.unix_ms(now));
            assert_eq!(since, expected.map_err(ToOwned::to_owned), "{text}");
        }
    }

    #[test]
    fn columns_have_names() {
        for column in Column::ALL {
            assert_eq!(column.name().parse(), Ok(column));
        }
        assert_eq!(
            "device".parse::<Column>(),
            Err(
                "\"device\" is no column of usage; choose from tenant, user, lease, kind, day"
                    .into()
            )
        );
    }
}
