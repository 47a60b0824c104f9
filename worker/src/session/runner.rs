//! Executes one session's work in order, one piece at a time.
//!
//! - `plan`: decodes work ahead, and has it until its turn.
//! - `deferred`: work that waits for values.
//! - `interpreter`: executes an op, read or sync on the session's `tensors`, and makes a
//!   `fault` of every failure.
//! - `capture`: takes the state for a snapshot; `restore`: gives it to a session.
//! - `collectives`: all-reduces and transfers, with their order, the results in flight and
//!   the requests to peers.
//!
//! Work is executed as received, except for work that needs a pending value. That work is
//! deferred, with all work that depends on it, and the rest is executed. So the optimiser's
//! ops for one parameter run while the gradients of others are still being reduced. And
//! ranks may reach their collectives in different orders, which happens when several threads
//! of a program record into one stream: if all work waited for the first collective, two
//! sessions could deadlock. The reordering changes timing only. A tensor is made before it
//! is used, and consumed after its other uses. Ops that draw random numbers need no tensor,
//! so they are never deferred.
//!
//! One thread uses a runner at a time, usually the device's executor. Every failure of an
//! op ends here as a fault: a refusal of the dataflow table, an error or a panic of
//! the backend. Only bytes that break the protocol end the session.

mod all_reduce_order;
mod capture;
mod collectives;
mod deferred;
mod fault;
mod in_flight;
mod interpreter;
mod outcome;
mod plan;
mod requests;
mod restore;
mod tensors;
#[cfg(test)]
mod tests;
mod work;

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use burn_ir::{OperationIr, TensorId, TensorIr};
use bytes::Bytes;
use tensord_backend::TensorStore;
use tensord_proto::{
    codec::{CodecError, DecodedOp},
    collective_op::{AllReduce, CollectiveOp},
    v1::Mark,
};

#[cfg(feature = "testing")]
pub(crate) use self::outcome::RecordedOutcome;
pub(crate) use self::{
    capture::{Captured, CapturedSlot},
    collectives::LeaseMembership,
    requests::Request,
    work::{Reply, SyncRequest, Work},
};
use self::{
    collectives::Collectives,
    deferred::Deferred,
    interpreter::Interpreter,
    plan::{PlanQueue, Planned, Task, TaskKind},
};
use super::{
    snapshot::{Snapshot, SnapshotError},
    snapshot_base::{self, BaseTracker},
    uploads::{Payload, Uploads},
};
use crate::{collective::Outcome, locks::lock, memory::SessionMemory, op_progress::OpProgress};

/// The outcome of one step.
pub(crate) enum Step {
    /// Work was executed or deferred. Has the bytes of credit that it returns, and the
    /// reply to the client.
    Ran(usize, Option<Reply>),
    /// The next op is an upload whose bytes are in the next payload.
    NeedsPayload,
    /// No work can be executed until a value arrives.
    NeedsOutcome,
    /// There is no work.
    Idle,
    /// The client closed the session, and all work is done.
    Closed,
}

/// The state of a session that its work reads and changes.
pub(crate) struct Runner {
    plans: PlanQueue,
    deferred: Deferred,
    interpreter: Interpreter,
    collectives: Collectives,
    uploads: Uploads,
    /// Returns the bytes that a mark may copy from the device now. `None` if no mark may.
    copy_limit: Option<CopyLimit>,
    snapshot_base: Arc<Mutex<BaseTracker>>,
}

/// Returns the bytes that may be copied from the device for the snapshot of a mark now, or why none may.
pub(crate) type CopyLimit = Box<dyn Fn(Mark) -> Result<u64, String> + Send>;

impl Runner {
    pub(crate) fn new(
        store: Box<dyn TensorStore>,
        memory: SessionMemory,
        op_progress: Arc<OpProgress>,
        seed: u64,
        uploads: Uploads,
        membership: LeaseMembership,
    ) -> Self {
        Self {
            plans: PlanQueue::default(),
            deferred: Deferred::default(),
            interpreter: Interpreter::new(store, memory, op_progress, seed),
            collectives: Collectives::new(membership),
            uploads,
            copy_limit: None,
            snapshot_base: Arc::default(),
        }
    }

    /// Returns the kept uploads that no earlier call has returned.
    pub(crate) fn take_unshared(&mut self) -> Vec<Bytes> {
        self.uploads.take_unshared()
    }

