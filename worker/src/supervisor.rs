//! Runs each lease of a worker in a process of its own.
//!
//! The worker keeps the port, the registration, and the decision which lease has which
//! device. It reads from a connection's first bytes which lease the connection is for, and
//! passes the socket on to the lease's [process](crate::lease_process). So a program that
//! breaks out of its session's checks finds no other lease's memory, and no secret of the
//! worker or its pool.
//!
//! - `table` decides, as a pure state machine; [`Supervisor`] executes.
//! - `process` starts one process and talks with it; `spares` keeps some ready.
//! - `grants` takes leases, with the shares of devices that they have.
//! - `turns` decides which process may use a device that several leases share; `turn_clock` executes.
//! - `activity` tells since when a lease has been idle.
//! - `running` runs a lease in one process after the other; `process_run` talks with one of them, and
//!   `lease_queues` has what waits for it.
//! - `restarts` decides whether a lease whose process has died goes on in another one; `recent_deaths` counts
//!   deaths, of a lease's processes and of those on a device.
//! - `snapshots` has the snapshots of this worker's sessions. `snapshot_copies` has them copied, by
//!   way of a `copy_queue` each: `keeper_link` sends them to the lease's keeper, `store_link` writes
//!   them to the `snapshot_store`. `pending_marks` decides when a mark counts as kept there, and
//!   `copy_progress` whether the lease could go on there.
//! - `stored_leases` loads leases from the snapshot store, and deletes the snapshots of leases that have
//!   ended.
//! - `keeper` has the snapshots that other workers send to this one, and those of suspended leases.
//!   `handover` sends the latter to another worker when this one drains.
//! - `lease_usage` counts what leases use of the devices.
//! - `lease_cgroups` bounds the memory of each process.
//! - `kept_uploads` has the uploads that sessions leave or share, by tenant; `upload_queue` verifies what a
//!   process sends.
//! - `kernels` makes the directory of a tenant's compiled kernels.
//! - `describe` lists the host's devices.
//! - `jobs` are queued for [`Supervisor::run`], as they take time.
//! - `host` implements `LeaseHost`, by which the registration controls the leases.
//! - `unrouted` answers connections that belong to no process.

mod activity;
mod copy_progress;
mod copy_queue;
mod describe;
mod grants;
mod handover;
mod host;
mod jobs;
mod keeper;
mod keeper_link;
#[cfg(test)]
mod keeping_laws;
mod kept_uploads;
mod kernels;
mod lease_cgroups;
mod lease_queues;
mod lease_usage;
mod pending_marks;
mod process;
mod process_run;
mod recent_deaths;
mod restarts;
mod running;
#[cfg(test)]
mod sealed_memory;
#[cfg(feature = "testing")]
pub(crate) mod simulated;
mod snapshot_copies;
mod snapshot_store;
pub(crate) mod snapshots;
mod spares;
mod store_link;
mod stored_leases;
mod table;
mod turn_clock;
mod turns;
mod unrouted;
mod upload_queue;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tensord_proto::{
    ids::{LeaseId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{Error, ErrorCode, LeaseGranted},
};
use tensord_transport::{
    Identity, Listener,
    handoff::{Destination, LeaseRouter},
};
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinSet,
    time::{MissedTickBehavior, interval, timeout},
};
use tracing::{info, warn};

pub use self::snapshot_store::OpenStoreError;
pub(crate) use self::{
    describe::{Described, describe},
    snapshot_store::{SnapshotStore, credential_paths},
    table::END_TIMEOUT,
};
use self::{
    handover::Handovers,
    jobs::{JOB_QUEUE, Job},
    keeper::KeptForOthers,
    kept_uploads::KeptUploads,
    kernels::tenant_kernels,
    lease_queues::{KillReason, RunningLease},
    restarts::Restarts,
    snapshots::{SnapshotBounds, Snapshots},
    spares::Spares,
    stored_leases::StoredLeases,
    table::{Action, LeaseTable, Route},
    turns::Turns,
};
use crate::{
    devices::FoundDevice,
    lease_tokens::LeaseTokens,
    locks::lock,
    process_message::{DeviceName, End, Event, OfferedDevice, ProcessSettings, Start, Task},
    start::SWEEP_INTERVAL,
    usage::ledger::UsageLedger,
};

/// Minimum of [`SnapshotBounds::devices`] for the snapshots of other workers' leases, which bounds the number of
/// sessions: each snapshot is an open file.
const MIN_KEPT_DEVICES: usize = 16;

