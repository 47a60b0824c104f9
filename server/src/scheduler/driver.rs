//! Drives the engine: one task that owns it, takes what streams and timers
//! say, and carries out what it decides.
//!
//! The task waits for nothing but its next input, so that no peer can hold up
//! another. It decides nothing about leases; it only keeps which stream is
//! whose, and what workers last said about their use.

mod clients;
mod holders;
mod tokens;
mod workers;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::future;
use rand::{Rng, rngs::StdRng};
use tensord_proto::{
    credential::CredentialHash,
    ids::{ClientId, LeaseId, WorkerId},
    v1::{
        ClientMessage, Error, ErrorCode, PoolMessage, Revoked, StatusReply, WorkerCommand,
        WorkerMessage,
    },
};
use tensord_scheduler::{Command, Engine, Event, Options, StreamId, Timestamp};
use tensord_transport::token::LeaseSigner;
use tokio::{
    sync::{mpsc, oneshot},
    task::{self, JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};
use tracing::{error, warn};

use self::{holders::Holders, workers::Member};
pub(super) use self::{holders::not_its_own, workers::Arrival};
use super::{
    MISSED_HEARTBEATS, Timing,
    access::{Access, Pass, Role},
    convert,
    enrolment::Enrolment,
    gap::{self, GapWatch},
    renewals::Renewals,
    stream::{Open, Opened},
    view,
};
use crate::audit::Audit;

/// Inputs that wait for the driver; streams wait when it is full. An input is
/// handled in microseconds, so this is a few milliseconds of work.
pub(super) const INPUT_QUEUE: usize = 1024;

/// Attached clients and joined workers at once, of each; the connections they
/// come over have a bound of their own.
const MAX_STREAMS: usize = 4096;

/// How long the ends of streams may take to go out when the process stops.
const FAREWELL: Duration = Duration::from_millis(500);

/// What the driver is told.
pub(super) enum Input {
    /// A client is here: its hello was checked.
    Attach {
        client: ClientId,
        credential: CredentialHash,
        pass: Pass,
        held: convert::ClaimedLeases,
        opened: Opened<ClientMessage, PoolMessage>,
        /// Whether it may attach; nothing has changed if not.
        decided: oneshot::Sender<Result<(), Error>>,
    },
    /// A client said something.
    FromClient(ClientId, StreamId, ClientMessage),
    /// A worker is here, which is enrolled: its registration was checked.
    Join {
        arrival: Box<Arrival>,
        opened: Opened<WorkerMessage, WorkerCommand>,
    },
    /// A worker said something.
    FromWorker(WorkerId, StreamId, WorkerMessage),
    /// Somebody wants to know how the pool is.
    Status(Pass, oneshot::Sender<StatusReply>),
    /// The token of this name was revoked: what hangs on it ends.
    Revoke {
        token: String,
        reply: oneshot::Sender<Revoked>,
    },
    /// The worker of this name was removed: its registration ends, with its leases.
    /// Whether it was in the pool.
    Remove {
        name: String,
        reply: oneshot::Sender<bool>,
    },
    /// The process is about to stop: nothing is granted any more.
    StopGranting,
    /// It stops now: every stream ends, with a word to its peer.
    Stop,
}

/// What wakes the driver.
enum Next {
    Input(Box<Input>),
    ReaderEnded(Result<(task::Id, Option<Error>), JoinError>),
    Look,
    Deadline,
}

/// Whose stream a reader reads.
#[derive(Clone, Copy)]
enum Peer {
    Client(ClientId, StreamId),
    Worker(WorkerId, StreamId),
}

/// See the module's documentation.
pub(super) struct Driver {
    engine: Engine,
    started: Instant,
    signer: LeaseSigner,
    access: Arc<Access>,
    enrolment: Arc<Enrolment>,
    audit: Audit,
    renewals: Renewals,
    gaps: GapWatch,
    lease_ids: StdRng,
    granting: bool,
    stopping: bool,
    clients: HashMap<ClientId, Open<PoolMessage>>,
    holders: Holders,
    workers: HashMap<WorkerId, Member>,
    next_stream: u64,
    readers: JoinSet<Option<Error>>,
    read_by: HashMap<task::Id, Peer>,
    /// For readers.
    sender: mpsc::Sender<Input>,
    inputs: mpsc::Receiver<Input>,
    worker_silence: Duration,
    lease_token_life: Duration,
}

impl Driver {
    /// A driver of a new engine of this term, and where its inputs go.
    pub(super) fn new(
        options: Options,
        term: u64,
        signer: LeaseSigner,
        access: Arc<Access>,
        enrolment: Arc<Enrolment>,
        audit: Audit,
        timing: Timing,
    ) -> (Self, mpsc::Sender<Input>) {
        let (sender, inputs) = mpsc::channel(INPUT_QUEUE);
        let driver = Self {
            holders: Holders::new(options.lease_expiry),
            access,
            enrolment,
            audit,
            engine: Engine::new(options, term, Timestamp::from_millis(0)),
            started: Instant::now(),
            renewals: Renewals::new(timing.lease_token_life),
            gaps: GapWatch::new(std::time::Instant::now(), SystemTime::now()),
            signer,
            lease_ids: rand::make_rng(),
            granting: true,
            stopping: false,
            clients: HashMap::new(),
            workers: HashMap::new(),
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

    /// Runs until told to stop. Dropping the future ends every stream at once.
    pub(super) async fn run(mut self) {
        let mut look = interval(gap::LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.stopping {
            let deadline = self.engine.next_deadline();
            let deadline = deadline.map(|at| self.started + Duration::from_millis(at.as_millis()));
            let next = tokio::select! {
                Some(input) = self.inputs.recv() => Next::Input(Box::new(input)),
                Some(ended) = self.readers.join_next_with_id() => Next::ReaderEnded(ended),
                _ = look.tick() => Next::Look,
                () = sleep_until(deadline.unwrap_or(self.started)), if deadline.is_some() => {
                    Next::Deadline
                }
            };
            // What comes first after a sleep may be the end of a stream that came of it.
            self.notice_gap();
            match next {
                Next::Input(input) => self.take(*input),
                Next::ReaderEnded(ended) => self.reader_ended(ended),
                Next::Look => self.renew_tokens(),
                Next::Deadline => self.apply(Event::Tick),
            }
        }
        self.send_leave().await;
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Attach {
                client,
                credential,
                pass,
                held,
                opened,
                decided,
            } => match self
                .holders
                .attach(client, credential, pass, std::time::Instant::now())
            {
                Ok(()) => {
                    // Whoever is not there any more finds the stream ended.
                    let _ = decided.send(Ok(()));
                    self.attach(client, held, opened);
                }
                Err(error) => {
                    let _ = decided.send(Err(error));
                }
            },
            Input::FromClient(client, stream, message) => {
                self.on_client_message(client, stream, message)
            }
            Input::Join { arrival, opened } => self.join(*arrival, opened),
            Input::FromWorker(worker, stream, message) => {
                self.on_worker_message(worker, stream, message)
            }
            Input::Status(pass, reply) => {
                // An error means that whoever asked is gone.
                let _ = reply.send(self.status(&pass));
            }
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
            Input::StopGranting => self.granting = false,
            Input::Stop => self.stopping = true,
        }
    }

    /// The pool as the holder of `pass` may see it: a program sees of leases only those
    /// of its tenant.
    fn status(&self, pass: &Pass) -> StatusReply {
        let usage = |worker| self.workers.get(&worker).map(Member::usage);
        let is_shown = |client: Option<ClientId>| match pass.role {
            Role::Admin => true,
            Role::Client | Role::Worker => client
                .and_then(|client| self.holders.tenant(client))
                .is_some_and(|tenant| tenant == &*pass.tenant),
        };
        view::status(self.engine.snapshot(), self.now(), usage, is_shown)
    }

    /// Ends every stream, and waits until its peer's connection has taken the
    /// last message or [`FAREWELL`] is over.
    async fn send_leave(mut self) {
        let error = Error::new(ErrorCode::Draining, "the scheduler is shutting down");
        let clients = self.clients.drain();
        let clients = clients.map(|(_, open)| open.farewell(&error));
        let workers = self.workers.drain();
        let workers = workers.map(|(_, member)| member.farewell(&error));
        let taken = future::join(future::join_all(clients), future::join_all(workers));
        // A peer that does not read finds out when its connection closes.
        let _ = timeout(FAREWELL, taken).await;
    }

    /// Tells the engine if this process did not run for a while, before anything else that
    /// came of it.
    fn notice_gap(&mut self) {
        let gap = self.gaps.look(std::time::Instant::now(), SystemTime::now());
        let Some(gap) = gap else {
            return;
        };
        warn!(
            "the scheduler did not run for {:.1} s; workers and programs have time to come back",
            gap.asleep.as_secs_f64()
        );
        let now = self.now().as_millis();
        let stood = u64::try_from(gap.stood.as_millis()).unwrap_or(u64::MAX);
        let since = Timestamp::from_millis(now.saturating_sub(stood));
        self.apply(Event::Suspended { since });
    }

    fn now(&self) -> Timestamp {
        let elapsed = self.started.elapsed().as_millis();
        Timestamp::from_millis(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }

    /// Tells the engine of an event, and of those that carrying out its
    /// commands leads to.
    fn apply(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for command in self.engine.handle(event, self.now()) {
                events.extend(self.execute(command));
            }
        }
    }

    /// Carries out a command. What comes of it is an event when the one it is
    /// for does not take it.
    fn execute(&mut self, command: Command) -> Option<Event> {
        match command {
            Command::Queued {
                client,
                request,
                position,
            } => self.send_queued(client, request, position),
            Command::Granted {
                client,
                request,
                lease,
                devices,
            } => self.send_granted(client, request, lease, devices),
            Command::Refused {
                client,
                request,
                reason,
            } => self.send_refused(client, request, &reason),
            Command::LeaseEnded {
                client,
                lease,
                reason,
            } => self.send_lease_ended(client, lease, &reason),
            Command::EndLease {
                worker,
                lease,
                grants,
            } => self.send_end_lease(worker, lease, &grants),
        }
    }

    fn reader_ended(&mut self, ended: Result<(task::Id, Option<Error>), JoinError>) {
        // What the peer said before its stream ended is in the queue, and must
        // not be overtaken by the end: a lease given back, say.
        for _ in 0..INPUT_QUEUE {
            let Ok(input) = self.inputs.try_recv() else {
                break;
            };
            self.take(input);
        }
        let (id, error) = match ended {
            Ok(ended) => ended,
            Err(e) => {
                if e.is_panic() {
                    error!("the reader of a stream ended by a bug: {e}");
                }
                (e.id(), None)
            }
        };
        match self.read_by.remove(&id) {
            Some(Peer::Client(client, stream)) => self.client_gone(client, stream, error.as_ref()),
            Some(Peer::Worker(worker, stream)) => self.worker_gone(worker, stream, error.as_ref()),
            None => {}
        }
    }

    /// A number that no stream had before.
    fn new_stream(&mut self) -> StreamId {
        self.next_stream += 1;
        StreamId(self.next_stream)
    }

    /// An id that no lease had before.
    fn new_lease(&mut self) -> LeaseId {
        LeaseId(self.lease_ids.next_u64())
    }
}