    /// Returns the number of ops whose turn has come.
    pub(crate) fn ops_seen(&self) -> u64 {
        self.plans.ops_seen()
    }

    /// Returns whether more work may be decoded ahead.
    pub(crate) fn has_room(&self) -> bool {
        self.plans.has_room()
    }

    /// Decodes and queues the next piece of work, which returns `credit` bytes when done.
    pub(crate) fn plan(&mut self, work: Work, credit: usize) -> Result<(), CodecError> {
        let collectives = &mut self.collectives;
        self.plans
            .push(work, credit, |ops| collectives.record(ops))?;
        self.begin_ready_all_reduces();
        Ok(())
    }

    /// Queues the end of the session behind all planned work.
    pub(crate) fn plan_close(&mut self) {
        self.plans.push_close();
    }

    /// Returns whether the next step may have a reply to the client.
    pub(crate) fn replies_next(&self) -> bool {
        match self.deferred.peek_ready() {
            Some(task) => matches!(task.kind, TaskKind::Other(_)),
            None => self.plans.is_other_next(),
        }
    }

    /// Returns whether no work must be done before `tensors` are read, and their values
    /// are small and in host memory.
    pub(crate) fn can_read_at_once(&mut self, tensors: &[TensorIr]) -> bool {
        self.plans.is_empty()
            && self.deferred.is_empty()
            && self.collectives.is_idle()
            && self.interpreter.tensors.can_read_directly(tensors)
    }

    /// Returns the requests to pass on to peers. Unless `all` is true, they are held back
    /// until a bucket is full or one of them is urgent.
    pub(crate) fn take_requests(&mut self, all: bool) -> Vec<Request> {
        self.collectives.take_requests(all)
    }

    /// Processes the outcome of a request that arrived under `ticket`.
    pub(crate) fn on_outcome(&mut self, ticket: u64, outcome: Outcome) {
        let settled = self
            .collectives
            .on_outcome(&mut self.interpreter, ticket, outcome);
        if let Some(id) = settled {
            self.on_settled(id);
        }
    }

    /// Executes or defers an op or another piece of work.
    pub(crate) fn step(&mut self) -> Result<Step, CodecError> {
        if self.uploads.awaits_payload() {
            return Ok(Step::NeedsPayload);
        }
        if let Some(step) = self.run_ready_deferred() {
            return Ok(step);
        }
        let must_drain = self.plans.is_mark_next() && !self.is_drained();
        if must_drain || self.deferred.is_full() || self.collectives.is_full() {
            self.collectives.flush();
            return Ok(Step::NeedsOutcome);
        }
        loop {
            return match self.plans.next() {
                None => Ok(Step::Idle),
                Some(Planned::FrameBegin(contents)) => {
                    self.uploads.begin(contents);
                    continue;
                }
                Some(Planned::Op(op, number)) => self.next_op(op, number),
                Some(Planned::FrameEnd(credit)) => {
                    self.uploads.finish()?;
                    Ok(Step::Ran(credit, None))
                }
                Some(Planned::Other(task, credit)) => Ok(self.run_or_defer(task, credit)),
                // Deferred work is executed first.
                Some(Planned::Close) if self.deferred.is_empty() => Ok(Step::Closed),
                Some(Planned::Close) => Ok(Step::NeedsOutcome),
            };
        }
    }

    fn next_op(&mut self, decoded: DecodedOp, number: u64) -> Result<Step, CodecError> {
        let op = &decoded.op;
        let step = match &**op {
            OperationIr::Init(init) => {
                self.interpreter.current.set(number);
                self.upload(&init.out)?
            }
            _ if self.deferred.is_empty()
                && !AllReduce::is(op)
                && !self.interpreter.tensors.must_wait(op) =>
            {
                self.interpreter.current.set(number);
                self.run_op(decoded.op);
                Step::Ran(0, None)
            }
            _ => {
                let kind = TaskKind::Op(decoded);
                return Ok(self.run_or_defer(Task { kind, number }, 0));
            }
        };
        self.begin_ready_all_reduces();
        Ok(step)
    }

    /// Executes an upload, or begins to wait for its payload.
    fn upload(&mut self, out: &TensorIr) -> Result<Step, CodecError> {
        let Some((source, size)) = self.uploads.start(out)? else {
            return Ok(Step::NeedsPayload);
        };
        let memory = self.interpreter.tensors.reserve(size as u64);
        self.interpreter.upload(out, source, memory);
        Ok(Step::Ran(0, None))
    }

