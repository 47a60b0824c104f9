//! The scheduler: its engine, and its streams to the workers and the client.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use bytes::Bytes;
use tensord_proto::{
    grant::number,
    ids::{ClientId, LeaseId, PartId, RequestId, WorkerId},
    v1::{self, LeaseClaims, WorkerCommand},
};
use tensord_scheduler::{
    AssignedKeeper, Claim, ClientEvent, Command, Demand, DeviceFingerprint, DeviceRef, DeviceSpec,
    Durability, Endpoint, Engine, Event, GrantedDevice, LeaseRecord, LeasedDevice, Options,
    Outages, Registration, StreamId, Suspender, Timestamp, WorkerEvent,
};
use tensord_transport::token::LeaseSigner;
use tensord_worker::testing::SimulatedWorker;

use crate::messages;

/// The lease of the client. It has no other one.
pub(crate) const LEASE: LeaseId = LeaseId(10);

const CLIENT: ClientId = ClientId(1);
const TENANT: &str = "simulated";

/// What a client learns from the scheduler about its lease.
pub(crate) enum LeaseUpdate {
    /// The lease has these devices, by this token.
    Place { token: Bytes, claims: LeaseClaims },
    /// A worker of the lease was lost.
    Interrupted,
    /// The lease has no devices.
    Suspended,
    /// The lease is over, for this reason.
    Over(String),
}

/// A stream between the scheduler and another party, and the messages on their way.
struct Stream<U, D> {
    id: StreamId,
    /// Whether its first event has arrived.
    is_established: bool,
    to_scheduler: VecDeque<U>,
    from_scheduler: VecDeque<D>,
}

impl<U, D> Stream<U, D> {
    /// Lets the next event arrive.
    fn receive(&mut self) -> Option<U> {
        let event = self.to_scheduler.pop_front()?;
        self.is_established = true;
        Some(event)
    }
}

/// The scheduler.
pub(crate) struct Scheduler {
    engine: Engine,
    term: u64,
    signer: LeaseSigner,
    /// What is on disk.
    records: BTreeMap<LeaseId, LeaseRecord>,
    /// Number of streams so far.
    streams: u64,
    workers: BTreeMap<WorkerId, Stream<WorkerEvent, WorkerCommand>>,
    client: Option<Stream<ClientEvent, LeaseUpdate>>,
    /// The latest keeper of each part of the lease.
    assigned: BTreeMap<PartId, AssignedKeeper>,
    /// The keepers that have all snapshots of their part, as each worker has reported on its present stream.
    at_keepers: BTreeMap<WorkerId, Vec<AssignedKeeper>>,
    /// The same of the workers that have the snapshots of their own sessions.
    kept_here: BTreeMap<WorkerId, bool>,
    /// Whether the client has reported on its present stream that it could go on from snapshots.
    is_restorable: bool,
    origin: Instant,
    /// Whether events and commands are printed.
    is_traced: bool,
}

impl Scheduler {
    /// Starts the first scheduler of a pool.
    ///
    /// # Panics
    ///
    /// If the system provides no randomness for a key.
    pub(crate) fn start(now: Instant, is_traced: bool) -> Self {
        let key = LeaseSigner::generate().expect("randomness for a key");
        Self {
            engine: Engine::new(Options::default(), 1, Timestamp::default()),
            term: 1,
            signer: LeaseSigner::from_pkcs8(&key).expect("a key"),
            records: BTreeMap::new(),
            streams: 0,
            workers: BTreeMap::new(),
            client: None,
            assigned: BTreeMap::new(),
            at_keepers: BTreeMap::new(),
            kept_here: BTreeMap::new(),
            is_restorable: false,
            origin: now,
            is_traced,
        }
    }

    /// Returns the public key that verifies lease tokens.
    pub(crate) fn lease_key(&self) -> Vec<u8> {
        self.signer.public_key()
    }

