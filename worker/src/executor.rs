//! One thread per device, shared by all its sessions.
//!
//! A session with work stands in the run queue at most once. The executor runs
//! it for a quantum and puts it back at the end, so that sessions share the
//! device by time. A session that cannot go on (its client does not take its
//! answers) leaves the queue until it can; it costs the others nothing.
//!
//! What takes no time worth the name, a session may do where it stands ([`give_turn`]).
//!
//! A thread cannot be stopped from outside. One whose op does not return is *retired*: it
//! ends when the op returns after all, and a new one takes its place, with the same queue.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, Once, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tensord_proto::v1::{Error, ErrorCode};
use tracing::{debug, error};

use crate::{
    locks::lock,
    session::{Session, Turn},
};

/// How long a session runs before the next one's turn. Long against the cost
/// of switching, short against what a person or a training step would notice.
const QUANTUM: Duration = Duration::from_millis(5);

/// How long the end of a thread is waited for when its device is given up: one that is
/// stuck ends with the process.
const END: Duration = Duration::from_secs(5);

/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(5);

/// Name prefix of executor threads; the panic hook knows them by it.
const THREAD_PREFIX: &str = "tensord-device-";

/// A handle on one device's executor. Dropping the last one ends the thread.
pub(crate) struct Executor {
    index: usize,
    queue: Arc<RunQueue>,
    /// `None` if the latest could not be started.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What an executor has to do.
enum Job {
    /// To give a session a turn.
    Turn(Arc<Session>),
    Task(Box<dyn FnOnce() + Send>),
}

/// Sessions that have work and wait for their turn.
#[derive(Default)]
pub(crate) struct RunQueue {
    state: Mutex<RunState>,
    ready: Condvar,
}

#[derive(Default)]
struct RunState {
    jobs: VecDeque<Job>,
    /// The thread is to end.
    stopped: bool,
}

impl RunQueue {
    /// Puts `session` at the end. The caller makes sure that it is not in.
    pub(crate) fn push(&self, session: Arc<Session>) {
        self.put(Job::Turn(session));
    }

    /// Puts `task` at the end. It must not panic.
    pub(crate) fn push_task(&self, task: Box<dyn FnOnce() + Send>) {
        self.put(Job::Task(task));
    }

    fn put(&self, job: Job) {
        lock(&self.state).jobs.push_back(job);
        // Without the lock, which who is woken takes first.
        self.ready.notify_one();
    }

    /// The next session, if one waits.
    #[cfg(test)]
    pub(crate) fn try_pop(&self) -> Option<Arc<Session>> {
        match lock(&self.state).jobs.pop_front()? {
            Job::Turn(session) => Some(session),
            Job::Task(_) => panic!("a task waits, not a session"),
        }
    }

    fn pop(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self
                .ready
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has the thread end after what it is at, or lets another begin.
    fn set_stopped(&self, stopped: bool) {
        lock(&self.state).stopped = stopped;
        self.ready.notify_all();
    }
}

impl Executor {
    /// Starts the thread for the device at `index`.
    pub(crate) fn start(index: usize) -> std::io::Result<Self> {
        quiet_panics();
        let queue = Arc::new(RunQueue::default());
        let thread = start(index, queue.clone())?;
        Ok(Self {
            index,
            queue,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Has the thread end as soon as what it is at returns. What waits, waits for the
    /// next.
    pub(crate) fn retire(&self) {
        self.queue.set_stopped(true);
    }

    /// Whether the thread has not ended.
    pub(crate) fn has_thread(&self) -> bool {
        let thread = lock(&self.thread);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Starts a thread in the place of one that has ended.
    pub(crate) fn restart(&self) -> std::io::Result<()> {
        let mut thread = lock(&self.thread);
        self.queue.set_stopped(false);
        *thread = None;
        *thread = Some(start(self.index, self.queue.clone())?);
        Ok(())
    }

    pub(crate) fn queue(&self) -> &Arc<RunQueue> {
        &self.queue
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.queue.set_stopped(true);
        let until = Instant::now() + END;
        while self.has_thread() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        lock(&self.queue.state).jobs.clear();
    }
}

fn start(index: usize, queue: Arc<RunQueue>) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(format!("{THREAD_PREFIX}{index}"))
        .spawn(move || run(&queue))
}

fn run(queue: &RunQueue) {
    while let Some(job) = queue.pop() {
        match job {
            Job::Turn(session) => give_turn(queue, session),
            Job::Task(task) => task(),
        }
    }
}

/// Runs a session that is scheduled, and in no queue, for a quantum.
pub(crate) fn give_turn(queue: &RunQueue, session: Arc<Session>) {
    let until = Instant::now() + QUANTUM;
    let turn = catch_unwind(AssertUnwindSafe(|| {
        session.run(&mut || Instant::now() < until)
    }));
    match turn {
        Ok(Turn::Again) => queue.push(session),
        Ok(Turn::Over) => {}
        Err(_) => {
            // A bug of ours, as what ops do is caught closer to them. The
            // session still counts as scheduled; its next turn ends it.
            error!(session = %session.id, "the executor panicked; ending the session");
            let reason = "the worker failed while running this session";
            session.end(Error::new(ErrorCode::Internal, reason));
            queue.push(session);
        }
    }
}

/// Panics of ops are caught and become faults; the default hook would print
/// each with its backtrace as if the worker had failed.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            match thread.name() {
                Some(name) if name.starts_with(THREAD_PREFIX) => debug!("caught: {info}"),
                _ => default(info),
            }
        }));
    });
}
