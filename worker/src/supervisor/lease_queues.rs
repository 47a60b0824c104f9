//! What is queued for the process of a lease, from all parts of the supervisor.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex},
    time::Instant,
};

use tensord_proto::{
    ids::{LeaseId, PartId, StoreId},
    v1::LeaseGranted,
};
use tensord_transport::handoff::Passed;
use tokio::sync::{mpsc, watch};

use super::{
    CONNECTION_QUEUE, TASK_QUEUE,
    activity::Activity,
    copy_progress::CopyProgress,
    keeper_link::{Assignment, Keeper},
    kept_uploads::KeptSegment,
    restarts::Restarts,
    snapshots::{KeptBase, KeptSnapshot},
    table::END_TIMEOUT,
};
use crate::{
    blobs::shared::Segment,
    memory_file::MemoryFile,
    process_message::{KeptUploads, Report, Task},
};

/// A lease that has a process, or waits for one.
pub(super) struct RunningLease {
    /// Which part of the lease runs here.
    pub(super) part: PartId,
    pub(super) tenant: String,
    tasks: mpsc::Sender<QueuedTask>,
    pub(super) connections: mpsc::Sender<Passed>,
    /// Set to have the process killed.
    pub(super) kill: watch::Sender<Option<KillReason>>,
    /// The worker that keeps the lease's snapshots.
    pub(super) keeper: watch::Sender<Option<Keeper>>,
    pub(super) progress: Arc<Mutex<CopyProgress<Assignment>>>,
    pub(super) store_progress: Arc<Mutex<CopyProgress<StoreId>>>,
    /// Whether the lease has ended for good, and not only here: what the snapshot store has of it is
    /// deleted when its process has exited.
    pub(super) is_over: bool,
    /// Whether the lease is suspended: its snapshots are held when its process has ended.
    pub(super) is_suspended: bool,
    /// The process's latest report, as far as it is plausible.
    pub(super) report: Arc<Mutex<Report>>,
    pub(super) activity: Activity,
    /// The other ends, until the process is started.
    pub(super) queues: Option<LeaseQueues>,
}

/// Why the worker kills a process.
#[derive(Debug, Clone, Copy)]
pub(super) enum KillReason {
    /// It was to end its sessions, and did not.
    NotEnded,
    /// It has not returned the turn of this device.
    KeepsDevice(u32),
    /// It does not read its messages.
    ReadsNothing,
    /// Its lease is forgotten.
    Forgotten,
}

impl fmt::Display for KillReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEnded => write!(f, "it did not end its sessions within {END_TIMEOUT:?}"),
            Self::KeepsDevice(device) => write!(
                f,
                "it did not return device {device} in time, for which another lease waits"
            ),
            Self::ReadsNothing => write!(f, "it left {TASK_QUEUE} messages unread"),
            Self::Forgotten => f.write_str("its lease is over"),
        }?;
        f.write_str(" and was killed")
    }
}

/// Waits until a process is to be killed.
pub(super) async fn killed(kill: &mut watch::Receiver<Option<KillReason>>) -> KillReason {
    let reason = kill.wait_for(Option::is_some).await;
    reason
        .ok()
        .and_then(|reason| *reason)
        .unwrap_or(KillReason::Forgotten)
}

/// A task, with the memory that it passes on.
pub(super) struct QueuedTask {
    pub(super) task: Task,
    pub(super) memory: Option<PassedMemory>,
}

/// Memory that is passed on to a process.
pub(super) enum PassedMemory {
    Uploads(Segment),
    Snapshot(Arc<MemoryFile>),
}

impl PassedMemory {
    pub(super) fn file(&self) -> &Arc<MemoryFile> {
        match self {
            Self::Uploads(segment) => &segment.file,
            Self::Snapshot(file) => file,
        }
    }
}

impl From<Task> for QueuedTask {
    fn from(task: Task) -> Self {
        Self { task, memory: None }
    }
}

/// The receiving ends, for the Tokio task that runs the lease's process.
pub(super) struct LeaseQueues {
    pub(super) granted: LeaseGranted,
    pub(super) tasks: mpsc::Receiver<QueuedTask>,
    pub(super) connections: mpsc::Receiver<Passed>,
    pub(super) kill: watch::Receiver<Option<KillReason>>,
    pub(super) keeper: watch::Receiver<Option<Keeper>>,
    pub(super) progress: Arc<Mutex<CopyProgress<Assignment>>>,
    pub(super) store_progress: Arc<Mutex<CopyProgress<StoreId>>>,
    pub(super) report: Arc<Mutex<Report>>,
    /// Tasks left from the previous process, sent before those in `tasks`.
    pub(super) first: Vec<QueuedTask>,
    /// The deaths of the lease's processes here.
    pub(super) restarts: Restarts,
}