/// Number of tasks that wait for a process to receive them.
const TASK_QUEUE: usize = 64;

/// Number of connections that wait for a process to receive them. More wait in tasks that
/// have a deadline.
const CONNECTION_QUEUE: usize = 4;

/// How long a test op may take, with the start of its process and of the driver.
const PROBE_DEADLINE: Duration = Duration::from_secs(30);

/// A process that does not return a turn within the op timeout and this is killed.
const TURN_GRACE: Duration = Duration::from_secs(1);

/// Number of processes that are started ahead, on a worker of two devices or more.
const MAX_SPARES: usize = 2;

/// Settings of the supervisor. A process gets those that `start_message` copies, and never the
/// identity.
pub(crate) struct SupervisorSettings {
    pub(crate) worker_id: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) identity: Arc<Identity>,
    pub(crate) process_settings: ProcessSettings,
    /// Files and directories that the processes must not open.
    pub(crate) hidden: Vec<Vec<u8>>,
    /// Bytes of memory for uploads of sessions that ended.
    pub(crate) cache_bytes: u64,
    /// Bytes of memory for snapshots of other workers' leases.
    pub(crate) kept_for_others_bytes: u64,
    pub(crate) store: Option<SnapshotStore>,
}

/// Runs the leases of a worker in processes. Most fields are parts that the module lists, each with
/// a lock of its own.
pub(crate) struct Supervisor {
    settings: SupervisorSettings,
    devices: Vec<OfferedDevice>,
    table: Mutex<LeaseTable>,
    leases: Mutex<HashMap<LeaseId, RunningLease>>,
    turns: Mutex<Turns>,
    /// When `turns` must decide again.
    turn_due: watch::Sender<Option<Instant>>,
    spares: Spares,
    kept_uploads: Mutex<KeptUploads>,
    snapshots: Mutex<Snapshots<LeaseId>>,
    /// The snapshots of leases that this worker does not run: those that other workers run, and suspended ones.
    kept_for_others: Mutex<KeptForOthers>,
    /// The leases that are to go on from snapshots on all their workers, as their process here has
    /// died, and how it has ended.
    interrupted: Mutex<HashMap<LeaseId, String>>,
    /// The deaths of processes of leases that have none here now, and may go on here.
    restarts: Mutex<HashMap<LeaseId, Restarts>>,
    stored_leases: Mutex<StoredLeases>,
    handovers: Mutex<Handovers>,
    lease_tokens: LeaseTokens,
    /// Locked last.
    usage: Mutex<UsageLedger>,
    scheduler: Mutex<SchedulerView>,
    /// Work for [`run`](Self::run).
    jobs: mpsc::Sender<Job>,
    /// Leases from which devices were released, not reported to the scheduler yet.
    released: Mutex<Vec<LeaseId>>,
    /// Wakes connections that came before their lease.
    announced: Notify,
    /// Notified when there is something to report to the scheduler.
    reports: Notify,
}

/// The latest messages of the scheduler, for processes that start later.
#[derive(Default)]
struct SchedulerView {
    lease_key: Option<Vec<u8>>,
    /// The scheduler's time, and when it came; `None` while the scheduler is unreachable.
    time_ms: Option<(u64, Instant)>,
}

impl Supervisor {
    /// Creates the supervisor of the devices that were `described`. The returned future must
    /// run for as long as leases are to run.
    pub(crate) fn new(
        described: Described,
        settings: SupervisorSettings,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send + use<>) {
        let (supervisor, queued) = Self::idle(described, settings);
        let run = supervisor.clone().run(queued);
        (supervisor, run)
    }

