//! Tests of the decisions by examples, of threads that take turns, and of random leases against
//! the bounds.

mod fairness;
mod threads;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{
    TurnAction::*,
    virtual_time::{CREDIT, virtual_ns_of},
    *,
};

const TIMEOUT: Duration = Duration::from_secs(10);
const A: LeaseId = LeaseId(1);
const B: LeaseId = LeaseId(2);
const C: LeaseId = LeaseId(3);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn turn_stays_until_another_lease_wants_it() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let at = |time| start + ms(time);
    assert_eq!(turns.request(at(0), A, 0, 500), [Grant(A, 0)]);
    assert_eq!(turns.request(at(1), A, 0, 500), []);
    assert_eq!(turns.request(at(1), B, 1, 500), [Grant(B, 1)]);
    assert_eq!(turns.next_deadline(), None, "nobody else wants them");
    assert_eq!(turns.tick(at(1)), []);
    assert_eq!(turns.request(at(2), B, 0, 500), [Want(A, 0)]);
    assert_eq!(turns.request(at(3), C, 0, 500), []);
    assert_eq!(turns.request(at(3), A, 0, 500), [], "it still has the turn");
    // A process that has no turn returns its request.
    assert_eq!(turns.returned(at(3), C, 0), []);
    assert_eq!(turns.returned(at(3), C, 0), []);
    assert_eq!(turns.request(at(3), C, 0, 500), []);
    assert_eq!(turns.next_deadline(), Some(at(5)));
    assert_eq!(turns.tick(at(4)), []);
    assert_eq!(turns.tick(at(5)), [Revoke(A, 0)]);
    assert_eq!(turns.tick(at(6)), [], "once");
    assert_eq!(turns.next_deadline(), Some(at(5) + TIMEOUT));
    // A has had 6 ms, B and C none.
    assert_eq!(turns.returned(at(6), A, 0), [Grant(B, 0), Want(B, 0)]);
    assert_eq!(turns.request(at(6), A, 0, 500), []);
    assert_eq!(turns.tick(at(11)), [Revoke(B, 0)]);
    assert_eq!(turns.returned(at(11), B, 0), [Grant(C, 0), Want(C, 0)]);
    // C has no work any more; B has had less than A.
    assert_eq!(turns.request(at(12), B, 0, 500), []);
    assert_eq!(turns.returned(at(12), C, 0), [Grant(B, 0), Want(B, 0)]);
    assert_eq!(turns.tick(at(17)), [Revoke(B, 0)]);
    assert_eq!(turns.returned(at(17), B, 0), [Grant(A, 0)]);
    assert_eq!(turns.next_deadline(), None);
    assert_eq!(turns.returned(at(18), A, 0), []);
}

#[test]
fn time_is_divided_by_weight() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let at = |time| start + ms(time);
    turns.request(at(0), A, 0, 800);
    assert_eq!(turns.request(at(0), B, 0, 200), [Want(A, 0)]);
    assert_eq!(turns.tick(at(5)), [Revoke(A, 0)]);
    // 5 ms of A are 6.25 ms; B reaches them after 1.25 ms, but keeps the turn for 5 ms.
    assert_eq!(turns.returned(at(5), A, 0), [Grant(B, 0)]);
    assert_eq!(turns.request(at(5), A, 0, 800), [Want(B, 0)]);
    assert_eq!(turns.tick(at(9)), []);
    assert_eq!(turns.tick(at(10)), [Revoke(B, 0)]);
    assert_eq!(turns.returned(at(10), B, 0), [Grant(A, 0)]);
    assert_eq!(turns.request(at(10), B, 0, 200), [Want(A, 0)]);
    // B is at 25 ms, which A reaches after another 15 ms: 20 ms to 5 ms.
    assert_eq!(turns.next_deadline(), Some(at(25)));
}

#[test]
fn time_in_which_nobody_else_waits_is_no_debt() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let hour = Duration::from_secs(3600);
    turns.request(start, A, 0, 500);
    turns.request(start, B, 1, 500);
    // B comes after an hour with less by the credit, so it has the device at once, for twice the credit:
    // until A has used less.
    assert_eq!(turns.request(start + hour, B, 0, 500), [Revoke(A, 0)]);
    assert_eq!(turns.returned(start + hour, A, 0), [Grant(B, 0)]);
    assert_eq!(turns.request(start + hour, A, 0, 500), [Want(B, 0)]);
    assert_eq!(turns.next_deadline(), Some(start + hour + CREDIT));
    // So it is with A, when B has had the device alone.
    assert_eq!(turns.remove(start + hour, A), []);
    assert_eq!(turns.request(start + 2 * hour, A, 0, 500), [Revoke(B, 0)]);
    assert_eq!(turns.returned(start + 2 * hour, B, 0), [Grant(A, 0)]);
    turns.request(start + 2 * hour, B, 0, 500);
    assert_eq!(turns.next_deadline(), Some(start + 2 * hour + CREDIT));
    // And with one that comes when nobody has work, or nobody is left.
    assert_eq!(turns.remove(start + 2 * hour, B), []);
    assert_eq!(turns.returned(start + 2 * hour, A, 0), []);
    assert_eq!(turns.request(start + 2 * hour, C, 0, 500), [Grant(C, 0)]);
    // It has used nothing yet, and A has the same credit.
    turns.request(start + 2 * hour, A, 0, 500);
    assert_eq!(turns.next_deadline(), Some(start + 2 * hour + MIN_TURN));
}

