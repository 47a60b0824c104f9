//! All sessions of this worker, and the checks of who may open one.

pub(crate) mod attachment;
mod cohorts;
mod host;
mod open;
mod restore;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use dashmap::DashMap;
use tensord_proto::{
    ids::{LeaseId, SessionId, WorkerId},
    v1::{self, Error, ErrorCode, Join, LeaseClaims, Open, Opened},
    version,
};
use tensord_transport::{channel::Connection, tls::PeerCertificate};
use tokio::{runtime::Handle, sync::Notify};

pub(crate) use self::restore::{SnapshotStores, StoredSnapshots};
use self::{attachment::Attachment, cohorts::Cohorts};
#[cfg(target_os = "linux")]
use crate::op_record::OpRecord;
use crate::{
    admission::{Admission, Claim, Lanes, WHOLE_LANE},
    blobs::KeptBlobs,
    collective::{self, AcceptedLink, CollectiveSettings},
    device_slot::DeviceSlot,
    device_turn::DeviceTurn,
    devices::OpenedDevice,
    executor::Executor,
    lease_tokens::{LeaseTokens, not_included},
    locks::lock,
    memory::DeviceMemory,
    op_progress::Signals,
    restart::{DeviceUse, LostDevice, first_lost_device},
    session::{DeviceContext, KeptLimits, Session, Track},
    usage::{Meters, ledger::UsageLedger},
};

/// How long a session outlives its last connection. Longer than the lease expiry, so that a
/// client whose lease the scheduler still keeps finds its session.
pub(crate) const DETACHED_TIMEOUT: Duration = Duration::from_secs(60);

/// All sessions of this worker. Its fields are independent parts, each with a lock of its own, and
/// the notifications between them.
pub(crate) struct Registry {
    worker_id: WorkerId,
    /// By the devices' indices on the worker.
    device_slots: BTreeMap<u32, DeviceSlot>,
    sessions: DashMap<SessionId, Arc<Session>>,
    cohorts: Cohorts,
    /// Which lease may use which device. Locked only briefly.
    admission: Mutex<Admission>,
    /// Notified when a session was opened.
    opened: Notify,
    /// Notified when a device must be checked.
    wake: Arc<Notify>,
    /// Leases from which devices were released, not reported to the scheduler yet.
    released: Mutex<Vec<LeaseId>>,
    /// Notified when there is something to report to the scheduler.
    reports: Notify,
    lease_tokens: LeaseTokens,
    /// What leases have used. Locked only briefly.
    usage: Mutex<UsageLedger>,
    op_timeout: Duration,
    /// See [`SnapshotStores::epoch`].
    epoch: u64,
    /// The snapshots of sessions whose process has died.
    stored: Option<Arc<dyn StoredSnapshots>>,
    /// Held while a session is restored.
    restoring: Mutex<()>,
}

/// A connection that was attached to a session.
pub(crate) struct Attached {
    pub(crate) session: Arc<Session>,
    pub(crate) track: Track,
    pub(crate) connection: Connection,
    pub(crate) opened: Opened,
}

/// The settings of a [`Registry`], and what it shares with the rest of the worker.
pub(crate) struct RegistrySettings {
    pub(crate) worker_id: WorkerId,
    pub(crate) worker_name: Arc<str>,
    /// Uploads of sessions that ended.
    pub(crate) blobs: Arc<dyn KeptBlobs>,
    pub(crate) kept_limits: KeptLimits,
    pub(crate) collective_settings: CollectiveSettings,
    pub(crate) op_timeout: Duration,
    pub(crate) runtime: Handle,
    /// Where the current op of each device is recorded, by the devices' indices.
    #[cfg(target_os = "linux")]
    pub(crate) op_records: BTreeMap<u32, OpRecord>,
    /// The turns of devices that other processes may use, by the devices' indices.
    pub(crate) turns: BTreeMap<u32, Arc<DeviceTurn>>,
    /// The lanes of devices of which leases have shares, by the devices' indices. Of the other
    /// devices, leases have the whole.
    pub(crate) lanes: BTreeMap<u32, u32>,
    /// Where snapshots are kept and read. `None` if sessions end with this process.
    pub(crate) snapshot_stores: Option<SnapshotStores>,
}