    /// Creates the supervisor, and returns with it the jobs for [`run`](Self::run).
    fn idle(
        described: Described,
        settings: SupervisorSettings,
    ) -> (Arc<Self>, mpsc::Receiver<Job>) {
        let offered = |(index, found): (u32, &FoundDevice)| OfferedDevice {
            index,
            name: DeviceName::from(&found.selection),
            memory_bytes: found.memory_bytes,
        };
        let devices: Vec<_> = (0..).zip(&described.found).map(offered).collect();
        let spares = MAX_SPARES.min(devices.len());
        let kept_for_others = SnapshotBounds {
            max_bytes: settings.kept_for_others_bytes,
            // A part with more devices than this worker has could not go on here, so not all its sessions need be kept.
            devices: devices.len().max(MIN_KEPT_DEVICES),
        };
        let op_timeout = Duration::from_millis(settings.process_settings.op_timeout_ms);
        let turn_timeout = op_timeout.saturating_add(TURN_GRACE);
        let (jobs, queued) = mpsc::channel(JOB_QUEUE);
        let supervisor = Arc::new(Self {
            table: Mutex::new(LeaseTable::new(devices.len() as u32)),
            leases: Mutex::default(),
            turns: Mutex::new(Turns::new(turn_timeout)),
            turn_due: watch::Sender::new(None),
            spares: Spares::new(described.spawner, spares),
            kept_uploads: Mutex::new(KeptUploads::new(settings.cache_bytes)),
            snapshots: Mutex::default(),
            kept_for_others: Mutex::new(KeptForOthers::new(kept_for_others)),
            interrupted: Mutex::default(),
            restarts: Mutex::default(),
            stored_leases: Mutex::default(),
            handovers: Mutex::default(),
            lease_tokens: LeaseTokens::new(settings.worker_id),
            usage: Mutex::default(),
            scheduler: Mutex::default(),
            jobs,
            released: Mutex::default(),
            announced: Notify::new(),
            reports: Notify::new(),
            devices,
            settings,
        });
        (supervisor, queued)
    }

    /// Serves the connections that belong to no process, forever.
    pub(crate) async fn accept(self: Arc<Self>, mut listener: Listener) {
        let mut connections = JoinSet::new();
        loop {
            let link = listener.accept().await;
            while connections.try_join_next().is_some() {}
            connections.spawn(unrouted::serve(self.clone(), link));
        }
    }