/// C has a small weight, so its credit is a long virtual time.
#[test]
fn the_credit_of_a_lease_is_not_given_to_another_one() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let later = start + Duration::from_secs(100);
    turns.request(start, A, 0, 450);
    assert_eq!(turns.request(later, C, 0, 10), [Revoke(A, 0)]);
    assert_eq!(turns.returned(later, A, 0), [Grant(C, 0)]);
    assert_eq!(turns.request(later, A, 0, 450), [Want(C, 0)]);
    turns.request(later, B, 0, 450);
    assert_eq!(turns.returned(later, C, 0), [Grant(B, 0), Want(B, 0)]);
    // A waits no longer than for the credit of B.
    assert_eq!(turns.next_deadline(), Some(later + CREDIT));
}

#[test]
fn a_lease_does_not_lose_its_place_by_a_gap() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let at = |time| start + ms(time);
    turns.request(at(0), A, 0, 800);
    turns.request(at(0), B, 0, 10);
    // A has no work for 1 ms; in B's virtual time that is 100 ms.
    assert_eq!(turns.returned(at(4), A, 0), [Grant(B, 0)]);
    assert_eq!(turns.request(at(5), A, 0, 800), [Want(B, 0)]);
    assert_eq!(turns.tick(at(9)), [Revoke(B, 0)]);
    assert_eq!(turns.returned(at(9), B, 0), [Grant(A, 0)]);
    turns.request(at(9), B, 0, 10);
    // B has had 5 ms, for which A gets 400 ms, of which it has had 4 ms.
    assert_eq!(turns.next_deadline(), Some(at(9 + 396)));
}

#[test]
fn a_late_return_is_a_debt_and_so_it_is_after_a_restart() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let at = |time| start + ms(time);
    turns.request(at(0), A, 0, 500);
    turns.request(at(0), B, 0, 500);
    turns.tick(at(5));
    // A's process dies after a long op. The next one has work at once.
    assert_eq!(turns.remove(at(1005), A), [Grant(B, 0)]);
    assert_eq!(turns.request(at(1010), A, 0, 500), [Want(B, 0)]);
    assert_eq!(turns.next_deadline(), Some(at(1005 + 1005)));
    // Another lease owes nothing.
    assert_eq!(turns.forget(at(1020), A), []);
    assert_eq!(turns.request(at(1020), A, 0, 500), [Revoke(B, 0)]);
}

#[test]
fn a_lease_that_ends_is_granted_no_turn() {
    let (mut turns, now) = (Turns::new(TIMEOUT), Instant::now());
    turns.request(now, A, 0, 500);
    turns.request(now, B, 0, 300);
    turns.request(now, C, 0, 200);
    assert_eq!(turns.returned(now, B, 0), [], "while it waits");
    assert_eq!(turns.returned(now, A, 0), [Grant(C, 0)]);
}

#[test]
fn holder_that_keeps_a_turn_is_killed_and_the_turn_goes_on() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    turns.request(start, A, 0, 1000);
    assert_eq!(turns.tick(start + 9 * TIMEOUT), [], "nobody else wants it");
    assert_eq!(
        turns.request(start + 9 * TIMEOUT, B, 0, 1000),
        [Revoke(A, 0)]
    );
    assert_eq!(turns.request(start + 9 * TIMEOUT, C, 0, 1000), []);
    assert_eq!(turns.tick(start + 10 * TIMEOUT - ms(1)), []);
    assert_eq!(turns.tick(start + 10 * TIMEOUT), [Kill(A, 0)]);
    assert_eq!(turns.next_deadline(), None);
    assert_eq!(turns.tick(start + 11 * TIMEOUT), []);
    // The turn is granted when the process has exited, not before.
    assert_eq!(turns.remove(start + 11 * TIMEOUT, C), []);
    assert_eq!(turns.remove(start + 11 * TIMEOUT, A), [Grant(B, 0)]);
    assert_eq!(turns.forget(start + 11 * TIMEOUT, B), []);
}

