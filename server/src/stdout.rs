//! Output of commands to stdout.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Number;
use tensord_proto::share::WHOLE_PERMILLE;

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

/// Returns a number that is given in thousandths for JSON: a whole number where it is one.
pub(crate) fn thousandths(n: u64) -> Number {
    let whole = u64::from(WHOLE_PERMILLE);
    let fraction = Number::from_f64(n as f64 / f64::from(WHOLE_PERMILLE));
    let fraction = fraction.filter(|_| !n.is_multiple_of(whole));
    fraction.unwrap_or_else(|| (n / whole).into())
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
