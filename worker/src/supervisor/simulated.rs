//! A worker without a network, system processes and a clock: the real supervisor, whose leases run in
//! simulated processes.
//!
//! The caller passes on the scheduler's commands and the worker's reports, moves the frames of sessions,
//! of links between processes and of snapshots to keepers, executes the work of sessions step by step,
//! and ends processes. There is one lease at a time.

mod copies;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::Bytes;
use tensord_proto::{
    ids::{LeaseId, PartId, WorkerId},
    v1::{
        DeviceGrant, Error, HeldDevice, Join, Joined, Open, Opened, Released, RestorePoint,
        WorkerCommand, worker_message::Body,
    },
};
use tensord_transport::Identity;
use tokio::sync::mpsc;

use self::copies::Copying;
use super::{
    Described, Job, Supervisor, SupervisorSettings,
    keeper_link::{Keeper, KeeperQueues},
    lease_queues::{LeaseQueues, PassedMemory, QueuedTask, part_of},
    process::Spawner,
    process_run::ProcessRun,
    restarts::Restarts,
    running::ProcessEnd,
    snapshot_copies::SnapshotCopies,
    snapshots::{KeptSnapshot, SnapshotBounds},
    table::Route,
};
use crate::{
    devices::{DeviceSelection, FoundDevice},
    lease_host::LeaseHost,
    lease_process::snapshots::SealedFiles,
    locks::lock,
    process_message::{Event, ProcessSettings, SnapshotInfo, SnapshotKept, Task},
    registration::{execute, heartbeat},
    registry::attachment::restore_point,
    session::simulated::{ProcessStart, SimulatedProcess},
};

/// Bytes for snapshots of the leases of other workers.
const KEPT_FOR_OTHERS_BYTES: u64 = 1 << 30;

/// A worker whose caller does what the system and the network do otherwise.
pub struct SimulatedWorker {
    supervisor: Arc<Supervisor>,
    settings: SimulatedSettings,
    jobs: mpsc::Receiver<Job>,
    run: Option<SimulatedRun>,
    /// The snapshots that are to be handed over to other workers.
    handovers: VecDeque<(PartId, Keeper)>,
}

/// Settings of a [`SimulatedWorker`].
#[derive(Debug, Clone)]
pub struct SimulatedSettings {
    /// The worker's id, which is different for each start of a worker.
    pub worker_id: u64,
    /// Number of devices.
    pub devices: usize,
    /// Bytes of memory of each device.
    pub capacity_bytes: u64,
    /// Bytes for snapshots of each device.
    pub snapshot_bytes: u64,
    /// The public key that verifies lease tokens.
    pub lease_key: Vec<u8>,
}

/// A lease that the worker runs.
struct SimulatedRun {
    lease: LeaseId,
    queues: Box<LeaseQueues>,
    restarts: Restarts,
    copies: SnapshotCopies,
    copying: Copying,
    process: SimulatedProcess,
    /// The worker's replies to snapshots that the process has not received.
    replies: VecDeque<SnapshotKept>,
    has_had_sessions: bool,
}

impl SimulatedWorker {
    /// Starts a worker.
    ///
    /// # Panics
    ///
    /// If the system provides no randomness for a key.
    pub fn start(settings: SimulatedSettings) -> Self {
        let found = |index| FoundDevice {
            selection: DeviceSelection {
                kind: "flex".into(),
                index,
            },
            name: "simulated".into(),
            memory_bytes: settings.capacity_bytes,
            driver: String::new(),
        };
        let described = Described {
            found: (0..settings.devices).map(found).collect(),
            missing: Vec::new(),
            spawner: Spawner::closed(),
        };
        let process_settings = ProcessSettings {
            snapshot_bytes: settings.snapshot_bytes,
            ..ProcessSettings::default()
        };
        let identity = Identity::self_signed().expect("randomness for a key");
        let supervisor_settings = SupervisorSettings {
            worker_id: WorkerId(settings.worker_id),
            worker_name: format!("w{}", settings.worker_id),
            identity: Arc::new(identity),
            process_settings,
            hidden: Vec::new(),
            cache_bytes: 0,
            kept_for_others_bytes: KEPT_FOR_OTHERS_BYTES,
            store: None,
        };
        let (supervisor, jobs) = Supervisor::idle(described, supervisor_settings);
        supervisor.set_lease_key(settings.lease_key.clone());
        Self {
            supervisor,
            settings,
            jobs,
            run: None,
            handovers: VecDeque::new(),
        }
    }

    /// Returns the SHA-256 of the worker's certificate.
    pub fn certificate_sha256(&self) -> [u8; 32] {
        self.supervisor.settings.identity.fingerprint().0
    }

