//! A worker with one lease of CPU devices, without a network, executor threads or a clock.
//!
//! The caller moves the frames of the lease's sessions, executes their work step by step, decides
//! when their snapshots are kept, and ends their process. What decides is the code of a real worker;
//! the snapshots lie in the store of a real worker, too.

use std::{
    fs::File,
    sync::{Arc, Mutex},
    time::Duration,
};

use burn_flex::{Flex, FlexDevice};
use bytes::Bytes;
use tensord_proto::{
    ids::{LeaseId, SessionId, WorkerId},
    v1::{self, Error, ErrorCode, Mark, Open, Opened, RestorePoint},
    version,
};
use tensord_transport::{
    Identity,
    channel::{Connection, Next},
};
use tokio::{runtime::Runtime, task::yield_now};

use super::{
    DeviceContext, Grant, KeptCallback, Session, SessionBegin, SnapshotKeeper, Track,
    sealed_snapshot::{SnapshotKey, sealed_size},
    snapshot::Snapshot,
};
use crate::{
    backend::BurnDevice,
    blobs::BlobStore,
    collective::{Cohort, CollectiveSettings, LeaseMembers},
    custom::CustomOps,
    executor::{RunQueue, TimeSliceEnd, TimeSliced},
    lease_process::snapshots::{LeftSnapshots, copy},
    locks::lock,
    memory::DeviceMemory,
    op_progress::Signals,
    process_message::SnapshotInfo,
    registry::{
        StoredSnapshots,
        attachment::{Attachment, restore_point},
    },
    supervisor::snapshots::{Refused, SnapshotBounds, SnapshotFiles, Snapshots},
    usage::Meters,
};

const LEASE: LeaseId = LeaseId(1);

/// Bytes of uploads that the session may keep.
const KEPT_BYTES: u64 = 1 << 20;

/// How often spawned tasks get a turn: more than any of them waits.
const TASK_TURNS: usize = 16;

/// A worker with one lease of CPU devices, each of which has one session. The caller moves the frames
/// of the sessions, executes their work, keeps their snapshots and ends their process. A session is
/// named by the index of its device.
pub struct SimulatedHost {
    devices: usize,
    capacity_bytes: u64,
    store: Snapshots<LeaseId>,
    snapshot_bytes: u64,
    /// Number of processes of the lease that have died.
    epoch: u64,
    process: SimulatedProcess,
}

/// A process of the lease.
struct SimulatedProcess {
    runtime: Runtime,
    queue: Arc<RunQueue<Session>>,
    left: LeftSnapshots,
    /// `None` until the first session is opened.
    cohort: Option<Arc<Cohort>>,
    devices: Vec<SimulatedDevice>,
}

/// A device of a process, and its session.
struct SimulatedDevice {
    device_context: DeviceContext,
    keeper: Arc<HeldSnapshot>,
    session: Option<Arc<Session>>,
    /// The latest connection of each track.
    connections: [Option<Connection>; 2],
}

/// The snapshot of a session that a process is keeping, if any.
#[derive(Default)]
struct HeldSnapshot(Mutex<Option<Keeping>>);

/// How far a snapshot has got.
enum Keeping {
    /// The worker does not have it.
    Captured(SnapshotInfo, Box<Snapshot>, SnapshotKey, KeptCallback),
    /// The worker's reply is on its way.
    Replied(SessionId, Result<(), String>, KeptCallback),
}

impl SnapshotKeeper for HeldSnapshot {
    fn copy_limit(&self, _: SessionId, _: Mark) -> Result<u64, String> {
        Ok(u64::MAX)
    }

    fn keep(
        self: Arc<Self>,
        session: SessionId,
        mark: Mark,
        snapshot: Box<Snapshot>,
        key: SnapshotKey,
        kept: KeptCallback,
    ) {
        let mut held = lock(&self.0);
        if held.is_some() {
            drop(held);
            let reason = "the previous snapshot is still being kept";
            return kept(Duration::ZERO, Err(reason.into()));
        }
        let size_bytes = sealed_size(snapshot.size_bytes());
        let info = SnapshotInfo::new(session, mark, size_bytes, snapshot.base_id());
        *held = Some(Keeping::Captured(info, snapshot, key, kept));
    }

    fn forget(self: Arc<Self>, _: SessionId) {}

    fn min_base_bytes(&self) -> u64 {
        // The programs are small.
        64
    }
}

impl SimulatedHost {
    /// Starts a worker with `devices` devices, each of which has `capacity_bytes`. The worker keeps
    /// up to `snapshot_bytes` of snapshots.
    ///
    /// # Panics
    ///
    /// If the system provides no runtime.
    pub fn start(devices: usize, capacity_bytes: u64, snapshot_bytes: u64) -> Self {
        Self {
            devices,
            capacity_bytes,
            store: Snapshots::default(),
            snapshot_bytes,
            epoch: 0,
            process: SimulatedProcess::start(devices, capacity_bytes),
        }
    }

