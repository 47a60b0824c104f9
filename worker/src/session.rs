//! A session on the worker: an op stream, the tensors it made, and its connections.
//!
//! Three parties use a session, each with a lock of its own so that none waits for
//! another's work: the connection's reader queues work ([`Session::receive`]), the
//! device's executor executes it ([`Session::run`]), and the connection's writer sends
//! the replies ([`Session::next_to_send`]). The reader itself executes small reads whose
//! values are in host memory. A session outlives its connections.
//!
//! - `outbound`: the channels of the two tracks, and the replies on them.
//! - `inbound`: turns frames into work and payloads; `work_queue` has them until the
//!   executor takes them.
//! - `time_slice`: a slice of the device's time, in which `runner` executes the work on the tensors of `dataflow`.
//! - `uploads`: the uploads of a frame of ops, and those that the session keeps for further use.
//! - `peer_requests`: requests to the other sessions of the lease.
//! - `upload_sharing`: offers the kept uploads to other sessions while this one runs.
//! - `snapshot`: the state at a mark; `snapshot_base` decides which contents snapshots share, `sealed_snapshot`
//!   encrypts them, `durability` has them kept outside of this process, and `begin` makes a session of one.

mod begin;
pub(crate) mod dataflow;
mod durability;
mod inbound;
mod outbound;
mod peer_requests;
mod runner;
pub(crate) mod sealed_snapshot;
#[cfg(all(feature = "testing", target_os = "linux"))]
pub(crate) mod simulated;
pub(crate) mod snapshot;
pub(crate) mod snapshot_base;
#[cfg(feature = "testing")]
pub(crate) mod standalone;
#[cfg(test)]
mod tests;
mod time_slice;
mod upload_sharing;
mod uploads;
mod work_queue;

use std::{
    pin::pin,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use tensord_backend::Device;
use tensord_proto::{
    content::Hash,
    ids::{LeaseId, SessionId},
    v1::{Error, ErrorCode},
};
use tensord_transport::channel::{
    self, Connection, FrameParts, Next, Received, resume::ResumeError,
};
use tokio::{runtime::Handle, sync::Notify, time::timeout};
use tracing::info;

use self::sealed_snapshot::SnapshotKey;
use self::{
    begin::Begun,
    inbound::{Item, Payloads},
    outbound::Outbound,
    peer_requests::{Batch, PeerRequests, pass_on},
    runner::{LeaseMembership, Runner},
    upload_sharing::UploadSharing,
    uploads::Uploads,
    work_queue::{Schedule, WorkQueue},
};
pub(crate) use self::{
    begin::SessionBegin,
    durability::{KeepingTime, KeptCallback, SnapshotKeeper},
    inbound::InboundError,
    outbound::Track,
    runner::Captured,
    uploads::KeptLimits,
};
use crate::{
    blobs::KeptBlobs,
    collective::{Cohort, Member, Outcome},
    executor::{RunQueue, run_time_slice},
    locks::lock,
    memory::DeviceMemory,
    op_progress::{OpProgress, Signals},
    usage::Meters,
};

/// The device of a session, and what the session shares with the device's other sessions.
#[derive(Clone)]
pub(crate) struct DeviceContext {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) queue: Arc<RunQueue<Session>>,
    pub(crate) signals: Arc<Signals>,
    /// Count what the device works, and what the session's lease uses of it.
    pub(crate) meters: Meters,
    /// The runtime on which slow reads are awaited.
    pub(crate) runtime: Handle,
    /// Uploads kept from earlier sessions.
    pub(crate) blobs: Arc<dyn KeptBlobs>,
    pub(crate) kept_limits: KeptLimits,
    /// Keeps snapshots outside of this process. `None` if sessions are not captured.
    pub(crate) snapshots: Option<Arc<dyn SnapshotKeeper>>,
}

/// The lease and tenant that a session belongs to, and its device.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseId,
    pub(crate) tenant: Arc<str>,
    pub(crate) device_index: u32,
}

/// A session. What its reader, executor and writer share is in parts with a lock each; the other
/// fields do not change.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) grant: Grant,
    device_context: DeviceContext,
    /// The sessions of the lease; this session has rank `lease_rank` among them.
    cohort: Arc<Cohort>,
    lease_rank: u32,
    outbound: Outbound,
    /// The hashes of the kept uploads that the session was offered.
    offered: Vec<Hash>,
    /// What its snapshots are encrypted with. Without a key there are none.
    snapshot_key: Option<SnapshotKey>,
    /// Number of the mark from which the session went on, or 0.
    restored_at: u64,
    /// Number of the last mark that was received.
    last_mark: AtomicU64,
    payloads: Mutex<Payloads>,
    /// The most bytes of uploads that the session may keep.
    kept_limit_bytes: u64,
    work_queue: WorkQueue,
    /// `None` after the session has ended.
    runner: Mutex<Option<Runner>>,
    peer_requests: PeerRequests,
    upload_sharing: UploadSharing,
    progress: EndProgress,
    op_progress: Arc<OpProgress>,
}

