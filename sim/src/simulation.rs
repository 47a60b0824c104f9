//! A schedule: which of the parts of a pool acts next.

mod faults;
mod scheduler;
mod sessions;
mod workers;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tensord_client::{Durability, testing::SimulatedSession};
use tensord_proto::v1::{Joined, LeaseClaims};
use tensord_worker::testing::{SimulatedSettings, SimulatedWorker};

pub use self::faults::Faults;
use crate::{
    client::{Answer, Client},
    network::Link,
    program::Program,
    scheduler::Scheduler,
};

/// Memory of a device: enough for all programs.
const CAPACITY_BYTES: u64 = 64 << 20;

/// Memory for snapshots of a device: enough for two of it when it is full.
const SNAPSHOT_BYTES: u64 = 256 << 20;

/// Actions after which a run has failed: many times what the longest run takes.
const MAX_ACTIONS: u64 = 6_000_000;

/// Actions, for each session and worker, within which the connections come back and everything is
/// acknowledged.
const SETTLE_ACTIONS: usize = 4_000;

/// Number of times that this many actions are taken until the lease goes on.
const MAX_SETTLE_ROUNDS: usize = 50;

/// The longest step of the clock. Marks are 2 s apart.
const MAX_TICK_MS: u64 = 300;

/// Most steps of work that a worker executes at a time.
const MAX_STEPS: usize = 12;

/// What a program got.
#[derive(Clone, PartialEq)]
pub struct Outcome {
    /// For each device, the replies to its requests, in the order of the requests.
    pub answers: Vec<Vec<Answer>>,
    /// The bytes that are charged for its tensors in the end.
    pub live_bytes: u64,
}

/// What happened in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Ends of connections.
    pub cuts: u32,
    /// Ends of processes of the lease.
    pub kills: u32,
    /// Those among them of a lease of several devices.
    pub group_kills: u32,
    /// Those among them of a lease that had devices of several workers.
    pub spread_kills: u32,
    /// Ends of workers, with their processes.
    pub lost_workers: u32,
    /// Those among them that ran a part of the lease.
    pub lost_parts: u32,
    /// How often processes of two workers were killed at once.
    pub process_pairs: u32,
    /// How often two workers that ran parts of the lease were killed at once.
    pub part_pairs: u32,
    /// Workers that ran a part of the lease and lost their connection to the scheduler.
    pub cut_off: u32,
    /// Restarts of the scheduler.
    pub restarts: u32,
    /// Moves, suspensions and drained workers, by an administrator.
    pub moves: u32,
    /// How often the lease has got other devices, or the same again.
    pub places: u64,
    /// Snapshots that were kept.
    pub snapshots: u32,
    /// Replies that the program got.
    pub answers: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        self.cuts += other.cuts;
        self.kills += other.kills;
        self.group_kills += other.group_kills;
        self.spread_kills += other.spread_kills;
        self.lost_workers += other.lost_workers;
        self.lost_parts += other.lost_parts;
        self.process_pairs += other.process_pairs;
        self.part_pairs += other.part_pairs;
        self.cut_off += other.cut_off;
        self.restarts += other.restarts;
        self.moves += other.moves;
        self.places += other.places;
        self.snapshots += other.snapshots;
        self.answers += other.answers;
    }
}

/// Runs a program with the schedule of a seed. If it `is_traced`, what happens in the pool is printed.
///
/// # Errors
///
/// Why the lease or a session ended, or that the program does not get on.
pub fn simulate(
    program: &Program,
    seed: u64,
    faults: Faults,
    is_traced: bool,
) -> Result<(Outcome, Report), String> {
    let mut simulation = Simulation::new(program, seed, faults, is_traced);
    for _ in 0..MAX_ACTIONS {
        simulation.act()?;
        if simulation.clients.iter().all(Client::is_done) {
            simulation.settle()?;
            return simulation.finish();
        }
    }
    let answers = || simulation.clients.iter().flat_map(|client| &client.answers);
    let (answered, requests) = (answers().flatten().count(), answers().count());
    let lease = simulation.scheduler.describe();
    Err(format!(
        "the program has {answered} of {requests} answers after {MAX_ACTIONS} actions; {lease}"
    ))
}

struct Simulation<'a> {
    rng: StdRng,
    now: Instant,
    scheduler: Scheduler,
    lease: HeldLease,
    /// In the order of the lease's devices.
    clients: Vec<Client<'a>>,
    nodes: Vec<Node>,
    /// Connections between processes of the lease, by the worker that dials and the one that accepts.
    peer_links: BTreeMap<(u64, u64), Link<Joined>>,
    /// The faults that are left.
    faults: Faults,
    report: Report,
}

/// What the client knows of its lease.
#[derive(Default)]
struct HeldLease {
    /// Those of its token; `None` until it is granted.
    claims: Option<LeaseClaims>,
    /// Whether it has no devices.
    is_suspended: bool,
    /// What the scheduler knows, on the present stream, of whether the lease could go on from snapshots.
    reported_restorable: bool,
}

/// A host that can run a worker.
struct Node {
    /// Number of devices.
    devices: usize,
    /// The id of its present or last worker.
    id: u64,
    /// `None` while it is down.
    worker: Option<SimulatedWorker>,
    /// Since when it is drained.
    drained_since: Option<Instant>,
}

