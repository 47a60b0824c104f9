//! Runs a lease in one process after the other: how each begins and ends. `process_run` has what
//! happens in between.

use std::{collections::BTreeMap, os::fd::AsFd, sync::Arc, thread, time::Instant};

use tensord_proto::{
    ids::{LeaseId, SessionId},
    share::WHOLE_PERMILLE,
};
use tokio::task::JoinSet;
use tracing::{debug, error, info, warn};

use super::{
    Supervisor,
    keeper_link::KeeperLink,
    lease_queues::{LeaseQueues, QueuedTask, killed, part_of},
    process::Process,
    process_run::ProcessRun,
    restarts::Restarts,
    snapshot_copies::SnapshotCopies,
    snapshots::SnapshotBounds,
    store_link::StoreLink,
};
use crate::{
    locks::lock,
    op_record::OpRecords,
    process_message::{Empty, OfferedDevice, Report, Start, Task},
};

impl Supervisor {
    /// Runs a lease until it has ended, in one process after the other.
    pub(super) async fn run_lease(self: Arc<Self>, lease: LeaseId, mut queues: Box<LeaseQueues>) {
        let _released = ReleasedIfPanicked {
            supervisor: &self,
            lease,
        };
        let mut restarts = std::mem::take(&mut queues.restarts);
        let devices = queues.granted.grants.len();
        let keepers = queues.keeper.clone();
        let progress = queues.progress.clone();
        if let Err(reason) = self.load_stored(lease, &mut queues).await {
            return self.cannot_run(lease, &queues, &reason);
        }
        let part = part_of(&queues.granted);
        let (link, keeper) = KeeperLink::new(self.clone(), part, devices, keepers, progress);
        // Aborted when this task ends.
        let mut copying = JoinSet::new();
        copying.spawn(link.run());
        let stored = self.stored_part(lease, &queues.granted);
        let store = stored.map(|stored| {
            let progress = queues.store_progress.clone();
            let (link, queue) = StoreLink::new(self.clone(), lease, devices, stored, progress);
            copying.spawn(link.run());
            queue
        });
        let mut copies = SnapshotCopies::new(keeper, store);
        while self
            .run_process(lease, &mut queues, &mut restarts, &mut copies)
            .await
        {
            queues.keep_ends();
            copies.process_died();
        }
    }