    /// Executes the upload for which [`step`](Self::step) needs a payload.
    pub(crate) fn payload(&mut self, payload: Payload) -> Result<Step, CodecError> {
        let (out, source) = self.uploads.complete(payload.bytes)?;
        self.interpreter.upload(&out, source, payload.memory);
        self.begin_ready_all_reduces();
        Ok(Step::Ran(0, None))
    }

    /// Executes a deferred task or sync that no longer waits, if there is one.
    fn run_ready_deferred(&mut self) -> Option<Step> {
        if self.deferred.is_empty() {
            return None;
        }
        if let Some((number, task)) = self.deferred.next_ready() {
            if self.must_wait(&task) {
                let after = self.must_begin_after(&task);
                let tensors = &self.interpreter.tensors;
                let is_pending = |id| tensors.is_pending(id);
                self.deferred.put_back(number, task, after, is_pending);
                return Some(Step::Ran(0, None));
            }
            let reply = self.execute_task(task);
            self.deferred.done(number);
            return Some(Step::Ran(0, reply));
        }
        let collectives = &self.collectives;
        let is_over = |op_number| !collectives.has_in_flight_up_to(op_number);
        let (op_number, request) = self.deferred.next_sync(is_over)?;
        self.interpreter.current.set(op_number);
        Some(Step::Ran(0, Some(self.interpreter.sync(request))))
    }

    /// Executes `task`, or defers it.
    fn run_or_defer(&mut self, task: Task, credit: usize) -> Step {
        if let TaskKind::Other(Work::Sync(request)) = task.kind {
            self.collectives.flush();
            self.deferred.put_sync(task.number, request);
            return Step::Ran(credit, None);
        }
        if self.deferred.must_follow(&task) || self.must_wait(&task) {
            self.collectives.flush();
            let after = self.must_begin_after(&task);
            let tensors = &self.interpreter.tensors;
            self.deferred.put(task, after, |id| tensors.is_pending(id));
            return Step::Ran(credit, None);
        }
        let reply = self.execute_task(task);
        Step::Ran(credit, reply)
    }

    fn execute_task(&mut self, task: Task) -> Option<Reply> {
        self.interpreter.current.set(task.number);
        let reply = match task.kind {
            TaskKind::Op(decoded) => {
                self.run_op(decoded.op);
                None
            }
            TaskKind::Other(work) => self.execute_work(work),
        };
        self.begin_ready_all_reduces();
        reply
    }

    fn run_op(&mut self, op: Box<OperationIr>) {
        match CollectiveOp::of(&op) {
            None => self.interpreter.run(op),
            Some(CollectiveOp::AllReduce(reduce)) => {
                let settled = self
                    .collectives
                    .all_reduce(&mut self.interpreter, &op, &reduce);
                if let Some(id) = settled {
                    self.on_settled(id);
                }
            }
            // Work that needs a result waits for the result, not for this op.
            Some(CollectiveOp::Sync) => {
                self.collectives.flush();
                self.interpreter.outcome.record_executed();
            }
        }
    }

    /// Executes a piece of work other than a frame of ops.
    fn execute_work(&mut self, work: Work) -> Option<Reply> {
        let interpreter = &mut self.interpreter;
        match work {
            Work::Ops { .. } => unreachable!("ops were decoded when they were planned"),
            Work::Poison { id, fault } => interpreter.poison(id, fault),
            Work::Alias { id, source } => interpreter.alias(id, source),
            Work::Read { request, tensor } => return Some(interpreter.read(request, tensor)),
            Work::Sync(request) => return Some(interpreter.sync(request)),
            Work::Seed(seed) => interpreter.set_seed(seed),
            Work::Mark(mark) => {
                interpreter.current.begin("Mark");
                // Before the clock: ops from before the mark are not part of its cost.
                let synced = interpreter.tensors.wait();
                let began = Instant::now();
                let captured = synced.and_then(|()| self.capture(mark).map(Box::new));
                let cost = began.elapsed();
                return Some(Reply::Captured {
                    mark,
                    captured,
                    cost,
                });
            }
            Work::Offer {
                tensor,
                capability,
                to,
            } => self.collectives.offer(interpreter, &tensor, capability, to),
            Work::Take {
                out,
                capability,
                from,
            } => self.collectives.take(interpreter, &out, capability, from),
        }
        None
    }

