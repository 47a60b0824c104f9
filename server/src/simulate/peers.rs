//! The workers and programs of a simulated pool, around the engine.
//!
//! Each job is the program of a client of its own, with one lease, which is durable unless the trace has
//! another one. A worker has the snapshots of its leases as soon as they run, and so has each keeper. When an
//! ended lease has left its devices, the run loop reports it, as that takes time.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    time::Duration,
};

use tensord_proto::{
    ids::{ClientId, LeaseId, PartId, RequestId, WorkerId},
    share::{DeviceShare, WHOLE_PERMILLE},
};
use tensord_scheduler::{
    AssignedKeeper, ClientEvent, Command, Demand, DeviceSpec, Durability, Endpoint, Engine, Event,
    HandedOver, HandoverOutcome, LeasedDevice, Options, Policy, Registration, RequestOrder,
    StreamId, Timestamp, WorkerEvent,
};

use super::trace::Job;

/// What happens to a job, by its position in the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// It has these devices, for the first time or again, by their positions in the pool.
    Runs(usize, Vec<usize>),
    /// It has no devices and goes on later.
    Suspended(usize),
    /// It gets no devices, for this reason.
    Refused(usize, String),
    /// It has ended before its time, for this reason.
    Lost(usize, String),
}

/// A lease that a worker is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ending {
    pub(super) worker: WorkerId,
    pub(super) lease: LeaseId,
}

/// The engine and its peers.
pub(super) struct Peers {
    engine: Engine,
    now: Timestamp,
    workers: BTreeMap<WorkerId, Worker>,
    /// Whether leases can be suspended, so that workers must report their snapshots.
    reports_snapshots: bool,
    /// The jobs whose leases have no snapshots.
    not_durable: BTreeSet<usize>,
    /// The workers whose reports have changed.
    to_report: BTreeSet<WorkerId>,
    events: VecDeque<Event>,
    notices: Vec<Notice>,
    endings: Vec<Ending>,
}

/// What a worker knows.
struct Worker {
    /// The position of its first device among those of the pool.
    first_device: usize,
    /// The memory of each device, in bytes, and the leases that have it, until they have left it.
    devices: Vec<(u64, Vec<Holder>)>,
    /// The leases that run and have snapshots.
    leases: BTreeMap<LeaseId, bool>,
    /// The keeper of each part of these.
    keepers: BTreeMap<PartId, AssignedKeeper>,
    /// The handovers since the last report.
    handed_over: Vec<HandedOver>,
}

/// A lease that has a device, or a share of it.
#[derive(Clone, Copy, Debug)]
struct Holder {
    lease: LeaseId,
    share: Option<DeviceShare>,
}

/// Returns whether these leases can have a device of this memory at the same time.
fn fits(memory_bytes: u64, holders: &[Holder]) -> bool {
    let shares: Option<Vec<_>> = holders.iter().map(|holder| holder.share).collect();
    let Some(shares) = shares else {
        // One has all of the device.
        return holders.len() == 1;
    };
    let lanes: BTreeSet<_> = shares.iter().map(|share| share.lane).collect();
    let permille: u32 = shares.iter().map(|share| share.permille).sum();
    let memory: u128 = shares.iter().map(|it| u128::from(it.memory_bytes)).sum();
    lanes.len() == shares.len() && permille <= WHOLE_PERMILLE && memory <= memory_bytes.into()
}

impl Peers {
    /// Creates a pool of workers with these devices at the time `start_ms`, without leases.
    pub(super) fn new(
        options: Options,
        policy: Policy,
        workers: impl Iterator<Item = Vec<DeviceSpec>>,
        start_ms: u64,
    ) -> Self {
        let now = Timestamp::from_millis(start_ms);
        let mut peers = Self {
            reports_snapshots: options.order == RequestOrder::Fair,
            not_durable: BTreeSet::new(),
            engine: Engine::new(options, 1, now),
            now,
            workers: BTreeMap::new(),
            to_report: BTreeSet::new(),
            events: VecDeque::from([Event::SetPolicy { policy }]),
            notices: Vec::new(),
            endings: Vec::new(),
        };
        let mut first_device = 0;
        for (number, devices) in (1..).zip(workers) {
            let count = devices.len();
            peers.join(number, devices, first_device);
            first_device += count;
        }
        peers.settle();
        peers
    }

