//! Logs: events of this process and its libraries, to stderr, for operators.
//! What a command has to say to its user goes to stdout and is no log.
//!
//! Much of what is logged comes from peers, so no event can forge a line, fill a disk or
//! command a terminal: values are escaped and cut ([`fields`]), and lines about peers are
//! counted instead of written when there are too many of a kind ([`rate`]).

mod fields;
mod rate;

use std::io::{self, IsTerminal};

use tracing_subscriber::{fmt, layer::SubscriberExt, registry, util::SubscriberInitExt};

use self::{fields::Shown, rate::Rated};
use crate::config::values::Filter;

/// Starts logging what `filter` lets through. Colours are for terminals whose
/// user has not asked for none (`NO_COLOR`).
pub(crate) fn start(filter: &Filter) {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let lines = fmt::layer()
        .fmt_fields(Shown)
        .with_ansi(io::stderr().is_terminal() && !no_color)
        .with_writer(io::stderr);
    registry()
        .with(lines)
        .with(filter.to_env_filter())
        .with(Rated::start())
        .init();
}
