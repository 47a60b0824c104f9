//! The driver: one task that owns the engine, feeds it input from streams and timers, and
//! carries out its commands.
//!
//! The task waits for its next input only, so that no peer can hold up another. It makes no
//! decisions about leases; it keeps the current stream of each peer, and the device usage
//! that workers last reported.

mod clients;
mod commands;
mod explanations;
mod holders;
mod input;
mod leases;
mod preparations;
mod status;
mod tenants;
mod tokens;
mod usage;
mod waiting;
mod workers;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{self, BoxFuture},
    stream::FuturesUnordered,
};
use rand::{Rng, rngs::StdRng};
use tensord_proto::{
    ids::{ClientId, LeaseId, WorkerId},
    v1::{Error, ErrorCode, PoolMessage, Revoked},
};
use tensord_scheduler::{Engine, Event, StreamId, Suspender, Timestamp};
use tensord_transport::token::LeaseSigner;
use tokio::{
    sync::mpsc,
    task::{self, JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};
use tracing::{error, warn};

use self::{
    explanations::ExplanationLimit, holders::Holders, preparations::Preparations,
    status::StatusCalls, workers::JoinedWorker,
};
pub(super) use self::{
    holders::credential_mismatch,
    input::{Input, InputSender, Recorded},
    workers::JoiningWorker,
};
use super::{
    MISSED_HEARTBEATS, Registries, Timing,
    access::Access,
    enrolment::Enrolment,
    gap::{self, GapDetector},
    lease_records::LeaseRecords,
    renewals::Renewals,
    stream::{OpenStream, Queued},
    tenants::Tenants,
    usage::UsageLog,
};
use crate::audit::Audit;

/// The capacity of the driver's input queue; readers wait while it is full. The driver
/// handles an input in microseconds, so a full queue is a few milliseconds of work.
pub(super) const INPUT_QUEUE: usize = 1024;

/// The largest number of clients that are attached or may come back to leases. Connections have a separate bound.
pub(super) const MAX_CLIENTS: usize = 4096;

/// The largest number of joined workers.
const MAX_WORKERS: usize = 4096;

/// How long a reply waits for the record of a changed lease to be on disk.
const RECORD_DEADLINE: Duration = Duration::from_secs(5);

/// The largest number of replies to clients that wait for the disk. Further ones do not wait.
const MAX_UNRECORDED: usize = 1024;

/// The time limit for sending the final errors of all streams when the process stops.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// The events that wake the driver.
enum Wakeup {
    Input(Box<Queued<Input>>),
    /// The record of a change that a client has requested is written, or writing it takes too long.
    Recorded(ClientId, StreamId, PoolMessage),
    ReaderEnded(Result<(task::Id, Option<Error>), JoinError>),
    CheckClocks,
    Deadline,
    /// Inputs have waited long enough for marks of clients.
    Prepared,
    /// Status calls that wait are due.
    StatusDue,
}

/// The peer whose stream a reader reads.
#[derive(Clone, Copy)]
enum Peer {
    Client(ClientId, StreamId),
    Worker(WorkerId, StreamId),
}

/// Where the driver records what happens.
pub(super) struct Logs {
    pub(super) audit: Audit,
    /// What leases use, if it is kept.
    pub(super) usage: Option<UsageLog>,
}

/// The driver's state. See the module's documentation. It has many fields, as one task owns the
/// streams of all peers and what is known of them.
pub(super) struct Driver {
    engine: Engine,
    started: Instant,
    signer: LeaseSigner,
    access: Arc<Access>,
    enrolment: Arc<Enrolment>,
    tenants: Arc<Tenants>,
    audit: Audit,
    usage: Option<UsageLog>,
    records: LeaseRecords,
    renewals: Renewals,
    gap_detector: GapDetector,
    lease_ids: StdRng,
    granting: bool,
    stopping: bool,
    clients: HashMap<ClientId, OpenStream<PoolMessage>>,
    holders: Holders,
    workers: HashMap<WorkerId, JoinedWorker>,
    /// The replies to clients whose changes are not recorded yet.
    unrecorded: FuturesUnordered<BoxFuture<'static, (ClientId, StreamId, PoolMessage)>>,
    /// How many explanations of waits clients have had of late.
    explained: ExplanationLimit,
    status_calls: StatusCalls,
    /// The inputs that wait for marks of clients.
    preparations: Preparations<Box<Input>>,
    next_stream: u64,
    readers: JoinSet<Option<Error>>,
    read_by: HashMap<task::Id, Peer>,
    /// The sending end of `inputs`, for readers.
    sender: InputSender,
    inputs: mpsc::Receiver<Queued<Input>>,
    worker_silence: Duration,
    lease_token_life: Duration,
}

impl Driver {
    /// Creates the driver of an engine that has handled no event yet, with places for `max_clients` clients. Returns it
    /// with the sender for its inputs.
    pub(super) fn new(
        engine: Engine,
        records: LeaseRecords,
        signer: LeaseSigner,
        registries: Registries,
        logs: Logs,
        timing: Timing,
        max_clients: usize,
    ) -> (Self, InputSender) {
        let (sender, inputs) = mpsc::channel(INPUT_QUEUE);
        let Registries {
            access,
            enrolment,
            tenants,
        } = registries;
        let driver = Self {
            holders: Holders::new(max_clients, engine.options().lease_expiry),
            access,
            enrolment,
            tenants,
            audit: logs.audit,
            usage: logs.usage,
            engine,
            records,
            started: Instant::now(),
            renewals: Renewals::new(timing.lease_token_life),
            gap_detector: GapDetector::new(std::time::Instant::now(), SystemTime::now()),
            signer,
            lease_ids: rand::make_rng(),
            granting: true,
            stopping: false,
            clients: HashMap::new(),
            workers: HashMap::new(),
            unrecorded: FuturesUnordered::new(),
            explained: ExplanationLimit::default(),
            status_calls: StatusCalls::default(),
            preparations: Preparations::default(),
            next_stream: 0,
            readers: JoinSet::new(),
            read_by: HashMap::new(),
            sender: sender.clone(),
            inputs,
            worker_silence: timing.heartbeat * MISSED_HEARTBEATS,
            lease_token_life: timing.lease_token_life,
        };
        (driver, sender)
    }

    /// Runs until [`Input::Stop`] arrives. Dropping the future ends every stream at once.
    pub(super) async fn run(mut self) {
        let mut clock_check = interval(gap::CHECK_INTERVAL);
        clock_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.stopping {
            let deadline = self.engine.next_deadline();
            let deadline = deadline.map(|at| self.started + Duration::from_millis(at.as_millis()));
            let prepared_by = self.preparations.next_deadline();
            let status_at = self.status_calls.next_deadline(Instant::now());
            let next = tokio::select! {
                Some(input) = self.inputs.recv() => Wakeup::Input(Box::new(input)),
                Some((client, stream, reply)) = self.unrecorded.next() => {
                    Wakeup::Recorded(client, stream, reply)
                }
                Some(ended) = self.readers.join_next_with_id() => Wakeup::ReaderEnded(ended),
                _ = clock_check.tick() => Wakeup::CheckClocks,
                () = sleep_until(deadline.unwrap_or(self.started)), if deadline.is_some() => {
                    Wakeup::Deadline
                }
                () = sleep_until(prepared_by.unwrap_or(self.started)), if prepared_by.is_some() => {
                    Wakeup::Prepared
                }
                () = sleep_until(status_at.unwrap_or(self.started)), if status_at.is_some() => {
                    Wakeup::StatusDue
                }
            };
            // The first event after a gap may be a stream that ended because of the gap, so
            // the gap is reported first.
            self.report_gap();
            match next {
                Wakeup::Input(queued) => self.on_queued(*queued),
                Wakeup::Recorded(client, stream, reply) => self.reply(client, stream, reply),
                Wakeup::ReaderEnded(ended) => self.on_reader_ended(ended),
                Wakeup::CheckClocks => self.renew_tokens(),
                Wakeup::Deadline => self.apply(Event::Tick),
                Wakeup::Prepared => {
                    for input in self.preparations.take_due(Instant::now()) {
                        self.handle(*input);
                    }
                }
                Wakeup::StatusDue => self.reply_to_status_calls(),
            }
        }
        self.close_streams().await;
    }

    /// Handles an entry of the queue. After that, the reader of its stream may pass on another message.
    fn on_queued(&mut self, queued: Queued<Input>) {
        let Queued { item, permit } = queued;
        self.on_input(item);
        drop(permit);
    }

    /// Handles an input, once the clients of leases that it moves or suspends have placed marks.
    fn on_input(&mut self, input: Input) {
        self.handle_earlier(&input);
        let leases = self.leases_to_prepare(&input);
        if leases.is_empty() {
            return self.handle(input);
        }
        for lease in &leases {
            self.request_marks(*lease);
        }
        let waiting = self
            .preparations
            .begin(Instant::now(), leases, Box::new(input));
        if let Err(input) = waiting {
            self.handle(*input);
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Attach {
                client,
                credential,
                auth,
                held,
                opened,
                reply_sender,
            } => {
                let admitted = self.admit(client, credential, auth, &held.claims);
                let is_admitted = admitted.is_ok();
                // An error means that the call was dropped; the reader then finds that
                // the stream has ended.
                let _ = reply_sender.send(admitted);
                if is_admitted {
                    self.attach(client, held, opened);
                }
            }
            Input::FromClient(client, stream, message) => {
                self.on_client_message(client, stream, message)
            }
            Input::Join {
                joining_worker,
                opened,
            } => self.join(*joining_worker, opened),
            Input::FromWorker(worker, stream, message) => {
                self.on_worker_message(worker, stream, message)
            }
            Input::Status(call) => self.on_status_call(call),
            Input::Revoke { token, reply } => {
                let revoked = Revoked {
                    clients: self.revoke_clients(&token),
                    workers: self.revoke_workers(&token),
                };
                let _ = reply.send(revoked);
            }
            Input::Remove { name, reply } => {
                let _ = reply.send(self.remove_worker(&name));
            }
            Input::ListLeases(reply) => {
                let _ = reply.send(self.list_leases());
            }
            Input::ListWaiting(lease, reply) => {
                let _ = reply.send(self.list_waiting(lease));
            }
            Input::TenantsChanged => self.on_tenants_changed(),
            Input::PastShares(reply) => {
                let _ = reply.send(self.engine.past_shares());
            }
            Input::ListTenants(name, reply) => {
                let _ = reply.send(self.list_tenants(name.as_deref()));
            }
            Input::PlanTenants(proposal, reply) => {
                let _ = reply.send(self.plan_tenants(&proposal));
            }
            Input::DrainWorker {
                name,
                is_drained,
                reply,
            } => {
                let _ = reply.send(self.drain_worker(&name, is_drained));
            }
            Input::MoveLease(lease, reply) => {
                let _ = reply.send(self.move_lease(lease));
            }
            Input::EndLease(lease, reply) => {
                let _ = reply.send(self.end_lease(lease));
            }
            Input::SetPriority(lease, priority, reply) => {
                let _ = reply.send(self.set_priority(lease, priority));
            }
            Input::SuspendLease(lease, reply) => {
                let suspended = self.suspend_lease(lease, Suspender::Administrator);
                let _ = reply.send(suspended.map(|it| self.recorded(it)));
            }
            Input::ResumeLease(lease, reply) => {
                let resumed = self.resume_lease(lease, Suspender::Administrator);
                let _ = reply.send(resumed.map(|it| self.recorded(it)));
            }
            Input::StopGranting => self.granting = false,
            Input::Stop => self.stopping = true,
        }
    }

    /// Returns the reply to a request that has changed a lease just now.
    fn recorded<T>(&self, reply: T) -> Recorded<T> {
        let written = timeout(RECORD_DEADLINE, self.records.written());
        // The change holds even if writing fails or is late, which `LeaseRecords` logs.
        let written = written.map(|_| ()).boxed();
        Recorded { reply, written }
    }

    /// Ends every stream, and waits until the connections have taken the final errors or
    /// [`CLOSE_TIMEOUT`] has elapsed.
    async fn close_streams(mut self) {
        let error = Error::new(ErrorCode::Draining, "the scheduler is shutting down");
        let clients = self.clients.drain();
        let clients = clients.map(|(_, open)| open.end_and_flush(&error));
        let workers = self.workers.drain();
        let workers = workers.map(|(_, member)| member.end_and_flush(&error));
        let taken = future::join(future::join_all(clients), future::join_all(workers));
        // A peer that does not read notices the end when its connection closes.
        let _ = timeout(CLOSE_TIMEOUT, taken).await;
    }

    /// Reports to the engine if this process did not run for a while. Must be called before
    /// any event that the gap may have caused is handled.
    fn report_gap(&mut self) {
        let gap = self
            .gap_detector
            .check(std::time::Instant::now(), SystemTime::now());
        let Some(gap) = gap else {
            return;
        };
        warn!(
            "the scheduler did not run for {:.1} s; workers and programs get time to reconnect",
            gap.longest.as_secs_f64()
        );
        let now = self.now().as_millis();
        let monotonic = u64::try_from(gap.monotonic.as_millis()).unwrap_or(u64::MAX);
        let since = Timestamp::from_millis(now.saturating_sub(monotonic));
        self.apply(Event::Gap { since });
    }

    fn now(&self) -> Timestamp {
        let elapsed = self.started.elapsed().as_millis();
        Timestamp::from_millis(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }

    fn on_reader_ended(&mut self, ended: Result<(task::Id, Option<Error>), JoinError>) {
        // The peer's messages from before the end of its stream are in the queue and must
        // be handled before the end, for example a release of a lease.
        for _ in 0..INPUT_QUEUE {
            let Ok(queued) = self.inputs.try_recv() else {
                break;
            };
            self.on_queued(queued);
        }
        let (id, error) = match ended {
            Ok(ended) => ended,
            Err(e) => {
                if e.is_panic() {
                    error!("the reader of a stream panicked, which is a bug: {e}");
                }
                (e.id(), None)
            }
        };
        match self.read_by.remove(&id) {
            Some(Peer::Client(client, stream)) => {
                self.on_client_disconnected(client, stream, error.as_ref())
            }
            Some(Peer::Worker(worker, stream)) => {
                self.on_worker_disconnected(worker, stream, error.as_ref())
            }
            None => {}
        }
    }

    /// Returns a new, unique stream number.
    fn new_stream_id(&mut self) -> StreamId {
        self.next_stream += 1;
        StreamId(self.next_stream)
    }

    /// Returns a new, random lease id.
    fn new_lease_id(&mut self) -> LeaseId {
        LeaseId(self.lease_ids.next_u64())
    }
}
