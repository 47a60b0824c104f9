//! Statistics of repeated measurements. Pure: numbers in, numbers out.
//!
//! Medians and quartiles, not means: on a shared machine the slow samples mostly measure
//! other processes.

use serde::{Deserialize, Serialize};

/// The median and the quartiles of some samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Half of the samples are below this value.
    pub(crate) median: f64,
    /// A quarter of the samples is below this value.
    pub q1: f64,
    /// Three quarters of the samples are below this value.
    pub q3: f64,
}

impl Summary {
    /// Summarises `samples`. Returns `None` without samples, or if a sample is NaN.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|sample| sample.is_nan()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 0.5),
            q1: quantile(&sorted, 0.25),
            q3: quantile(&sorted, 0.75),
        })
    }
}

/// Returns the value below which the share `q` of `sorted` lies, interpolated.
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Returns `value / base`, or `None` if `base` is not positive or the ratio is not finite.
pub(crate) fn ratio(value: f64, base: f64) -> Option<f64> {
    let ratio = value / base;
    (base > 0.0 && ratio.is_finite()).then_some(ratio)
}

/// Rounds `value` to three significant digits, for JSON and tables.
pub(crate) fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    // Whole numbers keep their digits: they are counts.
    let digits = (3 - 1 - value.abs().log10().floor() as i32).max(0);
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_interpolated() {
        let check = |samples: &[f64], expected: [f64; 3]| {
            let found = Summary::of(samples).unwrap();
            assert_eq!([found.q1, found.median, found.q3], expected, "{samples:?}");
        };
        check(&[7.0], [7.0, 7.0, 7.0]);
        check(&[2.0, 1.0], [1.25, 1.5, 1.75]);
        check(&[5.0, 1.0, 4.0, 2.0, 3.0], [2.0, 3.0, 4.0]);
        check(&[1.0, 2.0, 3.0, 4.0, 1000.0, 6.0], [2.25, 3.5, 5.5]);
    }

    #[test]
    fn empty_samples_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(ratio(1.0, 0.0), None);
        assert_eq!(ratio(f64::INFINITY, 1.0), None);
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
    }

    #[test]
    fn rounding_keeps_three_digits_and_whole_numbers() {
        let check = |value: f64, expected: f64| assert_eq!(round(value), expected, "{value}");
        check(0.0, 0.0);
        check(0.123_456, 0.123);
        check(0.000_123_46, 0.000_123);
        check(12.345, 12.3);
        check(123.45, 123.0);
        check(200_704.0, 200_704.0);
        check(-1.239, -1.24);
    }
}
