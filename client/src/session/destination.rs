//! Where a session is to be, as the pool reports it, and the report that it cannot get there.

use std::{
    collections::BTreeSet,
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{ids::LeaseId, v1};
use tensord_transport::{
    Dialer,
    tls::{Fingerprint, Trust},
};
use tokio::sync::Notify;

use super::SessionAccess;
use crate::lease::LeaseEvents;

/// What a session connects to.
#[derive(Clone)]
pub(crate) struct SessionTarget {
    pub(crate) dialer: Dialer,
    pub(crate) worker: String,
    pub(crate) address: String,
    pub(crate) trust: Trust,
    pub(crate) access: SessionAccess,
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
            dialer,
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

/// How long the session of a suspended lease waits for a pool that cannot be reached.
const MAX_ABSENCE_OF_POOL: Duration = Duration::from_secs(660);

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
    /// The lease is suspended, and the client has had no connection to the pool since this time. The
    /// pool must report within [`MAX_ABSENCE_OF_POOL`] that the lease is still suspended.
    SuspendedWithoutPool(Instant),
}

/// Where a session is to be, as the pool reports it.
#[derive(Clone)]
pub(crate) struct Destination {
    pub(crate) target: Arc<SessionTarget>,
    pub(crate) interruption: Option<Interruption>,
    /// How long the session waits for the pool's report of where it goes on.
    pub(crate) max_interruption: Duration,
    pub(crate) lease: LeaseId,
    /// Where the session reports that it cannot reach the worker.
    pub(crate) unreachable: Arc<UnreachableLeases>,
    /// Where the program learns that the session goes on.
    pub(crate) events: LeaseEvents,
}

impl Destination {
    /// Returns whether the pool will report where the session goes on.
    pub(super) fn is_interrupted(&self) -> bool {
        match self.interruption {
            Some(Interruption::Since(at)) => at.elapsed() < self.max_interruption,
            Some(Interruption::SuspendedWithoutPool(at)) => at.elapsed() < MAX_ABSENCE_OF_POOL,
            Some(Interruption::Suspended) => true,
            None => false,
        }
    }

    /// Returns whether the session must not try to reach a worker, as its lease is suspended.
    pub(super) fn must_wait(&self) -> bool {
        match self.interruption {
            Some(Interruption::Suspended) => true,
            Some(Interruption::SuspendedWithoutPool(_)) => self.is_interrupted(),
            Some(Interruption::Since(_)) | None => false,
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

/// The leases whose workers their sessions cannot reach, until the control task reports them to the
/// pool.
#[derive(Default)]
pub(crate) struct UnreachableLeases {
    leases: Mutex<BTreeSet<LeaseId>>,
    added: Notify,
}

impl UnreachableLeases {
    pub(crate) fn add(&self, lease: LeaseId) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.insert(lease);
        self.added.notify_one();
    }

    /// Waits until a lease was added since the last wait.
    pub(crate) async fn added(&self) {
        self.added.notified().await;
    }

    pub(crate) fn take(&self) -> BTreeSet<LeaseId> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut leases)
    }
}
