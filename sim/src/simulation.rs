//! A schedule: which of the parts of a lease's sessions acts next.

use std::{
    fmt,
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tensord_client::{
    Durability,
    testing::{SimulatedEnd, SimulatedSession},
};
use tensord_worker::testing::SimulatedHost;

use crate::{
    network::{Frames, Link},
    program::{Program, Progress, Request, Run},
};

/// Memory of a device: enough for all programs.
const CAPACITY_BYTES: u64 = 64 << 20;

/// Memory for snapshots: enough for two of each full device.
const SNAPSHOT_BYTES: u64 = 1 << 30;

/// Actions after which a run has failed: many times what the longest run takes.
const MAX_ACTIONS: u64 = 3_000_000;

/// Actions within which the connections come back and everything is acknowledged.
const SETTLE_ACTIONS: u64 = 6_000;

/// The longest step of the clock. Marks are 2 s apart.
const MAX_TICK_MS: u64 = 300;

/// Most steps of work that the worker executes at a time.
const MAX_STEPS: usize = 12;

/// How many faults of each kind a run has at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Ends of connections.
    pub cuts: u32,
    /// Ends of the lease's process.
    pub kills: u32,
}

impl Faults {
    /// No faults; and no snapshots either.
    pub const NONE: Self = Self { cuts: 0, kills: 0 };
}

/// The reply to a request of a program.
#[derive(Clone, PartialEq)]
pub enum Answer {
    /// A value, as bytes.
    Value(Vec<u8>),
    /// Everything before the request is done.
    Synced,
    /// A fault, in words.
    Fault(String),
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(bytes) => {
                let shown = &bytes[..bytes.len().min(16)];
                write!(f, "{} bytes that begin with {shown:?}", bytes.len())
            }
            Self::Synced => f.write_str("\"done\""),
            Self::Fault(reason) => write!(f, "the fault {reason:?}"),
        }
    }
}

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
    /// Ends of the lease's process.
    pub kills: u32,
    /// Those among them of a lease of several devices.
    pub group_kills: u32,
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
        self.snapshots += other.snapshots;
        self.answers += other.answers;
    }
}

/// Runs a program with the schedule of a seed.
///
/// # Errors
///
/// Why the session ended, or that the program does not get on.
pub fn simulate(program: &Program, seed: u64, faults: Faults) -> Result<(Outcome, Report), String> {
    let mut simulation = Simulation::new(program, seed, faults);
    for _ in 0..MAX_ACTIONS {
        simulation.act()?;
        if simulation.is_done() {
            simulation.settle()?;
            return simulation.finish();
        }
    }
    let answers = || simulation.clients.iter().flat_map(|client| &client.answers);
    let (answered, requests) = (answers().flatten().count(), answers().count());
    Err(format!(
        "the program has {answered} of {requests} answers after {MAX_ACTIONS} actions"
    ))
}

struct Simulation<'a> {
    rng: StdRng,
    now: Instant,
    clients: Vec<Client<'a>>,
    host: SimulatedHost,
    /// The faults that are left.
    faults: Faults,
    report: Report,
}

/// The program's part of a session.
struct Client<'a> {
    session: SimulatedSession,
    /// The connections of the track for ops and of that for bulk bytes.
    links: [Link; 2],
    run: Run<'a>,
    /// Requests without a reply, with their numbers.
    pending: Vec<(usize, Request)>,
    answers: Vec<Option<Answer>>,
    /// Whether the program waits for the replies to all of its requests.
    waits: bool,
    is_over: bool,
}

impl Client<'_> {
    fn run_program(&mut self, now: Instant) {
        self.collect_answers();
        if self.waits && self.pending.is_empty() {
            self.waits = false;
        }
        if self.waits || self.is_over || self.session.is_full() {
            return;
        }
        match self.run.step(&self.session, now) {
            Progress::Continues => {}
            Progress::Requested(request) => {
                self.pending.push((self.answers.len(), request));
                self.answers.push(None);
            }
            Progress::Waits => self.waits = true,
            Progress::Done => self.is_over = true,
        }
    }

    /// Takes the replies that have arrived.
    fn collect_answers(&mut self) {
        let answers = &mut self.answers;
        self.pending.retain_mut(|(number, request)| {
            let answer = match request {
                Request::Value(value) => value.try_recv().ok().map(|value| match value {
                    Ok(data) => Answer::Value(data.into_bytes().to_vec()),
                    Err(e) => Answer::Fault(e.to_string()),
                }),
                Request::Sync(synced) => synced.try_recv().ok().map(|synced| match synced {
                    Ok(()) => Answer::Synced,
                    Err(e) => Answer::Fault(e.to_string()),
                }),
            };
            let is_pending = answer.is_none();
            if answer.is_some() {
                answers[*number] = answer;
            }
            is_pending
        });
    }
}

