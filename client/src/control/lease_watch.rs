//! Fails the sessions of a lease when the pool reports that the lease has ended.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::session::Session;

/// Whether the pool has ended a lease, and the sessions that fail when it does. Clones
/// share the lease.
#[derive(Clone, Default)]
pub(crate) struct LeaseWatch(Arc<Mutex<LeaseStatus>>);

#[derive(Default)]
struct LeaseStatus {
    ended: Option<String>,
    sessions: Vec<Weak<Session>>,
}

impl LeaseWatch {
    /// Registers `session`, which fails when the lease ends.
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.sessions.push(Arc::downgrade(session));
        if let Some(reason) = &watched.ended {
            session.fail(reason.clone());
        }
    }

    pub(super) fn end(&self, reason: &str) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.ended = Some(reason.to_owned());
        let sessions = watched.sessions.iter().filter_map(Weak::upgrade);
        sessions.for_each(|session| session.fail(reason));
    }
}
