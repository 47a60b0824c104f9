//! What the pool sends, and what becomes of it.

use tensord_proto::{
    ids::{LeaseId, RequestId},
    text::{MAX_EXPLANATION_LINES, MESSAGE_CHARS, sanitize},
    v1::{Granted, PoolMessage, Queued, WaitExplained, pool_message},
};
use tokio::time::Instant;

use super::{
    Control, LeaseCall, RequestOutcome, explanations::Waiter, held_lease::HeldLease,
    lease_watch::LeaseWatch,
};
use crate::{error::StandingError, lease::LeaseEvent};

impl Control {
    /// Handles a message of the pool.
    pub(super) fn on_message(&mut self, message: PoolMessage) {
        match message.body {
            Some(pool_message::Body::Queued(queued)) => self.queued(queued),
            Some(pool_message::Body::WaitExplained(explained)) => self.wait_explained(&explained),
            Some(pool_message::Body::Granted(granted)) => self.granted(granted),
            Some(pool_message::Body::Renewed(renewed)) => {
                if let Some(held_lease) = self.held_lease(renewed.lease_id) {
                    held_lease.renewed(renewed.token);
                }
            }
            Some(pool_message::Body::Interrupted(interrupted)) => {
                if let Some(held_lease) = self.held_lease(interrupted.lease_id) {
                    held_lease.interrupted(&interrupted.error.unwrap_or_default());
                }
                self.lease_waits(interrupted.lease_id, true);
            }
            Some(pool_message::Body::Suspended(suspended)) => {
                if let Some(held_lease) = self.held_lease(suspended.lease_id) {
                    held_lease.suspended(&suspended);
                }
                // Otherwise it waits for nothing, until it is resumed.
                self.lease_waits(suspended.lease_id, !suspended.waits_for.is_empty());
            }
            Some(pool_message::Body::StandingChanged(changed)) => {
                if let Some(call) = self.standing_calls.remove(&RequestId(changed.request_id)) {
                    let refused = changed.error.map(StandingError::refused);
                    let _ = call.outcome.send(refused.map_or(Ok(()), Err));
                }
            }
            Some(pool_message::Body::Moved(moved)) => {
                if let Some(held_lease) = self.held_lease(moved.lease_id) {
                    held_lease.moved(&moved);
                }
                self.lease_waits(moved.lease_id, false);
            }
            Some(pool_message::Body::PlaceMark(place)) => {
                if let Some(held_lease) = self.held_lease(place.lease_id) {
                    held_lease.place_marks(Instant::now());
                }
            }
            Some(pool_message::Body::Refused(refused)) => {
                if let Some(pending) = self.remove_pending(RequestId(refused.request_id)) {
                    let error = refused.error.unwrap_or_default();
                    let refused = RequestOutcome::Refused(error);
                    // The request may have been dropped meanwhile.
                    let _ = pending.replies.outcome.send(refused);
                }
            }
            Some(pool_message::Body::Ended(ended)) => {
                if let Some(held_lease) = self.leases.remove(&LeaseId(ended.lease_id)) {
                    held_lease.ended(ended.error);
                }
                self.lease_waits(ended.lease_id, false);
            }
            Some(pool_message::Body::Hello(_) | pool_message::Body::Beat(_)) | None => {}
        }
    }

    /// Passes on where in the queue a request is, and why it waits.
    fn queued(&mut self, queued: Queued) {
        let id = RequestId(queued.request_id);
        if let Some(pending) = self.pending.get(&id) {
            let Queued {
                position, reason, ..
            } = queued;
            pending.replies.position.send_replace(position);
            // This task also sends explanations, so none comes before its position.
            let reason = sanitize(&reason, MESSAGE_CHARS).to_string();
            let event = LeaseEvent::Queued { position, reason };
            pending.replies.events.send(event);
            if pending.replies.events.has_callback() {
                self.explanations.changed(Waiter::Request(id));
            }
        }
    }

    /// Passes on why a request or a lease waits, if that is new.
    fn wait_explained(&mut self, explained: &WaitExplained) {
        let Some(waiter) = Waiter::of(explained) else {
            return;
        };
        let lines = explained.lines.iter().take(MAX_EXPLANATION_LINES);
        let lines = lines.map(|line| sanitize(line, MESSAGE_CHARS).to_string());
        let explanation = lines.collect::<Vec<_>>().join("\n");
        if !self.explanations.explained(waiter, &explanation) {
            return;
        }
        let event = LeaseEvent::Explained { explanation };
        match waiter {
            Waiter::Request(id) => {
                if let Some(pending) = self.pending.get(&id) {
                    pending.replies.events.send(event);
                }
            }
            Waiter::Lease(lease) => {
                if let Some(held_lease) = self.leases.get(&lease) {
                    held_lease.watch.send_event(event);
                }
            }
        }
    }

    /// Records whether a lease waits for devices, for a reason that may be new.
    fn lease_waits(&mut self, lease_id: u64, waits: bool) {
        let lease = LeaseId(lease_id);
        let held_lease = self.leases.get(&lease).filter(|_| waits);
        match held_lease.is_some_and(|it| it.watch.has_callback()) {
            true => self.explanations.changed(Waiter::Lease(lease)),
            false => self.explanations.remove(Waiter::Lease(lease)),
        }
    }

    /// Removes a request that waits no more, and returns it.
    pub(super) fn remove_pending(&mut self, id: RequestId) -> Option<LeaseCall> {
        self.explanations.remove(Waiter::Request(id));
        self.pending.remove(&id)
    }

    fn held_lease(&mut self, lease_id: u64) -> Option<&mut HeldLease> {
        self.leases.get_mut(&LeaseId(lease_id))
    }

    fn granted(&mut self, granted: Granted) {
        let lease = LeaseId(granted.lease_id);
        let token = granted.token.clone();
        let (unreachable, used) = (self.unreachable.clone(), self.used.clone());
        let watch = LeaseWatch::new(lease, unreachable, used);
        let pending = self.remove_pending(RequestId(granted.request_id));
        let outcome = RequestOutcome::Granted(granted, watch.clone());
        let taken = pending.is_some_and(|pending| pending.replies.outcome.send(outcome).is_ok());
        let mut held_lease = HeldLease::new(lease, token, watch);
        // A request that was cancelled meanwhile has its lease released.
        held_lease.released = !taken;
        self.leases.insert(lease, held_lease);
    }
}
