//! Output of commands to stdout.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;

/// Formats `value` as JSON on several lines, with a newline at the end.
///
/// # Panics
///
/// If `value` cannot be written as JSON. Structs, numbers, strings and lists always can.
pub(crate) fn json(value: &impl Serialize) -> String {
    let text = serde_json::to_string_pretty(value);
    text.expect("numbers, texts and lists serialize without failing") + "\n"
}

/// Prints `text` as it stands, without adding a newline. A closed pipe, as in
/// `tensord status | head -1`, is not an error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::system("write to stdout")(e))
        }
        _ => Ok(()),
    }
}
