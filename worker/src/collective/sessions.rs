//! The sessions of a cohort on this worker.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use bytes::Bytes;
use tensord_proto::ids::LeaseId;
use tracing::debug;

use super::{algorithm::Failure, transfer::Value};
use crate::locks::lock;

/// A session, as its cohort sees it.
pub(crate) trait Member: Send + Sync {
    /// Delivers the outcome of the all-reduce or transfer with this `ticket`. Returns at
    /// once.
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome);
}

/// The outcome of an all-reduce or a transfer.
pub(crate) type Outcome = Result<ReceivedValue, Failure>;

/// The result that a session waited for.
#[derive(Debug)]
pub(crate) enum ReceivedValue {
    /// The bytes of an all-reduce's result. The session knows its type.
    Reduced(Bytes),
    /// A value that was taken.
    Taken(Value),
}

impl ReceivedValue {
    /// Returns the bytes of the value.
    pub(crate) fn size_bytes(&self) -> usize {
        match self {
            Self::Reduced(bytes) => bytes.len(),
            Self::Taken(value) => value.bytes.len(),
        }
    }
}

/// The sessions of a cohort on this worker, by lease rank.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<u32, Weak<dyn Member>>>);

impl Sessions {
    /// Registers the session at `lease_rank`. Returns false if another session is
    /// registered there.
    pub(super) fn enter(&self, lease_rank: u32, session: Weak<dyn Member>) -> bool {
        let mut sessions = lock(&self.0);
        let is_taken = sessions
            .get(&lease_rank)
            .is_some_and(|session| session.strong_count() > 0);
        if !is_taken {
            sessions.insert(lease_rank, session);
        }
        !is_taken
    }

    /// Removes `session` at `lease_rank`. Returns false if it is not registered there.
    pub(super) fn leave(&self, lease_rank: u32, session: &Weak<dyn Member>) -> bool {
        let mut sessions = lock(&self.0);
        let registered = sessions.get(&lease_rank);
        let is_registered = registered.is_some_and(|it| Weak::ptr_eq(it, session));
        if is_registered {
            sessions.remove(&lease_rank);
        }
        is_registered
    }

    /// Delivers the outcome under `ticket` to the session at `lease_rank`, if it has not
    /// ended.
    pub(super) fn deliver(&self, lease: LeaseId, lease_rank: u32, ticket: u64, outcome: Outcome) {
        let session = lock(&self.0).get(&lease_rank).and_then(Weak::upgrade);
        match session {
            Some(session) => session.deliver(ticket, outcome),
            None => {
                debug!(%lease, lease_rank, "an outcome arrived for a session that has ended")
            }
        }
    }
}
