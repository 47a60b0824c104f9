//! All sessions of this worker, and the checks of who may open one.

mod cohorts;
mod lease_tokens;
mod reports;

use std::{
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::{Duration, Instant},
};

use dashmap::{DashMap, mapref::entry::Entry};
use tensord_proto::{
    grant::number,
    ids::{LeaseId, SessionId, WorkerId},
    v1::{self, DeviceGrant, Error, ErrorCode, Join, LeaseClaims, Open, Opened},
    version,
};
use tensord_transport::{channel::Connection, tls::Fingerprint};
use tokio::{runtime::Handle, sync::Notify};
use tracing::info;

use self::{cohorts::Cohorts, lease_tokens::LeaseTokens};
use crate::{
    admission::{Admission, AdmissionError, Claim},
    blobs::BlobStore,
    collective::{self, AcceptedLink, CollectiveSettings},
    device_slot::DeviceSlot,
    devices::OpenedDevice,
    executor::Executor,
    locks::lock,
    memory::DeviceMemory,
    op_progress::Signals,
    restart::{DeviceUse, LostDevice, first_lost_device},
    session::{DeviceContext, Grant, Session, Track},
};

/// Most sessions of a lease on one device; programs have one, a gateway a few.
const MAX_SESSIONS_PER_DEVICE: usize = 64;

/// How long a session outlives its last connection. Longer than the lease expiry, so that a
/// client whose lease the scheduler still keeps finds its session.
const DETACHED_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Registry {
    pub(crate) worker_id: WorkerId,
    device_slots: Vec<DeviceSlot>,
    sessions: DashMap<SessionId, Arc<Session>>,
    cohorts: Cohorts,
    /// Which lease may use which device. Locked only briefly.
    admission: Mutex<Admission>,
    /// Notified when a device must be checked.
    wake: Arc<Notify>,
    /// Leases from which devices were released, not reported to the scheduler yet.
    released: Mutex<Vec<LeaseId>>,
    /// Notified when there is something to report to the scheduler.
    reports: Notify,
    lease_tokens: LeaseTokens,
}

/// A connection that was attached to a session.
pub(crate) struct Attached {
    pub(crate) session: Arc<Session>,
    pub(crate) track: Track,
    pub(crate) connection: Connection,
    pub(crate) opened: Opened,
}

impl Registry {
    pub(crate) fn new(
        worker_id: WorkerId,
        name: &str,
        devices: Vec<OpenedDevice>,
        cache_bytes: u64,
        collective_settings: CollectiveSettings,
        op_timeout: Duration,
        runtime: &Handle,
    ) -> std::io::Result<Self> {
        let worker: Arc<str> = name.into();
        let wake = Arc::new(Notify::new());
        // Half of the cache is for running sessions, divided among the devices, and half
        // for the uploads of sessions that ended.
        let blobs = BlobStore::new(cache_bytes / 2);
        let kept_bytes = cache_bytes / 2 / devices.len().max(1) as u64;
        let device_slot = |(index, opened): (usize, OpenedDevice)| {
            let executor = Executor::start(index)?;
            let device_context = DeviceContext {
                memory: DeviceMemory::new(opened.found.memory_bytes),
                queue: executor.queue().clone(),
                signals: Signals::new(worker.clone(), op_timeout, wake.clone()),
                ops: Arc::new(AtomicU64::new(0)),
                runtime: runtime.clone(),
                blobs: blobs.clone(),
                kept_bytes,
                device: opened.device,
            };
            Ok(DeviceSlot::new(index as u32, executor, device_context))
        };
        let admission = Mutex::new(Admission::new(devices.len()));
        let device_slots = devices.into_iter().enumerate().map(device_slot);
        Ok(Self {
            worker_id,
            admission,
            device_slots: device_slots.collect::<std::io::Result<_>>()?,
            sessions: DashMap::new(),
            cohorts: Cohorts::new(worker_id, collective_settings),
            wake,
            released: Mutex::default(),
            reports: Notify::new(),
            lease_tokens: LeaseTokens::new(worker_id),
        })
    }

