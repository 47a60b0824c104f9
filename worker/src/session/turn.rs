//! A session's turns on its device: work comes from the queue, answers go to the
//! wire, and what must be waited for ends the turn.

use std::sync::{Arc, atomic::Ordering};

use tensord_proto::{
    codec::CodecError,
    v1::{Closed, Error, ErrorCode, frame},
};
use tracing::{debug, info};

use super::{
    Session, Track,
    intake::Item,
    lock,
    runner::{Runner, Step},
    uploads::Payload,
};

/// Whether a session that ran wants another turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has more work.
    Again,
    /// It has none, or must wait; it will put itself back.
    Over,
}

enum Next {
    Item(Item),
    Nothing,
    End(Error),
}

impl Session {
    /// Carries out work while `on` says so. Called by the executor alone.
    pub(crate) fn run(self: &Arc<Self>, on: &mut dyn FnMut() -> bool) -> Turn {
        let mut guard = lock(&self.runner);
        let Some(runner) = guard.as_mut() else {
            lock(&self.todo).scheduled = false;
            return Turn::Over;
        };
        let before = runner.op_number();
        let turn = loop {
            if !self.ending.load(Ordering::Acquire) {
                match self.step(runner) {
                    Step::More if on() => continue,
                    Step::More => break Turn::Again,
                    Step::Done => {}
                    Step::NeedsPayload => break Turn::Over,
                }
            }
            match self.next_item() {
                Next::Item(Item::Work(work, bytes)) => {
                    match runner.begin(work) {
                        Ok(reply) => reply.into_iter().for_each(|reply| self.reply(reply)),
                        Err(e) => self.broke(&e),
                    }
                    self.consumed(Track::Ops, bytes);
                }
                Next::Item(Item::Close) => {
                    self.end(Error::new(ErrorCode::Unspecified, "closed by the client"));
                }
                Next::Nothing => break Turn::Over,
                Next::End(error) => {
                    self.site
                        .ops
                        .fetch_add(runner.op_number() - before, Ordering::Relaxed);
                    self.close(guard.take());
                    self.said_all(error);
                    return Turn::Over;
                }
            }
            if !on() {
                break Turn::Again;
            }
        };
        self.site
            .ops
            .fetch_add(runner.op_number() - before, Ordering::Relaxed);
        turn
    }

    /// Runs one op, with the payload it needs if there is one.
    fn step(self: &Arc<Self>, runner: &mut Runner) -> Step {
        let stepped = match runner.step() {
            Ok(Step::NeedsPayload) => match self.next_payload() {
                Some(payload) => runner.payload(payload),
                None if self.ending.load(Ordering::Acquire) => return Step::Done,
                None => return Step::NeedsPayload,
            },
            stepped => stepped,
        };
        stepped.unwrap_or_else(|e| {
            self.broke(&e);
            Step::Done
        })
    }

    fn broke(self: &Arc<Self>, rule: &CodecError) {
        let rule = format!("session {}: {rule}", self.id);
        self.end(Error::new(ErrorCode::Protocol, rule));
    }

    /// Lets go of everything but what is kept for later sessions.
    fn close(&self, runner: Option<Runner>) {
        if let Some(runner) = runner {
            let (blobs, tenant) = (self.site.blobs.clone(), self.grant.tenant.clone());
            let kept = runner.into_kept();
            // Takes a while, and the device is somebody else's by then.
            self.site
                .runtime
                .spawn_blocking(move || blobs.keep(&tenant, kept));
        }
        self.site.device.clean_up();
    }

    fn next_item(&self) -> Next {
        let mut todo = lock(&self.todo);
        if let Some(error) = todo.end.clone() {
            todo.scheduled = false;
            return Next::End(error);
        }
        let is_full = |track| self.wire(track).duplex.outbox().is_full();
        if !todo.items.is_empty() && (is_full(Track::Ops) || is_full(Track::Bulk)) {
            debug!(session = %self.id, "waits for its client to take answers");
            (todo.blocked, todo.scheduled) = (true, false);
            return Next::Nothing;
        }
        match todo.items.pop_front() {
            Some(item) => Next::Item(item),
            None => {
                todo.scheduled = false;
                Next::Nothing
            }
        }
    }

    /// The session's state is gone; tell the client and let the connection end.
    fn said_all(&self, error: Error) {
        info!(session = %self.id, lease = %self.grant.lease, "session ended: {error}");
        let closed = frame::Body::Closed(Closed { error: Some(error) });
        self.wire(Track::Ops).duplex.push(closed);
        for track in [Track::Bulk, Track::Ops] {
            self.wire(track).closing = true;
            self.news_of(track).notify_one();
        }
    }

    /// The next payload. If there is none, the session is scheduled when it comes.
    fn next_payload(&self) -> Option<Payload> {
        let mut todo = lock(&self.todo);
        let payload = todo.payloads.pop_front();
        if payload.is_none() && todo.end.is_none() {
            (todo.starved, todo.scheduled) = (true, false);
        }
        if todo.payloads.is_empty() {
            let credit = std::mem::take(&mut todo.payload_credit);
            self.consumed(Track::Bulk, credit);
        }
        payload
    }
}
