//! A process's turn on a device that it may share with the processes of other leases.
//!
//! The threads that execute ops [begin](DeviceTurn::begin) and [end](DeviceTurn::end) each time
//! slice. While no other process wants the device, that takes no message: the turn stays here.
//! The worker decides whose turn it is (`supervisor::turns`). It makes two [demands](Demand) on a
//! process that has the turn: to return it when there is no work, and to return it now.
//!
//! The executor's thread alone returns a turn, as it first waits for the device. A GPU may still
//! execute what was launched in the turn; if that went on during the turn of another process,
//! turns would not measure who uses the device.

use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicU8, Ordering},
};

use tokio::sync::mpsc;

use crate::locks::lock;

/// What a process sends to its worker about the turn of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnMessage {
    /// The process has work for the device.
    Request,
    /// The process returns the turn.
    Return,
}

/// Number of messages of a device that may be on their way to the worker. There are two at most:
/// a turn that is returned, and the request for the next one.
pub(crate) const MESSAGES_PER_DEVICE: usize = 2;

/// What the worker wants of a process that has the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Demand {
    /// Nothing: nobody else wants the turn.
    None = 0,
    /// The turn, once the process has no work for the device.
    WhenIdle = 1,
    /// The turn, after the time slice that runs.
    Now = 2,
}

/// The turn of one device.
pub(crate) struct DeviceTurn {
    state: Mutex<State>,
    /// A [`Demand`], which changes only while `state` is locked.
    demand: AtomicU8,
    changed: Condvar,
    /// Wakes the thread that returns the turn.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The device's index, and where messages go. `None`: no other process uses the device.
    worker: Option<(u32, mpsc::Sender<(u32, TurnMessage)>)>,
}

#[derive(Debug)]
struct State {
    is_held: bool,
    /// Whether a request is on its way.
    is_requested: bool,
    /// Whether a thread waits for the device, to return the turn then.
    is_returning: bool,
    /// Whether a time slice has begun since the turn was granted.
    is_used: bool,
    /// Number of time slices that are running.
    running: usize,
    /// Whether threads no longer wait, as the process ends.
    is_closed: bool,
}

impl Default for DeviceTurn {
    /// Creates the turn of a device that no other process uses.
    fn default() -> Self {
        Self::new(true, None)
    }
}

impl DeviceTurn {
    /// Creates the turn of the device at `index`, which the worker grants. `messages` must have
    /// room for [`MESSAGES_PER_DEVICE`] messages of each device.
    pub(crate) fn shared(index: u32, messages: mpsc::Sender<(u32, TurnMessage)>) -> Arc<Self> {
        Arc::new(Self::new(false, Some((index, messages))))
    }

    fn new(is_held: bool, worker: Option<(u32, mpsc::Sender<(u32, TurnMessage)>)>) -> Self {
        Self {
            state: Mutex::new(State {
                is_held,
                is_requested: false,
                is_returning: false,
                is_used: false,
                running: 0,
                is_closed: false,
            }),
            demand: AtomicU8::new(Demand::None as u8),
            changed: Condvar::new(),
            wake: OnceLock::new(),
            worker,
        }
    }

    /// Sets what wakes the thread that [returns](Self::give_back) the turn. It is called while no
    /// lock of the turn is held.
    pub(crate) fn set_wake(&self, wake: Box<dyn Fn() + Send + Sync>) {
        // An executor sets it once.
        let _ = self.wake.set(wake);
    }

    /// Returns whether other processes may use the device.
    pub(crate) fn is_shared(&self) -> bool {
        self.worker.is_some()
    }

    /// Returns whether a request for the turn is on its way.
    pub(crate) fn is_requested(&self) -> bool {
        lock(&self.state).is_requested
    }

    /// Returns what the worker wants. Locks nothing.
    pub(crate) fn demand(&self) -> Demand {
        match self.demand.load(Ordering::Acquire) {
            0 => Demand::None,
            1 => Demand::WhenIdle,
            _ => Demand::Now,
        }
    }

