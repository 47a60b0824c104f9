//! `tensord token`.

use super::*;

#[test]
fn tokens_are_made_rotated_and_revoked_while_the_pool_runs() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let none = run(home, &["token", "list"], &[]);
    assert_eq!(none.0, Some(1));
    assert!(
        none.2.starts_with(
            "error: no scheduler has used the state directory ~/.local/state/tensord;"
        ),
        "{}",
        none.2
    );
    let args = ["scheduler", "--listen", "127.0.0.1:0"];
    let mut scheduler = RunningCommand::start(tensord(home, &args));
    let lines = scheduler.lines_until("workers:");
    let programs = url(&lines[2]);
    let ci = check_new_token(home);
    check_rotated_token(home, &ci);
    check_json(home);
    let (code, stdout, stderr) = run(home, &["token", "list"], &[("TENSORD_URL", programs)]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(
        stderr.contains("the program token was sent, but an administrator needs a different token"),
        "{stderr}"
    );

    // From the next start on, the printed URL has the successor's token.
    let successor = stdout_of(home, &["token", "rotate", "program", "--grace", "0s"]);
    let successor = url(successor.lines().nth(1).unwrap()).to_owned();
    assert_eq!(status(home, programs).0, Some(1));
    stdout_of(home, &["token", "revoke", "worker"]);
    assert_eq!(scheduler.terminate().code(), Some(0));
    let mut again = RunningCommand::start(tensord(home, &args));
    let again = again.lines_until("workers:");
    let token = |url: &str| url.split('@').next().unwrap().to_owned();
    assert_eq!(token(url(&again[2])), token(&successor));
    assert_eq!(
        again[3],
        "workers:   make a URL with `tensord token create --role worker`"
    );
}

fn status(home: &Path, url: &str) -> (Option<i32>, String, String) {
    run(home, &["status"], &[("TENSORD_URL", url)])
}

/// Returns the row of the token `name` in `tensord token list`.
fn listed(home: &Path, name: &str) -> Option<serde_json::Value> {
    let list: serde_json::Value =
        serde_json::from_str(&stdout_of(home, &["token", "list", "--json"])).unwrap();
    let tokens = list["tokens"].as_array().unwrap();
    tokens.iter().find(|token| token["name"] == name).cloned()
}

/// Makes the token `ci`, and checks that it works and how it is listed. Returns its URL.
fn check_new_token(home: &Path) -> String {
    stdout_of(home, &["tenant", "add", "red"]);
    let made = stdout_of(
        home,
        &[
            "token",
            "create",
            "--name",
            "ci",
            "--tenant",
            "red",
            "--user",
            "ada",
            "--note",
            "until summer",
            "--expires",
            "1d",
        ],
    );
    let mut made = made.lines();
    assert_eq!(
        made.next(),
        Some("# program token ci of tenant red, user ada, for 1 d 0 h; it is not shown again")
    );
    let ci = url(made.next().unwrap()).to_owned();
    assert_eq!(status(home, &ci).0, Some(0));
    let shown = listed(home, "ci").unwrap();
    assert_eq!(shown["tenant"], "red");
    assert_eq!(
        (&shown["user"], &shown["note"]),
        (&"ada".into(), &"until summer".into())
    );
    let table = stdout_of(home, &["token", "list"]);
    let names = table
        .lines()
        .map(|line| line.split_whitespace().next().unwrap());
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["NAME", "program", "worker", "admin", "ci"]
    );
    assert!(
        !table.contains(ci.split(['/', '@']).nth(2).unwrap()),
        "{table}"
    );
    ci
}

/// Makes, rotates and revokes a token of a tenant of its own, with all replies in JSON.
fn check_json(home: &Path) {
    let json = |args: &[&str]| -> serde_json::Value {
        let args = [args, &["--json"]].concat();
        serde_json::from_str(&stdout_of(home, &args)).unwrap()
    };
    json(&["tenant", "add", "blue"]);
    let made = json(&["token", "create", "--name", "cd", "--tenant", "blue"]);
    assert_eq!(
        (&made["token"]["name"], &made["token"]["tenant"]),
        (&"cd".into(), &"blue".into())
    );
    assert_eq!(status(home, made["url"].as_str().unwrap()).0, Some(0));
    let rotated = json(&["token", "rotate", "cd", "--grace", "0s"]);
    assert_ne!(rotated["url"], made["url"]);
    assert_eq!(status(home, made["url"].as_str().unwrap()).0, Some(1));
    let expected = serde_json::json!({
        "revoked": "cd", "clients_disconnected": 0, "workers_disconnected": 0,
    });
    assert_eq!(json(&["token", "revoke", "cd"]), expected);
    let removed = serde_json::json!({ "removed": "blue" });
    assert_eq!(json(&["tenant", "remove", "blue"]), removed);
}

/// Rotates the token `ci`, whose URL is `ci`, and then revokes it.
fn check_rotated_token(home: &Path, ci: &str) {
    let rotated = stdout_of(home, &["token", "rotate", "ci"]);
    let successor = url(rotated.lines().nth(1).unwrap()).to_owned();
    for url in [ci, &successor] {
        assert_eq!(status(home, url).0, Some(0));
    }
    assert_eq!(listed(home, "ci").unwrap()["standing"], "rotating");
    assert_eq!(
        stdout_of(home, &["token", "revoke", "ci"]),
        "ci is revoked; 0 clients and 0 workers were disconnected\n"
    );
    for url in [ci, &successor] {
        let (code, _, stderr) = status(home, url);
        assert_eq!(code, Some(1));
        assert!(stderr.contains("the token \"ci\" was revoked"), "{stderr}");
    }
}
