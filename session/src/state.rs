//! The state of a session: what was recorded and not sent, what was sent and not answered,
//! and the channels of both tracks. Of locks it takes only that of the marks of its
//! [cohort](crate::Cohort), and that briefly.

mod keeping;
mod keeping_report;

use std::time::Duration;

use burn_backend::{DType, ExecutionError, TensorData};
use burn_ir::{OperationIr, TensorIr};
use bytes::Bytes;
use tensord_channel::{
    Channel, Connection, Look, Next, Received, duplex::FrameError, resume::ResumeError,
};
use tensord_proto::{
    MAX_READS_PER_FRAME,
    bulk::{INLINE_BYTES, chunks},
    codec::{DeviceProfile, encode_tensor},
    content::{Content, Entry, Hash},
    ids::SessionId,
    v1::{Opened, Reads, Sync, TensorValue, Value, frame::Body, tensor_value, value},
};
use tracing::warn;
use web_time::Instant;

use self::keeping_report::KeepingReport;
pub(crate) use self::keeping_report::{OVERDUE_AFTER, REPORT_INTERVAL};
use crate::{
    cohort::CohortMember,
    connection_end::{ConnectionEnd, closed_by},
    journal::Journal,
    journal_budget::JournalBudget,
    op_buffer::{Item, OpBuffer},
    pending_reads::Delivery,
    requests::{Answer, Requests},
    send_policy::{Ack, Action, Event, Pending, SendPolicy, is_urgent},
    upload_cache::{UploadCache, UploadSource},
};

/// Bytes of frames kept until the worker acknowledges them; ops count with their cost in
/// credit. A program that is further ahead waits in the call that records its next op.
const OUTBOX_BYTES: usize = 32 << 20;

/// Limit on the number of recorded items that are not encoded yet: some megabytes.
pub const MAX_RECORDED_ITEMS: usize = 4096;

/// Bytes of replies that the worker may send. There is no limit, as it sends only what was
/// requested.
const WINDOW_BYTES: u64 = u64::MAX;

/// How long an ended session, with nothing left to send, waits for the worker to close the
/// connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A session's two channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Track {
    /// For ops and their replies.
    Ops,
    /// For payloads. The session connects this track when there is a first payload.
    Bulk,
}

/// Whether a session may go on in another process when its own dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoesOn {
    /// It ends with its process, and workers take no snapshots of it.
    Never,
    /// It goes on, and ends if the other process repeats an answer that differs from the first
    /// one.
    WithSameAnswers,
    /// It goes on, also with other answers.
    WithAnyAnswers,
}

/// Why a session is over.
#[derive(Debug, Clone)]
pub enum SessionEnd {
    /// The program has dropped the lease.
    Closed,
    /// The session failed for this reason.
    Failed(String),
}

impl SessionEnd {
    /// Returns the error of what the program requests after the end.
    pub fn error(&self) -> ExecutionError {
        ExecutionError::with_context(match self {
            Self::Closed => "the lease of this device was dropped".to_owned(),
            Self::Failed(reason) => reason.clone(),
        })
    }
}

/// The state of a session. See the [crate](crate).
pub struct State {
    /// For what is logged.
    id: SessionId,
    /// The channel of the track for ops.
    pub ops: Channel,
    /// The channel of the track for bulk bytes.
    pub bulk: Channel,
    /// Recorded items that are not encoded yet.
    op_buffer: OpBuffer,
    /// Decides when to send; the session passes it the events that happen outside of this state.
    pub policy: SendPolicy,
    upload_cache: UploadCache,
    requests: Requests,
    /// The number of ops that were recorded.
    recorded_ops: u64,
    journal: Journal,
    /// The cohort, if it has other sessions, which place and commit their marks together with this
    /// one.
    cohort_member: Option<CohortMember>,
    goes_on: GoesOn,
    /// What was logged of snapshots that are not kept.
    report: KeepingReport,
    /// Whether the session needs the bulk track.
    pub has_bulk: bool,
    /// What the device supports; `None` before the session was opened.
    pub profile: Option<DeviceProfile>,
    /// Why the session is over, once it is.
    pub end: Option<SessionEnd>,
}

/// What the owner of a sender is to do next.
#[derive(Debug, PartialEq)]
pub enum NextStep {
    /// Encode the recorded items, and look again.
    Encode,
    /// Return this value to the pump, whose writer executes it.
    Next(Next),
}

