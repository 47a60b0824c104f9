//! Tests of the program `execute` as a process.

#![cfg(unix)]

use std::process::{Command, Output};

fn execute(args: &[&str]) -> (Output, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_execute"))
        .args(args)
        .output()
        .expect("the program starts");
    let output = [&*run.stdout, b"\n", &*run.stderr].concat();
    let output = String::from_utf8_lossy(&output).into_owned();
    (run, output)
}

#[test]
fn a_run_with_guards_counts_ops_by_variant_and_finds_nothing() {
    let (run, output) = execute(&["--ops", "20000", "--seed", "3", "--seconds", "60"]);
    assert!(run.status.success(), "{output}");
    let has = |words: &str| assert!(output.contains(words), "{words:?} is not in\n{output}");
    has("seed 3, 1 threads, with guard pages");
    has("\nBaseBool.Select ");
    has("nothing found");
}

#[test]
fn counts_that_are_required_and_not_reached_fail_the_run() {
    let (run, output) = execute(&["--ops", "1", "--require-counts", "1000000"]);
    assert_eq!(run.status.code(), Some(1), "{output}");
    assert!(
        output.contains("some variants ran too rarely (1000000 executions"),
        "{output}"
    );
}

#[test]
fn a_read_beyond_an_allocation_ends_the_run_and_names_the_session() {
    let args = ["--ops", "1", "--seed", "9", "--trip"];
    let (run, output) = execute(&args);
    assert_eq!(run.status.code(), Some(1), "{output}");
    assert!(output.contains("SIGSEGV"), "{output}");
    assert!(
        output.contains("seed 9") && output.contains("--session 0x"),
        "{output}"
    );
    let unguarded = [&args[..], &["--no-guard"]].concat();
    let (run, output) = execute(&unguarded);
    assert!(run.status.success(), "{output}");
}
