//! A session on the worker: an op stream, the tensors it made, and its connections.
//!
//! Three parties use a session, each with a lock of its own so that none waits for
//! another's work: the connection's reader queues work ([`Session::receive`]), the
//! device's executor executes it ([`Session::run`]), and the connection's writer sends
//! the replies ([`Session::next_to_send`]). The reader itself executes small reads whose
//! values are in host memory. A session outlives its connections.

mod dataflow;
mod end;
mod inbound;
mod outbound;
mod peer_requests;
mod runner;
#[cfg(feature = "testing")]
pub(crate) mod standalone;
#[cfg(test)]
mod tests;
mod time_slice;
mod uploads;

pub(crate) use self::time_slice::TimeSliceEnd;

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
use tensord_transport::channel::{
    self, Channel, Connection, Received, duplex::FrameError, resume::ResumeError,
};
use tokio::{runtime::Handle, sync::Notify};

use self::{
    inbound::{Item, Payloads},
    peer_requests::PeerRequests,
    runner::{LeaseMembership, Reply, Runner},
    uploads::{Payload, Uploads},
};
use crate::{
    backend::Device,
    blobs::BlobStore,
    collective::{Cohort, Member, Outcome},
    executor::{RunQueue, run_time_slice},
    locks::lock,
    memory::DeviceMemory,
    op_progress::{OpProgress, Signals},
};

/// Bytes of encoded work that a client may be ahead of the executor: some hundred
/// thousand ops, or the uploads of a few steps.
pub(crate) const WINDOW_BYTES: u64 = 32 << 20;

/// Bytes of replies kept on a track until the client acknowledges them. Beyond this limit
/// the session pauses.
const OUTBOX_BYTES: usize = 64 << 20;

/// Maximum number of a session's reads in flight on the device, and the maximum bytes of
/// their values. At either limit the session pauses. As for replies, a single value may
/// exceed the limit.
const MAX_READS_IN_FLIGHT: usize = 1024;
const MAX_READ_BYTES_IN_FLIGHT: usize = OUTBOX_BYTES;

/// The device of a session, and what the session shares with the device's other sessions.
#[derive(Clone)]
pub(crate) struct DeviceContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) queue: Arc<RunQueue>,
    pub(crate) signals: Arc<Signals>,
    /// Number of ops executed on the device for its latest lease.
    pub(crate) ops: Arc<AtomicU64>,
    /// The runtime on which slow reads are awaited.
    pub(crate) runtime: Handle,
    /// Uploads kept from earlier sessions.
    pub(crate) blobs: Arc<BlobStore>,
    /// Maximum bytes of uploads that one session may keep.
    pub(crate) kept_bytes: u64,
}

/// The lease and tenant that a session belongs to, and its device.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseId,
    pub(crate) tenant: Arc<str>,
    pub(crate) device_index: u32,
}

/// One of the two links of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Track {
    /// Carries ops and the replies to them.
    Ops,
    /// Carries bulk bytes. The client opens this link when there are any.
    Bulk,
}

pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) grant: Grant,
    device_context: DeviceContext,
    /// The sessions of the lease, in which this one has `lease_rank`.
    cohort: Arc<Cohort>,
    lease_rank: u32,
    wires: [Mutex<Wire>; 2],
    /// Held by the reader of each track while it processes a frame.
    readers: [Mutex<()>; 2],
    payloads: Mutex<Payloads>,
    work_queue: Mutex<WorkQueue>,
    /// `None` after the session has ended.
    runner: Mutex<Option<Runner>>,
    peer_requests: Mutex<PeerRequests>,
    /// Whether `work_queue.end` is set, readable without the lock.
    ending: AtomicBool,
    /// Whether `Closed` is queued for the client, or is about to be queued.
    end_announced: AtomicBool,
    /// Whether the session's state is dropped and its device memory given back.
    torn_down: AtomicBool,
    op_progress: Arc<OpProgress>,
    /// Wakes the writer of each track.
    writer_notify: [Notify; 2],
}

struct Wire {
    channel: Channel,
    /// Values batched for the next flush, and their encoded bytes.
    values: Vec<Value>,
    value_bytes: usize,
    /// Number of payloads queued so far.
    payloads: u64,
    /// Whether the last frame is queued. The connection ends once it is delivered.
    closing: bool,
}