    /// Sets the public key that verifies lease tokens.
    pub(crate) fn set_lease_key(&self, key: Vec<u8>) {
        self.lease_tokens.set_key(key);
    }

    /// Opens or resumes the session that `open` requests.
    pub(crate) fn attach(&self, open: &Open) -> Result<Attached, Error> {
        let ours = version::hello();
        let protocol =
            version::negotiate(&ours, open.hello.as_ref().unwrap_or(&v1::Hello::default()))?;
        let (claim, claims) = self.lease_tokens.authorise(open, self.device_slots.len())?;
        let id = SessionId(open.session_id);
        let (track, session) = match (open.bulk, open.resume) {
            (true, _) => (Track::Bulk, self.existing_session(id, claim)?),
            (false, true) => (Track::Ops, self.existing_session(id, claim)?),
            (false, false) => (Track::Ops, self.open(id, claim, claims, open)?),
        };
        let resumed = session.attach(track, open.received);
        let resumed = resumed.map_err(|e| Error::new(ErrorCode::Protocol, e.to_string()))?;
        let device_slot = &self.device_slots[open.device_index as usize];
        let encoded = device_slot.profile.encode();
        let opened = Opened {
            hello: Some(ours),
            protocol,
            received: resumed.received,
            credit_bytes: resumed.credit_bytes,
            settings: Some(v1::DeviceSettings { encoded }),
            kept_bytes: device_slot.device_context.kept_bytes,
        };
        Ok(Attached {
            session,
            track,
            connection: resumed.connection,
            opened,
        })
    }

    /// Accepts the connection of another worker of a lease that has sessions on this one.
    /// The other worker has proved in the handshake that it has the key of the certificate
    /// `peer_certificate`.
    pub(crate) fn join(
        &self,
        join: &Join,
        peer_certificate: Option<Fingerprint>,
    ) -> Result<AcceptedLink, Error> {
        let claims = self.lease_tokens.verify(&join.lease_token)?;
        let lease = LeaseId(claims.lease_id);
        let mut ours = self.lease_tokens.claims_here(&claims);
        let is_current = |claim| lock(&self.admission).check(claim).is_ok();
        if join.to_worker_id != self.worker_id.0 || !ours.any(is_current) {
            let reason =
                "the lease has no device on this worker, or the request is for another worker";
            return Err(Error::new(ErrorCode::Lease, reason));
        }
        let cohort = self.cohorts.get(lease, join.cohort).ok_or_else(|| {
            Error::new(
                ErrorCode::Session,
                "this worker has no session of this cohort",
            )
        })?;
        collective::accept(&cohort, join, peer_certificate)
    }

    /// Returns the existing session with this id, if `claim` entitles the connection to it.
    fn existing_session(&self, id: SessionId, claim: Claim) -> Result<Arc<Session>, Error> {
        lock(&self.admission).check(claim).map_err(lease_error)?;
        let known = self.sessions.get(&id).map(|session| session.clone());
        let known = known
            .filter(|session| session.grant.lease == claim.lease && !session.has_ended())
            .ok_or_else(|| {
                Error::new(
                    ErrorCode::Session,
                    format!("session {id} no longer exists on this worker"),
                )
            })?;
        check_session_device(&known, &claim)
    }

    fn open(
        &self,
        id: SessionId,
        claim: Claim,
        claims: LeaseClaims,
        open: &Open,
    ) -> Result<Arc<Session>, Error> {
        let expires_at_ms = claims.expires_at_ms;
        let admitted = lock(&self.admission).open(claim, expires_at_ms, Instant::now());
        if let Some(earlier) = admitted.map_err(lease_error)? {
            self.end_superseded(earlier, claim.device);
        }
        let session = self.open_admitted(id, claim, claims, open)?;
        // The lease may have ended meanwhile, and its sessions with it, except for this
        // one.
        let still = lock(&self.admission).check(claim).map_err(lease_error);
        match still {
            Ok(()) => Ok(session),
            Err(error) => {
                session.end(error.clone());
                Err(error)
            }
        }
    }

