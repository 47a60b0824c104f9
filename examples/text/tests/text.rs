//! Runs the example in small, with pools of one and two workers.

use std::{
    cell::RefCell,
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tensord_testkit::cluster::{Cluster, Process};

/// How long a run may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// Starts the example with the pool of `cluster`.
fn start(cluster: &Cluster, arguments: &[&str]) -> Process {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let log = cluster.path(&format!("text-{number}.log"));
    let example = Path::new(env!("CARGO_BIN_EXE_text"));
    let env = [("TENSORD_URL", cluster.client_url())];
    Process::start_of(example, arguments, &env, log)
}

/// Runs the example and returns what it printed: a line for the loss of each step, then one
/// for the accuracy.
fn run(cluster: &Cluster, arguments: &[&str]) -> Vec<String> {
    let mut process = start(cluster, arguments);
    let lines = RefCell::new(Vec::new());
    let is_last = |line: &str| {
        lines.borrow_mut().push(line.to_owned());
        line.starts_with("test accuracy").then_some(())
    };
    let seen = process.try_wait_for("the accuracy", DEADLINE, is_last);
    seen.unwrap_or_else(|e| panic!("{arguments:?}: {e}"));
    assert_eq!(process.exit_code(Duration::from_secs(20)), Some(0));
    lines.into_inner()
}

/// Runs the example, which must fail. Returns its error.
fn failure(cluster: &Cluster, arguments: &[&str]) -> String {
    let mut process = start(cluster, arguments);
    assert_eq!(process.exit_code(DEADLINE), Some(1), "{arguments:?}");
    process.log()
}

/// Returns the losses of lines such as `step 3  loss 0.5`, after the first `skipped` steps.
fn losses(lines: &[String], skipped: usize) -> Vec<f32> {
    let loss = |line: &String| {
        let (step, loss) = line.strip_prefix("step ")?.split_once("  loss ")?;
        Some((step.parse::<usize>().unwrap(), loss.parse().unwrap()))
    };
    let losses = lines.iter().filter_map(loss);
    losses
        .filter(|(step, _)| *step > skipped)
        .enumerate()
        .map(|(index, (step, loss))| {
            assert_eq!(step, skipped + index + 1, "{lines:?}");
            loss
        })
        .collect()
}

#[test]
fn it_trains_as_on_local_flex() {
    let cluster = Cluster::start(&["flex"]);
    let options = ["--dropout", "0", "--steps", "12"];
    let leased = run(&cluster, &options);
    let local = run(&cluster, &[&options[..], &["--local"]].concat());
    assert_eq!(losses(&leased, 0).len(), 12);
    // The losses are printed with all of their digits.
    assert_eq!(leased, local);
}

#[test]
fn it_learns_with_dropout() {
    let cluster = Cluster::start(&["flex"]);
    let lines = run(&cluster, &["--steps", "120"]);
    let accuracy = lines.last().and_then(|line| {
        let words = line.strip_prefix("test accuracy ")?;
        words.strip_suffix(" %")?.parse::<f32>().ok()
    });
    assert!(accuracy.unwrap() >= 95.0, "{lines:?}");
    // The same seed drops the same; without dropout the losses differ.
    let again = run(&cluster, &["--steps", "5"]);
    assert_eq!(losses(&again, 0), losses(&lines, 0)[..5]);
    let without = run(&cluster, &["--steps", "5", "--dropout", "0"]);
    assert_ne!(losses(&without, 0), losses(&again, 0));
}

#[test]
fn losses_do_not_depend_on_the_number_of_devices() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let options = ["--dropout", "0", "--steps", "12"];
    let one = losses(&run(&cluster, &options), 0);
    let two = losses(
        &run(&cluster, &[&options[..], &["--devices", "2"]].concat()),
        0,
    );
    assert_eq!((one.len(), two.len()), (12, 12));
    for (step, (two, one)) in two.iter().zip(&one).enumerate() {
        // Sums over a batch have another order when two devices share it.
        let apart = (two - one).abs();
        assert!(apart <= 1e-4 * one, "step {step}: {two} instead of {one}");
    }
}

#[test]
fn it_goes_on_from_a_checkpoint_with_the_same_bits() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let directory = cluster.path("checkpoints");
    let path = directory.to_str().unwrap();
    let whole = run(&cluster, &["--devices", "2", "--steps", "16"]);
    let with = |steps| {
        let options = ["--devices", "2", "--checkpoint", path, "--checkpoint-every"];
        run(&cluster, &[&options[..], &["5", "--steps", steps]].concat())
    };
    let first = with("8");
    assert_eq!(losses(&first, 0), losses(&whole, 0)[..8]);
    let rest = with("16");
    assert_eq!(losses(&rest, 8), losses(&whole, 0)[8..], "{rest:?}");
    assert!(rest[0].ends_with("step-8"), "{rest:?}");
    assert_eq!(rest.last(), whole.last());
    let mut names: Vec<_> = fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["step-10", "step-15", "step-16", "step-5", "step-8"]);

    // A file that is cut short is named, and so is what to do. (The last half of a small file
    // may be padding.)
    for name in ["model.bpk", "optimizer.bpk", "schedule.bpk"] {
        let file = directory.join("step-16").join(name);
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() / 8]).unwrap();
        let error = failure(&cluster, &["--steps", "20", "--checkpoint", path]);
        let advice = format!("cannot go on from {}; delete", file.display());
        assert!(error.contains(&advice), "{error}");
        fs::write(&file, &bytes).unwrap();
    }
}

#[test]
fn it_refuses_what_it_cannot_do() {
    let cluster = Cluster::start(&[]);
    let cases = [
        (["--devices", "3"], "--devices 3: a batch has 32 sentences"),
        (["--devices", "0"], "--devices 0"),
        (["--dropout", "1"], "--dropout 1: it must be at least 0"),
        (
            ["--checkpoint-every", "0"],
            "--checkpoint-every 0: it must be",
        ),
    ];
    for (arguments, expected) in cases {
        let error = failure(&cluster, &arguments);
        assert!(error.contains(expected), "{error}");
    }
}