    /// Returns the bytes of memory of each device.
    pub fn device_bytes(&self) -> Vec<u64> {
        vec![self.settings.capacity_bytes; self.settings.devices]
    }

    /// Executes a command of the scheduler. Returns what the worker reports because of it.
    pub fn execute(&mut self, command: WorkerCommand) -> Vec<Body> {
        let ended = execute(&*self.supervisor, command);
        self.reports(ended)
    }

    /// Returns what the worker reports now: a heartbeat, and what was released.
    pub fn report(&mut self) -> Vec<Body> {
        self.reports(None)
    }

    fn reports(&mut self, ended: Option<LeaseId>) -> Vec<Body> {
        let released = std::mem::take(&mut *lock(&self.supervisor.released));
        let released = ended.into_iter().chain(released).map(|lease| {
            Body::Released(Released {
                lease_id: lease.0,
                busy_devices: self.supervisor.unreleased_devices(lease),
            })
        });
        let heartbeat = Body::Heartbeat(heartbeat(&*self.supervisor));
        std::iter::once(heartbeat).chain(released).collect()
    }

    /// Returns what a worker reports when it joins: the devices that leases hold, the latest grants that
    /// have ended, and the suspended leases whose snapshots it holds.
    pub fn holdings(&self) -> (Vec<HeldDevice>, Vec<DeviceGrant>, Vec<LeaseId>) {
        let host = &*self.supervisor;
        (
            host.held_devices(),
            host.ended_grants(),
            host.suspended_leases(),
        )
    }

    /// Returns which part of a lease the worker runs, if it runs any.
    pub fn running_part(&self) -> Option<PartId> {
        let run = self.run.as_ref();
        run.map(|run| part_of(&run.queues.granted))
    }

    /// Takes the next job, if there is one: starts the process of a lease, or begins a handover.
    pub fn take_job(&mut self) {
        match self.jobs.try_recv() {
            Ok(Job::RunLease(lease, queues)) => self.run = Some(self.start_lease(lease, queues)),
            Ok(Job::HandOver(part, keeper)) => {
                self.handovers.push_back((part, *keeper));
            }
            // There is no store, and no device fails.
            Ok(Job::ListStored | Job::DropStored(_) | Job::Probe(_)) | Err(_) => {}
        }
    }

    fn start_lease(&self, lease: LeaseId, mut queues: Box<LeaseQueues>) -> SimulatedRun {
        let restarts = std::mem::take(&mut queues.restarts);
        let part = part_of(&queues.granted);
        let (stream, outgoing, keeper) = KeeperQueues::new(
            self.supervisor.clone(),
            part,
            queues.granted.grants.len(),
            queues.keeper.clone(),
            queues.progress.clone(),
        );
        let copies = SnapshotCopies::new(keeper, None);
        let copying = Copying::new(part, stream, outgoing, queues.keeper.clone());
        let process = self.start_process(lease, &mut queues, &restarts);
        SimulatedRun {
            lease,
            queues,
            restarts,
            copies,
            copying,
            process,
            replies: VecDeque::new(),
            has_had_sessions: false,
        }
    }

    fn start_process(
        &self,
        lease: LeaseId,
        queues: &mut LeaseQueues,
        restarts: &Restarts,
    ) -> SimulatedProcess {
        let mut process = SimulatedProcess::start(ProcessStart {
            worker: WorkerId(self.settings.worker_id),
            lease_key: self.settings.lease_key.clone(),
            granted: &queues.granted,
            epoch: restarts.epoch(),
            capacity_bytes: self.settings.capacity_bytes,
        });
        let tenant = queues.granted.tenant.clone();
        for task in self.supervisor.first_tasks(lease, &tenant, queues) {
            pass_on(&mut process, &queues.granted.grants, task);
        }
        process
    }

    /// Has the process receive the next message of the worker, if there is one.
    pub fn deliver_to_process(&mut self) {
        if let Some(run) = &mut self.run
            && let Ok(task) = run.queues.tasks.try_recv()
        {
            pass_on(&mut run.process, &run.queues.granted.grants, task);
        }
    }

    /// Has the worker receive the process's report of its sessions.
    ///
    /// # Panics
    ///
    /// If the process has broken a rule.
    pub fn receive_report(&mut self) {
        if let Some(run) = &mut self.run {
            let report = Event::Report(run.process.report());
            let latest = run.queues.report.clone();
            let mut process_run = run.process_run(self.settings.snapshot_bytes);
            let received = process_run.on_event(&self.supervisor, &latest, report);
            received.expect("a report breaks no rule");
            let has_had_sessions = process_run.has_had_sessions;
            run.has_had_sessions = has_had_sessions;
        }
    }

    /// Kills the process, if there is one. The lease may go on in another one here.
    pub fn kill_process(&mut self) {
        self.process_ended("it was killed");
    }