    /// Ends the scheduler, with all its streams, and starts the next one.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.term += 1;
        self.engine = Engine::new(Options::default(), self.term, self.time(now));
        self.engine.restore(self.records.clone());
        self.workers.clear();
        self.client = None;
        self.at_keepers.clear();
        self.kept_here.clear();
        self.is_restorable = false;
    }

    fn time(&self, now: Instant) -> Timestamp {
        let since = now.saturating_duration_since(self.origin);
        Timestamp::from_millis(since.as_millis() as u64)
    }

    fn new_stream<U, D>(&mut self, first: U) -> Stream<U, D> {
        self.streams += 1;
        Stream {
            id: StreamId(self.streams),
            is_established: false,
            to_scheduler: VecDeque::from([first]),
            from_scheduler: VecDeque::new(),
        }
    }

    /// Returns whether a deadline of the engine has passed, and handles it.
    pub(crate) fn tick(&mut self, now: Instant) -> bool {
        let time = self.time(now);
        let is_due = self.engine.next_deadline().is_some_and(|at| at <= time);
        if is_due {
            self.handle(Event::Tick, now);
        }
        is_due
    }

    /// Prints what happens, if that was requested.
    pub(crate) fn trace(&self, now: Instant, what: impl FnOnce() -> String) {
        if self.is_traced {
            println!("{:>8} ms  {}", self.time(now).as_millis(), what());
        }
    }

    fn handle(&mut self, event: Event, now: Instant) {
        self.trace(now, || format!("{event:?}"));
        let commands = self.engine.handle(event, self.time(now));
        for command in &commands {
            self.trace(now, || format!("    {command:?}"));
        }
        for change in self.engine.take_record_changes() {
            match change.record {
                Some(record) => drop(self.records.insert(change.lease, record)),
                None => drop(self.records.remove(&change.lease)),
            }
        }
        commands.into_iter().for_each(|it| self.execute(it));
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Granted { lease, devices, .. } => self.send_place(lease, 0, &devices),
            Command::Moved {
                lease,
                epoch,
                devices,
                ..
            } => self.send_place(lease, epoch, &devices),
            Command::Interrupted { .. } => self.send_update(LeaseUpdate::Interrupted),
            Command::Suspended { .. } => self.send_update(LeaseUpdate::Suspended),
            Command::Refused { reason, .. } => {
                self.send_update(LeaseUpdate::Over(reason.to_string()))
            }
            Command::LeaseEnded { reason, .. } => {
                self.send_update(LeaseUpdate::Over(reason.to_string()))
            }
            Command::KeepSnapshots {
                part,
                source,
                keeper,
                assignment,
            } => {
                self.assigned
                    .insert(part, keeper.as_keeper(part, assignment));
                let messages = messages::keep_snapshots(part, &source, &keeper, assignment);
                messages.into_iter().for_each(|(to, it)| self.send(to, it));
            }
            Command::HoldSnapshots {
                holder,
                lease,
                part,
            } => self.send(holder, messages::hold_snapshots(lease, part)),
            Command::DropSnapshots {
                keeper,
                lease,
                part,
            } => self.send(keeper, messages::drop_snapshots(lease, part)),
            Command::EndLease {
                worker,
                lease,
                grants,
                hold_snapshots,
            } => self.send(worker, messages::end_lease(lease, &grants, hold_snapshots)),
            // The request has the position 1 until there are devices, and there is no store.
            Command::Queued { .. } | Command::DropStored { .. } => {}
        }
    }

    fn send(&mut self, worker: WorkerId, command: WorkerCommand) {
        if let Some(stream) = self.workers.get_mut(&worker) {
            stream.from_scheduler.push_back(command);
        }
    }

    fn send_update(&mut self, update: LeaseUpdate) {
        if let Some(stream) = &mut self.client {
            stream.from_scheduler.push_back(update);
        }
    }

    /// Announces a lease to its workers, and sends the client a token.
    fn send_place(&mut self, lease: LeaseId, epoch: u64, devices: &[LeasedDevice]) {
        for (worker, message) in messages::lease_granted(lease, epoch, devices) {
            self.send(worker, message);
        }
        let terms = self.engine.lease(lease);
        let durability = match terms.map(|terms| terms.durability) {
            Some(Durability::Auto) => v1::Durability::Auto,
            _ => v1::Durability::Off,
        };
        let claims = LeaseClaims {
            lease_id: lease.0,
            client_id: CLIENT.0,
            shares: devices.iter().map(messages::lease_share).collect(),
            tenant: TENANT.into(),
            expires_at_ms: u64::MAX,
            durability: durability.into(),
            epoch,
            ..LeaseClaims::default()
        };
        let token = self.signer.sign(&claims).into();
        self.send_update(LeaseUpdate::Place { token, claims });
    }
}

/// Workers.
impl Scheduler {
    /// Returns whether a worker has a stream.
    pub(crate) fn has_joined(&self, worker: u64) -> bool {
        self.workers.contains_key(&WorkerId(worker))
    }

