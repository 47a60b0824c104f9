//! The result of a bench: numbers for programs, a table for people.

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    race::Results,
    stats::{Summary, round},
};

/// The result of a bench.
#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    /// The figures for programs.
    pub(crate) json: Value,
    /// The table for people.
    pub(crate) table: String,
}

/// Returns an empty table with columns of names, then columns of numbers.
pub(crate) fn table(names: &[&str], numbers: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_header([names, numbers].concat());
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for column in table.column_iter_mut().skip(names.len()) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Formats `value` for a cell: three significant digits, and separators for thousands.
pub(crate) fn format_number(value: f64) -> String {
    let rounded = round(value);
    if rounded.abs() < 1000.0 {
        return format!("{rounded}");
    }
    let digits = format!("{rounded:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        let left = digits.len() - at;
        if at > 0 && left.is_multiple_of(3) && text != "-" {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a value that may be missing for a cell.
pub(crate) fn format_optional(value: Option<f64>) -> String {
    value.map_or_else(|| "–".into(), format_number)
}

/// Adds a row for each finding: its name, its median and its quartiles.
pub(crate) fn add_results(table: &mut Table, first: &[&str], found: &Results) {
    for finding in found.iter() {
        let summary = &finding.summary;
        let cells = [
            finding.label.clone(),
            format_number(summary.median),
            format_quartiles(summary),
        ];
        table.add_row(first.iter().map(|&cell| cell.to_owned()).chain(cells));
    }
}

/// Formats quartiles for a cell.
pub(crate) fn format_quartiles(summary: &Summary) -> String {
    format!(
        "{} – {}",
        format_number(summary.q1),
        format_number(summary.q3)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_easy_to_read() {
        let check = |value: f64, expected: &str| assert_eq!(format_number(value), expected);
        check(0.0, "0");
        check(0.012_345, "0.0123");
        check(999.4, "999");
        check(1234.0, "1,234");
        check(200_704.0, "200,704");
        check(12_345_678.9, "12,345,679");
        check(-1234.0, "-1,234");
        assert_eq!(format_optional(None), "–");
    }

    #[test]
    fn numbers_are_right_aligned() {
        let mut table = table(&["peer"], &["ms"]);
        table.add_row(["one", "1"]);
        table.add_row(["two", "1,000"]);
        let text = table.trim_fmt() + "\n";
        assert!(text.contains("one       1\n"), "{text}");
    }
}