/// Which steps of the session's end are done.
#[derive(Default)]
struct EndProgress {
    /// Whether `Closed` is queued for the client, or is about to be queued.
    announced: AtomicBool,
    /// Whether the session's state is dropped and its device memory given back.
    torn_down: AtomicBool,
}

impl Session {
    /// Opens a session, and enters it into `cohort`.
    ///
    /// # Errors
    ///
    /// When the device has no rank in the lease, another session has that rank, or the snapshot
    /// cannot be restored.
    pub(crate) fn new(
        id: SessionId,
        grant: Grant,
        begin: SessionBegin,
        snapshot_key: Option<SnapshotKey>,
        device_context: DeviceContext,
        cohort: Arc<Cohort>,
    ) -> Result<Arc<Self>, Error> {
        let device = grant.device_index;
        let lease_rank = cohort.lease_rank(device).ok_or_else(|| {
            let reason = format!("device {device} is not among those of the session's cohort");
            Error::new(ErrorCode::Session, reason)
        })?;
        let op_progress = OpProgress::new(device_context.signals.clone());
        let open_runner = |held, seed| {
            Runner::new(
                device_context.device.open(),
                device_context.memory.open(),
                op_progress.clone(),
                seed,
                Uploads::new(device_context.kept_limits, held),
                LeaseMembership {
                    lease_members: cohort.lease_members().clone(),
                    lease_rank,
                    bucket_bytes: cohort.bucket_bytes(),
                },
            )
        };
        let blobs = device_context.blobs.blobs_of(&grant.tenant);
        let Begun {
            mut runner,
            outbound,
            offered,
            restored_at,
        } = begin.begin(blobs, open_runner)?;
        if let (Some(snapshots), Some(_)) = (&device_context.snapshots, &snapshot_key) {
            let snapshots = snapshots.clone();
            runner.share_contents(snapshots.min_base_bytes());
            runner.allow_copies(Box::new(move |mark| snapshots.copy_limit(id, mark)));
        }
        let kept_limit_bytes = runner.kept_limit_bytes();
        let session = Arc::new(Self {
            id,
            grant,
            cohort,
            lease_rank,
            outbound,
            offered,
            snapshot_key,
            restored_at,
            last_mark: AtomicU64::new(restored_at),
            payloads: Mutex::new(Payloads::new(
                device_context.memory.clone(),
                kept_limit_bytes,
            )),
            kept_limit_bytes,
            work_queue: WorkQueue::default(),
            runner: Mutex::new(Some(runner)),
            peer_requests: PeerRequests::default(),
            upload_sharing: UploadSharing::default(),
            progress: EndProgress::default(),
            op_progress,
            device_context,
        });
        let member: Weak<dyn Member> = Arc::downgrade(&session) as _;
        match session.cohort.enter(lease_rank, member) {
            true => Ok(session),
            false => Err(Error::new(
                ErrorCode::Session,
                format!("rank {lease_rank} of the cohort has a session already"),
            )),
        }
    }

    /// Makes a new connection the latest of a track. The client has received the frames up
    /// to number `received`. Fails if `received` contradicts what was sent or acknowledged.
    pub(crate) fn attach(
        &self,
        track: Track,
        received: u64,
    ) -> Result<channel::Attached, ResumeError> {
        self.outbound.attach(track, received)
    }

    /// Records that `connection` of a track has ended, unless a later one has replaced it.
    pub(crate) fn detach(&self, track: Track, connection: Connection) {
        self.outbound.detach(track, connection);
    }

    /// Returns the most bytes of uploads that the session may keep.
    pub(crate) fn kept_limit_bytes(&self) -> u64 {
        self.kept_limit_bytes
    }

    /// Returns since when the track for ops has no connection, or `None` if it has one.
    pub(crate) fn detached(&self) -> Option<Instant> {
        self.outbound.detached()
    }

