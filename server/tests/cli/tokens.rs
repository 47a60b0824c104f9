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
    let status = |url: &str| run(home, &["status"], &[("TENSORD_URL", url)]);
    let stdout_of = |args: &[&str]| {
        let (code, stdout, stderr) = run(home, args, &[]);
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        stdout
    };
    let listed = |name: &str| {
        let list: serde_json::Value =
            serde_json::from_str(&stdout_of(&["token", "list", "--json"])).unwrap();
        let tokens = list["tokens"].as_array().unwrap();
        tokens.iter().find(|token| token["name"] == name).cloned()
    };

    let made = stdout_of(&[
        "token",
        "create",
        "--name",
        "ci",
        "--tenant",
        "red",
        "--expires",
        "1d",
    ]);
    let mut made = made.lines();
    assert_eq!(
        made.next(),
        Some("# program token ci of tenant red, for 1 d 0 h; it is not shown again")
    );
    let ci = url(made.next().unwrap()).to_owned();
    assert_eq!(status(&ci).0, Some(0));
    assert_eq!(listed("ci").unwrap()["tenant"], "red");
    let table = stdout_of(&["token", "list"]);
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

    let rotated = stdout_of(&["token", "rotate", "ci"]);
    let successor = url(rotated.lines().nth(1).unwrap()).to_owned();
    assert_eq!((status(&ci).0, status(&successor).0), (Some(0), Some(0)));
    assert_eq!(listed("ci").unwrap()["standing"], "rotating");
    assert_eq!(
        stdout_of(&["token", "revoke", "ci"]),
        "ci is revoked; 0 clients and 0 workers were disconnected\n"
    );
    for url in [&ci, &successor] {
        let (code, _, stderr) = status(url);
        assert_eq!(code, Some(1));
        assert!(stderr.contains("the token \"ci\" was revoked"), "{stderr}");
    }
    let (code, stdout, stderr) = run(home, &["token", "list"], &[("TENSORD_URL", programs)]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(
        stderr.contains("the client token was sent, but an administrator needs a different token"),
        "{stderr}"
    );

    // From the next start on, the printed URL has the successor's token.
    let successor = stdout_of(&["token", "rotate", "program", "--grace", "0s"]);
    let successor = url(successor.lines().nth(1).unwrap()).to_owned();
    assert_eq!(status(programs).0, Some(1));
    stdout_of(&["token", "revoke", "worker"]);
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
