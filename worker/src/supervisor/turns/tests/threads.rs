//! Processes that share a device, as threads, with the state machine between them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc as std_mpsc,
    },
    thread::JoinHandle,
};

use tokio::sync::mpsc;

use super::*;
use crate::device_turn::{DeviceTurn, MESSAGES_PER_DEVICE, TurnMessage};

/// The time of a slice, by the test's clock.
const SLICE: Duration = Duration::from_millis(2);

/// A process, which always has work. Its turn is that of the device at its own index, as there is one
/// device here.
struct Process {
    turn: Arc<DeviceTurn>,
    thread: JoinHandle<()>,
    /// Ends the slice that it executes.
    end_slice: std_mpsc::Sender<()>,
}

/// What the processes have in common.
struct Common {
    /// Number of processes that execute a slice.
    users: AtomicUsize,
    is_over: AtomicBool,
}

impl Process {
    /// Starts a process, which sends its index with each slice that it has begun.
    fn start(
        turn: Arc<DeviceTurn>,
        index: usize,
        common: Arc<Common>,
        slices: std_mpsc::Sender<usize>,
    ) -> Self {
        let (end_slice, is_ended) = std_mpsc::channel();
        let its = turn.clone();
        let thread = std::thread::spawn(move || {
            loop {
                its.begin(&|| {});
                if common.is_over.load(Ordering::SeqCst) {
                    return;
                }
                let users = common.users.fetch_add(1, Ordering::SeqCst);
                assert_eq!(users, 0, "one at a time");
                slices.send(index).unwrap();
                let ended = is_ended.recv();
                common.users.fetch_sub(1, Ordering::SeqCst);
                its.end();
                if ended.is_err() {
                    return;
                }
            }
        });
        Self {
            turn,
            thread,
            end_slice,
        }
    }
}

/// The worker of the processes.
struct Worker {
    turns: Turns,
    now: Instant,
    weights: Vec<u32>,
    processes: Vec<Process>,
    sent: mpsc::Receiver<(u32, TurnMessage)>,
    /// The leases that have requested the turn; an id is the index of the process.
    waiting: BTreeSet<LeaseId>,
}

impl Worker {
    fn start(weights: &[u32], common: &Arc<Common>, slices: &std_mpsc::Sender<usize>) -> Self {
        let (messages, sent) = mpsc::channel(weights.len() * MESSAGES_PER_DEVICE);
        let process = |index: usize| {
            let turn = DeviceTurn::shared(index as u32, messages.clone());
            Process::start(turn, index, common.clone(), slices.clone())
        };
        Self {
            turns: Turns::new(TIMEOUT),
            now: Instant::now(),
            weights: weights.to_vec(),
            processes: (0..weights.len()).map(process).collect(),
            sent,
            waiting: BTreeSet::new(),
        }
    }

    /// Waits until a slice has begun and all other processes wait for the turn, so that no time passes
    /// while a message is on its way. Returns the process that executes the slice.
    fn wait_for_slice(&mut self, sliced: &std_mpsc::Receiver<usize>) -> usize {
        let mut executing = None;
        loop {
            executing = executing.or_else(|| sliced.try_recv().ok());
            if let Some(process) = executing
                && self.waiting.len() == self.processes.len() - 1
            {
                return process;
            }
            let Ok((process, message)) = self.sent.try_recv() else {
                std::thread::yield_now();
                continue;
            };
            let (lease, weight) = (LeaseId(process.into()), self.weights[process as usize]);
            let actions = match message {
                TurnMessage::Request => {
                    self.waiting.insert(lease);
                    self.turns.request(self.now, lease, 0, weight)
                }
                TurnMessage::Return => self.turns.returned(self.now, lease, 0),
            };
            self.carry_out(&actions);
        }
    }

    /// Ends the slice of a process.
    fn end_slice(&mut self, process: usize) {
        self.now += SLICE;
        let actions = self.turns.tick(self.now);
        self.carry_out(&actions);
        self.processes[process].end_slice.send(()).unwrap();
    }

    fn carry_out(&mut self, actions: &[TurnAction]) {
        for action in actions {
            let turn = &self.processes[action.lease().0 as usize].turn;
            match action {
                Grant(lease, _) => {
                    self.waiting.remove(lease);
                    turn.granted();
                }
                Want(..) => turn.wanted(),
                Revoke(..) => turn.revoked(),
                Kill(..) => panic!("every turn is returned"),
            }
        }
    }
}

#[test]
fn processes_take_turns_by_weight() {
    const WEIGHTS: [u32; 3] = [600, 300, 100];
    let common = Arc::new(Common {
        users: AtomicUsize::new(0),
        is_over: AtomicBool::new(false),
    });
    let (slices, sliced) = std_mpsc::channel();
    let mut worker = Worker::start(&WEIGHTS, &common, &slices);
    let mut executed = [0_u32; WEIGHTS.len()];
    for _ in 0..1000 {
        let process = worker.wait_for_slice(&sliced);
        worker.end_slice(process);
        executed[process] += 1;
        let had = |index: usize| virtual_ns_of(SLICE * executed[index], WEIGHTS[index]);
        for (ahead, weight) in WEIGHTS.iter().enumerate() {
            // A turn ends with a slice.
            let bound = virtual_ns_of(MIN_TURN + SLICE, *weight);
            let is_within = |behind| had(ahead) <= had(behind) + bound + 1;
            assert!((0..WEIGHTS.len()).all(is_within), "{executed:?}");
        }
    }
    common.is_over.store(true, Ordering::SeqCst);
    for Process {
        turn,
        thread,
        end_slice,
    } in worker.processes
    {
        drop(end_slice);
        turn.close();
        thread.join().unwrap();
    }
}
