//! Real processes on loopback: a scheduler, workers, and any other process a test needs.
//!
//! Every process listens on port 0 and is killed by its process id when its handle is
//! dropped. Its log goes to a file, which is printed when a wait or the test fails.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tensord_client::{Pool, testing::Options};
use tensord_transport::{PoolUrl, tls::Trust};

use crate::host;

/// How long a process may take to start. Debug builds on busy machines are slow.
pub const START_DEADLINE: Duration = Duration::from_secs(60);

/// Number of lines of a process's log that are printed when its test fails.
const LAST_LOG_LINES: usize = 80;

/// The entry of a cluster's directory that is the snapshot store of its workers, if they have one.
pub const SNAPSHOTS: &str = "snapshots";

/// A `tensord` process.
pub struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
    log: PathBuf,
}

/// A scheduler and its workers, each in its own process.
pub struct Cluster {
    /// The workers, in the order they were started.
    pub workers: Vec<Process>,
    /// The scheduler. Tests that restart it take it out.
    pub scheduler: Option<Process>,
    client_url: String,
    worker_url: String,
    dir: TempDir,
    worker_binary: PathBuf,
}

/// Returns the path of the `tensord` binary that was built along with this test or benchmark.
///
/// # Panics
///
/// If the binary does not exist.
pub fn binary() -> PathBuf {
    let own = std::env::current_exe().expect("a process knows its own path");
    let name = format!("tensord{}", std::env::consts::EXE_SUFFIX);
    // A benchmark is in target/<profile>, a test in target/<profile>/deps.
    let directories = own.ancestors().skip(1).take(2);
    let mut binaries = directories.map(|directory| directory.join(&name));
    let binary = binaries.find(|binary| binary.exists());
    binary.unwrap_or_else(|| {
        let directory = own.parent().unwrap_or(&own).display();
        panic!("there is no {name} at {directory}; run `cargo build -p tensord`")
    })
}

impl Process {
    /// Starts `tensord` with `args`. Its log goes to the file `log`.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn start(args: &[&str], env: &[(&str, &str)], log: PathBuf) -> Self {
        Self::start_of(&binary(), args, env, log)
    }

    /// Starts another build of `tensord`, or a program that takes the same environment
    /// variables.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn start_of(binary: &Path, args: &[&str], env: &[(&str, &str)], log: PathBuf) -> Self {
        let mut command = Command::new(binary);
        command
            .args(args)
            .env_remove("TENSORD_URL")
            .env_remove("TENSORD_DEVICES")
            .env(
                "TENSORD_LOG",
                "info,tensord=debug,tensord_worker=debug,tensord_transport=debug",
            )
            .envs(env.iter().copied());
        Self::spawn(command, log)
    }

    /// Starts any command with the same handling of its output and log.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn spawn(mut command: Command, log: PathBuf) -> Self {
        let stderr = File::create(&log).expect("the temporary directory is writable");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr);
        let mut child = command.spawn().expect("the system starts processes");
        let stdout = child.stdout.take().expect("stdout is piped");
        let (line, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for text in BufReader::new(stdout).lines().map_while(Result::ok) {
                if line.send(text).is_err() {
                    return;
                }
            }
        });
        Self { child, lines, log }
    }

    /// Returns the first value that `matches` makes of a new line of the process's output.
    ///
    /// # Panics
    ///
    /// If no line matches within [`START_DEADLINE`]. The message contains the log.
    pub fn wait_for<T>(&self, what: &str, matches: impl Fn(&str) -> Option<T>) -> T {
        let found = self.try_wait_for(what, START_DEADLINE, matches);
        found.unwrap_or_else(|e| panic!("{e}"))
    }

    /// Returns the first value that `matches` makes of a new line of the process's output.
    ///
    /// # Errors
    ///
    /// If no line matches within `deadline`. The message contains the log.
    pub fn try_wait_for<T>(
        &self,
        what: &str,
        deadline: Duration,
        matches: impl Fn(&str) -> Option<T>,
    ) -> Result<T, String> {
        let until = Instant::now() + deadline;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.map_err(|e| {
                let log = self.log();
                format!("no {what} from the process ({e}); its log:\n{log}")
            })?;
            if let Some(found) = matches(&line) {
                return Ok(found);
            }
        }
    }

    /// Returns the pool URL that the process prints for a role, such as `program`.
    ///
    /// # Panics
    ///
    /// As [`wait_for`](Self::wait_for).
    pub fn printed_url(&self, role: &str) -> String {
        self.wait_for("URL", |line| {
            let url = url_in(line)?;
            line.contains(role).then_some(url)
        })
    }

    /// Returns the log written so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends the process the signal called `name`, such as `STOP`.
    ///
    /// # Panics
    ///
    /// If there is no `kill` command.
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args([format!("-{name}"), id]).status();
        sent.expect("there is a kill command");
    }

    /// Sends the signal called `name` to the process and to those that it has started: a worker
    /// with the processes of its leases, as when its host stops.
    ///
    /// # Panics
    ///
    /// If there is no `kill` command.
    pub fn signal_all(&self, name: &str) {
        self.signal(name);
        for id in self.children() {
            let arguments = [format!("-{name}"), id.to_string()];
            // The process may have ended.
            let sent = Command::new("kill").args(arguments).status();
            sent.expect("there is a kill command");
        }
    }

    /// Kills the process with SIGKILL, as in a crash.
    pub fn kill(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until the process exits by itself and returns its exit code, or `None` if a
    /// signal ended it.
    ///
    /// # Panics
    ///
    /// If the process does not exit within `deadline`. The message contains the log.
    pub fn exit_code(&mut self, deadline: Duration) -> Option<i32> {
        let until = Instant::now() + deadline;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!(
            "it did not end within {deadline:?}; its log:\n{}",
            self.log()
        );
    }
}

