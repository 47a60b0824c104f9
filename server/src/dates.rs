//! Dates of the Gregorian calendar, in UTC.

use std::ops::Range;

/// Returns the number of days from 1970-01-01 to a date such as `2026-11-01`, or `None` if the text is no
/// date from 1970 on.
pub(crate) fn parse(text: &str) -> Option<u32> {
    let is_form = |(at, byte): (usize, u8)| match at {
        4 | 7 => byte == b'-',
        _ => byte.is_ascii_digit(),
    };
    if text.len() != 10 || !text.bytes().enumerate().all(is_form) {
        return None;
    }
    let number = |range: Range<usize>| text.get(range)?.parse::<u32>().ok();
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let days = days_before(year, month, day)?;
    // A day that the month does not have is one of the next month.
    (text == format(days)).then_some(days)
}

/// Returns the date so many days after 1970-01-01, such as `2026-11-01`.
pub(crate) fn format(days: u32) -> String {
    // The calendar repeats every 400 years. A year that begins in March has its leap day at the end.
    let days = u64::from(days) + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day + 2) / 153;
    let day = day - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The inverse of [`format()`] for valid dates; `None` for those before 1970.
fn days_before(year: u32, month: u32, day: u32) -> Option<u32> {
    if !(1..=12).contains(&month) || day == 0 {
        return None;
    }
    let year = year.checked_sub(u32::from(month <= 2))?;
    let (era, in_era) = (year / 400, year % 400);
    let from_march = if month > 2 { month - 3 } else { month + 9 };
    let day = (153 * from_march + 2) / 5 + day - 1;
    let day = in_era * 365 + in_era / 4 - in_era / 100 + day;
    (era * 146_097 + day).checked_sub(719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_converted() {
        let cases = [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_758, "2026-11-01"),
            (47_541, "2100-03-01"),
        ];
        for (days, date) in cases {
            assert_eq!((format(days), parse(date)), (date.into(), Some(days)));
        }
        for days in 0..100_000 {
            assert_eq!(parse(&format(days)), Some(days));
        }
    }

    #[test]
    fn what_is_no_date_is_refused() {
        for text in [
            "",
            "2026-11",
            "2026-11-31",
            "2026-02-29",
            "2026-00-01",
            "2026-13-01",
            "2026-01-00",
            "1969-12-31",
            "0000-01-01",
            "26-11-0001",
            "2026/11/01",
            "2026-1-1",
            "2026-11-0\u{662}",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
