//! A lease that this program has, as the connection to the pool knows it.

use std::{mem, time::Duration};

use bytes::Bytes;
use tensord_proto::{
    ids::LeaseId,
    text::{MESSAGE_CHARS, sanitize},
    v1::{Error, ErrorCode, MarkPlaced, Moved, Restorable, Suspended, client_message},
};
use tokio::time::Instant;
use tracing::{info, warn};

use super::lease_watch::LeaseWatch;

/// How long requested marks are awaited: the scheduler waits no longer.
const MARK_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct HeldLease {
    lease: LeaseId,
    pub(super) token: Bytes,
    pub(super) watch: LeaseWatch,
    /// What the pool knows, on the present stream, of whether the lease could go on from snapshots.
    pub(super) reported_restorable: bool,
    /// If the pool waits for marks of the sessions: until when, at most.
    pub(super) marks_awaited_until: Option<Instant>,
    /// The lease was dropped, and is released as soon as there is a stream. Until then it is
    /// still claimed: a scheduler that restarted needs the claim before the release.
    pub(super) released: bool,
}

impl HeldLease {
    pub(super) fn new(lease: LeaseId, token: Bytes, watch: LeaseWatch) -> Self {
        Self {
            lease,
            token,
            watch,
            reported_restorable: false,
            marks_awaited_until: None,
            released: false,
        }
    }

    /// Returns the message whether the lease could go on from snapshots, if that has changed.
    pub(super) fn restorable_message(&mut self) -> Option<client_message::Body> {
        let restorable = self.watch.is_restorable();
        let has_changed = mem::replace(&mut self.reported_restorable, restorable) != restorable;
        let lease_id = self.lease.0;
        let message = || Restorable {
            lease_id,
            restorable,
        };
        has_changed.then(|| client_message::Body::Restorable(message()))
    }

    /// Has the sessions place marks, as the pool is about to move or suspend the lease.
    pub(super) fn place_marks(&mut self, now: Instant) {
        self.watch.request_marks();
        self.marks_awaited_until = Some(now + MARK_TIMEOUT);
    }

    /// Returns the message that the requested marks are committed, or cannot be, once that is so.
    pub(super) fn mark_message(&mut self, now: Instant) -> Option<client_message::Body> {
        let until = self.marks_awaited_until?;
        if self.watch.awaits_requested_marks() && now < until {
            return None;
        }
        self.marks_awaited_until = None;
        let lease_id = self.lease.0;
        Some(client_message::Body::MarkPlaced(MarkPlaced { lease_id }))
    }

    /// Stores the lease's new token. Open sessions do not need it.
    pub(super) fn renewed(&mut self, token: Bytes) {
        self.token = token;
    }

    /// Has the sessions wait for the pool, as their worker is gone.
    pub(super) fn interrupted(&self, error: &Error) {
        warn!("lease {} waits until it can go on: {error}", self.lease);
        self.watch.interrupt(&error.to_string());
    }

    /// Has the sessions wait until the lease is resumed.
    pub(super) fn suspended(&self, suspended: &Suspended) {
        let lease = self.lease;
        if suspended.idle {
            info!("lease {lease} is suspended, as it was idle and others wait for its devices");
            return self.watch.suspend_idle();
        }
        let workers = suspended.waits_for.iter().map(|name| {
            let name = sanitize(name, MESSAGE_CHARS).to_string();
            match name.contains(' ') {
                // No name: words for a worker that is not there.
                true => name,
                false => format!("worker {name}"),
            }
        });
        let workers: Vec<_> = workers.collect();
        let waits_for = match suspended.needs_all {
            true => workers.join(" and "),
            false => workers.join(" or "),
        };
        let cause = sanitize(&suspended.cause, MESSAGE_CHARS).to_string();
        match (waits_for.is_empty(), cause.is_empty()) {
            (true, _) => warn!("lease {lease} is suspended"),
            (false, true) => {
                info!("lease {lease} waits for devices of {waits_for}, or like ones elsewhere")
            }
            (false, false) => warn!(
                "lease {lease} waits for devices of {waits_for}, or like ones elsewhere: {cause}"
            ),
        }
        self.watch.suspend(&waits_for, &cause);
    }

    /// Has the sessions go on at another worker.
    pub(super) fn moved(&mut self, moved: &Moved) {
        self.token = moved.token.clone();
        let lease = self.lease;
        match self.watch.moved(moved) {
            Ok(()) => info!("lease {lease} goes on, at the same workers or at others"),
            Err(reason) => self.watch.end(&reason),
        }
    }

    /// Ends the sessions.
    pub(super) fn ended(&self, error: Option<Error>) {
        let no_reason = || Error::new(ErrorCode::Lease, "the pool gave no reason");
        let error = error.unwrap_or_else(no_reason);
        warn!("lease {} ended: {error}", self.lease);
        self.watch.end(&format!("the lease ended: {error}"));
    }
}
