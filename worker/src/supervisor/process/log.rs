//! The log of a process, as a part of this process's log.
//!
//! The program of a lease may have taken the process over, so each line is cut and escaped,
//! and has the process's id.

use tensord_proto::text::{MESSAGE_CHARS, sanitize};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    net::unix::pipe,
    task::consume_budget,
};
use tracing::{Level, debug, error, info, warn};

/// Maximum bytes of a line. The rest of a longer one becomes further lines.
const MAX_LINE_BYTES: u64 = 8 << 10;

/// Passes on the lines of the log of process `id` until it ends.
pub(super) async fn pass_on_log(id: u32, log: pipe::Receiver) {
    let mut log = BufReader::new(log);
    let mut line = Vec::new();
    loop {
        // A read takes many short lines, each of which is work.
        consume_budget().await;
        line.clear();
        let mut limited = (&mut log).take(MAX_LINE_BYTES);
        if !matches!(limited.read_until(b'\n', &mut line).await, Ok(1..)) {
            return;
        }
        let text = String::from_utf8_lossy(&line);
        let (level, text) = split_level(text.trim_end());
        if text.is_empty() {
            continue;
        }
        let text = sanitize(text, MESSAGE_CHARS);
        match level {
            Level::ERROR => error!(process = id, "{text}"),
            Level::WARN => warn!(process = id, "{text}"),
            Level::INFO => info!(process = id, "{text}"),
            _ => debug!(process = id, "{text}"),
        }
    }
}

/// Splits a line into its level and its text. A line without a level is not the log's: a
/// driver or a panic wrote it.
fn split_level(line: &str) -> (Level, &str) {
    let parsed = line.trim_start().split_once(' ');
    let parsed = parsed.and_then(|(level, text)| Some((level.parse().ok()?, text)));
    parsed.unwrap_or((Level::WARN, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_a_level_is_a_warning() {
        assert_eq!(split_level(" INFO it opened"), (Level::INFO, "it opened"));
        assert_eq!(split_level("DEBUG a b"), (Level::DEBUG, "a b"));
        assert_eq!(
            split_level("MESA: error"),
            (Level::WARN, "MESA: error"),
            "of a driver"
        );
    }
}
