//! All sessions of this worker, and who may open one.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use dashmap::{DashMap, mapref::entry::Entry};
use tensord_proto::{
    codec::DeviceProfile,
    grant::{GrantNumber, number},
    ids::{LeaseId, SessionId, WorkerId},
    v1::{
        self, DeviceGrant, DeviceUsage, Error, ErrorCode, HeldDevice, Join, LeaseClaims, Open,
        Opened,
    },
    version,
};
use tensord_transport::token;
use tokio::runtime::Handle;
use tracing::info;

use crate::{
    admission::{Admission, Claim, Refusal},
    backend::Device,
    blobs::BlobStore,
    collective::{self, Accepted, Cohort, Roster, Settings},
    devices::OpenedDevice,
    executor::Executor,
    locks::lock,
    memory::DeviceMemory,
    session::{Grant, Session, Site, Track},
};

/// Sessions a lease may have on one device: programs hold one, a gateway a few.
const MAX_SESSIONS_PER_DEVICE: usize = 64;

/// How long a session outlives its last connection. Longer than the lease
/// expiry, so that a client the scheduler still believes in finds it.
const DETACHED_LIFE: Duration = Duration::from_secs(60);

/// One device with its executor.
struct Unit {
    /// Held for its thread, which ends with it.
    _executor: Executor,
    site: Site,
    profile: DeviceProfile,
    reserved: Arc<Reserved>,
    /// The lease whose ops are counted.
    counted: Mutex<Option<LeaseId>>,
}

impl Unit {
    /// A session of `lease` begins: what was counted for another is forgotten, as whoever
    /// has the device now is not to learn of it.
    fn count_for(&self, lease: LeaseId) {
        if lock(&self.counted).replace(lease) != Some(lease) {
            self.site.ops.store(0, Ordering::Relaxed);
        }
    }
}

/// What a device's backend holds of its memory, as it was last seen: to look may take
/// as long as what the device is at.
#[derive(Default)]
struct Reserved {
    bytes: Mutex<Option<u64>>,
    looking: AtomicBool,
}

impl Reserved {
    fn get(&self) -> Option<u64> {
        *lock(&self.bytes)
    }

    /// Looks again, unless somebody does already. May block.
    fn look(&self, device: &dyn Device) {
        if !self.looking.swap(true, Ordering::AcqRel) {
            let bytes = device.reserved_bytes();
            *lock(&self.bytes) = bytes;
            self.looking.store(false, Ordering::Release);
        }
    }
}

pub(crate) struct Registry {
    pub(crate) worker_id: WorkerId,
    units: Vec<Unit>,
    sessions: DashMap<SessionId, Arc<Session>>,
    /// Held by their sessions.
    cohorts: DashMap<(LeaseId, u64), Weak<Cohort>>,
    together: Settings,
    /// Which lease may use which device. Held for moments.
    admission: Mutex<Admission>,
    /// Public key that lease tokens are checked with, once registered.
    lease_key: Mutex<Option<Vec<u8>>>,
}

/// A connection's hold on a session.
pub(crate) struct Attached {
    pub(crate) session: Arc<Session>,
    pub(crate) track: Track,
    pub(crate) connection: u64,
    pub(crate) opened: Opened,
}

impl Registry {
    pub(crate) fn new(
        worker_id: WorkerId,
        name: &str,
        devices: Vec<OpenedDevice>,
        cache_bytes: u64,
        together: Settings,
        runtime: &Handle,
    ) -> std::io::Result<Self> {
        let worker: Arc<str> = name.into();
        // Half for sessions that run, as many as there are devices, and half for
        // what is left of those that ended.
        let blobs = BlobStore::new(cache_bytes / 2);
        let kept_bytes = cache_bytes / 2 / devices.len().max(1) as u64;
        let unit = |(index, opened): (usize, OpenedDevice)| {
            let executor = Executor::start(index)?;
            let site = Site {
                memory: DeviceMemory::new(opened.found.memory_bytes),
                queue: executor.queue().clone(),
                worker: worker.clone(),
                ops: Arc::new(AtomicU64::new(0)),
                runtime: runtime.clone(),
                blobs: blobs.clone(),
                kept_bytes,
                device: opened.device,
            };
            Ok(Unit {
                _executor: executor,
                profile: site.device.profile(),
                site,
                reserved: Arc::default(),
                counted: Mutex::default(),
            })
        };
        let admission = Mutex::new(Admission::new(devices.len()));
        let units = devices.into_iter().enumerate().map(unit);
        Ok(Self {
            worker_id,
            admission,
            units: units.collect::<std::io::Result<_>>()?,
            sessions: DashMap::new(),
            cohorts: DashMap::new(),
            together,
            lease_key: Mutex::new(None),
        })
    }