impl Registry {
    /// Creates the registry, and starts an executor thread for each of `devices`, whose keys
    /// are their indices on the worker.
    ///
    /// # Errors
    ///
    /// When a thread cannot be started.
    pub(crate) fn new(
        devices: BTreeMap<u32, OpenedDevice>,
        settings: RegistrySettings,
    ) -> std::io::Result<Self> {
        let wake = Arc::new(Notify::new());
        let RegistrySettings {
            worker_id,
            worker_name,
            blobs,
            kept_limits,
            collective_settings,
            op_timeout,
            runtime,
            #[cfg(target_os = "linux")]
            mut op_records,
            mut turns,
            lanes,
            snapshot_stores,
        } = settings;
        let keeper = snapshot_stores.as_ref().map(|stores| stores.keeper.clone());
        let lanes = |&index: &u32| {
            let lane = lanes.get(&index).copied().unwrap_or(WHOLE_LANE);
            (index, Lanes::Only(lane))
        };
        let admission = Mutex::new(Admission::new(devices.keys().map(lanes)));
        let device_slot = |(index, opened): (u32, OpenedDevice)| {
            let executor = Executor::start(index, turns.remove(&index).unwrap_or_default())?;
            let signals = Signals::new(worker_name.clone(), op_timeout, wake.clone());
            #[cfg(target_os = "linux")]
            let signals = signals.with_record(op_records.remove(&index));
            let memory = DeviceMemory::new(opened.found.memory_bytes);
            let device_context = DeviceContext {
                meters: Meters::new(&memory),
                memory,
                queue: executor.queue().clone(),
                signals,
                runtime: runtime.clone(),
                blobs: blobs.clone(),
                kept_limits,
                snapshots: keeper.clone(),
                device: opened.device,
            };
            let device_slot = DeviceSlot::new(index, executor, device_context);
            Ok((index, device_slot))
        };
        let device_slots = devices.into_iter().map(device_slot);
        Ok(Self {
            admission,
            device_slots: device_slots.collect::<std::io::Result<_>>()?,
            sessions: DashMap::new(),
            cohorts: Cohorts::new(worker_id, collective_settings),
            opened: Notify::new(),
            wake,
            released: Mutex::default(),
            reports: Notify::new(),
            lease_tokens: LeaseTokens::new(worker_id),
            usage: Mutex::default(),
            worker_id,
            op_timeout,
            epoch: snapshot_stores.as_ref().map_or(0, |stores| stores.epoch),
            stored: snapshot_stores.map(|stores| stores.snapshots),
            restoring: Mutex::default(),
        })
    }

    /// Opens or resumes the session that `open` requests.
    pub(crate) fn attach(&self, open: &Open) -> Result<Attached, Error> {
        let ours = version::hello();
        let protocol =
            version::negotiate(&ours, open.hello.as_ref().unwrap_or(&v1::Hello::default()))?;
        let (claim, claims) = self.authorise(open)?;
        let id = SessionId(open.session_id);
        let attachment = Attachment::of(open, self.epoch)?;
        let (session, mark) = match attachment {
            Attachment::New => (self.open(id, claim, claims, open)?, 0),
            Attachment::Existing(_) => (self.existing_session(id, claim)?, 0),
            Attachment::Restored => self.restore(id, claim, claims, open)?,
        };
        let track = attachment.track();
        let resumed = session.attach(track, attachment.received(open));
        let resumed = resumed.map_err(|e| Error::new(ErrorCode::Protocol, e.to_string()))?;
        let device_slot = &self.device_slots[&open.device_index];
        let encoded = device_slot.profile.encode();
        let opened = Opened {
            hello: Some(ours),
            protocol,
            received: resumed.received,
            credit_bytes: resumed.credit_bytes,
            settings: Some(v1::DeviceSettings { encoded }),
            kept_bytes: session.kept_limit_bytes(),
            durable: session.is_durable(),
            epoch: self.epoch,
            mark,
            has_held: session.begins_with_held(),
        };
        Ok(Attached {
            session,
            track,
            connection: resumed.connection,
            opened,
        })
    }

    /// Verifies the token of `open`. Returns the claim to the requested device, and all claims
    /// of the token.
    fn authorise(&self, open: &Open) -> Result<(Claim, LeaseClaims), Error> {
        let (claim, claims) = self.lease_tokens.authorise(open)?;
        match self.device_slots.contains_key(&claim.device) {
            true => Ok((claim, claims)),
            false => Err(not_included(claim.device)),
        }
    }