    /// Runs a Tokio task for each lease and each test of a device. Dropping the future kills their
    /// processes.
    async fn run(self: Arc<Self>, mut jobs: mpsc::Receiver<Job>) {
        let mut running = JoinSet::new();
        // Aborted when this function's future is dropped, as `running` is.
        let mut turn_clock = JoinSet::new();
        turn_clock.spawn(self.clone().run_turn_clock());
        let mut ticks = interval(SWEEP_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut refill = std::pin::pin!(self.spares.refill());
        loop {
            while running.try_join_next().is_some() {}
            let job = tokio::select! {
                job = jobs.recv() => job,
                _ = ticks.tick() => {
                    self.update(|table, now| table.tick(now));
                    lock(&self.kept_for_others).expire(Instant::now());
                    self.list_stored_if_due();
                    continue;
                }
                () = &mut refill => continue,
            };
            match job {
                Some(Job::RunLease(lease, queues)) => {
                    running.spawn(self.clone().run_lease(lease, queues));
                }
                Some(Job::Probe(device)) => {
                    running.spawn(self.clone().probe(device));
                }
                Some(Job::ListStored) => {
                    running.spawn(self.clone().list_stored());
                }
                Some(Job::DropStored(leases)) => {
                    running.spawn(self.clone().delete_stored(leases));
                }
                Some(Job::HandOver(part, keeper)) => {
                    running.spawn(self.clone().hand_over(part, *keeper));
                }
                None => return,
            }
        }
    }

    /// Changes the table, and executes what it decides.
    fn update(&self, change: impl FnOnce(&mut LeaseTable, Instant) -> Vec<Action>) {
        let actions = change(&mut lock(&self.table), Instant::now());
        actions.into_iter().for_each(|action| self.execute(action));
    }

    fn execute(&self, action: Action) {
        match action {
            Action::Start(lease) => {
                let queues = lock(&self.leases)
                    .get_mut(&lease)
                    .and_then(|lease| lease.queues.take());
                if let Some(queues) = queues {
                    self.queue(Job::RunLease(lease, Box::new(queues)));
                }
            }
            Action::End(lease, reason) => {
                if let Some(running) = lock(&self.leases).get(&lease) {
                    running.send(Task::End(End {
                        error: Error::new(ErrorCode::Lease, reason),
                        goes_on: running.is_suspended,
                    }));
                }
            }
            Action::Kill(lease) => {
                if let Some(running) = lock(&self.leases).get(&lease) {
                    warn!(%lease, "the process of the lease did not end within {END_TIMEOUT:?} and is killed");
                    running.kill.send_replace(Some(KillReason::NotEnded));
                }
            }
            Action::Forget(lease) => {
                self.update_turns(|turns, now| turns.forget(now, lease));
                lock(&self.usage).released(Instant::now(), lease);
                lock(&self.interrupted).remove(&lease);
                self.put_snapshots_away(lease);
                let forgotten = lock(&self.leases).remove(&lease);
                if forgotten.is_some_and(|lease| lease.is_over) {
                    self.queue(Job::DropStored(vec![lease]));
                }
            }
            Action::Released(lease) => {
                lock(&self.released).push(lease);
                self.reports.notify_one();
            }
            Action::HealthChanged => self.reports.notify_one(),
            Action::Probe(device) => self.queue(Job::Probe(device)),
        }
    }

    /// Forgets the snapshots of a lease that goes on in no process here. If the lease is suspended, they
    /// are held until it is resumed.
    fn put_snapshots_away(&self, lease: LeaseId) {
        let own = lock(&self.snapshots).of(lease);
        lock(&self.snapshots).forget_lease(lease);
        let leases = lock(&self.leases);
        let suspended = leases.get(&lease).filter(|lease| lease.is_suspended);
        match suspended {
            // Those of other parts may be kept here, and its own ones may be held by now.
            Some(_) if own.is_empty() => lock(&self.kept_for_others).hold(lease),
            Some(running) => {
                lock(&self.kept_for_others).hold_own(running.part, &running.tenant, own)
            }
            None => drop(lock(&self.restarts).remove(&lease)),
        }
    }

    /// Sends a task to all processes of leases.
    fn broadcast(&self, task: &Task) {
        lock(&self.leases)
            .values()
            .for_each(|lease| lease.send(task.clone()));
    }

    /// Runs a test op on a device, in a process of its own.
    async fn probe(self: Arc<Self>, index: u32) {
        let offered = self.devices.iter().find(|device| device.index == index);
        let Some(offered) = offered.cloned() else {
            return;
        };
        let mut tested = None;
        let testing = async {
            let process = self.spares.take().await.map_err(|e| e.to_string())?;
            let process = tested.insert(process);
            let sent = process.send(Task::Probe(offered), None).await;
            sent.map_err(|e| e.to_string())?;
            match process.recv().await {
                Some(Event::Passed(_)) => Ok(()),
                Some(Event::Failed(reason)) => Err(sanitize(&reason, MESSAGE_CHARS).to_string()),
                _ => Err(format!(
                    "the process that tested it has ended: {}",
                    process.exit().await
                )),
            }
        };
        let result = timeout(PROBE_DEADLINE, testing).await;
        let result = result
            .unwrap_or_else(|_| Err(format!("a test op has not ended within {PROBE_DEADLINE:?}")));
        // Nothing else uses a device while it is tested.
        if let Some(mut process) = tested {
            process.kill();
            process.exit().await;
        }
        match &result {
            Ok(()) => info!(device = index, "the device is in service again"),
            Err(reason) => warn!(device = index, "the device is out of service: {reason}"),
        }
        self.update(|table, now| table.probed(now, index, result));
    }

    /// Returns all that a process needs to run a lease.
    fn start_message(&self, granted: LeaseGranted, epoch: u64) -> Result<Start, String> {
        let SupervisorSettings {
            worker_id,
            worker_name,
            identity,
            process_settings,
            hidden,
            cache_bytes: _,
            kept_for_others_bytes: _,
            store: _,
        } = &self.settings;
        let issued = identity.issue_for_lease(LeaseId(granted.lease_id));
        let issued = issued.map_err(|e| e.to_string())?;
        let mut settings = process_settings.clone();
        settings.kernel_cache = settings
            .kernel_cache
            .and_then(|root| tenant_kernels(&root, &granted.tenant));
        let devices = self.granted_devices(&granted);
        settings.snapshot_bytes = self.snapshot_bytes(settings.snapshot_bytes, &devices);
        Ok(Start {
            devices,
            worker_id: worker_id.0,
            worker_name: worker_name.clone(),
            certificate_chain: issued.chain,
            private_key: issued.key,
            settings,
            hidden: hidden.clone(),
            granted,
            epoch,
        })
    }
}

impl LeaseRouter for Supervisor {
    fn destination(&self, lease: LeaseId) -> Destination {
        let route = lock(&self.table).route(lease);
        match (route, lock(&self.leases).get(&lease)) {
            (Route::Process, Some(running)) => Destination::Process(running.connections.clone()),
            (Route::Unknown, _) => Destination::Unknown,
            _ => Destination::Here,
        }
    }

    fn announced(&self) -> &Notify {
        &self.announced
    }
}
