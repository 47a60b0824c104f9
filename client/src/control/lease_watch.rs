//! What the pool reports about a lease: where it goes on, or that it has ended.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tensord_proto::{
    ids::LeaseId,
    text::{NAME_CHARS, sanitize},
    v1,
};
use tokio::sync::watch;
use tracing::warn;

use crate::{
    lease::{LeaseEvent, LeaseEvents, LeasedDevice},
    session::{
        Destination, Interruption, PoolContact, Session, SessionTarget, UnreachableWorkers,
        UsedLeases, max_interruption,
    },
};

/// Passes on to the sessions of a lease what the pool reports about the lease. Clones share the
/// lease.
#[derive(Clone)]
pub(crate) struct LeaseWatch {
    lease: LeaseId,
    unreachable: Arc<UnreachableWorkers>,
    used: Arc<UsedLeases>,
    status: Arc<Mutex<LeaseStatus>>,
}

#[derive(Default)]
struct LeaseStatus {
    ended: Option<String>,
    sessions: Vec<WatchedSession>,
    /// The pool's last report of where the lease goes on.
    moved: Option<v1::Moved>,
    events: LeaseEvents,
    /// How long the lease may wait for devices, if its request sets a limit.
    recover_within: Option<Duration>,
    pool_contact: PoolContact,
}

impl LeaseStatus {
    /// Returns the sessions that the program has not dropped.
    fn live_sessions(&self) -> impl Iterator<Item = Arc<Session>> {
        let sessions = self.sessions.iter();
        sessions.filter_map(|watched| watched.session.upgrade())
    }
}

struct WatchedSession {
    session: Weak<Session>,
    destination: watch::Sender<Destination>,
}

impl LeaseWatch {
    /// Creates the watch of a lease. Its sessions report the workers that they cannot reach to `unreachable`, and the
    /// lease to `used` when the program uses them although the lease is suspended, as it was idle.
    pub(crate) fn new(
        lease: LeaseId,
        unreachable: Arc<UnreachableWorkers>,
        used: Arc<UsedLeases>,
    ) -> Self {
        Self {
            lease,
            unreachable,
            used,
            status: Arc::default(),
        }
    }

    /// Registers `session`, which is at `target` and fails when the lease ends. The receiver has
    /// where the session is to be. Sessions are added in the order of the lease's devices.
    pub(crate) fn add(
        &self,
        session: &Arc<Session>,
        target: SessionTarget,
    ) -> watch::Receiver<Destination> {
        let mut status = self.lock();
        let (destination, receiver) = watch::channel(Destination {
            target: Arc::new(target),
            interruption: None,
            max_interruption: max_interruption(status.recover_within),
            pool_contact: status.pool_contact,
            lease: self.lease,
            unreachable: self.unreachable.clone(),
            used: self.used.clone(),
            events: status.events.clone(),
        });
        let watched = WatchedSession {
            session: Arc::downgrade(session),
            destination,
        };
        if let Some(moved) = &status.moved
            && let Err(reason) = watched.moved(moved, status.sessions.len())
        {
            session.fail(reason);
        }
        status.sessions.push(watched);
        if let Some(reason) = &status.ended {
            session.fail(reason.clone());
        }
        receiver
    }

    /// Sets where the program learns what happens to the lease, and how long the lease may wait for
    /// devices if its request sets a limit. Sessions must be added after that.
    pub(crate) fn prepare(&self, events: LeaseEvents, recover_within: Option<Duration>) {
        let mut status = self.lock();
        (status.events, status.recover_within) = (events, recover_within);
    }

    /// Returns whether the program learns what happens to the lease.
    pub(super) fn has_callback(&self) -> bool {
        self.lock().events.has_callback()
    }

    pub(super) fn send_event(&self, event: LeaseEvent) {
        self.lock().events.send(event);
    }

    /// Returns whether all sessions of the lease could go on from snapshots.
    pub(super) fn is_restorable(&self) -> bool {
        let status = self.lock();
        let mut sessions = status.live_sessions().peekable();
        sessions.peek().is_some() && sessions.all(|session| session.can_be_restored())
    }

    /// Has a mark placed in each session as soon as possible.
    pub(super) fn request_marks(&self) {
        let status = self.lock();
        status
            .live_sessions()
            .for_each(|session| session.request_mark());
    }

    /// Returns whether requested marks may yet be committed. Places those that could not be placed
    /// before.
    pub(super) fn awaits_requested_marks(&self) -> bool {
        let status = self.lock();
        let mut awaits = false;
        for session in status.live_sessions() {
            awaits |= session.awaits_requested_mark();
        }
        awaits
    }

    /// Returns the pool's last report of where the lease goes on, or `None` if the lease is where it
    /// was granted.
    pub(crate) fn last_move(&self) -> Option<v1::Moved> {
        self.lock().moved.clone()
    }