    /// Waits for the turn, and begins a time slice. [`end`](Self::end) must follow. Returns the turn
    /// before, after `fence`, if that is due.
    pub(crate) fn begin(&self, fence: &dyn Fn()) {
        let mut state = lock(&self.state);
        while !self.may_begin(&state) && !state.is_closed {
            if state.is_held && state.running == 0 && !state.is_returning {
                state = self.return_after(fence, state);
                continue;
            }
            if !state.is_held && !state.is_requested {
                state.is_requested = true;
                self.send(TurnMessage::Request);
            }
            state = self.wait(state);
        }
        state.begin();
    }

    /// Begins a time slice if that takes no waiting, and nobody else wants the turn. Returns whether
    /// it has begun.
    pub(crate) fn try_begin(&self) -> bool {
        let mut state = lock(&self.state);
        let may_begin = state.is_held && self.demand() == Demand::None;
        if may_begin {
            state.begin();
        }
        may_begin
    }

    /// Ends a time slice.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.running -= 1;
        drop(state);
        if self.demand() != Demand::None {
            self.changed.notify_all();
            self.wake_executor();
        }
    }

    /// Returns the turn that the worker demands: when no slice runs any more, and after `fence`.
    pub(crate) fn give_back(&self, fence: &dyn Fn()) {
        let mut state = lock(&self.state);
        while state.running > 0 && !state.is_closed {
            state = self.wait(state);
        }
        if state.is_held && !state.is_returning && self.demand() != Demand::None {
            drop(self.return_after(fence, state));
        }
    }

    /// The worker has granted the turn.
    pub(crate) fn granted(&self) {
        let mut state = lock(&self.state);
        (state.is_held, state.is_requested) = (true, false);
        state.is_used = false;
        self.set_demand(Demand::None);
        self.changed.notify_all();
    }

    /// Another process waits for the turn.
    pub(crate) fn wanted(&self) {
        self.demanded(Demand::WhenIdle);
    }

    /// The worker requests the turn back.
    pub(crate) fn revoked(&self) {
        self.demanded(Demand::Now);
    }

    fn demanded(&self, demand: Demand) {
        let state = lock(&self.state);
        // A turn that is being returned needs no demand.
        if state.is_held && !state.is_returning && !state.is_closed {
            self.set_demand(demand);
        }
        drop(state);
        self.wake_executor();
    }

    /// Lets all threads go on, as the process ends.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        self.set_demand(Demand::None);
        drop(state);
        self.changed.notify_all();
    }

    /// Returns whether a thread that waits may begin a time slice. After the worker has requested
    /// the turn back, only if no slice has begun since the grant.
    fn may_begin(&self, state: &State) -> bool {
        let is_kept = self.demand() != Demand::Now || !state.is_used;
        state.is_held && !state.is_returning && is_kept
    }

    /// Returns the turn after `fence`, during which nothing is locked and no slice begins.
    fn return_after<'a>(
        &'a self,
        fence: &dyn Fn(),
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        state.is_returning = true;
        drop(state);
        fence();
        let mut state = lock(&self.state);
        (state.is_held, state.is_returning) = (false, false);
        self.set_demand(Demand::None);
        self.send(TurnMessage::Return);
        self.changed.notify_all();
        state
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waited = self.changed.wait(state);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn set_demand(&self, demand: Demand) {
        self.demand.store(demand as u8, Ordering::Release);
    }

    fn wake_executor(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    fn send(&self, message: TurnMessage) {
        if let Some((index, messages)) = &self.worker {
            // There is room. The receiver is gone when the process ends.
            let _ = messages.try_send((*index, message));
        }
    }
}

