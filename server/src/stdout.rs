//! What a user asked for, to stdout.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;

/// `value` as JSON on several lines, with the end of the last.
///
/// # Panics
///
/// When `value` is not made of structs, numbers, texts and lists alone.
pub(crate) fn json(value: &impl Serialize) -> String {
    let text = serde_json::to_string_pretty(value);
    text.expect("numbers, texts and lists serialize without failing") + "\n"
}

/// Prints `text`, which ends its last line itself. A reader that has seen
/// enough (`tensord status | head -1`) is no failure.
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