    fn lock(&self) -> MutexGuard<'_, LeaseStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end(&self, reason: &str) {
        let mut status = self.lock();
        status.ended = Some(reason.to_owned());
        status
            .live_sessions()
            .for_each(|session| session.fail(reason));
    }

    /// Records that the lease's worker was lost, for `reason`, and that the lease waits until the
    /// pool reports where it goes on. Sessions that cannot go on in another process fail.
    pub(super) fn interrupt(&self, reason: &str) {
        let reason = reason.to_owned();
        let now = Interruption::Since(Instant::now());
        self.wait(now, &reason.clone(), LeaseEvent::Waiting { reason });
    }

    /// Records that the lease is suspended, or that it was resumed and waits for devices of
    /// `waits_for`. `cause` is why it was suspended, or empty if an administrator or this program did
    /// it. Sessions that cannot go on in another process fail.
    pub(super) fn suspend(&self, waits_for: &str, cause: &str) {
        let cause = match cause.is_empty() {
            true => "the lease was suspended",
            false => cause,
        };
        let event = match waits_for.is_empty() {
            true => LeaseEvent::Suspended,
            false => LeaseEvent::Waiting {
                reason: format!(
                    "{cause}; the lease waits for devices of {waits_for}, or like ones elsewhere"
                ),
            },
        };
        let reason = format!("{cause}, and the lease had no snapshot to go on from");
        self.wait(Interruption::Suspended, &reason, event);
    }

    /// Records that the pool has suspended the lease because it was idle. Its sessions report when
    /// the program uses them. Sessions that cannot go on in another process fail.
    pub(super) fn suspend_idle(&self) {
        let reason = "the lease was suspended, as it was idle, and had no snapshot to go on from";
        self.wait(Interruption::Idle, reason, LeaseEvent::Idle);
    }

    /// Records that the connection to the pool was lost. A suspended lease then waits for a limited
    /// time, until the pool reports again that it is suspended.
    pub(super) fn pool_lost(&self) {
        let now = Instant::now();
        self.set_pool_contact(PoolContact::LostAt(now));
        for watched in &self.lock().sessions {
            watched.destination.send_if_modified(|destination| {
                let is_suspended = matches!(
                    destination.interruption,
                    Some(Interruption::Suspended | Interruption::Idle)
                );
                if is_suspended {
                    destination.interruption = Some(Interruption::SuspendedWithoutPool(now));
                }
                is_suspended
            });
        }
    }

    /// Records that there is a connection to the pool again.
    pub(super) fn pool_back(&self) {
        self.set_pool_contact(PoolContact::BackAt(Instant::now()));
    }

    fn set_pool_contact(&self, contact: PoolContact) {
        let mut status = self.lock();
        status.pool_contact = contact;
        for watched in &status.sessions {
            let set = |destination: &mut Destination| destination.pool_contact = contact;
            watched.destination.send_modify(set);
        }
    }

    /// Has the sessions wait, or fail for `reason` if they could not go on in another process.
    fn wait(&self, interruption: Interruption, reason: &str, event: LeaseEvent) {
        let status = self.lock();
        status.events.send(event);
        for watched in &status.sessions {
            match watched.session.upgrade() {
                Some(session) if !session.can_be_restored() => session.fail(reason),
                Some(_) => watched
                    .destination
                    .send_modify(|destination| destination.interruption = Some(interruption)),
                None => {}
            }
        }
    }

    /// Records where the lease goes on.
    ///
    /// # Errors
    ///
    /// When the message does not fit the lease, which is a fault of the pool.
    pub(super) fn moved(&self, moved: &v1::Moved) -> Result<(), String> {
        let mut status = self.lock();
        status.moved = Some(moved.clone());
        let workers = moved
            .devices
            .iter()
            .filter_map(|leased| leased.worker.as_ref());
        let name = |worker: &v1::WorkerEndpoint| sanitize(&worker.name, NAME_CHARS).to_string();
        let mut workers: Vec<_> = workers.map(name).collect();
        workers.dedup();
        let worker = workers.join(", ");
        status.events.send(LeaseEvent::Moving { worker });
        let mut first_differing = None;
        for (at, watched) in status.sessions.iter().enumerate() {
            let differing = watched.moved(moved, at)?;
            first_differing = first_differing.or(differing);
        }
        if let Some((old, new)) = first_differing {
            let described = |device: &LeasedDevice| {
                let name = sanitize(&device.name, NAME_CHARS).to_string();
                let worker = sanitize(&device.worker, NAME_CHARS);
                format!("{name} of worker {worker}")
            };
            let (lease, old, new) = (self.lease, described(&old), described(&new));
            warn!(
                "lease {lease} goes on at devices that may give other bits: {new}, and not {old}"
            );
        }
        Ok(())
    }
}

impl WatchedSession {
    /// Records where the session goes on, which is the lease's one with index `at`. Returns the device
    /// on which it was, and the new one, if these differ in what they compute.
    fn moved(
        &self,
        moved: &v1::Moved,
        at: usize,
    ) -> Result<Option<(LeasedDevice, LeasedDevice)>, String> {
        let leased = moved.devices.get(at);
        let leased = leased.ok_or("the pool moved the lease to fewer devices")?;
        let old = self.destination.borrow().target.clone();
        let (dialer, seed) = (old.dialer.clone(), old.access.seed);
        let target = SessionTarget::new(dialer, leased, moved.token.clone(), seed)?;
        let (old, new) = (old.device.clone(), target.device.clone());
        self.destination.send_modify(|destination| {
            (destination.target, destination.interruption) = (Arc::new(target), None);
        });
        Ok((old.fingerprint != new.fingerprint).then_some((old, new)))
    }
}
