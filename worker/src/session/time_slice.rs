//! A session's turns on its device. A turn executes queued work and queues the replies.
//! It ends when the session must wait.

use std::sync::{Arc, atomic::Ordering};

use burn_ir::TensorIr;
use tensord_proto::{
    codec::CodecError,
    v1::{Closed, Error, ErrorCode, frame},
};
use tracing::{debug, info};

use super::{
    Session, Track,
    inbound::Item,
    lock,
    runner::{Runner, Step, Work},
    uploads::Payload,
};

/// Whether a session needs another turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TimeSliceEnd {
    /// It has more work.
    MoreWork,
    /// It has none, or must wait. The event that it waits for schedules it again.
    Parked,
}

impl Session {
    /// Runs until `keep_going()` is false, or the session has no work or must wait. The caller
    /// must own this session's slot in the run queue.
    pub(crate) fn run(self: &Arc<Self>, keep_going: &mut dyn FnMut() -> bool) -> TimeSliceEnd {
        let mut guard = lock(&self.runner);
        self.op_progress.begin_step();
        let turn = self.execute_queued(&mut guard, keep_going);
        self.op_progress.end_step();
        turn
    }

    fn execute_queued(
        self: &Arc<Self>,
        guard: &mut Option<Runner>,
        keep_going: &mut dyn FnMut() -> bool,
    ) -> TimeSliceEnd {
        let Some(runner) = guard.as_mut() else {
            lock(&self.work_queue).scheduled = false;
            return TimeSliceEnd::Parked;
        };
        let before = runner.ops_seen();
        // Whether replies are queued for which the writer has not been woken.
        let mut queued = false;
        self.feed(runner);
        let turn = loop {
            if self.ending.load(Ordering::Acquire) {
                break None;
            }
            if runner.replies_next() {
                if self.block_if_full() {
                    break Some(TimeSliceEnd::Parked);
                }
            } else if std::mem::take(&mut queued) {
                // Consecutive replies are sent together, and no reply waits for an op.
                self.wake_writer();
            }
            self.op_progress.begin_step();
            match self.step(runner) {
                Step::Ran(credit, reply) => {
                    // No reply may follow `Closed`.
                    let is_ending = self.ending.load(Ordering::Acquire);
                    if let Some(reply) = reply.filter(|_| !is_ending) {
                        self.reply(reply);
                        queued = true;
                    }
                    if credit > 0 {
                        self.consumed(Track::Ops, credit);
                    }
                }
                Step::NeedsPayload => break Some(TimeSliceEnd::Parked),
                Step::NeedsOutcome | Step::Idle => {
                    self.send_requests(runner, true);
                    if self.try_go_idle(runner) {
                        break Some(TimeSliceEnd::Parked);
                    }
                    self.feed(runner);
                }
                Step::Closed => {
                    self.end(Error::new(
                        ErrorCode::Unspecified,
                        "the client closed the session",
                    ));
                }
            }
            self.send_requests(runner, false);
            if !keep_going() {
                break Some(TimeSliceEnd::MoreWork);
            }
        };
        if queued {
            self.wake_writer();
        }
        self.send_requests(runner, true);
        let ops = runner.ops_seen() - before;
        self.device_context.ops.fetch_add(ops, Ordering::Relaxed);
        turn.unwrap_or_else(|| {
            let runner = guard.take();
            self.tear_down(runner);
            TimeSliceEnd::Parked
        })
    }

    /// Executes one step. If it needs a payload and one is queued, continues with that.
    fn step(self: &Arc<Self>, runner: &mut Runner) -> Step {
        let stepped = match runner.step() {
            Ok(Step::NeedsPayload) => match self.next_payload() {
                Some(payload) => runner.payload(payload),
                // The session ended meanwhile, which the caller checks next.
                None if self.ending.load(Ordering::Acquire) => return Step::Ran(0, None),
                None => return Step::NeedsPayload,
            },
            stepped => stepped,
        };
        stepped.unwrap_or_else(|e| {
            self.end_for_violation(&e);
            Step::Ran(0, None)
        })
    }

    /// Passes all arrivals to the runner, and queued work while it has room.
    fn feed(self: &Arc<Self>, runner: &mut Runner) {
        loop {
            let (item, outcomes) = {
                let mut work_queue = lock(&self.work_queue);
                let item = match runner.has_room() {
                    true => work_queue.items.pop_front(),
                    false => None,
                };
                (item, std::mem::take(&mut work_queue.outcomes))
            };
            for (ticket, outcome) in outcomes {
                runner.on_outcome(ticket, outcome);
            }
            match item {
                Some(Item::Work(work, credit)) => {
                    if let Err(e) = runner.plan(work, credit) {
                        return self.end_for_violation(&e);
                    }
                }
                Some(Item::Reads(first, tensors, credit)) => {
                    if let Err(e) = plan_reads(runner, first, tensors, credit) {
                        return self.end_for_violation(&e);
                    }
                }
                Some(Item::Close) => runner.plan_close(),
                None => return,
            }
        }
    }