impl<'a> Simulation<'a> {
    fn new(program: &'a Program, seed: u64, faults: Faults) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5c4e_d01e);
        let durability = match faults == Faults::NONE {
            true => Durability::Off,
            false => Durability::Auto,
        };
        // Some runs have few faults, and some many.
        let faults = Faults {
            cuts: rng.random_range(0..=faults.cuts),
            kills: rng.random_range(0..=faults.kills),
        };
        let sessions = SimulatedSession::lease(program.devices(), seed, durability);
        let client = |(device, session)| Client {
            session,
            links: Default::default(),
            run: Run::new(program, device),
            pending: Vec::new(),
            answers: Vec::new(),
            waits: false,
            is_over: false,
        };
        Self {
            now: Instant::now(),
            clients: sessions.into_iter().enumerate().map(client).collect(),
            host: SimulatedHost::start(program.devices(), CAPACITY_BYTES, SNAPSHOT_BYTES),
            faults,
            report: Report::default(),
            rng,
        }
    }

    /// Does one thing.
    fn act(&mut self) -> Result<(), String> {
        let at = self.rng.random_range(0..self.clients.len());
        let is_bulk = self.rng.random_bool(0.3);
        match self.rng.random_range(0..100) {
            0..12 => self.clients[at].run_program(self.now),
            12..28 => self.send(at, is_bulk),
            28..44 => return self.deliver_to_host(at, is_bulk),
            44..58 => return self.deliver_to_client(at, is_bulk),
            58..70 => drop(self.host.run(self.rng.random_range(1..=MAX_STEPS))),
            70..80 => self.reply(at, is_bulk),
            80..84 => self.keep_snapshot(at),
            84..86 => drop(self.host.reply_to_snapshot(at)),
            86..92 => return self.connect(at, is_bulk),
            92..94 => self.ping(at, is_bulk),
            94..98 => self.pass_time(),
            98 => self.cut(at, is_bulk),
            _ => self.kill(),
        }
        Ok(())
    }

    /// Passes as much time on average, whatever the number of sessions.
    fn pass_time(&mut self) {
        let tick_ms = self.rng.random_range(0..=MAX_TICK_MS);
        self.now += Duration::from_millis(tick_ms) / self.clients.len() as u32;
    }

    fn link(&mut self, at: usize, is_bulk: bool) -> &mut Link {
        &mut self.clients[at].links[usize::from(is_bulk)]
    }

    fn send(&mut self, at: usize, is_bulk: bool) {
        // An impatient look also sends what may wait for more.
        let is_patient = self.rng.random_bool(0.5);
        let client = &mut self.clients[at];
        let link = &mut client.links[usize::from(is_bulk)];
        if !link.is_up() {
            return;
        }
        let frames = client.session.next_frames(is_bulk, is_patient, self.now);
        if let Some(link) = link.accepted() {
            link.to_host.extend(frames);
        }
    }

    /// Queues the worker's frames.
    fn reply(&mut self, at: usize, is_bulk: bool) {
        let link = &mut self.clients[at].links[usize::from(is_bulk)];
        if let Some(link) = link.accepted() {
            link.to_client.extend(self.host.next_frames(at, is_bulk));
        }
    }

    fn ping(&mut self, at: usize, is_bulk: bool) {
        let client = &mut self.clients[at];
        let link = &mut client.links[usize::from(is_bulk)];
        if !link.is_up() {
            return;
        }
        let of_client = client.session.ping(is_bulk);
        let of_host = self.host.ping(at, is_bulk);
        if let Some(link) = link.accepted() {
            link.to_host.extend(of_client);
            link.to_client.extend(of_host);
        }
    }

