//! A worker counts, and the scheduler crashes now and then.

use proptest::prelude::*;

use super::{store::StoreRig, *};

/// What a worker has counted, and the scheduler's part that counts it.
struct Pool {
    rig: StoreRig,
    accounts: Accounts,
    pending: Changes,
    number: u64,
    now: u64,
    /// By grant of the device: what was used, and whether it is released.
    grants: Vec<(u64, bool)>,
}

impl Pool {
    fn new() -> Self {
        Self::of(StoreRig::new())
    }

    fn of(mut rig: StoreRig) -> Self {
        let loaded = std::mem::take(&mut rig.loaded);
        Self {
            accounts: Accounts::new(loaded.accounts),
            pending: Changes::default(),
            number: loaded.batch,
            now: 0,
            grants: vec![(0, false)],
            rig,
        }
    }

    fn report(&mut self) {
        let mut changes = numbered(self.number + 1);
        for (count, &(used, is_released)) in (1..).zip(&self.grants) {
            let reported = match is_released {
                true => is_final(used),
                false => reported(used),
            };
            let subject = || lease_of("red");
            let at = after(self.now);
            self.accounts
                .observe(at, key(0, count), reported, "flex", subject, &mut changes);
        }
        if !changes.is_empty() {
            self.number += 1;
            self.pending.append(changes);
        }
    }

    fn write(&mut self) {
        if !self.pending.is_empty() {
            let changes = std::mem::take(&mut self.pending);
            self.rig.store.write(&changes).unwrap();
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Work(u64),
    Wait(u64),
    Release,
    Report,
    Write,
    Crash,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However often the scheduler crashes, and whatever it has not written by then, in the end the sums are
    /// what the worker has counted.
    #[test]
    fn crashes_lose_nothing_and_count_nothing_twice(steps in prop::collection::vec(prop_oneof![
        4 => (0..50u64).prop_map(Step::Work),
        2 => (0..2 * HOUR_MS).prop_map(Step::Wait),
        1 => Just(Step::Release),
        4 => Just(Step::Report),
        2 => Just(Step::Write),
        1 => Just(Step::Crash),
    ], 0..40)) {
        let mut pool = Pool::new();
        for step in steps {
            match step {
                Step::Work(n) => {
                    if let Some(last) = pool.grants.last_mut() {
                        last.0 += n;
                    }
                }
                Step::Wait(ms) => pool.now += ms,
                Step::Release => {
                    if let Some(last) = pool.grants.last_mut() {
                        last.1 = true;
                    }
                    pool.grants.push((0, false));
                }
                Step::Report => pool.report(),
                Step::Write => pool.write(),
                Step::Crash => {
                    let (now, grants) = (pool.now, std::mem::take(&mut pool.grants));
                    pool = Pool { now, grants, ..Pool::of(pool.rig.after_crash()) };
                }
            }
        }
        pool.report();
        pool.write();
        let worked: u64 = pool.grants.iter().map(|(used, _)| used).sum();
        prop_assert_eq!(pool.rig.total_ops(), worked);
    }

    #[test]
    fn parts_of_hours_add_up(from in 0..5 * HOUR_MS, length in 0..5 * HOUR_MS, n in 0..u64::MAX / 10) {
        let parts = by_hours(from, from + length, &amount(n));
        let mut sum = Amount::default();
        for (hour, part) in &parts {
            sum.add(part);
            let hour = u64::from(*hour);
            prop_assert!(from / HOUR_MS <= hour && hour <= (from + length) / HOUR_MS);
        }
        prop_assert_eq!(sum, amount(n));
    }
}
