//! The process that a worker starts for each lease: this program, with a reserved argument.
//!
//! The argument is not a command of the command line, as only a worker starts the process. The
//! process takes its log filter from the environment; the worker sends everything else over a
//! channel on stdin.

use std::{ffi::OsString, io::IsTerminal, path::PathBuf, process::ExitCode};

use tensord_worker::{CustomOps, Isolation, ProcessProgram, run_lease_process};

use crate::{allocator, config::values::Filter, logging};

/// The first command-line argument of a lease process.
const ARGUMENT: &str = "lease-process";

/// The environment variable with the log filter of a lease process.
const LOG: &str = "TENSORD_LOG";

/// Returns the isolation that runs each lease in a process of this program. The processes use
/// the log filter `log` and must not open any path in `hidden`.
pub(crate) fn isolation(log: &Filter, hidden: Vec<PathBuf>) -> Isolation {
    Isolation::Processes(ProcessProgram {
        env: vec![(LOG.into(), log.to_string().into())],
        hidden,
        ..ProcessProgram::current("tensord", ARGUMENT)
    })
}

/// Returns whether this process was started for a lease.
pub(crate) fn is_requested() -> bool {
    std::env::args_os().nth(1) == Some(OsString::from(ARGUMENT))
}

/// Runs the process of a lease to its end.
pub(crate) fn run() -> ExitCode {
    if std::io::stdin().is_terminal() {
        eprintln!("error: `tensord {ARGUMENT}` is started by a worker, not by hand");
        return ExitCode::from(crate::failure::USAGE);
    }
    let filter = std::env::var(LOG).ok().and_then(|log| log.parse().ok());
    logging::start_in_lease_process(&filter.unwrap_or_default());
    run_lease_process(CustomOps::new(), || {
        // Without the thread, memory is returned later.
        let _ = allocator::start_purge_thread();
    })
}
