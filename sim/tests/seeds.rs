//! Some hundred seeds. `simulate` runs more.

#![cfg(target_os = "linux")]

use tensord_sim::{Faults, Report, check};

#[test]
fn programs_get_the_same_answers_whatever_is_lost() {
    const SEEDS: u64 = 300;
    let mut total = Report::default();
    for seed in 1..=SEEDS {
        let faults = Faults { cuts: 12, kills: 6 };
        total += check(seed, faults).unwrap_or_else(|reason| panic!("seed {seed}: {reason}"));
    }
    // Else the schedules inject nothing.
    assert!(
        total.kills > SEEDS as u32 && total.cuts > SEEDS as u32,
        "{total:?}"
    );
    assert!(total.group_kills > SEEDS as u32, "{total:?}");
    assert!(
        total.snapshots > total.kills && total.answers > SEEDS,
        "{total:?}"
    );
}
