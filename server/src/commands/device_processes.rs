//! Devices that have a worker process each.
//!
//! Graphics drivers compile kernels inside the process that uses them, and some crash
//! while they do. So each such device gets a worker process to itself, as a child of this
//! process, and a crash of its driver affects no other device. A child that ended is
//! started again, after a pause that doubles each time up to [`MAX_BACKOFF`].
//!
//! A child ends when its stdin closes, which happens when its parent requests it or is
//! gone.

use std::{
    io,
    net::SocketAddr,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tensord_transport::PoolUrl;
use tensord_worker::DeviceSelection;
use tracing::{error, info, warn};

use crate::{config::NodeConfig, failure};

/// How often a child's state is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Pause before a child is started again: the first, the longest, and how long the child
/// has to run for the pause to be reset to the first.
const MIN_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(60);

/// How long a child has to exit after the time in which its sessions have to end.
const EXIT_GRACE: Duration = Duration::from_secs(4);

/// Worker processes of one device each. Dropping this ends them, and blocks until they have
/// exited.
pub(super) struct DeviceProcesses(Vec<SupervisedProcess>);

struct SupervisedProcess {
    /// Stops the child when dropped.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A child's device and settings.
struct Supervisor {
    device: DeviceSelection,
    node: NodeConfig,
    scheduler: PoolUrl,
    drain: Duration,
}

/// Divides the devices of `node` into those that this process runs, and those that get
/// processes of their own. `owns_process` means that a driver's crash would end nothing else in
/// this process.
pub(super) fn partition_devices(
    node: &NodeConfig,
    owns_process: bool,
) -> [Vec<DeviceSelection>; 2] {
    let devices = tensord_worker::resolve_devices(&node.devices);
    if owns_process && devices.len() == 1 {
        return [devices, Vec::new()];
    }
    let (device_processes, own) = devices
        .into_iter()
        .partition(DeviceSelection::has_graphics_driver);
    [own, device_processes]
}

impl DeviceProcesses {
    /// Starts a worker process for each of `devices`.
    ///
    /// # Errors
    ///
    /// If a thread that watches a process cannot be started.
    pub(super) fn start(
        devices: &[DeviceSelection],
        node: &NodeConfig,
        scheduler: &PoolUrl,
        drain: Duration,
    ) -> io::Result<Self> {
        let mut device_processes = Self(Vec::new());
        for (number, device) in (1..).zip(devices) {
            let (stop, stopped) = mpsc::channel();
            let task = Supervisor {
                device: device.clone(),
                node: config_for_device(node, device, number),
                scheduler: scheduler.clone(),
                drain,
            };
            let thread = std::thread::Builder::new().name(format!("watch {device}"));
            device_processes.0.push(SupervisedProcess {
                stop: Some(stop),
                thread: Some(thread.spawn(move || task.supervise(&stopped))?),
            });
        }
        Ok(device_processes)
    }
}

impl Drop for DeviceProcesses {
    fn drop(&mut self) {
        // Stops all before it waits for one, so that they end in parallel.
        self.0.iter_mut().for_each(|watched| watched.stop = None);
        for thread in self
            .0
            .iter_mut()
            .filter_map(|watched| watched.thread.take())
        {
            // The thread should not panic; if it did, its child's stdin is closed, too.
            let _ = thread.join();
        }
    }
}

/// Returns the settings of the process for `device` alone: those of `node`, with a name of
/// its own, and with its port raised by `number` unless it is 0.
fn config_for_device(node: &NodeConfig, device: &DeviceSelection, number: u16) -> NodeConfig {
    let port = match node.listen.port() {
        0 => 0,
        port => port.saturating_add(number),
    };
    NodeConfig {
        name: format!("{}.{}-{}", node.name, device.kind, device.index),
        listen: SocketAddr::new(node.listen.ip(), port),
        devices: vec![device.clone()],
        ..node.clone()
    }
}

/// Returns the pause before the next start. The process ran for `ran`, after the pause
/// `before`.
fn next_backoff(ran: Duration, before: Option<Duration>) -> Duration {
    match before {
        Some(before) if ran < BACKOFF_RESET_AFTER => MAX_BACKOFF.min(2 * before),
        _ => MIN_BACKOFF,
    }
}

impl Supervisor {
    /// Keeps the child running until `stopped` is disconnected, or starting it again would
    /// not help.
    fn supervise(&self, stopped: &mpsc::Receiver<()>) {
        let mut pause = None;
        loop {
            let started = Instant::now();
            match self.spawn() {
                Ok(mut child) => match self.wait(&mut child, stopped) {
                    Some(status) if is_permanent_failure(status) => {
                        // The child has logged the reason itself.
                        return warn!(
                            "the process of {} cannot run; this worker continues without the device",
                            self.device
                        );
                    }
                    Some(status) => {
                        error!(
                            "the process of {} ended unexpectedly ({status})",
                            self.device
                        );
                    }
                    None => return,
                },
                Err(e) => error!("cannot start a process for {}: {e}", self.device),
            }
            let next = next_backoff(started.elapsed(), pause);
            info!(
                "the process of {} will be restarted in {next:?}",
                self.device
            );
            if let Ok(()) | Err(RecvTimeoutError::Disconnected) = stopped.recv_timeout(next) {
                return;
            }
            pause = Some(next);
        }
    }

    /// Waits until the child exits by itself, and returns its status. If `stopped` is
    /// disconnected first, or the child cannot be watched, ends it and returns `None`.
    fn wait(&self, child: &mut Child, stopped: &mpsc::Receiver<()>) -> Option<ExitStatus> {
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(POLL_INTERVAL) {
            match child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => return Some(status),
                Err(e) => {
                    error!("cannot watch the process of {}: {e}", self.device);
                    break;
                }
            }
        }
        drop(child.stdin.take());
        let until = Instant::now() + self.drain + EXIT_GRACE;
        while Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(POLL_INTERVAL);
        }
        // Both fail if the child has exited, which is the goal.
        let _ = child.kill();
        let _ = child.wait();
        None
    }

    /// Starts the child. It gets its settings through the environment, as the URL is a
    /// secret, and every user of the host can see a process's arguments.
    fn spawn(&self) -> io::Result<Child> {
        let node = &self.node;
        let kib = |bytes: u64| match bytes {
            0 => "0".into(),
            bytes => format!("{}KiB", bytes.div_ceil(1 << 10)),
        };
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["worker", "--until-stdin-closes"])
            .env_remove("TENSORD_CONFIG")
            .env_remove("TENSORD_URL_FILE")
            .env("TENSORD_URL", self.scheduler.reveal())
            .env("TENSORD_DEVICES", self.device.to_string())
            .env("TENSORD_WORKER_NAME", &node.name)
            .env("TENSORD_WORKER_LISTEN", node.listen.to_string())
            .env("TENSORD_WORKER_UPLOAD_CACHE", kib(node.cache_bytes))
            .env("TENSORD_DRAIN_SECONDS", self.drain.as_secs().to_string())
            .env(
                "TENSORD_COLLECTIVE_TIMEOUT",
                node.collective_timeout.as_secs().to_string(),
            )
            .env("TENSORD_OP_TIMEOUT", node.op_timeout.as_secs().to_string());
        let optional = [
            ("TENSORD_WORKER_ADVERTISE", node.advertise.clone()),
            ("TENSORD_WORKER_MEMORY", node.memory_bytes.map(kib)),
            ("TENSORD_WORKER_BUCKET_SIZE", node.bucket_bytes.map(kib)),
        ];
        for (name, value) in optional {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(state) = &node.state {
            command.env("TENSORD_STATE", state);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()
    }
}

/// Returns whether starting the process again would not help: its settings are wrong, or
/// its device does not work.
fn is_permanent_failure(status: ExitStatus) -> bool {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.is_some_and(|code| [failure::USAGE, failure::UNAVAILABLE].contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_while_a_process_keeps_failing() {
        let soon = Duration::from_millis(10);
        let mut pause = None;
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let next = next_backoff(soon, pause);
            pauses.push(next.as_millis());
            pause = Some(next);
        }
        assert_eq!(
            pauses,
            [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]
        );
        assert_eq!(next_backoff(BACKOFF_RESET_AFTER, pause), MIN_BACKOFF);
    }
}