    /// Runs a lease in a process until the process has exited. Returns whether the lease goes on in
    /// another process.
    async fn run_process(
        &self,
        lease: LeaseId,
        queues: &mut LeaseQueues,
        restarts: &mut Restarts,
        copies: &mut SnapshotCopies,
    ) -> bool {
        let mut kill = queues.kill.clone();
        let prepared = tokio::select! {
            biased;
            reason = killed(&mut kill) => Err(format!("before it had a process, {reason}")),
            prepared = self.prepare(queues, restarts) => prepared,
        };
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(reason) => {
                self.cannot_run(lease, queues, &reason);
                return false;
            }
        };
        let ended = self.serve_process(prepared, queues, restarts, copies).await;
        self.process_ended(lease, queues, restarts, ended)
    }

    /// Records that a process of a lease has exited. Returns whether the lease goes on in another
    /// process.
    pub(super) fn process_ended(
        &self,
        lease: LeaseId,
        queues: &LeaseQueues,
        restarts: &mut Restarts,
        ended: ProcessEnd,
    ) -> bool {
        lock(&self.usage).process_exited(Instant::now(), lease);
        let ProcessEnd { how, ops, has_died } = ended;
        self.update_turns(|turns, now| turns.remove(now, lease));
        let worker = &self.settings.worker_name;
        let mut how = format!("the process of lease {lease} on worker {worker} has ended: {how}");
        if has_died && self.can_restart(lease) {
            match restarts.died(Instant::now(), &ops) {
                Ok(()) if queues.granted.has_other_workers => {
                    lock(&self.restarts).insert(lease, std::mem::take(restarts));
                    self.interrupt(lease, queues, &how);
                    return false;
                }
                Ok(()) => {
                    lock(&self.table).restarted(Instant::now(), lease);
                    warn!(%lease, "{how}; the lease goes on in another process");
                    return true;
                }
                Err(reason) => how = format!("{how}; {reason}"),
            }
        }
        let leases = lock(&self.leases);
        let is_suspended = leases.get(&lease).is_some_and(|it| it.is_suspended);
        drop(leases);
        if is_suspended {
            lock(&self.restarts).insert(lease, std::mem::take(restarts));
        }
        self.forget_process(lease, queues);
        info!(%lease, "{how}");
        self.update(|table, now| table.exited(now, lease, &how));
        // The scheduler must not take the lease for one that could go on.
        self.reports.notify_one();
        false
    }

    /// Ends a lease that cannot run here.
    fn cannot_run(&self, lease: LeaseId, queues: &LeaseQueues, reason: &str) {
        let worker = &self.settings.worker_name;
        let reason = format!("worker {worker} cannot run the lease: {reason}");
        error!(%lease, "{reason}");
        self.forget_process(lease, queues);
        self.update(|table, _| table.stopped(lease, &reason));
    }

    /// Has the scheduler learn that a process has died of a lease that has devices of other workers,
    /// too. The lease then goes on from snapshots on all of them. Those of its sessions here are kept
    /// until the scheduler ends the lease here.
    fn interrupt(&self, lease: LeaseId, queues: &LeaseQueues, how: &str) {
        warn!(%lease, "{how}; the lease waits to go on from its snapshots on all its workers");
        // Before the report is empty: a heartbeat must not report that there are no snapshots.
        lock(&self.interrupted).insert(lease, how.to_owned());
        *lock(&queues.report) = Report::default();
        self.update(|table, now| {
            table.restarted(now, lease);
            table.stopped(lease, how)
        });
        self.reports.notify_one();
    }

    /// Takes a process for a lease, and makes what it needs.
    async fn prepare(&self, queues: &LeaseQueues, restarts: &Restarts) -> Result<Prepared, String> {
        let began = Instant::now();
        let start = self.start_message(queues.granted.clone(), restarts.epoch())?;
        let records = OpRecords::new(start.devices.len());
        let records = records.map_err(|e| format!("cannot record ops: {e}"))?;
        let process = self.spares.take().await.map_err(|e| e.to_string())?;
        Ok(Prepared {
            process,
            start,
            records,
            began,
        })
    }

    /// Serves the process of a lease until it has exited.
    async fn serve_process(
        &self,
        prepared: Prepared,
        queues: &mut LeaseQueues,
        restarts: &mut Restarts,
        copies: &mut SnapshotCopies,
    ) -> ProcessEnd {
        let Prepared {
            mut process,
            start,
            records,
            began,
        } = prepared;
        let lease = LeaseId(queues.granted.lease_id);
        let tenant = queues.granted.tenant.clone();
        let tasks = self.first_tasks(lease, &tenant, queues);
        let (max_bytes, devices) = (start.settings.snapshot_bytes, start.devices.len());
        let mut run = ProcessRun {
            lease,
            tenant,
            held: Vec::new(),
            segments_sent: 0,
            reported_at: None,
            has_had_sessions: false,
            has_ended: false,
            devices: weights(&start),
            began,
            failure: None,
            new_base: None,
            snapshot_bounds: (max_bytes > 0).then_some(SnapshotBounds { max_bytes, devices }),
            restarts,
            copies,
        };
        limit_memory(lease, &mut process, &start);
        let mut kill = queues.kill.clone();
        let running = async {
            let records = Some(records.file().as_fd());
            process.send(Task::Start(start), records).await?;
            run.serve(self, &mut process, queues, tasks).await
        };
        let ended = tokio::select! {
            biased;
            reason = killed(&mut kill) => Err(reason.to_string()),
            ended = running => ended,
        };
        if let Err(reason) = &ended
            && !process.is_closed()
        {
            debug!(%lease, "the process of the lease is killed: {reason}");
            process.kill();
        }
        let exit = process.exit().await;
        let out_of_memory = process.out_of_memory();
        // If this worker has killed the process, or the process has reported a failure, the next
        // one would end in the same way.
        let has_died = (ended.is_ok() || process.is_closed()) && run.failure.is_none();
        let how = match (run.failure.or(out_of_memory), ended) {
            (Some(failure), _) => failure,
            (None, Err(reason)) if !process.is_closed() => reason,
            (None, _) => exit,
        };
        drop(process);
        let ops = records.read();
        let current: Vec<_> = ops.values().map(String::as_str).collect();
        let how = match current.is_empty() {
            true => how,
            false => format!("{how}, in {}", current.join(" and ")),
        };
        ProcessEnd { how, ops, has_died }
    }

    /// Returns the tasks with which a process begins: what it must know of the scheduler, the
    /// snapshots of the lease and the uploads of its tenant, and what was queued before.
    pub(super) fn first_tasks(
        &self,
        lease: LeaseId,
        tenant: &str,
        queues: &mut LeaseQueues,
    ) -> Vec<QueuedTask> {
        let known = self.scheduler_tasks().into_iter().map(QueuedTask::from);
        let snapshots = lock(&self.snapshots).of(lease);
        for snapshot in &snapshots {
            // The client may commit the mark from which it goes on.
            let session = SessionId(snapshot.info.session_id);
            let mark = snapshot.info.mark;
            lock(&queues.progress).require(session, mark);
            lock(&queues.store_progress).require(session, mark);
        }
        let kept = lock(&self.kept_uploads).segments_of(tenant);
        known
            .chain(QueuedTask::of_snapshots(snapshots))
            .chain(kept.into_iter().map(QueuedTask::of_uploads))
            .chain(std::mem::take(&mut queues.first))
            .collect()
    }

    /// Forgets the last report of a lease that goes on in no process, and its snapshots if it is not
    /// suspended.
    fn forget_process(&self, lease: LeaseId, queues: &LeaseQueues) {
        *lock(&queues.report) = Report::default();
        self.put_snapshots_away(lease);
    }

    /// Returns whether a lease whose process has died can go on in another one.
    fn can_restart(&self, lease: LeaseId) -> bool {
        lock(&self.table).is_running(lease) && lock(&self.snapshots).has(lease)
    }

    /// Returns the tasks by which a new process learns the scheduler's latest key and time.
    fn scheduler_tasks(&self) -> Vec<Task> {
        let scheduler = lock(&self.scheduler);
        let key = scheduler.lease_key.clone().map(Task::LeaseKey);
        let time = match scheduler.time_ms {
            Some((time_ms, at)) => {
                Task::Time(time_ms.saturating_add(at.elapsed().as_millis() as u64))
            }
            None => Task::Unreachable(Empty {}),
        };
        key.into_iter().chain([time]).collect()
    }
}