/// Returns the pool URL in a line that a process prints.
fn url_in(line: &str) -> Option<String> {
    let (_, url) = line.split_once("TENSORD_URL=")?;
    Some(url.trim_matches(['\'', '"']).to_owned())
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(LAST_LOG_LINES)..];
            eprintln!("end of {}:\n{}", self.log.display(), last.join("\n"));
        }
    }
}

impl Cluster {
    /// Returns the logs of the scheduler and of all workers.
    pub fn logs(&self) -> String {
        let processes = self.scheduler.iter().chain(&self.workers);
        processes.map(Process::log).collect()
    }

    /// Kills all workers at once, so that no lease of one goes on at another one first.
    ///
    /// # Panics
    ///
    /// If there is no `kill` command.
    pub fn kill_workers(&mut self) {
        let ids = self.workers.iter().map(|worker| worker.id().to_string());
        let killed = Command::new("kill").arg("-KILL").args(ids).status();
        killed.expect("there is a kill command");
        self.workers.iter_mut().for_each(Process::kill);
    }

    /// Returns the index of the worker that runs the only lease, if one does.
    pub fn worker_of_lease(&self) -> Option<usize> {
        let runs = |worker: &Process| !worker.processes_of_leases().is_empty();
        self.workers.iter().position(runs)
    }

    /// Starts a scheduler and one worker for each device list, and waits until all workers
    /// have registered.
    ///
    /// # Panics
    ///
    /// If a process does not start, or not all workers register, within [`START_DEADLINE`].
    pub fn start(workers: &[&str]) -> Self {
        Self::start_with(binary(), workers)
    }

    /// Like [`start`](Self::start), with workers of another build.
    ///
    /// # Panics
    ///
    /// If a process does not start, or not all workers register, within [`START_DEADLINE`].
    pub fn start_with(worker_binary: PathBuf, workers: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("there is a temporary directory");
        let mut cluster = Self {
            workers: Vec::new(),
            scheduler: None,
            client_url: String::new(),
            worker_url: String::new(),
            dir,
            worker_binary,
        };
        cluster.start_scheduler("127.0.0.1:0");
        for devices in workers {
            cluster.add_worker(devices);
        }
        cluster.wait_for_workers(workers.len());
        cluster
    }

    /// Starts the scheduler, on the state directory of any earlier scheduler of this
    /// cluster.
    ///
    /// # Panics
    ///
    /// If the scheduler does not start.
    pub fn start_scheduler(&mut self, listen: &str) {
        self.start_scheduler_with(listen, &[]);
    }

    /// Like [`start_scheduler`](Self::start_scheduler), with additional arguments.
    ///
    /// # Panics
    ///
    /// If the scheduler does not start.
    pub fn start_scheduler_with(&mut self, listen: &str, more: &[&str]) {
        let state = self.path("state");
        let state = state.to_str().expect("temporary paths are text");
        let mut args = vec!["scheduler", "--listen", listen, "--state", state];
        args.extend(more);
        let process = Process::start(&args, &[], self.path("scheduler.log"));
        let url = |line: &str| Some((line.contains("program"), url_in(line)?));
        for _ in 0..2 {
            match process.wait_for("URL", url) {
                (true, url) => self.client_url = url,
                (false, url) => self.worker_url = url,
            }
        }
        self.scheduler = Some(process);
    }

    /// Kills the scheduler as in a crash, and starts another on the same port, with
    /// additional arguments.
    ///
    /// # Panics
    ///
    /// If no scheduler runs, or the new one does not start.
    pub fn restart_scheduler_with(&mut self, more: &[&str]) {
        self.kill_scheduler();
        self.start_scheduler_again(more);
    }

