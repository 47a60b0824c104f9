//! A session on the client: it records ops in order, sends them in frames and receives
//! values.
//!
//! [`Session::record`] and its like are called by Burn's threads and must return at once:
//! they append to a list, and wait only while the outbox is full because the worker is far
//! behind. One task ([`driver`]) owns the connection. Whenever it can send, it encodes the
//! whole list into frames, which are small while the worker keeps up and large otherwise. A
//! thread that reads or syncs while the driver waits sends in the driver's place
//! ([`direct_send`]).

mod direct_send;
mod driver;
mod op_buffer;
mod pending_reads;
#[cfg(test)]
mod tests;
mod upload_cache;
mod uploads;
mod wire;

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use burn_backend::{DType, ExecutionError, TensorData};
use burn_ir::{DistributedOperationIr, OperationIr, TensorId, TensorIr};
use tensord_proto::{
    MAX_READS_PER_FRAME,
    codec::{DeviceProfile, encode_tensor, encode_type},
    ids::SessionId,
    v1::{Alias, Close, Fault, Offer, Poison, Reads, Seed, Sync, Take, frame::Body},
};
use tensord_transport::{LinkSender, channel::Channel};
use tokio::sync::{Notify, oneshot};

pub(crate) use self::driver::{SessionTarget, drive};
use self::{
    op_buffer::{FrameEncoder, Item, OpBuffer},
    pending_reads::PendingReads,
    upload_cache::UploadCache,
};
use crate::cohort::CohortMember;

/// Bytes of frames kept until the worker acknowledges them; ops count with their cost in
/// credit. A program that is further ahead waits in the call that records its next op.
const OUTBOX_BYTES: usize = 32 << 20;

/// Number of ops that are sent at once. Fewer wait a moment for more, as a frame costs
/// more than an op; a read or another request after them sends them at once.
const EAGER_OPS: usize = 512;

/// Limit on the number of recorded items that are not encoded yet: some megabytes.
const MAX_RECORDED_ITEMS: usize = 4096;

/// Bytes of replies that the worker may send. There is no limit, as it sends only what was
/// requested.
const WINDOW_BYTES: u64 = u64::MAX;

/// The secret with which a session takes one offered value, once.
pub(crate) type Capability = [u8; 16];

/// The answer to a read or a sync.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, ExecutionError>>;

/// Bytes sent and received.
#[derive(Debug, Default)]
pub(crate) struct ByteCounters {
    pub(crate) up: AtomicU64,
    pub(crate) down: AtomicU64,
    /// The bytes of tensors among them, sent; the next field has those received.
    pub(crate) tensors_up: AtomicU64,
    pub(crate) tensors_down: AtomicU64,
}

/// The links of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Track {
    /// For ops and their replies.
    Ops,
    /// For large payloads; it is opened when there is the first.
    Bulk,
}

pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) cohort_member: CohortMember,
    state: Mutex<State>,
    /// Locked by the owner of the sender: the driver, or a thread that borrows it.
    op_encoder: Mutex<FrameEncoder>,
    /// The driver's sender, while the driver waits.
    lent_sender: Mutex<Option<LinkSender>>,
    /// Signals that the outbox has room again.
    room: Condvar,
    /// Wakes the driver of the ops track; `wake_bulk` wakes that of the bulk track.
    wake: Notify,
    wake_bulk: Notify,
    next_tensor: AtomicU64,
    pub(crate) counters: ByteCounters,
}

struct State {
    channel: Channel,
    bulk: Channel,
    /// Recorded items that are not encoded yet.
    op_buffer: OpBuffer,
    /// Whether `op_buffer` has an item that must not wait for more ops.
    urgent: bool,
    /// How often fewer than [`EAGER_OPS`] were sent because no more came in time, since the
    /// last urgent item.
    small_batches: u32,
    upload_cache: UploadCache,
    next_request: u64,
    pending_reads: PendingReads,
    syncs: HashMap<u64, Answer<()>>,
    driver: DriverWait,
    /// Whether the session needs the bulk track.
    has_bulk: bool,
    profile: Option<DeviceProfile>,
    /// Why the session is over, once it is.
    end: Option<SessionEnd>,
}

/// What the driver waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum DriverWait {
    /// It does not wait, and will look at the state by itself.
    #[default]
    No,
    /// A frame to send. After `ack_delay` of the channel's timing it checks for acks by itself.
    ForFrames,
    /// A frame or an ack to send.
    ForFramesOrAcks,
    /// More ops than the few that are recorded, for a moment.
    ForMoreOps,
}

/// Why a session is over.
#[derive(Debug, Clone)]
pub(crate) enum SessionEnd {
    /// The program has dropped the lease.
    Closed,
    /// The session failed for this reason.
    Failed(String),
}

impl SessionEnd {
    fn error(&self) -> ExecutionError {
        ExecutionError::with_context(match self {
            Self::Closed => "the lease of this device was dropped".to_owned(),
            Self::Failed(reason) => reason.clone(),
        })
    }
}

