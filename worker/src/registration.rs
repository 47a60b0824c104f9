//! Registers the worker with its scheduler: joins the pool, sends heartbeats, executes
//! commands, and joins again when the connection is lost.
//!
//! Running sessions are not affected when the scheduler is unreachable. This task retries
//! until the scheduler is back, and then reports to it what runs here.

use std::{sync::Arc, time::Duration};

use prost::Message;
use tensord_proto::{
    ids::{LeaseId, PartId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{
        Device, Error, ErrorCode, Heartbeat, Leaving, Left, Register, Registered, Released,
        StoredLeases, WorkerCommand, WorkerMessage, worker_command, worker_message::Body,
        workers_client::WorkersClient,
    },
    version,
};
use tensord_transport::{Identity, PoolUrl, control, dial::DialError, identity::START_BYTES};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, interval_at, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming, metadata::MetadataValue};
use tracing::{info, warn};

use crate::lease_host::LeaseHost;

/// How long the scheduler may take to reply or to read a message.
const SCHEDULER_TIMEOUT: Duration = Duration::from_secs(5);

/// Pauses between attempts. The first ones are short, as schedulers restart fast.
const RETRY_DELAYS: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// How long the scheduler may take to acknowledge that the worker left.
pub(crate) const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of messages queued for the scheduler.
const QUEUE_CAPACITY: usize = 8;

/// Period of heartbeats if the scheduler sets none.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(1);

/// The error when the scheduler refuses this worker. Trying again would not help.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this worker cannot join the pool at {scheduler}: {reason}")]
pub struct RefusedError {
    /// Address of the scheduler.
    pub scheduler: String,
    /// The scheduler's reason, or what made the attempt fail here.
    pub reason: String,
}

/// The worker's description of itself for the scheduler.
pub(crate) struct WorkerDescription {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) identity: Arc<Identity>,
    /// Random bytes of this start, from which the worker's id is derived.
    pub(crate) start: [u8; START_BYTES],
    pub(crate) devices: Vec<Device>,
}

/// The state of the worker's registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RegistrationState {
    Joining,
    Joined,
    Refused(RefusedError),
    /// The worker has left the pool as intended.
    Left,
}

/// How far the worker is in leaving the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(crate) enum LeaveStage {
    /// The worker stays.
    Staying,
    /// The worker accepts no new leases; running sessions continue.
    Draining,
    /// The worker leaves now: nothing runs any more.
    Leaving,
}

pub(crate) struct Registration {
    pub(crate) scheduler: PoolUrl,
    pub(crate) worker_description: WorkerDescription,
    pub(crate) host: Arc<dyn LeaseHost>,
    pub(crate) registration_state: watch::Sender<RegistrationState>,
    pub(crate) leave: watch::Receiver<LeaveStage>,
}

/// Why a registration ended.
enum RegistrationEnd {
    Lost(String),
    Refused(String),
    Left,
}

impl Registration {
    /// Keeps the worker registered until it leaves or is refused.
    pub(crate) async fn run(mut self) {
        let mut failures = 0;
        loop {
            let ended = self.join_and_serve().await;
            self.host.mark_unreachable();
            let was_joined = *self.registration_state.borrow() == RegistrationState::Joined;
            let scheduler = self.scheduler.authority();
            match ended {
                RegistrationEnd::Left => {
                    self.registration_state
                        .send_replace(RegistrationState::Left);
                    return;
                }
                RegistrationEnd::Refused(reason) => {
                    let refused = RefusedError { scheduler, reason };
                    self.registration_state
                        .send_replace(RegistrationState::Refused(refused));
                    return;
                }
                RegistrationEnd::Lost(reason) => {
                    failures = if was_joined { 0 } else { failures + 1 };
                    if failures <= 1 {
                        warn!(
                            "the worker is not connected to the scheduler at {scheduler} ({reason}) and keeps trying"
                        );
                    }
                    self.registration_state
                        .send_replace(RegistrationState::Joining);
                }
            }
            let pause = RETRY_DELAYS[failures.min(RETRY_DELAYS.len() - 1)];
            let left = wait_for_stage(&mut self.leave, LeaveStage::Leaving);
            if timeout(pause, left).await.is_ok() {
                self.registration_state
                    .send_replace(RegistrationState::Left);
                return;
            }
        }
    }

