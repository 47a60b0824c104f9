//! The run of a lease, from the opening of its devices to its end.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use rustix::thread::disable_transparent_huge_pages;
use tensord_backend::CustomOps;
use tensord_proto::{
    ids::{LeaseId, SessionId, WorkerId},
    v1::DeviceGrant,
};
use tensord_transport::{
    Identity, Listener,
    handoff::{Passed, SendError},
    identity::IdentityDer,
};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout_at},
};
use tracing::{debug, warn};

use super::{
    ProcessError, bytes_to_path,
    channel::Channel,
    device_tests::open_offered,
    snapshots::{LeftSnapshots, SnapshotMessage, SnapshotSender},
};
use crate::{
    admission::lane_of,
    blobs::shared::{NewSegment, Segment, SharedBlobs},
    collective::CollectiveSettings,
    connection,
    device_turn::{DeviceTurn, MESSAGES_PER_DEVICE, TurnMessage},
    devices,
    lease_host::LeaseHost,
    op_record::OpRecord,
    process_message::{
        End, Event, KeptUploads, PassedConnection, ProcessSettings, Report, SnapshotKept, Start,
        Task,
    },
    registry::{DETACHED_TIMEOUT, Registry, RegistrySettings, SnapshotStores},
    session::KeptLimits,
    start::{SWEEP_INTERVAL, watch_devices},
};

/// Number of connections that were passed on and are not accepted yet.
const CONNECTION_QUEUE: usize = 16;

/// How long the connections of an ended lease may take to receive the end of their sessions.
/// Shorter than [`END_TIMEOUT`](crate::supervisor::END_TIMEOUT).
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the checks whether the sessions of an ended lease have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Bytes of tensors from which on this process uses huge pages. Before, they would cost several
/// pages of 2 MiB for each thread.
const HUGE_PAGES_FROM_BYTES: u64 = 16 << 20;

/// How often what the lease has used is reported while nothing else changes. If the process is killed, the
/// time of bytes since the last report is lost.
const SUMS_INTERVAL: Duration = Duration::from_secs(2);

/// A lease that runs in this process.
pub(super) struct LeaseRun {
    lease: LeaseId,
    grants: Vec<DeviceGrant>,
    registry: Arc<Registry>,
    listener: Listener,
    connections: mpsc::Sender<Passed>,
    blobs: Arc<SharedBlobs>,
    /// Uploads of sessions, to be sent to the worker.
    segments: mpsc::Receiver<NewSegment>,
    sent_uploads: SentUploads,
    snapshots: Arc<SnapshotSender>,
    /// Snapshots and ended sessions, to be sent to the worker.
    snapshot_messages: mpsc::Receiver<SnapshotMessage>,
    /// The snapshots of sessions whose process has died.
    left_snapshots: Arc<LeftSnapshots>,
    /// The turns of the devices, and what this process sends to the worker about them.
    turns: BTreeMap<u32, Arc<DeviceTurn>>,
    turn_messages: mpsc::Receiver<(u32, TurnMessage)>,
}

