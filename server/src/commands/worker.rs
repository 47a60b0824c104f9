//! `tensord worker`: offers this host's devices to a pool.

use std::{io::Read, os::unix::process::CommandExt, process::Command, sync::Arc, time::Duration};

use tensord_transport::{Identity, PoolUrl, identity::IdentityPem};
use tensord_worker::{CustomOps, LostDevice, Worker, WorkerOptions};
use tracing::warn;

use super::device_processes::{self, DeviceProcesses};
use crate::{
    config::{NodeConfig, WorkerConfig},
    failure::Failure,
    shutdown::Shutdown,
    state::{StateDir, StateError},
};

/// Runs until a stop is requested or the scheduler refuses the worker. If the scheduler is
/// out of reach, the worker tries again until it can join. If a device is lost, replaces
/// this process by a new start of the program.
pub(super) async fn run(config: WorkerConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let host = HostWorkers::start(config.node, config.url, config.drain, true).await?;
    tokio::select! {
        () = shutdown.requested() => {}
        () = stdin_closed(), if config.until_stdin_closes => {}
        refused = host.failed() => return Err(refused.into()),
        lost = host.lost_device() => {
            warn!("{lost}; restarting this worker");
            // No session can go on, so draining has nothing to wait for.
            host.drain(Duration::ZERO).await;
            return Err(reexec());
        }
    }
    host.drain(config.drain).await;
    Ok(())
}

/// Replaces this process by a new start of the program, with the same process id,
/// arguments, environment and stdin. All threads end, including those blocked in an op.
/// Returns only on an error.
fn reexec() -> Failure {
    let error = std::env::current_exe().map_or_else(
        |e| e,
        |program| {
            let mut command = Command::new(program);
            command.args(std::env::args_os().skip(1)).exec()
        },
    );
    Failure::system("restart this worker")(error)
}

/// This host's devices: those that this process runs, and those with processes of their
/// own.
pub(super) struct HostWorkers {
    own: Option<Worker>,
    device_processes: DeviceProcesses,
}

impl HostWorkers {
    /// Starts the workers of `node`'s devices. `owns_process` means that nothing else runs in
    /// this process.
    ///
    /// # Errors
    ///
    /// If this process's worker cannot start, its key cannot be used, or a system call
    /// fails.
    pub(super) async fn start(
        node: NodeConfig,
        scheduler: PoolUrl,
        drain: Duration,
        owns_process: bool,
    ) -> Result<Self, Failure> {
        let requested = node.clone();
        let (node, identity) = identify(node)?;
        let parts = tokio::task::spawn_blocking(move || {
            device_processes::partition_devices(&requested, owns_process)
        });
        let parts = parts.await.map_err(std::io::Error::other);
        let [devices, device_processes] = parts.map_err(Failure::system("look for devices"))?;
        let device_processes = DeviceProcesses::start(&device_processes, &node, &scheduler, drain);
        let device_processes =
            device_processes.map_err(Failure::system("watch processes of devices"))?;
        let own = match devices.is_empty() {
            true => None,
            false => {
                let node = NodeConfig { devices, ..node };
                Some(Worker::start(options(node, identity, scheduler)).await?)
            }
        };
        Ok(Self {
            own,
            device_processes,
        })
    }

    /// Waits until this process's own worker, if it has one, has joined its pool.
    pub(super) async fn joined(&self) -> Result<(), tensord_worker::RefusedError> {
        match &self.own {
            Some(worker) => worker.joined().await,
            None => Ok(()),
        }
    }

    /// Waits until the scheduler refuses this process's own worker for good.
    pub(super) async fn failed(&self) -> tensord_worker::RefusedError {
        match &self.own {
            Some(worker) => worker.failed().await,
            None => std::future::pending().await,
        }
    }

    /// Waits until a device of this process is lost, as [`Worker::lost_device`] does.
    /// A device with a process of its own is watched by that process instead.
    async fn lost_device(&self) -> LostDevice {
        match &self.own {
            Some(worker) => worker.lost_device().await,
            None => std::future::pending().await,
        }
    }

    /// Leaves the pool: sessions of this process have `deadline` to end. Ends the processes
    /// of devices at the same time.
    pub(super) async fn drain(self, deadline: Duration) {
        let Self {
            own,
            device_processes,
        } = self;
        let device_processes = tokio::task::spawn_blocking(move || drop(device_processes));
        if let Some(worker) = own {
            worker.drain(deadline).await;
        }
        // The task should not panic, and an error could not be handled here.
        let _ = device_processes.await;
    }
}

/// Waits until stdin is closed, which also happens when the process at its other end is
/// gone.
async fn stdin_closed() {
    let (closed, closes) = tokio::sync::oneshot::channel();
    // A thread, not a task of the runtime, as a blocking read cannot be cancelled.
    std::thread::spawn(move || {
        let mut byte = [0];
        while std::io::stdin()
            .read(&mut byte)
            .is_ok_and(|count| count > 0)
        {}
        // The receiver is gone if the process ends for another reason.
        let _ = closed.send(());
    });
    let _ = closes.await;
}

/// Returns the worker's identity, from the key in its state directory. If the key cannot be
/// kept, returns a new identity and a name with the key's fingerprint: the plain name
/// belongs to one key, so a worker with a new key at each start cannot enrol under it
/// again.
fn identify(node: NodeConfig) -> Result<(NodeConfig, Arc<Identity>), Failure> {
    let kept = node.state.as_deref().map(|path| {
        let state = StateDir::open(path)?;
        state.worker_identity(&node.name)
    });
    let why = match kept {
        Some(Ok(identity)) => return Ok((node, Arc::new(identity))),
        // Stops: other users could have replaced the key, or the key is damaged.
        Some(Err(e)) if !matches!(e, StateError::Io { .. }) => return Err(e.into()),
        Some(Err(e)) => e.to_string(),
        None => "it has no state directory".into(),
    };
    let pem = IdentityPem::self_signed().and_then(|pem| Identity::from_pem(&pem));
    let identity = pem.map_err(|e| StateError::Key(e.to_string()))?;
    let name = format!("{}-{}", node.name, identity.fingerprint().short());
    warn!(
        "this worker cannot keep its key ({why}), so it enrols under a new name at each start; the name is now {name}"
    );
    Ok((NodeConfig { name, ..node }, Arc::new(identity)))
}

/// Returns the options of the worker for `node`, which joins the pool at `scheduler`.
fn options(node: NodeConfig, identity: Arc<Identity>, scheduler: PoolUrl) -> WorkerOptions {
    let NodeConfig {
        name,
        listen,
        advertise,
        devices,
        memory_bytes,
        cache_bytes,
        collective_timeout,
        op_timeout,
        bucket_bytes,
        kernel_cache,
        state: _,
    } = node;
    WorkerOptions {
        name,
        listen,
        advertise,
        devices,
        identity,
        scheduler,
        memory_bytes,
        cache_bytes,
        collective_timeout,
        op_timeout,
        bucket_bytes,
        kernel_cache,
        custom_ops: CustomOps::new(),
    }
}