/// The turn may have been returned while the worker itself was stopped.
#[test]
fn a_worker_that_was_stopped_reads_its_messages_before_it_kills() {
    let (mut turns, start) = (Turns::new(TIMEOUT), Instant::now());
    let hour = Duration::from_secs(3600);
    turns.request(start, A, 0, 500);
    turns.request(start, B, 0, 500);
    assert_eq!(turns.tick(start + ms(5)), [Revoke(A, 0)]);
    assert_eq!(turns.tick(start + hour), []);
    assert_eq!(turns.next_deadline(), Some(start + hour + MAX_LATENESS));
    // It is late again.
    assert_eq!(turns.tick(start + 2 * hour), [Kill(A, 0)]);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Request(u64, u32),
    Return(u64, u32),
    Exit(u64),
    Forget(u64),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..5u64, 0..2u32).prop_map(|(lease, device)| Step::Request(lease, device)),
        4 => (0..5u64, 0..2u32).prop_map(|(lease, device)| Step::Return(lease, device)),
        1 => (0..5u64).prop_map(Step::Exit),
        1 => (0..5u64).prop_map(Step::Forget),
        2 => (0..12u64).prop_map(Step::Wait),
        1 => (0..12_000u64).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 0..200)
}

/// What the actions have led to.
#[derive(Default)]
struct World {
    holders: BTreeMap<u32, LeaseId>,
    wanted: BTreeSet<u32>,
    revoked: BTreeSet<u32>,
    waiting: BTreeMap<u32, BTreeSet<LeaseId>>,
}

impl World {
    fn request(&mut self, lease: LeaseId, device: u32) {
        if self.holders.get(&device) != Some(&lease) {
            self.waiting.entry(device).or_default().insert(lease);
        }
    }

    fn end_turn(&mut self, lease: LeaseId, device: u32) {
        if self.holders.get(&device) == Some(&lease) {
            self.holders.remove(&device);
            self.wanted.remove(&device);
            self.revoked.remove(&device);
        }
    }

    fn exit(&mut self, lease: LeaseId) {
        (0..2).for_each(|device| self.end_turn(lease, device));
        let mut waiting = self.waiting.values_mut();
        waiting.by_ref().for_each(|waiting| {
            waiting.remove(&lease);
        });
    }

    fn apply(&mut self, actions: &[TurnAction]) -> Result<(), TestCaseError> {
        for &action in actions {
            match action {
                Grant(lease, device) => {
                    prop_assert_eq!(self.holders.insert(device, lease), None);
                    let waiting = self.waiting.entry(device).or_default();
                    prop_assert!(waiting.remove(&lease));
                }
                Want(lease, device) => {
                    prop_assert_eq!(self.holders.get(&device), Some(&lease));
                    prop_assert!(self.wanted.insert(device));
                }
                Revoke(lease, device) => {
                    prop_assert_eq!(self.holders.get(&device), Some(&lease));
                    prop_assert!(self.revoked.insert(device));
                }
                Kill(lease, device) => {
                    prop_assert_eq!(self.holders.get(&device), Some(&lease));
                    prop_assert!(self.revoked.contains(&device));
                }
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// One lease at most has a device's turn; while a lease waits another one has it and knows that
    /// it is wanted; and it is revoked only then.
    #[test]
    fn turns_are_exclusive_and_never_idle(steps in steps()) {
        let (mut turns, mut now) = (Turns::new(TIMEOUT), Instant::now());
        let mut world = World::default();
        for step in steps {
            let actions = match step {
                Step::Request(lease, device) => {
                    world.request(LeaseId(lease), device);
                    turns.request(now, LeaseId(lease), device, 100 + lease as u32)
                }
                Step::Return(lease, device) => {
                    world.end_turn(LeaseId(lease), device);
                    world.waiting.entry(device).or_default().remove(&LeaseId(lease));
                    turns.returned(now, LeaseId(lease), device)
                }
                Step::Exit(lease) => {
                    world.exit(LeaseId(lease));
                    turns.remove(now, LeaseId(lease))
                }
                Step::Forget(lease) => {
                    world.exit(LeaseId(lease));
                    turns.forget(now, LeaseId(lease))
                }
                Step::Wait(time) => {
                    now += ms(time);
                    turns.tick(now)
                }
            };
            world.apply(&actions)?;
            for (device, waiting) in &world.waiting {
                if !waiting.is_empty() {
                    prop_assert!(world.holders.contains_key(device));
                    let knows = world.wanted.contains(device) || world.revoked.contains(device);
                    prop_assert!(knows);
                }
            }
            // What is due is done at once, so the clock never ticks in vain.
            prop_assert_eq!(turns.tick(now), []);
            prop_assert!(turns.next_deadline().is_none_or(|deadline| deadline > now));
        }
    }
}
