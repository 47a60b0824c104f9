//! A process's turn on a device that it may share with the processes of other leases.
//!
//! The threads that execute ops [begin](DeviceTurn::begin) and [end](DeviceTurn::end) each time
//! slice. While no other process wants the device, that takes no message: the turn stays here.
//! The worker decides whose turn it is (`supervisor::turns`).

use std::sync::{Arc, Condvar, Mutex, PoisonError};

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

/// The turn of one device.
#[derive(Debug)]
pub(crate) struct DeviceTurn {
    state: Mutex<State>,
    changed: Condvar,
    /// The device's index, and where messages go. `None`: no other process uses the device.
    worker: Option<(u32, mpsc::Sender<(u32, TurnMessage)>)>,
}

#[derive(Debug)]
struct State {
    is_held: bool,
    /// Whether a request is on its way.
    is_requested: bool,
    /// Whether the worker has requested the turn back.
    must_return: bool,
    /// Whether a time slice has begun since the turn was granted.
    is_used: bool,
    /// Number of time slices that are running.
    running: usize,
    /// Number of threads that wait for the turn.
    waiting: usize,
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
                must_return: false,
                is_used: false,
                running: 0,
                waiting: 0,
                is_closed: false,
            }),
            changed: Condvar::new(),
            worker,
        }
    }

    /// Waits for the turn, and begins a time slice. [`end`](Self::end) must follow.
    pub(crate) fn begin(&self) {
        let mut state = lock(&self.state);
        state.waiting += 1;
        while !state.may_begin() && !state.is_closed {
            if !state.is_held && !state.is_requested {
                state.is_requested = true;
                self.send(TurnMessage::Request);
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        state.begin();
    }

    /// Begins a time slice if that takes no waiting. Returns whether it has begun.
    pub(crate) fn try_begin(&self) -> bool {
        let mut state = lock(&self.state);
        let may_begin = state.is_held && !state.must_return;
        if may_begin {
            state.begin();
        }
        may_begin
    }

    /// Ends a time slice, and returns the turn if another process waits for it.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.running -= 1;
        self.return_if_due(&mut state);
    }

    /// The worker has granted the turn.
    pub(crate) fn granted(&self) {
        let mut state = lock(&self.state);
        (state.is_held, state.is_requested) = (true, false);
        (state.must_return, state.is_used) = (false, false);
        self.changed.notify_all();
    }

    /// The worker requests the turn back.
    pub(crate) fn revoked(&self) {
        let mut state = lock(&self.state);
        state.must_return = state.is_held;
        self.return_if_due(&mut state);
    }

    /// Lets all threads go on, as the process ends.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }

    /// Returns the turn if the worker has requested it back, no slice runs, and either a slice has
    /// begun since the grant or no thread waits.
    fn return_if_due(&self, state: &mut State) {
        let is_wanted_here = state.waiting > 0 && !state.is_used;
        if state.must_return && state.running == 0 && !is_wanted_here {
            (state.is_held, state.must_return) = (false, false);
            self.send(TurnMessage::Return);
            // Those that wait request the next turn.
            self.changed.notify_all();
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
    /// Returns whether a thread that waits may begin a time slice. After the worker has requested
    /// the turn back, only if no slice has begun since the grant.
    fn may_begin(&self) -> bool {
        self.is_held && (!self.must_return || !self.is_used)
    }

    fn begin(&mut self) {
        self.running += 1;
        self.is_used = true;
    }
}

#[cfg(test)]
mod tests {
    use super::{TurnMessage::*, *};

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
                    turn.begin();
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
    fn revoked_turn_is_returned_after_the_time_slice() {
        let (turn, mut sent) = shared();
        turn.granted();
        assert!(turn.try_begin() && turn.try_begin());
        turn.revoked();
        assert!(!turn.try_begin());
        turn.end();
        sent.try_recv().unwrap_err();
        turn.end();
        assert_eq!(sent.try_recv(), Ok((7, Return)));
        // One without work returns the turn at once, and a late request changes nothing.
        turn.granted();
        turn.revoked();
        assert_eq!(sent.try_recv(), Ok((7, Return)));
        turn.revoked();
        sent.try_recv().unwrap_err();
    }

    #[test]
    fn granted_turn_is_used_although_it_is_revoked() {
        let (turn, mut sent) = shared();
        for _ in 0..100 {
            let slice = std::thread::spawn({
                let turn = turn.clone();
                move || {
                    turn.begin();
                    turn.end();
                }
            });
            assert_eq!(sent.blocking_recv(), Some((7, Request)));
            turn.granted();
            turn.revoked();
            slice.join().unwrap();
            assert_eq!(sent.try_recv(), Ok((7, Return)));
        }
        sent.try_recv().unwrap_err();
    }

    #[test]
    fn closed_turn_lets_everyone_go_on() {
        let (turn, _sent) = shared();
        let waiting = std::thread::spawn({
            let turn = turn.clone();
            move || turn.begin()
        });
        turn.close();
        waiting.join().unwrap();
    }
}
