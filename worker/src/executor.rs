//! One thread per device, shared by all sessions on that device.
//!
//! A session with work is in the run queue at most once. The executor runs it for a quantum
//! and then puts it back at the end, so that sessions share the device's time. A session
//! that is blocked (its client does not read its replies) leaves the queue until it can
//! continue, and costs the others nothing.
//!
//! Other processes may share the device. The thread returns the device's [turn](DeviceTurn) to the
//! worker when that is due, once the device has completed what was launched in the turn.
//!
//! Work of negligible duration may run on the caller's thread instead, by [`run_time_slice`].
//!
//! A thread cannot be killed. A thread whose op does not return is *retired*: it ends if
//! the op does return, and then a new thread takes over the same queue.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, Once, PoisonError, Weak},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tracing::debug;

use crate::{
    device_turn::{Demand, DeviceTurn},
    locks::lock,
    usage::Work,
};

/// How long a session runs before the next one's turn. Long against the cost of switching,
/// short against what a user or a training step would notice.
pub(crate) const QUANTUM: Duration = Duration::from_millis(5);

/// How long a device that others want is kept without work. The next frame of a program that waits
/// for a reply is a round trip and some ops away; had the device been given to another process
/// meanwhile, the program would wait for a turn of that. This is the idea of anticipatory scheduling
/// (Iyer and Druschel, "Anticipatory scheduling", SOSP 2001). The time counts as used, so it is at
/// the cost of the lease that waits for its program.
const IDLE_GRACE: Duration = Duration::from_millis(2);

/// How long dropping an executor waits for its thread to end. A thread that is stuck ends
/// with the process.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Polling interval of the wait for a thread to end.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Name prefix of executor threads, by which the panic hook recognises them.
const THREAD_PREFIX: &str = "tensord-device-";

/// A session, as an executor sees it.
pub(crate) trait TimeSliced: Send + Sync + 'static {
    /// Does queued work until `keep_going` returns false, no work is left, or the session must
    /// wait.
    fn run(self: &Arc<Self>, keep_going: &mut dyn FnMut() -> bool) -> TimeSliceEnd;

    /// Counts work for the session from `now` on, until the returned value is dropped.
    fn begin_work(&self, now: Instant) -> Work;

    /// Returns whether the device may still work for the session after [`run`](Self::run).
    fn is_asynchronous(&self) -> bool;

    /// Waits until the device has completed what it was given by the session.
    fn fence(&self);

    /// Makes the session end at its next turn, because [`run`](Self::run) panicked.
    fn end_after_panic(self: &Arc<Self>);
}

/// Whether a session needs another turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TimeSliceEnd {
    /// The session has more work.
    MoreWork,
    /// The session has no work, or must wait. The event for which it waits schedules it again.
    Parked,
}

/// The executor of one device. Dropping it stops the thread, and blocks until the thread has
/// ended or [`STOP_TIMEOUT`] has passed.
pub(crate) struct Executor<S> {
    index: u32,
    queue: Arc<RunQueue<S>>,
    /// `None` if the last start failed.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A job for an executor.
enum Job<S> {
    /// Runs a session for one turn.
    RunSession(Arc<S>),
    Task(Box<dyn FnOnce() + Send>),
}

/// What an executor's thread is to do.
enum Next<S> {
    Job(Job<S>),
    /// Return the device's turn.
    GiveBack,
}

/// The jobs of a device, in order: sessions that have work, and tasks.
pub(crate) struct RunQueue<S> {
    /// This process's turn on the device.
    turn: Arc<DeviceTurn>,
    /// The sessions for which the device may still work. Those that are gone have waited for it.
    launched: Mutex<Vec<Weak<S>>>,
    state: Mutex<RunState<S>>,
    ready: Condvar,
}

struct RunState<S> {
    jobs: VecDeque<Job<S>>,
    /// Whether the thread must end.
    stopped: bool,
}

impl<S> Default for RunQueue<S> {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl<S> RunQueue<S> {
    fn new(turn: Arc<DeviceTurn>) -> Self {
        Self {
            turn,
            launched: Mutex::default(),
            state: Mutex::new(RunState {
                jobs: VecDeque::new(),
                stopped: false,
            }),
            ready: Condvar::new(),
        }
    }

    /// Queues `session` at the end. The caller ensures that the session is not in the
    /// queue.
    pub(crate) fn push(&self, session: Arc<S>) {
        self.push_job(Job::RunSession(session));
    }

    /// Queues `task` at the end. It must not panic.
    pub(crate) fn push_task(&self, task: Box<dyn FnOnce() + Send>) {
        self.push_job(Job::Task(task));
    }

    fn push_job(&self, job: Job<S>) {
        lock(&self.state).jobs.push_back(job);
        // Notifies after releasing the lock, as the woken thread takes the lock first.
        self.ready.notify_one();
    }

    /// Removes the next session from the queue, if there is one.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn try_pop(&self) -> Option<Arc<S>> {
        match lock(&self.state).jobs.pop_front()? {
            Job::RunSession(session) => Some(session),
            Job::Task(_) => panic!("a task waits, not a session"),
        }
    }