    /// Joins the pool, and returns when the worker leaves, is refused, or loses the
    /// connection. A worker that is leaving joins too, as its sessions continue until they
    /// end.
    async fn join_and_serve(&self) -> RegistrationEnd {
        let mut leave = self.leave.clone();
        let is_leaving = *leave.borrow() >= LeaveStage::Draining;
        let joined = tokio::select! {
            joined = timeout(SCHEDULER_TIMEOUT, self.connect(is_leaving)) => joined,
            () = wait_for_stage(&mut leave, LeaveStage::Leaving) => return RegistrationEnd::Left,
        };
        let (messages, mut commands, registered) = match joined {
            Ok(Ok(joined)) => joined,
            Ok(Err(ended)) => return ended,
            Err(_) => {
                return RegistrationEnd::Lost(format!(
                    "the scheduler did not answer within {SCHEDULER_TIMEOUT:?}"
                ));
            }
        };
        self.host.set_lease_key(registered.lease_key.to_vec());
        self.host.set_time(registered.time_ms);
        info!("joined the pool at {}", self.scheduler.authority());
        self.registration_state
            .send_replace(RegistrationState::Joined);
        let period = match registered.heartbeat_ms {
            0 => DEFAULT_HEARTBEAT,
            ms => Duration::from_millis(ms.into()),
        };
        tokio::select! {
            ended = self.serve(&messages, &mut commands, period, is_leaving) => ended,
            () = wait_for_stage(&mut leave, LeaveStage::Leaving) => {
                report_left(messages, heartbeat(&*self.host), &mut commands).await;
                RegistrationEnd::Left
            }
        }
    }

    /// Sends heartbeats and executes commands until the connection is lost.
    /// `has_sent_leaving`: whether the scheduler knows that the worker is leaving.
    async fn serve(
        &self,
        messages: &mpsc::Sender<WorkerMessage>,
        commands: &mut Streaming<WorkerCommand>,
        period: Duration,
        mut has_sent_leaving: bool,
    ) -> RegistrationEnd {
        let mut leave = self.leave.clone();
        let mut heartbeat_timer = interval_at(Instant::now() + period, period);
        loop {
            tokio::select! {
                command = commands.message() => match command {
                    Ok(Some(command)) => if let Some(lease) = execute(&*self.host, command)
                        && let Err(ended) = self.report(messages, vec![lease]).await
                    {
                        return ended;
                    },
                    Ok(None) => return RegistrationEnd::Lost("the scheduler closed the connection".into()),
                    Err(status) => return registration_end(&status),
                },
                _ = heartbeat_timer.tick() => {
                    self.host.query_memory();
                    // The queue is full if the scheduler is slow; the next heartbeat
                    // replaces this one.
                    let _ = messages.try_send(message(Body::Heartbeat(heartbeat(&*self.host))));
                }
                released = self.host.wait_for_reports() => {
                    if let Err(ended) = self.report(messages, released).await {
                        return ended;
                    }
                }
                () = wait_for_stage(&mut leave, LeaveStage::Draining), if !has_sent_leaving => {
                    let leaving = messages.send(message(Body::Leaving(Leaving {})));
                    if timeout(SCHEDULER_TIMEOUT, leaving).await.is_err() {
                        return RegistrationEnd::Lost(format!("the scheduler read nothing for {SCHEDULER_TIMEOUT:?}"));
                    }
                    has_sent_leaving = true;
                }
            }
        }
    }

