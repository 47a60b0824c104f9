//! Decides which lease's process may use a device. The lease table gives a device to one lease at
//! a time, so no turn is contested yet; this is for leases that share a device.
//!
//! A pure state machine. A process requests the device's turn when it has work, and keeps the
//! turn until another process wants it: as long as nobody else does, a turn costs no message.
//! When another process requests the turn, the holder gets a request to return it, which it does
//! after its current time slice, or at once if it has no work. Turns go round in the order of
//! the requests. The process of a holder that does not return the turn in time is killed.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use tensord_proto::ids::LeaseId;

/// What the supervisor is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnAction {
    /// Grant the turn of the device to the lease.
    Grant(LeaseId, u32),
    /// Request the turn of the device back from the lease.
    Revoke(LeaseId, u32),
    /// Kill the lease's process, which did not return the turn of the device.
    Kill(LeaseId, u32),
}

/// The turns of all devices.
#[derive(Debug)]
pub(super) struct Turns {
    /// How long a holder may take to return a turn.
    return_timeout: Duration,
    devices: BTreeMap<u32, DeviceTurns>,
}

#[derive(Debug, Default)]
struct DeviceTurns {
    holder: Option<Holder>,
    /// The leases that have requested the turn, in order.
    waiting: VecDeque<LeaseId>,
}

#[derive(Debug)]
struct Holder {
    lease: LeaseId,
    state: HolderState,
}

#[derive(Debug, PartialEq, Eq)]
enum HolderState {
    /// Nobody else wants the turn.
    Keeps,
    /// The turn was requested back.
    Revoked { kill_at: Instant },
    /// The process was killed, and has not exited yet.
    Killed,
}

impl Turns {
    pub(super) fn new(return_timeout: Duration) -> Self {
        Self {
            return_timeout,
            devices: BTreeMap::new(),
        }
    }

    /// Records that a process has work for a device.
    pub(super) fn request(&mut self, now: Instant, lease: LeaseId, device: u32) -> Vec<TurnAction> {
        let turns = self.devices.entry(device).or_default();
        let is_holder = |holder: &Holder| holder.lease == lease;
        if turns.waiting.contains(&lease) || turns.holder.as_ref().is_some_and(is_holder) {
            // A repeated request changes nothing.
            return Vec::new();
        }
        turns.waiting.push_back(lease);
        self.advance(now, device)
    }

    /// Records that a process has returned the turn of a device.
    pub(super) fn returned(
        &mut self,
        now: Instant,
        lease: LeaseId,
        device: u32,
    ) -> Vec<TurnAction> {
        let Some(turns) = self.devices.get_mut(&device) else {
            return Vec::new();
        };
        turns.holder.take_if(|holder| holder.lease == lease);
        self.advance(now, device)
    }

    /// Removes a lease whose process has exited.
    pub(super) fn remove(&mut self, now: Instant, lease: LeaseId) -> Vec<TurnAction> {
        let devices: Vec<_> = self.devices.keys().copied().collect();
        let removed = devices.into_iter().flat_map(|device| {
            if let Some(turns) = self.devices.get_mut(&device) {
                turns.waiting.retain(|waiting| *waiting != lease);
            }
            self.returned(now, lease, device)
        });
        removed.collect()
    }

