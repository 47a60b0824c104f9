//! A limit on the bytes that a connection may deliver before its peer is admitted.
//!
//! The HTTP/2 stack reads whatever a peer sends, within windows that are set once for the
//! whole connection. So the limit is applied below the stack: once the allowance is used
//! up, reads are pending until the peer is admitted.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

/// Bytes accepted from a peer that is not admitted. A call's headers and a first frame,
/// with the lease token of several hundred devices, fit.
pub(crate) const ALLOWANCE_BYTES: usize = 64 << 10;

/// Whether a connection's limit was lifted, and the task that waits for that. The limit
/// is lifted once, for good.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    lifted: AtomicBool,
    waiting: Mutex<Option<Waker>>,
}

impl Allowance {
    /// Creates an allowance without a limit, for the side that dialled.
    pub(crate) fn unbounded() -> Self {
        Self {
            lifted: AtomicBool::new(true),
            waiting: Mutex::default(),
        }
    }

    /// Lifts the limit, and wakes the waiting task.
    pub(crate) fn lift(&self) {
        self.lifted.store(true, Ordering::Release);
        let waiting = self.waiting().take();
        if let Some(waker) = waiting {
            waker.wake();
        }
    }

    /// Returns whether the limit was lifted.
    pub(crate) fn is_lifted(&self) -> bool {
        self.lifted.load(Ordering::Acquire)
    }

    /// Returns how many bytes may be read from a connection that has delivered `read` so
    /// far; `None` means no limit. Pending once the allowance is used up, until the limit
    /// is lifted.
    pub(crate) fn poll_room(&self, cx: &mut Context<'_>, read: usize) -> Poll<Option<usize>> {
        if self.is_lifted() {
            return Poll::Ready(None);
        }
        let room = ALLOWANCE_BYTES.saturating_sub(read);
        if room > 0 {
            return Poll::Ready(Some(room));
        }
        *self.waiting() = Some(cx.waker().clone());
        // The limit may have been lifted before the waker was stored.
        match self.is_lifted() {
            true => Poll::Ready(None),
            false => Poll::Pending,
        }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Option<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicUsize};

    use super::*;

    #[derive(Default)]
    struct WakeCounter(AtomicUsize);

    impl std::task::Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn reads_over_the_allowance_wait_until_it_is_lifted() {
        let wakes = Arc::new(WakeCounter::default());
        let waker = Waker::from(wakes.clone());
        let mut cx = Context::from_waker(&waker);
        let allowance = Allowance::default();
        for (read, room) in [(0, ALLOWANCE_BYTES), (ALLOWANCE_BYTES - 1, 1)] {
            assert_eq!(allowance.poll_room(&mut cx, read), Poll::Ready(Some(room)));
        }
        for read in [ALLOWANCE_BYTES, usize::MAX] {
            assert_eq!(allowance.poll_room(&mut cx, read), Poll::Pending);
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        allowance.lift();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert_eq!(allowance.poll_room(&mut cx, usize::MAX), Poll::Ready(None));
    }
}
