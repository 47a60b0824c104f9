//! A process that runs a lease on CPU devices, without a system process, a network, executor threads or a
//! clock.
//!
//! The caller moves the frames of the lease's sessions and of their links to other workers, executes
//! their work step by step, and copies their snapshots. Sessions, collectives and admission are those of
//! a real process; how a connection finds its session, and what follows from the worker's replies to
//! snapshots, is written here again.

mod held_snapshot;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_backend::{CustomOps, flex_device};
use tensord_proto::{
    ids::{LeaseId, SessionId, WorkerId},
    v1::{self, Error, ErrorCode, Join, Joined, LeaseClaims, LeaseGranted, Open, Opened},
    version,
};
use tensord_transport::channel::{Connection, Next};
use tokio::{runtime::Runtime, task::yield_now};

use self::held_snapshot::HeldSnapshot;
use super::{
    DeviceContext, Grant, KeepingTime, KeptLimits, Session, SessionBegin, Track,
    sealed_snapshot::SnapshotKey,
};
use crate::{
    admission::{Admission, AdmissionError, Claim, Lanes},
    blobs::BlobStore,
    collective::{Cohort, CollectiveSettings, LeaseMembers, SimulatedLinkEnd, join_requests},
    executor::{RunQueue, TimeSliceEnd, TimeSliced},
    lease_process::snapshots::{LeftSnapshots, SealedFiles},
    lease_tokens::LeaseTokens,
    memory::DeviceMemory,
    op_progress::Signals,
    process_message::{End, Report, SnapshotInfo, SnapshotKept},
    registry::{
        StoredSnapshots,
        attachment::{Attachment, restore_point},
    },
    usage::Meters,
};

/// Bytes of uploads that the session may keep.
const KEPT_BYTES: u64 = 1 << 20;

/// How often spawned tasks get a turn: more than any of them waits.
const TASK_TURNS: usize = 16;

/// A process of a lease. A session is named by the index of its device on the worker.
pub(crate) struct SimulatedProcess {
    lease: LeaseId,
    worker: WorkerId,
    /// Higher than that of all earlier processes of the lease.
    epoch: u64,
    lease_tokens: LeaseTokens,
    admission: Admission,
    runtime: Runtime,
    queue: Arc<RunQueue<Session>>,
    pub(crate) left: LeftSnapshots,
    /// `None` until the first session is opened.
    cohort: Option<Arc<Cohort>>,
    devices: BTreeMap<u32, SimulatedDevice>,
    /// The latest connection with each other worker.
    links: BTreeMap<WorkerId, SimulatedLinkEnd>,
    /// Whether its sessions have been ended.
    pub(crate) has_ended: bool,
}

/// A device of a process, and its session.
struct SimulatedDevice {
    device_context: DeviceContext,
    keeper: Arc<HeldSnapshot>,
    session: Option<Arc<Session>>,
    /// The latest connection of each track.
    connections: [Option<Connection>; 2],
}

/// What a simulated process needs of its worker.
pub(crate) struct ProcessStart<'a> {
    pub(crate) worker: WorkerId,
    /// The public key that verifies lease tokens.
    pub(crate) lease_key: Vec<u8>,
    pub(crate) granted: &'a LeaseGranted,
    /// Higher than that of all earlier processes of the lease.
    pub(crate) epoch: u64,
    /// Bytes of memory of each device.
    pub(crate) capacity_bytes: u64,
}

impl SimulatedProcess {
    /// Starts a process, which runs no session yet.
    ///
    /// # Panics
    ///
    /// If the system provides no runtime.
    pub(crate) fn start(start: ProcessStart<'_>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime without threads");
        let queue = Arc::<RunQueue<Session>>::default();
        let device = |index: u32| {
            let keeper = Arc::new(HeldSnapshot::default());
            let memory = DeviceMemory::new(start.capacity_bytes);
            let device_context = DeviceContext {
                device: flex_device(&CustomOps::new()),
                meters: Meters::new(&memory),
                memory,
                queue: queue.clone(),
                signals: Signals::new("simulated".into(), Duration::MAX, Arc::default()),
                runtime: runtime.handle().clone(),
                blobs: BlobStore::new(0),
                kept_limits: KeptLimits {
                    new: KEPT_BYTES,
                    restored: KEPT_BYTES,
                },
                snapshots: Some(keeper.clone()),
            };
            let device = SimulatedDevice {
                device_context,
                keeper,
                session: None,
                connections: [None; 2],
            };
            (index, device)
        };
        let lease = LeaseId(start.granted.lease_id);
        let grants = &start.granted.grants;
        let indices: Vec<_> = grants.iter().map(|grant| grant.device_index).collect();
        let lanes = indices.iter().map(|index| (*index, Lanes::All));
        let mut admission = Admission::new(lanes);
        for grant in grants {
            let claim = Claim::new(lease, grant).expect("the grant is of a whole device");
            admission.granted(claim);
        }
        let lease_tokens = LeaseTokens::new(start.worker);
        lease_tokens.set_key(start.lease_key);
        Self {
            lease,
            worker: start.worker,
            epoch: start.epoch,
            lease_tokens,
            admission,
            devices: indices.into_iter().map(device).collect(),
            queue,
            left: LeftSnapshots::default(),
            cohort: None,
            links: BTreeMap::new(),
            has_ended: false,
            runtime,
        }
    }

