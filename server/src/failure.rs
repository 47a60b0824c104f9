//! Failures of commands: a line on stderr, and an exit code by which scripts and
//! service managers can distinguish them.

use std::{io, process::ExitCode};

use tensord_proto::text::{MESSAGE_CHARS, sanitize};

use crate::{
    commands::{admin::error::AdminError, gateway::error::GatewayError},
    config::ConfigError,
    scheduler,
    state::StateError,
    status::StatusError,
};

/// The configuration is wrong (`EX_USAGE`): starting again changes nothing.
pub(crate) const USAGE: u8 = 64;
/// No device of this host works (`EX_UNAVAILABLE`).
pub(crate) const UNAVAILABLE: u8 = 69;
/// Any other failure.
const FAILED: u8 = 1;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The state directory could not be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The scheduler did not start.
    #[error(transparent)]
    Scheduler(#[from] scheduler::StartError),
    /// The scheduler stopped by itself.
    #[error("the scheduler stopped unexpectedly, which is a bug; see its log for the cause")]
    SchedulerEnded,
    /// The worker did not start.
    #[error("cannot offer this host's devices: {0}")]
    Worker(#[from] tensord_worker::StartError),
    /// The scheduler refused the worker.
    #[error(transparent)]
    WorkerRefused(#[from] tensord_worker::RefusedError),
    /// The gateway did not start, or stopped by itself.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// The demo failed.
    #[cfg(feature = "demo")]
    #[error(transparent)]
    Demo(#[from] crate::commands::demo::error::DemoError),
    /// The pool's status could not be fetched.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// An administrator's call failed.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl Failure {
    /// Returns a function that wraps an error of the operation `what`.
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) => USAGE,
            Self::Worker(
                tensord_worker::StartError::Thread(_) | tensord_worker::StartError::NoDevice { .. },
            ) => UNAVAILABLE,
            _ => FAILED,
        }
    }

    /// Prints the failure on one line of stderr, and returns the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        eprintln!("error: {}", self.line());
        ExitCode::from(self.exit_code())
    }

    fn line(&self) -> String {
        let text = self.to_string();
        let lines: Vec<_> = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .collect();
        sanitize(&lines.join("; "), MESSAGE_CHARS).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_differ_by_cause_and_messages_are_one_line() {
        let config = Failure::from(ConfigError::CommandLine("--listen: no".into()));
        let worker = tensord_worker::StartError::Thread(io::Error::other("no\n  threads\n"));
        let worker = Failure::from(worker);
        assert_eq!(
            (config.exit_code(), config.line()),
            (64, "--listen: no".into())
        );
        assert_eq!(worker.exit_code(), 69);
        assert_eq!(
            worker.line(),
            "cannot offer this host's devices: cannot start a thread for a device: no; threads"
        );
        assert_eq!(Failure::SchedulerEnded.exit_code(), 1);
    }
}
