//! What the worker does while a process runs a lease: it exchanges messages with the process.

use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tensord_proto::{
    content::MAX_HELD,
    ids::{LeaseId, SessionId},
    text::{MESSAGE_CHARS, sanitize},
};
use tensord_transport::handoff::Passed;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::{
    Supervisor,
    lease_queues::{LeaseQueues, PassedMemory, QueuedTask},
    process::{Process, SendError},
    restarts::Restarts,
    snapshot_copies::SnapshotCopies,
    snapshots::{Refused, SnapshotBounds, SnapshotFiles},
    upload_queue::UploadQueue,
};
use crate::{
    blobs::shared::SegmentError,
    locks::lock,
    memory_file::MemoryFile,
    process_message::{Event, PassedConnection, Report, SnapshotInfo, SnapshotKept, Task},
};

/// Most segments of kept uploads that a process gets: each is an open file of the worker until
/// the lease ends.
const MAX_SEGMENTS_HELD: usize = 64;

/// Most segments of uploads that the worker takes from one process.
const MAX_SEGMENTS_SENT: u32 = 1024;

/// Most workers of a lease that a process may report as missing.
const MAX_MISSING_PEERS: usize = 64;

/// Shortest time between reports to the scheduler that one process causes. Heartbeats have what
/// is left out.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// How long the worker goes on to keep uploads of a process that has sent its last message. The devices of its
/// lease are not free before.
const UPLOADS_TIMEOUT: Duration = Duration::from_secs(5);

/// The run of a lease in one process.
pub(super) struct ProcessRun<'a> {
    pub(super) lease: LeaseId,
    pub(super) tenant: String,
    /// The segments of uploads that the process has.
    pub(super) held: Vec<Arc<MemoryFile>>,
    /// Number of segments that the process has sent.
    pub(super) segments_sent: u32,
    /// When the process last caused a report to the scheduler.
    pub(super) reported_at: Option<Instant>,
    /// Until a program has opened a session, the lease counts as one session, so that a worker
    /// that drains waits for it.
    pub(super) has_had_sessions: bool,
    /// Whether the process has ended its sessions and sent its last message.
    pub(super) has_ended: bool,
    /// The lease's devices, with its weight for turns of each.
    pub(super) devices: BTreeMap<u32, u32>,
    pub(super) began: Instant,
    /// Why the process cannot run the lease, in its own words.
    pub(super) failure: Option<String>,
    /// Bounds of the lease's snapshots; `None` if it has none.
    pub(super) snapshot_bounds: Option<SnapshotBounds>,
    /// The base that the process has sent last, and its snapshot, which follows.
    pub(super) new_base: Option<(SnapshotInfo, MemoryFile)>,
    pub(super) restarts: &'a mut Restarts,
    pub(super) copies: &'a mut SnapshotCopies,
}