    fn open_admitted(
        &self,
        id: SessionId,
        claim: Claim,
        claims: LeaseClaims,
        open: &Open,
    ) -> Result<Arc<Session>, Error> {
        let (lease, index) = (claim.lease, claim.device);
        let beside = |s: &Session| s.grant.lease == lease && s.grant.device_index == index;
        let beside = self
            .sessions
            .iter()
            .filter(|session| beside(session))
            .count();
        if beside >= MAX_SESSIONS_PER_DEVICE {
            let reason =
                format!("the lease has {beside} sessions on this device, which is the limit");
            return Err(Error::new(ErrorCode::Limit, reason));
        }
        let session = match self.sessions.entry(id) {
            // The reply to the first attempt was lost.
            Entry::Occupied(entry) if entry.get().grant.lease == lease => {
                check_session_device(entry.get(), &claim)?
            }
            Entry::Occupied(_) => {
                return Err(Error::new(
                    ErrorCode::Session,
                    "another lease uses this session id",
                ));
            }
            Entry::Vacant(entry) => {
                let device_slot = &self.device_slots[index as usize];
                device_slot
                    .open(lease)
                    .map_err(|reason| Error::new(ErrorCode::Limit, reason))?;
                let grant = Grant {
                    lease,
                    tenant: claims.tenant.as_str().into(),
                    device_index: index,
                };
                let cohort = self.cohorts.get_or_create(lease, open, claims);
                let session = Session::new(
                    id,
                    grant,
                    open.seed,
                    device_slot.device_context.clone(),
                    cohort,
                )?;
                info!(session = %id, %lease, device = index, "session opened");
                entry.insert(session).clone()
            }
        };
        Ok(session)
    }

    /// Ends a lease's sessions, and invalidates every token up to these grants.
    /// [`unreleased_devices`](Self::unreleased_devices) returns the devices that are not released from the
    /// lease yet.
    pub(crate) fn end_lease(&self, lease: LeaseId, grants: &[DeviceGrant]) {
        let mut admission = lock(&self.admission);
        for ended in grants {
            admission.end(ended.device_index, number(ended.grant));
        }
        drop(admission);
        let error = || Error::new(ErrorCode::Lease, format!("lease {lease} ended"));
        let mut sessions = self.all_sessions();
        sessions.retain(|s| s.grant.lease == lease && !s.is_torn_down());
        sessions.iter().for_each(|s| s.end(error()));
        for (index, device_slot) in (0..).zip(&self.device_slots) {
            let is_here = |s: &Arc<Session>| s.grant.device_index == index;
            device_slot.end_lease(lease, sessions.iter().any(is_here));
        }
        self.wake.notify_one();
    }

    /// Waits until a device must be checked.
    pub(crate) async fn wait_for_check(&self) {
        self.wake.notified().await;
    }

    /// Checks all devices: ends sessions whose op exceeds its time limit, and releases devices
    /// from leases that have ended.
    pub(crate) fn check_devices(&self) {
        let mut sessions = self.all_sessions();
        sessions.retain(|session| !session.is_torn_down());
        let now = Instant::now();
        for (index, device_slot) in (0..).zip(&self.device_slots) {
            let here = sessions.iter().filter(|s| s.grant.device_index == index);
            let outcome = device_slot.check(now, &here.collect::<Vec<_>>());
            let is_reportable = outcome.has_changed || !outcome.released.is_empty();
            lock(&self.released).extend(outcome.released);
            if is_reportable {
                self.reports.notify_one();
            }
        }
    }

