//! `tensord apply`.

use super::*;

/// Applies a file with this text. Returns exit code, stdout and stderr.
fn apply(home: &Path, text: &str, flags: &[&str]) -> (Option<i32>, String, String) {
    let file = home.join("pool.toml");
    std::fs::write(&file, text).unwrap();
    let args = [&["apply", file.to_str().unwrap()], flags].concat();
    run(home, &args, &[])
}

/// Applies a file with this text, which must succeed. Returns the output.
fn applied(home: &Path, text: &str, flags: &[&str]) -> String {
    let (code, stdout, stderr) = apply(home, text, flags);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    stdout
}

const TWO_TEAMS: &str = "
[tenants.default]

[tenants.research]
weight = 2
guarantee = { cuda = 4 }
limit = { cuda = 8, memory = \"640GiB\" }

[tenants.students]
limit = { cuda = 2 }
";

#[test]
fn a_file_is_applied_to_a_running_pool() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let (code, _, stderr) = apply(home, TWO_TEAMS, &[]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("no scheduler has used"), "{stderr}");
    let args = ["scheduler", "--listen", "127.0.0.1:0"];
    let mut scheduler = RunningCommand::start(tensord(home, &args));
    scheduler.lines_until("workers:");
    let changes = "\
+ tenant research  weight 2; guarantee 4 cuda; limit 8 cuda, 640 GiB
+ tenant students  limit 2 cuda
warning: tenants are guaranteed 4 cuda in all, and the pool has 0 now
";
    let shown = applied(home, TWO_TEAMS, &["--dry-run"]);
    let expected = format!("{changes}2 changes, nothing applied (--dry-run)\n");
    assert_eq!(shown, expected);
    let shown = applied(home, TWO_TEAMS, &[]);
    assert_eq!(shown, format!("{changes}2 changes applied\n"));
    let shown = applied(home, TWO_TEAMS, &[]);
    let warning = changes.lines().last().unwrap();
    assert_eq!(shown, format!("{warning}\nnothing to change\n"));
    check_tenant_in_use(home);
    check_default(home);
    assert_eq!(scheduler.terminate().code(), Some(0));
}

/// Removes the tenant `students`, which has a token, and changes the other.
fn check_tenant_in_use(home: &Path) {
    let create = ["token", "create", "--name", "ci", "--tenant", "students"];
    stdout_of(home, &create);
    let one_team = "[tenants]\ndefault = {}\nresearch = { weight = 2, guarantee = { flex = 1 } }\n";
    let changes = "\
~ tenant research  guarantee 4 cuda -> 1 flex; limit 8 cuda, 640 GiB -> none
- tenant students  limit 2 cuda
    in use: valid token ci
warning: tenants are guaranteed 1 flex in all, and the pool has 0 now
";
    let (code, stdout, stderr) = apply(home, one_team, &[]);
    assert_eq!(
        (code, stdout),
        (Some(1), format!("{changes}2 changes, nothing applied\n"))
    );
    let words = "error: nothing was applied: 1 tenant is in use; correct the file, or repeat the command with --force,";
    assert!(stderr.starts_with(words), "{stderr}");
    let json = applied(home, one_team, &["--dry-run", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["applied"], false);
    assert_eq!(json["changes"][1]["change"], "remove");
    assert_eq!(json["changes"][1]["in_use"][0], "valid token ci");
    let shown = applied(home, one_team, &["--force"]);
    let last = "2 changes applied; 1 token revoked, 0 clients disconnected\n";
    assert_eq!(shown, format!("{changes}{last}"));
    let list = stdout_of(home, &["tenant", "list"]);
    let names = list.lines().map(|line| line.split(' ').next().unwrap());
    let names: Vec<_> = names.collect();
    assert_eq!(names, ["TENANT", "default", "research"]);
    let tokens = stdout_of(home, &["token", "list"]);
    assert!(tokens.contains("revoked"), "{tokens}");
}

/// The tenant `default` is not removed, as the pool needs its tokens.
fn check_default(home: &Path) {
    let (code, stdout, stderr) = apply(home, "[tenants.red]", &["--force"]);
    assert_eq!(code, Some(1));
    let lines = "\
- tenant default
    in use: valid token program
    has admin or worker tokens: worker, admin
";
    assert!(stdout.starts_with(lines), "{stdout}");
    let words = "error: nothing was applied: the file does not have tenant \"default\", which has admin or worker tokens (worker, admin); add `[tenants.default]` to the file,";
    assert!(stderr.starts_with(words), "{stderr}");
}

#[test]
fn a_wrong_file_is_refused_with_its_line() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let text = "[tenants.red]\nlimits = { cuda = 2 }\n";
    let (code, stdout, stderr) = apply(home, text, &[]);
    assert_eq!((code, stdout.as_str()), (Some(64), ""));
    let file = home.join("pool.toml");
    let expected = format!(
        "error: {}:2: tenant red: unknown field `limits`, expected one of `weight`, `guarantee`, `limit`\n",
        file.display()
    );
    assert_eq!(stderr, expected);
    refused(
        home,
        &["apply", "/nowhere"],
        &[],
        "cannot read /nowhere: No such file or directory (os error 2)",
    );
}
