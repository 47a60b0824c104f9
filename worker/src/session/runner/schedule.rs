//! The order in which a session's work is executed: as received, except for work that
//! needs a pending value.
//!
//! That work is deferred, with all work that depends on it, and the rest is executed. So
//! the optimiser's ops for one parameter run while the gradients of others are still
//! being reduced. And ranks may reach their collectives in different orders, which
//! happens when several threads of a program record into one stream: if all work waited
//! for the first collective, two sessions could deadlock.
//!
//! The reordering changes timing only. A tensor is made before it is used, and consumed
//! after its other uses. Ops that draw random numbers need no tensor, so they are never
//! deferred.

use std::collections::VecDeque;

use burn_ir::{DistributedOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use bytes::Bytes;
use tensord_proto::codec::CodecError;

use super::{Reply, Runner, Work, collective_requests};

/// Approximate number of ops that are decoded ahead: several steps of a small model, or
/// the backward pass of a large one, at some hundred bytes each.
const AHEAD_OPS: usize = 8192;

/// Maximum number of deferred tasks and syncs. At the limit all other work waits.
const MAX_DEFERRED: usize = 8192;

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

/// Decoded work.
pub(super) enum Plan {
    /// A frame of ops, and the contents list of its uploads until the frame begins.
    Ops(VecDeque<Box<OperationIr>>, Option<Bytes>),
    Other(Work),
    Close,
}

/// Work that is due now or was deferred.
pub(super) struct Task {
    kind: TaskKind,
    /// Number of the op in the session, or of the last op before this work.
    number: u64,
}

enum TaskKind {
    Op(Box<OperationIr>),
    Other(Work),
}

impl Task {
    /// Calls `visit` with each tensor that the task uses, and whether the task consumes
    /// it.
    pub(super) fn visit_used(&self, visit: &mut dyn FnMut(TensorId, bool)) {
        let mut one = |tensor: &TensorIr| visit(tensor.id, is_consumed(tensor));
        match &self.kind {
            TaskKind::Op(op) => match &**op {
                OperationIr::Drop(tensor) => visit(tensor.id, true),
                op => op.inputs().for_each(one),
            },
            TaskKind::Other(Work::Read { tensor, .. } | Work::Offer { tensor, .. }) => one(tensor),
            TaskKind::Other(Work::Alias { source, .. }) => visit(*source, false),
            TaskKind::Other(_) => {}
        }
    }

    /// Calls `visit` with each tensor that the task makes.
    pub(super) fn visit_made(&self, visit: &mut dyn FnMut(TensorId)) {
        match &self.kind {
            TaskKind::Op(op) => op.outputs().for_each(|out| visit(out.id)),
            TaskKind::Other(Work::Alias { id, .. } | Work::Poison { id, .. }) => visit(*id),
            TaskKind::Other(Work::Take { out, .. }) => visit(out.id),
            TaskKind::Other(_) => {}
        }
    }
}

fn is_consumed(tensor: &TensorIr) -> bool {
    tensor.status == TensorStatus::ReadWrite
}

impl Runner {
    /// Returns the number of ops whose turn has come.
    pub(crate) fn ops_seen(&self) -> u64 {
        self.ops_seen
    }

    /// Returns whether more work may be decoded ahead.
    pub(crate) fn has_room(&self) -> bool {
        self.planned_ops < AHEAD_OPS
    }

    /// Decodes and queues the next piece of work, which returns `credit` bytes when done.
    pub(crate) fn plan(&mut self, work: Work, credit: usize) -> Result<(), CodecError> {
        // The client's encoder records these tensors at the same point of the stream.
        if let Work::Poison { id, .. }
        | Work::Alias { id, .. }
        | Work::Take {
            out: TensorIr { id, .. },
            ..
        } = &work
        {
            self.decoder.note_tensor(*id);
        }
        let plan = match work {
            Work::Ops {
                count,
                encoded,
                contents,
            } => {
                let ops = self.decoder.decode(&encoded, count)?;
                self.planned_ops += ops.len();
                self.record_all_reduces(&ops);
                Plan::Ops(ops.into(), Some(contents))
            }
            work => {
                self.planned_ops += 1;
                Plan::Other(work)
            }
        };
        self.plans.push_back((plan, credit));
        self.begin_ready_all_reduces();
        Ok(())
    }

    /// Queues the end of the session behind all planned work.
    pub(crate) fn plan_close(&mut self) {
        self.plans.push_back((Plan::Close, 0));
    }

    /// Returns whether the next step may have a reply to the client.
    pub(crate) fn replies_next(&self) -> bool {
        match self.deferred.peek_ready() {
            Some(task) => matches!(task.kind, TaskKind::Other(_)),
            None => matches!(self.plans.front(), Some((Plan::Other(_), _))),
        }
    }

    /// Executes or defers an op or another piece of work.
    pub(crate) fn step(&mut self) -> Result<Step, CodecError> {
        if self.awaited_upload.is_some() {
            return Ok(Step::NeedsPayload);
        }
        if let Some(step) = self.run_ready_deferred() {
            return Ok(step);
        }
        if self.deferred.len() >= MAX_DEFERRED || self.is_in_flight_full() {
            self.flush_requests = true;
            return Ok(Step::NeedsOutcome);
        }
        let Some((plan, credit)) = self.plans.front_mut() else {
            return Ok(Step::Idle);
        };
        match plan {
            Plan::Ops(ops, contents) => {
                if let Some(contents) = contents.take() {
                    self.uploads.begin(contents);
                }
                match ops.pop_front() {
                    Some(op) => self.next_op(op),
                    None => {
                        let credit = *credit;
                        self.plans.pop_front();
                        self.uploads.finish()?;
                        Ok(Step::Ran(credit, None))
                    }
                }
            }
            Plan::Other(_) => {
                let Some((Plan::Other(work), credit)) = self.plans.pop_front() else {
                    unreachable!("the entry was just found");
                };
                self.planned_ops -= 1;
                let is_op = matches!(
                    work,
                    Work::Poison { .. } | Work::Alias { .. } | Work::Take { .. }
                );
                self.ops_seen += u64::from(is_op);
                let (kind, number) = (TaskKind::Other(work), self.ops_seen);
                Ok(self.run_or_defer(Task { kind, number }, credit))
            }
            // Deferred work is executed first.
            Plan::Close if self.deferred.is_empty() => Ok(Step::Closed),
            Plan::Close => Ok(Step::NeedsOutcome),
        }
    }

    fn next_op(&mut self, op: Box<OperationIr>) -> Result<Step, CodecError> {
        self.planned_ops -= 1;
        self.ops_seen += 1;
        let number = self.ops_seen;
        let is_all_reduce = |op: &OperationIr| {
            matches!(
                op,
                OperationIr::Distributed(DistributedOperationIr::AllReduce(_))
            )
        };
        let step = match &*op {
            OperationIr::Init(init) => {
                self.op_number = number;
                self.init(init.out.clone())?
            }
            _ if self.deferred.is_empty() && !is_all_reduce(&op) && !self.flow.must_wait(&op) => {
                self.op_number = number;
                self.run_op(op);
                Step::Ran(0, None)
            }
            _ => {
                let kind = TaskKind::Op(op);
                return Ok(self.run_or_defer(Task { kind, number }, 0));
            }
        };
        self.begin_ready_all_reduces();
        Ok(step)
    }

    /// Executes a deferred task or sync that no longer waits, if there is one.
    fn run_ready_deferred(&mut self) -> Option<Step> {
        if self.deferred.is_empty() {
            return None;
        }
        if let Some((number, task)) = self.deferred.next_ready() {
            if self.must_wait(&task) {
                let (after, flow) = (self.must_begin_after(&task), &self.flow);
                let is_pending = |id| flow.is_pending(id);
                self.deferred.put_back(number, task, after, is_pending);
                return Some(Step::Ran(0, None));
            }
            let reply = self.execute_task(task);
            self.deferred.done(number);
            return Some(Step::Ran(0, reply));
        }
        let in_flight = &self.in_flight;
        let is_over = |op_number| !collective_requests::has_in_flight_up_to(in_flight, op_number);
        let (op_number, request) = self.deferred.next_sync(is_over)?;
        self.op_number = op_number;
        Some(Step::Ran(0, Some(self.sync(request))))
    }

    /// Executes `task`, or defers it.
    fn run_or_defer(&mut self, task: Task, credit: usize) -> Step {
        if let TaskKind::Other(Work::Sync { request }) = task.kind {
            self.flush_requests = true;
            self.deferred.put_sync(task.number, request);
            return Step::Ran(credit, None);
        }
        if self.deferred.must_follow(&task) || self.must_wait(&task) {
            self.flush_requests = true;
            let (after, flow) = (self.must_begin_after(&task), &self.flow);
            self.deferred.put(task, after, |id| flow.is_pending(id));
            return Step::Ran(credit, None);
        }
        let reply = self.execute_task(task);
        Step::Ran(credit, reply)
    }

    fn execute_task(&mut self, task: Task) -> Option<Reply> {
        self.op_number = task.number;
        let reply = match task.kind {
            TaskKind::Op(op) => {
                self.run_op(op);
                None
            }
            TaskKind::Other(work) => self.execute_work(work),
        };
        self.begin_ready_all_reduces();
        reply
    }

    /// Returns whether `task` needs a pending value, or must wait until another
    /// all-reduce has begun.
    fn must_wait(&self, task: &Task) -> bool {
        match &task.kind {
            TaskKind::Op(op) => self.flow.must_wait(op) || self.must_begin_after(task).is_some(),
            TaskKind::Other(Work::Read { tensor, .. } | Work::Offer { tensor, .. }) => {
                self.flow.is_pending(tensor.id)
            }
            TaskKind::Other(Work::Alias { source, .. }) => self.flow.is_pending(*source),
            TaskKind::Other(_) => false,
        }
    }

    /// Returns the output of the all-reduce that must begin just before `task`, or `None`
    /// if `task` is not an all-reduce or may begin.
    fn must_begin_after(&self, task: &Task) -> Option<TensorId> {
        match &task.kind {
            TaskKind::Op(op) => {
                collective_requests::all_reduce(op).and_then(|op| self.preceding_unstarted(op))
            }
            TaskKind::Other(_) => None,
        }
    }
}
