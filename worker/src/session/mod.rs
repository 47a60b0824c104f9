//! A session on the worker: an op stream, the tensors it made, and its wire.
//!
//! Three parties meet here, each with a lock of its own so that none waits for
//! another's work: the connection's reader brings work ([`Session::receive`]),
//! the device's executor carries it out ([`Session::run`]), and the
//! connection's writer takes what is to be sent ([`Session::next_to_send`]).
//! Connections come and go; a session outlives them.

mod dataflow;
mod intake;
mod outgo;
mod runner;
#[cfg(test)]
mod tests;

pub(crate) use self::outgo::Outgoing;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use tensord_proto::{
    ids::{LeaseId, SessionId},
    v1::{Closed, Error, ErrorCode, frame},
};
use tensord_transport::{
    duplex::{Duplex, FrameError},
    resume::ResumeError,
};
use tokio::{runtime::Handle, sync::Notify};
use tracing::{debug, info};

use self::{
    intake::{Intake, Item},
    runner::{Reply, Runner},
};
use crate::{backend::Device, executor::RunQueue, memory::DeviceMemory};

/// Bytes of work a client may be ahead of the executor, encoded: some hundred
/// thousand ops, or the uploads of a few steps.
pub(crate) const WINDOW_BYTES: u64 = 32 << 20;

/// Bytes of answers kept for a client that has not confirmed them; beyond this
/// the session waits.
const OUTBOX_BYTES: usize = 64 << 20;

/// Whether a session that ran wants another turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has more work.
    Again,
    /// It has none, or must wait; it will put itself back.
    Over,
}

/// What a session needs of its device.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) queue: Arc<RunQueue>,
    pub(crate) worker: Arc<str>,
    /// Ops carried out on the device.
    pub(crate) ops: Arc<AtomicU64>,
    /// Where slow reads are awaited.
    pub(crate) runtime: Handle,
}

pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) lease: LeaseId,
    pub(crate) device_index: u32,
    site: Site,
    wire: Mutex<Wire>,
    intake: Mutex<Intake>,
    todo: Mutex<Todo>,
    /// `None` once the session ended.
    runner: Mutex<Option<Runner>>,
    /// `todo.end` is set, for a look without the lock.
    ending: AtomicBool,
    /// Wakes the writer.
    news: Notify,
}

struct Wire {
    duplex: Duplex,
    /// Counts connections; only the latest may touch the wire.
    connection: u64,
    /// Since when there is none.
    detached: Option<Instant>,
    /// Everything was said: the connection ends once it is delivered.
    closing: bool,
}