    /// Kills the scheduler as in a crash, does something without it, and starts another on the same
    /// port.
    ///
    /// # Panics
    ///
    /// If no scheduler runs, or the new one does not start.
    pub fn without_scheduler(&mut self, meanwhile: impl FnOnce(&mut Self)) {
        self.kill_scheduler();
        meanwhile(self);
        self.start_scheduler_again(&[]);
    }

    fn kill_scheduler(&mut self) {
        let mut scheduler = self.scheduler.take().expect("the scheduler runs");
        scheduler.kill();
    }

    fn start_scheduler_again(&mut self, more: &[&str]) {
        let url: PoolUrl = self.client_url.parse().expect("a pool URL");
        self.start_scheduler_with(&format!("127.0.0.1:{}", url.port), more);
    }

    /// Starts a worker.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn add_worker(&mut self, devices: &str) {
        self.add_worker_with(devices, &[]);
    }

    /// Starts a worker with additional arguments.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn add_worker_with(&mut self, devices: &str, more: &[&str]) {
        self.add_worker_in(devices, more, &[]);
    }

    /// Starts a worker with additional arguments and environment variables.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn add_worker_in(&mut self, devices: &str, more: &[&str], variables: &[(&str, &str)]) {
        let name = format!("worker-{}", self.workers.len());
        let mut args = vec![
            "worker",
            "--name",
            &name,
            "--listen",
            "127.0.0.1:0",
            "--devices",
            devices,
        ];
        args.extend(more);
        let log = self.path(&format!("{name}.log"));
        // Keeps compiled kernels from run to run.
        let shared = std::env::var_os("TENSORD_KERNELS").map(PathBuf::from);
        let state = shared.unwrap_or_else(|| self.path("worker-state"));
        let state = state.to_str().expect("temporary paths are text");
        let compile_seconds = host::COMPILE_DEADLINE.as_secs().to_string();
        let mut env = vec![
            ("TENSORD_URL", self.worker_url.as_str()),
            ("TENSORD_STATE", state),
        ];
        if !devices.starts_with("flex") {
            env.push(("TENSORD_OP_TIMEOUT", &compile_seconds));
        }
        env.extend(variables);
        let binary = self.worker_binary.clone();
        self.workers
            .push(Process::start_of(&binary, &args, &env, log));
    }

    /// Starts a worker with the snapshot store of this cluster.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn add_worker_with_store(&mut self, devices: &str) {
        let store = self.path(SNAPSHOTS);
        let store = store.to_str().expect("temporary paths are text");
        self.add_worker_with(devices, &["--snapshots", store]);
    }

    /// Waits until `count` workers are registered in the pool.
    ///
    /// # Panics
    ///
    /// If the number of workers is not `count` within [`START_DEADLINE`]. The message
    /// contains the logs.
    pub fn wait_for_workers(&self, count: usize) {
        let pool = self.pool();
        self.wait("the workers", || {
            pool.status()
                .is_ok_and(|status| status.workers.len() == count)
        });
    }

    /// Polls `holds` every 50 ms until it returns true.
    ///
    /// # Panics
    ///
    /// If `holds` is still false after [`START_DEADLINE`]. The message contains the logs
    /// and `what`.
    pub fn wait(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let until = Instant::now() + START_DEADLINE;
        while !holds() {
            if Instant::now() > until {
                let logs = self.logs();
                panic!("waited too long for {what}; the logs:\n{logs}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the URL for programs.
    pub fn client_url(&self) -> &str {
        &self.client_url
    }

    /// Returns the URL for workers.
    pub fn worker_url(&self) -> &str {
        &self.worker_url
    }

    /// Returns a pin of the certificate of the worker at `index`, read from its log.
    ///
    /// # Panics
    ///
    /// If the log has no fingerprint.
    pub fn worker_trust(&self, index: usize) -> Trust {
        let log = self.workers[index].log();
        let start = log.find("sha256:").expect("a worker logs its certificate");
        let pin = log[start..start + "sha256:".len() + 64].parse();
        Trust::Pin(pin.expect("a fingerprint"))
    }

    /// Returns the path of `name` in the cluster's temporary directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Connects to the pool.
    ///
    /// # Panics
    ///
    /// If the pool cannot be reached.
    pub fn pool(&self) -> Pool {
        Pool::connect(&self.client_url).expect("the pool is up")
    }

    /// Connects to the pool with a URL option such as `transport=grpc`, and with `options`.
    ///
    /// # Panics
    ///
    /// If the pool cannot be reached.
    pub fn pool_with(&self, option: &str, options: Options) -> Pool {
        let url = format!("{}&{option}", self.client_url);
        Pool::connect_with(url.parse().expect("the option fits"), options).expect("the pool is up")
    }
}