impl ProcessRun<'_> {
    /// Exchanges messages with the process until the process closes its channel or sends something
    /// malformed. An error is the reason to kill the process. May be dropped at any time, if the process is
    /// killed then.
    pub(super) async fn serve(
        &mut self,
        supervisor: &Supervisor,
        process: &mut Process,
        queues: &mut LeaseQueues,
        first: Vec<QueuedTask>,
    ) -> Result<(), String> {
        let (mut uploads, first): (Vec<_>, Vec<_>) =
            first.into_iter().partition(QueuedTask::is_uploads);
        for task in first {
            self.send(process, task).await?;
        }
        let mut uploads_sent = UploadQueue::new(supervisor, self.tenant.clone());
        loop {
            tokio::select! {
                Some(task) = queues.tasks.recv() => self.send(process, task).await?,
                // A session is offered the uploads when it is opened.
                Some(connection) = queues.connections.recv(), if uploads.is_empty() => {
                    self.pass_on(process, &connection).await?;
                }
                done = uploads_sent.kept() => confirm_uploads(process, done?).await?,
                kept = self.copies.kept() => {
                    self.send(process, Task::SnapshotKept(kept).into()).await?;
                }
                received = process.recv_with() => match received {
                    Some((event, Some(file))) => {
                        let (uploads, latest) = (&mut uploads_sent, &queues.report);
                        self.on_event_with(supervisor, process, uploads, latest, event, file)
                            .await?;
                    }
                    Some((event, None)) => {
                        if matches!(event, Event::Started(_)) {
                            // Until it has started, the process reads nothing, and the uploads
                            // may not all fit into the socket.
                            for task in std::mem::take(&mut uploads) {
                                self.send(process, task).await?;
                            }
                        }
                        if let Some(event) = self.without_file(process, event).await? {
                            self.on_event(supervisor, &queues.report, event)?;
                        }
                    }
                    None => break,
                },
            }
        }
        if !self.has_ended {
            // It has died. Its uploads would hold up the report of that.
            return Ok(());
        }
        match timeout(UPLOADS_TIMEOUT, uploads_sent.all_kept()).await {
            Ok(kept) => kept,
            Err(_) => {
                debug!(lease = %self.lease, "not all uploads are kept, as that takes longer than {UPLOADS_TIMEOUT:?}");
                Ok(())
            }
        }
    }

    /// Passes a connection on to the process, unless the system refuses that.
    async fn pass_on(&self, process: &mut Process, connection: &Passed) -> Result<(), SendError> {
        let (socket, first) = connection.parts();
        let first_datagram = first.map(|first| first.to_vec());
        let task = Task::Connection(PassedConnection { first_datagram });
        match process.send(task, Some(socket)).await {
            // The client dials again.
            Err(e @ SendError::Refused(_)) => {
                warn!(lease = %self.lease, "dropped a connection to the process of the lease: {e}");
                Ok(())
            }
            sent => sent,
        }
    }

    /// Processes an event that came with a file in memory.
    async fn on_event_with(
        &mut self,
        supervisor: &Supervisor,
        process: &mut Process,
        uploads_sent: &mut UploadQueue<'_>,
        latest: &Mutex<Report>,
        event: Event,
        file: MemoryFile,
    ) -> Result<(), String> {
        match event {
            Event::Uploads(uploads) => {
                if uploads.sizes_bytes.len() > MAX_HELD || !uploads.hashes.is_empty() {
                    return Err(SegmentError::Violation.to_string());
                }
                self.segments_sent = self.segments_sent.saturating_add(1);
                let number = uploads.number;
                let is_queued =
                    self.segments_sent <= MAX_SEGMENTS_SENT && uploads_sent.push(uploads, file);
                if !is_queued {
                    confirm_uploads(process, number).await?;
                }
            }
            // The snapshot follows.
            Event::SnapshotBase(info) if self.snapshot_bounds.is_some() => {
                self.new_base = Some((info, file));
            }
            Event::Snapshot(info) => {
                if let Some(kept) = self.keep_snapshot(supervisor, info, file)? {
                    self.send(process, Task::SnapshotKept(kept).into()).await?;
                }
            }
            event => self.on_event(supervisor, latest, event)?,
        }
        Ok(())
    }

    /// Replies to an event whose file is lost, as this worker may open no more. Returns any other event.
    async fn without_file(
        &mut self,
        process: &mut Process,
        event: Event,
    ) -> Result<Option<Event>, SendError> {
        match event {
            Event::Uploads(uploads) => confirm_uploads(process, uploads.number).await?,
            Event::SnapshotBase(_) => {}
            Event::Snapshot(info) => {
                let kept = info.reply("the worker may open no more files".into());
                self.send(process, Task::SnapshotKept(kept).into()).await?;
            }
            event => return Ok(Some(event)),
        }
        Ok(None)
    }

    /// Keeps a snapshot, if there is room, and has it copied. Returns the reply to the process, unless
    /// the copies have to be made first. An error is the rule that the process
    /// broke.
    pub(super) fn keep_snapshot(
        &mut self,
        supervisor: &Supervisor,
        info: SnapshotInfo,
        file: MemoryFile,
    ) -> Result<Option<SnapshotKept>, String> {
        let Some(bounds) = self.snapshot_bounds else {
            return Err("it sent a snapshot, and its lease takes none".into());
        };
        let (epoch, session) = (self.restarts.epoch(), SessionId(info.session_id));
        // The base may be of an earlier snapshot, which the system did not let the process send.
        let base = self.new_base.take().filter(|(of, _)| *of == info);
        let base = base.map(|(_, base)| base);
        let mut snapshots = lock(&supervisor.snapshots);
        let files = SnapshotFiles { file, base };
        let added = snapshots.add(self.lease, bounds, epoch, info, files);
        drop(snapshots);
        let error = match added {
            Ok(()) => {
                self.restarts.kept(session, info.mark);
                if self.copies.send(session, info.mark) {
                    return Ok(None);
                }
                String::new()
            }
            Err(Refused::NotKept(reason)) => reason,
            Err(Refused::Violation(rule)) => {
                return Err(format!("it sent a snapshot that breaks a rule: {rule}"));
            }
        };
        Ok(Some(info.reply(error)))
    }

    async fn send(&mut self, process: &mut Process, queued: QueuedTask) -> Result<(), SendError> {
        let is_expendable = queued.is_expendable();
        let QueuedTask { task, memory } = queued;
        let is_uploads = matches!(memory, Some(PassedMemory::Uploads(_)));
        if is_uploads && self.held.len() >= MAX_SEGMENTS_HELD {
            return Ok(());
        }
        let file = memory.as_ref().map(|memory| memory.file().as_fd());
        match process.send(task, file).await {
            Err(SendError::Refused(_)) if is_expendable => return Ok(()),
            sent => sent?,
        }
        if let Some(PassedMemory::Uploads(segment)) = memory {
            self.held.push(segment.file);
        }
        Ok(())
    }

    pub(super) fn on_event(
        &mut self,
        supervisor: &Supervisor,
        latest: &Mutex<Report>,
        event: Event,
    ) -> Result<(), String> {
        match event {
            Event::Started(_) => {
                debug!(lease = %self.lease, "the lease runs in a process, after {:?}", self.began.elapsed());
            }
            Event::Failed(reason) => {
                self.failure = Some(sanitize(&reason, MESSAGE_CHARS).to_string());
            }
            Event::Report(report) => {
                let mut report = self.plausible(report);
                supervisor.count(self.lease, &report);
                self.has_had_sessions |= report.live_sessions > 0;
                if !self.has_had_sessions {
                    report.live_sessions = 1;
                }
                if let Some(running) = lock(&supervisor.leases).get_mut(&self.lease) {
                    let (steps, is_busy) = (report.steps, report.is_busy);
                    running.activity.on_report(Instant::now(), steps, is_busy);
                }
                let old = std::mem::replace(&mut *lock(latest), report.clone());
                let is_due = |at: Instant| at.elapsed() >= REPORT_INTERVAL;
                if old.out_of_service != report.out_of_service
                    && self.reported_at.is_none_or(is_due)
                {
                    self.reported_at = Some(Instant::now());
                    supervisor.reports.notify_one();
                }
            }
            Event::Used(report) => {
                self.has_ended = true;
                supervisor.count(self.lease, &self.plausible(report));
            }
            Event::RequestTurn(device) => {
                let Some(&weight) = self.devices.get(&device) else {
                    return Err("it requested a device that it does not have".into());
                };
                let lease = self.lease;
                supervisor.update_turns(|turns, now| turns.request(now, lease, device, weight));
            }
            Event::ReturnTurn(device) => {
                let lease = self.lease;
                supervisor.update_turns(|turns, now| turns.returned(now, lease, device));
            }
            Event::SessionEnded(session) => {
                let session = SessionId(session);
                lock(&supervisor.snapshots).forget_session(self.lease, session);
                self.copies.end_session(session);
                self.restarts.session_ended(session);
            }
            Event::Hello(_)
            | Event::Described(_)
            | Event::Passed(_)
            | Event::Uploads(_)
            | Event::Snapshot(_)
            | Event::SnapshotBase(_) => {
                return Err("it sent a message out of place".into());
            }
        }
        Ok(())
    }

    /// Returns what a process may claim: only about devices of its lease, in short words.
    fn plausible(&self, mut report: Report) -> Report {
        report
            .usage
            .retain(|device, _| self.devices.contains_key(device));
        report
            .used
            .retain(|device, _| self.devices.contains_key(device));
        report
            .out_of_service
            .retain(|out| self.devices.contains_key(&out.device_index));
        report.out_of_service.truncate(self.devices.len());
        report.missing_peers.truncate(MAX_MISSING_PEERS);
        for out in &mut report.out_of_service {
            let reason = sanitize(&out.reason, MESSAGE_CHARS).to_string();
            out.reason = reason;
        }
        report
    }
}

/// Tells a process that the worker has kept the uploads with this number, or has no room for them, if a session waits
/// for that.
async fn confirm_uploads(process: &mut Process, number: u64) -> Result<(), SendError> {
    if number == 0 {
        return Ok(());
    }
    match process.send(Task::UploadsDone(number), None).await {
        // The process may have sent more before it closed the channel.
        Err(_) if process.is_closed() => Ok(()),
        sent => sent,
    }
}
