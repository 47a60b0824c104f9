//! A pool in which all devices are leased and many requests wait, as the engine sees it: events of workers
//! and clients, without processes or a network.
//!
//! The load is a closed loop: for each lease that ends, there is a new request. Workers release devices at
//! once, send a heartbeat each second of the load's own time, and report that they have the snapshots of
//! all leases, which are durable, as is the default of programs.
//!
//! With [rules](Sizes::has_rules), half of the tenants have guarantees of together half of the devices, a quarter
//! has limits, and some requests are for spot leases, for shares, or for leases that may end. So requests that are
//! entitled wait all the time, and leases are suspended for them.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    mem,
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use tensord_proto::ids::{ClientId, LeaseId, PartId, RequestId, WorkerId};
use tensord_scheduler::{
    AssignedKeeper, ClientEvent, Command, Demand, DeviceFingerprint, DeviceSpec, Durability,
    Endpoint, Engine, Event, LeasedDevice, Options, Policy, Registration, StreamId, Suspender,
    TenantPolicy, Timestamp, WorkerEvent,
};

/// Number of devices of each worker.
const DEVICES: usize = 8;

/// Of so many workers, one has devices of kind `flex`, and the others of kind `cuda`.
const FLEX_EVERY: usize = 5;

/// Number of requests that a client has at most, so that the queue takes all.
const REQUESTS_OF_CLIENT: usize = 25;

/// Number of tenants, with weights from 1 to 4.
const TENANTS: usize = 40;

/// Number of leases that end in a millisecond of the load's own time: as many as are placed in real time if
/// the engine is as fast as it should be.
const ENDS_PER_MS: u64 = 10;

/// The sizes of a load.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Sizes {
    pub(super) workers: usize,
    /// Number of leases, most of which have devices; the others are suspended.
    pub(super) leases: usize,
    pub(super) waiting: usize,
    /// Whether tenants have guarantees and limits, and requests are of all sorts.
    pub(super) has_rules: bool,
}

/// How long leases have run when requests begin to wait: longer than the time for which none is suspended.
const RUN_TIME_MS: u64 = 20_000;

/// How long requests have waited when the engine is measured: longer than the time after which they have reservations.
const WAIT_TIME_MS: u64 = 660_000;

/// A lease that has devices, or had some and waits.
struct Running {
    lease: LeaseId,
    client: ClientId,
}

/// The engine, its peers, and how long it took for each event.
pub(super) struct Load {
    engine: Engine,
    sizes: Sizes,
    rng: StdRng,
    now: Timestamp,
    running: Vec<Running>,
    /// The keeper of each part of the leases on each worker.
    keepers: HashMap<WorkerId, BTreeMap<PartId, AssignedKeeper>>,
    /// The leases on each worker.
    leases: HashMap<WorkerId, BTreeMap<LeaseId, bool>>,
    /// The clients, by the number of requests that they may have yet.
    clients: VecDeque<ClientId>,
    next_id: u64,
    next_worker: usize,
    /// The times that the engine took, in seconds, while the load is measured.
    pub(super) event_times: Vec<f64>,
    /// Number of leases granted so far.
    pub(super) granted: usize,
}

impl Load {
    /// Creates a pool in which `sizes.leases` leases exist and nothing waits. Calls `with_workers` when the
    /// workers have joined, before the first lease.
    pub(super) fn new(sizes: Sizes, with_workers: impl FnOnce()) -> Self {
        let now = Timestamp::from_millis(0);
        let mut load = Self {
            engine: Engine::new(Options::default(), 1, now),
            sizes,
            rng: StdRng::seed_from_u64(23),
            now,
            running: Vec::new(),
            keepers: HashMap::new(),
            leases: HashMap::new(),
            clients: VecDeque::new(),
            next_id: 1,
            next_worker: 0,
            event_times: Vec::new(),
            granted: 0,
        };
        let tenants = (0..TENANTS).map(|tenant| {
            let policy = tenant_policy(tenant, sizes);
            (tenant_name(tenant).as_str().into(), policy)
        });
        let policy: Policy = tenants.collect();
        load.handle(Event::SetPolicy { policy });
        for worker in 0..sizes.workers {
            load.join(worker);
        }
        for client in 0..(sizes.leases + sizes.waiting).div_ceil(REQUESTS_OF_CLIENT) {
            load.attach(client);
        }
        with_workers();
        load.fill();
        load
    }

