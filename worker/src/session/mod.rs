//! A session on the worker: an op stream, the tensors it made, and its wire.
//!
//! Three parties meet here, each with a lock of its own so that none waits for
//! another's work: the connection's reader brings work ([`Session::receive`]),
//! the device's executor carries it out ([`Session::run`]), and the
//! connection's writer takes what is to be sent ([`Session::next_to_send`]).
//! Reads that are no work worth the name the reader carries out itself.
//! Connections come and go; a session outlives them.

mod dataflow;
mod end;
mod inbound;
#[cfg(feature = "testing")]
pub(crate) mod lone;
mod outbound;
mod peer_requests;
mod runner;
#[cfg(test)]
mod tests;
mod turn;
mod uploads;

pub(crate) use self::{outbound::NextFrames, turn::Turn};

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use tensord_proto::{
    bulk::PayloadError,
    codec::CodecError,
    ids::{LeaseId, SessionId},
    v1::{Error, ErrorCode, Held, Value, frame},
};
use tensord_transport::{
    duplex::{Duplex, FrameError},
    resume::ResumeError,
};
use tokio::{runtime::Handle, sync::Notify};

use self::{
    inbound::{Item, Payloads},
    peer_requests::PeerRequests,
    runner::{LeaseMembership, Reply, Runner},
    uploads::{Payload, Uploads},
};
use crate::{
    at_hand::{AtHand, Signals},
    backend::Device,
    blobs::BlobStore,
    collective::{Cohort, Member, Outcome},
    executor::{RunQueue, give_turn},
    locks::lock,
    memory::DeviceMemory,
};

/// Bytes of work a client may be ahead of the executor, encoded: some hundred
/// thousand ops, or the uploads of a few steps.
pub(crate) const WINDOW_BYTES: u64 = 32 << 20;

/// Bytes of answers kept for a client that has not confirmed them; beyond this
/// the session waits.
const OUTBOX_BYTES: usize = 64 << 20;

/// Values that a device may be at for one session, and their bytes: beyond it the
/// session waits. As for answers, one may be of any size.
const MAX_LATER: usize = 1024;
const LATER_BYTES: usize = OUTBOX_BYTES;

/// What a session needs of its device.
#[derive(Clone)]
pub(crate) struct DeviceContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) queue: Arc<RunQueue>,
    pub(crate) signals: Arc<Signals>,
    /// Ops carried out on the device for its latest lease.
    pub(crate) ops: Arc<AtomicU64>,
    /// Where slow reads are awaited.
    pub(crate) runtime: Handle,
    /// What was kept of earlier sessions.
    pub(crate) blobs: Arc<BlobStore>,
    /// What one session may keep of its uploads.
    pub(crate) kept_bytes: u64,
}

/// Who may use a session, and for what.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseId,
    pub(crate) tenant: Arc<str>,
    pub(crate) device_index: u32,
}

/// The links of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Track {
    /// For ops and the answers to them.
    Ops,
    /// For bulk bytes; there is none until there are any.
    Bulk,
}

pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) grant: Grant,
    device_context: DeviceContext,
    /// The sessions of the lease, and this one's place among them.
    cohort: Arc<Cohort>,
    lease_rank: u32,
    wires: [Mutex<Wire>; 2],
    /// Held by the reader of each track.
    readers: [Mutex<()>; 2],
    payloads: Mutex<Payloads>,
    todo: Mutex<Todo>,
    /// `None` once the session ended.
    runner: Mutex<Option<Runner>>,
    peer_requests: Mutex<PeerRequests>,
    /// `todo.end` is set, for a look without the lock.
    ending: AtomicBool,
    /// The client was told that it has ended, or is about to be.
    end_announced: AtomicBool,
    /// Its state is gone, and its memory back.
    gone: AtomicBool,
    at_hand: Arc<AtHand>,
    /// Wakes the writer of each track.
    writer_woken: [Notify; 2],
}

struct Wire {
    duplex: Duplex,
    /// Counts connections; only the latest may touch the wire.
    connection: u64,
    /// Since when there is none.
    detached: Option<Instant>,
    /// Values that are sent together with what is said next, and their bytes.
    values: Vec<Value>,
    value_bytes: usize,
    /// Payloads sent.
    payloads: u64,
    /// Everything was said: the connection ends once it is delivered.
    closing: bool,
}