    /// Moves the clock forward.
    pub(super) fn set_now(&mut self, now_ms: u64) {
        self.now = Timestamp::from_millis(now_ms);
    }

    /// Returns when the engine must be called at the latest, in milliseconds.
    pub(super) fn deadline_ms(&self) -> Option<u64> {
        let deadline = self.engine.next_deadline();
        let deadline = deadline.map(Timestamp::as_millis);
        deadline.filter(|&at| at < u64::MAX)
    }

    /// Calls the engine at its deadline.
    pub(super) fn tick(&mut self) {
        self.events.push_back(Event::Tick);
        self.settle();
    }

    /// Has the program of a job request devices.
    pub(super) fn request(&mut self, number: usize, job: &Job) {
        if !job.is_durable {
            self.not_durable.insert(number);
        }
        let attach = ClientEvent::Attach {
            tenant: job.tenant.as_str().into(),
            claims: Vec::new(),
        };
        self.client_event(number, attach);
        let request = ClientEvent::Request {
            request: RequestId(1),
            demand: Demand {
                devices: job.devices,
                kind: job.kind.clone(),
                memory_bytes: job.memory_bytes,
                share_permille: job.share_permille,
                durability: match job.is_durable {
                    true => Durability::Auto,
                    false => Durability::Off,
                },
                recover_within: None,
                max_duration: job.max_duration_ms.map(Duration::from_millis),
                is_spot: job.is_spot,
                may_end: false,
            },
            priority: job.priority,
            lease: lease_of(number),
        };
        self.client_event(number, request);
        self.settle();
    }

    /// Has the program of a job release its devices and end.
    pub(super) fn finish(&mut self, number: usize) {
        let lease = lease_of(number);
        self.client_event(number, ClientEvent::Release { lease });
        self.client_event(number, ClientEvent::Disconnected);
        self.settle();
    }

    /// Has a worker report that a lease has left its devices.
    pub(super) fn release(&mut self, Ending { worker, lease }: Ending) {
        if let Some(known) = self.workers.get_mut(&worker) {
            for (_, holders) in &mut known.devices {
                holders.retain(|holder| holder.lease != lease);
            }
        }
        let busy = BTreeSet::new();
        self.worker_event(worker, WorkerEvent::Released { lease, busy });
        self.settle();
    }

    /// Returns what has happened to jobs since the last call, in order.
    pub(super) fn take_notices(&mut self) -> Vec<Notice> {
        mem::take(&mut self.notices)
    }

    /// Returns the leases that workers began to end since the last call.
    pub(super) fn take_endings(&mut self) -> Vec<Ending> {
        mem::take(&mut self.endings)
    }

    fn join(&mut self, number: u64, devices: Vec<DeviceSpec>, first_device: usize) {
        let worker = Worker {
            first_device,
            devices: devices
                .iter()
                .map(|device| (device.memory_bytes, Vec::new()))
                .collect(),
            leases: BTreeMap::new(),
            keepers: BTreeMap::new(),
            handed_over: Vec::new(),
        };
        self.workers.insert(WorkerId(number), worker);
        let registration = Registration {
            endpoint: Endpoint {
                name: format!("worker-{number}"),
                address: format!("worker-{number}:1"),
                certificate_sha256: [0; 32],
            },
            devices,
            store: None,
        };
        let join = WorkerEvent::join_new(registration);
        self.worker_event(WorkerId(number), join);
    }

    fn worker_event(&mut self, worker: WorkerId, event: WorkerEvent) {
        let stream = StreamId(worker.0);
        self.events.push_back(Event::Worker {
            worker,
            stream,
            event,
        });
    }

    fn client_event(&mut self, number: usize, event: ClientEvent) {
        let client = ClientId(number as u64 + 1);
        self.events.push_back(Event::Client {
            client,
            stream: StreamId(client.0),
            event,
        });
    }

