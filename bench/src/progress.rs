//! One line on stderr that says what is being measured.
//!
//! Only on a terminal, and only once it has taken a while: short runs and logs
//! stay clean.

use std::{
    cell::Cell,
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long a run may take before it shows a line.
const PATIENCE: Duration = Duration::from_secs(2);

/// The line. Clears itself when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    begun: Instant,
    waiting: Cell<bool>,
}

impl Progress {
    /// A line that appears when it is due, if stderr is a terminal.
    pub(crate) fn new() -> Self {
        Self::start(std::io::stderr().is_terminal())
    }

    /// A line that never appears.
    #[cfg(test)]
    pub(crate) fn hidden() -> Self {
        Self::start(false)
    }

    fn start(wanted: bool) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{elapsed_precise}  {msg}") {
            bar.set_style(style);
        }
        Self {
            bar,
            begun: Instant::now(),
            waiting: Cell::new(wanted),
        }
    }

    /// Says what is going on.
    pub(crate) fn tell(&self, what: &str) {
        if self.waiting.get() && self.begun.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.waiting.set(false);
        }
        self.bar.set_message(what.to_owned());
    }

    /// Prints `text` to stdout without leaving half a line behind.
    pub(crate) fn print(&self, text: &str) {
        self.bar.suspend(|| println!("{text}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