impl Session {
    pub(crate) fn new(id: SessionId, cohort_member: CohortMember) -> Arc<Self> {
        // The worker grants credit when it opens the session.
        let channel = || Channel::new(OUTBOX_BYTES, 0, WINDOW_BYTES, Instant::now());
        Arc::new(Self {
            id,
            cohort_member,
            state: Mutex::new(State {
                channel: channel(),
                bulk: channel(),
                op_buffer: OpBuffer::default(),
                urgent: false,
                small_batches: 0,
                upload_cache: UploadCache::default(),
                next_request: 1,
                pending_reads: PendingReads::default(),
                syncs: HashMap::new(),
                driver: DriverWait::No,
                has_bulk: false,
                profile: None,
                end: None,
            }),
            op_encoder: Mutex::default(),
            lent_sender: Mutex::default(),
            room: Condvar::new(),
            wake: Notify::new(),
            wake_bulk: Notify::new(),
            next_tensor: AtomicU64::new(1),
            counters: ByteCounters::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code runs under this lock, and the code here does not panic halfway
        // through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a tensor id that was not used before in this session.
    pub(crate) fn new_tensor(&self) -> TensorId {
        TensorId::new(self.next_tensor.fetch_add(1, Ordering::Relaxed))
    }

    /// Records an op. Waits while the worker is too far behind.
    pub(crate) fn record(&self, op: OperationIr) {
        if matches!(op, OperationIr::Init(_)) {
            // An `Init` follows an upload, which has made the tensor already.
            return;
        }
        let mut state = self.lock();
        // Other ranks wait for the all-reduces that end here.
        state.urgent |= matches!(
            op,
            OperationIr::Distributed(DistributedOperationIr::SyncCollective)
        );
        if state.end.is_none() {
            state.op_buffer.op(op);
            self.appended(state);
        }
    }

    fn append<'a>(&'a self, mut state: MutexGuard<'a, State>, item: Item) {
        if state.end.is_none() {
            state.op_buffer.push(item);
            self.appended(state);
        }
    }

    /// Waits for room if the session is full, and wakes the driver for the item that was
    /// just recorded.
    fn appended<'a>(&'a self, mut state: MutexGuard<'a, State>) {
        if state.is_full() {
            state = self.wait_for_room(state);
        }
        match state.driver {
            // The driver wakes by itself in a moment, and sends what was recorded until then.
            DriverWait::ForMoreOps if state.has_only_few_ops() => {}
            _ => self.wake(state),
        }
    }

    /// Declares a tensor that has no value.
    pub(crate) fn poison(&self, id: TensorId, tensor: &TensorIr, reason: String) {
        let fault = Fault {
            op_name: "to_device".into(),
            reason,
            ..Fault::default()
        };
        self.push_tensor(
            id,
            Body::Poison(Poison {
                tensor_id: id.value(),
                r#type: Some(encode_type(&tensor.shape, tensor.dtype)),
                fault: Some(fault),
            }),
        );
    }

    /// Gives a tensor a second id.
    pub(crate) fn alias(&self, id: TensorId, source: TensorId) {
        self.push_tensor(
            id,
            Body::Alias(Alias {
                tensor_id: id.value(),
                source_id: source.value(),
            }),
        );
    }

    /// Offers a tensor's value to the session with lease rank `to`, or to another session
    /// of the lease that has the capability.
    pub(crate) fn offer(&self, tensor: &TensorIr, capability: &Capability, to: u32) {
        self.push(Body::Offer(Offer {
            tensor: encode_tensor(tensor),
            capability: capability.to_vec().into(),
            to,
        }));
    }

    /// Makes a tensor of the value that the session with lease rank `from` offers.
    pub(crate) fn take_offer(
        &self,
        id: TensorId,
        tensor: &TensorIr,
        capability: &Capability,
        from: u32,
    ) {
        let take = Body::Take(Take {
            tensor_id: id.value(),
            r#type: Some(encode_type(&tensor.shape, tensor.dtype)),
            capability: capability.to_vec().into(),
            from,
        });
        self.push_tensor(id, take);
    }

    /// Seeds the session's random ops.
    pub(crate) fn seed(&self, seed: u64) {
        self.push(Body::Seed(Seed { seed }));
    }

    /// Requests a tensor's data.
    pub(crate) fn read(
        &self,
        tensor: &TensorIr,
    ) -> oneshot::Receiver<Result<TensorData, ExecutionError>> {
        let (answer, answered) = oneshot::channel();
        self.read_many(vec![(tensor.clone(), answer)]);
        answered
    }

    /// Requests the data of tensors; each goes to its `Answer`.
    pub(crate) fn read_many(&self, reads: Vec<(TensorIr, Answer<TensorData>)>) {
        let mut reads = reads.into_iter();
        let mut state = self.lock();
        if let Some(end) = &state.end {
            // The receiver may have been dropped.
            return reads.for_each(|(_, answer)| drop(answer.send(Err(end.error()))));
        }
        while reads.len() > 0 {
            let request_id = state.next_request;
            let mut tensors = Vec::with_capacity(reads.len().min(MAX_READS_PER_FRAME));
            for (tensor, answer) in reads.by_ref().take(MAX_READS_PER_FRAME) {
                let request_id = state.request();
                if state.pending_reads.expect(request_id, &tensor, answer) {
                    self.want_bulk(&mut state);
                }
                tensors.push(encode_tensor(&tensor));
            }
            state.queue_frame(Body::Reads(Reads {
                request_id,
                tensors,
            }));
        }
        self.send_now(state);
    }

    /// Requests a reply for when all recorded ops are done.
    pub(crate) fn sync(&self) -> oneshot::Receiver<Result<(), ExecutionError>> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        match &state.end {
            // Recorded ops are still sent, and a closed session has no reply to wait for.
            Some(SessionEnd::Closed) => drop(answer.send(Ok(()))),
            Some(end) => drop(answer.send(Err(end.error()))),
            None => {
                let request_id = state.request();
                state.syncs.insert(request_id, answer);
                state.queue_frame(Body::Sync(Sync { request_id }));
                self.send_now(state);
            }
        }
        answered
    }

