//! Logs: events of this process and its libraries, on stderr, for operators.
//! Output of commands for their users goes to stdout and is not a log.
//!
//! Much of the logged text comes from peers. So that no event can forge a line, fill a disk
//! or control a terminal, values are escaped and cut ([`fields`]), and lines about peers
//! are counted instead of written if there are too many of a kind ([`rate`]).

mod fields;
mod rate;

use std::io::{self, IsTerminal};

use tracing_subscriber::{fmt, layer::SubscriberExt, registry, util::SubscriberInitExt};

use self::{fields::EscapedFields, rate::RateLimitLayer};
use crate::config::values::Filter;

/// Starts the log of a lease process on stderr. The worker reads each line and logs it as its
/// own, so a line has a level and a message, but no time.
#[cfg(target_os = "linux")]
pub(crate) fn start_in_lease_process(filter: &Filter) {
    let lines = fmt::layer()
        .fmt_fields(EscapedFields)
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .with_writer(io::stderr);
    registry().with(lines).with(filter.to_env_filter()).init();
}

/// Starts to log the events that `filter` passes. Uses colours if stderr is a terminal and
/// `NO_COLOR` is not set.
pub(crate) fn start(filter: &Filter) {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let lines = fmt::layer()
        .fmt_fields(EscapedFields)
        .with_ansi(io::stderr().is_terminal() && !no_color)
        .with_writer(io::stderr);
    registry()
        .with(lines)
        .with(filter.to_env_filter())
        .with(RateLimitLayer::start())
        .init();
}
