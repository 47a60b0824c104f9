//! Panics of a training: kept off the screen, and the first one's words for the error.
//!
//! When several devices train, Burn tells of a failure by a panic on the thread that meets it.
//! Others follow, on every thread that waits for that one, and say nothing of the cause.

use std::panic;
use std::sync::{Arc, OnceLock};

use tracing::debug;

/// What the process hears of panics.
pub(crate) struct Panics(Arc<OnceLock<String>>);

impl Panics {
    /// From here on, panics go to the log at level debug and nowhere else. That is for the rest of
    /// the process: some threads panic after the training has ended.
    pub(crate) fn hush() -> Self {
        let first = Arc::new(OnceLock::new());
        let hook = first.clone();
        panic::set_hook(Box::new(move |panic| {
            debug!("{panic}");
            hook.get_or_init(|| panic.payload_as_str().unwrap_or_default().to_owned());
        }));
        Self(first)
    }

    /// What the first one said.
    pub(crate) fn first(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}
