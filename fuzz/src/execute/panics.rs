//! Panics: those of a backend are faults of ops, those of tensord's own code are bugs.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Once,
};

use crate::guard;

/// Runs `work`; a panic is an error here, as a session must not panic whatever comes.
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

/// The panic of this thread since this was asked last, if it was in tensord's own code.
pub(super) fn take_own_panic() -> Option<String> {
    PANIC
        .take()
        .filter(|(is_own, _)| *is_own)
        .map(|(_, panic)| panic)
}

/// Has panics noted instead of printed: backends panic at what they cannot do.
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
            // Those that say that a backend or a custom op made what was not declared.
            let expected_messages = ["the custom op returned", "the backend returned"];
            let is_expected = text.is_some_and(|text| {
                expected_messages
                    .iter()
                    .any(|prefix| text.starts_with(prefix))
            });
            let is_own = is_ours && !is_expected;
            // Of several the first of tensord's own counts.
            if is_own || PANIC.with_borrow(|last| !matches!(last, Some((true, _)))) {
                PANIC.set(Some((is_own, panic.to_string())));
            }
        }));
    });
}