impl LeaseQueues {
    /// Drops the tasks for a process that has died, other than those that end the lease: the next
    /// process gets the scheduler's latest key and time, the snapshots and the uploads anyway.
    pub(super) fn keep_ends(&mut self) {
        let mut ends = Vec::new();
        while let Ok(queued) = self.tasks.try_recv() {
            if let Task::End(_) = queued.task {
                ends.push(queued);
            }
        }
        self.first = ends;
    }
}

/// Returns which part of a lease was granted.
pub(super) fn part_of(granted: &LeaseGranted) -> PartId {
    PartId {
        lease: LeaseId(granted.lease_id),
        index: granted.part,
    }
}

impl RunningLease {
    pub(super) fn new(granted: LeaseGranted, restarts: Restarts) -> Self {
        let (tasks, queued_tasks) = mpsc::channel(TASK_QUEUE);
        let (connections, queued_connections) = mpsc::channel(CONNECTION_QUEUE);
        let (kill, killed) = watch::channel(None);
        let (keeper, keepers) = watch::channel(None);
        // The lease is about to be used.
        let report = Report {
            live_sessions: 1,
            ..Report::default()
        };
        let report = Arc::new(Mutex::new(report));
        let progress = Arc::<Mutex<CopyProgress<Assignment>>>::default();
        let store_progress = Arc::<Mutex<CopyProgress<StoreId>>>::default();
        let tenant = granted.tenant.clone();
        let part = part_of(&granted);
        let queues = LeaseQueues {
            granted,
            tasks: queued_tasks,
            connections: queued_connections,
            kill: killed,
            keeper: keepers,
            progress: progress.clone(),
            store_progress: store_progress.clone(),
            report: report.clone(),
            first: Vec::new(),
            restarts,
        };
        Self {
            part,
            tenant,
            tasks,
            connections,
            kill,
            keeper,
            progress,
            store_progress,
            is_over: false,
            is_suspended: false,
            report,
            activity: Activity::new(Instant::now()),
            queues: Some(queues),
        }
    }

    /// Queues a task. A process that lets the queue fill up reads nothing, and is killed, unless
    /// the task is one that it can do without.
    pub(super) fn send(&self, task: Task) {
        self.queue(task.into());
    }

    pub(super) fn queue(&self, task: QueuedTask) {
        if let Err(mpsc::error::TrySendError::Full(dropped)) = self.tasks.try_send(task)
            && !dropped.is_expendable()
        {
            self.kill.send_replace(Some(KillReason::ReadsNothing));
        }
    }
}

impl QueuedTask {
    /// Returns whether a process needs the task only to be faster, or another of its kind follows
    /// soon.
    pub(super) fn is_expendable(&self) -> bool {
        matches!(
            self.task,
            Task::Uploads(_) | Task::Time(_) | Task::Unreachable(_) | Task::QueryMemory(_)
        )
    }

    /// Returns whether the task passes on uploads that the worker keeps.
    pub(super) fn is_uploads(&self) -> bool {
        matches!(self.task, Task::Uploads(_))
    }

    pub(super) fn of_uploads(kept: KeptSegment) -> Self {
        let task = Task::Uploads(KeptUploads {
            sizes_bytes: kept.segment.sizes_bytes.clone(),
            hashes: kept.hashes.concat(),
            number: 0,
        });
        Self {
            task,
            memory: Some(PassedMemory::Uploads(kept.segment)),
        }
    }

    /// Returns the tasks that pass on the snapshots of a lease, and each of their bases once.
    pub(super) fn of_snapshots(snapshots: Vec<KeptSnapshot>) -> Vec<Self> {
        let mut passed = BTreeSet::new();
        let mut tasks = Vec::new();
        for KeptSnapshot {
            info, file, base, ..
        } in snapshots
        {
            let is_new = |base: &KeptBase| passed.insert((info.session_id, base.id));
            tasks.extend(base.filter(is_new).map(|base| Self {
                task: Task::SnapshotBase(info),
                memory: Some(PassedMemory::Snapshot(base.file)),
            }));
            tasks.push(Self {
                task: Task::Snapshot(info),
                memory: Some(PassedMemory::Snapshot(file)),
            });
        }
        tasks
    }
}