/// Ends a lease whose task panics, so that its devices do not stay in use.
struct ReleasedIfPanicked<'a> {
    supervisor: &'a Supervisor,
    lease: LeaseId,
}

impl Drop for ReleasedIfPanicked<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let how = "the worker has panicked while it ran the lease; its log says where";
            let (supervisor, lease) = (self.supervisor, self.lease);
            lock(&supervisor.usage).process_exited(Instant::now(), lease);
            supervisor.update_turns(|turns, now| turns.remove(now, lease));
            supervisor.put_snapshots_away(lease);
            supervisor.update(|table, now| table.exited(now, lease, how));
            supervisor.reports.notify_one();
        }
    }
}

/// A process for a lease, and what it needs.
struct Prepared {
    process: Process,
    start: Start,
    records: OpRecords,
    /// When the worker began to prepare it.
    began: Instant,
}

/// How the process of a lease has ended.
pub(super) struct ProcessEnd {
    /// The reason for people.
    pub(super) how: String,
    /// The ops that its devices were executing, by the position of the device.
    pub(super) ops: BTreeMap<usize, String>,
    /// Whether the process has died by itself: the worker has not killed it, and it has reported no failure.
    pub(super) has_died: bool,
}

/// Returns the devices of a lease, with its weights for turns of them: the thousandths of its shares.
fn weights(start: &Start) -> BTreeMap<u32, u32> {
    let weight = |device: &OfferedDevice| {
        let mut grants = start.granted.grants.iter();
        let grant = grants.find(|grant| grant.device_index == device.index);
        let share = grant.and_then(|grant| grant.share);
        let permille = share.map_or(WHOLE_PERMILLE, |share| share.permille);
        (device.index, permille)
    };
    start.devices.iter().map(weight).collect()
}

/// Bounds the memory of the lease's process, if this worker may.
fn limit_memory(lease: LeaseId, process: &mut Process, start: &Start) {
    let device_bytes = start.devices.iter().map(|device| device.memory_bytes);
    let device_bytes = device_bytes.fold(0, u64::saturating_add);
    // The kernel charges shared memory to the group of the process that has written to it: snapshots,
    // and copies of the uploads that the sessions keep.
    let settings = &start.settings;
    let kept_bytes = settings
        .restored_kept_limit_bytes
        .saturating_mul(start.devices.len() as u64);
    let bytes = device_bytes
        .saturating_add(settings.snapshot_bytes)
        .saturating_add(kept_bytes);
    if let Err(e) = process.limit_memory(bytes) {
        warn!(%lease, "the memory of the lease's process is not bounded: cannot limit its control group: {e}");
    }
}
