//! `tensord worker list` and `remove`.

use super::*;

#[test]
fn workers_are_listed_and_removed_while_the_pool_runs() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let args = ["scheduler", "--listen", "127.0.0.1:0"];
    let mut scheduler = RunningCommand::start(tensord(home, &args));
    let lines = scheduler.lines_until("workers:");
    assert_eq!(listed(home), Vec::<serde_json::Value>::new());
    let args = [
        "worker",
        "--listen",
        "127.0.0.1:0",
        "--devices",
        "flex*2",
        "--name",
        "gpu-1",
    ];
    let mut worker = tensord(home, &args);
    worker.env("TENSORD_URL", url(&lines[3]));
    let mut worker = RunningCommand::start(worker);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !listed(home).iter().any(|worker| worker["joined"] == true) {
        assert!(
            std::time::Instant::now() < until,
            "the worker does not join"
        );
    }
    check_listed_worker(home);
    check_workers_without_state(home, url(&lines[3]));
    assert_eq!(listed(home).len(), 3);
    for worker in listed(home) {
        let name = worker["name"].as_str().unwrap().to_owned();
        if name.starts_with("gpu-2-") {
            stdout_of(home, &["worker", "remove", &name]);
        }
    }
    // Each of the three workers used the first worker token once.
    let tokens: serde_json::Value =
        serde_json::from_str(&stdout_of(home, &["token", "list", "--json"])).unwrap();
    let tokens = tokens["tokens"].as_array().unwrap();
    let used = tokens.iter().find(|token| token["name"] == "worker");
    assert_eq!(used.unwrap()["used"], 3);

    assert_eq!(
        stdout_of(home, &["worker", "remove", "gpu-1"]),
        "worker gpu-1 is removed; its leases have ended, or go on at other workers\n"
    );
    assert_eq!(worker.child.wait().unwrap().code(), Some(1));
    assert_eq!(listed(home), Vec::<serde_json::Value>::new());
    let (code, stdout, stderr) = run(home, &["worker", "remove", "gpu-1"], &[]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(
        stderr.contains("there is no worker \"gpu-1\"; `tensord worker list` shows"),
        "{stderr}"
    );
    let list = ["worker", "list"];
    let (code, _, stderr) = run(home, &list, &[("TENSORD_URL", url(&lines[3]))]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("the worker token was sent"), "{stderr}");
}

fn listed(home: &Path) -> Vec<serde_json::Value> {
    let list: serde_json::Value =
        serde_json::from_str(&stdout_of(home, &["worker", "list", "--json"])).unwrap();
    list["workers"].as_array().unwrap().clone()
}

/// Checks how the worker `gpu-1`, the only one, is listed.
fn check_listed_worker(home: &Path) {
    let one = &listed(home)[0];
    assert_eq!(one["name"], "gpu-1");
    assert_eq!(one["token"], "worker");
    assert_eq!(one["devices"][0]["kind"], "flex");
    assert_eq!(one["devices"][0]["count"], 2);
    let key = home.join(".local/state/tensord/worker-gpu-1.pem");
    let mode = std::os::unix::fs::PermissionsExt::mode(&key.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let table = stdout_of(home, &["worker", "list"]);
    let words = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let mut rows = table.lines().map(words);
    let header = [
        "NAME", "STANDING", "MAY", "OFFER", "TOKEN", "ENROLLED", "SEEN",
    ];
    assert_eq!(rows.next().unwrap(), header);
    assert_eq!(rows.next().unwrap()[..4], ["gpu-1", "joined", "2", "flex"]);
}

/// Starts two workers that cannot keep a key.
fn check_workers_without_state(home: &Path, worker_url: &str) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    // Without a place to keep a key, a worker joins under another name at each start.
    for count in 1..=2 {
        let args = [
            "worker",
            "--listen",
            "127.0.0.1:0",
            "--devices",
            "flex",
            "--name",
            "gpu-2",
            "--state",
            "/proc/none",
        ];
        let mut passing = tensord(home, &args);
        passing.env("TENSORD_URL", worker_url);
        let _passing = RunningCommand::start(passing);
        let is_one =
            |worker: &&serde_json::Value| worker["name"].as_str().unwrap().starts_with("gpu-2-");
        while listed(home).iter().filter(is_one).count() < count {
            assert!(
                std::time::Instant::now() < until,
                "the worker does not join"
            );
        }
    }
}
