//! One thread per device, shared by all its sessions.
//!
//! A session with work stands in the run queue at most once. The executor runs
//! it for a quantum and puts it back at the end, so that sessions share the
//! device by time. A session that cannot go on (its client does not take its
//! answers) leaves the queue until it can; it costs the others nothing.
//!
//! What takes no time worth the name, a session may do where it stands ([`give_turn`]).

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

/// Name prefix of executor threads; the panic hook knows them by it.
const THREAD_PREFIX: &str = "tensord-device-";

/// A handle on one device's executor. Dropping the last one ends the thread.
pub(crate) struct Executor {
    queue: Arc<RunQueue>,
    thread: Option<JoinHandle<()>>,
}

/// Sessions that have work and wait for their turn.
#[derive(Default)]
pub(crate) struct RunQueue {
    state: Mutex<RunState>,
    ready: Condvar,
}

#[derive(Default)]
struct RunState {
    sessions: VecDeque<Arc<Session>>,
    stopped: bool,
}

impl RunQueue {
    /// Puts `session` at the end. The caller makes sure that it is not in.
    pub(crate) fn push(&self, session: Arc<Session>) {
        lock(&self.state).sessions.push_back(session);
        // Without the lock, which who is woken takes first.
        self.ready.notify_one();
    }

    /// The next session, if one waits.
    #[cfg(test)]
    pub(crate) fn try_pop(&self) -> Option<Arc<Session>> {
        lock(&self.state).sessions.pop_front()
    }

    fn pop(&self) -> Option<Arc<Session>> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            if let Some(session) = state.sessions.pop_front() {
                return Some(session);
            }
            state = self
                .ready
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopped = true;
        state.sessions.clear();
        self.ready.notify_all();
    }
}

impl Executor {
    /// Starts the thread for the device at `index`.
    pub(crate) fn start(index: usize) -> std::io::Result<Self> {
        quiet_panics();
        let queue = Arc::new(RunQueue::default());
        let runs = queue.clone();
        let thread = std::thread::Builder::new()
            .name(format!("{THREAD_PREFIX}{index}"))
            .spawn(move || run(&runs))?;
        Ok(Self {
            queue,
            thread: Some(thread),
        })
    }

    pub(crate) fn queue(&self) -> &Arc<RunQueue> {
        &self.queue
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.queue.stop();
        if let Some(thread) = self.thread.take() {
            // It catches what ops do; if it panicked all the same, the hook said so.
            let _ = thread.join();
        }
    }
}

fn run(queue: &RunQueue) {
    while let Some(session) = queue.pop() {
        give_turn(queue, session);
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