    /// Returns whether there is nothing to pass to a waiting runner. If so, the session
    /// is marked as not scheduled, and the next event schedules it.
    fn try_go_idle(&self, runner: &Runner) -> bool {
        let mut work_queue = lock(&self.work_queue);
        let has_items = !work_queue.items.is_empty() && runner.has_room();
        if has_items || !work_queue.outcomes.is_empty() || work_queue.end.is_some() {
            return false;
        }
        work_queue.scheduled = false;
        true
    }

    /// Returns whether the session must pause until the client acknowledges replies or
    /// reads in flight complete. If so, the session is marked as blocked and not
    /// scheduled.
    fn block_if_full(&self) -> bool {
        let mut work_queue = lock(&self.work_queue);
        let is_full = |track| self.wire(track).channel.outbox().is_full();
        let is_full =
            is_full(Track::Ops) || is_full(Track::Bulk) || work_queue.reads_in_flight.is_full();
        let blocked = work_queue.end.is_none() && is_full;
        if blocked {
            debug!(session = %self.id, "the session waits until its client reads answers");
            (work_queue.blocked, work_queue.scheduled) = (true, false);
        }
        blocked
    }

    fn end_for_violation(self: &Arc<Self>, rule: &CodecError) {
        let rule = format!("session {}: {rule}", self.id);
        self.end(Error::new(ErrorCode::Protocol, rule));
    }

    /// Completes the end: notifies the cohort and the client, and drops all state.
    fn tear_down(&self, runner: Option<Runner>) {
        let error = {
            let mut work_queue = lock(&self.work_queue);
            work_queue.scheduled = false;
            work_queue.end.clone().unwrap_or_default()
        };
        self.op_progress.begin_step();
        self.cohort.leave(self.lease_rank, &error.message);
        self.close(runner);
        // Frees a payload that is partly received.
        lock(&self.payloads).clear();
        self.send_end(error);
        self.torn_down.store(true, Ordering::Release);
        self.device_context.signals.wake();
    }

    /// Drops the runner, and passes its kept uploads to the blob store for later
    /// sessions.
    fn close(&self, runner: Option<Runner>) {
        if let Some(runner) = runner {
            let (blobs, tenant) = (self.device_context.blobs.clone(), self.grant.tenant.clone());
            let kept = runner.into_kept();
            // Hashing takes a while, and the device may serve another session by then.
            self.device_context
                .runtime
                .spawn_blocking(move || blobs.keep(&tenant, kept));
        }
    }

    /// Queues `Closed` for the client, unless it was queued before, and lets the
    /// connections end.
    pub(super) fn send_end(&self, error: Error) {
        if self.end_announced.swap(true, Ordering::AcqRel) {
            return;
        }
        info!(session = %self.id, lease = %self.grant.lease, "session ended: {error}");
        let closed = frame::Body::Closed(Closed { error: Some(error) });
        self.wire(Track::Ops).queue(closed);
        // The client no longer waits for values. Dropping them frees the device memory
        // that they hold.
        self.wire(Track::Bulk).channel.abandon();
        for track in [Track::Bulk, Track::Ops] {
            self.wire(track).closing = true;
            self.writer_notify(track).notify_one();
        }
    }

    /// Returns the next payload. If there is none, the session is marked as starved, and
    /// scheduled when a payload arrives.
    fn next_payload(&self) -> Option<Payload> {
        let mut work_queue = lock(&self.work_queue);
        let payload = work_queue.payloads.pop_front();
        if payload.is_none() && work_queue.end.is_none() {
            (work_queue.awaits_payload, work_queue.scheduled) = (true, false);
        }
        if work_queue.payloads.is_empty() {
            let credit = std::mem::take(&mut work_queue.payload_credit);
            self.consumed(Track::Bulk, credit);
        }
        payload
    }
}

fn plan_reads(
    runner: &mut Runner,
    first: u64,
    tensors: Vec<TensorIr>,
    credit: usize,
) -> Result<(), CodecError> {
    let last = tensors.len().saturating_sub(1);
    for (at, tensor) in tensors.into_iter().enumerate() {
        let request = first.wrapping_add(at as u64);
        let credit = if at == last { credit } else { 0 };
        runner.plan(Work::Read { request, tensor }, credit)?;
    }
    Ok(())
}
