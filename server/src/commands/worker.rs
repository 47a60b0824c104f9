//! `tensord worker`: offers this host's devices to a pool.

use std::{os::unix::process::CommandExt, process::Command, sync::Arc, time::Duration};

use tensord_transport::{Identity, PoolUrl, identity::IdentityPem};
use tensord_worker::{CustomOps, Worker, WorkerOptions};
use tracing::warn;

#[cfg(target_os = "linux")]
use crate::lease_process;
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
    let worker = start(config.node, config.url).await?;
    tokio::select! {
        () = shutdown.requested() => {}
        refused = worker.failed() => return Err(refused.into()),
        lost = worker.lost_device() => {
            warn!("{lost}; restarting this worker");
            // No session can go on, so draining has nothing to wait for.
            worker.drain(Duration::ZERO).await;
            return Err(reexec());
        }
    }
    worker.drain(config.drain).await;
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

/// Starts the worker of this host's devices.
///
/// # Errors
///
/// If the worker cannot start, or its key cannot be used.
pub(super) async fn start(node: NodeConfig, scheduler: PoolUrl) -> Result<Worker, Failure> {
    let (node, identity) = identify(node)?;
    Ok(Worker::start(options(node, identity, scheduler)).await?)
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
        snapshot_bytes,
        snapshot_store,
        collective_timeout,
        op_timeout,
        bucket_bytes,
        kernel_cache,
        state: _,
        log,
        secret_paths,
    } = node;
    #[cfg(target_os = "linux")]
    let isolation = lease_process::isolation(&log, secret_paths);
    #[cfg(not(target_os = "linux"))]
    let isolation = {
        // Lease processes exist only on Linux; elsewhere, leases run in this process.
        let _ = (log, secret_paths);
        tensord_worker::Isolation::None
    };
    WorkerOptions {
        name,
        listen,
        advertise,
        devices,
        identity,
        scheduler,
        memory_bytes,
        cache_bytes,
        snapshot_bytes,
        snapshot_store,
        collective_timeout,
        op_timeout,
        bucket_bytes,
        kernel_cache,
        custom_ops: CustomOps::new(),
        isolation,
    }
}