    /// Returns what the writer of `connection` is to do next. Frames that are sent again after a
    /// connection was lost count as moved again.
    pub(crate) fn next_to_send(&self, track: Track, connection: Connection) -> Next {
        let next = self.outbound.next_to_send(track, connection);
        if let Next::Frames(frames) = &next {
            let bytes = frames.iter().flatten().map(Bytes::len);
            self.device_context.meters.lease.add_moved(bytes.sum());
        }
        next
    }

    /// Returns the ping of a track's channel; see [`channel::Channel::ping`].
    pub(crate) fn ping(
        &self,
        track: Track,
        connection: Connection,
        must: bool,
    ) -> Option<FrameParts> {
        self.outbound.ping(track, connection, must)
    }

    /// Returns the [`Notify`] that wakes the writer of a track.
    pub(crate) fn writer_notify(&self, track: Track) -> &Notify {
        self.outbound.writer_notify(track)
    }

    /// Processes a frame from `connection`. Returns `false`, and drops the frame, if a later
    /// connection has replaced `connection`.
    pub(crate) fn receive(
        self: &Arc<Self>,
        track: Track,
        connection: Connection,
        frame: Bytes,
    ) -> Result<bool, InboundError> {
        // Locked until the work is queued, so that a later connection's reader cannot
        // queue its frames before this one.
        let _reader = self.outbound.lock_reader(track);
        let frame_bytes = frame.len();
        let (received, has_room) = self.outbound.receive(track, connection, frame)?;
        if has_room {
            self.schedule(self.work_queue.unblock());
        }
        let (body, bytes) = match received {
            Received::New(body, bytes) => (body, bytes),
            Received::Nothing => return Ok(true),
            Received::Replaced => return Ok(false),
        };
        // A frame that the client sends again counts once.
        self.device_context.meters.lease.add_moved(frame_bytes);
        if self.work_queue.is_ending() {
            // Frames for a session that ends are dropped.
            return Ok(true);
        }
        match track {
            Track::Ops => {
                if let Some(item) = inbound::item(body, bytes)? {
                    self.check_mark(&item)?;
                    let can_run_here = |item: &Item| self.can_run_in_reader(item);
                    self.schedule(self.work_queue.push(item, can_run_here));
                }
            }
            Track::Bulk => {
                let payload = lock(&self.payloads).take(body)?;
                let (schedule, credit) = self.work_queue.push_payload(payload, bytes);
                if credit > 0 {
                    self.outbound.consumed(Track::Bulk, credit);
                }
                self.schedule(schedule);
            }
        }
        Ok(true)
    }

    /// Returns whether the connection's reader may execute `item` itself: the session is
    /// idle, and the reply takes less time than waking the executor.
    fn can_run_in_reader(&self, item: &Item) -> bool {
        let Item::Reads(_, tensors, _) = item else {
            return false;
        };
        // Must not block: the executor may be at the end of a turn with `runner` locked,
        // and wait for the work queue, which the caller has locked.
        let Ok(mut runner) = self.runner.try_lock() else {
            return false;
        };
        let runner = runner.as_mut();
        runner.is_some_and(|runner| runner.can_read_at_once(tensors))
    }

    fn schedule(self: &Arc<Self>, schedule: Schedule) {
        match schedule {
            Schedule::No => {}
            Schedule::Queue => self.device_context.queue.push(self.clone()),
            Schedule::RunHere => run_time_slice(&self.device_context.queue, self.clone()),
        }
    }

    /// Passes on the queued requests to peers. When a value has not been read yet, a task
    /// waits for it and continues after that.
    fn send_peer_requests(self: &Arc<Self>) {
        while let Some(Batch { ready, in_flight }) = self.peer_requests.next_batch() {
            self.pass_on(ready);
            if let Some(in_flight) = in_flight {
                let session = self.clone();
                let work = self.device_context.meters.begin(Instant::now());
                self.device_context.runtime.spawn(async move {
                    let request = session.with_op_timeout(in_flight).await;
                    drop(work);
                    session.pass_on(vec![request]);
                    session.send_peer_requests();
                    session.schedule(session.work_queue.unblock());
                });
                return;
            }
        }
    }

    fn pass_on(&self, requests: Vec<runner::Request>) {
        // After the end, the cohort notifies the peers that the session has ended.
        if !self.work_queue.is_ending() {
            let bytes = requests.iter().map(runner::Request::size_bytes);
            self.device_context.meters.lease.add_moved(bytes.sum());
            pass_on(requests, &self.cohort, self.lease_rank);
        }
    }

    /// Requests the end of the session, for example because its lease ended, or its
    /// client broke the protocol or is gone. The session ends in its next turn. Later
    /// calls have no effect.
    pub(crate) fn end(self: &Arc<Self>, error: Error) {
        self.schedule(self.work_queue.end(error));
    }

