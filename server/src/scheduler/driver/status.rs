//! What the holder of a token sees of the pool.
//!
//! The driver copies the pool's state. The task that handles the call makes the reply from the copy, for the
//! caller's tenant. The larger the pool, the longer a copy takes, and any program may call again and again. So
//! [`StatusCalls`] bounds the part of the driver's time that copies take: a call that arrives during the pause
//! after a copy waits for the next copy.

use std::{collections::HashMap, mem, sync::Arc, time::Duration};

use tensord_proto::{
    ids::{ClientId, WorkerId},
    v1::{DeviceUsage, StatusReply},
};
use tensord_scheduler::{Snapshot, Timestamp};
use tokio::{sync::oneshot, time::Instant};

use super::Driver;
use crate::scheduler::{
    access::{AuthContext, Role},
    view,
};

/// The pause after a copy is this many times as long as the copy took, so that copies are a twentieth of the
/// driver's time at most.
const PAUSE_FACTOR: u32 = 19;

/// The longest pause. A copy may take long because the process was not running; in a pool whose copies really
/// take more than 53 ms, they are a larger part of the driver's time.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Passes a copy of the pool's state to the task of a status call.
pub(in crate::scheduler) type StatusSender = oneshot::Sender<Arc<PoolCopy>>;

/// A copy of the pool's state.
pub(in crate::scheduler) struct PoolCopy {
    snapshot: Snapshot,
    /// Time since the scheduler's start.
    now: Timestamp,
    /// What each worker last reported of its devices.
    usage: HashMap<WorkerId, Vec<DeviceUsage>>,
    /// The tenant of each client.
    tenants: HashMap<ClientId, Arc<str>>,
    has_several_tenants: bool,
}

impl PoolCopy {
    /// Returns the pool's status as visible to the holder of `auth`: a program sees only
    /// the leases of its own tenant, and why devices are out of service only if there is no other tenant.
    pub(in crate::scheduler) fn status(&self, auth: &AuthContext) -> StatusReply {
        let usage = |worker| self.usage.get(&worker).map(Vec::as_slice);
        let is_shown = |client: Option<ClientId>| match auth.role {
            Role::Admin => true,
            Role::Client | Role::Worker => client
                .and_then(|client| self.tenants.get(&client))
                .is_some_and(|tenant| *tenant == auth.tenant),
        };
        let shows_reasons = auth.role == Role::Admin || !self.has_several_tenants;
        view::status(&self.snapshot, self.now, usage, shows_reasons, is_shown)
    }
}

/// The calls that wait for a copy of the pool's state, and the time of the next one. Pure: the time is an
/// argument. There are at most as many as calls that connections may have open.
#[derive(Default)]
pub(super) struct StatusCalls {
    waiting: Vec<StatusSender>,
    /// The end of the pause after the last copy.
    next_at: Option<Instant>,
}

impl StatusCalls {
    /// Returns the time at which calls that wait are due, which may be in the past, or `None` if none waits.
    /// The first copy is due at `now`.
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| self.next_at.unwrap_or(now))
    }

    /// Removes and returns all calls if they are due at `now`, without those whose caller is gone.
    fn take_due(&mut self, now: Instant) -> Vec<StatusSender> {
        if self.next_deadline(now).is_none_or(|at| at > now) {
            return Vec::new();
        }
        let mut due = mem::take(&mut self.waiting);
        due.retain(|call| !call.is_closed());
        due
    }

    /// Records that a copy was made from `start` to `end`.
    fn copied(&mut self, start: Instant, end: Instant) {
        let pause = (end - start) * PAUSE_FACTOR;
        self.next_at = Some(end + pause.min(MAX_PAUSE));
    }
}

impl Driver {
    /// Replies to a status call, at once or after the pause together with others.
    pub(super) fn on_status_call(&mut self, call: StatusSender) {
        self.status_calls.waiting.push(call);
        self.reply_to_status_calls();
    }

    /// Replies to the status calls that wait, if they are due.
    pub(super) fn reply_to_status_calls(&mut self) {
        let start = Instant::now();
        let due = self.status_calls.take_due(start);
        if due.is_empty() {
            return;
        }
        let copy = Arc::new(self.pool_copy());
        self.status_calls.copied(start, Instant::now());
        for call in due {
            // An error means that the caller is gone.
            let _ = call.send(copy.clone());
        }
    }

    fn pool_copy(&self) -> PoolCopy {
        let usage = self.workers.iter();
        PoolCopy {
            snapshot: self.engine.snapshot(),
            now: self.now(),
            usage: usage.map(|(id, it)| (*id, it.usage().to_vec())).collect(),
            tenants: self.holders.tenants().collect(),
            has_several_tenants: self.has_several_tenants(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn call(calls: &mut StatusCalls) -> oneshot::Receiver<Arc<PoolCopy>> {
        let (sender, receiver) = oneshot::channel();
        calls.waiting.push(sender);
        receiver
    }

    #[test]
    fn calls_wait_while_copies_would_take_more_than_their_part() {
        let (mut calls, start) = (StatusCalls::default(), Instant::now());
        assert_eq!(calls.next_deadline(start), None);
        let _first = call(&mut calls);
        assert_eq!(calls.next_deadline(start), Some(start));
        assert_eq!(calls.take_due(start).len(), 1);
        calls.copied(start, start + 2 * MS);
        assert_eq!(calls.next_deadline(start + 2 * MS), None, "none waits");
        let _others = [call(&mut calls), call(&mut calls)];
        // Of a caller that is gone.
        drop(call(&mut calls));
        assert_eq!(calls.next_deadline(start + 3 * MS), Some(start + 40 * MS));
        assert!(calls.take_due(start + 39 * MS).is_empty());
        assert_eq!(calls.take_due(start + 40 * MS).len(), 2);
        // A copy that took long for another reason.
        calls.copied(start, start + 10_000 * MS);
        let _late = call(&mut calls);
        let at = start + 11_000 * MS;
        assert_eq!(calls.next_deadline(start), Some(at));
        assert_eq!(calls.take_due(at).len(), 1);
    }
}