impl LeaseRun {
    /// Opens the devices, and gets ready for connections.
    ///
    /// # Errors
    ///
    /// The reason for people.
    pub(super) async fn start(
        start: Start,
        op_records: OwnedFd,
        custom_ops: &CustomOps,
    ) -> Result<Self, String> {
        let ProcessSettings {
            new_kept_limit_bytes,
            restored_kept_limit_bytes,
            op_timeout_ms,
            collective_timeout_ms,
            bucket_bytes,
            kernel_cache,
            snapshot_bytes,
        } = start.settings;
        devices::configure(kernel_cache.as_deref().map(bytes_to_path).as_deref());
        let opened = open_offered(&start.devices, custom_ops).await?;
        let op_records = OpRecord::map(op_records, start.devices.len())
            .map_err(|e| format!("cannot record ops: {e}"))?;
        let indices: Vec<_> = start.devices.iter().map(|device| device.index).collect();
        let (messages, turn_messages) = mpsc::channel(MESSAGES_PER_DEVICE * indices.len().max(1));
        let turn = |&index: &u32| (index, DeviceTurn::shared(index, messages.clone()));
        let turns: BTreeMap<_, _> = indices.iter().map(turn).collect();
        let identity = Identity::from_der(IdentityDer {
            chain: start.certificate_chain,
            key: start.private_key,
        });
        let identity = Arc::new(identity.map_err(|e| e.to_string())?);
        let (blobs, segments) = SharedBlobs::new();
        let (snapshots, snapshot_messages) = SnapshotSender::new(snapshot_bytes, Handle::current());
        let left_snapshots = Arc::new(LeftSnapshots::default());
        let snapshot_stores = SnapshotStores {
            keeper: snapshots.clone(),
            epoch: start.epoch,
            snapshots: left_snapshots.clone(),
        };
        let lanes = start.granted.grants.iter();
        let lanes = lanes.map(|granted| (granted.device_index, lane_of(granted)));
        let settings = RegistrySettings {
            worker_id: WorkerId(start.worker_id),
            worker_name: start.worker_name.into(),
            blobs: blobs.clone(),
            kept_limits: KeptLimits {
                new: new_kept_limit_bytes,
                restored: restored_kept_limit_bytes,
            },
            collective_settings: CollectiveSettings {
                deadline: Duration::from_millis(collective_timeout_ms),
                bucket_bytes: bucket_bytes.and_then(|bytes| usize::try_from(bytes).ok()),
                runtime: Handle::current(),
                identity: Some(identity.clone()),
            },
            op_timeout: Duration::from_millis(op_timeout_ms),
            runtime: Handle::current(),
            op_records: indices.into_iter().zip(op_records).collect(),
            turns: turns.clone(),
            lanes: lanes.collect(),
            snapshot_stores: (snapshot_bytes > 0).then_some(snapshot_stores),
        };
        let registry = Arc::new(Registry::new(opened, settings).map_err(|e| e.to_string())?);
        registry.granted(&start.granted);
        let (connections, passed) = mpsc::channel(CONNECTION_QUEUE);
        let listener = Listener::of_passed(passed, &identity).map_err(|e| e.to_string())?;
        Ok(Self {
            lease: LeaseId(start.granted.lease_id),
            grants: start.granted.grants,
            registry,
            listener,
            connections,
            blobs,
            segments,
            sent_uploads: SentUploads::default(),
            snapshots,
            snapshot_messages,
            left_snapshots,
            turns,
            turn_messages,
        })
    }