    /// Reports to the scheduler the state of the devices, and which are released from
    /// leases that have ended. If a report is lost, the scheduler sends `EndLease` again
    /// after the worker has joined again.
    async fn report(
        &self,
        messages: &mpsc::Sender<WorkerMessage>,
        released: Vec<LeaseId>,
    ) -> Result<(), RegistrationEnd> {
        let released = released.into_iter().map(|lease| {
            Body::Released(Released {
                lease_id: lease.0,
                busy_devices: self.host.unreleased_devices(lease),
            })
        });
        let stored = self.host.take_stored_leases();
        let stored = (!stored.is_empty()).then(|| {
            let lease_ids = stored.iter().map(|it| it.0).collect();
            Body::StoredLeases(StoredLeases { lease_ids })
        });
        let heartbeat = std::iter::once(Body::Heartbeat(heartbeat(&*self.host)));
        for body in heartbeat.chain(released).chain(stored) {
            let sent = timeout(SCHEDULER_TIMEOUT, messages.send(message(body))).await;
            if !matches!(sent, Ok(Ok(()))) {
                return Err(RegistrationEnd::Lost(format!(
                    "the scheduler read nothing for {SCHEDULER_TIMEOUT:?}"
                )));
            }
        }
        Ok(())
    }

    async fn connect(
        &self,
        is_leaving: bool,
    ) -> Result<
        (
            mpsc::Sender<WorkerMessage>,
            Streaming<WorkerCommand>,
            Registered,
        ),
        RegistrationEnd,
    > {
        let url = &self.scheduler;
        let identity = self.worker_description.identity.clone();
        let channel = control::connect_as(identity, &url.host, url.port, &url.trust).await;
        let channel = channel.map_err(|e| match e {
            DialError::Unreachable { reason, .. } => RegistrationEnd::Lost(reason),
            other => RegistrationEnd::Refused(other.to_string()),
        })?;
        let (messages, outgoing) = mpsc::channel(QUEUE_CAPACITY);
        let register = message(Body::Register(self.register(is_leaving)));
        messages
            .try_send(register)
            .map_err(|_| RegistrationEnd::Lost("the queue of messages is closed".into()))?;
        let mut request = Request::new(ReceiverStream::new(outgoing));
        let token = url.token.as_ref().map_or("", |token| token.reveal());
        let mut bearer = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| {
            RegistrationEnd::Refused(
                "the token in the URL contains characters that a token cannot have".into(),
            )
        })?;
        bearer.set_sensitive(true);
        request.metadata_mut().insert("authorization", bearer);
        let answer = WorkersClient::new(channel)
            .join(request)
            .await
            .map_err(|e| registration_end(&e))?;
        let mut commands = answer.into_inner();
        let first = commands.message().await.map_err(|e| registration_end(&e))?;
        match first.and_then(|command| command.body) {
            Some(worker_command::Body::Registered(registered)) => {
                Ok((messages, commands, registered))
            }
            _ => Err(RegistrationEnd::Lost(
                "the scheduler did not confirm the registration".into(),
            )),
        }
    }

    fn register(&self, leaving: bool) -> Register {
        Register {
            hello: Some(version::hello()),
            worker_id: self.worker_description.id.0,
            name: self.worker_description.name.clone(),
            address: self.worker_description.address.clone(),
            certificate_sha256: self
                .worker_description
                .identity
                .fingerprint()
                .0
                .to_vec()
                .into(),
            start: self.worker_description.start.to_vec().into(),
            devices: self.worker_description.devices.clone(),
            held: self.host.held_devices(),
            ended: self.host.ended_grants(),
            suspended_leases: self.host.suspended_leases().iter().map(|it| it.0).collect(),
            out_of_service: self.host.out_of_service(),
            leaving,
            store_id: self.host.store_id().map_or(0, |store| store.0),
            takes_shares: self.host.takes_shares(),
        }
    }
}

