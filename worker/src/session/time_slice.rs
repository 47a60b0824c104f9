//! A session's turn on its device. A turn executes queued work and queues the replies.
//! It ends when its time is over, or when the session has no work or must wait.

use std::{sync::Arc, time::Instant};

use burn_ir::TensorIr;
use tensord_proto::{
    codec::CodecError,
    v1::{Error, ErrorCode, FaultKind},
};
use tracing::{debug, error};

use super::{
    Session, Track,
    inbound::Item,
    runner::{Reply, Runner, Step, Work},
    uploads::Payload,
    work_queue::Pause,
};
use crate::{
    executor::{TimeSliceEnd, TimeSliced},
    locks::lock,
    usage::Work as DeviceWork,
};

impl TimeSliced for Session {
    /// Runs until `keep_going()` is false, or the session has no work or must wait. The caller
    /// must own this session's slot in the run queue.
    fn run(self: &Arc<Self>, keep_going: &mut dyn FnMut() -> bool) -> TimeSliceEnd {
        let mut guard = lock(&self.runner);
        self.op_progress.begin_step();
        let end = guard
            .as_mut()
            .and_then(|runner| TimeSlice::new(self, runner).run(keep_going));
        if end.is_none() {
            let error = self.work_queue.finish();
            if let Some(runner) = guard.take() {
                self.tear_down(runner, error);
            }
        }
        self.op_progress.end_step();
        end.unwrap_or(TimeSliceEnd::Parked)
    }

    fn begin_work(&self, now: Instant) -> DeviceWork {
        self.device_context.meters.begin(now)
    }

    fn is_asynchronous(&self) -> bool {
        self.device_context.device.is_asynchronous()
    }

    fn fence(&self) {
        let _working = self.begin_work(Instant::now());
        let mut guard = lock(&self.runner);
        // Counts as a step, so that the op timeout ends a wait that does not return.
        self.op_progress.begin_step();
        if let Some(runner) = guard.as_mut() {
            runner.wait_for_device();
        }
        self.op_progress.end_step();
    }

    fn end_after_panic(self: &Arc<Self>) {
        // This is a bug in the worker, as panics of ops are caught closer to them. The
        // session still counts as scheduled; its next turn ends it.
        error!(session = %self.id, "the executor panicked; ending the session");
        let reason = "the worker failed while running this session";
        self.end(Error::new(ErrorCode::Internal, reason));
    }
}

/// A session that has its turn, and its runner.
pub(super) struct TimeSlice<'a> {
    session: &'a Arc<Session>,
    runner: &'a mut Runner,
    /// Whether replies are queued for which the writer has not been woken.
    has_queued_replies: bool,
}

impl<'a> TimeSlice<'a> {
    pub(super) fn new(session: &'a Arc<Session>, runner: &'a mut Runner) -> Self {
        Self {
            session,
            runner,
            has_queued_replies: false,
        }
    }

    /// Executes work until `keep_going()` is false, or the session has none or must wait.
    /// Returns `None` if the session ends and its state must be dropped.
    pub(super) fn run(mut self, keep_going: &mut dyn FnMut() -> bool) -> Option<TimeSliceEnd> {
        let before = self.runner.ops_seen();
        let end = self.execute_queued(keep_going);
        self.wake_writer();
        self.send_requests(true);
        let ops = self.runner.ops_seen() - before;
        self.session.device_context.meters.lease.add_ops(ops);
        end
    }

    fn execute_queued(&mut self, keep_going: &mut dyn FnMut() -> bool) -> Option<TimeSliceEnd> {
        self.feed();
        loop {
            if self.session.work_queue.is_ending() {
                return None;
            }
            if !self.runner.replies_next() {
                // Consecutive replies are sent together, and no reply waits for an op.
                self.wake_writer();
            } else {
                match self.block_if_full() {
                    Pause::No => {}
                    Pause::Blocked => return Some(TimeSliceEnd::Parked),
                    Pause::SharingDue => {
                        self.feed();
                        continue;
                    }
                }
            }
            self.session.op_progress.begin_step();
            match self.step() {
                Step::Ran(credit, reply) => {
                    // No reply may follow `Closed`.
                    let is_ending = self.session.work_queue.is_ending();
                    if let Some(reply) = reply.filter(|_| !is_ending) {
                        self.reply(reply);
                    }
                    if credit > 0 {
                        self.session.outbound.consumed(Track::Ops, credit);
                    }
                }
                Step::NeedsPayload => return Some(TimeSliceEnd::Parked),
                Step::NeedsOutcome | Step::Idle => {
                    self.send_requests(true);
                    let has_room = self.runner.has_room();
                    if self.session.work_queue.try_go_idle(has_room) {
                        return Some(TimeSliceEnd::Parked);
                    }
                    self.feed();
                }
                Step::Closed => {
                    self.session.end(Error::new(
                        ErrorCode::Unspecified,
                        "the client closed the session",
                    ));
                }
            }
            self.send_requests(false);
            if !keep_going() {
                return Some(TimeSliceEnd::MoreWork);
            }
        }
    }

