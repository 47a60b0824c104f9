//! `tensord worker`: this host's devices, for a pool elsewhere.

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

/// Runs until asked to stop, or until the pool turns the worker away. A
/// scheduler that is not there yet, or not any more, is waited for.
pub(super) async fn run(config: WorkerConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let host = Host::start(config.node, config.url, config.drain, true).await?;
    tokio::select! {
        () = shutdown.requested() => {}
        () = stdin_closes(), if config.until_stdin_closes => {}
        refused = host.failed() => return Err(refused.into()),
        lost = host.lost_device() => {
            warn!("{lost}; starting this worker again");
            // No session is left that could go on, so there is nothing to wait for.
            host.drain(Duration::ZERO).await;
            return Err(start_again());
        }
    }
    host.drain(config.drain).await;
    Ok(())
}

/// Replaces this process by a new start of the program, with the same process id, arguments,
/// environment and stdin. All threads end, also those that an op keeps. Returns only if the
/// system refuses.
fn start_again() -> Failure {
    let error = std::env::current_exe().map_or_else(
        |e| e,
        |program| {
            let mut command = Command::new(program);
            command.args(std::env::args_os().skip(1)).exec()
        },
    );
    Failure::system("start this worker again")(error)
}

/// This host's devices: those that this process runs, and those apart.
pub(super) struct Host {
    own: Option<Worker>,
    device_processes: DeviceProcesses,
}

impl Host {
    /// Starts the workers of `node`'s devices. `alone` says that nothing else runs in
    /// this process.
    ///
    /// # Errors
    ///
    /// When none of the devices is to be had, or the system refuses something.
    pub(super) async fn start(
        node: NodeConfig,
        scheduler: PoolUrl,
        drain: Duration,
        alone: bool,
    ) -> Result<Self, Failure> {
        let asked = node.clone();
        let (node, identity) = identify(node)?;
        let parts = tokio::task::spawn_blocking(move || device_processes::part(&asked, alone));
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

    /// Waits until this process's own worker has joined its pool, if it has one.
    pub(super) async fn joined(&self) -> Result<(), tensord_worker::RefusedError> {
        match &self.own {
            Some(worker) => worker.joined().await,
            None => Ok(()),
        }
    }

    /// Ends when the scheduler refuses the worker, which it does not get over.
    pub(super) async fn failed(&self) -> tensord_worker::RefusedError {
        match &self.own {
            Some(worker) => worker.failed().await,
            None => std::future::pending().await,
        }
    }

    /// Waits until a device of this process is lost, as [`Worker::lost_device`] does. A device
    /// that has a process to itself is looked after there.
    async fn lost_device(&self) -> LostDevice {
        match &self.own {
            Some(worker) => worker.lost_device().await,
            None => std::future::pending().await,
        }
    }

    /// Leaves the pool in order.
    pub(super) async fn drain(self, deadline: Duration) {
        let Self {
            own,
            device_processes,
        } = self;
        let device_processes = tokio::task::spawn_blocking(move || drop(device_processes));
        if let Some(worker) = own {
            worker.drain(deadline).await;
        }
        // It has no reason to panic, and nothing more could be done.
        let _ = device_processes.await;
    }
}

/// Ends when whoever holds the other end of stdin closes it, or is gone.
async fn stdin_closes() {
    let (closed, closes) = tokio::sync::oneshot::channel();
    // Not a task of the runtime: nothing ends a read.
    std::thread::spawn(move || {
        let mut byte = [0];
        while std::io::stdin()
            .read(&mut byte)
            .is_ok_and(|count| count > 0)
        {}
        // Nobody waits any more if the process ends.
        let _ = closed.send(());
    });
    let _ = closes.await;
}

/// Who the worker of `node` is, by the key that it keeps. Where there is no place for a key
/// it has another one at each start, and so another name: its own belongs to whoever keeps
/// a key for it.
fn identify(node: NodeConfig) -> Result<(NodeConfig, Arc<Identity>), Failure> {
    let kept = node.state.as_deref().map(|path| {
        let state = StateDir::open(path)?;
        state.worker_identity(&node.name)
    });
    let why = match kept {
        Some(Ok(identity)) => return Ok((node, Arc::new(identity))),
        // Others could take the key, or have; or there is one that cannot be read.
        Some(Err(e)) if !matches!(e, StateError::Io { .. }) => return Err(e.into()),
        Some(Err(e)) => e.to_string(),
        None => "there is no state directory".into(),
    };
    let pem = IdentityPem::self_signed().and_then(|pem| Identity::from_pem(&pem));
    let identity = pem.map_err(|e| StateError::Key(e.to_string()))?;
    let name = format!("{}-{}", node.name, identity.fingerprint().short());
    warn!("this worker cannot keep a key ({why}), so it enrols anew at each start, now as {name}");
    Ok((NodeConfig { name, ..node }, Arc::new(identity)))
}

/// What a worker configured as `node` is told, which joins the pool at `scheduler`.
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
