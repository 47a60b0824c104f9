//! Panics. A backend's panic is a fault of an op; a panic in tensord's own code is a bug.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Once,
};

use crate::guard;

/// Runs `work`, and returns a panic as an error, as a session must not panic on any input.
pub(super) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
        let about = PANIC.take().map(|(_, panic)| panic);
        format!("the session panicked: {}", about.unwrap_or_default())
    })
}

thread_local! {
    /// The last panic of this thread, and whether it was in tensord's own code.
    static PANIC: RefCell<Option<(bool, String)>> = const { RefCell::new(None) };
}

/// Returns this thread's panic since the last call, if it was in tensord's own code.
pub(super) fn take_own_panic() -> Option<String> {
    PANIC
        .take()
        .filter(|(is_own, _)| *is_own)
        .map(|(_, panic)| panic)
}

/// Installs a hook that records panics instead of printing them, as backends panic on ops
/// that they do not support.
pub(super) fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !guard::is_active() {
                return before(panic);
            }
            let file = panic.location().map_or("", |place| place.file());
            let crates = ["worker/src", "proto/src", "transport/src"];
            let is_ours = crates.iter().any(|dir| file.starts_with(dir));
            let payload = panic.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            // Messages about outputs that a backend or a custom op made otherwise than declared.
            let expected_messages = ["the custom op returned", "the backend returned"];
            let is_expected = text.is_some_and(|text| {
                expected_messages
                    .iter()
                    .any(|prefix| text.starts_with(prefix))
            });
            let is_own = is_ours && !is_expected;
            // The first panic in tensord's own code is kept.
            if is_own || PANIC.with_borrow(|last| !matches!(last, Some((true, _)))) {
                PANIC.set(Some((is_own, panic.to_string())));
            }
        }));
    });
}
