//! `tensord worker`: this host's devices, for a pool elsewhere.

use tensord_transport::PoolUrl;
use tensord_worker::{Worker, WorkerOptions};

use crate::{
    config::{NodeConfig, WorkerConfig},
    failure::Failure,
    shutdown::Shutdown,
};

/// Runs until asked to stop, or until the pool turns the worker away. A
/// scheduler that is not there yet, or not any more, is waited for.
pub(super) async fn run(config: WorkerConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let worker = Worker::start(options(config.node, config.url)).await?;
    tokio::select! {
        () = shutdown.requested() => {}
        refused = worker.failed() => return Err(refused.into()),
    }
    worker.drain(config.drain).await;
    Ok(())
}

/// What a worker configured as `node` is told, which joins the pool at `scheduler`.
pub(super) fn options(node: NodeConfig, scheduler: PoolUrl) -> WorkerOptions {
    let NodeConfig {
        name,
        listen,
        advertise,
        devices,
        memory_bytes,
        cache_bytes,
        collective_timeout,
        bucket_bytes,
    } = node;
    WorkerOptions {
        name,
        listen,
        advertise,
        devices,
        scheduler,
        memory_bytes,
        cache_bytes,
        collective_timeout,
        bucket_bytes,
    }
}