impl<'a> Simulation<'a> {
    fn new(program: &'a Program, seed: u64, faults: Faults, is_traced: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5c4e_d01e);
        let hosts = hosts(program.devices(), &mut rng);
        let durability = match faults == Faults::NONE {
            true => Durability::Off,
            false => Durability::Auto,
        };
        let faults = faults.some(&mut rng);
        let sessions = SimulatedSession::lease(program.devices(), seed, durability);
        let clients = sessions.into_iter().enumerate();
        let clients = clients.map(|(device, session)| Client::new(session, program, device));
        let now = Instant::now();
        let mut simulation = Self {
            now,
            scheduler: Scheduler::start(now, is_traced),
            lease: HeldLease::default(),
            clients: clients.collect(),
            nodes: Vec::new(),
            peer_links: BTreeMap::new(),
            faults,
            report: Report::default(),
            rng,
        };
        for (id, devices) in (1..).zip(hosts) {
            simulation.nodes.push(Node {
                devices,
                id,
                worker: None,
                drained_since: None,
            });
            simulation.start_worker(id as usize - 1);
        }
        // Both runs of a program begin with all workers there, so that the lease has the same devices.
        simulation.request_lease(durability);
        simulation
    }

    /// Starts the worker of a node, which joins the pool.
    fn start_worker(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let worker = SimulatedWorker::start(SimulatedSettings {
            worker_id: node.id,
            devices: node.devices,
            capacity_bytes: CAPACITY_BYTES,
            snapshot_bytes: SNAPSHOT_BYTES,
            lease_key: self.scheduler.lease_key(),
        });
        self.scheduler.join(node.id, &worker);
        node.worker = Some(worker);
    }

    /// Does one thing.
    fn act(&mut self) -> Result<(), String> {
        let rank = self.rng.random_range(0..self.clients.len());
        let at = self.rng.random_range(0..self.nodes.len());
        let is_bulk = self.rng.random_bool(0.3);
        match self.rng.random_range(0..160) {
            0..12 => self.clients[rank].run_program(self.now),
            12..28 => self.send(rank, is_bulk),
            28..44 => return self.deliver_to_worker(rank, is_bulk),
            44..58 => return self.deliver_to_client(rank, is_bulk),
            58..72 => self.run_process(at),
            72..82 => self.reply(rank, is_bulk),
            82..86 => self.keep_snapshot(rank),
            86..90 => self.reply_to_snapshot(at),
            90..96 => return self.connect(rank, is_bulk),
            96..98 => self.ping(rank, is_bulk),
            98..102 => self.pass_time(),
            102..108 => self.step_supervisor(at),
            108..116 => self.step_copies(at),
            116..128 => return self.step_peer_links(at),
            128..132 => self.heartbeat(at),
            132..140 => self.scheduler.receive_from(self.nodes[at].id, self.now),
            140..147 => self.deliver_command(at),
            147..150 => self.scheduler.receive_from_client(self.now),
            150..153 => return self.receive_update(),
            153..155 => self.report_client(),
            155..158 => self.repair(at),
            158 => self.cut(rank, at, is_bulk),
            _ => self.inject(at),
        }
        Ok(())
    }

    /// Passes as much time on average, whatever the number of sessions and workers.
    fn pass_time(&mut self) {
        let tick_ms = self.rng.random_range(0..=MAX_TICK_MS);
        let parties = self.clients.len() + self.nodes.len();
        self.now += Duration::from_millis(tick_ms) / parties as u32;
        while self.scheduler.tick(self.now) {}
    }

    /// Lets the lease go on, and the last acknowledgements arrive: until then, replies hold memory of the
    /// device. A session that goes on late has also to do what came after its snapshot.
    fn settle(&mut self) -> Result<(), String> {
        self.faults = Faults::NONE;
        let parties = self.clients.len() + self.nodes.len();
        for _ in 0..MAX_SETTLE_ROUNDS {
            let before = self.openings();
            (0..SETTLE_ACTIONS * parties).try_for_each(|_| self.act())?;
            let is_connected = |client: &Client| client.links[0].is_up();
            let is_connected = self.clients.iter().all(is_connected);
            if !self.lease.is_suspended && is_connected && self.openings() == before {
                return Ok(());
            }
        }
        let lease = self.scheduler.describe();
        Err(format!(
            "the program is done, and its lease does not go on: {lease}"
        ))
    }

    /// Returns how often each session was opened or resumed.
    fn openings(&self) -> Vec<u32> {
        let clients = self.clients.iter();
        clients.map(|client| client.openings).collect()
    }

    fn finish(mut self) -> Result<(Outcome, Report), String> {
        let answers = self.clients.iter_mut().map(|client| {
            let answers: Option<Vec<_>> = client.answers.drain(..).collect();
            answers.ok_or("a request has no answer")
        });
        let answers = answers.collect::<Result<Vec<_>, _>>()?;
        self.report.answers = answers.iter().map(|answers| answers.len() as u64).sum();
        // A worker that is cut off from the scheduler may still run what has gone on elsewhere.
        let places = self.places();
        let here = self.nodes.iter().filter(|node| places.contains(&node.id));
        let live_bytes = here.filter_map(|node| node.worker.as_ref());
        let live_bytes = live_bytes.map(SimulatedWorker::live_bytes).sum();
        let outcome = Outcome {
            answers,
            live_bytes,
        };
        Ok((outcome, self.report))
    }
}

/// Returns the number of devices of each host of a pool. There are enough for the lease, and for a part
/// of it to go on elsewhere.
fn hosts(devices: usize, rng: &mut StdRng) -> Vec<usize> {
    let most_each = rng.random_range(1..=devices);
    let mut hosts = vec![most_each; devices.div_ceil(most_each)];
    hosts.extend(vec![most_each; rng.random_range(1..=2)]);
    hosts
}