    /// Serves the lease until it has ended.
    pub(super) async fn serve(mut self, mut channel: Channel) -> Result<(), ProcessError> {
        let registry = self.registry.clone();
        let mut served = JoinSet::new();
        let mut checking = JoinSet::new();
        let (lost, mut lost_device) = watch::channel(None);
        checking.spawn(watch_devices(registry.clone(), lost));
        let mut ticks = interval(SWEEP_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Clients that have not restored their sessions by then are gone.
        let mut restore_timeout = pin!(sleep(DETACHED_TIMEOUT));
        let mut are_unrestored_dropped = false;
        let (mut reported, mut sums_due) = (Report::default(), Instant::now());
        let mut has_huge_pages = false;
        loop {
            tokio::select! {
                task = channel.recv() => match task? {
                    Some((Task::End(end), None)) => {
                        return self.end(&end, served, channel).await;
                    }
                    Some((task, file)) => {
                        let is_turn = matches!(
                            task,
                            Task::GrantTurn(_) | Task::WantTurn(_) | Task::RevokeTurn(_)
                        );
                        self.on_task(task, file)?;
                        if is_turn {
                            // There are hundreds a second while leases share a device.
                            continue;
                        }
                    }
                    None => return Ok(()),
                },
                link = self.listener.accept() => {
                    while served.try_join_next().is_some() {}
                    served.spawn(connection::serve(registry.clone(), link));
                }
                Some((device, message)) = self.turn_messages.recv() => {
                    channel.send(turn_event(device, message)).await?;
                    continue;
                }
                Some(new) = self.segments.recv() => self.sent_uploads.send(&mut channel, new).await?,
                Some(message) = self.snapshot_messages.recv() => {
                    if let SnapshotMessage::SessionEnded(session) = message {
                        self.left_snapshots.forget(session);
                    }
                    if let Some(refused) = send_snapshot(&mut channel, message).await? {
                        self.snapshots.on_kept(refused);
                    }
                }
                Ok(lost) = lost_device.wait_for(Option::is_some) => {
                    // The op may never return. Only another process can use the device, so this
                    // one ends.
                    let reason = lost.as_ref().map(ToString::to_string).unwrap_or_default();
                    drop(lost);
                    return channel.send(Event::Failed(reason)).await;
                }
                _ = ticks.tick() => registry.sweep(),
                () = &mut restore_timeout, if !are_unrestored_dropped => {
                    are_unrestored_dropped = true;
                    drop_unrestored(&self.left_snapshots, &registry, &mut channel).await?;
                }
                _ = registry.wait_for_reports() => {}
                () = registry.wait_for_session() => {}
            }
            let report = report(&registry, self.lease);
            let now = Instant::now();
            let is_due = now >= sums_due && report != reported;
            if is_due || without_sums(&report) != without_sums(&reported) {
                sums_due = now + SUMS_INTERVAL;
                channel.send(Event::Report(report.clone())).await?;
                reported = report;
            }
            if !has_huge_pages && live_bytes(&reported) >= HUGE_PAGES_FROM_BYTES {
                has_huge_pages = true;
                // The worker has disabled them. An error means that the kernel has none.
                let _ = disable_transparent_huge_pages(false);
            }
        }
    }

    /// Executes a task of the worker that does not end the lease.
    fn on_task(&mut self, task: Task, file: Option<OwnedFd>) -> Result<(), ProcessError> {
        match (task, file) {
            (Task::Connection(passed), Some(socket)) => {
                pass_on(&self.connections, passed, socket);
            }
            (
                Task::Connection(_) | Task::Uploads(_) | Task::Snapshot(_) | Task::SnapshotBase(_),
                None,
            ) => warn!(
                "a connection or memory of the worker is lost: the process of the lease may open no more files"
            ),
            (Task::Uploads(uploads), Some(file)) => add_uploads(&self.blobs, uploads, file),
            (Task::UploadsDone(number), None) => self.sent_uploads.done(number),
            (Task::Snapshot(info), Some(file)) => self.left_snapshots.add(info, file),
            (Task::SnapshotBase(info), Some(file)) => self.left_snapshots.add_base(info, file),
            (Task::SnapshotKept(kept), None) => {
                let session = SessionId(kept.session_id);
                if self.snapshots.on_kept(kept) {
                    self.left_snapshots.forget(session);
                }
            }
            (task, None) => apply(&self.registry, &self.turns, task)?,
            (_, Some(_)) => return Err(ProcessError::Message),
        }
        Ok(())
    }

    /// Ends the lease's sessions, and sends the worker the uploads that they leave.
    async fn end(
        mut self,
        end: &End,
        mut served: JoinSet<()>,
        mut channel: Channel,
    ) -> Result<(), ProcessError> {
        if end.goes_on {
            self.registry.silence_cohorts();
        }
        self.registry.end_all(&end.error);
        self.registry.end_lease(self.lease, &self.grants);
        // The sessions end without a turn of their device.
        self.turns.values().for_each(|turn| turn.close());
        let until = Instant::now() + DELIVERY_TIMEOUT;
        wait_for_sessions(&self.registry, until).await;
        if !self.registry.has_sessions() {
            // Other leases need not wait until the clients have received the end, and this one needs no
            // turn that it waits for.
            for &device in self.turns.keys() {
                channel.send(Event::ReturnTurn(device)).await?;
            }
        }
        wait_for_delivery(&mut served, &self.blobs, until).await;
        while let Ok(new) = self.segments.try_recv() {
            self.sent_uploads.send(&mut channel, new).await?;
        }
        let used = report(&self.registry, self.lease);
        channel.send(Event::Used(used)).await
    }
}

fn turn_event(device: u32, message: TurnMessage) -> Event {
    match message {
        TurnMessage::Request => Event::RequestTurn(device),
        TurnMessage::Return => Event::ReturnTurn(device),
    }
}

/// Passes a connection on to the listener.
fn pass_on(connections: &mpsc::Sender<Passed>, passed: PassedConnection, socket: OwnedFd) {
    let first = passed.first_datagram.map(Into::into);
    match Passed::received(socket, first) {
        // The queue is full if the listener is slow; the client dials again.
        Ok(connection) => drop(connections.try_send(connection)),
        Err(e) => warn!("cannot use a connection that was passed on: {e}"),
    }
}

/// Applies a turn of a device or a message of the scheduler.
fn apply(
    registry: &Registry,
    turns: &BTreeMap<u32, Arc<DeviceTurn>>,
    task: Task,
) -> Result<(), ProcessError> {
    match task {
        Task::GrantTurn(device) => drop(turns.get(&device).inspect(|turn| turn.granted())),
        Task::WantTurn(device) => drop(turns.get(&device).inspect(|turn| turn.wanted())),
        Task::RevokeTurn(device) => drop(turns.get(&device).inspect(|turn| turn.revoked())),
        Task::Time(time_ms) => registry.set_time(time_ms),
        Task::Unreachable(_) => registry.mark_unreachable(),
        Task::LeaseKey(key) => registry.set_lease_key(key),
        Task::QueryMemory(_) => registry.query_memory(),
        _ => return Err(ProcessError::Message),
    }
    Ok(())
}

/// Adds uploads that the worker keeps for the tenant.
fn add_uploads(blobs: &SharedBlobs, uploads: KeptUploads, file: OwnedFd) {
    let segment = Segment {
        file: Arc::new(file.into()),
        sizes_bytes: uploads.sizes_bytes,
    };
    let (hashes, _) = uploads.hashes.as_chunks();
    blobs.add(&segment, hashes.iter().copied());
}

/// The uploads that were sent to the worker.
#[derive(Default)]
struct SentUploads {
    /// Number of the last segment that a session waits for.
    last: u64,
    /// The segments that sessions wait for, until the worker is done with them.
    awaited: BTreeMap<u64, oneshot::Sender<()>>,
}

impl SentUploads {
    /// Sends uploads of a session to the worker, which keeps them.
    async fn send(&mut self, channel: &mut Channel, new: NewSegment) -> Result<(), ProcessError> {
        let NewSegment { segment, done } = new;
        let mut number = 0;
        if !done.is_closed() {
            self.last += 1;
            number = self.last;
            self.awaited.insert(number, done);
        }
        let uploads = Event::Uploads(KeptUploads {
            sizes_bytes: segment.sizes_bytes,
            hashes: Vec::new(),
            number,
        });
        match channel.send_with(uploads, Some(segment.file.as_fd())).await {
            Err(ProcessError::Send(e @ SendError::Refused(_))) => {
                debug!("uploads are not kept: {e}");
                self.awaited.remove(&number);
                Ok(())
            }
            sent => sent,
        }
    }

