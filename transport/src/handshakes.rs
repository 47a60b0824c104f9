//! A thread for the TLS handshakes with peers that are not admitted.
//!
//! A handshake takes some 0.3 ms of processor time, and anybody who reaches the port can
//! cause one. On the threads of the process's runtime, a storm of connections would delay
//! every session by the handshakes ahead of it. On a thread of their own, handshakes
//! delay only each other and take at most one core. On Linux the thread also has a lower
//! priority than all others: where cores are short, sessions come first, and a tenth of a
//! core remains for handshakes.
//!
//! The way to the thread and back adds some 0.3 ms to a handshake, so the first few of each
//! second run on the threads of their callers, where they take at most a hundredth of a
//! core.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
};

/// Niceness of the thread: the kernel gives it about a tenth of the processor time that it
/// gives to a busy thread of niceness 0.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;

/// Number of handshakes that may run on the caller's threads in each [`WINDOW`].
const DIRECT: u32 = 32;

/// See [`DIRECT`].
const WINDOW: Duration = Duration::from_secs(1);

/// Owns the thread. Dropping this value ends the handshakes that are in progress.
#[derive(Debug)]
pub(crate) struct Handshakes(Option<Runtime>);

impl Handshakes {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// When the operating system refuses the thread.
    pub(crate) fn start() -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("handshakes")
            .on_thread_start(lower_priority)
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// Returns a handle that runs handshakes on the thread.
    pub(crate) fn handle(&self) -> Handle {
        let runtime = self.0.as_ref().expect("the field is taken only on drop");
        Handle {
            thread: runtime.handle().clone(),
            direct: Arc::default(),
        }
    }
}

/// Lowers the priority of the calling thread on Linux, where each thread has a priority
/// of its own.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    // Linux has no way to refuse a lower priority; handshakes would work without it, too.
    let _ = rustix::process::setpriority_process(None, NICENESS);
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        // A plain drop would wait for the thread, which async code must not do.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs handshakes. All clones share one count of those that run on their callers'
/// threads.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    thread: tokio::runtime::Handle,
    direct: Arc<Mutex<Count>>,
}

impl Handle {
    /// Runs `handshake` on the caller's thread, or on the thread for handshakes if there
    /// were many in this [`WINDOW`]. Its socket stays registered with the runtime of the
    /// caller, which only has to wake the thread. Dropping the future ends the handshake.
    ///
    /// # Errors
    ///
    /// The handshake's, or that the thread has ended.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        handshake: impl Future<Output = io::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        if self.is_direct(Instant::now()) {
            return handshake.await;
        }
        let mut task = JoinSet::new();
        task.spawn_on(handshake, &self.thread);
        let done = task.join_next().await.expect("the set has this one task");
        done.map_err(io::Error::other)?
    }

    fn is_direct(&self, now: Instant) -> bool {
        let mut direct = self.direct.lock().unwrap_or_else(PoisonError::into_inner);
        direct.take(now)
    }
}

/// The number of handshakes that ran on their callers' threads in the current window.
#[derive(Debug, Default)]
struct Count {
    since: Option<Instant>,
    count: u32,
}

impl Count {
    /// Counts a handshake at `now` if the window has room for one, and returns whether it
    /// had.
    fn take(&mut self, now: Instant) -> bool {
        let is_over = |since: Instant| now.saturating_duration_since(since) >= WINDOW;
        if self.since.is_none_or(is_over) {
            (self.since, self.count) = (Some(now), 0);
        }
        self.count = self.count.saturating_add(1);
        self.count <= DIRECT
    }
}

#[cfg(test)]
mod tests {
    use std::{future, thread};

    use tokio::sync::oneshot;

    use super::*;

    /// Returns a handle that has used up the direct handshakes of this second.
    fn busy(handshakes: &Handshakes) -> Handle {
        let handle = handshakes.handle();
        handle.direct.lock().unwrap().count = DIRECT;
        handle.direct.lock().unwrap().since = Some(Instant::now() + WINDOW);
        handle
    }

    #[test]
    fn each_window_has_room_for_some_direct_handshakes() {
        let start = Instant::now();
        let mut count = Count::default();
        for window in 0..3 {
            let begin = start + WINDOW * window;
            assert!((0..DIRECT).all(|n| count.take(begin + Duration::from_millis(n.into()))));
            assert!(!count.take(begin + WINDOW / 2));
            assert!(!count.take(begin + WINDOW - Duration::from_nanos(1)));
        }
    }

    #[tokio::test]
    async fn first_handshakes_run_where_they_are_and_others_on_the_thread() {
        let handshakes = Handshakes::start().unwrap();
        let handle = handshakes.handle();
        let here = thread::current().id();
        let ran_on = || async { Ok(thread::current().id()) };
        assert_eq!(handle.run(ran_on()).await.unwrap(), here);
        let name = async { Ok(thread::current().name().map(str::to_owned)) };
        let name = busy(&handshakes).run(name).await.unwrap();
        assert_eq!(name.as_deref(), Some("handshakes"));
    }

    #[tokio::test]
    async fn dropping_the_future_ends_the_handshake() {
        let handshakes = Handshakes::start().unwrap();
        let (alive, mut ended) = oneshot::channel::<()>();
        let handle = busy(&handshakes);
        let endless = handle.run(async move {
            let _alive = alive;
            future::pending::<io::Result<()>>().await
        });
        let expelled = tokio::select! {
            biased;
            _ = endless => false,
            () = tokio::task::yield_now() => true,
        };
        assert!(expelled);
        (&mut ended).await.unwrap_err();
    }

    #[tokio::test]
    async fn dropping_the_owner_ends_the_handshakes_in_progress() {
        let handshakes = Handshakes::start().unwrap();
        let handle = busy(&handshakes);
        let endless = tokio::spawn(async move {
            let endless = future::pending::<io::Result<()>>();
            handle.run(endless).await
        });
        tokio::task::yield_now().await;
        drop(handshakes);
        endless.await.unwrap().unwrap_err();
    }
}
