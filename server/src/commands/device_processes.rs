//! Devices in processes of their own.
//!
//! Graphics drivers compile kernels inside the process that uses them, and some die
//! of it. So such a device has a worker process to itself, of which this one is the
//! parent, and a driver that takes its process down takes no other device along. A
//! process that ended is started again, ever later the more often it does.
//!
//! A child learns that its parent is gone, or wants it to end, when its stdin closes.

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

/// How often a child is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Pause before a child is started again: at first, at most, and how long it has to
/// run for the pause to be the first again.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(30);
const STEADY: Duration = Duration::from_secs(60);

/// What a child has beyond the time that sessions have to end.
const MARGIN: Duration = Duration::from_secs(4);

/// Workers of single devices. Dropping it ends them, and waits until they have ended.
pub(super) struct DeviceProcesses(Vec<Watched>);

struct Watched {
    /// Dropped to stop the child.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A child's device, and what it is told.
struct Task {
    device: DeviceSelection,
    node: NodeConfig,
    scheduler: PoolUrl,
    drain: Duration,
}

/// Parts the devices that `node` asks for into those this process runs, and those
/// that get one of their own. `alone` says that there is nothing else in this process
/// that a driver could take along.
pub(super) fn part(node: &NodeConfig, alone: bool) -> [Vec<DeviceSelection>; 2] {
    let devices = tensord_worker::chosen(&node.devices);
    if alone && devices.len() == 1 {
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
    /// When the system gives no thread to watch one.
    pub(super) fn start(
        devices: &[DeviceSelection],
        node: &NodeConfig,
        scheduler: &PoolUrl,
        drain: Duration,
    ) -> io::Result<Self> {
        let mut device_processes = Self(Vec::new());
        for (number, device) in (1..).zip(devices) {
            let (stop, stopped) = mpsc::channel();
            let task = Task {
                device: device.clone(),
                node: only(node, device, number),
                scheduler: scheduler.clone(),
                drain,
            };
            let thread = std::thread::Builder::new().name(format!("watch {device}"));
            device_processes.0.push(Watched {
                stop: Some(stop),
                thread: Some(thread.spawn(move || task.watch(&stopped))?),
            });
        }
        Ok(device_processes)
    }
}

impl Drop for DeviceProcesses {
    fn drop(&mut self) {
        // All at once, so that they end side by side.
        self.0.iter_mut().for_each(|watched| watched.stop = None);
        for thread in self
            .0
            .iter_mut()
            .filter_map(|watched| watched.thread.take())
        {
            // It has no reason to panic; if it did, its child's stdin is closed too.
            let _ = thread.join();
        }
    }
}

/// The part of `node` that is `device`, the `number`-th of its kind: a name and a port
/// of its own.
fn only(node: &NodeConfig, device: &DeviceSelection, number: u16) -> NodeConfig {
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

/// How long to wait before the next start, after `ran` and the pause before it.
fn pause_after(ran: Duration, before: Option<Duration>) -> Duration {
    match before {
        Some(before) if ran < STEADY => LAST_PAUSE.min(2 * before),
        _ => FIRST_PAUSE,
    }
}

impl Task {
    /// Keeps the child running until told to stop.
    fn watch(&self, stopped: &mpsc::Receiver<()>) {
        let mut pause = None;
        loop {
            let started = Instant::now();
            match self.spawn() {
                Ok(mut child) => match self.wait(&mut child, stopped) {
                    Some(status) if is_final(status) => {
                        // It said why in one line of its own.
                        return warn!("goes on without {}", self.device);
                    }
                    Some(status) => {
                        error!("the process of {} ended by itself ({status})", self.device);
                    }
                    None => return,
                },
                Err(e) => error!("cannot start a process for {}: {e}", self.device),
            }
            let next = pause_after(started.elapsed(), pause);
            info!("starting the process of {} again in {next:?}", self.device);
            if let Ok(()) | Err(RecvTimeoutError::Disconnected) = stopped.recv_timeout(next) {
                return;
            }
            pause = Some(next);
        }
    }

    /// Waits until the child ends by itself, which gives its status, or has to.
    fn wait(&self, child: &mut Child, stopped: &mpsc::Receiver<()>) -> Option<ExitStatus> {
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK) {
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
        let until = Instant::now() + self.drain + MARGIN;
        while Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK);
        }
        // Both fail when it has ended, which is as good.
        let _ = child.kill();
        let _ = child.wait();
        None
    }

    /// Everything but the kind of command goes through the environment: the URL is a
    /// secret, and arguments can be seen by everybody.
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

/// Whether starting again would change nothing: it is told wrong things, or its
/// device is not there.
fn is_final(status: ExitStatus) -> bool {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.is_some_and(|code| [failure::USAGE, failure::UNAVAILABLE].contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_while_a_process_keeps_failing() {
        let soon = Duration::from_millis(10);
        let mut pause = None;
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let next = pause_after(soon, pause);
            pauses.push(next.as_millis());
            pause = Some(next);
        }
        assert_eq!(
            pauses,
            [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]
        );
        assert_eq!(pause_after(STEADY, pause), FIRST_PAUSE);
    }
}
