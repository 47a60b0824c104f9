//! Keeps panics of a training run off the screen, and records the first one's message.
//!
//! When several devices train, Burn reports a failure by a panic on the thread where it
//! occurs. Every thread that waits for this one then panics, too, with a message that does
//! not name the cause.

use std::panic;
use std::sync::{Arc, OnceLock};

use tracing::debug;

/// The message of the first panic after [`install_hook`](Self::install_hook).
pub struct Panics(Arc<OnceLock<String>>);

impl Panics {
    /// Installs a panic hook that logs panics at level debug and prints nothing. It stays
    /// for the rest of the process, as some threads panic after the training has ended.
    pub fn install_hook() -> Self {
        let first = Arc::new(OnceLock::new());
        let hook = first.clone();
        panic::set_hook(Box::new(move |panic| {
            debug!("{panic}");
            hook.get_or_init(|| panic.payload_as_str().unwrap_or_default().to_owned());
        }));
        Self(first)
    }

    /// Returns the message of the first panic, if there was one.
    pub fn first(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}