    /// Returns whether all work whose turn has come is done.
    fn is_drained(&self) -> bool {
        self.deferred.is_empty() && self.collectives.is_idle()
    }

    /// Returns whether no work is left to execute.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_idle(&self) -> bool {
        self.plans.is_empty() && self.is_drained() && !self.uploads.awaits_payload()
    }

    /// Lets marks copy as much as `limit` returns from a device that shares no memory with the host;
    /// at first they may copy nothing.
    pub(crate) fn allow_copies(&mut self, limit: CopyLimit) {
        self.copy_limit = Some(limit);
    }

    /// Lets snapshots share contents of at least `min_bytes`.
    pub(crate) fn share_contents(&mut self, min_bytes: u64) {
        lock(&self.snapshot_base).set_min_bytes(min_bytes);
    }

    /// Waits until the device has completed all ops so far. What failed is reported when a tensor is
    /// read.
    pub(crate) fn wait_for_device(&mut self) {
        let _ = self.interpreter.tensors.wait();
    }

    /// Returns the session's state. All work whose turn has come must be done.
    fn capture(&mut self, mark: Mark) -> Result<Captured, SnapshotError> {
        let limit = self.copy_limit.as_ref().map_or(Ok(0), |limit| limit(mark));
        let max_copied_bytes = limit.map_err(SnapshotError::Device)?;
        Ok(Captured {
            tensors: self.interpreter.capture(max_copied_bytes)?,
            ops_seen: self.plans.ops_seen(),
            decoder_counter: self.plans.decoder_counter(),
            slots: self.uploads.capture(),
            kept_limit_bytes: self.kept_limit_bytes(),
            held: Vec::new(),
            // Not 0, which stands for no base.
            new_base_id: rand::random::<u64>() | 1,
            base: self.snapshot_base.clone(),
            outcome: snapshot_base::Outcome::default(),
        })
    }

    /// Restores the state of a session at a mark. This runner must be new.
    ///
    /// # Errors
    ///
    /// When the snapshot is malformed, or the device has no room for it. The runner must then be
    /// dropped.
    pub(crate) fn restore(&mut self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        self.interpreter.restore(snapshot)?;
        self.uploads.restore(snapshot)?;
        let versions = self.uploads.versions(snapshot);
        lock(&self.snapshot_base).restore(snapshot, &versions);
        let header = &snapshot.header;
        self.plans.restore(header.ops_seen, header.decoder_counter);
        self.interpreter.current.set(header.ops_seen);
        Ok(())
    }

    /// Returns the most bytes of uploads that the session may keep.
    pub(crate) fn kept_limit_bytes(&self) -> u64 {
        self.uploads.kept_limit_bytes()
    }

    /// Continues with work that waited for the value of `id`, which has arrived or failed.
    fn on_settled(&mut self, id: TensorId) {
        self.deferred.settled(id);
        self.begin_ready_all_reduces();
    }

    fn begin_ready_all_reduces(&mut self) {
        self.collectives.begin_ready(&mut self.interpreter);
    }

    /// Returns whether `task` needs a pending value, or must wait until another
    /// all-reduce has begun.
    fn must_wait(&self, task: &Task) -> bool {
        let tensors = &self.interpreter.tensors;
        match &task.kind {
            TaskKind::Op(decoded) => {
                tensors.must_wait(&decoded.op) || self.must_begin_after(task).is_some()
            }
            TaskKind::Other(Work::Read { tensor, .. } | Work::Offer { tensor, .. }) => {
                tensors.is_pending(tensor.id)
            }
            TaskKind::Other(Work::Alias { source, .. }) => tensors.is_pending(*source),
            TaskKind::Other(_) => false,
        }
    }

    /// Returns the output of the all-reduce that must begin just before `task`, or `None`
    /// if `task` is not an all-reduce or may begin.
    fn must_begin_after(&self, task: &Task) -> Option<TensorId> {
        match &task.kind {
            TaskKind::Op(decoded) => {
                AllReduce::of(&decoded.op).and_then(|op| self.collectives.preceding_unstarted(&op))
            }
            TaskKind::Other(_) => None,
        }
    }
}