    /// Opens, resumes or restores a session, as `open` requests.
    ///
    /// # Errors
    ///
    /// With which the connection is rejected.
    ///
    /// # Panics
    ///
    /// If a snapshot cannot be read.
    pub(crate) fn open(&mut self, open: &Open) -> Result<Opened, Error> {
        let (claim, claims) = self.lease_tokens.authorise(open)?;
        let attachment = Attachment::of(open, self.epoch)?;
        let mark = match attachment {
            Attachment::New => {
                let now = Instant::now();
                let opened = self.admission.open(claim, claims.expires_at_ms, now);
                opened.map_err(lease_error)?;
                self.begin(open, claims, SessionBegin::New { seed: open.seed })?;
                0
            }
            Attachment::Existing(_) => {
                self.admission.check(claim).map_err(lease_error)?;
                0
            }
            Attachment::Restored => {
                self.admission.check(claim).map_err(lease_error)?;
                self.restore(open, claims)?
            }
        };
        let track = attachment.track();
        let device = self.device(open.device_index)?;
        let session = device.session.clone();
        let session = session.filter(|session| session.id.0 == open.session_id);
        let session = session.filter(|session| !session.has_ended());
        let session = session.ok_or_else(|| Error::new(ErrorCode::Session, "no session"))?;
        let attached = session.attach(track, attachment.received(open));
        let attached = attached.map_err(|e| Error::new(ErrorCode::Protocol, e.to_string()))?;
        device.connections[track as usize] = Some(attached.connection);
        let device = &device.device_context.device;
        Ok(Opened {
            hello: Some(version::hello()),
            protocol: version::PROTOCOL_MAX,
            received: attached.received,
            credit_bytes: attached.credit_bytes,
            settings: Some(v1::DeviceSettings {
                encoded: device.profile().encode(),
            }),
            kept_bytes: KEPT_BYTES,
            durable: session.is_durable(),
            epoch: self.epoch,
            mark,
            has_held: false,
        })
    }

    fn device(&mut self, index: u32) -> Result<&mut SimulatedDevice, Error> {
        let device = self.devices.get_mut(&index);
        device.ok_or_else(|| Error::new(ErrorCode::Lease, "the lease has no such device"))
    }

    /// Processes a frame that arrived on the latest connection of a session's track.
    ///
    /// # Errors
    ///
    /// The reason if the connection must end.
    pub(crate) fn receive(&mut self, at: u32, is_bulk: bool, frame: Bytes) -> Result<(), String> {
        let track = track(is_bulk);
        let device = self.devices.get(&at);
        let Some((session, connection)) = device.and_then(|device| device.connected(track)) else {
            return Err("there is no connection".into());
        };
        match session.receive(track, connection, frame) {
            Ok(_) => Ok(()),
            Err(e) if e.is_loss() => Err(e.to_string()),
            Err(e) => {
                session.end(Error::new(ErrorCode::Protocol, e.to_string()));
                Ok(())
            }
        }
    }

