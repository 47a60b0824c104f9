//! Waits for a future on a thread, whether an async runtime runs on that thread or not.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// Wakes a thread that waits in [`block_on`].
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs `future` on this thread and blocks until it has an output. Returns `None` if it has
/// none after `timeout`; without a `timeout` there is no limit.
///
/// Tokio's `block_on` panics on a thread of a runtime; this function does not. The future
/// must not depend on this thread for anything but being polled.
pub(crate) fn block_on<F: Future>(future: F, timeout: Option<Duration>) -> Option<F::Output> {
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(output);
        }
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            None => thread::park(),
            Some(Duration::ZERO) => return None,
            Some(left) => thread::park_timeout(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn block_on_waits_for_another_thread() {
        let (sender, receiver) = oneshot::channel();
        let other = thread::spawn(move || sender.send(7));
        assert_eq!(block_on(receiver, None), Some(Ok(7)));
        other.join().unwrap().unwrap();
    }

    #[tokio::test]
    async fn block_on_works_within_a_runtime_and_ends_at_its_timeout() {
        assert_eq!(block_on(async { 1 }, None), Some(1));
        let never = std::future::pending::<()>();
        assert_eq!(block_on(never, Some(Duration::from_millis(5))), None);
    }
}