    /// Has as many requests wait as are to wait, and drops the times taken so far.
    pub(super) fn queue_requests(&mut self) {
        if self.sizes.has_rules {
            self.now = Timestamp::from_millis(self.now.as_millis() + RUN_TIME_MS);
            (0..self.sizes.workers).for_each(|_| self.report_next());
        }
        for _ in 0..self.sizes.waiting {
            self.request();
        }
        if self.sizes.has_rules {
            self.now = Timestamp::from_millis(self.now.as_millis() + WAIT_TIME_MS);
            (0..self.sizes.workers).for_each(|_| self.report_next());
        }
        self.event_times.clear();
        self.granted = 0;
    }

    /// Returns the number of leases and of requests that wait.
    pub(super) fn counts(&self) -> (usize, usize) {
        let snapshot = self.engine.snapshot();
        (snapshot.leases, snapshot.waiting_requests)
    }

    /// Ends a lease at random and requests another one, and has the workers report in turn.
    pub(super) fn step(&mut self, step: u64) {
        if !self.running.is_empty() {
            let at = self.rng.random_range(0..self.running.len());
            let Running { lease, client } = self.running.swap_remove(at);
            self.client_event(client, ClientEvent::Release { lease });
        }
        self.request();
        if step.is_multiple_of(ENDS_PER_MS) {
            self.now = Timestamp::from_millis(self.now.as_millis() + 1);
            self.report_next();
        }
    }

    /// Returns the total time that the engine took for the events so far.
    pub(super) fn engine_time(&self) -> Duration {
        Duration::from_secs_f64(self.event_times.iter().sum())
    }

    /// Has leases granted, and suspends as many as there are more than devices.
    fn fill(&mut self) {
        let suspended = self
            .sizes
            .leases
            .saturating_sub(self.sizes.workers * DEVICES);
        for _ in 0..suspended {
            self.request_devices(plain(1, Some("cuda"), 0));
        }
        // The workers report the snapshots, without which no lease can be suspended.
        for _ in 0..self.sizes.workers {
            self.report_next();
        }
        for Running { lease, .. } in mem::take(&mut self.running) {
            let by = Suspender::Administrator;
            self.handle(Event::SuspendLease { lease, by });
        }
        for _ in suspended..self.sizes.leases {
            self.request_devices(plain(1, None, 0));
        }
    }

    fn join(&mut self, number: usize) {
        let kind = if number.is_multiple_of(FLEX_EVERY) {
            "flex"
        } else {
            "cuda"
        };
        let device = DeviceSpec {
            kind: kind.into(),
            name: format!("{kind} device"),
            memory_bytes: 80 << 30,
            fingerprint: Some(DeviceFingerprint {
                hash: [kind.len() as u8; 16],
                is_exact: kind == "flex",
            }),
            takes_shares: true,
        };
        let registration = Registration {
            endpoint: Endpoint {
                name: format!("worker-{number}"),
                address: format!("10.0.{}.{}:7777", number / 256, number % 256),
                certificate_sha256: [number as u8; 32],
            },
            devices: vec![device; DEVICES],
            store: None,
        };
        let join = WorkerEvent::join_new(registration);
        self.worker_event(WorkerId(number as u64 + 1), join);
    }

    fn attach(&mut self, number: usize) {
        let client = ClientId(number as u64 + 1);
        let attach = ClientEvent::Attach {
            tenant: tenant_name(number % TENANTS).as_str().into(),
            claims: Vec::new(),
        };
        self.client_event(client, attach);
        self.clients.push_back(client);
    }

    /// Requests a lease: most are of one device, and most of a kind.
    fn request(&mut self) {
        let devices = match self.rng.random_range(0..100) {
            0..70 => 1,
            70..85 => 2,
            85..95 => 4,
            _ => 8,
        };
        let kind = match self.rng.random_range(0..10) {
            0..6 => Some("cuda"),
            6..8 => Some("flex"),
            _ => None,
        };
        let memory_bytes = if self.rng.random_bool(0.3) {
            40 << 30
        } else {
            0
        };
        let mut demand = plain(devices, kind, memory_bytes);
        if self.sizes.has_rules {
            match self.rng.random_range(0..100) {
                0..5 => demand.is_spot = true,
                5..10 => demand.may_end = true,
                10..20 => {
                    let share = [250, 500][self.rng.random_range(0..2)];
                    (demand.devices, demand.share_permille) = (1, Some(share));
                    demand.memory_bytes = 8 << 30;
                }
                _ => {}
            }
        }
        self.request_devices(demand);
    }