#[derive(Default)]
struct WorkQueue {
    items: VecDeque<Item>,
    payloads: VecDeque<Payload>,
    /// Outcomes of all-reduces and transfers, by ticket. There is at most one per
    /// request.
    outcomes: Vec<(u64, Outcome)>,
    /// Credit in bytes of chunks that arrived while payloads were queued. It is returned
    /// when the queue is empty. So the queued payloads are bounded, but a payload that
    /// arrives while none is queued may have any size.
    payload_credit: usize,
    /// Whether the session waits for the next payload.
    awaits_payload: bool,
    /// Whether the session is in the run queue or running.
    scheduled: bool,
    /// Whether the session is paused until the client acknowledges replies or a read in
    /// flight completes.
    blocked: bool,
    reads_in_flight: ReadsInFlight,
    /// Why the session ends. Set once; no work is executed after that.
    end: Option<Error>,
}

/// The number of reads in flight on the device, and the bytes of their values.
#[derive(Default)]
struct ReadsInFlight {
    count: usize,
    bytes: usize,
}

impl ReadsInFlight {
    fn begin(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn end(&mut self, bytes: usize) {
        self.count -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn is_full(&self) -> bool {
        self.count >= MAX_READS_IN_FLIGHT || self.bytes >= MAX_READ_BYTES_IN_FLIGHT
    }
}

impl Session {
    /// Opens a session and enters it into `cohort`.
    ///
    /// # Errors
    ///
    /// When the device has no rank in the lease, or another session has that rank.
    pub(crate) fn new(
        id: SessionId,
        grant: Grant,
        seed: u64,
        device_context: DeviceContext,
        cohort: Arc<Cohort>,
    ) -> Result<Arc<Self>, Error> {
        let taken = || {
            Error::new(
                ErrorCode::Session,
                "the device's place in the lease is not free",
            )
        };
        let lease_rank = cohort.lease_rank(grant.device_index).ok_or_else(taken)?;
        let held = device_context.blobs.blobs_of(&grant.tenant);
        let (hashes, held): (Vec<_>, Vec<_>) = held.into_iter().unzip();
        let op_progress = OpProgress::new(device_context.signals.clone());
        let runner = Runner::new(
            device_context.device.open(),
            device_context.memory.open(),
            op_progress.clone(),
            seed,
            Uploads::new(device_context.kept_bytes, held),
            LeaseMembership {
                lease_members: cohort.lease_members().clone(),
                lease_rank,
                bucket_bytes: cohort.bucket_bytes(),
            },
        );
        let wire = || Wire {
            // The client always reads its replies, so it grants unlimited credit.
            channel: Channel::new(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES, Instant::now()),
            values: Vec::new(),
            value_bytes: 0,
            payloads: 0,
            closing: false,
        };
        let mut ops = wire();
        if !hashes.is_empty() {
            let hashes = hashes.concat().into();
            ops.channel.push(frame::Body::Held(Held { hashes }));
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
            work_queue: Mutex::default(),
            runner: Mutex::new(Some(runner)),
            peer_requests: Mutex::default(),
            ending: AtomicBool::new(false),
            end_announced: AtomicBool::new(false),
            torn_down: AtomicBool::new(false),
            op_progress,
            writer_notify: Default::default(),
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

    /// Makes a new connection the latest of a track. The client has received the frames up
    /// to number `received`.
    pub(crate) fn attach(
        &self,
        track: Track,
        received: u64,
    ) -> Result<channel::Attached, ResumeError> {
        // Waits until the previous connection's reader has finished its current frame.
        let _reader = lock(&self.readers[track as usize]);
        let attached = self.wire(track).channel.attach(received, u64::MAX)?;
        self.writer_notify(track).notify_one();
        Ok(attached)
    }

    /// Marks the track as detached, unless a later connection has taken over.
    pub(crate) fn detach(&self, track: Track, connection: Connection) {
        let mut wire = self.wire(track);
        wire.channel.detach(connection, Instant::now());
    }

    /// Returns since when the track for ops has no connection, or `None` if it has one.
    pub(crate) fn detached(&self) -> Option<Instant> {
        self.wire(Track::Ops).channel.detached()
    }

    /// Processes a frame from `connection`. Returns `false` if a later connection has
    /// taken over.
    pub(crate) fn receive(
        self: &Arc<Self>,
        track: Track,
        connection: Connection,
        frame: Bytes,
    ) -> Result<bool, InboundError> {
        // Locked until the work is queued, so that a later connection's reader cannot
        // queue its frames before this one.
        let _reader = lock(&self.readers[track as usize]);
        let (received, has_room) = {
            let mut wire = self.wire(track);
            let was_full = wire.channel.outbox().is_full();
            let received = wire.channel.receive(connection, frame, Instant::now())?;
            (received, was_full && !wire.channel.outbox().is_full())
        };
        if has_room {
            self.unblock();
        }
        let (body, bytes) = match received {
            Received::New(body, bytes) => (body, bytes),
            Received::Nothing => return Ok(true),
            Received::Replaced => return Ok(false),
        };
        if self.ending.load(Ordering::Acquire) {
            // Frames for a session that ends are dropped.
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

    /// Accounts for a chunk that took `bytes` of credit, and queues its payload if the
    /// chunk was the last.
    fn enqueue_payload(self: &Arc<Self>, payload: Option<Payload>, bytes: usize) {
        let mut work_queue = lock(&self.work_queue);
        let others_wait = !work_queue.payloads.is_empty();
        if work_queue.end.is_none() {
            work_queue.payloads.extend(payload);
        }
        if others_wait {
            work_queue.payload_credit += bytes;
        } else {
            self.consumed(Track::Bulk, bytes);
        }
        if work_queue.awaits_payload && !work_queue.payloads.is_empty() {
            work_queue.awaits_payload = false;
            self.schedule(work_queue);
        }
    }

    fn enqueue(self: &Arc<Self>, item: Item) {
        let mut work_queue = lock(&self.work_queue);
        let due = work_queue.schedule();
        let in_reader = due && work_queue.items.is_empty() && self.can_run_in_reader(&item);
        work_queue.items.push_back(item);
        drop(work_queue);
        if in_reader {
            run_time_slice(&self.device_context.queue, self.clone());
        } else if due {
            self.device_context.queue.push(self.clone());
        }
    }

    /// Returns whether the connection's reader may execute `item` itself: the session is
    /// idle, and the reply takes less time than waking the executor.
    fn can_run_in_reader(&self, item: &Item) -> bool {
        let Item::Reads(_, tensors, _) = item else {
            return false;
        };
        // Must not block: the executor may be at the end of a turn with `runner` locked,
        // and wait for `work_queue`, which the caller holds.
        let Ok(mut runner) = self.runner.try_lock() else {
            return false;
        };
        let runner = runner.as_mut();
        runner.is_some_and(|runner| runner.can_read_at_once(tensors))
    }

    /// Puts the session into the run queue, unless it is scheduled, blocked or starved.
    fn schedule(self: &Arc<Self>, mut work_queue: MutexGuard<'_, WorkQueue>) {
        let due = work_queue.schedule();
        // Unlocked first, as the executor locks it at the start of a turn.
        drop(work_queue);
        if due {
            self.device_context.queue.push(self.clone());
        }
    }

    fn unblock(self: &Arc<Self>) {
        let mut work_queue = lock(&self.work_queue);
        if std::mem::take(&mut work_queue.blocked) {
            self.schedule(work_queue);
        }
    }

    /// Requests the end of the session, for example because its lease ended, or its
    /// client broke the protocol or is gone. The session ends in its next turn. Later
    /// calls have no effect.
    pub(crate) fn end(self: &Arc<Self>, error: Error) {
        let mut work_queue = lock(&self.work_queue);
        if work_queue.end.is_none() {
            work_queue.end = Some(error);
            self.ending.store(true, Ordering::Release);
            work_queue.items.clear();
            work_queue.payloads.clear();
            work_queue.outcomes.clear();
            (work_queue.blocked, work_queue.awaits_payload) = (false, false);
            self.schedule(work_queue);
        }
    }

    fn consumed(&self, track: Track, bytes: usize) {
        let mut wire = self.wire(track);
        wire.channel.inbox().consume(bytes);
        if wire.channel.inbox().is_ack_due() {
            self.writer_notify(track).notify_one();
        }
    }
}

impl WorkQueue {
    /// Marks the session as scheduled. Returns `false` if it is already scheduled,
    /// blocked or starved.
    fn schedule(&mut self) -> bool {
        let due = !self.scheduled && !self.blocked && !self.awaits_payload;
        self.scheduled |= due;
        due
    }
}

impl Member for Session {
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome) {
        let mut work_queue = lock(&self.work_queue);
        if work_queue.end.is_none() {
            work_queue.outcomes.push((ticket, outcome));
            self.schedule(work_queue);
        }
    }
}

/// The error when a frame is rejected. The client broke a rule and the session ends,
/// except after a [loss](Self::is_loss).
#[derive(Debug, thiserror::Error)]
pub(crate) enum InboundError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error("{0}")]
    Violation(String),
}

impl InboundError {
    /// Returns whether the connection lost a frame, which a new connection repairs.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::Frame(e) if e.is_loss())
    }
}
