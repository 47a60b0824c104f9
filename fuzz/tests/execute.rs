//! The program `execute`, as it is built.

#![cfg(unix)]

use std::process::{Command, Output};

fn execute(args: &[&str]) -> (Output, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_execute"))
        .args(args)
        .output()
        .expect("the program starts");
    let said = [&*run.stdout, b"\n", &*run.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (run, said)
}

#[test]
fn a_run_with_guards_counts_ops_by_variant_and_finds_nothing() {
    let (run, said) = execute(&["--ops", "20000", "--seed", "3", "--seconds", "60"]);
    assert!(run.status.success(), "{said}");
    let has = |words: &str| assert!(said.contains(words), "{words:?} is not in\n{said}");
    has("seed 3, 1 threads, with guard pages");
    has("\nBaseBool.Select ");
    has("nothing found");
}

#[test]
fn counts_that_are_required_and_not_reached_fail_the_run() {
    let (run, said) = execute(&["--ops", "1", "--require-counts", "1000000"]);
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(
        said.contains("some variants ran too rarely (1000000 executions"),
        "{said}"
    );
}

#[test]
fn a_read_beyond_an_allocation_ends_the_run_and_names_the_session() {
    let args = ["--ops", "1", "--seed", "9", "--trip"];
    let (run, said) = execute(&args);
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(said.contains("SIGSEGV"), "{said}");
    assert!(
        said.contains("seed 9") && said.contains("--session 0x"),
        "{said}"
    );
    let unguarded = [&args[..], &["--no-guard"]].concat();
    let (run, said) = execute(&unguarded);
    assert!(run.status.success(), "{said}");
}