    /// Waits for something to do. Returns `None` when the thread must end.
    fn next(&self) -> Option<Next<S>> {
        let mut idle_since = None;
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(Next::Job(job));
            }
            let idle_since: &Instant = idle_since.get_or_insert_with(Instant::now);
            let patience = match self.turn.demand() {
                Demand::None => None,
                Demand::WhenIdle => Some(IDLE_GRACE.saturating_sub(idle_since.elapsed())),
                Demand::Now => Some(Duration::ZERO),
            };
            state = match patience {
                None => {
                    let waited = self.ready.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
                Some(Duration::ZERO) => return Some(Next::GiveBack),
                Some(left) => {
                    let waited = self.ready.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Wakes the thread, if it waits for something to do.
    fn wake(&self) {
        // Under the lock, as the thread may be about to wait.
        let _state = lock(&self.state);
        self.ready.notify_all();
    }

    /// Sets whether the thread must end after its current job.
    fn set_stopped(&self, stopped: bool) {
        lock(&self.state).stopped = stopped;
        self.ready.notify_all();
    }
}

impl<S: TimeSliced> RunQueue<S> {
    /// Records that the device may work for a session after the session's time slice.
    fn record_launched(&self, session: &Arc<S>) {
        if !self.turn.is_shared() || !session.is_asynchronous() {
            return;
        }
        let mut launched = lock(&self.launched);
        let is_known = |known: &Weak<S>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(session));
        if !launched.iter().any(is_known) {
            launched.retain(|known| known.strong_count() > 0);
            launched.push(Arc::downgrade(session));
        }
    }

    /// Waits until the device has completed what all sessions have given it.
    fn fence(&self) {
        let launched = std::mem::take(&mut *lock(&self.launched));
        let launched = launched.iter().filter_map(Weak::upgrade);
        launched.for_each(|session| session.fence());
    }
}

impl<S: TimeSliced> Executor<S> {
    /// Starts the thread for the device at `index`.
    pub(crate) fn start(index: u32, turn: Arc<DeviceTurn>) -> std::io::Result<Self> {
        install_panic_hook();
        let queue = Arc::new(RunQueue::new(turn));
        let woken = Arc::downgrade(&queue);
        queue.turn.set_wake(Box::new(move || {
            if let Some(queue) = woken.upgrade() {
                queue.wake();
            }
        }));
        let thread = start(index, queue.clone())?;
        Ok(Self {
            index,
            queue,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Makes the thread end as soon as its current job returns. Queued jobs wait for the
    /// next thread.
    pub(crate) fn retire(&self) {
        self.queue.set_stopped(true);
    }

    /// Starts a new thread. The caller ensures that the previous one has ended.
    pub(crate) fn restart(&self) -> std::io::Result<()> {
        let mut thread = lock(&self.thread);
        self.queue.set_stopped(false);
        *thread = None;
        *thread = Some(start(self.index, self.queue.clone())?);
        Ok(())
    }

    pub(crate) fn queue(&self) -> &Arc<RunQueue<S>> {
        &self.queue
    }
}

impl<S> Executor<S> {
    /// Returns whether the thread is still running.
    pub(crate) fn has_thread(&self) -> bool {
        let thread = lock(&self.thread);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns whether the device's turn is requested and has not come yet.
    pub(crate) fn waits_for_turn(&self) -> bool {
        self.queue.turn.is_requested()
    }
}

impl<S> Drop for Executor<S> {
    fn drop(&mut self) {
        self.queue.set_stopped(true);
        self.queue.turn.close();
        let until = Instant::now() + STOP_TIMEOUT;
        while self.has_thread() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
        lock(&self.queue.state).jobs.clear();
    }
}

fn start<S: TimeSliced>(index: u32, queue: Arc<RunQueue<S>>) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(format!("{THREAD_PREFIX}{index}"))
        .spawn(move || run(&queue))
}

fn run<S: TimeSliced>(queue: &RunQueue<S>) {
    let fence = || queue.fence();
    while let Some(next) = queue.next() {
        let job = match next {
            Next::Job(job) => job,
            Next::GiveBack => {
                queue.turn.give_back(&fence);
                continue;
            }
        };
        queue.turn.begin(&fence);
        match job {
            Job::RunSession(session) => run_session(queue, session),
            Job::Task(task) => task(),
        }
        queue.turn.end();
    }
}

/// Runs a session for a quantum on this thread, or queues it if another process has the
/// device's turn or waits for it. The session must be scheduled, but not in the queue.
pub(crate) fn run_time_slice<S: TimeSliced>(queue: &RunQueue<S>, session: Arc<S>) {
    if !queue.turn.try_begin() {
        return queue.push(session);
    }
    run_session(queue, session);
    queue.turn.end();
}

/// Runs a session for a quantum.
fn run_session<S: TimeSliced>(queue: &RunQueue<S>, session: Arc<S>) {
    let now = Instant::now();
    let until = now + QUANTUM;
    let work = session.begin_work(now);
    queue.record_launched(&session);
    let turn = catch_unwind(AssertUnwindSafe(|| {
        session.run(&mut || Instant::now() < until)
    }));
    drop(work);
    match turn {
        Ok(TimeSliceEnd::MoreWork) => queue.push(session),
        Ok(TimeSliceEnd::Parked) => {}
        Err(_) => {
            session.end_after_panic();
            queue.push(session);
        }
    }
}

/// Keeps caught panics out of the log, except at debug level. Panics of ops become faults;
/// the default hook would print each with its backtrace as if the worker had failed.
fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            match thread.name() {
                Some(name) if name.starts_with(THREAD_PREFIX) => debug!("caught a panic: {info}"),
                _ => default(info),
            }
        }));
    });
}

#[cfg(test)]
mod tests;
