//! Logs: events of this process and its libraries, to stderr, for operators.
//! What a command has to say to its user goes to stdout and is no log.

use std::io::{self, IsTerminal};

use crate::config::values::Filter;

/// Starts logging what `filter` lets through. Colours are for terminals whose
/// user has not asked for none (`NO_COLOR`).
pub(crate) fn start(filter: &Filter) {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter.to_env_filter())
        .with_ansi(io::stderr().is_terminal() && !no_color)
        .with_writer(io::stderr)
        .init();
}
