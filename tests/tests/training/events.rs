//! What happens to a lease, for tests that compare it.

use std::sync::mpsc::{Receiver, channel};

use tensord_client::{LeaseEvent, LeaseRequest};

/// Adds a callback to a request. Also returns what happens to its lease.
pub(crate) fn with_events(request: LeaseRequest) -> (LeaseRequest, Receiver<LeaseEvent>) {
    let (sender, events) = channel();
    // An error means that the test does not look any more.
    let callback = move |event| drop(sender.send(event));
    (request.on_event(callback), events)
}

/// Returns what happened to a lease that has ended, without explanations of why it waited.
pub(crate) fn changes(events: &Receiver<LeaseEvent>) -> Vec<LeaseEvent> {
    let is_change = |event: &LeaseEvent| !matches!(event, LeaseEvent::Explained { .. });
    events.iter().filter(is_change).collect()
}