    /// Begins a stream of a worker.
    pub(crate) fn join(&mut self, id: u64, worker: &SimulatedWorker) {
        let device = |memory_bytes| DeviceSpec {
            kind: "flex".into(),
            name: "simulated".into(),
            memory_bytes,
            fingerprint: Some(DeviceFingerprint {
                hash: [1; 16],
                is_exact: true,
            }),
            takes_shares: true,
        };
        let (held, ended, suspended) = worker.holdings();
        let join = WorkerEvent::Join {
            registration: Registration {
                endpoint: Endpoint {
                    name: format!("w{id}"),
                    address: format!("w{id}:1"),
                    certificate_sha256: worker.certificate_sha256(),
                },
                devices: worker.device_bytes().into_iter().map(device).collect(),
                store: None,
            },
            held: held.iter().map(messages::held_device).collect(),
            ended: ended.iter().map(messages::ended_grant).collect(),
            suspended,
            out_of_service: Outages::new(),
            leaving: false,
        };
        let stream = self.new_stream(join);
        self.workers.insert(WorkerId(id), stream);
    }

    /// Queues what a worker reports.
    pub(crate) fn report(&mut self, worker: u64, reports: Vec<v1::worker_message::Body>) {
        let worker = WorkerId(worker);
        if let Some(stream) = self.workers.get_mut(&worker) {
            let events = reports.into_iter();
            let events = events.flat_map(|it| messages::worker_events(worker, it));
            stream.to_scheduler.extend(events);
        }
    }

    /// Lets the next event of a worker arrive.
    pub(crate) fn receive_from(&mut self, worker: u64, now: Instant) {
        let worker = WorkerId(worker);
        let Some(stream) = self.workers.get_mut(&worker) else {
            return;
        };
        let (id, Some(event)) = (stream.id, stream.receive()) else {
            return;
        };
        match &event {
            WorkerEvent::Join { .. } => self.forget_reports(worker),
            WorkerEvent::SnapshotsKept {
                at_keepers, here, ..
            } => {
                self.at_keepers.insert(worker, at_keepers.clone());
                self.kept_here.insert(worker, here.contains_key(&LEASE));
            }
            _ => {}
        }
        let stream = id;
        let event = Event::Worker {
            worker,
            stream,
            event,
        };
        self.handle(event, now);
    }

    fn forget_reports(&mut self, worker: WorkerId) {
        self.at_keepers.remove(&worker);
        self.kept_here.remove(&worker);
    }

    /// Returns the next command for a worker, which arrives now.
    pub(crate) fn next_command(&mut self, worker: u64) -> Option<WorkerCommand> {
        let stream = self.workers.get_mut(&WorkerId(worker))?;
        stream.from_scheduler.pop_front()
    }

    /// Ends the stream of a worker.
    pub(crate) fn disconnect(&mut self, worker: u64, now: Instant) {
        let worker = WorkerId(worker);
        if let Some(stream) = self.workers.remove(&worker) {
            self.forget_reports(worker);
            let event = Event::Worker {
                worker,
                stream: stream.id,
                event: WorkerEvent::Disconnected,
            };
            self.handle(event, now);
        }
    }

    /// Drains a worker, or no longer.
    pub(crate) fn drain(&mut self, worker: u64, is_drained: bool, now: Instant) {
        let worker = WorkerId(worker);
        self.handle(Event::Drain { worker, is_drained }, now);
    }

    /// Returns the keeper of a part of the lease, if the worker that runs the part has reported that the
    /// keeper has its snapshots, and the scheduler knows that the keeper is there.
    pub(crate) fn keeper_with_snapshots(&self, worker: u64, part: u32) -> Option<u64> {
        let at_keepers = self.at_keepers.get(&WorkerId(worker))?;
        let mut here = at_keepers.iter().filter(|it| it.part.index == part);
        // What was reported of an earlier assignment does not count.
        let keeper = here
            .find(|it| self.assigned.get(&it.part) == Some(it))?
            .worker;
        let stream = self.workers.get(&keeper);
        stream.filter(|it| it.is_established).map(|_| keeper.0)
    }

    /// Returns whether a worker has reported that it has the snapshots of the lease's sessions there.
    pub(crate) fn has_snapshots(&self, worker: u64) -> bool {
        self.kept_here.get(&WorkerId(worker)) == Some(&true)
    }
}

/// The client, and an administrator.
impl Scheduler {
    /// Returns whether the client has a stream.
    pub(crate) fn has_client(&self) -> bool {
        self.client.is_some()
    }

    /// Begins a stream of the client, which holds the lease by a token with these claims.
    pub(crate) fn attach(&mut self, claims: Option<&LeaseClaims>) {
        let claims = claims.map(claim).into_iter().collect();
        let tenant = TENANT.into();
        let attach = ClientEvent::Attach { tenant, claims };
        self.client = Some(self.new_stream(attach));
    }