/// What follows from a frame that was received.
#[derive(Debug, Default)]
pub struct Receipt {
    /// Whether the outbox was full and now has room.
    pub has_room: bool,
    /// Whether the driver of the track must be woken.
    pub must_wake: bool,
    /// Whether the frame lists the uploads of earlier sessions that the worker has.
    pub is_held: bool,
    /// The number of tensor bytes in the frame.
    pub tensor_bytes: usize,
    /// Why the connection must end, if it must.
    pub end: Option<ConnectionEnd>,
}

impl State {
    /// Creates the state of a session without a connection, whose journal shares a budget with those of other
    /// sessions.
    pub fn new(
        id: SessionId,
        now: Instant,
        goes_on: GoesOn,
        cohort_member: &CohortMember,
        budget: &JournalBudget,
    ) -> Self {
        // The worker grants credit when it opens the session.
        let channel = || Channel::new(OUTBOX_BYTES, 0, WINDOW_BYTES, now);
        Self {
            id,
            ops: channel(),
            bulk: channel(),
            op_buffer: OpBuffer::default(),
            policy: SendPolicy::default(),
            upload_cache: UploadCache::default(),
            requests: Requests::new(goes_on == GoesOn::WithAnyAnswers),
            recorded_ops: 0,
            journal: Journal::new(budget.clone()),
            cohort_member: Some(cohort_member.clone()).filter(CohortMember::has_others),
            goes_on,
            report: KeepingReport::default(),
            has_bulk: false,
            profile: None,
            end: None,
        }
    }

    /// Returns the channel of a track.
    pub fn track(&mut self, track: Track) -> &mut Channel {
        match track {
            Track::Ops => &mut self.ops,
            Track::Bulk => &mut self.bulk,
        }
    }