    /// Has a process exit whose sessions have ended. Returns whether there was one.
    pub fn exit_process(&mut self) -> bool {
        let has_ended = self.run.as_ref().is_some_and(|run| run.process.has_ended);
        if has_ended {
            self.process_ended("it has exited");
        }
        has_ended
    }

    fn process_ended(&mut self, how: &str) {
        let Some(mut run) = self.run.take() else {
            return;
        };
        let ended = ProcessEnd {
            how: how.into(),
            ops: BTreeMap::new(),
            has_died: true,
        };
        let (lease, supervisor) = (run.lease, &self.supervisor);
        if !supervisor.process_ended(lease, &run.queues, &mut run.restarts, ended) {
            return;
        }
        run.queues.keep_ends();
        run.copies.process_died();
        run.process = self.start_process(lease, &mut run.queues, &run.restarts);
        run.replies.clear();
        run.has_had_sessions = false;
        self.run = Some(run);
    }

    /// Returns whether a lease whose process dies now would go on: it has not died too often without
    /// progress, and the worker has a snapshot of each of these sessions at one of its points.
    pub fn can_lose_process(&self, sessions: &[SessionPoints]) -> bool {
        self.run.as_ref().is_none_or(|run| {
            let kept = lock(&self.supervisor.snapshots).of(run.lease);
            run.restarts.may_die() && can_go_on(&kept, sessions)
        })
    }

    /// Returns whether the worker could run these sessions of a part of a lease with the snapshots that
    /// it keeps for others.
    pub fn keeps(&self, part: PartId, sessions: &[SessionPoints]) -> bool {
        let kept = lock(&self.supervisor.kept_for_others).snapshots_of(part);
        can_go_on(&kept, sessions)
    }
}

/// A session's id, and the marks from which its client could go on.
pub type SessionPoints = (u64, Vec<RestorePoint>);

/// Returns whether there is a snapshot of each of these sessions at one of its points.
fn can_go_on(kept: &[KeptSnapshot], sessions: &[SessionPoints]) -> bool {
    let can_go_on = |(session, points): &SessionPoints| {
        let is_it = |info: SnapshotInfo, mark| (info.session_id, info.mark) == (*session, mark);
        let has = |mark| kept.iter().any(|kept| is_it(kept.info, mark));
        restore_point(points, has).is_some()
    };
    sessions.iter().all(can_go_on)
}

/// What the process of the lease does.
impl SimulatedWorker {
    /// Opens, resumes or restores a session, as `open` requests.
    ///
    /// # Errors
    ///
    /// With which the connection is rejected; `None` if it ends without a reply.
    pub fn open(&mut self, open: &Open, lease: LeaseId) -> Result<Opened, Option<Error>> {
        let route = lock(&self.supervisor.table).route(lease);
        match (route, &mut self.run) {
            (Route::Process, Some(run)) => run.process.open(open).map_err(Some),
            (Route::Process, None) => Err(None),
            _ => Err(self.supervisor.check_open(open).err()),
        }
    }

    fn process(&mut self) -> Option<&mut SimulatedProcess> {
        self.run.as_mut().map(|run| &mut run.process)
    }

    /// Processes a frame that arrived on the latest connection of a track of the session on the device
    /// `at`.
    ///
    /// # Errors
    ///
    /// The reason if the connection must end.
    pub fn receive(&mut self, at: u32, is_bulk: bool, frame: Bytes) -> Result<(), String> {
        let process = self.process().ok_or("there is no process")?;
        process.receive(at, is_bulk, frame)
    }

    /// Returns the frames that a session sends on the latest connection of a track.
    pub fn next_frames(&mut self, at: u32, is_bulk: bool) -> Vec<Bytes> {
        let process = self.process();
        process.map_or_else(Vec::new, |process| process.next_frames(at, is_bulk))
    }

    /// Returns a ping for the latest connection of a track.
    pub fn ping(&mut self, at: u32, is_bulk: bool) -> Option<Bytes> {
        self.process()?.ping(at, is_bulk)
    }

    /// Executes up to `steps` steps of the work of the session that is next.
    pub fn run(&mut self, steps: usize) {
        if let Some(process) = self.process() {
            process.run(steps);
        }
    }