    fn deliver_to_host(&mut self, at: usize, is_bulk: bool) -> Result<(), String> {
        if let Some(frame) = self.link(at, is_bulk).next_for_host() {
            let received = self.host.receive(at, is_bulk, frame);
            // Nothing is lost on a connection: it delivers all frames in order, or ends.
            received.map_err(|e| format!("the worker has not accepted a frame: {e}"))?;
        }
        Ok(())
    }

    fn deliver_to_client(&mut self, at: usize, is_bulk: bool) -> Result<(), String> {
        let client = &mut self.clients[at];
        if let Some(frame) = client.links[usize::from(is_bulk)].next_for_client() {
            let received = client.session.receive(is_bulk, frame, self.now);
            received.map_err(|end| format!("session {at} has ended: {end:?}"))?;
            client.collect_answers();
        }
        Ok(())
    }

    fn keep_snapshot(&mut self, at: usize) {
        let has_room = self.rng.random_bool(0.9);
        if self.host.keep_snapshot(at, has_room) && has_room {
            self.report.snapshots += 1;
        }
    }

    /// Opens a connection, or lets the reply to the opening arrive.
    fn connect(&mut self, at: usize, is_bulk: bool) -> Result<(), String> {
        let client = &mut self.clients[at];
        let link = &mut client.links[usize::from(is_bulk)];
        if let Some(opened) = link.establish() {
            return match client.session.opened(is_bulk, &opened) {
                Ok(()) => Ok(()),
                Err(SimulatedEnd::Lost(_)) => {
                    *link = Link::Down;
                    Ok(())
                }
                Err(end) => Err(format!("client {at} does not accept {opened:?}: {end:?}")),
            };
        }
        let is_needed = !is_bulk || client.session.needs_bulk();
        if !matches!(link, Link::Down) || !is_needed {
            return Ok(());
        }
        match self.host.open(&client.session.open(is_bulk)) {
            Ok(opened) => {
                *link = Link::Opening(Box::new(opened), Frames::default());
                Ok(())
            }
            // The track for ops must connect to a new process first.
            Err(_) if is_bulk => Ok(()),
            Err(error) => Err(format!("the worker rejects session {at}: {error}")),
        }
    }

    fn cut(&mut self, at: usize, is_bulk: bool) {
        if self.faults.cuts == 0 || matches!(self.link(at, is_bulk), Link::Down) {
            return;
        }
        self.faults.cuts -= 1;
        self.report.cuts += 1;
        *self.link(at, is_bulk) = Link::Down;
    }

    /// Kills the process, if the client could go on in another one. Before the first snapshots are
    /// kept, it could not.
    fn kill(&mut self) {
        let can_be_restored = |client: &Client| {
            let points = client.session.restore_points();
            self.host.can_restore(client.session.id(), &points)
        };
        if self.faults.kills == 0 || !self.clients.iter().all(can_be_restored) {
            return;
        }
        self.faults.kills -= 1;
        self.report.kills += 1;
        self.report.group_kills += u32::from(self.clients.len() > 1);
        self.host.kill();
        let clients = self.clients.iter_mut();
        clients.for_each(|client| client.links = Default::default());
    }

    fn is_done(&self) -> bool {
        let is_done = |client: &Client| client.is_over && client.pending.is_empty();
        self.clients.iter().all(is_done)
    }

    /// Lets the last acknowledgements arrive: until then, replies hold memory of the device.
    fn settle(&mut self) -> Result<(), String> {
        self.faults = Faults::NONE;
        (0..SETTLE_ACTIONS).try_for_each(|_| self.act())
    }

    fn finish(mut self) -> Result<(Outcome, Report), String> {
        let answers = self.clients.into_iter().map(|client| {
            let answers: Option<Vec<_>> = client.answers.into_iter().collect();
            answers.ok_or("a request has no answer")
        });
        let answers = answers.collect::<Result<Vec<_>, _>>()?;
        self.report.answers = answers.iter().map(|answers| answers.len() as u64).sum();
        let live_bytes = self.host.live_bytes();
        Ok((
            Outcome {
                answers,
                live_bytes,
            },
            self.report,
        ))
    }
}
