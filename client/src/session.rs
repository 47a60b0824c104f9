//! A session on the client: it records ops in order, sends them in frames and receives
//! values.
//!
//! [`Session::record`] and its like are called by Burn's threads and must return at once:
//! they append to a list. They block only while the session is *full*: the list or the
//! unacknowledged bytes are at their limit, because the worker is far behind. One task
//! ([`driver`]) owns the connection. Whenever it can send, it encodes the whole list into
//! frames, which are small while the worker keeps up and large otherwise. A thread that reads
//! or syncs while the driver waits sends in the driver's place ([`direct_send`]).
//!
//! Everything under the session's lock is in [`tensord_session`], which does no I/O. Here is what
//! locks, waits and connects: `driver` keeps each track connected to its `destination`, and
//! `track_end` is the session as its connections see it.

mod counters;
mod destination;
mod direct_send;
mod driver;
#[cfg(feature = "testing")]
pub(crate) mod simulated;
#[cfg(test)]
mod tests;
mod track_end;

use std::{
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use burn_backend::{DType, ExecutionError, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr};
use bytes::Bytes;
use tensord_proto::{
    bulk::shared,
    collective_op::{AllReduce, CollectiveOp},
    content::hash,
    ids::SessionId,
    v1::{Close, Seed, frame::Body},
};
use tensord_session::{
    Answer, Capability, CohortMember, FrameEncoder, Item, JournalBudget, NextStep, SessionEnd,
    State, Track, check_size, frames, send_policy::Event,
};
use tensord_transport::channel::{FrameParts, Look, Next};
use tokio::sync::{Notify, oneshot};

use self::direct_send::SenderSlot;
pub(crate) use self::{
    counters::ByteCounters,
    destination::{
        Destination, Interruption, PoolContact, SessionTarget, UnreachableWorkers, UsedLeases,
        max_interruption,
    },
    driver::drive,
};
use crate::lease::{Durability, DurabilityStatus};

/// What entitles a session to its device.
#[derive(Clone)]
pub(crate) struct SessionAccess {
    pub(crate) lease_token: Bytes,
    pub(crate) device_index: u32,
    /// The seed of the session's random ops.
    pub(crate) seed: u64,
}

/// The memory of the journals of all sessions of this process.
static JOURNALS: LazyLock<JournalBudget> = LazyLock::new(JournalBudget::default);

/// Random bytes with which a session's snapshots are encrypted.
pub(crate) type SnapshotKey = [u8; 32];

pub(crate) struct Session {
    pub(crate) id: SessionId,
    /// What workers encrypt the session's snapshots with.
    snapshot_key: SnapshotKey,
    pub(crate) cohort_member: CohortMember,
    state: Mutex<State>,
    /// Locked by the owner of the sender: the driver, or a thread that borrows it.
    op_encoder: Mutex<FrameEncoder>,
    sender_slot: SenderSlot,
    /// Notified when the session may have room again, or has ended.
    room: Condvar,
    /// Wakes the driver of the ops track; `wake_bulk` wakes that of the bulk track.
    wake: Arc<Notify>,
    wake_bulk: Notify,
    /// Notified when the worker has sent which uploads of earlier sessions it has. Only the driver
    /// of the ops track waits for that.
    held: Notify,
    next_tensor: AtomicU64,
    pub(crate) counters: ByteCounters,
}

impl Session {
    pub(crate) fn new(
        id: SessionId,
        cohort_member: CohortMember,
        durability: Durability,
        snapshot_key: SnapshotKey,
    ) -> Arc<Self> {
        let wake = Arc::new(Notify::new());
        cohort_member.cohort.add_wake(wake.clone());
        let budget = &JOURNALS;
        let state = State::new(
            id,
            Instant::now(),
            durability.into(),
            &cohort_member,
            budget,
        );
        Arc::new(Self {
            id,
            snapshot_key,
            cohort_member,
            state: Mutex::new(state),
            op_encoder: Mutex::default(),
            sender_slot: SenderSlot::default(),
            room: Condvar::new(),
            wake,
            wake_bulk: Notify::new(),
            held: Notify::new(),
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

    /// Records an op, unless the session has ended. Blocks while the session is
    /// [full](State::is_full).
    pub(crate) fn record(&self, op: OperationIr) {
        if matches!(op, OperationIr::Init(_)) {
            // An `Init` follows an upload, which has made the tensor already.
            return;
        }
        self.record_in(self.lock(), |state| state.record_op(op));
    }

    /// Records an all-reduce, whose lease ranks are ascending, as [`record`](Self::record) does.
    pub(crate) fn record_all_reduce(&self, op: AllReduce, now: Instant) {
        let mut state = self.lock();
        state.before_all_reduce(&op.lease_ranks, now);
        let op = CollectiveOp::AllReduce(op).into();
        self.record_in(state, |state| state.record_op(op));
    }

    fn record_item(&self, item: Item, urgent: bool) {
        self.record_in(self.lock(), |state| state.record(item, urgent));
    }

    /// Calls `record`, which returns whether the driver must be woken, unless the session has ended.
    /// Then blocks while the session is [full](State::is_full).
    fn record_in(&self, mut state: MutexGuard<'_, State>, record: impl FnOnce(&mut State) -> bool) {
        if state.end.is_none() {
            let must_wake = record(&mut state);
            self.recorded(state, must_wake);
        }
    }

    /// Wakes the driver if it must know of the item that was just recorded, then blocks while
    /// the session is [full](State::is_full).
    fn recorded(&self, state: MutexGuard<'_, State>, must_wake: bool) {
        let is_full = state.is_full();
        // The driver takes this lock first when it wakes.
        drop(state);
        if must_wake {
            self.wake.notify_one();
        }
        if is_full {
            self.wait_for_room();
        }
    }

    fn wait_for_room(&self) {
        let mut state = self.lock();
        // The driver bounds the wait: it makes room or ends the session.
        while state.is_full() && state.end.is_none() {
            if state.policy.on(Event::RoomNeeded) {
                self.wake.notify_one();
            }
            state = self
                .room
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records an upload of `data` as tensor `id`. Blocks while the list of recorded ops or the
    /// unacknowledged bytes are at their limit.
    pub(crate) fn upload(&self, id: TensorId, data: TensorData) {
        let out = TensorIr::uninit(id, data.shape().clone(), data.dtype());
        let bytes = shared(data.into_bytes());
        let is_cacheable = self.lock().is_cacheable(bytes.len());
        let hash = is_cacheable.then(|| hash(&bytes));
        let mut state = self.lock();
        if state.end.is_some() {
            return;
        }
        let (entries, sent_bytes, wants_bulk) = state.upload(hash, bytes);
        let counter = &self.counters.tensors_up;
        counter.fetch_add(sent_bytes as u64, Ordering::Relaxed);
        if wants_bulk {
            self.want_bulk(&mut state);
        }
        let must_wake = state.record(Item::Upload(out, entries), false);
        self.recorded(state, must_wake);
    }

    /// Opens the bulk track, or wakes the driver of an open one.
    fn want_bulk(&self, state: &mut State) {
        state.has_bulk = true;
        self.wake_bulk.notify_one();
    }

    /// Declares `id` as a poisoned tensor with the shape and dtype of `tensor`: reading it
    /// fails with `reason`.
    pub(crate) fn poison(&self, id: TensorId, tensor: &TensorIr, reason: String) {
        self.record_tensor(id, frames::poison(id, tensor, reason));
    }

    /// Gives a tensor a second id.
    pub(crate) fn alias(&self, id: TensorId, source: TensorId) {
        self.record_tensor(id, frames::alias(id, source));
    }

    /// Offers a tensor's value to the session with lease rank `to`, which takes it with the
    /// same `capability`.
    pub(crate) fn offer(&self, tensor: &TensorIr, capability: &Capability, to: u32, now: Instant) {
        let frame = Item::Frame(frames::offer(tensor, capability, to));
        self.record_transfer(capability, frame, now);
    }

    /// Makes tensor `id`, with the shape and dtype of `tensor`, of the value that the session
    /// with lease rank `from` offers under `capability`.
    pub(crate) fn take_offer(
        &self,
        id: TensorId,
        tensor: &TensorIr,
        capability: &Capability,
        from: u32,
        now: Instant,
    ) {
        let frame = Item::NewTensor(id, frames::take(id, tensor, capability, from));
        self.record_transfer(capability, frame, now);
    }

    /// Records this session's part of a transfer.
    fn record_transfer(&self, capability: &Capability, item: Item, now: Instant) {
        self.record_in(self.lock(), |state| {
            state.before_transfer(*capability, now);
            state.record(item, true)
        });
    }

    /// Seeds the session's random ops.
    pub(crate) fn seed(&self, seed: u64) {
        self.record_frame(Body::Seed(Seed { seed }));
    }

    /// Records a frame, which is sent at once. Blocks while the session is
    /// [full](State::is_full).
    fn record_frame(&self, body: Body) {
        self.record_item(Item::Frame(body), true);
    }

    /// Records a frame that makes a tensor, as [`record_frame`](Self::record_frame) does.
    fn record_tensor(&self, id: TensorId, body: Body) {
        self.record_item(Item::NewTensor(id, body), true);
    }

    /// Requests a tensor's data, and returns the receiver of it. Blocks while the session is
    /// [full](State::is_full), but not until the data arrives.
    pub(crate) fn read(
        &self,
        tensor: &TensorIr,
    ) -> oneshot::Receiver<Result<TensorData, ExecutionError>> {
        let (answer, answered) = oneshot::channel();
        self.read_many(vec![(tensor.clone(), answer)]);
        answered
    }

    /// Requests the data of tensors; each goes to its [`Answer`]. Blocks while the session is
    /// [full](State::is_full), but not until the data arrives.
    pub(crate) fn read_many(&self, reads: Vec<(TensorIr, Answer<TensorData>)>) {
        let mut state = self.lock();
        if let Some(end) = &state.end {
            for (_, answer) in reads {
                // The receiver may have been dropped.
                let _ = answer.send(Err(end.error()));
            }
            return;
        }
        let waits_for_acks = state.policy.waits_for_acks();
        let (driver_waits, wants_bulk) = state.record_reads(reads);
        if wants_bulk {
            self.want_bulk(&mut state);
        }
        self.send_now(state, driver_waits, waits_for_acks);
    }

    /// Requests a reply for when the worker has done all ops recorded so far, and returns the
    /// receiver of it. Blocks while the session is [full](State::is_full), but not until the
    /// reply arrives.
    pub(crate) fn sync(&self) -> oneshot::Receiver<Result<(), ExecutionError>> {
        self.record_sync(false)
    }

    /// As [`sync`](Self::sync), and has the worker offer the kept uploads of this session to the
    /// tenant's later sessions before it replies.
    pub(crate) fn share_uploads(&self) -> oneshot::Receiver<Result<(), ExecutionError>> {
        self.record_sync(true)
    }

    fn record_sync(&self, share_uploads: bool) -> oneshot::Receiver<Result<(), ExecutionError>> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        match &state.end {
            // Recorded ops are still sent, and a closed session has no reply to wait for.
            Some(SessionEnd::Closed) => drop(answer.send(Ok(()))),
            Some(end) => drop(answer.send(Err(end.error()))),
            None => {
                let waits_for_acks = state.policy.waits_for_acks();
                let driver_waits = state.record_sync(answer, share_uploads);
                self.send_now(state, driver_waits, waits_for_acks);
            }
        }
        answered
    }

    /// Sends what is recorded if the driver waits; a driver that does not wait will do that
    /// by itself. Then blocks while the session is [full](State::is_full). `waits_for_acks` is
    /// what the send policy returned before the request was recorded.
    fn send_now(&self, state: MutexGuard<'_, State>, driver_waits: bool, waits_for_acks: bool) {
        let is_full = state.is_full();
        // The driver takes this lock first when it wakes.
        drop(state);
        let next = |look| self.next_to_send(Track::Ops, look, Instant::now());
        let on_send = |frames: &[FrameParts]| self.counters.add_sent(frames);
        if driver_waits && !self.sender_slot.send_pending(waits_for_acks, next, on_send) {
            self.wake.notify_one();
        }
        if is_full {
            self.wait_for_room();
        }
    }

    /// Returns what to send next on a track. Called by the owner of the track's sender.
    fn next_to_send(&self, track: Track, look: Look, now: Instant) -> Next {
        loop {
            // Not a `match` on the lock itself, which would stay locked.
            let next = self.lock().next(track, look);
            match next {
                NextStep::Next(next) => return next,
                NextStep::Encode => self.encode(now),
            }
        }
    }

    /// Encodes the recorded items into frames.
    fn encode(&self, now: Instant) {
        // The owner of the sender locks the encoder before the state, so items that are
        // recorded meanwhile are encoded after these.
        let mut op_encoder = self
            .op_encoder
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        state.record_due_mark(now);
        state.take_recorded(|items| op_encoder.take(items));
        drop(state);
        self.room.notify_all();
        let bodies = op_encoder.encode();
        let mut state = self.lock();
        for body in bodies {
            if let Err(reason) = check_size(&body) {
                drop((state, op_encoder));
                return self.fail(reason);
            }
            state.push(body);
        }
    }

    /// Has a mark placed as soon as possible, although none is due.
    pub(crate) fn request_mark(&self) {
        self.lock().request_mark();
    }

    /// Returns whether a requested mark may yet be committed. Places it if that was not possible before.
    pub(crate) fn awaits_requested_mark(&self) -> bool {
        let mut state = self.lock();
        let awaits = state.awaits_requested_mark();
        if awaits {
            state.record_due_mark(Instant::now());
            drop(state);
            self.wake.notify_one();
        }
        awaits
    }

    /// Returns what the session could go on from in another process.
    pub(crate) fn durability_status(&self) -> DurabilityStatus {
        let state = self.lock();
        let committed_at = state.committed_at();
        DurabilityStatus {
            commits: state.commits(),
            since_commit: committed_at.map(|at| Instant::now().saturating_duration_since(at)),
            journal_bytes: state.kept_bytes() as u64,
        }
    }

    fn wake_of(&self, track: Track) -> &Notify {
        match track {
            Track::Ops => &self.wake,
            Track::Bulk => &self.wake_bulk,
        }
    }

    /// Returns whether the program has used the session since the worker has received and answered
    /// everything. If not, the next use wakes the driver of the track for ops.
    fn is_used(&self) -> bool {
        self.lock().is_used()
    }

    fn is_over(&self) -> bool {
        self.lock().end.is_some()
    }

    /// Returns the set of usages that the device supports for `dtype`, as bits.
    pub(crate) fn dtype_usage(&self, dtype: DType) -> u8 {
        self.lock().dtype_usage(dtype)
    }

    /// Returns the device's default dtypes, or `None` before the session was opened.
    pub(crate) fn settings(&self) -> Option<burn_backend::DeviceSettings> {
        self.lock().profile.as_ref().map(|profile| profile.settings)
    }

    /// Ends the session: pending reads and syncs fail, and the driver still sends the recorded
    /// ops if the outbox has room. Never blocks.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        if state.end.is_none() {
            // `end` wakes the driver.
            let _ = state.record(Item::Frame(Body::Close(Close {})), true);
        }
        drop(state);
        self.end(SessionEnd::Closed);
    }

    /// Ends the session; pending reads and syncs fail with `reason`.
    pub(crate) fn fail(&self, reason: impl Into<String>) {
        self.end(SessionEnd::Failed(reason.into()));
    }

    fn end(&self, end: SessionEnd) {
        let error = end.error();
        let failure = match &end {
            SessionEnd::Failed(reason) => Some(reason.clone()),
            SessionEnd::Closed => None,
        };
        let Some(requests) = self.lock().end(end) else {
            return;
        };
        // Before any request fails, so that a program that sees the error finds the reason.
        if let Some(reason) = failure {
            self.cohort_member.cohort.end(&reason);
        }
        self.room.notify_all();
        self.wake.notify_one();
        self.wake_bulk.notify_one();
        requests.fail(&error);
    }
}

/// Returns a session that is closed from the start, for a device without a lease.
pub(crate) fn closed() -> Arc<Session> {
    let member = CohortMember::default();
    let session = Session::new(SessionId(0), member, Durability::Auto, [0; 32]);
    session.end(SessionEnd::Closed);
    session
}