    pub(crate) fn set_lease_key(&self, key: Vec<u8>) {
        *lock(&self.lease_key) = Some(key);
    }

    /// Opens or resumes the session that `open` asks for.
    pub(crate) fn attach(&self, open: &Open) -> Result<Attached, Error> {
        let ours = version::hello();
        let protocol =
            version::negotiate(&ours, open.hello.as_ref().unwrap_or(&v1::Hello::default()))?;
        let (claim, claims) = self.authorise(open)?;
        let id = SessionId(open.session_id);
        let (track, session) = match (open.bulk, open.resume) {
            (true, _) => (Track::Bulk, self.known(id, claim)?),
            (false, true) => (Track::Ops, self.known(id, claim)?),
            (false, false) => (Track::Ops, self.open(id, claim, claims, open)?),
        };
        let resumed = session.attach(track, open.received);
        let (connection, received, credit_bytes) =
            resumed.map_err(|e| Error::new(ErrorCode::Protocol, e.to_string()))?;
        let unit = &self.units[open.device_index as usize];
        let encoded = unit.profile.encode();
        let opened = Opened {
            hello: Some(ours),
            protocol,
            received,
            credit_bytes,
            settings: Some(v1::DeviceSettings { encoded }),
            kept_bytes: unit.site.kept_bytes,
        };
        Ok(Attached {
            session,
            track,
            connection,
            opened,
        })
    }

    /// Takes in another worker of a lease, to which this one has sessions.
    pub(crate) fn join(&self, join: &Join) -> Result<Accepted, Error> {
        let claims = self.verify(&join.lease_token)?;
        let (lease, ours) = (LeaseId(claims.lease_id), self.worker_id.0);
        let ours = claims.shares.iter().filter(|s| s.worker_id == ours);
        let mut ours = ours.map(|share| claim(lease, share));
        let is_current = |claim| lock(&self.admission).check(claim).is_ok();
        if join.to_worker_id != self.worker_id.0 || !ours.any(is_current) {
            let reason = "the lease has no device here, or no more, or another worker was meant";
            return Err(Error::new(ErrorCode::Lease, reason));
        }
        let key = (lease, join.cohort);
        let cohort = self.cohorts.get(&key).and_then(|cohort| cohort.upgrade());
        let cohort = cohort
            .ok_or_else(|| Error::new(ErrorCode::Session, "no such sessions are on this worker"))?;
        collective::accept(&cohort, join)
    }

    /// The claims of a token that the scheduler signed.
    fn verify(&self, lease_token: &[u8]) -> Result<LeaseClaims, Error> {
        let key = lock(&self.lease_key).clone();
        let key = key.ok_or_else(|| {
            Error::new(
                ErrorCode::Lease,
                "this worker has not joined its scheduler yet; try again",
            )
        })?;
        token::verify(lease_token, &key).map_err(|e| Error::new(ErrorCode::Token, e.to_string()))
    }

    /// What the token claims of the device that is asked for.
    fn authorise(&self, open: &Open) -> Result<(Claim, LeaseClaims), Error> {
        let claims = self.verify(&open.lease_token)?;
        let ours = |share: &v1::LeaseShare| {
            share.worker_id == self.worker_id.0 && share.device_index == open.device_index
        };
        let share = claims.shares.iter().find(|share| ours(share));
        match share.filter(|share| (share.device_index as usize) < self.units.len()) {
            Some(share) => Ok((claim(LeaseId(claims.lease_id), share), claims)),
            None => {
                let reason = format!("the lease does not cover device {} here", open.device_index);
                Err(Error::new(ErrorCode::Lease, reason))
            }
        }
    }