    /// Queues a request of the client for a lease.
    pub(crate) fn request(&mut self, devices: usize, durability: Durability) {
        let demand = Demand {
            devices: devices as u32,
            kind: Some("flex".into()),
            memory_bytes: 0,
            share_permille: None,
            durability,
            recover_within: None,
            max_duration: None,
            is_spot: false,
            may_end: false,
        };
        self.report_client(ClientEvent::Request {
            request: RequestId(1),
            demand,
            priority: 0,
            lease: LEASE,
        });
    }

    /// Queues what the client reports.
    pub(crate) fn report_client(&mut self, event: ClientEvent) {
        if let Some(stream) = &mut self.client {
            stream.to_scheduler.push_back(event);
        }
    }

    /// Lets the next event of the client arrive.
    pub(crate) fn receive_from_client(&mut self, now: Instant) {
        let Some(stream) = &mut self.client else {
            return;
        };
        let (id, Some(event)) = (stream.id, stream.receive()) else {
            return;
        };
        match &event {
            ClientEvent::Attach { .. } => self.is_restorable = false,
            ClientEvent::Restorable { is_restorable, .. } => self.is_restorable = *is_restorable,
            _ => {}
        }
        let event = Event::Client {
            client: CLIENT,
            stream: id,
            event,
        };
        self.handle(event, now);
    }

    /// Returns what the client learns next, which arrives now.
    pub(crate) fn next_update(&mut self) -> Option<LeaseUpdate> {
        self.client.as_mut()?.from_scheduler.pop_front()
    }

    /// Ends the stream of the client.
    pub(crate) fn disconnect_client(&mut self, now: Instant) {
        if let Some(stream) = self.client.take() {
            self.is_restorable = false;
            let event = Event::Client {
                client: CLIENT,
                stream: stream.id,
                event: ClientEvent::Disconnected,
            };
            self.handle(event, now);
        }
    }

    /// Returns whether the lease runs by the grants of a token of this epoch, and its client has reported
    /// that it could go on from snapshots.
    pub(crate) fn runs(&self, epoch: u64) -> bool {
        let lease = self.engine.lease(LEASE);
        let runs = lease.is_some_and(|lease| {
            lease.devices.is_some()
                && lease.suspension.is_none()
                && lease.waits.is_none()
                && lease.epoch == epoch
        });
        runs && self.is_restorable
    }

    /// Suspends the lease, if it can be suspended. Returns whether it was.
    pub(crate) fn suspend(&mut self, now: Instant) -> bool {
        let (lease, by) = (LEASE, Suspender::Administrator);
        let can_be = self.engine.check_suspend(LEASE, by).is_ok();
        if can_be {
            self.handle(Event::SuspendLease { lease, by }, now);
        }
        can_be
    }

    /// Resumes the lease, if it is suspended.
    pub(crate) fn resume(&mut self, now: Instant) {
        let (lease, by) = (LEASE, Suspender::Administrator);
        if self.engine.check_resume(LEASE, by).is_ok() {
            self.handle(Event::ResumeLease { lease, by }, now);
        }
    }

    /// Moves the lease to its keeper, if it can move. Returns whether it did.
    pub(crate) fn move_lease(&mut self, now: Instant) -> bool {
        let can_move = self.engine.check_move(LEASE).is_ok();
        if can_move {
            self.handle(Event::MoveLease { lease: LEASE }, now);
        }
        can_move
    }

    /// Describes what the scheduler knows of the lease, for a failure.
    pub(crate) fn describe(&self) -> String {
        match self.engine.lease(LEASE) {
            None => "the scheduler does not know the lease".into(),
            Some(lease) => format!(
                "epoch {}, devices {:?}, waits {:?}, suspension {:?}, restorable {}",
                lease.epoch,
                lease.devices.map(|devices| {
                    let devices = devices.into_iter();
                    let place = |it: LeasedDevice| (it.worker.name, it.device_ref.index);
                    devices.map(place).collect::<Vec<_>>()
                }),
                lease.waits,
                lease.suspension,
                self.is_restorable,
            ),
        }
    }
}

/// Returns the claim of a client by a token.
fn claim(claims: &LeaseClaims) -> Claim {
    let device = |share: &v1::LeaseShare| GrantedDevice {
        device_ref: DeviceRef {
            worker: WorkerId(share.worker_id),
            index: share.device_index,
        },
        grant: number(share.grant),
        share: None,
    };
    Claim {
        lease: LeaseId(claims.lease_id),
        lease_devices: claims.shares.iter().map(device).collect(),
        durability: match claims.durability() {
            v1::Durability::Auto => Durability::Auto,
            _ => Durability::Off,
        },
        epoch: claims.epoch,
        time_left: None,
        is_spot: false,
        may_end: false,
    }
}
