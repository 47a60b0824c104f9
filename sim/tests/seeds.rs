//! Some hundred seeds. `simulate` runs more.

#![cfg(target_os = "linux")]

use tensord_sim::{Faults, Report, check};

#[test]
fn programs_get_the_same_answers_whatever_is_lost() {
    const SEEDS: u64 = 300;
    let faults = Faults {
        cuts: 12,
        kills: 6,
        losses: 4,
        restarts: 2,
        moves: 4,
    };
    let mut total = Report::default();
    for seed in 1..=SEEDS {
        total +=
            check(seed, faults, false).unwrap_or_else(|reason| panic!("seed {seed}: {reason}"));
    }
    // Else the schedules inject nothing.
    let seeds = SEEDS as u32;
    assert!(total.kills > seeds && total.cuts > seeds, "{total:?}");
    assert!(
        total.group_kills > seeds / 2 && total.spread_kills > seeds / 4,
        "{total:?}"
    );
    assert!(
        total.process_pairs > seeds / 20 && total.part_pairs > 0,
        "{total:?}"
    );
    assert!(
        total.lost_parts > seeds / 20 && total.cut_off > seeds / 20,
        "{total:?}"
    );
    assert!(
        total.restarts > seeds / 4 && total.moves > seeds / 4,
        "{total:?}"
    );
    assert!(
        total.snapshots > total.kills && total.answers > SEEDS,
        "{total:?}"
    );
}