#[derive(Default)]
struct Todo {
    items: VecDeque<Item>,
    payloads: VecDeque<Payload>,
    /// What came of all-reduces and transfers, by ticket: no more than were asked for.
    arrivals: Vec<(u64, Outcome)>,
    /// Credit of what came in behind payloads that still wait: given back when
    /// none does, so that they are bounded, and the one at hand may be any size.
    payload_credit: usize,
    /// Waits for the next payload.
    starved: bool,
    /// In the run queue, or running.
    scheduled: bool,
    /// Waits until the client takes its answers, or the device has read some.
    blocked: bool,
    later: Later,
    /// Set once; nothing is carried out after it.
    end: Option<Error>,
}

/// Reads whose values the device has not given yet.
#[derive(Default)]
struct Later {
    count: usize,
    bytes: usize,
}

impl Later {
    fn begin(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn end(&mut self, bytes: usize) {
        self.count -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn is_full(&self) -> bool {
        self.count >= MAX_LATER || self.bytes >= LATER_BYTES
    }
}

impl Session {
    /// Opens a session, which takes its place in `cohort`.
    ///
    /// # Errors
    ///
    /// When another session has that place.
    pub(crate) fn new(
        id: SessionId,
        grant: Grant,
        seed: u64,
        device_context: DeviceContext,
        cohort: Arc<Cohort>,
    ) -> Result<Arc<Self>, Error> {
        let taken = || Error::new(ErrorCode::Session, "its place in the lease is taken");
        let lease_rank = cohort.lease_rank(grant.device_index).ok_or_else(taken)?;
        let held = device_context.blobs.held(&grant.tenant);
        let (hashes, held): (Vec<_>, Vec<_>) = held.into_iter().unzip();
        let at_hand = AtHand::new(device_context.signals.clone());
        let runner = Runner::new(
            device_context.device.open(),
            device_context.memory.open(),
            at_hand.clone(),
            seed,
            Uploads::new(device_context.kept_bytes, held),
            LeaseMembership {
                lease_members: cohort.lease_members().clone(),
                lease_rank,
                bucket_bytes: cohort.bucket_bytes(),
            },
        );
        let wire = || Wire {
            // The client always takes its answers, so it grants without a bound.
            duplex: Duplex::new(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES),
            connection: 0,
            detached: Some(Instant::now()),
            values: Vec::new(),
            value_bytes: 0,
            payloads: 0,
            closing: false,
        };
        let mut ops = wire();
        if !hashes.is_empty() {
            let hashes = hashes.concat().into();
            ops.duplex.push(frame::Body::Held(Held { hashes }));
        }
        let session = Arc::new(Self {
            id,
            grant,
            cohort,
            lease_rank,
            wires: [Mutex::new(ops), Mutex::new(wire())],
            readers: Default::default(),
            payloads: Mutex::new(Payloads::new(
                device_context.memory.clone(),
                device_context.kept_bytes,
            )),
            todo: Mutex::default(),
            runner: Mutex::new(Some(runner)),
            peer_requests: Mutex::default(),
            ending: AtomicBool::new(false),
            end_announced: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            at_hand,
            writer_woken: Default::default(),
            device_context,
        });
        let member: Weak<dyn Member> = Arc::downgrade(&session) as _;
        match session.cohort.enter(lease_rank, member) {
            true => Ok(session),
            false => Err(taken()),
        }
    }

    fn wire(&self, track: Track) -> MutexGuard<'_, Wire> {
        lock(&self.wires[track as usize])
    }

    fn writer_wake(&self, track: Track) -> &Notify {
        &self.writer_woken[track as usize]
    }

    /// A connection takes a track over. The client received everything up to
    /// `received`. Returns the connection's number, and what this side received
    /// and grants.
    pub(crate) fn attach(
        &self,
        track: Track,
        received: u64,
    ) -> Result<(u64, u64, u64), ResumeError> {
        // Waits for the reader before to finish the frame it is at.
        let _reader = lock(&self.readers[track as usize]);
        let mut wire = self.wire(track);
        wire.duplex.rewind(received, u64::MAX)?;
        wire.connection += 1;
        wire.detached = None;
        self.writer_wake(track).notify_one();
        let (received, credit) = wire.duplex.inbox().acknowledge();
        Ok((wire.connection, received, credit))
    }

    /// The connection is gone, unless a later one took over.
    pub(crate) fn detach(&self, track: Track, connection: u64) {
        let mut wire = self.wire(track);
        if wire.connection == connection {
            wire.detached = Some(Instant::now());
        }
    }

    /// When the last connection was lost, if there is none now.
    pub(crate) fn detached(&self) -> Option<Instant> {
        self.wire(Track::Ops).detached
    }

    /// Takes a frame off `connection`. False: a later one took over.
    pub(crate) fn receive(
        self: &Arc<Self>,
        track: Track,
        connection: u64,
        frame: Bytes,
    ) -> Result<bool, InboundError> {
        // Stays locked until the work is queued: a later connection's reader must
        // not get in between.
        let _reader = lock(&self.readers[track as usize]);
        let (received, was_full) = {
            let mut wire = self.wire(track);
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
        if self.ending.load(Ordering::Acquire) {
            // Nobody needs it any more.
            return Ok(true);
        }
        match track {
            Track::Ops => {
                if let Some(item) = inbound::item(body, bytes)? {
                    self.enqueue(item);
                }
            }
            Track::Bulk => {
                let payload = lock(&self.payloads).take(body)?;
                self.enqueue_payload(payload, bytes);
            }
        }
        Ok(true)
    }

    /// Takes `bytes` of credit worth of a payload, and the payload once it is whole.
    fn enqueue_payload(self: &Arc<Self>, payload: Option<Payload>, bytes: usize) {
        let mut todo = lock(&self.todo);
        let others_wait = !todo.payloads.is_empty();
        if todo.end.is_none() {
            todo.payloads.extend(payload);
        }
        if others_wait {
            todo.payload_credit += bytes;
        } else {
            self.consumed(Track::Bulk, bytes);
        }
        if todo.starved && !todo.payloads.is_empty() {
            todo.starved = false;
            self.schedule(todo);
        }
    }

    fn enqueue(self: &Arc<Self>, item: Item) {
        let mut todo = lock(&self.todo);
        let due = todo.schedule();
        let at_once = due && todo.items.is_empty() && self.is_done_at_once(&item);
        todo.items.push_back(item);
        drop(todo);
        if at_once {
            give_turn(&self.device_context.queue, self.clone());
        } else if due {
            self.device_context.queue.push(self.clone());
        }
    }

    /// Whether a session that rests answers `item` sooner than the executor could be
    /// woken, so that the connection's reader may do it.
    fn is_done_at_once(&self, item: &Item) -> bool {
        let Item::Reads(_, tensors, _) = item else {
            return false;
        };
        // The turn before may still be at its last lines, and wants the lock that is
        // held here.
        let Ok(mut runner) = self.runner.try_lock() else {
            return false;
        };
        let runner = runner.as_mut();
        runner.is_some_and(|runner| runner.has_at_hand(tensors))
    }

    /// Has the session run, unless it is to already, or waits for something else.
    fn schedule(self: &Arc<Self>, mut todo: MutexGuard<'_, Todo>) {
        let due = todo.schedule();
        // The executor begins with this lock.
        drop(todo);
        if due {
            self.device_context.queue.push(self.clone());
        }
    }

    fn unblock(self: &Arc<Self>) {
        let mut todo = lock(&self.todo);
        if std::mem::take(&mut todo.blocked) {
            self.schedule(todo);
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
            todo.payloads.clear();
            todo.arrivals.clear();
            (todo.blocked, todo.starved) = (false, false);
            self.schedule(todo);
        }
    }

    fn consumed(&self, track: Track, bytes: usize) {
        let mut wire = self.wire(track);
        wire.duplex.inbox().consume(bytes);
        if wire.duplex.inbox().is_ack_due() {
            self.writer_wake(track).notify_one();
        }
    }
}

impl Todo {
    /// Notes that the session is to run. False: it is to already, or waits for
    /// something else.
    fn schedule(&mut self) -> bool {
        let due = !self.scheduled && !self.blocked && !self.starved;
        self.scheduled |= due;
        due
    }
}

impl Member for Session {
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome) {
        let mut todo = lock(&self.todo);
        if todo.end.is_none() {
            todo.arrivals.push((ticket, outcome));
            self.schedule(todo);
        }
    }
}

/// Why a frame could not be taken: the client broke a rule, the session ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InboundError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error("{0}")]
    Order(String),
}

impl InboundError {
    /// Whether the connection lost something, which the next makes good.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::Frame(e) if e.is_loss())
    }
}
