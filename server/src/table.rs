//! Tables for people: aligned columns without borders, so that cells can be copied.

use std::fmt::Write;

use comfy_table::{CellAlignment, Row, Table, presets::NOTHING};

/// Formats a table, each line with its newline. The columns in `right` are aligned right.
pub(crate) fn text<const N: usize>(
    header: [&str; N],
    right: &[usize],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    text_of(&header, right, rows)
}

/// As [`text`], with columns that are chosen at run time. Each row has as many cells as the header.
pub(crate) fn text_of<R: Into<Row>>(
    header: &[&str],
    right: &[usize],
    rows: impl IntoIterator<Item = R>,
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for index in right {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        table.add_row(row);
    }
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Width of the names that [`push_line`] writes.
const NAME_WIDTH: usize = 10;

/// Adds an indented line with a name, which may be empty, and a value.
pub(crate) fn push_line(text: &mut String, name: &str, value: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "  {name:NAME_WIDTH$} {value}");
}
