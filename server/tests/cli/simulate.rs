//! `tensord simulate`.

use std::{fs, path::PathBuf};

use super::{refused, run, stdout_of};

const HEADER: &str = "arrival,tenant,user,devices,kind,share,memory,duration,priority";

/// A directory with these files.
fn files(files: &[(&str, &str)]) -> (tempfile::TempDir, impl Fn(&str) -> String + use<>) {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let path: PathBuf = directory.path().into();
    let path_of = move |name: &str| path.join(name).display().to_string();
    (directory, path_of)
}

#[test]
fn a_run_prints_a_table_json_and_a_picture() {
    let trace = format!("{HEADER}\n0,red,,2,,,,10,\n1,blue,,1,,,,10,\n");
    let (home, path) = files(&[("jobs.csv", &trace)]);
    let (jobs, svg) = (path("jobs.csv"), path("t.svg"));
    let args = [
        "simulate",
        &jobs,
        "--pool",
        "1x2:cuda:8GiB",
        "--release",
        "0s",
    ];
    let text = stdout_of(home.path(), &[&args[..], &["--svg", &svg]].concat());
    let expected = "\
2 jobs of 2 tenants on 2 devices of 1 worker

ORDER  LENGTH  UTILISATION  DONE  REFUSED  SUSPENSIONS  UNFAIR   JAIN  MEDIAN WAIT  P99  WORST
fair     20 s       75.0 %     2        0            0  22.5 %  0.767          0 s  9 s    9 s

TENANT  ORDER  WEIGHT  JOBS  DEVICE-HOURS  FAIR  MEDIAN WAIT  P99  WORST
blue    fair        1     1           0.0   0.0          9 s  9 s    9 s
red     fair        1     1           0.0   0.0          0 s  0 s    0 s

DEVICES  ORDER  JOBS  MEDIAN WAIT  P99  WORST
      1  fair      1          9 s  9 s    9 s
      2  fair      1          0 s  0 s    0 s
";
    assert_eq!(text, expected);
    assert!(fs::read_to_string(&svg).unwrap().starts_with("<svg "));
    let orders = ["--order", "fair,backfill,fifo", "--json"];
    let json = stdout_of(home.path(), &[&args[..], &orders].concat());
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["orders"].as_array().unwrap().len(), 3);
    assert_eq!(json["orders"][2]["waiting"]["worst_seconds"], 9.0);
}

#[test]
fn a_generated_trace_can_be_run_with_the_tenants_of_a_file() {
    let tenants = "[tenants.team-0]\nweight = 2\nguarantee = { cuda = 2 }\n[tenants.team-1]\n";
    let (home, path) = files(&[("pool.toml", tenants)]);
    let generate = [
        "simulate", "generate", "gangs", "--jobs", "50", "--kind", "cuda",
    ];
    let args = [&generate[..], &["--devices", "8", "--tenants", "2"]].concat();
    let trace = stdout_of(home.path(), &args);
    assert_eq!(trace, stdout_of(home.path(), &args));
    assert_eq!(
        (trace.lines().next(), trace.lines().count()),
        (Some(HEADER), 51)
    );
    let (jobs, policy) = (path("jobs.csv"), path("pool.toml"));
    fs::write(&jobs, trace).unwrap();
    let args = [
        "simulate",
        &jobs,
        "--pool",
        "2x4:cuda:8GiB",
        "--policy",
        &policy,
    ];
    let (code, stdout, stderr) = run(home.path(), &args, &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{stdout}");
    assert!(stdout.contains("\nteam-0  fair        2 "), "{stdout}");
}

#[test]
fn jobs_with_shares_of_a_device_run_beside_each_other() {
    let trace = format!("{HEADER}\n0,red,,1,,0.25,,10,\n0,red,,1,,0.75,6GiB,10,\n");
    let (home, path) = files(&[("jobs.csv", &trace)]);
    let pool = ["--pool", "1x1:cuda:8GiB", "--release", "0s"];
    let jobs = path("jobs.csv");
    let args = [&["simulate", &jobs], &pool[..]].concat();
    let text = stdout_of(home.path(), &args);
    let gangs = "\
DEVICES  ORDER  JOBS  MEDIAN WAIT  P99  WORST
   0.25  fair      1          0 s  0 s    0 s
   0.75  fair      1          0 s  0 s    0 s
";
    assert!(text.ends_with(gangs), "{text}");
    assert!(text.contains("\nfair     10 s      100.0 % "), "{text}");
    let generate = ["simulate", "generate", "steady", "--jobs", "200"];
    let whole = stdout_of(home.path(), &generate);
    assert!(whole.lines().skip(1).all(|line| line.contains(",,,")));
    let shared = stdout_of(home.path(), &[&generate[..], &["--share", "1"]].concat());
    let is_share = |line: &str| line.contains(",0.25,,") || line.contains(",0.5,,");
    assert!(shared.lines().skip(1).all(is_share), "{shared}");
}

#[test]
fn bad_input_is_refused_with_the_place_and_the_rule() {
    let broken = format!("{HEADER}\n0,red,,1,,,,10,\n1,red,,none,,,,10,\n");
    let shared = format!("{HEADER}\n0,red,,1,,1.5,,10,\n");
    let good = format!("{HEADER}\n0,red,,1,,,,10,\n");
    let (home, path) = files(&[
        ("broken.csv", &broken),
        ("shared.csv", &shared),
        ("good.csv", &good),
        ("pool.toml", "[tenants.red]\nweight = 0\n"),
    ]);
    let (broken, good, policy) = (path("broken.csv"), path("good.csv"), path("pool.toml"));
    let (shared, missing) = (path("shared.csv"), path("missing.csv"));
    let pool = "1x1:cuda:8GiB";
    let cases = [
        (
            vec!["simulate", &broken, "--pool", pool],
            format!("{broken}:3: devices is \"none\"; it must be a whole number from 1 to 100000"),
        ),
        (
            vec!["simulate", &shared, "--pool", pool],
            format!("{shared}:2: share is \"1.5\"; it must be empty or a number from 0.001 to 1, with at most 3 decimals"),
        ),
        (
            vec!["simulate", "generate", "steady", "--share", "1.5"],
            "invalid value '1.5' for '--share <PART>': it must be a number from 0 to 1".into(),
        ),
        (
            vec!["simulate", &missing, "--pool", pool],
            format!("cannot read {missing}: No such file or directory (os error 2)"),
        ),
        (
            vec!["simulate", &good, "--pool", "1x1"],
            "invalid value '1x1' for '--pool <SPEC>': \"1x1\" is not WORKERSxDEVICES:KIND:MEMORY, such as 10x8:cuda:80GiB".into(),
        ),
        (
            vec!["simulate", &good, "--pool", pool, "--policy", &policy],
            format!("{policy}: tenant red: the weight is 0; it must be from 1 to 1000000"),
        ),
        (
            vec!["simulate", &good],
            "the following required arguments were not provided: --pool <SPEC>".into(),
        ),
    ];
    for (args, expected) in cases {
        refused(home.path(), &args, &[], &expected);
    }
}
