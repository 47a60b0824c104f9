//! The run of a simulation: a clock that goes from event to event.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

use tensord_scheduler::{Options, Policy, RequestOrder};

use super::{
    metrics::{JobOutcome, Outcome, outcome},
    peers::{Ending, Notice, Peers},
    pieces::{self, Piece},
    pool_spec::PoolSpec,
    recorder::Recorder,
    trace::Job,
};

/// After so many calls at deadlines of the engine in which nothing happens to a job, the jobs that wait are
/// taken to wait for ever.
const MAX_IDLE_TICKS: u32 = 1000;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// The jobs in the order of their arrival, at least one.
    pub(crate) jobs: &'a [Job],
    pub(crate) pool: &'a PoolSpec,
    /// The tenants; one that is not among them has weight 1.
    pub(crate) policy: &'a Policy,
    /// The order of requests.
    pub(crate) order: RequestOrder,
    /// What tenants had so long ago counts half as much as what they have now, in the fair order; not at all if
    /// it is zero.
    pub(crate) half_life: Duration,
    /// How long a request that is next waits until others pass it only if they can be suspended.
    pub(crate) reserve_after: Duration,
    /// How long it takes after the end of a job, or its suspension, until its devices are free, in
    /// milliseconds.
    pub(crate) release_ms: u64,
}

/// What happens at a time, apart from arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// A job ends, unless it was suspended since.
    Done { number: usize, start: u32 },
    /// A lease has left its devices.
    Released(Ending),
}

/// A job that has arrived.
#[derive(Clone, Debug, Default)]
struct JobState {
    /// How long it still has to run, at the time since which it runs if it does.
    left_ms: u64,
    running_since_ms: Option<u64>,
    /// How often it has got devices.
    starts: u32,
    outcome: JobOutcome,
}

struct Run<'a> {
    setup: Setup<'a>,
    peers: Peers,
    recorder: Recorder,
    now_ms: u64,
    /// What is due, the earliest first, and of the same time in the order in which it was added.
    due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    added: u64,
    states: Vec<JobState>,
    /// The number of jobs that have arrived.
    arrived: usize,
    /// The number of jobs that have ended, or were refused.
    over: usize,
    /// Whether it is recorded which devices jobs have.
    keeps_pieces: bool,
}

/// Runs a simulation. Calls `progress` now and then with the number of jobs that have ended or were refused.
///
/// At one time, jobs end first and devices become free, then deadlines of the engine are due, and then jobs
/// arrive, in the order of the trace.
///
/// # Panics
///
/// If the engine grants leases more of a device at once than there is, which is a bug of it.
pub(crate) fn run(setup: &Setup<'_>, progress: &mut dyn FnMut(usize)) -> Outcome {
    let start_ms = setup.jobs.first().map_or(0, |job| job.arrival_ms);
    let mut run = Run::new(*setup, start_ms);
    let mut idle_ticks = 0;
    while let Some((at_ms, next)) = run.next() {
        let over = run.over;
        run.now_ms = at_ms;
        run.peers.set_now(at_ms);
        run.recorder.advance(at_ms);
        idle_ticks = match next {
            Next::Deadline => idle_ticks + 1,
            Next::Due | Next::Arrival => 0,
        };
        run.step(next);
        if idle_ticks > MAX_IDLE_TICKS {
            break;
        }
        if run.over != over && run.over.is_multiple_of(256) {
            progress(run.over);
        }
    }
    let jobs = run.states.into_iter().map(|state| state.outcome).collect();
    outcome(setup.order, start_ms, setup.jobs, jobs, run.recorder)
}

/// What is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    Due,
    Deadline,
    Arrival,
}

impl<'a> Run<'a> {
    fn new(setup: Setup<'a>, start_ms: u64) -> Self {
        let options = Options {
            order: setup.order,
            half_life: setup.half_life,
            reserve_after: setup.reserve_after,
            // Nothing is refused because others wait.
            max_waiting: 2 * setup.jobs.len() + 1,
            position_interval: Duration::MAX,
            ..Options::default()
        };
        let mut devices = BTreeMap::<String, u64>::new();
        for device in setup.pool.workers().flatten() {
            *devices.entry(device.kind).or_default() += 1;
        }
        let (workers, policy) = (setup.pool.workers(), setup.policy);
        let state = |job: &Job| JobState {
            left_ms: job.duration_ms,
            ..JobState::default()
        };
        Self {
            peers: Peers::new(options, policy.clone(), workers, start_ms),
            recorder: Recorder::new(setup.jobs, &devices, policy, start_ms),
            now_ms: start_ms,
            due: BinaryHeap::new(),
            added: 0,
            states: setup.jobs.iter().map(state).collect(),
            arrived: 0,
            over: 0,
            keeps_pieces: pieces::are_kept(devices.values().sum(), setup.jobs.len()),
            setup,
        }
    }