    /// Returns whether the session is full: the recorded items, or the unacknowledged bytes of
    /// a track, are at their limit. The program must then wait before it records more.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.op_buffer.len() >= MAX_RECORDED_ITEMS
            || self.ops.outbox().is_full()
            || self.bulk.outbox().is_full()
    }

    /// Records an op. Returns whether the driver must be woken.
    #[inline]
    pub fn record_op(&mut self, op: OperationIr) -> bool {
        let urgent = is_urgent(&op);
        self.recorded_ops += 1;
        self.op_buffer.op(op);
        self.on_recorded(urgent)
    }

    /// Records another item. Returns whether the driver must be woken.
    #[inline]
    pub fn record(&mut self, item: Item, urgent: bool) -> bool {
        self.op_buffer.push(item);
        self.on_recorded(urgent)
    }

    #[inline]
    fn on_recorded(&mut self, urgent: bool) -> bool {
        let items = self.op_buffer.len();
        self.policy.on(Event::Recorded { urgent, items })
    }

    /// Records reads of tensors. Returns whether the driver must be woken, and whether a
    /// value comes on the bulk track.
    pub fn record_reads(&mut self, reads: Vec<(TensorIr, Answer<TensorData>)>) -> (bool, bool) {
        let (mut must_wake, mut wants_bulk) = (false, false);
        let mut reads = reads.into_iter();
        while reads.len() > 0 {
            let mut first = None;
            let mut tensors = Vec::with_capacity(reads.len().min(MAX_READS_PER_FRAME));
            for (tensor, answer) in reads.by_ref().take(MAX_READS_PER_FRAME) {
                let (id, is_payload) = self.requests.add_read(&tensor, self.recorded_ops, answer);
                first.get_or_insert(id);
                wants_bulk |= is_payload;
                tensors.push(encode_tensor(&tensor));
            }
            let request_id = first.unwrap_or_default();
            let reads = Body::Reads(Reads {
                request_id,
                tensors,
            });
            must_wake |= self.record(Item::Frame(reads), true);
        }
        (must_wake, wants_bulk)
    }

    /// Records a sync, for which the worker also shares the kept uploads if `share_uploads` is true.
    /// Returns whether the driver must be woken.
    pub fn record_sync(&mut self, answer: Answer<()>, share_uploads: bool) -> bool {
        let sync = Sync {
            request_id: self.requests.add_sync(answer),
            share_uploads,
        };
        self.record(Item::Frame(Body::Sync(sync)), true)
    }

    /// Returns whether an upload of `size` bytes may be kept by the worker and reused.
    pub fn is_cacheable(&self, size: usize) -> bool {
        self.upload_cache.is_cacheable(size)
    }

    /// Returns whether the worker is yet to send which uploads of earlier sessions it has.
    pub fn awaits_held(&self) -> bool {
        self.upload_cache.awaits_held()
    }

    /// Returns the entries that locate an upload's bytes, the number of bytes that must be
    /// sent, and whether they were queued on the bulk track, whose driver must then be woken.
    /// Without a `hash` the worker does not keep the bytes.
    pub fn upload(&mut self, hash: Option<Hash>, bytes: Bytes) -> (Vec<Entry>, usize, bool) {
        let source = match hash {
            Some(hash) => self.upload_cache.source(hash, bytes.len()),
            None => UploadSource::New {
                keep: None,
                forget: Vec::new(),
            },
        };
        let (keep, forget) = match source {
            UploadSource::Slot(slot) => {
                return (vec![Entry::Upload(Content::Slot(slot))], 0, false);
            }
            UploadSource::Held(index) => {
                return (vec![Entry::Upload(Content::Held(index))], 0, false);
            }
            UploadSource::New { keep, forget } => (keep, forget),
        };
        let size = bytes.len();
        let is_payload = size > INLINE_BYTES;
        let content = match is_payload {
            false => Content::Inline { bytes, keep },
            true => {
                // The chunks share the tensor's memory until they are acknowledged.
                chunks(bytes).for_each(|chunk| self.bulk.push(Body::Chunk(chunk)));
                Content::Payload { keep }
            }
        };
        let forget = forget.into_iter().map(Entry::Forget);
        let entries = forget.chain([Entry::Upload(content)]).collect();
        (entries, size, is_payload)
    }

    /// Calls `take` with the recorded items. `take` must move all of them out of the buffer.
    pub fn take_recorded(&mut self, take: impl FnOnce(&mut OpBuffer)) {
        take(&mut self.op_buffer);
    }

    /// Returns whether the program lets workers take snapshots of the session.
    pub fn may_be_durable(&self) -> bool {
        self.goes_on != GoesOn::Never
    }

    /// Returns whether tensors of the device of earlier connections can be used on one with `profile`:
    /// it stores the same types, and supports all that the earlier one does.
    pub fn is_served_by(&self, profile: &DeviceProfile) -> bool {
        let Some(known) = &self.profile else {
            return true;
        };
        let supports = |(dtype, usage): &(DType, u8)| {
            let mut others = profile.dtypes.iter();
            *usage == 0 || others.any(|(other, theirs)| other == dtype && usage & !theirs == 0)
        };
        known.settings == profile.settings && known.dtypes.iter().all(supports)
    }

    /// Attaches a new connection, on which the worker sent `opened`, to a track. It replaces
    /// the track's earlier connection.
    pub fn attach(
        &mut self,
        track: Track,
        opened: &Opened,
        profile: DeviceProfile,
    ) -> Result<Connection, ResumeError> {
        self.profile = Some(profile);
        self.upload_cache.set_budget(opened.kept_bytes);
        if opened.has_held {
            self.upload_cache.expect_held();
        }
        if track == Track::Ops && self.end.is_none() {
            if self.ops.was_attached() {
                if opened.epoch > self.journal.epoch() {
                    self.restore(opened.epoch, opened.mark)?;
                }
            } else if opened.durable && self.may_be_durable() {
                self.begin_journal(opened.epoch);
            }
            self.on_opened();
        }
        let channel = self.track(track);
        let attached = channel.attach(opened.received, opened.credit_bytes)?;
        Ok(attached.connection)
    }

    /// Returns the set of usages that the device supports for `dtype`, as bits.
    pub fn dtype_usage(&self, dtype: DType) -> u8 {
        let dtypes = self.profile.iter().flat_map(|profile| &profile.dtypes);
        dtypes
            .into_iter()
            .find(|(d, _)| *d == dtype)
            .map_or(0, |(_, usage)| *usage)
    }

    /// Returns what to do next on a track.
    pub fn next(&mut self, track: Track, look: Look) -> NextStep {
        let has_ended = self.end.is_some();
        if track == Track::Ops && self.is_at_mark() {
            return NextStep::Encode;
        }
        let channel = self.track(track);
        let frames = channel.next_frames();
        if track == Track::Bulk {
            return NextStep::Next(match (frames.is_empty(), has_ended) {
                (false, _) => Next::Frames(frames),
                (true, true) => Next::Linger(CLOSE_TIMEOUT),
                (true, false) => channel.acknowledgement(),
            });
        }
        let pending = Pending {
            frames: !frames.is_empty(),
            ack: match channel.inbox() {
                inbox if inbox.is_ack_due() => Ack::Due,
                inbox if inbox.has_pending_ack() => Ack::Pending,
                _ => Ack::Nothing,
            },
            is_outbox_full: channel.outbox().is_full(),
            items: self.op_buffer.len(),
            has_ended,
        };
        NextStep::Next(match self.policy.next(look, pending) {
            Action::Send => Next::Frames(frames),
            Action::Encode => return NextStep::Encode,
            Action::Gather(delay) => Next::Later(delay),
            Action::Finish => Next::Linger(CLOSE_TIMEOUT),
            Action::Acknowledge | Action::Wait => self.ops.acknowledgement(),
        })
    }

    /// Processes a frame that was received on `connection`, and adds the replies that it
    /// completes to `deliveries`. Returns `None` if a later connection has replaced
    /// `connection`.
    ///
    /// # Errors
    ///
    /// When the frame is malformed or breaks the numbering.
    pub fn receive(
        &mut self,
        track: Track,
        connection: Connection,
        frame: Bytes,
        now: Instant,
        deliveries: &mut Vec<Delivery>,
    ) -> Result<Option<Receipt>, FrameError> {
        let channel = self.track(track);
        let was_full = channel.outbox().is_full();
        let body = match channel.receive(connection, frame, now)? {
            Received::New(body, bytes) => {
                channel.inbox().consume(bytes);
                Some(body)
            }
            Received::Nothing => None,
            Received::Replaced => return Ok(None),
        };
        let has_room = was_full && !channel.outbox().is_full();
        // The frame may have freed room or granted credit, or an ack may be due.
        let due = has_room || channel.outbox().has_unsent() || channel.inbox().is_ack_due();
        let must_wake = match track {
            Track::Ops => self.policy.on(Event::Received { due }),
            Track::Bulk => true,
        };
        let mut receipt = Receipt {
            has_room,
            must_wake,
            ..Receipt::default()
        };
        if let Some(body) = body {
            receipt.is_held = matches!(body, Body::Held(_));
            let taken = self.take(track, body, &mut receipt.tensor_bytes, deliveries);
            receipt.end = taken.err();
            if let Some(text) = self.requests.reads.answered.take_difference() {
                warn!(session = %self.id, "{text}");
            }
            // The restore points that were offered in an `Open` stay until its answer.
            if track == Track::Ops {
                self.try_commit();
            }
        }
        Ok(Some(receipt))
    }

    fn take(
        &mut self,
        track: Track,
        body: Body,
        tensor_bytes: &mut usize,
        deliveries: &mut Vec<Delivery>,
    ) -> Result<(), ConnectionEnd> {
        let broke_rule = ConnectionEnd::BrokeRule;
        match (track, body) {
            (_, Body::Ping(_)) => {}
            (_, Body::Closed(closed)) => {
                let can_be_restored = !self.restore_points().is_empty();
                return Err(closed_by(
                    &closed.error.unwrap_or_default(),
                    can_be_restored,
                ));
            }
            // A session that has ended has no pending requests.
            _ if self.end.is_some() => {}
            (Track::Bulk, Body::Chunk(chunk)) => {
                *tensor_bytes += chunk.bytes.len();
                deliveries.extend(self.requests.reads.chunk(&chunk)?);
            }
            (Track::Ops, Body::Values(values)) => {
                for value in values.values {
                    *tensor_bytes += inline_bytes(&value);
                    deliveries.extend(self.requests.reads.value(value)?);
                }
            }
            (Track::Ops, Body::Synced(synced)) => {
                deliveries.extend(self.requests.on_synced(synced).map_err(broke_rule)?);
            }
            (Track::Ops, Body::Marked(marked)) => self.on_marked(marked),
            (Track::Ops, Body::Held(held)) => {
                let listed = self.upload_cache.set_held(&held.hashes);
                listed.map_err(broke_rule)?;
            }
            _ => {
                let rule = format!("the frame is one that workers do not send on track {track:?}");
                return Err(broke_rule(rule));
            }
        }
        Ok(())
    }

    /// Returns whether the program has used the session since the worker has received and answered
    /// everything. If not, the next use wakes the driver.
    pub fn is_used(&mut self) -> bool {
        let has_unsent = !self.op_buffer.is_empty()
            || !self.ops.outbox().is_empty()
            || !self.bulk.outbox().is_empty();
        let is_used = has_unsent || self.requests.first_pending().is_some();
        if !is_used {
            self.policy.wait_for_use();
        }
        is_used
    }

    /// Ends the session. Returns its pending requests, which the caller must fail, or `None`
    /// if the session had ended before.
    pub fn end(&mut self, end: SessionEnd) -> Option<Requests> {
        if self.end.is_some() {
            return None;
        }
        self.end = Some(end);
        self.keep_nothing();
        self.journal.end();
        Some(std::mem::take(&mut self.requests))
    }
}

/// Returns the number of tensor bytes within `value`.
fn inline_bytes(value: &Value) -> usize {
    match &value.result {
        Some(value::Result::Tensor(TensorValue {
            content: Some(tensor_value::Content::Bytes(bytes)),
            ..
        })) => bytes.len(),
        _ => 0,
    }
}