    /// Ends sessions as [`end`](Self::end) does, and at once: none of them sees that another one has
    /// ended, and reports a fault to its client because of that.
    pub(crate) fn end_together(mut sessions: Vec<Arc<Self>>, error: &Error) {
        sessions.sort_by_key(|session| session.id);
        let queues = sessions.iter().map(|session| &session.work_queue);
        let schedules = WorkQueue::end_all(queues, error);
        for (session, schedule) in sessions.iter().zip(schedules) {
            session.schedule(schedule);
        }
    }

    /// Returns whether `Closed` is queued for the client. The device may still be
    /// executing the session's last op.
    pub(crate) fn has_ended(&self) -> bool {
        self.outbound.is_closing()
    }

    /// Returns whether the session has ended and the device executes nothing for it.
    pub(crate) fn is_torn_down(&self) -> bool {
        self.progress.torn_down.load(Ordering::Acquire) && !self.op_progress.has_late_reads()
    }

    /// Returns the number of steps that the session has executed: ops, reads and other work.
    #[cfg(target_os = "linux")]
    pub(crate) fn steps(&self) -> u64 {
        self.op_progress.steps()
    }

    /// Returns whether the session has nothing to do: nothing is queued, deferred or executed, no read is in
    /// flight, and the client has confirmed all replies. Does not wait for a step that is running.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_idle(&self) -> bool {
        let Ok(runner) = self.runner.try_lock() else {
            return false;
        };
        let is_idle = runner.as_ref().is_none_or(Runner::is_idle);
        drop(runner);
        is_idle && self.work_queue.is_idle() && self.outbound.is_empty()
    }

    /// Completes the end: notifies the cohort and the client, and drops all state.
    fn tear_down(self: &Arc<Self>, runner: Runner, error: Error) {
        self.op_progress.begin_step();
        self.leave_cohort(&error.message);
        self.keep_uploads(runner);
        // Frees a payload that is partly received.
        lock(&self.payloads).clear();
        self.announce_end(error);
        if let Some(snapshots) = &self.device_context.snapshots {
            snapshots.clone().forget(self.id);
        }
        self.progress.torn_down.store(true, Ordering::Release);
        self.device_context.signals.wake();
    }

    /// Removes the session from its cohort, unless it was removed before.
    fn leave_cohort(self: &Arc<Self>, reason: &str) {
        let member: Weak<dyn Member> = Arc::downgrade(self) as _;
        self.cohort.leave(self.lease_rank, &member, reason);
    }

    /// Queues `Closed` for the client, unless it was queued before, and lets the
    /// connections end.
    fn announce_end(&self, error: Error) {
        if !self.progress.announced.swap(true, Ordering::AcqRel) {
            info!(session = %self.id, lease = %self.grant.lease, "session ended: {error}");
            self.outbound.close(error);
        }
    }

    /// Ends the session at once if an op or a read exceeds the op timeout. Returns a
    /// description of that op or read until it ends, or `None` if none exceeds the timeout.
    pub(crate) fn overdue(self: &Arc<Self>, now: Instant) -> Option<String> {
        let overdue = self.op_progress.check(now)?.to_string();
        self.end_overdue(&overdue);
        Some(overdue)
    }

    /// Ends the session without waiting for the op or read in progress.
    fn end_overdue(self: &Arc<Self>, reason: &str) {
        if self.progress.announced.load(Ordering::Acquire) {
            return;
        }
        let error = Error::new(ErrorCode::Limit, reason);
        self.end(error.clone());
        self.leave_cohort(reason);
        self.announce_end(error);
    }

    /// Awaits `answer`, a value that the device is reading, and returns it. If the read
    /// exceeds the op timeout, ends the session at once; the device then counts as busy until
    /// the read is complete.
    async fn with_op_timeout<T>(self: &Arc<Self>, answer: impl Future<Output = T>) -> T {
        let mut answer = pin!(answer);
        if let Ok(answer) = timeout(self.device_context.signals.op_timeout, &mut answer).await {
            return answer;
        }
        let late = self.op_progress.begin_late_read();
        self.end_overdue(&self.op_progress.overdue_read().to_string());
        self.device_context.signals.wake();
        let answer = answer.await;
        drop(late);
        answer
    }
}

impl Member for Session {
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome) {
        if let Ok(received) = &outcome {
            let bytes = received.size_bytes();
            self.device_context.meters.lease.add_moved(bytes);
        }
        self.schedule(self.work_queue.push_outcome(ticket, outcome));
    }
}