    /// The session that a connection with `claim` says it is of.
    fn known(&self, id: SessionId, claim: Claim) -> Result<Arc<Session>, Error> {
        lock(&self.admission).check(claim).map_err(refused)?;
        let known = self.sessions.get(&id).map(|session| session.clone());
        let known = known
            .filter(|session| session.grant.lease == claim.lease && !session.has_ended())
            .ok_or_else(|| {
                Error::new(
                    ErrorCode::Session,
                    format!("session {id} is not on this worker any more"),
                )
            })?;
        on_its_device(&known, &claim)
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
        if let Some(earlier) = admitted.map_err(refused)? {
            self.take_from(earlier, claim.device);
        }
        let session = self.open_admitted(id, claim, claims, open)?;
        // The lease may have ended since, and its sessions with it but for this one.
        let still = lock(&self.admission).check(claim).map_err(refused);
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
            let reason = format!("the lease has {beside} sessions on this device, the limit");
            return Err(Error::new(ErrorCode::Limit, reason));
        }
        match self.sessions.entry(id) {
            Entry::Occupied(entry) if entry.get().grant.lease == lease => {
                // The answer to the first try was lost on the way.
                on_its_device(entry.get(), &claim)
            }
            Entry::Occupied(_) => Err(Error::new(ErrorCode::Session, "the session id is taken")),
            Entry::Vacant(entry) => {
                let site = self.units[index as usize].site.clone();
                let grant = Grant {
                    lease,
                    tenant: claims.tenant.as_str().into(),
                    device_index: index,
                };
                let cohort = self.cohort(lease, open, claims);
                let session = Session::new(id, grant, open.seed, site, cohort)?;
                self.units[index as usize].count_for(lease);
                info!(session = %id, %lease, device = index, "session opened");
                Ok(entry.insert(session).clone())
            }
        }
    }

    /// The cohort that a session of `lease` is opened for.
    fn cohort(&self, lease: LeaseId, open: &Open, claims: LeaseClaims) -> Arc<Cohort> {
        let mut known = self.cohorts.entry((lease, open.cohort)).or_default();
        if let Some(cohort) = known.upgrade() {
            return cohort;
        }
        let roster = Roster::new(claims.shares, self.worker_id);
        // Not a part of the frame it came in, which it would keep alive.
        let token = Bytes::copy_from_slice(&open.lease_token);
        let cohort = Cohort::new(open.cohort, lease, roster, token, self.together.clone());
        *known = Arc::downgrade(&cohort);
        cohort
    }

    /// Ends a lease's sessions, and makes every token up to these grants worthless.
    pub(crate) fn end_lease(&self, lease: LeaseId, grants: &[DeviceGrant]) {
        let mut admission = lock(&self.admission);
        for ended in grants {
            admission.end(ended.device_index, number(ended.grant));
        }
        drop(admission);
        let error = || Error::new(ErrorCode::Lease, format!("lease {lease} ended"));
        self.all()
            .iter()
            .filter(|s| s.grant.lease == lease)
            .for_each(|s| s.end(error()));
    }

    /// A device was granted: whoever had it before has it no more.
    pub(crate) fn granted(&self, granted: &DeviceGrant) {
        let (device, grant) = (granted.device_index, number(granted.grant));
        let earlier = lock(&self.admission).granted(device, grant);
        if let Some(earlier) = earlier {
            self.take_from(earlier, device);
        }
    }

    /// Ends the sessions of a lease on a device that went on to another.
    fn take_from(&self, lease: LeaseId, device: u32) {
        let reason = format!("lease {lease} ended: its device went on to another lease");
        let is_its = |s: &&Arc<Session>| s.grant.lease == lease && s.grant.device_index == device;
        self.all()
            .iter()
            .filter(is_its)
            .for_each(|session| session.end(Error::new(ErrorCode::Lease, reason.clone())));
    }

    /// It is `time_ms` at the scheduler.
    pub(crate) fn set_time(&self, time_ms: u64) {
        lock(&self.admission).set_time(time_ms, Instant::now());
    }

    /// The scheduler is out of reach.
    pub(crate) fn cut_off(&self) {
        lock(&self.admission).cut_off();
    }

    /// Ends every session.
    pub(crate) fn end_all(&self, error: &Error) {
        self.all()
            .iter()
            .for_each(|session| session.end(error.clone()));
    }

    /// Forgets sessions that ended, and ends those whose client is gone, and what
    /// sessions have waited for from each other for too long.
    pub(crate) fn sweep(&self) {
        self.cohorts.retain(|_, cohort| cohort.strong_count() > 0);
        let cohorts: Vec<_> = self.cohorts.iter().filter_map(|c| c.upgrade()).collect();
        let now = Instant::now();
        cohorts.iter().for_each(|cohort| cohort.tick(now));
        for session in self.all() {
            let Some(since) = session.detached() else {
                continue;
            };
            if session.has_ended() {
                self.sessions.remove(&session.id);
            } else if since.elapsed() > DETACHED_LIFE {
                let reason = format!("no connection for {DETACHED_LIFE:?}");
                session.end(Error::new(ErrorCode::Session, reason));
            }
        }
    }

    // A copy, so that no shard stays locked while sessions are called.
    fn all(&self) -> Vec<Arc<Session>> {
        self.sessions
            .iter()
            .map(|session| session.clone())
            .collect()
    }

    /// Sessions that have not ended.
    pub(crate) fn live_sessions(&self) -> usize {
        self.sessions
            .iter()
            .filter(|session| !session.has_ended())
            .count()
    }

    /// What leases hold here.
    pub(crate) fn held(&self) -> Vec<HeldDevice> {
        let device = |held: Claim| HeldDevice {
            lease_id: held.lease.0,
            device_index: held.device,
            grant: Some(held.grant.into()),
        };
        lock(&self.admission).held().map(device).collect()
    }

    /// The number up to which all grants of each device have ended.
    pub(crate) fn ended_grants(&self) -> Vec<DeviceGrant> {
        let device = |(device_index, grant): (u32, GrantNumber)| DeviceGrant {
            device_index,
            grant: Some(grant.into()),
        };
        lock(&self.admission).ended().map(device).collect()
    }

    /// Has the devices looked at in the background, for later [`usage`](Self::usage).
    pub(crate) fn look_at_memory(&self) {
        for unit in &self.units {
            let (reserved, device) = (unit.reserved.clone(), unit.site.device.clone());
            unit.site
                .runtime
                .spawn_blocking(move || reserved.look(&*device));
        }
    }

    /// Use of each device, in order.
    pub(crate) fn usage(&self) -> Vec<DeviceUsage> {
        let mut usage: Vec<DeviceUsage> = self
            .units
            .iter()
            .map(|unit| DeviceUsage {
                sessions: 0,
                live_bytes: unit.site.memory.live_bytes(),
                reserved_bytes: unit.reserved.get(),
                ops_executed: unit.site.ops.load(Ordering::Relaxed),
            })
            .collect();
        for session in self.sessions.iter().filter(|session| !session.has_ended()) {
            usage[session.grant.device_index as usize].sessions += 1;
        }
        usage
    }
}

/// What a token of `lease` claims of one device.
fn claim(lease: LeaseId, share: &v1::LeaseShare) -> Claim {
    Claim {
        lease,
        device: share.device_index,
        grant: number(share.grant),
    }
}

/// A refusal, as its client receives it.
fn refused(refusal: Refusal) -> Error {
    Error::new(ErrorCode::Lease, refusal.to_string())
}

/// `session`, if it is on the device that `claim` is for.
fn on_its_device(session: &Arc<Session>, claim: &Claim) -> Result<Arc<Session>, Error> {
    let (own, named) = (session.grant.device_index, claim.device);
    match own == named {
        true => Ok(session.clone()),
        false => Err(Error::new(
            ErrorCode::Session,
            format!("session {} is on device {own}, not {named}", session.id),
        )),
    }
}
