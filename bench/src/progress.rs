//! One line on stderr that says what is being measured.
//!
//! Only on a terminal, and only once it has taken a while: short runs and logs
//! stay clean. A process that measures for another tells that one instead.

use std::{
    cell::Cell,
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long a run may take before it shows a line.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is said.
pub(crate) enum Update<'a> {
    /// What is going on.
    Doing(&'a str),
    /// Something to print.
    Note(&'a str),
}

/// Tells another process.
type UpdateSink = Box<dyn Fn(Update<'_>)>;

/// The line. Clears itself when dropped.
pub(crate) struct Progress {
    bar: ProgressBar,
    update: Option<UpdateSink>,
    begun: Instant,
    waiting: Cell<bool>,
}

impl Progress {
    /// A line that appears when it is due, if stderr is a terminal.
    pub(crate) fn new() -> Self {
        Self::start(std::io::stderr().is_terminal())
    }

    /// As [`new`](Self::new), with a bar of `steps`.
    pub(crate) fn counting(steps: u64) -> Self {
        let progress = Self::new();
        let template = "{elapsed_precise} [{bar:30}] {pos}/{len}, {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            progress.bar.set_style(style.progress_chars("=> "));
        }
        progress.bar.set_length(steps);
        progress
    }

    /// A step is done.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }

    /// Has `update` say everything, at once.
    pub(crate) fn sending(update: impl Fn(Update<'_>) + 'static) -> Self {
        let mut progress = Self::start(false);
        progress.update = Some(Box::new(update));
        progress
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
            update: None,
            begun: Instant::now(),
            waiting: Cell::new(wanted),
        }
    }

    /// Says what is going on.
    pub(crate) fn update(&self, what: &str) {
        if let Some(update) = &self.update {
            return update(Update::Doing(what));
        }
        if self.waiting.get() && self.begun.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.waiting.set(false);
        }
        self.bar.set_message(what.to_owned());
    }

    /// Prints `text` to stdout without leaving half a line behind.
    pub(crate) fn print(&self, text: &str) {
        if let Some(update) = &self.update {
            return update(Update::Note(text));
        }
        self.bar.suspend(|| println!("{text}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
