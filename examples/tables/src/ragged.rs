//! Finds the row of a CSV file that has too many fields. Polars refuses such a file without
//! naming the row. Rows with too few fields are no matter of this module: Polars fills them up
//! with empty fields.

use std::{fs, path::Path};

/// A row with more fields than the header.
#[derive(Debug, PartialEq)]
pub(crate) struct Ragged {
    /// From 1 on, after the header.
    row: usize,
    fields: usize,
    expected: usize,
}

impl std::fmt::Display for Ragged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            row,
            fields,
            expected,
        } = self;
        write!(
            f,
            "row {row}, column {}: the row has {fields} fields, but the header has {expected}; is \
             a comma in a field that is not in quotes?",
            expected + 1
        )
    }
}

/// Returns the first row with more fields than the header, if there is one.
pub(crate) fn first(path: &Path) -> Option<Ragged> {
    find(&fs::read(path).ok()?)
}

fn find(bytes: &[u8]) -> Option<Ragged> {
    let mut expected = None;
    let (mut row, mut fields, mut in_quotes) = (0, 1, false);
    for byte in bytes.iter().chain(b"\n") {
        match byte {
            b'"' => in_quotes = !in_quotes,
            b',' if !in_quotes => fields += 1,
            b'\n' if !in_quotes => {
                let expected = *expected.get_or_insert(fields);
                if fields > expected {
                    return Some(Ragged {
                        row,
                        fields,
                        expected,
                    });
                }
                (row, fields) = (row + 1, 1);
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_row_with_too_many_fields_is_found() {
        let cases: &[(&str, Option<(usize, usize)>)] = &[
            ("a,b\n1,2\n3,4\n", None),
            ("a,b\n1,2\n3,4,5\n6,7,8,9\n", Some((2, 3))),
            ("a,b\n1,2,3", Some((1, 3))),
            ("a,b\n\"1,2\",3\n\"4\n5\",6\n7,8,9\n", Some((3, 3))),
            ("a,b\n1\n", None),
            ("", None),
        ];
        for (text, expected) in cases {
            let found = find(text.as_bytes()).map(|ragged| (ragged.row, ragged.fields));
            assert_eq!(found, *expected, "{text:?}");
        }
    }
}