    /// Returns what is next, and its time; `None` if all jobs have ended, or nothing happens any more.
    fn next(&self) -> Option<(u64, Next)> {
        if self.over == self.states.len() && self.due.is_empty() {
            return None;
        }
        let due = self
            .due
            .peek()
            .map(|Reverse((at_ms, ..))| (*at_ms, Next::Due));
        let deadline = self.peers.deadline_ms();
        let deadline = deadline.map(|at_ms| (at_ms.max(self.now_ms), Next::Deadline));
        let arrival = self.setup.jobs.get(self.arrived);
        let arrival = arrival.map(|job| (job.arrival_ms, Next::Arrival));
        [due, deadline, arrival].into_iter().flatten().min()
    }

    fn step(&mut self, next: Next) {
        match next {
            Next::Due => {
                if let Some(Reverse((_, _, due))) = self.due.pop() {
                    self.handle(due);
                }
            }
            Next::Deadline => self.peers.tick(),
            Next::Arrival => {
                let number = self.arrived;
                self.arrived += 1;
                self.recorder.arrive(&self.setup.jobs[number]);
                self.peers.request(number, &self.setup.jobs[number]);
            }
        }
        for notice in self.peers.take_notices() {
            self.notice(notice);
        }
        for ending in self.peers.take_endings() {
            self.add(self.now_ms + self.setup.release_ms, Due::Released(ending));
        }
    }

    fn add(&mut self, at_ms: u64, due: Due) {
        self.added += 1;
        self.due.push(Reverse((at_ms, self.added, due)));
    }

    fn handle(&mut self, due: Due) {
        match due {
            Due::Released(ending) => self.peers.release(ending),
            Due::Done { number, start } => {
                let state = &mut self.states[number];
                if state.running_since_ms.is_none() || state.starts != start {
                    return;
                }
                state.outcome.done_ms = Some(self.now_ms);
                self.stop(number);
                self.leave(number);
                self.peers.finish(number);
            }
        }
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Runs(number, devices) => self.start(number, devices),
            Notice::Suspended(number) => {
                // It is reported again while the job waits.
                if self.stop(number) {
                    self.states[number].outcome.suspensions += 1;
                }
            }
            Notice::Refused(number, reason) | Notice::Lost(number, reason) => {
                self.stop(number);
                self.leave(number);
                self.states[number].outcome.failure = Some(reason);
            }
        }
    }

    /// A job has these devices, by their positions in the pool.
    fn start(&mut self, number: usize, devices: Vec<usize>) {
        self.stop(number);
        self.recorder.start(&self.setup.jobs[number]);
        let now_ms = self.now_ms;
        let state = &mut self.states[number];
        state.outcome.granted_ms.get_or_insert(now_ms);
        state.running_since_ms = Some(now_ms);
        state.starts += 1;
        if self.keeps_pieces {
            state.outcome.pieces.push(Piece {
                from_ms: now_ms,
                to_ms: now_ms,
                devices,
            });
        }
        let (done_ms, start) = (now_ms + state.left_ms, state.starts);
        self.add(done_ms, Due::Done { number, start });
    }

    /// A job has no devices any more. Returns whether it had some.
    fn stop(&mut self, number: usize) -> bool {
        let state = &mut self.states[number];
        let Some(since_ms) = state.running_since_ms.take() else {
            return false;
        };
        state.left_ms -= self.now_ms - since_ms;
        if let Some(piece) = state.outcome.pieces.last_mut() {
            piece.to_ms = self.now_ms;
        }
        self.recorder.stop(&self.setup.jobs[number]);
        true
    }

    /// A job is over.
    fn leave(&mut self, number: usize) {
        self.over += 1;
        self.recorder.leave(&self.setup.jobs[number]);
    }
}
