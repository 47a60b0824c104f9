//! Where a session is to be, as the pool reports it, and the session's own reports to the pool.

use std::{
    collections::BTreeSet,
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    ids::{LeaseId, WorkerId},
    v1,
};
use tensord_transport::{
    Dialer,
    tls::{Fingerprint, Trust},
};
use tokio::sync::Notify;

use super::SessionAccess;
use crate::lease::{LeaseEvents, LeasedDevice};

/// What a session connects to.
#[derive(Clone)]
pub(crate) struct SessionTarget {
    pub(crate) dialer: Dialer,
    pub(crate) worker_id: WorkerId,
    pub(crate) worker: String,
    pub(crate) address: String,
    pub(crate) trust: Trust,
    pub(crate) access: SessionAccess,
    /// The device that the session is on.
    pub(crate) device: LeasedDevice,
}

impl SessionTarget {
    /// Returns the target for a leased device. `dialer` must dial for the lease, and `seed` is
    /// that of the session's random ops.
    ///
    /// # Errors
    ///
    /// When the pool sent no fingerprint of the worker's certificate.
    pub(crate) fn new(
        dialer: Dialer,
        leased: &v1::LeasedDevice,
        lease_token: Bytes,
        seed: u64,
    ) -> Result<Self, String> {
        let worker = leased.worker.clone().unwrap_or_default();
        let pin = <[u8; 32]>::try_from(&worker.certificate_sha256[..])
            .map_err(|_| "the pool sent no fingerprint of the worker's certificate")?;
        Ok(Self {
            device: LeasedDevice::from(leased),
            dialer,
            worker_id: WorkerId(worker.worker_id),
            worker: worker.name,
            address: worker.address,
            trust: Trust::Pin(Fingerprint(pin)),
            access: SessionAccess {
                lease_token,
                device_index: leased.index,
                seed,
            },
        })
    }
}

/// How long the pool lets a lease wait for devices, unless its request sets a limit.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(3600);

/// How much longer a session waits for the pool's report of where it goes on, or that the lease has
/// ended.
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);

/// The shortest and the longest limit that the pool accepts.
const RECOVERY_LIMITS: RangeInclusive<Duration> =
    Duration::from_secs(10)..=Duration::from_secs(24 * 3600);

/// How long a session that has no worker waits for a pool that cannot be reached: longer than it takes
/// to start a host again.
const MAX_ABSENCE_OF_POOL: Duration = Duration::from_secs(660);

/// A worker from which nothing was received for this long is given up. The time starts with
/// the last frame received, so the error comes within 10 s of the cause.
const WORKER_TIMEOUT: Duration = Duration::from_secs(8);

/// The same for a session that can go on in another process or at another worker: the pool has this
/// time to move the lease. The worker keeps a session without a connection as long.
const RESTORABLE_WORKER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a session whose worker has ended it, as its lease is over, waits for the pool's report of why.
/// The scheduler sends that at the same time as the command to the worker.
const END_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns how long a session waits for the pool's report of where it goes on, after a worker or a
/// process of its lease was lost.
pub(crate) fn max_interruption(recover_within: Option<Duration>) -> Duration {
    let limit = recover_within.unwrap_or(RECOVERY_TIMEOUT);
    limit.clamp(*RECOVERY_LIMITS.start(), *RECOVERY_LIMITS.end()) + REPORT_TIMEOUT
}

/// Why a session is to wait until the pool reports where it goes on, or that the lease has ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Interruption {
    /// The pool reported at this time that the worker was lost. It must report within
    /// `Destination::max_interruption` what follows.
    Since(Instant),
    /// The lease is suspended, however long that takes. The session must not try to reach a worker.
    Suspended,
    /// As [`Suspended`](Self::Suspended), until the program uses the session: the pool has suspended the
    /// lease because it was idle, and resumes it when the session reports that the program uses it.
    Idle,
    /// The lease is suspended, and the client has had no connection to the pool since this time. The
    /// pool must report within [`MAX_ABSENCE_OF_POOL`] that the lease is still suspended.
    SuspendedWithoutPool(Instant),
}

/// Whether the client has a connection to the pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum PoolContact {
    /// It has had one since the lease was granted.
    #[default]
    Steady,
    /// It has had none since this time.
    LostAt(Instant),
    /// It has had one again since this time.
    BackAt(Instant),
}

/// Where a session is to be, as the pool reports it.
#[derive(Clone)]
pub(crate) struct Destination {
    pub(crate) target: Arc<SessionTarget>,
    pub(crate) interruption: Option<Interruption>,
    /// How long the session waits for the pool's report of where it goes on.
    pub(crate) max_interruption: Duration,
    pub(crate) pool_contact: PoolContact,
    pub(crate) lease: LeaseId,
    /// Where the session reports that it cannot reach the worker.
    pub(crate) unreachable: Arc<UnreachableWorkers>,
    /// Where the session reports that the program uses it, if the lease is suspended because it was
    /// idle.
    pub(crate) used: Arc<UsedLeases>,
    /// Where the program learns that the session goes on.
    pub(crate) events: LeaseEvents,
}

impl Destination {
    /// Returns whether the pool will report where the session goes on.
    pub(super) fn is_interrupted(&self) -> bool {
        match self.interruption {
            Some(Interruption::Since(at)) => at.elapsed() < self.max_interruption,
            Some(Interruption::SuspendedWithoutPool(at)) => at.elapsed() < MAX_ABSENCE_OF_POOL,
            Some(Interruption::Suspended | Interruption::Idle) => true,
            None => false,
        }
    }

