//! Tests of the binary as users run it: its output and exit codes.

mod apply;
mod simulate;
mod tokens;
mod workers;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, ExitStatus, Output, Stdio},
};

/// Returns a command that runs the binary with no environment but `HOME`.
fn tensord(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensord"));
    command.env_clear().env("HOME", home).args(args);
    command
}

/// Returns exit code, stdout and stderr.
fn parse_output(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn run(home: &Path, args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let variables = variables.iter().copied();
    parse_output(&tensord(home, args).envs(variables).output().unwrap())
}

#[track_caller]
fn refused(home: &Path, args: &[&str], variables: &[(&str, &str)], expected: &str) {
    let (code, stdout, stderr) = run(home, args, variables);
    assert_eq!((code, stdout.as_str()), (Some(64), ""), "{stderr}");
    assert_eq!(stderr, format!("error: {expected}\n"));
}

/// Runs a command that succeeds, and returns its output.
fn stdout_of(home: &Path, args: &[&str]) -> String {
    let (code, stdout, stderr) = run(home, args, &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    stdout
}

/// A command that runs until it is stopped. Dropping it kills it.
struct RunningCommand {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl RunningCommand {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    /// Reads the lines of stdout up to and including the first that begins with `last`.
    fn lines_until(&mut self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line).unwrap();
            assert_ne!(read, 0, "stdout ended after {lines:?}");
            lines.push(line.trim_end().to_owned());
            if line.starts_with(last) {
                return lines;
            }
        }
    }

    fn terminate(mut self) -> ExitStatus {
        let kill = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        assert!(kill.unwrap().success());
        self.child.wait().unwrap()
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // Both fail if the process has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the URL in a line such as `programs:  export TENSORD_URL='…'`.
fn url(line: &str) -> &str {
    line.split('\'').nth(1).unwrap()
}

#[test]
fn devices_lists_what_the_host_has() {
    let home = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = run(home.path(), &["devices"], &[]);
    assert_eq!(code, Some(0), "{stderr}");
    // In builds with graphics devices, their drivers may write to stderr as well.
    if !cfg!(any(
        feature = "vulkan",
        feature = "webgpu",
        feature = "metal"
    )) {
        assert_eq!(stderr, "");
    }
    let mut lines = stdout.lines();
    let header: Vec<_> = lines.next().unwrap().split_whitespace().collect();
    let expected = ["DEVICE", "NAME", "MEMORY", "DRIVER", "FINGERPRINT"];
    assert_eq!(header, expected);
    assert!(lines.any(|line| line.starts_with("flex:0 ") && line.contains(" Burn Flex ")));
    let (_, stdout, _) = run(home.path(), &["devices", "--json"], &[]);
    let parsed: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let devices = parsed["devices"].as_array().unwrap();
    assert!(devices.iter().any(|device| device["device"] == "flex:0"));
}

#[test]
#[cfg(not(feature = "cuda"))]
fn kind_of_device_that_is_not_in_the_build_is_named() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let hint = "cuda devices are not in this build, which has flex; build tensord with `--features cuda`; valid lists are auto, flex*2, and cuda:0,1";
    if !cfg!(any(
        feature = "vulkan",
        feature = "webgpu",
        feature = "rocm",
        feature = "metal"
    )) {
        refused(
            home,
            &["worker", "--devices", "cuda:0"],
            &[],
            &format!("invalid value 'cuda:0' for '--devices <LIST>': {hint}"),
        );
        #[cfg(feature = "demo")]
        refused(
            home,
            &["demo", "--kind", "cuda"],
            &[],
            &format!("--kind cuda: {hint}"),
        );
    }
}

#[test]
fn invalid_setting_exits_64_with_one_line_that_names_it() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    refused(
        home,
        &["up", "--lisen", "127.0.0.1:1"],
        &[],
        "unexpected argument '--lisen' found; tip: a similar argument exists: '--listen'",
    );
    refused(
        home,
        &["scheduler"],
        &[("TENSORD_LISTEN", "here")],
        "invalid value 'here' for '--listen <IP:PORT>': \"here\" is not IP:PORT, such as 0.0.0.0:7461",
    );
    #[cfg(feature = "demo")]
    refused(
        home,
        &["demo", "--devices", "3"],
        &[],
        "invalid value '3' for '--devices <N>': the 64 digits of a step divide evenly among 1, 2, 4, 8 or 16 devices",
    );
    refused(
        home,
        &["status"],
        &[],
        "TENSORD_URL is not set; export the line that `tensord up` or `tensord scheduler` prints, or name a file that holds the URL with --url-file",
    );
    refused(
        home,
        &["status"],
        &[("TENSORD_URL", "http://h:1")],
        "TENSORD_URL: pool URL: the scheme is \"http\"; it must be tensord; a valid URL is tensord://TOKEN@gpu-1.example:7461?ca=sha256:<64 hex digits>",
    );
    let file = home.join("tensord.toml");
    let shown = file.display().to_string();
    std::fs::write(&file, "[up]\nlisen = \"127.0.0.1:1\"\n").unwrap();
    refused(
        home,
        &["up", "--config", &shown],
        &[],
        &format!(
            "{shown}:2: unknown field `lisen`, expected one of `listen`, `advertise`, `devices`, `name`, `memory`, `upload-cache`, `snapshot-memory`, `snapshots`, `collective-timeout`, `op-timeout`, `bucket-size`, `worker-listen`, `audit-log-size`, `audit-log-files`, `lease-token-seconds`, `half-life`, `reserve-after`, `idle-timeout`"
        ),
    );
    refused(
        home,
        &["up", "--config", "/nowhere"],
        &[],
        "--config: cannot read /nowhere: No such file or directory (os error 2)",
    );
}

#[test]
fn help_and_version_go_to_stdout() {
    let home = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = run(home.path(), &["--version"], &[]);
    let version = format!("tensord {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!((code, stdout, stderr), (Some(0), version, String::new()));
    let (code, stdout, stderr) = run(home.path(), &["gateway", "--help"], &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("tensord gateway --devices 2"), "{stdout}");
}

#[test]
fn flags_override_the_environment_which_overrides_the_file() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let file = home.join("tensord.toml");
    std::fs::write(
        &file,
        "[scheduler]\nlisten = \"127.0.0.1:0\"\nadvertise = \"of-file\"\n",
    )
    .unwrap();
    let host = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = tensord(home, &["scheduler"]);
        command
            .env("TENSORD_CONFIG", &file)
            .args(args)
            .envs(variables.iter().copied());
        let mut scheduler = RunningCommand::start(command);
        let first = scheduler.lines_until("tensord pool at ").remove(0);
        let authority = first.split_whitespace().nth(3).unwrap().to_owned();
        authority.split(':').next().unwrap().to_owned()
    };
    assert_eq!(host(&[], &[]), "of-file");
    let variable = [("TENSORD_ADVERTISE", "of-environment")];
    assert_eq!(host(&[], &variable), "of-environment");
    assert_eq!(host(&["--advertise", "of-flag"], &variable), "of-flag");
}