    /// Has the sessions send nothing to other workers any more, not even that they end.
    pub(crate) fn silence_cohorts(&self) {
        self.cohorts.silence();
    }

    /// Returns the workers that cohorts of sessions have dialled in vain for a while at `now`.
    pub(crate) fn missing_peers(&self, now: Instant) -> BTreeSet<WorkerId> {
        self.cohorts.missing_peers(now)
    }

    /// Accepts the connection of another worker, for a cohort that has sessions on this
    /// worker. The other worker has proved in the TLS handshake that it has the key of
    /// `peer_certificate`.
    pub(crate) fn join(
        &self,
        join: &Join,
        peer_certificate: Option<&PeerCertificate>,
    ) -> Result<AcceptedLink, Error> {
        let claims = self.lease_tokens.verify(&join.lease_token)?;
        let lease = LeaseId(claims.lease_id);
        let ours = self.lease_tokens.claims_here(&claims)?;
        let is_current = |claim: &Claim| lock(&self.admission).check(*claim).is_ok();
        if join.to_worker_id != self.worker_id.0 || !ours.iter().any(is_current) {
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

    /// Waits until a session was opened.
    #[cfg(target_os = "linux")]
    pub(crate) async fn wait_for_session(&self) {
        self.opened.notified().await;
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
        for (index, device_slot) in &self.device_slots {
            let here = sessions.iter().filter(|s| s.grant.device_index == *index);
            let outcome = device_slot.check(now, &here.collect::<Vec<_>>());
            let is_reportable = outcome.has_changed || !outcome.released.is_empty();
            for lease in &outcome.released {
                self.count_released(now, *lease, *index);
            }
            lock(&self.released).extend(outcome.released);
            if is_reportable {
                self.reports.notify_one();
            }
        }
    }

    /// Returns a device that is lost until this process is restarted, if no session on
    /// another device would end with the process.
    pub(crate) fn lost_device(&self, now: Instant) -> Option<LostDevice> {
        let device_use = |(index, device_slot): (&u32, &DeviceSlot)| {
            let stuck_since = device_slot.stuck_since();
            let has_sessions = false;
            let device_use = DeviceUse {
                stuck_since,
                has_sessions,
            };
            (*index, device_use)
        };
        let mut devices: BTreeMap<_, _> = self.device_slots.iter().map(device_use).collect();
        // The usual case, which does not iterate over the sessions.
        if devices.values().all(|device| device.stuck_since.is_none()) {
            return None;
        }
        for session in self.sessions.iter().filter(|session| !session.has_ended()) {
            if let Some(device) = devices.get_mut(&session.grant.device_index) {
                device.has_sessions = true;
            }
        }
        let grace_period = self.op_timeout;
        let uses: Vec<_> = devices.values().copied().collect();
        let lost = first_lost_device(&uses, now, grace_period)?;
        let (&index, device_slot) = self.device_slots.iter().nth(lost)?;
        let reason = device_slot.out_of_service().unwrap_or_default();
        Some(LostDevice { index, reason })
    }

    /// Ends the sessions of a lease on a device that was granted to another lease.
    fn end_superseded(&self, lease: LeaseId, device: u32) {
        let reason = format!("lease {lease} ended: its device was granted to another lease");
        let is_its = |s: &&Arc<Session>| s.grant.lease == lease && s.grant.device_index == device;
        self.all_sessions()
            .iter()
            .filter(is_its)
            .for_each(|session| session.end(Error::new(ErrorCode::Lease, reason.clone())));
        self.count_released(Instant::now(), lease, device);
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

    /// Returns whether a session is open.
    #[cfg(target_os = "linux")]
    pub(crate) fn has_session(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// Returns whether a session has not ended, or its device still executes something for
    /// it.
    pub(crate) fn has_sessions(&self) -> bool {
        self.sessions.iter().any(|session| !session.is_torn_down())
    }

    // Returns a copy, so that no shard stays locked while sessions are called.
    fn all_sessions(&self) -> Vec<Arc<Session>> {
        self.sessions
            .iter()
            .map(|session| session.clone())
            .collect()
    }
}