    fn done(&mut self, number: u64) {
        if let Some(done) = self.awaited.remove(&number) {
            // The session may have ended.
            let _ = done.send(());
        }
    }
}

/// Sends the worker a snapshot, or the id of a session that has ended. If the system refuses to send the
/// snapshot, returns the reply that it is not kept.
async fn send_snapshot(
    channel: &mut Channel,
    message: SnapshotMessage,
) -> Result<Option<SnapshotKept>, ProcessError> {
    let (info, files) = match message {
        SnapshotMessage::Snapshot(info, files) => (info, files),
        SnapshotMessage::SessionEnded(session) => {
            channel.send(Event::SessionEnded(session.0)).await?;
            return Ok(None);
        }
    };
    let sending = async {
        if let Some(base) = &files.base {
            let event = Event::SnapshotBase(info);
            channel.send_with(event, Some(base.as_fd())).await?;
        }
        let event = Event::Snapshot(info);
        channel.send_with(event, Some(files.snapshot.as_fd())).await
    };
    match sending.await {
        Ok(()) => Ok(None),
        Err(ProcessError::Send(e @ SendError::Refused(_))) => Ok(Some(info.reply(e.to_string()))),
        Err(e) => Err(e),
    }
}

/// Drops the snapshots of sessions that no client has restored, also on the worker.
async fn drop_unrestored(
    left_snapshots: &LeftSnapshots,
    registry: &Registry,
    channel: &mut Channel,
) -> Result<(), ProcessError> {
    for session in left_snapshots.sessions() {
        if !registry.has_session(session) {
            left_snapshots.forget(session);
            channel.send(Event::SessionEnded(session.0)).await?;
        }
    }
    Ok(())
}

/// Waits until no session is left, or the time for that is over.
async fn wait_for_sessions(registry: &Registry, until: Instant) {
    while registry.has_sessions() && Instant::now() < until {
        sleep(CHECK_INTERVAL).await;
        registry.sweep();
    }
}

/// Waits until no connection is left and all uploads are copied, or the time for that is over.
async fn wait_for_delivery(served: &mut JoinSet<()>, blobs: &SharedBlobs, until: Instant) {
    // The first error means that a client does not read, the second that the system is slow.
    let _ = timeout_at(until, async { while served.join_next().await.is_some() {} }).await;
    let _ = timeout_at(until, blobs.idle()).await;
}

/// Returns a report without what may grow while the lease is idle, as the time of bytes does.
fn without_sums(report: &Report) -> Report {
    Report {
        used: BTreeMap::new(),
        ..report.clone()
    }
}

/// Returns the bytes of all tensors of this process.
fn live_bytes(report: &Report) -> u64 {
    let live_bytes = report.usage.values().map(|usage| usage.live_bytes);
    live_bytes.fold(0, u64::saturating_add)
}

fn report(registry: &Registry, lease: LeaseId) -> Report {
    let (steps, is_busy) = registry.activity();
    let now = std::time::Instant::now();
    Report {
        used: registry.used_by(lease, now),
        live_sessions: registry.live_session_count() as u32,
        usage: registry.usage_by_device(now),
        out_of_service: registry.out_of_service(),
        steps,
        is_busy,
        missing_peers: registry.missing_peers(now).iter().map(|it| it.0).collect(),
    }
}
