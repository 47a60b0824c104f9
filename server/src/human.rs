//! Formats amounts for people.

use tensord_proto::share::WHOLE_PERMILLE;

/// Thousandths of one.
const WHOLE: u64 = WHOLE_PERMILLE as u64;

/// Formats bytes in the largest binary unit in which they are at least 1.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1 << 10 {
        return format!("{bytes} B");
    }
    let mut amount = bytes as f64 / 1024.0;
    let mut unit = 0;
    // An amount that would be rounded to 1024.0 gets the next unit.
    while amount >= 1023.95 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    format!("{amount:.1} {}", UNITS[unit])
}

/// Formats bytes without rounding, in the largest binary unit of which they are a whole number.
pub(crate) fn exact_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut amount, mut unit) = (bytes, 0);
    while amount > 0 && amount.is_multiple_of(1024) && unit + 1 < UNITS.len() {
        (amount, unit) = (amount / 1024, unit + 1);
    }
    format!("{amount} {}", UNITS[unit])
}

/// Formats a number that is given in thousandths, with the decimals that it needs.
pub(crate) fn thousandths(n: u64) -> String {
    match n % WHOLE {
        0 => format!("{}", n / WHOLE),
        part => {
            let decimals = format!("{part:03}");
            format!("{}.{}", n / WHOLE, decimals.trim_end_matches('0'))
        }
    }
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Formats a number with commas between groups of thousands.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things, such as `1 worker` or `2 workers`.
pub(crate) fn plural(n: usize, thing: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {thing}{s}", count(n as u64))
}

/// Formats a duration, given in milliseconds, in its two largest units.
pub(crate) fn duration(millis: u64) -> String {
    let seconds = millis / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", days, hours % 24),
    }
}

/// Formats the time `at_ms` relative to `now_ms`, both in milliseconds.
pub(crate) fn relative(at_ms: u64, now_ms: u64) -> String {
    match at_ms.checked_sub(now_ms) {
        Some(left) if left > 0 => format!("in {}", duration(left)),
        _ => format!("{} ago", duration(now_ms.saturating_sub(at_ms))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_amounts_are_not_rounded() {
        let cases = [
            (0, "0 B"),
            (1025, "1025 B"),
            (512 << 20, "512 MiB"),
            (1030 << 30, "1030 GiB"),
            (1 << 40, "1 TiB"),
            (1 << 60, "1024 PiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(exact_bytes(bytes), expected);
        }
    }

    #[test]
    fn fractions_have_no_trailing_zeros() {
        let cases = [
            (0, "0"),
            (1, "0.001"),
            (250, "0.25"),
            (1250, "1.25"),
            (2000, "2"),
        ];
        for (n, expected) in cases {
            assert_eq!(thousandths(n), expected);
        }
    }

    #[test]
    fn amounts_are_formatted_for_people() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (16 << 30, "16.0 GiB"),
            (u64::MAX, "16384.0 PiB"),
        ];
        for (n, expected) in cases {
            assert_eq!(bytes(n), expected);
        }
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(count),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            (plural(1, "lease"), plural(0, "lease")),
            ("1 lease".into(), "0 leases".into())
        );
        let times = [0, 59_999, 61_000, 3_600_000, 90_000_000].map(duration);
        assert_eq!(times, ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]);
    }
}
