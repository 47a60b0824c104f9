//! Tests of when an executor returns the turn of its device.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;

use super::*;
use crate::{
    device_turn::{MESSAGES_PER_DEVICE, TurnMessage},
    memory::DeviceMemory,
    usage::Meters,
};

/// A session whose device works on after each slice.
struct Launching {
    meters: Meters,
    slices: AtomicUsize,
    fences: AtomicUsize,
}

impl Launching {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            meters: Meters::new(&DeviceMemory::new(1 << 20)),
            slices: AtomicUsize::new(0),
            fences: AtomicUsize::new(0),
        })
    }

    fn fences(&self) -> usize {
        self.fences.load(Ordering::SeqCst)
    }
}

impl TimeSliced for Launching {
    fn run(self: &Arc<Self>, _: &mut dyn FnMut() -> bool) -> TimeSliceEnd {
        self.slices.fetch_add(1, Ordering::SeqCst);
        TimeSliceEnd::Parked
    }

    fn begin_work(&self, now: Instant) -> Work {
        self.meters.begin(now)
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn fence(&self) {
        self.fences.fetch_add(1, Ordering::SeqCst);
    }

    fn end_after_panic(self: &Arc<Self>) {
        panic!("no slice panics");
    }
}

/// An executor of a device that other processes want, with what it sends to the worker.
struct Shared {
    executor: Executor<Launching>,
    turn: Arc<DeviceTurn>,
    sent: mpsc::Receiver<(u32, TurnMessage)>,
}

impl Shared {
    fn start() -> Self {
        let (messages, sent) = mpsc::channel(MESSAGES_PER_DEVICE);
        let turn = DeviceTurn::shared(0, messages);
        Self {
            executor: Executor::start(0, turn.clone()).unwrap(),
            turn,
            sent,
        }
    }

    /// Waits for the next message to the worker.
    fn next(&mut self) -> TurnMessage {
        self.sent.blocking_recv().expect("the executor runs").1
    }

    /// Runs a slice of the session, for which the executor has the turn.
    fn run_slice(&self, session: &Arc<Launching>) {
        let before = session.slices.load(Ordering::SeqCst);
        self.executor.queue().push(session.clone());
        while session.slices.load(Ordering::SeqCst) == before {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_turn_that_nobody_wants_is_kept_without_a_fence() {
    let (mut shared, session) = (Shared::start(), Launching::new());
    shared.executor.queue().push(session.clone());
    assert_eq!(shared.next(), TurnMessage::Request);
    shared.turn.granted();
    for _ in 0..100 {
        shared.run_slice(&session);
    }
    shared.sent.try_recv().unwrap_err();
    assert_eq!(session.fences(), 0);
}

#[test]
fn a_turn_is_returned_after_a_fence_of_each_session_that_has_used_it() {
    let (mut shared, sessions) = (Shared::start(), [Launching::new(), Launching::new()]);
    shared.turn.granted();
    for session in &sessions {
        shared.run_slice(session);
        shared.run_slice(session);
    }
    // The executor's thread has no work now, and is woken.
    shared.turn.revoked();
    assert_eq!(shared.next(), TurnMessage::Return);
    assert_eq!(sessions.each_ref().map(|it| it.fences()), [1, 1]);
    // One that was not used is returned without.
    shared.turn.granted();
    shared.turn.revoked();
    assert_eq!(shared.next(), TurnMessage::Return);
    // Only the session that has used the next one waits for the device.
    shared.executor.queue().push(sessions[0].clone());
    assert_eq!(shared.next(), TurnMessage::Request);
    shared.turn.granted();
    shared.turn.revoked();
    assert_eq!(shared.next(), TurnMessage::Return);
    assert_eq!(sessions.each_ref().map(|it| it.fences()), [2, 1]);
}

#[test]
fn a_wanted_turn_is_returned_once_there_is_no_work() {
    let (mut shared, session) = (Shared::start(), Launching::new());
    shared.turn.granted();
    shared.turn.wanted();
    assert_eq!(shared.next(), TurnMessage::Return, "it has no work");
    shared.executor.queue().push(session.clone());
    assert_eq!(shared.next(), TurnMessage::Request);
    shared.turn.granted();
    shared.turn.wanted();
    assert_eq!(shared.next(), TurnMessage::Return, "it has no more");
    assert_eq!(session.slices.load(Ordering::SeqCst), 1);
    assert_eq!(session.fences(), 1);
}

#[test]
fn sessions_that_are_gone_are_not_remembered() {
    let shared = Shared::start();
    shared.turn.granted();
    for _ in 0..100 {
        shared.run_slice(&Launching::new());
    }
    assert!(lock(&shared.executor.queue().launched).len() <= 3);
}
