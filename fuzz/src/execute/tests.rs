use super::*;

/// Runs some 30,000 ops; `src/bin/execute.rs` runs for longer.
#[test]
fn sessions_with_ops_of_every_kind_keep_the_invariants() {
    let templates = Templates::default();
    let mut report = Report::new(&templates);
    let mut positions = 0u64;
    for number in 0..40 {
        let mut position = |_: u64, _: u64, _: usize| positions += 1;
        let seed = session_seed(1, number);
        run(seed, &templates, &mut report, &mut position).unwrap();
    }
    assert!(report.ops() > 30_000, "{report}");
    assert!(positions >= report.ops(), "{positions}");
    assert!(report.frames_refused > 0, "{report}");
}

#[test]
fn sessions_are_deterministic_by_seed() {
    let templates = Templates::default();
    let counted = || {
        let mut report = Report::new(&templates);
        let mut position = |_: u64, _: u64, _: usize| {};
        run(7, &templates, &mut report, &mut position).unwrap();
        report.to_string()
    };
    assert_eq!(counted(), counted());
}