    fn request_devices(&mut self, demand: Demand) {
        let Some(client) = self.clients.pop_front() else {
            return;
        };
        self.clients.push_back(client);
        let id = self.next_id;
        self.next_id += 1;
        let request = ClientEvent::Request {
            request: RequestId(id),
            demand,
            priority: 0,
            // Ids are random.
            lease: LeaseId(id.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        };
        self.client_event(client, request);
    }

    /// Has the next worker send a heartbeat, and report that it and the keepers have all snapshots.
    fn report_next(&mut self) {
        let worker = WorkerId((self.next_worker % self.sizes.workers) as u64 + 1);
        self.next_worker += 1;
        self.worker_event(worker, WorkerEvent::Heartbeat);
        let at_keepers = self.keepers.get(&worker).into_iter().flatten();
        let kept = WorkerEvent::SnapshotsKept {
            at_keepers: at_keepers.map(|(_, keeper)| *keeper).collect(),
            refused: Vec::new(),
            handed_over: Vec::new(),
            here: self.leases.get(&worker).cloned().unwrap_or_default(),
            in_store: Default::default(),
        };
        self.worker_event(worker, kept);
    }

    fn worker_event(&mut self, worker: WorkerId, event: WorkerEvent) {
        let stream = StreamId(worker.0);
        self.handle(Event::Worker {
            worker,
            stream,
            event,
        });
    }

    fn client_event(&mut self, client: ClientId, event: ClientEvent) {
        let stream = StreamId(client.0);
        self.handle(Event::Client {
            client,
            stream,
            event,
        });
    }

    /// Has the engine handle an event and all events that follow from it, and measures each.
    fn handle(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let start = Instant::now();
            let commands = self.engine.handle(event, self.now);
            let deadline = self.engine.next_deadline();
            drop(self.engine.take_record_changes());
            self.event_times.push(start.elapsed().as_secs_f64());
            if deadline.is_some_and(|at| at <= self.now) {
                events.push_back(Event::Tick);
            }
            for command in commands {
                events.extend(self.carry_out(command));
            }
        }
    }

    /// Has a lease run on its devices.
    fn start(
        &mut self,
        client: ClientId,
        lease: LeaseId,
        devices: Vec<LeasedDevice>,
    ) -> Vec<Event> {
        for device in devices {
            let worker = device.device_ref.worker;
            self.leases.entry(worker).or_default().insert(lease, true);
        }
        vec![Event::Client {
            client,
            stream: StreamId(client.0),
            event: ClientEvent::Restorable {
                lease,
                is_restorable: true,
            },
        }]
    }

    /// Does what the peers do on a command. Returns the events that follow.
    fn carry_out(&mut self, command: Command) -> Vec<Event> {
        match command {
            Command::Granted {
                client,
                lease,
                devices,
                ..
            } => {
                self.granted += 1;
                self.running.push(Running { lease, client });
                self.start(client, lease, devices)
            }
            Command::Moved {
                client,
                lease,
                devices,
                ..
            } => self.start(client, lease, devices),
            Command::LeaseEnded { lease, .. } => {
                self.running.retain(|it| it.lease != lease);
                Vec::new()
            }
            Command::KeepSnapshots {
                part,
                source,
                keeper,
                assignment,
            } => {
                let parts = self.keepers.entry(source.worker).or_default();
                parts.insert(part, keeper.as_keeper(part, assignment));
                Vec::new()
            }
            Command::EndLease { worker, lease, .. } => {
                if let Some(parts) = self.keepers.get_mut(&worker) {
                    parts.retain(|part, _| part.lease != lease);
                }
                if let Some(leases) = self.leases.get_mut(&worker) {
                    leases.remove(&lease);
                }
                vec![Event::Worker {
                    worker,
                    stream: StreamId(worker.0),
                    event: WorkerEvent::Released {
                        lease,
                        busy: Default::default(),
                    },
                }]
            }
            _ => Vec::new(),
        }
    }
}

/// Returns the demand of a request without special wishes.
fn plain(devices: u32, kind: Option<&str>, memory_bytes: u64) -> Demand {
    Demand {
        devices,
        kind: kind.map(Into::into),
        memory_bytes,
        share_permille: None,
        durability: Durability::Auto,
        recover_within: None,
        max_duration: None,
        is_spot: false,
        may_end: false,
    }
}

/// Returns what a tenant may have.
fn tenant_policy(tenant: usize, sizes: Sizes) -> TenantPolicy {
    let mut policy = TenantPolicy {
        weight: 1 + tenant as u32 % 4,
        ..TenantPolicy::default()
    };
    let equal_part = (sizes.workers * DEVICES).div_ceil(TENANTS) as u32;
    match tenant % 4 {
        0 | 1 if sizes.has_rules => {
            policy.guaranteed.insert("cuda".into(), equal_part);
        }
        2 if sizes.has_rules => {
            // At least as many as the largest request needs, which would be refused otherwise.
            let limit = (2 * equal_part).max(DEVICES as u32);
            policy.limit.devices.insert("cuda".into(), limit);
        }
        _ => {}
    }
    policy
}

fn tenant_name(number: usize) -> String {
    format!("team-{number}")
}