#[test]
fn a_scheduler_prints_urls_that_work_and_keeps_them() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let args = ["scheduler", "--listen", "127.0.0.1:0"];
    let mut scheduler = RunningCommand::start(tensord(home, &args));
    let lines = scheduler.lines_until("workers:");
    assert!(
        lines[0].ends_with("  (state in ~/.local/state/tensord)"),
        "{lines:?}"
    );
    assert_eq!((lines.len(), lines[1].as_str()), (4, ""));
    let (programs, workers) = (url(&lines[2]), url(&lines[3]));

    let status = |url: &str| run(home, &["status"], &[("TENSORD_URL", url)]);
    let (code, stdout, stderr) = status(programs);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(
        stdout.starts_with("0 workers, 0 devices (0 leased), 0 leases,"),
        "{stdout}"
    );
    let (code, stdout, stderr) = status(workers);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    let authority = lines[0].split_whitespace().nth(3).unwrap();
    let expected = format!(
        "error: the scheduler at {authority} refused the call: the worker token was sent, but a program needs a different token; use the URL of the `programs:` line that the scheduler prints\n"
    );
    assert_eq!(stderr, expected);

    let taken = run(home, &["scheduler", "--listen", "127.0.0.1:0"], &[]);
    let state = home.join(".local/state/tensord");
    let expected = format!(
        "error: another scheduler uses the state directory {}; stop it, or give this scheduler another directory with --state\n",
        state.display()
    );
    assert_eq!(taken, (Some(1), String::new(), expected));

    assert_eq!(scheduler.terminate().code(), Some(0));
    let mut again = RunningCommand::start(tensord(home, &args));
    let again = again.lines_until("workers:");
    let token = |line: &str| url(line).split('@').next().unwrap().to_owned();
    assert_eq!(token(&again[2]), token(&lines[2]));
    assert_eq!(token(&again[3]), token(&lines[3]));
}

#[test]
fn up_runs_a_pool_and_stops_in_order() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let args = [
        "up",
        "--listen",
        "127.0.0.1:0",
        "--devices",
        "flex*2",
        "--name",
        "here",
    ];
    let mut up = RunningCommand::start(tensord(home, &args));
    let lines = up.lines_until("workers:");
    let variables = [("TENSORD_URL", url(&lines[2]))];
    let (code, stdout, stderr) = run(home, &["status"], &variables);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(
        stdout.starts_with("1 worker, 2 devices (0 leased), 0 leases,"),
        "{stdout}"
    );
    let (code, stdout, _) = run(home, &["status", "--json"], &variables);
    assert_eq!(code, Some(0));
    let status: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(status["workers"][0]["name"], "here");
    assert_eq!(status["workers"][0]["devices"][1]["kind"], "flex");
    assert_eq!(up.terminate().code(), Some(0));
}

#[cfg(feature = "demo")]
#[test]
fn the_demo_trains_on_devices_of_both_its_workers_together() {
    let home = tempfile::tempdir().unwrap();
    let args = ["demo", "--devices", "4", "--epochs", "3", "--json"];
    let (code, stdout, stderr) = run(home.path(), &args, &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{stdout}");
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(
        lines[0],
        "training mlp on 2 flex on demo-1, 2 flex on demo-2"
    );
    let epochs = lines.iter().filter(|line| line.starts_with("epoch "));
    assert_eq!(epochs.count(), 3, "{stdout}");
    assert!(lines.contains(&"workers        demo-1, demo-2"), "{stdout}");
    let result: serde_json::Value = serde_json::from_str(lines[lines.len() - 1]).unwrap();
    assert_eq!(result["devices"], 4);
    assert_eq!(result["workers"], serde_json::json!(["demo-1", "demo-2"]));
    assert_eq!(result["steps"], 3 * 22);
    assert!(result["test_accuracy"].as_f64().unwrap() > 0.8, "{stdout}");
}