    /// Returns whether the lease is suspended until the program uses it.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.interruption, Some(Interruption::Idle))
    }

    /// Returns whether the session must not try to reach a worker, as its lease is suspended.
    pub(super) fn must_wait(&self) -> bool {
        match self.interruption {
            Some(Interruption::Suspended | Interruption::Idle) => true,
            Some(Interruption::SuspendedWithoutPool(_)) => self.is_interrupted(),
            Some(Interruption::Since(_)) | None => false,
        }
    }

    /// Returns when the session gives its worker up, if it received something last at `last_received`;
    /// `None` if it waits for the pool. Only the pool can report where a session goes on that can be
    /// restored, so such a session gives a pool that is away time to come back.
    pub(super) fn gives_up_at(
        &self,
        now: Instant,
        last_received: Instant,
        can_be_restored: bool,
    ) -> Option<Instant> {
        if self.is_interrupted() {
            return None;
        }
        if !can_be_restored {
            return Some(last_received + WORKER_TIMEOUT);
        }
        let since = match self.pool_contact {
            PoolContact::LostAt(at) if now < at + MAX_ABSENCE_OF_POOL => return None,
            PoolContact::BackAt(at) => at.max(last_received),
            PoolContact::Steady | PoolContact::LostAt(_) => last_received,
        };
        Some(since + RESTORABLE_WORKER_TIMEOUT)
    }

    /// Returns until when a session waits for the pool to report why the lease is over, if its worker
    /// has ended the session for that reason `now`; `None` if there is no connection to the pool.
    pub(super) fn awaits_end_until(&self, now: Instant) -> Option<Instant> {
        match self.pool_contact {
            PoolContact::Steady | PoolContact::BackAt(_) => Some(now + END_REPORT_TIMEOUT),
            PoolContact::LostAt(_) => None,
        }
    }

    /// Returns until when the session must wait at most; `None` if there is no limit.
    pub(super) fn waits_until(&self) -> Option<Instant> {
        match self.interruption {
            Some(Interruption::SuspendedWithoutPool(at)) => Some(at + MAX_ABSENCE_OF_POOL),
            _ => None,
        }
    }
}

/// What sessions report, until the control task takes it and passes it on to the pool.
pub(crate) struct Reports<T> {
    reports: Mutex<BTreeSet<T>>,
    added: Notify,
}

impl<T> Default for Reports<T> {
    fn default() -> Self {
        Self {
            reports: Mutex::default(),
            added: Notify::new(),
        }
    }
}

impl<T: Ord> Reports<T> {
    pub(crate) fn add(&self, report: T) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.insert(report);
        self.added.notify_one();
    }

    /// Waits until something was added since the last wait.
    pub(crate) async fn added(&self) {
        self.added.notified().await;
    }

    pub(crate) fn take(&self) -> BTreeSet<T> {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut reports)
    }
}

/// The workers that sessions cannot reach, each with the lease.
pub(crate) type UnreachableWorkers = Reports<(LeaseId, WorkerId)>;

/// Leases that the program uses although they are suspended, as they were idle.
pub(crate) type UsedLeases = Reports<LeaseId>;

#[cfg(test)]
mod tests {
    use super::*;

    fn destination(pool_contact: PoolContact) -> Destination {
        let leased = v1::LeasedDevice {
            worker: Some(v1::WorkerEndpoint {
                certificate_sha256: vec![0; 32].into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let dialer = Dialer::new(tensord_transport::TransportChoice::Auto);
        let target = SessionTarget::new(dialer, &leased, Bytes::new(), 0).unwrap();
        Destination {
            target: Arc::new(target),
            interruption: None,
            max_interruption: max_interruption(None),
            pool_contact,
            lease: LeaseId(1),
            unreachable: Arc::default(),
            used: Arc::default(),
            events: LeaseEvents::default(),
        }
    }

    #[test]
    fn session_that_can_be_restored_waits_for_the_pool() {
        let received = Instant::now();
        let after = |seconds: u64| received + Duration::from_secs(seconds);
        let gives_up_at = |contact, now| destination(contact).gives_up_at(now, received, true);
        let steady = gives_up_at(PoolContact::Steady, after(1));
        assert_eq!(steady, Some(after(60)));
        let lost = PoolContact::LostAt(after(2));
        assert_eq!(gives_up_at(lost, after(661)), None);
        assert_eq!(gives_up_at(lost, after(662)), Some(after(60)));
        let back = PoolContact::BackAt(after(300));
        assert_eq!(gives_up_at(back, after(301)), Some(after(360)));
    }

    #[test]
    fn only_a_pool_that_can_be_reached_is_awaited_for_the_end_of_a_lease() {
        let now = Instant::now();
        let until = |contact| destination(contact).awaits_end_until(now);
        let at_most = Some(now + Duration::from_secs(1));
        assert_eq!(until(PoolContact::Steady), at_most);
        assert_eq!(until(PoolContact::BackAt(now)), at_most);
        assert_eq!(until(PoolContact::LostAt(now)), None);
    }

    #[test]
    fn other_session_does_not_wait_for_the_pool() {
        let received = Instant::now();
        let lost = destination(PoolContact::LostAt(received));
        let until = lost.gives_up_at(received, received, false);
        assert_eq!(until, Some(received + WORKER_TIMEOUT));
    }
}