    /// Executes one step. If it needs a payload and one is queued, continues with that.
    fn step(&mut self) -> Step {
        let stepped = match self.runner.step() {
            Ok(Step::NeedsPayload) => match self.next_payload() {
                Some(payload) => self.runner.payload(payload),
                // The session ended meanwhile, which the caller checks next.
                None if self.session.work_queue.is_ending() => return Step::Ran(0, None),
                None => return Step::NeedsPayload,
            },
            stepped => stepped,
        };
        stepped.unwrap_or_else(|e| {
            self.end_for_violation(&e);
            Step::Ran(0, None)
        })
    }

    fn next_payload(&self) -> Option<Payload> {
        let (payload, credit) = self.session.work_queue.take_payload();
        self.session.outbound.consumed(Track::Bulk, credit);
        payload
    }

    /// Passes all outcomes that have arrived to the runner, and queued work while the runner
    /// has room.
    fn feed(&mut self) {
        loop {
            let taken = self.session.work_queue.take(self.runner.has_room());
            for (ticket, outcome) in taken.outcomes {
                self.runner.on_outcome(ticket, outcome);
            }
            if taken.shares_uploads {
                self.session.share(self.runner.take_unshared());
            }
            let planned = match taken.item {
                Some(Item::Work(work, credit)) => self.runner.plan(work, credit),
                Some(Item::Reads(first, tensors, credit)) => {
                    self.plan_reads(first, tensors, credit)
                }
                Some(Item::Close) => {
                    self.runner.plan_close();
                    Ok(())
                }
                None => return,
            };
            if let Err(e) = planned {
                return self.end_for_violation(&e);
            }
        }
    }

    fn plan_reads(
        &mut self,
        first: u64,
        tensors: Vec<TensorIr>,
        credit: usize,
    ) -> Result<(), CodecError> {
        let last = tensors.len().saturating_sub(1);
        for (at, tensor) in tensors.into_iter().enumerate() {
            let request = first.wrapping_add(at as u64);
            let credit = if at == last { credit } else { 0 };
            self.runner.plan(Work::Read { request, tensor }, credit)?;
        }
        Ok(())
    }

    /// Blocks the session if it must pause until the client acknowledges replies, reads
    /// in flight complete, or requests are passed on to peers.
    fn block_if_full(&self) -> Pause {
        let Session {
            work_queue,
            outbound,
            peer_requests,
            ..
        } = &**self.session;
        let pause = work_queue.block_if_full(|| outbound.is_full() || peer_requests.is_full());
        if pause == Pause::Blocked {
            debug!(session = %self.session.id, "the session is paused until its client acknowledges replies, its device completes reads, or its requests are passed on to peers");
        }
        pause
    }

    fn reply(&mut self, reply: Reply) {
        let outbound = &self.session.outbound;
        match reply {
            Reply::Value { request, result } => outbound.queue_value(request, result),
            Reply::Synced { request, fault } if request.shares_uploads => {
                let take_unshared = || self.runner.take_unshared();
                self.session
                    .reply_when_shared((request.id, fault), take_unshared);
            }
            Reply::Synced { request, fault } => outbound.queue_synced(request.id, fault),
            Reply::Captured {
                mark,
                captured,
                cost,
            } => self.session.keep_snapshot(mark, captured, cost),
            Reply::InFlight {
                request,
                bytes,
                read,
                context,
            } => {
                self.session.work_queue.begin_read(bytes);
                let session = self.session.clone();
                let device_work = session.device_context.meters.begin(Instant::now());
                // The task ends when the device has read the value. The session may have
                // ended by then.
                self.session.device_context.runtime.spawn(async move {
                    let read = session.with_op_timeout(read).await;
                    drop(device_work);
                    let result = read.map_err(|e| context.fault(FaultKind::Backend, e.reason()));
                    if !session.has_ended() {
                        session.outbound.queue_value(request, result);
                        session.outbound.wake_writer();
                    }
                    session.schedule(session.work_queue.end_read(bytes));
                });
            }
        }
        self.has_queued_replies = true;
    }

    /// Wakes the writer for replies that are queued.
    fn wake_writer(&mut self) {
        if std::mem::take(&mut self.has_queued_replies) {
            self.session.outbound.wake_writer();
        }
    }

    /// Passes on the runner's requests to peers: all of them, or those that the runner
    /// does not hold back.
    fn send_requests(&mut self, all: bool) {
        let requests = self.runner.take_requests(all);
        if self.session.peer_requests.push(requests) {
            self.session.send_peer_requests();
        }
    }

    fn end_for_violation(&self, rule: &CodecError) {
        let rule = format!("session {}: {rule}", self.session.id);
        self.session.end(Error::new(ErrorCode::Protocol, rule));
    }
}
