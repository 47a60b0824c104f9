//! What a user asked for, to stdout.

use std::io::{self, Write};

use crate::failure::Failure;

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
