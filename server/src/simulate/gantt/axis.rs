//! The axis of time.

use std::fmt::Write;

use super::super::svg::{LEFT, RIGHT, WIDTH, push_axis_title, push_text};

/// Steps of the axis of time, in seconds.
const STEPS: [u64; 17] = [
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400,
];

/// The most steps of the axis of time, if the longest is long enough.
const MAX_STEPS: u64 = 10;

/// Seconds in a day.
const DAY_S: u64 = 86_400;

/// The horizontal axis.
#[derive(Clone, Copy)]
pub(super) struct Axis {
    pub(super) start_ms: u64,
    pub(super) span_ms: u64,
}

impl Axis {
    /// Returns where a time is.
    pub(super) fn x(self, at_ms: u64) -> f64 {
        let part = at_ms.saturating_sub(self.start_ms) as f64 / self.span_ms as f64;
        LEFT + (WIDTH - LEFT - RIGHT) * part
    }

    /// Adds the axis below `bottom`, and a line from `top` at each of its marks.
    pub(super) fn push(self, svg: &mut String, top: f64, bottom: f64) {
        let span_s = self.span_ms / 1000;
        let fits = |step: &&u64| span_s / **step <= MAX_STEPS;
        let days = span_s.div_ceil(MAX_STEPS * DAY_S) * DAY_S;
        let step = STEPS.iter().find(fits).copied().unwrap_or(days);
        let (unit, name) = match step {
            0..60 => (1, "s"),
            60..3600 => (60, "min"),
            3600..DAY_S => (3600, "h"),
            _ => (DAY_S, "d"),
        };
        for mark in 0..=span_s / step.max(1) {
            let x = self.x(self.start_ms + 1000 * step * mark);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {top}V{:.1}\" stroke=\"#d0d7de\"/>",
                bottom + 4.0
            );
            let text = format!("{} {name}", step * mark / unit);
            push_text(svg, x, bottom + 18.0, "middle", &text);
        }
        push_axis_title(svg, bottom + 36.0);
    }
}
