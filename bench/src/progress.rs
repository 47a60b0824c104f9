//! One line on stderr that shows what is being measured.
//!
//! The line appears only on a terminal, and only after a while: short runs and logs stay
//! clean. A process that measures for another reports to that process instead.

use std::{
    cell::Cell,
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long a run may take before the line appears.
const SHOW_DELAY: Duration = Duration::from_secs(2);

/// A progress report.
pub(crate) enum Update<'a> {
    /// A description of the current measurement.
    Doing(&'a str),
    /// A text to print.
    Note(&'a str),
}

/// A function that reports to another process.
type UpdateSink = Box<dyn Fn(Update<'_>)>;

/// The progress line. It is cleared when dropped.
pub(crate) struct Progress {
    bar: ProgressBar,
    update: Option<UpdateSink>,
    begun: Instant,
    waiting: Cell<bool>,
}

impl Progress {
    /// Creates a line that appears after a while, if stderr is a terminal.
    pub(crate) fn new() -> Self {
        Self::start(std::io::stderr().is_terminal())
    }

    /// Like [`new`](Self::new), with a bar of `steps` steps.
    pub(crate) fn counting(steps: u64) -> Self {
        let progress = Self::new();
        let template = "{elapsed_precise} [{bar:30}] {pos}/{len}, {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            progress.bar.set_style(style.progress_chars("=> "));
        }
        progress.bar.set_length(steps);
        progress
    }

    /// Counts a step as done.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }

    /// Passes all reports to `update`, immediately.
    pub(crate) fn reporting_to(update: impl Fn(Update<'_>) + 'static) -> Self {
        let mut progress = Self::start(false);
        progress.update = Some(Box::new(update));
        progress
    }

    /// Creates a line that never appears.
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

    /// Shows what is being measured.
    pub(crate) fn update(&self, what: &str) {
        if let Some(update) = &self.update {
            return update(Update::Doing(what));
        }
        if self.waiting.get() && self.begun.elapsed() > SHOW_DELAY {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.waiting.set(false);
        }
        self.bar.set_message(what.to_owned());
    }

    /// Prints `text` to stdout, without overlap with the progress line.
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
