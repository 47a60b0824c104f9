//! What the pictures of simulations have in common.

use std::fmt::Write;

use super::{metrics::Outcome, report::order_name};
use crate::human;

/// Number of tenants with a colour of their own. All others share one.
pub(super) const MAX_TENANTS: usize = 7;

/// Colours of the tenants, and that of all other tenants at the end (those of Okabe and Ito, "Color Universal
/// Design", 2008, which colour-blind people can distinguish).
pub(super) const COLOURS: [&str; MAX_TENANTS + 1] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
];

/// The most characters of a name in the legend.
const NAME_CHARS: usize = 12;

/// Width of a picture.
pub(super) const WIDTH: f64 = 900.0;
pub(super) const LEFT: f64 = 70.0;
pub(super) const RIGHT: f64 = 20.0;

/// Returns the start of a picture of this height. Its background is white, so that it can be read on a dark page.
pub(super) fn start(height: f64, label: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"{label}\" font-family=\"system-ui, sans-serif\" \
         font-size=\"12\" fill=\"#24292f\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    )
}

/// Adds the title of a run below `top`.
pub(super) fn push_title(svg: &mut String, outcome: &Outcome, top: f64) {
    let title = format!(
        "order {}: {:.1} % of {} devices in use",
        order_name(outcome.order),
        100.0 * outcome.utilisation,
        human::count(outcome.devices)
    );
    // Writing to a string does not fail.
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"{}\" font-size=\"14\" font-weight=\"600\">{title}</text>",
        top + 20.0
    );
}

/// Adds the names of tenants, with their colours, below the title of a run.
pub(super) fn push_legend(svg: &mut String, names: &[String], top: f64) {
    let mut x = LEFT;
    for (name, colour) in names.iter().zip(COLOURS) {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>",
            top + 29.0
        );
        push_text(
            svg,
            x + 14.0,
            top + 38.0,
            "start",
            &shortened(name, NAME_CHARS),
        );
        x += (WIDTH - LEFT - RIGHT) / COLOURS.len() as f64;
    }
}

/// Adds what the axis of time shows.
pub(super) fn push_axis_title(svg: &mut String, y: f64) {
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    push_text(svg, middle, y, "middle", "time since the first arrival");
}

/// Returns a name with at most so many characters.
pub(super) fn shortened(name: &str, most: usize) -> String {
    match name.chars().count() > most {
        true => name.chars().take(most - 1).chain(['…']).collect(),
        false => name.into(),
    }
}

/// Adds a line of text.
pub(super) fn push_text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    // Names have letters, digits and - _ . only, so there is nothing to escape.
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
    );
}