    /// Returns a device that is lost until this process is restarted, if no session on
    /// another device would end with the process.
    pub(crate) fn lost_device(&self, now: Instant) -> Option<LostDevice> {
        let first = self.device_slots.first()?;
        let stuck = self.device_slots.iter().map(DeviceSlot::stuck_since);
        let mut devices: Vec<_> = stuck
            .map(|stuck_since| DeviceUse {
                stuck_since,
                has_sessions: false,
            })
            .collect();
        // The usual case, which does not iterate over the sessions.
        if devices.iter().all(|device| device.stuck_since.is_none()) {
            return None;
        }
        for session in self.sessions.iter().filter(|session| !session.has_ended()) {
            devices[session.grant.device_index as usize].has_sessions = true;
        }
        let grace_period = first.device_context.signals.op_timeout;
        let index = first_lost_device(&devices, now, grace_period)?;
        let reason = self.device_slots[index]
            .out_of_service()
            .unwrap_or_default();
        let index = index as u32;
        Some(LostDevice { index, reason })
    }

    /// Records that a device was granted, and ends the sessions of the lease that had it
    /// before.
    pub(crate) fn granted(&self, granted: &DeviceGrant) {
        let (device, grant) = (granted.device_index, number(granted.grant));
        let earlier = lock(&self.admission).granted(device, grant);
        if let Some(earlier) = earlier {
            self.end_superseded(earlier, device);
        }
    }

    /// Ends the sessions of a lease on a device that was granted to another lease.
    fn end_superseded(&self, lease: LeaseId, device: u32) {
        let reason = format!("lease {lease} ended: its device was granted to another lease");
        let is_its = |s: &&Arc<Session>| s.grant.lease == lease && s.grant.device_index == device;
        self.all_sessions()
            .iter()
            .filter(is_its)
            .for_each(|session| session.end(Error::new(ErrorCode::Lease, reason.clone())));
    }

    /// Records the scheduler's current time, in milliseconds since 1970.
    pub(crate) fn set_time(&self, time_ms: u64) {
        lock(&self.admission).set_time(time_ms, Instant::now());
    }

    /// Records that the scheduler is unreachable.
    pub(crate) fn mark_unreachable(&self) {
        lock(&self.admission).mark_unreachable();
    }

    /// Ends every session.
    pub(crate) fn end_all(&self, error: &Error) {
        self.all_sessions()
            .iter()
            .for_each(|session| session.end(error.clone()));
    }

    /// Removes sessions that ended, ends sessions without a connection for
    /// [`DETACHED_TIMEOUT`], and fails collectives and transfers that have exceeded their
    /// deadline.
    pub(crate) fn sweep(&self) {
        self.cohorts.tick(Instant::now());
        for session in self.all_sessions() {
            let Some(since) = session.detached() else {
                continue;
            };
            if session.is_torn_down() {
                self.sessions.remove(&session.id);
            } else if since.elapsed() > DETACHED_TIMEOUT {
                let reason = format!("the session had no connection for {DETACHED_TIMEOUT:?}");
                session.end(Error::new(ErrorCode::Session, reason));
            }
        }
    }

    // Returns a copy, so that no shard stays locked while sessions are called.
    fn all_sessions(&self) -> Vec<Arc<Session>> {
        self.sessions
            .iter()
            .map(|session| session.clone())
            .collect()
    }

    /// Returns the number of sessions that have not ended.
    pub(crate) fn live_session_count(&self) -> usize {
        self.sessions
            .iter()
            .filter(|session| !session.has_ended())
            .count()
    }

    /// Queries the memory of all devices in the background, for later
    /// [`usage`](Self::usage).
    pub(crate) fn query_memory(&self) {
        self.device_slots.iter().for_each(DeviceSlot::query_memory);
    }
}

/// Returns a refusal as the error for the client.
fn lease_error(refusal: AdmissionError) -> Error {
    Error::new(ErrorCode::Lease, refusal.to_string())
}

/// Returns `session` if it is on the device that `claim` is for.
fn check_session_device(session: &Arc<Session>, claim: &Claim) -> Result<Arc<Session>, Error> {
    let (own, named) = (session.grant.device_index, claim.device);
    match own == named {
        true => Ok(session.clone()),
        false => Err(Error::new(
            ErrorCode::Session,
            format!("session {} is on device {own}, not {named}", session.id),
        )),
    }
}