/// Executes a command of the scheduler. Returns the lease that it ended, if it ended one.
pub(crate) fn execute(host: &dyn LeaseHost, command: WorkerCommand) -> Option<LeaseId> {
    match command.body? {
        worker_command::Body::EndLease(end) => {
            let lease = LeaseId(end.lease_id);
            match end.hold_snapshots {
                true => host.hold_snapshots(lease),
                // An earlier command may have suspended the lease.
                false => host.drop_snapshots(lease),
            }
            host.end_lease(lease, &end.grants);
            return Some(lease);
        }
        worker_command::Body::Granted(granted) => host.granted(&granted),
        worker_command::Body::SendSnapshots(command) => host.send_snapshots(&command),
        worker_command::Body::KeepSnapshots(command) => host.keep_snapshots(&command),
        worker_command::Body::DropSnapshots(command) => {
            let lease = LeaseId(command.lease_id);
            match command.part {
                Some(index) => host.drop_part(PartId { lease, index }),
                None => host.drop_snapshots(lease),
            }
        }
        worker_command::Body::HoldSnapshots(command) => {
            let lease = LeaseId(command.lease_id);
            match command.part {
                Some(index) => host.hold_part(PartId { lease, index }),
                None => host.hold_snapshots(lease),
            }
        }
        worker_command::Body::DropStored(command) => {
            let leases = command.lease_ids.into_iter().map(LeaseId);
            host.drop_stored(leases.collect());
        }
        worker_command::Body::Time(time) => {
            host.set_time(time.time_ms);
            host.usage_recorded(&time.usage_recorded);
            host.set_tenant_snapshots(time.tenant_snapshots_permille);
        }
        worker_command::Body::Registered(_) => {}
    }
    None
}

/// Returns a heartbeat: how the devices and leases are.
pub(crate) fn heartbeat(host: &dyn LeaseHost) -> Heartbeat {
    let (usage, leases) = host.usage();
    Heartbeat {
        usage,
        out_of_service: host.out_of_service(),
        kept: host.kept_leases(),
        interrupted: host.interrupted_leases(),
        in_store: host.leases_in_store().iter().map(|it| it.0).collect(),
        leases,
        idle: host.idle_leases(),
        missing_peers: host.missing_peers(),
        snapshots: host.snapshot_memory(),
    }
}

/// Reports to the scheduler that the worker left, and waits until the scheduler closes the
/// stream. `last` has what leases have used since the last heartbeat.
async fn report_left(
    messages: mpsc::Sender<WorkerMessage>,
    last: Heartbeat,
    commands: &mut Streaming<WorkerCommand>,
) {
    let noted = async {
        let _ = messages.send(message(Body::Heartbeat(last))).await;
        let _ = messages.send(message(Body::Left(Left {}))).await;
        drop(messages);
        while let Ok(Some(_)) = commands.message().await {}
    };
    // If this times out, the scheduler detects the loss of the worker by itself.
    let _ = timeout(LEAVE_TIMEOUT, noted).await;
}

/// Waits until the worker has reached `stage` of leaving.
async fn wait_for_stage(leave: &mut watch::Receiver<LeaveStage>, stage: LeaveStage) {
    // An error means that the `Worker` was dropped.
    let _ = leave.wait_for(|leave| *leave >= stage).await;
}

fn message(body: Body) -> WorkerMessage {
    WorkerMessage { body: Some(body) }
}

/// Maps a status to the end of the registration.
fn registration_end(status: &Status) -> RegistrationEnd {
    let error = Error::decode(status.details()).unwrap_or_default();
    match error.code() {
        ErrorCode::Version | ErrorCode::Token | ErrorCode::Enrolment => {
            RegistrationEnd::Refused(error.message)
        }
        _ if error.message.is_empty() => {
            RegistrationEnd::Lost(sanitize(status.message(), MESSAGE_CHARS).to_string())
        }
        _ => RegistrationEnd::Lost(error.message),
    }
}
