//! `tensord worker list` and `remove`.

use super::*;

#[test]
fn workers_are_listed_and_removed_while_the_pool_runs() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let args = ["scheduler", "--listen", "127.0.0.1:0"];
    let mut scheduler = RunningCommand::start(tensord(home, &args));
    let lines = scheduler.lines_until("workers:");
    let stdout_of = |args: &[&str]| {
        let (code, stdout, stderr) = run(home, args, &[]);
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        stdout
    };
    let listed = || {
        let list: serde_json::Value =
            serde_json::from_str(&stdout_of(&["worker", "list", "--json"])).unwrap();
        list["workers"].as_array().unwrap().clone()
    };
    assert_eq!(listed(), Vec::<serde_json::Value>::new());
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
    while !listed().iter().any(|worker| worker["joined"] == true) {
        assert!(
            std::time::Instant::now() < until,
            "the worker does not join"
        );
    }
    let one = &listed()[0];
    assert_eq!(one["name"], "gpu-1");
    assert_eq!(one["token"], "worker");
    assert_eq!(one["devices"][0]["kind"], "flex");
    assert_eq!(one["devices"][0]["count"], 2);
    let key = home.join(".local/state/tensord/worker-gpu-1.pem");
    let mode = std::os::unix::fs::PermissionsExt::mode(&key.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let table = stdout_of(&["worker", "list"]);
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
        passing.env("TENSORD_URL", url(&lines[3]));
        let _passing = RunningCommand::start(passing);
        let is_one =
            |worker: &&serde_json::Value| worker["name"].as_str().unwrap().starts_with("gpu-2-");
        while listed().iter().filter(is_one).count() < count {
            assert!(
                std::time::Instant::now() < until,
                "the worker does not join"
            );
        }
    }
    assert_eq!(listed().len(), 3);
    for worker in listed() {
        let name = worker["name"].as_str().unwrap().to_owned();
        if name.starts_with("gpu-2-") {
            stdout_of(&["worker", "remove", &name]);
        }
    }
    // Each of the three workers used the first worker token once.
    let tokens: serde_json::Value =
        serde_json::from_str(&stdout_of(&["token", "list", "--json"])).unwrap();
    let tokens = tokens["tokens"].as_array().unwrap();
    let used = tokens.iter().find(|token| token["name"] == "worker");
    assert_eq!(used.unwrap()["used"], 3);

    assert_eq!(
        stdout_of(&["worker", "remove", "gpu-1"]),
        "worker gpu-1 is removed, and its leases have ended\n"
    );
    assert_eq!(worker.child.wait().unwrap().code(), Some(1));
    assert_eq!(listed(), Vec::<serde_json::Value>::new());
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