    /// Has the engine handle the events, and those that follow from them.
    fn settle(&mut self) {
        loop {
            while let Some(event) = self.events.pop_front() {
                for command in self.engine.handle(event, self.now) {
                    self.carry_out(command);
                }
                // Nobody restarts the scheduler.
                drop(self.engine.take_record_changes());
            }
            let Some(worker) = self.to_report.pop_first() else {
                return;
            };
            self.report_snapshots(worker);
        }
    }

    /// Does what the peers do on a command.
    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Granted {
                client, devices, ..
            }
            | Command::Moved {
                client, devices, ..
            } => self.start(number_of(client), &devices),
            Command::Suspended { client, .. } => {
                self.notices.push(Notice::Suspended(number_of(client)));
            }
            Command::Refused { client, reason, .. } => {
                let number = number_of(client);
                self.notices
                    .push(Notice::Refused(number, reason.to_string()));
                self.client_event(number, ClientEvent::Disconnected);
            }
            Command::LeaseEnded { client, reason, .. } => {
                let number = number_of(client);
                self.notices.push(Notice::Lost(number, reason.to_string()));
                self.client_event(number, ClientEvent::Disconnected);
            }
            Command::KeepSnapshots {
                part,
                source,
                keeper,
                assignment,
            } => self.keep(source.worker, keeper.as_keeper(part, assignment)),
            Command::EndLease { worker, lease, .. } => {
                if let Some(known) = self.workers.get_mut(&worker) {
                    known.leases.remove(&lease);
                    known.keepers.retain(|part, _| part.lease != lease);
                }
                self.endings.push(Ending { worker, lease });
            }
            // Nobody looks at positions, and what is held of snapshots takes no room.
            _ => {}
        }
    }

    /// Has a job run on these devices.
    ///
    /// # Panics
    ///
    /// If other leases have one of the devices, or too much of it, which is a bug of the engine.
    fn start(&mut self, number: usize, devices: &[LeasedDevice]) {
        let lease = lease_of(number);
        let has_snapshots = self.reports_snapshots && !self.not_durable.contains(&number);
        let mut positions = Vec::with_capacity(devices.len());
        for device in devices {
            let device_ref = device.device_ref;
            let Some(worker) = self.workers.get_mut(&device_ref.worker) else {
                continue;
            };
            positions.push(worker.first_device + device_ref.index as usize);
            let (memory_bytes, holders) = &mut worker.devices[device_ref.index as usize];
            let share = device.share;
            holders.push(Holder { lease, share });
            assert!(
                fits(*memory_bytes, holders),
                "more than device {device_ref:?} has is granted: {holders:?}"
            );
            if has_snapshots {
                worker.leases.insert(lease, true);
                self.to_report.insert(device_ref.worker);
            }
        }
        positions.sort_unstable();
        self.notices.push(Notice::Runs(number, positions));
        if has_snapshots {
            let restorable = ClientEvent::Restorable {
                lease,
                is_restorable: true,
            };
            self.client_event(number, restorable);
        }
    }

    fn keep(&mut self, source: WorkerId, keeper: AssignedKeeper) {
        let Some(worker) = self.workers.get_mut(&source) else {
            return;
        };
        if worker.leases.contains_key(&keeper.part.lease) {
            worker.keepers.insert(keeper.part, keeper);
        } else {
            worker.handed_over.push(HandedOver {
                to: keeper,
                outcome: HandoverOutcome::Done,
            });
        }
        if self.reports_snapshots {
            self.to_report.insert(source);
        }
    }

    /// Has a worker report that it and the keepers have all snapshots.
    fn report_snapshots(&mut self, worker: WorkerId) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let kept = WorkerEvent::SnapshotsKept {
            at_keepers: known.keepers.values().copied().collect(),
            refused: Vec::new(),
            handed_over: mem::take(&mut known.handed_over),
            here: known.leases.clone(),
            in_store: BTreeSet::new(),
        };
        self.worker_event(worker, kept);
    }
}

/// Returns the lease of a job. Ids are spread like random ones, and differ.
fn lease_of(number: usize) -> LeaseId {
    LeaseId((number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Returns the job of a client.
fn number_of(client: ClientId) -> usize {
    (client.0 - 1) as usize
}