    /// Returns the frames that a session sends on the latest connection of a track.
    pub(crate) fn next_frames(&mut self, at: u32, is_bulk: bool) -> Vec<Bytes> {
        let track = track(is_bulk);
        let device = self.devices.get(&at);
        let connected = device.and_then(|device| device.connected(track));
        let next = connected.map(|(session, connection)| session.next_to_send(track, connection));
        match next {
            Some(Next::Frames(frames)) => {
                frames.iter().map(|parts| parts.concat().into()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns a ping for the latest connection of a track.
    pub(crate) fn ping(&mut self, at: u32, is_bulk: bool) -> Option<Bytes> {
        let track = track(is_bulk);
        let (session, connection) = self.devices.get(&at)?.connected(track)?;
        let parts = session.ping(track, connection, true)?;
        Some(parts.concat().into())
    }

    /// Executes up to `steps` steps of the work of the session that is next.
    pub(crate) fn run(&mut self, steps: usize) {
        let Some(session) = self.queue.try_pop() else {
            return;
        };
        let mut left = steps;
        let mut keep_going = || {
            left = left.saturating_sub(1);
            left > 0
        };
        if session.run(&mut keep_going) == TimeSliceEnd::MoreWork {
            self.queue.push(session);
        }
        self.runtime.block_on(async {
            for _ in 0..TASK_TURNS {
                yield_now().await;
            }
        });
    }

    /// Copies the snapshot of a session that was captured, if there is one. Returns the copy for the worker,
    /// which must reply by [`snapshot_kept`](Self::snapshot_kept).
    ///
    /// # Panics
    ///
    /// If the system has no memory.
    pub(crate) fn copy_snapshot(&mut self, at: u32) -> Option<(SnapshotInfo, SealedFiles)> {
        self.devices.get(&at)?.keeper.copy()
    }

    /// Processes the worker's reply to a snapshot.
    pub(crate) fn snapshot_kept(&mut self, reply: SnapshotKept) {
        let session = SessionId(reply.session_id);
        let result = match reply.error.is_empty() {
            true => Ok(()),
            false => Err(reply.error),
        };
        let is_its = |it: &&SimulatedDevice| {
            let its = it.session.as_ref();
            its.is_some_and(|its| its.id == session)
        };
        let Some(device) = self.devices.values().find(is_its) else {
            return;
        };
        if let Some(kept) = device.keeper.kept(reply.mark) {
            if result.is_ok() {
                self.left.forget(session);
            }
            kept(KeepingTime::default(), result);
        }
    }

    /// Returns how the lease uses its devices, as far as the simulation needs that.
    pub(crate) fn report(&self) -> Report {
        let sessions = self.devices.values().filter_map(|it| it.session.as_ref());
        let live = sessions.filter(|session| !session.has_ended());
        Report {
            live_sessions: live.count() as u32,
            // A lease that counts as idle would be suspended for others, and there are none.
            is_busy: true,
            ..Report::default()
        }
    }

    /// Ends the lease's sessions.
    pub(crate) fn end(&mut self, end: &End, grants: &[v1::DeviceGrant]) {
        self.has_ended = true;
        if end.goes_on
            && let Some(cohort) = &self.cohort
        {
            cohort.silence();
        }
        grants.iter().for_each(|ended| self.admission.end(ended));
        let sessions = self.devices.values().filter_map(|it| it.session.clone());
        Session::end_together(sessions.collect(), &end.error);
    }

    /// Returns the bytes of all tensors.
    pub(crate) fn live_bytes(&self) -> u64 {
        let devices = self.devices.values();
        let bytes = devices.map(|device| device.device_context.memory.live_bytes());
        bytes.sum()
    }

    /// Returns the first message of a connection for each worker that the process wants to dial.
    pub(crate) fn join_requests(&self) -> Vec<Join> {
        let cohort = self.cohort.as_deref();
        cohort.map(join_requests).unwrap_or_default()
    }

    /// Accepts a connection of another worker.
    ///
    /// # Errors
    ///
    /// With which the connection is rejected.
    pub(crate) fn accept(&mut self, join: &Join) -> Result<Joined, Error> {
        let claims = self.lease_tokens.verify(&join.lease_token)?;
        let ours = self.lease_tokens.claims_here(&claims)?;
        let is_current = |claim: &Claim| self.admission.check(*claim).is_ok();
        if join.to_worker_id != self.worker.0 || !ours.iter().any(is_current) {
            return Err(Error::new(ErrorCode::Lease, "the token is not current"));
        }
        let cohort = self.cohort.as_ref().filter(|it| it.id == join.cohort);
        let cohort = cohort.ok_or_else(|| Error::new(ErrorCode::Session, "no such cohort"))?;
        let (end, joined) = SimulatedLinkEnd::accept(cohort, join)?;
        self.links.insert(WorkerId(join.from_worker_id), end);
        Ok(joined)
    }

    /// Begins a connection that this process has dialled, and on which `worker` has sent `joined`. Returns
    /// whether the connection goes on.
    pub(crate) fn joined(&mut self, worker: WorkerId, joined: &Joined) -> bool {
        let cohort = self.cohort.as_ref();
        let end = cohort.and_then(|cohort| SimulatedLinkEnd::joined(cohort, worker, joined));
        let goes_on = end.is_some();
        end.map(|end| self.links.insert(worker, end));
        goes_on
    }

    /// Processes a frame that arrived on the latest connection with `worker`.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub(crate) fn receive_from(&mut self, worker: WorkerId, frame: Bytes) -> Result<(), String> {
        match self.links.get(&worker) {
            Some(end) => end.receive(frame),
            None => Err("there is no connection".into()),
        }
    }

    /// Returns the frames that the process sends on the latest connection with `worker`.
    pub(crate) fn next_frames_to(&mut self, worker: WorkerId) -> Vec<Bytes> {
        let end = self.links.get(&worker);
        end.map(SimulatedLinkEnd::next_frames).unwrap_or_default()
    }

    /// Returns a ping for the latest connection with `worker`.
    pub(crate) fn ping_to(&self, worker: WorkerId) -> Option<Bytes> {
        self.links.get(&worker)?.ping()
    }

    /// Records that the connection with `worker` was lost.
    pub(crate) fn detach(&mut self, worker: WorkerId) {
        if let Some(end) = self.links.remove(&worker) {
            end.detach();
        }
    }

    /// Returns the cohort of all sessions, which is created on first use.
    fn cohort(&mut self, id: u64, token: &Bytes, claims: LeaseClaims) -> Arc<Cohort> {
        let create = || {
            let settings = CollectiveSettings {
                deadline: Duration::MAX,
                bucket_bytes: None,
                runtime: self.runtime.handle().clone(),
                identity: None,
            };
            let members = LeaseMembers::new(claims.shares, self.worker);
            Cohort::new(id, self.lease, members, token.clone(), settings)
        };
        self.cohort.get_or_insert_with(create).clone()
    }

    /// Begins a session, unless there is one: the reply to an earlier attempt was lost.
    fn begin(
        &mut self,
        open: &Open,
        claims: LeaseClaims,
        begin: SessionBegin,
    ) -> Result<(), Error> {
        let cohort = self.cohort(open.cohort, &open.lease_token, claims);
        let lease = self.lease;
        let device = self.device(open.device_index)?;
        if device.session.is_some() {
            return Ok(());
        }
        let grant = Grant {
            lease,
            tenant: "simulated".into(),
            device_index: open.device_index,
        };
        let id = SessionId(open.session_id);
        let key = SnapshotKey::from_message(&open.snapshot_key);
        let device_context = device.device_context.clone();
        let session = Session::new(id, grant, begin, key, device_context, cohort)?;
        device.session = Some(session);
        Ok(())
    }

    /// Restores a session, unless it was restored before. Returns the mark from which it goes on.
    fn restore(&mut self, open: &Open, claims: LeaseClaims) -> Result<u64, Error> {
        let device = self.device(open.device_index)?;
        if let Some(session) = &device.session {
            return Ok(session.restored_at());
        }
        let max_bytes = device.device_context.memory.capacity_bytes() + KEPT_BYTES;
        let lost = |reason: String| Error::new(ErrorCode::Session, reason);
        let id = SessionId(open.session_id);
        let point = restore_point(&open.restore, |mark| self.left.has(id, mark));
        let point = point.ok_or_else(|| lost("there is no snapshot".into()))?;
        let key = SnapshotKey::from_message(&open.snapshot_key);
        let key = key.ok_or_else(|| lost("there is no key".into()))?;
        let snapshot = self.left.read(id, point.mark, &key, max_bytes);
        let snapshot = Box::new(snapshot.map_err(lost)?);
        self.begin(open, claims, SessionBegin::Restored { point, snapshot })?;
        Ok(point.mark)
    }
}

fn lease_error(refusal: AdmissionError) -> Error {
    Error::new(ErrorCode::Lease, refusal.to_string())
}

impl SimulatedDevice {
    fn connected(&self, track: Track) -> Option<(&Arc<Session>, Connection)> {
        Some((self.session.as_ref()?, self.connections[track as usize]?))
    }
}

fn track(is_bulk: bool) -> Track {
    match is_bulk {
        true => Track::Bulk,
        false => Track::Ops,
    }
}