    /// Kills the processes that have not returned a turn in time.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<TurnAction> {
        let mut actions = Vec::new();
        for (&device, turns) in &mut self.devices {
            if let Some(holder) = &mut turns.holder
                && matches!(holder.state, HolderState::Revoked { kill_at } if now >= kill_at)
            {
                holder.state = HolderState::Killed;
                actions.push(TurnAction::Kill(holder.lease, device));
            }
        }
        actions
    }

    /// Grants a free turn to the lease that waits longest, and requests a turn back that
    /// another lease wants.
    fn advance(&mut self, now: Instant, device: u32) -> Vec<TurnAction> {
        let mut actions = Vec::new();
        let Some(turns) = self.devices.get_mut(&device) else {
            return actions;
        };
        if turns.holder.is_none()
            && let Some(lease) = turns.waiting.pop_front()
        {
            actions.push(TurnAction::Grant(lease, device));
            turns.holder = Some(Holder {
                lease,
                state: HolderState::Keeps,
            });
        }
        if let Some(holder) = &mut turns.holder
            && holder.state == HolderState::Keeps
            && !turns.waiting.is_empty()
        {
            let kill_at = now + self.return_timeout;
            holder.state = HolderState::Revoked { kill_at };
            actions.push(TurnAction::Revoke(holder.lease, device));
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        thread::JoinHandle,
    };

    use proptest::prelude::*;
    use tokio::sync::mpsc;

    use super::{TurnAction::*, *};
    use crate::device_turn::{DeviceTurn, MESSAGES_PER_DEVICE, TurnMessage};

    const TIMEOUT: Duration = Duration::from_secs(10);
    const A: LeaseId = LeaseId(1);
    const B: LeaseId = LeaseId(2);
    const C: LeaseId = LeaseId(3);

    #[test]
    fn turn_stays_until_another_lease_wants_it() {
        let (mut turns, now) = (Turns::new(TIMEOUT), Instant::now());
        assert_eq!(turns.request(now, A, 0), [Grant(A, 0)]);
        assert_eq!(turns.request(now, A, 0), []);
        assert_eq!(turns.request(now, B, 1), [Grant(B, 1)]);
        assert_eq!(turns.request(now, B, 0), [Revoke(A, 0)]);
        assert_eq!(turns.request(now, C, 0), []);
        assert_eq!(turns.request(now, A, 0), [], "it still has the turn");
        // A process that has no turn returns none.
        assert_eq!(turns.returned(now, C, 0), []);
        assert_eq!(turns.returned(now, A, 0), [Grant(B, 0), Revoke(B, 0)]);
        assert_eq!(turns.request(now, A, 0), []);
        assert_eq!(turns.returned(now, B, 0), [Grant(C, 0), Revoke(C, 0)]);
        assert_eq!(turns.returned(now, C, 0), [Grant(A, 0)]);
        assert_eq!(turns.returned(now, A, 0), []);
    }

    #[test]
    fn holder_that_keeps_a_turn_is_killed_and_the_turn_goes_on() {
        let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
        turns.request(start, A, 0);
        assert_eq!(turns.tick(start + 9 * TIMEOUT), [], "nobody else wants it");
        turns.request(start + 9 * TIMEOUT, B, 0);
        turns.request(start + 9 * TIMEOUT, C, 0);
        assert_eq!(
            turns.tick(start + 10 * TIMEOUT - Duration::from_millis(1)),
            []
        );
        assert_eq!(turns.tick(start + 10 * TIMEOUT), [Kill(A, 0)]);
        assert_eq!(turns.tick(start + 11 * TIMEOUT), []);
        // The turn is granted when the process has exited, not before.
        assert_eq!(turns.remove(start + 11 * TIMEOUT, C), []);
        assert_eq!(turns.remove(start + 11 * TIMEOUT, A), [Grant(B, 0)]);
        assert_eq!(turns.remove(start + 11 * TIMEOUT, B), []);
    }

    /// Processes that share a device, as threads, with the state machine between them.
    #[test]
    fn processes_take_turns() {
        const PROCESSES: u32 = 3;
        const SLICES: usize = 300;
        let (messages, mut sent) = mpsc::channel(PROCESSES as usize * MESSAGES_PER_DEVICE);
        let users = Arc::new(AtomicUsize::new(0));
        let shared = (0..PROCESSES).map(|process| DeviceTurn::shared(process, messages.clone()));
        let shared: Vec<_> = shared.collect();
        drop(messages);
        let start = |turn: &Arc<DeviceTurn>| {
            let (turn, users) = (turn.clone(), users.clone());
            std::thread::spawn(move || {
                for _ in 0..SLICES {
                    turn.begin();
                    assert_eq!(users.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                    std::hint::spin_loop();
                    users.fetch_sub(1, Ordering::SeqCst);
                    turn.end();
                }
            })
        };
        let threads: Vec<_> = shared.iter().map(start).collect();
        let (mut turns, now) = (Turns::new(TIMEOUT), Instant::now());
        // One device; a message's index is that of the process here.
        while !threads.iter().all(JoinHandle::is_finished) {
            let Ok((process, message)) = sent.try_recv() else {
                std::thread::yield_now();
                continue;
            };
            let lease = LeaseId(u64::from(process));
            let actions = match message {
                TurnMessage::Request => turns.request(now, lease, 0),
                TurnMessage::Return => turns.returned(now, lease, 0),
            };
            for action in actions {
                match action {
                    Grant(lease, _) => shared[lease.0 as usize].granted(),
                    Revoke(lease, _) => shared[lease.0 as usize].revoked(),
                    Kill(..) => panic!("every turn is returned"),
                }
            }
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Request(u64, u32),
        Return(u64, u32),
        Exit(u64),
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..5u64, 0..2u32).prop_map(|(lease, device)| Step::Request(lease, device)),
            4 => (0..5u64, 0..2u32).prop_map(|(lease, device)| Step::Return(lease, device)),
            1 => (0..5u64).prop_map(Step::Exit),
            1 => (0..12u64).prop_map(Step::Wait),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        /// One lease at most has a device's turn; while a lease waits another one has it and
        /// has been requested to return it; and turns are granted in the order of the requests.
        #[test]
        fn turns_are_exclusive_fair_and_never_idle(steps in steps()) {
            let (mut turns, mut now) = (Turns::new(TIMEOUT), Instant::now());
            let mut holders = BTreeMap::<u32, LeaseId>::new();
            let mut revoked = BTreeSet::<u32>::new();
            let mut waiting = BTreeMap::<u32, VecDeque<LeaseId>>::new();
            for step in steps {
                let actions = match step {
                    Step::Request(lease, device) => {
                        let lease = LeaseId(lease);
                        let queue = waiting.entry(device).or_default();
                        if holders.get(&device) != Some(&lease) && !queue.contains(&lease) {
                            queue.push_back(lease);
                        }
                        turns.request(now, lease, device)
                    }
                    Step::Return(lease, device) => {
                        if holders.get(&device) == Some(&LeaseId(lease)) {
                            holders.remove(&device);
                            revoked.remove(&device);
                        }
                        turns.returned(now, LeaseId(lease), device)
                    }
                    Step::Exit(lease) => {
                        let lease = LeaseId(lease);
                        holders.retain(|device, holder| {
                            let stays = *holder != lease;
                            if !stays {
                                revoked.remove(device);
                            }
                            stays
                        });
                        waiting.values_mut().for_each(|queue| queue.retain(|it| *it != lease));
                        turns.remove(now, lease)
                    }
                    Step::Wait(seconds) => {
                        now += Duration::from_secs(seconds);
                        turns.tick(now)
                    }
                };
                for action in actions {
                    match action {
                        Grant(lease, device) => {
                            prop_assert_eq!(holders.insert(device, lease), None);
                            let first = waiting.entry(device).or_default().pop_front();
                            prop_assert_eq!(first, Some(lease));
                        }
                        Revoke(lease, device) => {
                            prop_assert_eq!(holders.get(&device), Some(&lease));
                            prop_assert!(revoked.insert(device));
                        }
                        Kill(lease, device) => {
                            prop_assert_eq!(holders.get(&device), Some(&lease));
                            prop_assert!(revoked.contains(&device));
                        }
                    }
                }
                for (device, queue) in &waiting {
                    let is_wanted = !queue.is_empty();
                    prop_assert!(!is_wanted || holders.contains_key(device));
                    prop_assert_eq!(is_wanted, is_wanted && revoked.contains(device));
                }
            }
        }
    }
}