#[derive(Default)]
struct Todo {
    items: VecDeque<Item>,
    /// In the run queue, or running.
    scheduled: bool,
    /// Waits until the client takes its answers.
    blocked: bool,
    /// Set once; nothing is carried out after it.
    end: Option<Error>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding one of these is a bug that was reported; the state
    // is whole between statements and the session is better ended than stuck.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub(crate) fn new(
        id: SessionId,
        lease: LeaseId,
        device_index: u32,
        seed: u64,
        site: Site,
    ) -> Arc<Self> {
        let runner = Runner::new(
            site.device.open(),
            site.memory.open(),
            site.worker.clone(),
            seed,
        );
        // The client always takes its answers, so it grants without a bound.
        let duplex = Duplex::new(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES);
        Arc::new(Self {
            id,
            lease,
            device_index,
            wire: Mutex::new(Wire {
                duplex,
                connection: 0,
                detached: Some(Instant::now()),
                closing: false,
            }),
            intake: Mutex::new(Intake::new(site.memory.clone())),
            todo: Mutex::default(),
            runner: Mutex::new(Some(runner)),
            ending: AtomicBool::new(false),
            news: Notify::new(),
            site,
        })
    }

    /// A connection takes over. The client received everything up to
    /// `received`. Returns the connection's number, and what this side received
    /// and grants.
    pub(crate) fn attach(&self, received: u64) -> Result<(u64, u64, u64), ResumeError> {
        // Waits for the reader before to finish the frame it is at.
        let _intake = lock(&self.intake);
        let mut wire = lock(&self.wire);
        wire.duplex.rewind(received, u64::MAX)?;
        wire.connection += 1;
        wire.detached = None;
        self.news.notify_one();
        let (received, credit) = wire.duplex.inbox().tell();
        Ok((wire.connection, received, credit))
    }

    /// The connection is gone, unless a later one took over.
    pub(crate) fn detach(&self, connection: u64) {
        let mut wire = lock(&self.wire);
        if wire.connection == connection {
            wire.detached = Some(Instant::now());
        }
    }

    /// When the last connection was lost, if there is none now.
    pub(crate) fn detached(&self) -> Option<Instant> {
        lock(&self.wire).detached
    }

    /// Takes a frame off `connection`. False: a later one took over.
    pub(crate) fn receive(
        self: &Arc<Self>,
        connection: u64,
        frame: Bytes,
    ) -> Result<bool, IntakeError> {
        let mut intake = lock(&self.intake);
        let (received, was_full) = {
            let mut wire = lock(&self.wire);
            if wire.connection != connection {
                return Ok(false);
            }
            let was_full = wire.duplex.outbox().is_full();
            (
                wire.duplex.receive(frame)?,
                was_full && !wire.duplex.outbox().is_full(),
            )
        };
        if was_full {
            self.unblock();
        }
        let Some((body, bytes)) = received else {
            return Ok(true);
        };
        // The intake stays locked until the work is queued: a later connection's
        // reader must not get in between.
        let taken = intake.take(body, bytes)?;
        if taken.consumed > 0 {
            self.consumed(taken.consumed);
        }
        if let Some(item) = taken.item {
            self.enqueue(item);
        }
        Ok(true)
    }

    fn enqueue(self: &Arc<Self>, item: Item) {
        let mut todo = lock(&self.todo);
        todo.items.push_back(item);
        self.schedule(&mut todo);
    }

    fn schedule(self: &Arc<Self>, todo: &mut Todo) {
        if !todo.scheduled && !todo.blocked {
            todo.scheduled = true;
            self.site.queue.push(self.clone());
        }
    }

    fn unblock(self: &Arc<Self>) {
        let mut todo = lock(&self.todo);
        if std::mem::take(&mut todo.blocked) {
            self.schedule(&mut todo);
        }
    }

    /// Ends the session soon, from outside: its lease ended, or its client
    /// broke the protocol or is gone.
    pub(crate) fn end(self: &Arc<Self>, error: Error) {
        let mut todo = lock(&self.todo);
        if todo.end.is_none() {
            todo.end = Some(error);
            self.ending.store(true, Ordering::Release);
            todo.items.clear();
            todo.blocked = false;
            self.schedule(&mut todo);
        }
    }

    /// Carries out work while `on` says so. Called by the executor alone.
    pub(crate) fn run(self: &Arc<Self>, on: &mut dyn FnMut() -> bool) -> Turn {
        let mut guard = lock(&self.runner);
        let Some(runner) = guard.as_mut() else {
            lock(&self.todo).scheduled = false;
            return Turn::Over;
        };
        let before = runner.op_number();
        let turn = loop {
            if !self.ending.load(Ordering::Acquire) && runner.step() {
                if on() {
                    continue;
                }
                break Turn::Again;
            }
            match self.next_item() {
                Next::Item(Item::Work(work, bytes)) => {
                    match runner.begin(work) {
                        Ok(reply) => reply.into_iter().for_each(|reply| self.reply(reply)),
                        Err(e) => {
                            let rule = format!("session {}: {e}", self.id);
                            self.end(Error::new(ErrorCode::Protocol, rule));
                        }
                    }
                    self.consumed(bytes);
                }
                Next::Item(Item::Close) => {
                    self.end(Error::new(ErrorCode::Unspecified, "closed by the client"));
                }
                Next::Nothing => break Turn::Over,
                Next::End(error) => {
                    self.site
                        .ops
                        .fetch_add(runner.op_number() - before, Ordering::Relaxed);
                    *guard = None;
                    self.site.device.clean_up();
                    self.said_all(error);
                    return Turn::Over;
                }
            }
            if !on() {
                break Turn::Again;
            }
        };
        self.site
            .ops
            .fetch_add(runner.op_number() - before, Ordering::Relaxed);
        turn
    }

    fn next_item(&self) -> Next {
        let mut todo = lock(&self.todo);
        if let Some(error) = todo.end.clone() {
            todo.scheduled = false;
            return Next::End(error);
        }
        if !todo.items.is_empty() && lock(&self.wire).duplex.outbox().is_full() {
            debug!(session = %self.id, "waits for its client to take answers");
            (todo.blocked, todo.scheduled) = (true, false);
            return Next::Nothing;
        }
        match todo.items.pop_front() {
            Some(item) => Next::Item(item),
            None => {
                todo.scheduled = false;
                Next::Nothing
            }
        }
    }

    /// The session's state is gone; tell the client and let the connection end.
    fn said_all(&self, error: Error) {
        info!(session = %self.id, lease = %self.lease, "session ended: {error}");
        let mut wire = lock(&self.wire);
        wire.duplex
            .push(frame::Body::Closed(Closed { error: Some(error) }));
        wire.closing = true;
        self.news.notify_one();
    }

    fn consumed(&self, bytes: usize) {
        let mut wire = lock(&self.wire);
        wire.duplex.inbox().consume(bytes);
        if wire.duplex.inbox().is_telling_due() {
            self.news.notify_one();
        }
    }

    /// Whether the session ended and its memory is back.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.wire).closing
    }
}

enum Next {
    Item(Item),
    Nothing,
    End(Error),
}

/// Why a frame could not be taken: the client broke a rule, the session ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IntakeError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Codec(#[from] tensord_proto::codec::CodecError),
    #[error("{0}")]
    Order(String),
}

impl IntakeError {
    /// Whether the connection lost something, which the next makes good.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::Frame(e) if e.is_loss())
    }
}