    /// Has the worker keep the snapshot that the process has made of the session on the device `at`, if
    /// there is one. `has_room` is whether the worker has memory for it. Returns whether it keeps one.
    ///
    /// # Panics
    ///
    /// If the process has broken a rule.
    pub fn keep_snapshot(&mut self, at: u32, has_room: bool) -> bool {
        let Some(run) = &mut self.run else {
            return false;
        };
        let Some((info, SealedFiles { snapshot, base })) = run.process.copy_snapshot(at) else {
            return false;
        };
        let max_bytes = if has_room {
            self.settings.snapshot_bytes
        } else {
            0
        };
        let mut process_run = run.process_run(max_bytes);
        process_run.new_base = base.map(|base| (info, base.into()));
        let reply = process_run.keep_snapshot(&self.supervisor, info, snapshot.into());
        let reply = reply.expect("a snapshot breaks no rule");
        let is_kept = reply.as_ref().is_none_or(|reply| reply.error.is_empty());
        run.replies.extend(reply);
        is_kept
    }

    /// Has the process receive a reply of the worker to a snapshot, if there is one.
    pub fn reply_to_snapshot(&mut self) {
        let Some(run) = &mut self.run else {
            return;
        };
        let mut kept = std::pin::pin!(run.copies.kept());
        if let Poll::Ready(kept) = kept.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            run.replies.push_back(kept);
        }
        if let Some(reply) = run.replies.pop_front() {
            run.process.snapshot_kept(reply);
        }
    }

    /// Returns the bytes of all tensors of the lease here.
    pub fn live_bytes(&self) -> u64 {
        let run = self.run.as_ref();
        run.map_or(0, |run| run.process.live_bytes())
    }
}

/// Links to other workers of the lease.
impl SimulatedWorker {
    /// Returns the first message of a connection for each worker that the process wants to dial.
    pub fn join_requests(&self) -> Vec<Join> {
        let run = self.run.as_ref();
        run.map_or_else(Vec::new, |run| run.process.join_requests())
    }

    /// Accepts a connection of another worker, or returns `None` if it rejects that, or has no process.
    pub fn accept(&mut self, join: &Join) -> Option<Joined> {
        self.process()?.accept(join).ok()
    }

    /// Begins a connection that the process has dialled, and on which `worker` has sent `joined`. Returns
    /// whether the connection goes on.
    pub fn joined(&mut self, worker: u64, joined: &Joined) -> bool {
        let process = self.process();
        process.is_some_and(|process| process.joined(WorkerId(worker), joined))
    }

    /// Processes a frame that arrived on the latest connection with `worker`.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub fn receive_from(&mut self, worker: u64, frame: Bytes) -> Result<(), String> {
        let process = self.process().ok_or("there is no process")?;
        process.receive_from(WorkerId(worker), frame)
    }

    /// Returns the frames that the process sends on the latest connection with `worker`.
    pub fn next_frames_to(&mut self, worker: u64) -> Vec<Bytes> {
        let process = self.process();
        process.map_or_else(Vec::new, |process| process.next_frames_to(WorkerId(worker)))
    }

    /// Returns a ping for the latest connection with `worker`.
    pub fn ping_to(&self, worker: u64) -> Option<Bytes> {
        self.run.as_ref()?.process.ping_to(WorkerId(worker))
    }

    /// Records that the connection with `worker` was lost.
    pub fn detach(&mut self, worker: u64) {
        if let Some(process) = self.process() {
            process.detach(WorkerId(worker));
        }
    }
}

impl SimulatedRun {
    /// Returns the run of the lease in its process.
    fn process_run(&mut self, snapshot_bytes: u64) -> ProcessRun<'_> {
        let granted = &self.queues.granted;
        let devices = granted.grants.iter().map(|grant| (grant.device_index, 0));
        let devices: BTreeMap<_, _> = devices.collect();
        let max_bytes = snapshot_bytes.saturating_mul(devices.len() as u64);
        let snapshot_bounds = SnapshotBounds {
            max_bytes,
            devices: devices.len(),
        };
        ProcessRun {
            lease: self.lease,
            tenant: granted.tenant.clone(),
            held: Vec::new(),
            segments_sent: 0,
            reported_at: None,
            has_ended: false,
            has_had_sessions: self.has_had_sessions,
            devices,
            began: Instant::now(),
            failure: None,
            snapshot_bounds: Some(snapshot_bounds),
            new_base: None,
            restarts: &mut self.restarts,
            copies: &mut self.copies,
        }
    }
}

/// Passes a message of the worker on to a process.
fn pass_on(process: &mut SimulatedProcess, grants: &[DeviceGrant], queued: QueuedTask) {
    let QueuedTask { task, memory } = queued;
    let copy = |memory: PassedMemory| {
        let file = memory.file().try_clone();
        file.expect("there are descriptors").into()
    };
    match (task, memory) {
        (Task::Snapshot(info), Some(memory)) => process.left.add(info, copy(memory)),
        (Task::SnapshotBase(info), Some(memory)) => process.left.add_base(info, copy(memory)),
        (Task::End(end), None) => process.end(&end, grants),
        // The other tasks are about the scheduler's clock, uploads and turns of devices, which are not
        // simulated.
        _ => {}
    }
}