impl State {
    fn begin(&mut self) {
        self.running += 1;
        self.is_used = true;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::{TurnMessage::*, *};

    /// The device of these tests executes nothing by itself.
    const NO_FENCE: &dyn Fn() = &|| {};

    fn shared() -> (Arc<DeviceTurn>, mpsc::Receiver<(u32, TurnMessage)>) {
        let (messages, sent) = mpsc::channel(MESSAGES_PER_DEVICE);
        (DeviceTurn::shared(7, messages), sent)
    }

    #[test]
    fn turn_costs_no_message_while_nobody_else_wants_it() {
        let (turn, mut sent) = shared();
        assert!(!turn.try_begin(), "it was not granted yet");
        let waiting = std::thread::spawn({
            let turn = turn.clone();
            move || {
                for _ in 0..1000 {
                    turn.begin(&|| panic!("nothing is returned"));
                    turn.end();
                }
            }
        });
        assert_eq!(sent.blocking_recv(), Some((7, Request)));
        turn.granted();
        waiting.join().unwrap();
        assert!(turn.try_begin());
        turn.end();
        sent.try_recv().unwrap_err();
    }

    #[test]
    fn revoked_turn_is_returned_after_the_time_slice_and_the_fence() {
        let (turn, mut sent) = shared();
        let fences = AtomicUsize::new(0);
        turn.granted();
        assert!(turn.try_begin());
        turn.revoked();
        assert_eq!(turn.demand(), Demand::Now);
        assert!(!turn.try_begin());
        turn.end();
        sent.try_recv().unwrap_err();
        turn.give_back(&|| {
            // No slice begins meanwhile, and the turn is not returned twice.
            assert!(!turn.try_begin());
            turn.give_back(&|| panic!("it is being returned"));
            fences.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(fences.load(Ordering::SeqCst), 1);
        assert_eq!(sent.try_recv(), Ok((7, Return)));
        // A late demand changes nothing.
        turn.revoked();
        turn.wanted();
        turn.give_back(&|| panic!("there is nothing to return"));
        sent.try_recv().unwrap_err();
    }

    #[test]
    fn wanted_turn_is_used_while_there_is_work() {
        let (turn, mut sent) = shared();
        turn.granted();
        turn.wanted();
        assert!(!turn.try_begin(), "only the executor knows when it is idle");
        for _ in 0..3 {
            turn.begin(&|| panic!("it has work"));
            turn.end();
        }
        sent.try_recv().unwrap_err();
        turn.give_back(NO_FENCE);
        assert_eq!(sent.try_recv(), Ok((7, Return)));
        assert_eq!(turn.demand(), Demand::None);
    }

    #[test]
    fn a_turn_is_returned_when_the_slices_of_all_threads_have_ended() {
        let (turn, mut sent) = shared();
        turn.granted();
        assert!(turn.try_begin() && turn.try_begin());
        turn.revoked();
        let returning = std::thread::spawn({
            let turn = turn.clone();
            move || turn.give_back(NO_FENCE)
        });
        turn.end();
        sent.try_recv().unwrap_err();
        turn.end();
        returning.join().unwrap();
        assert_eq!(sent.try_recv(), Ok((7, Return)));
    }

    #[test]
    fn granted_turn_is_used_although_it_is_revoked() {
        let (turn, mut sent) = shared();
        for _ in 0..100 {
            let slices = std::thread::spawn({
                let turn = turn.clone();
                move || {
                    turn.begin(NO_FENCE);
                    turn.end();
                }
            });
            assert_eq!(sent.blocking_recv(), Some((7, Request)));
            turn.granted();
            turn.revoked();
            slices.join().unwrap();
            turn.give_back(NO_FENCE);
            assert_eq!(sent.try_recv(), Ok((7, Return)));
        }
        sent.try_recv().unwrap_err();
    }

    #[test]
    fn work_that_waits_requests_the_next_turn_as_this_one_is_returned() {
        let (turn, mut sent) = shared();
        turn.granted();
        assert!(turn.try_begin());
        turn.revoked();
        turn.end();
        let waiting = std::thread::spawn({
            let turn = turn.clone();
            move || turn.begin(NO_FENCE)
        });
        assert_eq!(sent.blocking_recv(), Some((7, Return)));
        assert_eq!(sent.blocking_recv(), Some((7, Request)));
        turn.granted();
        waiting.join().unwrap();
    }

    #[test]
    fn closed_turn_lets_everyone_go_on() {
        let (turn, _sent) = shared();
        let waiting = std::thread::spawn({
            let turn = turn.clone();
            move || turn.begin(NO_FENCE)
        });
        turn.close();
        waiting.join().unwrap();
        turn.revoked();
        assert_eq!(turn.demand(), Demand::None);
    }
}