    /// Returns the set of usages that the device supports for `dtype`, as bits.
    pub(crate) fn dtype_usage(&self, dtype: DType) -> u8 {
        let state = self.lock();
        let dtypes = state.profile.iter().flat_map(|profile| &profile.dtypes);
        dtypes
            .into_iter()
            .find(|(d, _)| *d == dtype)
            .map_or(0, |(_, usage)| *usage)
    }

    /// Returns the device's default dtypes, once the session was opened.
    pub(crate) fn settings(&self) -> Option<burn_backend::DeviceSettings> {
        self.lock().profile.as_ref().map(|profile| profile.settings)
    }

    /// Returns why the session failed, if it did.
    pub(crate) fn failure(&self) -> Option<String> {
        match &self.lock().end {
            Some(SessionEnd::Failed(reason)) => Some(reason.clone()),
            Some(SessionEnd::Closed) | None => None,
        }
    }

    /// Ends the session after the recorded ops.
    pub(crate) fn close(&self) {
        self.push(Body::Close(Close {}));
        self.end(SessionEnd::Closed);
    }

    /// Ends the session; pending reads and syncs fail with `reason`.
    pub(crate) fn fail(&self, reason: impl Into<String>) {
        self.end(SessionEnd::Failed(reason.into()));
    }

    fn end(&self, end: SessionEnd) {
        let (reads, syncs) = {
            let mut state = self.lock();
            if state.end.is_some() {
                return;
            }
            state.end = Some(end.clone());
            (
                std::mem::take(&mut state.pending_reads),
                std::mem::take(&mut state.syncs),
            )
        };
        self.room.notify_all();
        self.wake.notify_one();
        self.wake_bulk.notify_one();
        // The receivers may have been dropped.
        reads
            .into_answers()
            .for_each(|answer| drop(answer.send(Err(end.error()))));
        syncs
            .into_values()
            .for_each(|answer| drop(answer.send(Err(end.error()))));
        if let SessionEnd::Failed(reason) = &end {
            self.cohort_member.cohort.end(reason);
        }
    }

    fn push(&self, body: Body) {
        let mut state = self.lock();
        state.queue_frame(body);
        self.wake(state);
    }

    /// Queues a frame that makes a tensor.
    fn push_tensor(&self, id: TensorId, body: Body) {
        let mut state = self.lock();
        state.queue(Item::NewTensor(id, body));
        self.wake(state);
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let waits = state.take_driver_wait();
        // The driver takes this lock first when it wakes.
        drop(state);
        if waits {
            self.wake.notify_one();
        }
    }

    fn wait_for_room<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        // The driver bounds the wait: it makes room or ends the session.
        while state.is_full() && state.end.is_none() {
            if state.take_driver_wait() {
                self.wake.notify_one();
            }
            state = self
                .room
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

impl State {
    fn request(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request - 1
    }

    fn track(&mut self, track: Track) -> &mut Channel {
        match track {
            Track::Ops => &mut self.channel,
            Track::Bulk => &mut self.bulk,
        }
    }

    /// Clears the driver's waiting state and returns whether it was waiting; the caller must
    /// then wake it.
    fn take_driver_wait(&mut self) -> bool {
        std::mem::take(&mut self.driver) != DriverWait::No
    }

    /// Returns whether the program must wait before it records more.
    fn is_full(&self) -> bool {
        self.op_buffer.len() >= MAX_RECORDED_ITEMS
            || self.channel.outbox().is_full()
            || self.bulk.outbox().is_full()
    }

    /// Returns whether there are only a few ops to send, and none of them urgent.
    fn has_only_few_ops(&self) -> bool {
        !self.urgent && (1..EAGER_OPS).contains(&self.op_buffer.len())
    }

    /// Queues `body` behind the ops recorded so far.
    fn queue_frame(&mut self, body: Body) {
        self.queue(Item::Frame(body));
    }

    fn queue(&mut self, item: Item) {
        if self.end.is_none() {
            self.op_buffer.push(item);
            self.urgent = true;
        }
    }
}

/// Returns a session that is closed from the start, for a device without a lease.
pub(crate) fn closed() -> Arc<Session> {
    let session = Session::new(SessionId(0), CohortMember::default());
    session.end(SessionEnd::Closed);
    session
}