    /// Opens, resumes or restores a session, as `open` requests.
    ///
    /// # Errors
    ///
    /// With which the worker rejects the connection.
    ///
    /// # Panics
    ///
    /// If the system provides no randomness for a key.
    pub fn open(&mut self, open: &Open) -> Result<Opened, Error> {
        let attachment = Attachment::of(open, self.epoch)?;
        let mark = match attachment {
            Attachment::New => {
                self.process
                    .begin(open, SessionBegin::New { seed: open.seed })?;
                0
            }
            Attachment::Existing(_) => 0,
            Attachment::Restored => self.process.restore(open)?,
        };
        let track = attachment.track();
        let device = &mut self.process.devices[open.device_index as usize];
        let session = device.session.clone();
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
        })
    }

    /// Processes a frame that arrived on the latest connection of a session's track.
    ///
    /// # Errors
    ///
    /// The reason if the connection must end.
    ///
    /// # Panics
    ///
    /// If the track has no connection.
    pub fn receive(&mut self, at: usize, is_bulk: bool, frame: Bytes) -> Result<(), String> {
        let track = track(is_bulk);
        let connected = self.process.devices[at].connected(track);
        let (session, connection) = connected.expect("there is a connection");
        match session.receive(track, connection, frame) {
            Ok(_) => Ok(()),
            Err(e) if e.is_loss() => Err(e.to_string()),
            Err(e) => {
                session.end(Error::new(ErrorCode::Protocol, e.to_string()));
                Ok(())
            }
        }
    }

    /// Returns the frames that the session sends on the latest connection of a track.
    pub fn next_frames(&mut self, at: usize, is_bulk: bool) -> Vec<Bytes> {
        let track = track(is_bulk);
        let connected = self.process.devices[at].connected(track);
        let next = connected.map(|(session, connection)| session.next_to_send(track, connection));
        match next {
            Some(Next::Frames(frames)) => {
                frames.iter().map(|parts| parts.concat().into()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns a ping for the latest connection of a track.
    pub fn ping(&mut self, at: usize, is_bulk: bool) -> Option<Bytes> {
        let track = track(is_bulk);
        let (session, connection) = self.process.devices[at].connected(track)?;
        let parts = session.ping(track, connection, true)?;
        Some(parts.concat().into())
    }

    /// Executes up to `steps` steps of the work of the session that is next. Returns whether there was
    /// any.
    pub fn run(&mut self, steps: usize) -> bool {
        let SimulatedProcess { queue, runtime, .. } = &self.process;
        let Some(session) = queue.try_pop() else {
            return false;
        };
        let mut left = steps;
        let mut keep_going = || {
            left = left.saturating_sub(1);
            left > 0
        };
        if session.run(&mut keep_going) == TimeSliceEnd::MoreWork {
            queue.push(session);
        }
        runtime.block_on(async {
            for _ in 0..TASK_TURNS {
                yield_now().await;
            }
        });
        true
    }

    /// Has the worker keep the snapshot of a session that the process has made, if there is one. `has_room` is
    /// whether the worker has memory for it.
    ///
    /// # Panics
    ///
    /// If the worker finds that the process has broken a rule, or the system has no memory.
    pub fn keep_snapshot(&mut self, at: usize, has_room: bool) -> bool {
        let mut held = lock(&self.process.devices[at].keeper.0);
        let (info, snapshot, key, kept) = match held.take() {
            Some(Keeping::Captured(info, snapshot, key, kept)) => (info, snapshot, key, kept),
            other => {
                *held = other;
                return false;
            }
        };
        let result = match has_room {
            false => Err("there is no room".to_owned()),
            true => {
                let copied = copy(&snapshot, &key, info).expect("there is memory");
                let bounds = SnapshotBounds {
                    max_bytes: self.snapshot_bytes,
                    devices: self.process.devices.len(),
                };
                let files = SnapshotFiles {
                    file: copied.snapshot.into(),
                    base: copied.base.map(Into::into),
                };
                match self.store.add(LEASE, bounds, self.epoch, info, files) {
                    Ok(()) => Ok(()),
                    Err(Refused::Full(reason)) => Err(reason),
                    Err(Refused::Violation) => panic!("the process broke a rule: {info:?}"),
                }
            }
        };
        let session = SessionId(info.session_id);
        *held = Some(Keeping::Replied(session, result, kept));
        true
    }

    /// Has the process receive the worker's reply to a snapshot of a session, if there is one.
    pub fn reply_to_snapshot(&mut self, at: usize) -> bool {
        let mut held = lock(&self.process.devices[at].keeper.0);
        let (session, result, kept) = match held.take() {
            Some(Keeping::Replied(session, result, kept)) => (session, result, kept),
            other => {
                *held = other;
                return false;
            }
        };
        drop(held);
        if result.is_ok() {
            self.process.left.forget(session);
        }
        kept(Duration::ZERO, result);
        true
    }

    /// Ends the process, and starts the next one with the snapshots that the worker keeps.
    ///
    /// # Panics
    ///
    /// If the system provides no runtime.
    pub fn kill(&mut self) {
        self.epoch += 1;
        self.process = SimulatedProcess::start(self.devices, self.capacity_bytes);
        for kept in self.store.of(LEASE) {
            let copy_of = |file: &Arc<File>| file.try_clone().expect("there are descriptors");
            let left = &self.process.left;
            left.add(kept.info, copy_of(&kept.file).into());
            if let Some(base) = &kept.base {
                left.add_base(kept.info, copy_of(&base.file).into());
            }
        }
    }

    /// Returns whether a process that is started now could restore a session at one of `points`, which
    /// its client would offer.
    pub fn can_restore(&self, session_id: u64, points: &[RestorePoint]) -> bool {
        let kept = self.store.of(LEASE);
        let is_it = |info: SnapshotInfo, mark| (info.session_id, info.mark) == (session_id, mark);
        let has = |mark| kept.iter().any(|kept| is_it(kept.info, mark));
        restore_point(points, has).is_some()
    }

    /// Returns the bytes of all tensors.
    pub fn live_bytes(&self) -> u64 {
        let devices = self.process.devices.iter();
        let bytes = devices.map(|device| device.device_context.memory.live_bytes());
        bytes.sum()
    }
}

impl SimulatedProcess {
    fn start(devices: usize, capacity_bytes: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime without threads");
        let queue = Arc::<RunQueue<Session>>::default();
        let device = |_| {
            let keeper = Arc::new(HeldSnapshot::default());
            let memory = DeviceMemory::new(capacity_bytes);
            let device_context = DeviceContext {
                device: BurnDevice::<Flex>::shared(FlexDevice, &CustomOps::new()),
                meters: Meters::new(&memory),
                memory,
                queue: queue.clone(),
                signals: Signals::new("simulated".into(), Duration::MAX, Arc::default()),
                runtime: runtime.handle().clone(),
                blobs: BlobStore::new(0),
                kept_bytes: KEPT_BYTES,
                snapshots: Some(keeper.clone()),
            };
            SimulatedDevice {
                device_context,
                keeper,
                session: None,
                connections: [None; 2],
            }
        };
        Self {
            devices: (0..devices).map(device).collect(),
            queue,
            left: LeftSnapshots::default(),
            cohort: None,
            runtime,
        }
    }

    /// Returns the cohort of all sessions, which is created on first use.
    fn cohort(&mut self, id: u64) -> Arc<Cohort> {
        let share = |device_index| v1::LeaseShare {
            worker_id: 1,
            device_index,
            worker: "simulated".into(),
            ..v1::LeaseShare::default()
        };
        let shares = (0..self.devices.len() as u32).map(share).collect();
        let create = || {
            let settings = CollectiveSettings {
                deadline: Duration::MAX,
                bucket_bytes: None,
                runtime: self.runtime.handle().clone(),
                identity: Arc::new(Identity::self_signed().expect("randomness for a key")),
            };
            let members = LeaseMembers::new(shares, WorkerId(1));
            Cohort::new(id, LEASE, members, Bytes::new(), settings)
        };
        self.cohort.get_or_insert_with(create).clone()
    }

    /// Begins a session, unless there is one: the reply to an earlier attempt was lost.
    fn begin(&mut self, open: &Open, begin: SessionBegin) -> Result<(), Error> {
        let cohort = self.cohort(open.cohort);
        let device = &mut self.devices[open.device_index as usize];
        if device.session.is_some() {
            return Ok(());
        }
        let grant = Grant {
            lease: LEASE,
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
    fn restore(&mut self, open: &Open) -> Result<u64, Error> {
        let device = &self.devices[open.device_index as usize];
        if let Some(session) = &device.session {
            return Ok(session.restored_at());
        }
        let lost = |reason: String| Error::new(ErrorCode::Session, reason);
        let id = SessionId(open.session_id);
        let point = restore_point(&open.restore, |mark| self.left.has(id, mark));
        let point = point.ok_or_else(|| lost("there is no snapshot".into()))?;
        let max_bytes = device.device_context.memory.capacity_bytes() + KEPT_BYTES;
        let key = SnapshotKey::from_message(&open.snapshot_key);
        let key = key.ok_or_else(|| lost("there is no key".into()))?;
        let snapshot = self.left.read(id, point.mark, &key, max_bytes);
        let snapshot = snapshot.map_err(lost)?;
        let snapshot = Box::new(snapshot);
        self.begin(open, SessionBegin::Restored { point, snapshot })?;
        Ok(point.mark)
    }
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
