//! How a process ended, for people.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

/// Returns a description of the end of a process, to follow the name of the process.
pub(super) fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "it exited".into(),
        (Some(code), _) => format!("it exited with code {code}"),
        (None, Some(signal)) => match name(signal) {
            Some(name) => format!("it was ended by signal {signal} ({name})"),
            None => format!("it was ended by signal {signal}"),
        },
        (None, None) => format!("it ended with {status}"),
    }
}

/// Returns the name of a signal by which programs crash or are killed, with the numbers of
/// Linux.
fn name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL: an invalid instruction",
        5 => "SIGTRAP",
        6 => "SIGABRT: it aborted itself",
        7 => "SIGBUS: a memory error",
        8 => "SIGFPE: an arithmetic error",
        9 => "SIGKILL: killed, maybe for a lack of memory on the host",
        11 => "SIGSEGV: an invalid memory access",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        31 => "SIGSYS: a forbidden system call",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_name_codes_and_signals() {
        let cases = [
            (0, "it exited"),
            (3 << 8, "it exited with code 3"),
            (
                11,
                "it was ended by signal 11 (SIGSEGV: an invalid memory access)",
            ),
            (64, "it was ended by signal 64"),
        ];
        for (status, expected) in cases {
            assert_eq!(describe(ExitStatus::from_raw(status)), expected);
        }
    }
}
